"""Contributors and primaries of an exchange whose views of each other differ."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import Unreachable
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.timing import BULK_S
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import DEAD, Ballot, Roster
from swarmnet.swarm.update.exchange.exchange import Exchange
from swarmnet.wire import Message
from tests.swarm.handlers import intercept_calls
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

STRUCK = 3
ROUNDS = 6
AT_ONCE_S, DEADLINE_S = 8.0, 20.0
"""Virtual seconds for a round, which takes half a one; and until the deadline for contributions."""


def test_replicas_that_begin_with_different_primaries_agree_on_one(tmp_path: Path) -> None:
    """Two owners take each other for a shard's primary, and send everybody back and forth."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, 3)
        await swarm.until_round(STRUCK)
        for name, other in (("peer-0", "peer-1"), ("peer-1", "peer-0"), ("peer-2", "peer-0")):
            ownership = swarm.members[name].peer.exchanges.ownership
            roster = ownership.roster

            def apart(r: int, j: int, other: str = other, roster=roster) -> Roster:  # type: ignore[no-untyped-def]
                found = roster(r, j)
                differs = r == STRUCK and j == 0
                return replace(found, ballot=Ballot(1, other)) if differs else found

            ownership.roster = apart  # type: ignore[method-assign]
        await swarm.until_round(STRUCK + 1, AT_ONCE_S)
        await swarm.until_round(ROUNDS)
        assert swarm.total("late_shards") == 0
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_newcomers_are_not_waited_for_in_exchanges_of_rounds_before_theirs(
    tmp_path: Path, mode: str
) -> None:
    """In mode `delayed` such an exchange is under way when they join."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=3 * ROUNDS, sync={"mode": mode})

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, 2)
        await swarm.until_round(STRUCK)
        swarm.start("late")
        exchanges = swarm.members["peer-0"].peer.exchanges
        view = exchanges.gossip.view

        def is_active() -> bool:
            record = view.get("late")
            return record is not None and record.state == ACTIVE

        await swarm.until(is_active)
        joined = view.get("late")
        assert joined is not None
        waited_for = {
            r: "late" in {c.peer_id for c in exchanges.members.contributors(r)}
            for r in (joined.round - 1, joined.round)
        }
        assert waited_for == {joined.round - 1: False, joined.round: True}

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_a_member_that_hangs_in_an_earlier_round_holds_nobody_up_beyond_the_deadline(
    tmp_path: Path,
) -> None:
    """It lives, owns no shard, and does not begin the next exchanges."""
    spec = tiny_spec(
        tmp_path, num_stages=1, rounds=2 * ROUNDS, sync={"replication": 1, "shard_parameters": 8192}
    )

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, 6)
        await swarm.until_round(STRUCK)
        peers = {name: member.peer for name, member in swarm.members.items()}
        placement = peers["peer-0"].exchanges.ownership.placement(STRUCK)
        hung = peers.pop(
            min(n for n in peers if not placement.owned_by(peers[n].gossip.own.peer_id))
        )
        hung.exchanges.make = hang  # type: ignore[method-assign]
        for r in range(STRUCK + 1, STRUCK + 5):
            await swarm.until(
                lambda r=r: all(p.replica.round >= r for p in peers.values()),  # type: ignore[misc]
                BULK_S + AT_ONCE_S,
            )
        assert hung.replica.round <= STRUCK + 1

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed", "local"])
def test_a_member_that_dies_in_an_exchange_is_dead_in_it_and_not_forgotten(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever leads asks all that live before it gives a result out, and lets it in if it
    comes back (`protocol.update.shard_rules.has_lost_one`)."""
    sync: dict[str, Any] = {"mode": mode}
    if mode == "local":
        sync["local_steps"] = 2
    spec = tiny_spec(tmp_path, num_stages=1, rounds=3 * ROUNDS, sync=sync)
    seen: dict[str, set[str]] = {}
    feed = Exchange.feed

    async def scenario(swarm: Swarm) -> None:
        def feeds(self: Exchange, shard: int, event: on.Event) -> None:
            if isinstance(event, on.Seen) and "dies" in event.members and "dies" in died:
                seen.setdefault(event.members["dies"].life, set()).add(str(self.number))
            feed(self, shard, event)

        died: list[str] = []
        monkeypatch.setattr(Exchange, "feed", feeds)
        for name in ("peer-0", "peer-1", "dies"):
            swarm.start(name, stage=0)
        await swarm.until_round(STRUCK)
        transport = swarm.members["dies"].peer.transport

        async def die(*_: Any) -> Message:
            await asyncio.sleep(0.5)  # the others have begun, and wait for it
            if not died:
                died.append("dies")
                swarm.kill("dies")
            raise Unreachable("it is dead")

        intercept_calls(transport, "reduce", die)
        await swarm.until_round(2 * ROUNDS)
        assert seen.get(DEAD)

    in_virtual_time(scenario, spec)
