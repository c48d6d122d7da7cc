"""How soon a peer that falls silent is noticed, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnet.protocol.membership.failure_detector import PROBE_PART
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

NOTICED_WITHIN_S = 2.0
WAITED_FOR_S = 15.0
"""It may only have stalled (`test_stalls`)."""


def test_an_update_does_not_wait_long_for_a_silent_replica(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=60)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(10)
        name = next(n for n, m in swarm.members.items() if m.peer.gossip.own.stage == 1)
        replica = swarm.members[name].peer.replica
        assert replica is not None
        is_closing, close = asyncio.Event(), replica.transitions.close_round

        async def close_round() -> None:
            await close()
            is_closing.set()

        replica.transitions.close_round = close_round  # type: ignore[method-assign]
        await is_closing.wait()  # its part of the update is under way
        swarm.hub.freeze(name)
        del swarm.members[name]
        await swarm.until_round(max(swarm.rounds()) + 3, limit_s=WAITED_FOR_S)

    in_virtual_time(scenario, spec, is_synthetic=True)


@pytest.mark.parametrize(("num_stages", "stage", "seed"), [(8, 1, 0), (8, 1, 9), (8, 7, 0)])
def test_in_a_deep_pipeline_it_is_noticed_as_soon(
    tmp_path: Path, num_stages: int, stage: int, seed: int
) -> None:
    """Whoever calls it asks it, and does not wait out the time for all stages behind it: after a
    part of the deadline of such calls, and as long again for the answer."""
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=60)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        swarm.start_grid(num_stages, 2)
        await swarm.until_round(10)
        name = next(n for n, m in swarm.members.items() if m.peer.gossip.own.stage == stage)
        silent = swarm.members[name]
        await swarm.until(lambda: silent.peer.steps.num_in_flight > 0)
        callers = [m.peer for m in swarm.members.values() if m.peer.gossip.own.stage == stage - 1]
        deadline_s = max(p.dispatcher.router(stage).deadline_s(name) for p in callers)
        assert swarm.total("rerouted") == 0
        swarm.hub.freeze(name)
        del swarm.members[name]
        frozen_at = loop.time()
        await swarm.until(lambda: swarm.total("rerouted") > 0, limit_s=10)
        noticed_s = loop.time() - frozen_at
        assert noticed_s <= max(NOTICED_WITHIN_S, 2 * PROBE_PART * deadline_s)

    in_virtual_time(scenario, spec, is_synthetic=True, seed=seed)


def test_a_silent_replica_is_noticed_within_two_seconds_and_used_again(tmp_path: Path) -> None:
    """Service times of about 50 ms; nothing closes, the peer just says nothing any more."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=24)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        swarm.start_grid(2, 2)
        await swarm.until_round(5)
        name = next(n for n, m in swarm.members.items() if m.peer.gossip.own.stage == 1)
        silent = swarm.members[name]
        await swarm.until(lambda: silent.peer.steps.num_in_flight > 0)  # in the middle of its work
        swarm.hub.freeze(name)
        del swarm.members[name]
        frozen_at = loop.time()
        await swarm.until(lambda: swarm.total("rerouted") > 0, limit_s=10)
        assert loop.time() - frozen_at <= NOTICED_WITHIN_S
        await swarm.until_round(max(swarm.rounds()) + 5)
        swarm.hub.thaw(name)
        swarm.members[name] = silent
        await swarm.until_round(24)
        assert silent.peer.gossip.own.state == "active"
        assert swarm.total("shard_reset") == 0
        trainer = replay(spec, swarm.counted, 24)
        # What lay in the silent replica's buffer may have missed its round.
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 0.05

    in_virtual_time(scenario, spec)
