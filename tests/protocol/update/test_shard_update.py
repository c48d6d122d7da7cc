"""The machine of a shard's update, through every order of events of small worlds."""

from __future__ import annotations

import random

import pytest

from tests.protocol.update.exploring import Wanderer, explore
from tests.protocol.update.small_world import Scenario

SMALL = {
    "calm": Scenario(),
    "a crash": Scenario(crashes=1),
    "a lost message": Scenario(drops=1),
    "a false suspicion": Scenario(suspicions=1),
    "primary and backup cut": Scenario(cut="ab"),
    "primary and contributor cut": Scenario(cut="ac"),
    "backup and contributor cut": Scenario(cut="bc"),
    "records that differ": Scenario(primaries="aba"),
    "one that knows no holder": Scenario(primaries="aac"),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_events_ends_with_one_result(name: str) -> None:
    found = explore(SMALL[name], limit=200_000)
    print(f"{name}: {found.num_states} states")
    assert found.is_complete


@pytest.mark.parametrize("seed", range(300))
def test_random_schedules_of_larger_swarms_end_with_one_result(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 6)
    scenario = Scenario(
        peers="abcdef"[:n],
        replication=rng.randint(2, 3),
        tokens=tuple(rng.choice((0, 1, 1)) for _ in range(n)),
        crashes=rng.randint(0, 1),
        drops=rng.randint(0, 3),
        suspicions=rng.randint(0, 2),
        lazy=False,
    )
    Wanderer(scenario).wander(rng)
