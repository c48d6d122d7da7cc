"""How many microbatches the feeders of a swarm have in flight; virtual time, memory transport."""

from __future__ import annotations

from pathlib import Path

from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

NUM_STAGES, NUM_REPLICAS = 2, 4


def test_a_small_swarm_begins_with_few_and_comes_to_more_than_two_for_each_replica(
    tmp_path: Path,
) -> None:
    """One peer feeds: one and a half for each replica at first, and one more for each that has
    been completed."""
    spec = tiny_spec(tmp_path, num_stages=NUM_STAGES, rounds=2, global_batch=240)
    most: dict[int, int] = {}
    """In flight, by how many were completed."""

    async def scenario(swarm: Swarm) -> None:
        for i in range(NUM_REPLICAS):
            swarm.start(f"peer-{i}", stage=i % NUM_STAGES, feeds=i == 0)
        feeder = swarm.members["peer-0"].peer.feeder
        assert feeder is not None

        def looked() -> bool:
            completed = feeder.num_completed
            most[completed] = max(feeder.num_in_flight, most.get(completed, 0))
            return min(swarm.rounds()) >= 1

        await swarm.until(looked)
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec, is_synthetic=True)
    assert max(most.values()) > 2 * NUM_REPLICAS
    for num_completed, in_flight in most.items():
        assert in_flight <= 1.5 * NUM_REPLICAS + 1 + num_completed
