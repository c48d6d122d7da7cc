"""Households make the same update as one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnet.household import household_of
from swarmnet.identity import Identity
from swarmnet.protocol.membership.records import Household
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 6
KEYS = [Identity(bytes([n]) * 32) for n in (1, 2)]
PEERS = 6


def in_houses(name: str) -> Household:
    """Three peers each."""
    return household_of(KEYS[int(name.removeprefix("peer-")) // 3], name)


@pytest.mark.parametrize("aggregation", ["mean", "median_clip"])
def test_two_households_make_the_updates_of_one_process(tmp_path: Path, aggregation: str) -> None:
    sync = {"aggregation": aggregation}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, global_batch=48, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        for i in range(PEERS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-5
        assert all(len(ids) == len(set(ids)) for ids in swarm.counted.values())
        assert not swarm.total("late_shards")

    in_virtual_time(scenario, spec, household=in_houses)
