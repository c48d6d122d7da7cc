"""A replica that was cut off comes back to a stage that went on without it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.transport import memory
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 32
BACK_WITHIN_S = 10.0


@pytest.mark.parametrize(("rounds_away", "in_update"), [(2, False), (12, False), (12, True)])
def test_who_was_cut_off_fetches_the_stage_again(
    tmp_path: Path, rounds_away: int, in_update: bool
) -> None:
    """It neither ends nor holds the others up, wherever it was when the others went on."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        for i in range(6):
            swarm.start(f"peer-{i}", stage=i % 2, feeds=i < 2)
        await swarm.until_round(3)
        # Two rounds later it is back in the middle of one. At the end of one it would lose samples.
        await asyncio.sleep(0.3)
        away, others = "peer-5", [f"peer-{i}" for i in range(5)]
        if in_update:
            replica = swarm.members[away].peer.replica
            assert replica is not None
            await swarm.until(lambda: replica.closed)
        for other in others:
            swarm.hub.partition(away, other)

        def newest() -> int:
            rounds = [swarm.members[o].peer.gossip.own.round for o in others]
            return min(rounds)

        left_at = newest()
        began = loop.time()
        await swarm.until(lambda: newest() >= left_at + rounds_away)
        took_s = loop.time() - began
        for other in others:
            swarm.hub.heal(away, other)
        healed, healed_in = loop.time(), newest()
        back = swarm.members[away].peer.gossip
        await swarm.until(
            lambda: back.own.state == ACTIVE and back.own.round > healed_in, BACK_WITHIN_S
        )
        # The others' pace is about what it was.
        per_round_s = (loop.time() - healed) / max(1, newest() - healed_in)
        assert per_round_s < 3 * took_s / rounds_away + 1.0
        await swarm.until_round(ROUNDS)
        model = swarm.parameters()  # the same bits at every replica
        if swarm.total("samples_lost"):
            assert in_update, "what it had not yet pushed was lost with it, and that is said"
            return
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(model, trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_a_feeder_that_fetches_its_stage_again_holds_up_nobody(tmp_path: Path) -> None:
    """In the middle of a round of which it has launched a part; its donor is slow."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2, feeds=i % 2 == 0)
        await swarm.until_round(3)
        peer, donor = swarm.members["peer-2"].peer, swarm.members["peer-0"].peer
        give = handler_of(donor.transport, "fetch_parameters")

        async def slowly(request: Request) -> Message:
            await asyncio.sleep(30.0)
            reply: Message = await give(request)
            return reply

        donor.transport.handle("fetch_parameters", slowly)
        replica = peer.replica
        assert replica is not None

        def has_launched_a_part() -> bool:
            count = peer.gossip.own.count(replica.round)
            return len(count.launched) > 0 and not count.sealed and replica.is_open(replica.round)

        await swarm.until(has_launched_a_part)
        r, at = replica.round, loop.time()
        replica.digests = bytes(len(replica.digests))  # as after a partition
        peer.gossip.update(digests=replica.digests)
        await swarm.until(lambda: swarm.total("diverged") == 1)
        assert loop.time() - at < 1.0
        await swarm.until(lambda: donor.gossip.own.round > r)
        assert loop.time() - at < 5.0
        await swarm.until_round(ROUNDS)
        swarm.parameters()  # the same bits at every replica

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(("cut_from", "again_s"), [("partner", 12.0), ("all", 60.0)])
def test_who_is_cut_off_again_before_it_has_moments_begins_none_anew(
    tmp_path: Path, cut_from: str, again_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the stage's parameters again, and the moments are on their way: with the other replica
    of its stage out of reach, and then the norm missing too, it would step on empty ones."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4000)
    monkeypatch.setattr(memory, "UNREACHABLE_AFTER_S", 5.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2, speed=0.15)
        await swarm.until_round(3)
        away, partner, others = "peer-3", "peer-1", ["peer-0", "peer-1", "peer-2"]
        peer, other = swarm.members[away].peer, swarm.members[partner].peer
        for name in others:
            swarm.hub.partition(away, name)
        left_in = peer.gossip.own.round
        await swarm.until(lambda: other.gossip.own.round > left_in + 2)
        give = handler_of(other.transport, "fetch_optimizer")

        async def slowly(request: Request) -> Message:
            await asyncio.sleep(6.0)
            reply: Message = await give(request)
            return reply

        other.transport.handle("fetch_optimizer", slowly)
        for name in others:
            swarm.hub.heal(away, name)
        replica = peer.replica
        assert replica is not None

        exchanges, is_parted = peer.exchanges, asyncio.Event()
        assert exchanges is not None
        parted, update = [partner] if cut_from == "partner" else others, exchanges.make

        async def cut_off(*args: Any, **how: Any) -> None:
            if not is_parted.is_set() and replica.ledger.num_tokens(replica.round):
                assert replica.round > left_in + 2
                assert not replica.optimizer.owned()
                for name in parted:
                    swarm.hub.partition(away, name)
                is_parted.set()
            await update(*args, **how)

        exchanges.make = cut_off  # type: ignore[method-assign]
        await is_parted.wait()
        await asyncio.sleep(again_s)
        for name in parted:
            swarm.hub.heal(away, name)
        healed_in = other.gossip.own.round
        await swarm.until(lambda: peer.gossip.own.round > healed_in + 2, BACK_WITHIN_S)
        assert swarm.total("shard_reset") == swarm.total("shard_stale") == 0
        await swarm.until(lambda: bool(replica.optimizer.owned()), 60.0)

    in_virtual_time(scenario, spec, seed=1, is_synthetic=True)
