"""A replica that was cut off comes back to a stage that went on without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnet.protocol.membership.records import ACTIVE
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
