"""A peer's first round: who begin a run together hear of each other while rounds go by, and so do
newcomers."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import pytest

from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.peer import Peer
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 12
EARLY = "peer-5"


@pytest.mark.parametrize("late", ["peer-1", "peer-9"])
@pytest.mark.parametrize("deaf_s", [0.2, 3.0])
def test_who_has_not_heard_of_the_others_makes_no_update_without_them(
    tmp_path: Path, late: str, deaf_s: float
) -> None:
    """It begins at the first round, as they did, and its feeder says that the round is over.
    Whichever of the two has the lower peer id: it is not the one that was alone whose parameters
    hold."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        peers = [
            swarm.start("peer-0", stage=0),
            swarm.start(EARLY, stage=1),
            swarm.start(late, stage=1, feeds=False),
        ]
        first, early, other = peers
        heard_at = math.inf

        def hears_late(peer: Peer, name: str) -> None:
            merge = peer.gossip.view.merge

            def hears(record: Record, now: float) -> bool:
                return (record.peer_id != name or now >= heard_at) and merge(record, now)

            peer.gossip.view.merge = hears  # type: ignore[method-assign]

        for peer, name in ((first, late), (early, late), (other, EARLY)):
            hears_late(peer, name)
        await swarm.until(lambda: early.gossip.own.round >= 1)
        assert other.replica is not None
        assert other.replica.round == 0
        heard_at = loop.time() + deaf_s
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4
        assert early.gossip.own.totals.get("samples_lost", 0) == 0

    in_virtual_time(scenario, spec)


def test_two_that_begin_a_stage_unknown_to_each_other_make_one_update(tmp_path: Path) -> None:
    """A feeder knows both and gives work to both. They begin with the same parameters, and each
    waits for the samples that it misses: nobody has to fetch anything."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        swarm.start("peer-0", stage=0)
        two = [swarm.start(name, stage=1, feeds=False) for name in ("peer-1", "peer-2")]
        heard_at = math.inf

        def hears_late(peer: Peer, name: str) -> None:
            merge = peer.gossip.view.merge

            def hears(record: Record, now: float) -> bool:
                return (record.peer_id != name or now >= heard_at) and merge(record, now)

            peer.gossip.view.merge = hears  # type: ignore[method-assign]

        for peer, other in (two, two[::-1]):
            hears_late(peer, other.transport.peer_id)
        await swarm.until(lambda: all(p.gossip.own.declared[1] > 0 for p in two))
        assert [p.gossip.own.declared[0] for p in two] == [0, 0]
        heard_at = loop.time() + 3.0
        await swarm.until_round(ROUNDS)
        for peer in two:
            totals = peer.gossip.own.totals
            assert not totals.get("samples_lost"), totals
            assert not totals.get("diverged"), totals
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stage", [0, 1])
def test_a_newcomer_is_known_to_its_stage_before_it_computes(
    tmp_path: Path, stage: int, seed: int
) -> None:
    """Its news take longer than a round to the one that makes the update, and others know of it:
    the round would end without its gradient."""
    rounds = 2 * ROUNDS  # at stage 0 the one that hears late has to try it too
    spec = tiny_spec(tmp_path, num_stages=2, rounds=rounds)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", stage=0)
        swarm.start("peer-1", stage=1)
        hear_late(swarm.members[f"peer-{stage}"].peer.gossip, "late")
        await swarm.until_round(3)
        await asyncio.sleep(random.Random(seed).uniform(0.0, 0.5))
        late = swarm.start("late", stage=stage)
        await swarm.until(lambda: late.gossip.own.state == ACTIVE)
        assert late.gossip.own.round < rounds - 2
        await swarm.until_round(rounds)
        assert swarm.total("samples_lost") == 0
        trainer = replay(spec, swarm.counted, rounds)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def hear_late(gossip: Gossip, name: str) -> None:
    """That a peer is active is heard from itself only, and late."""
    hears, merge, told = handler_of(gossip.transport, "records"), gossip.view.merge, asyncio.Event()

    async def hears_later(request: Request) -> Message:
        if request.remote == name:
            await asyncio.sleep(0.9)
            told.set()
        return await hears(request)

    def merges(record: Record, now: float) -> bool:
        is_early = record.peer_id == name and record.state == ACTIVE and not told.is_set()
        return not is_early and merge(record, now)

    gossip.transport.handle("records", hears_later)
    gossip.view.merge = merges  # type: ignore[method-assign]
