"""A swarm whose stages owe gradients of weights makes the same update as one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnet.training.passes.owed_weights import OwedWeights
from tests.swarm import harness
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 8


@pytest.fixture(autouse=True)
def slow_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is owed takes a while."""
    monkeypatch.setattr(harness, "REST_S", 0.001)


@pytest.fixture
def owed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Microbatches of which something was owed, each time that one more was."""
    found: list[int] = []
    made = OwedWeights.keep

    def keep(self: OwedWeights, most: int) -> None:
        found.append(len(self))
        made(self, most)

    monkeypatch.setattr(OwedWeights, "keep", keep)
    return found


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 1), (3, 1), (3, 2)])
def test_a_swarm_makes_the_updates_of_one_process(
    tmp_path: Path, num_stages: int, num_replicas: int, owed: list[int]
) -> None:
    """A round has two microbatches for each stage."""
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=ROUNDS, num_layers=6)
    values = spec.model_dump()
    values["pipeline"]["global_batch"] = 2 * num_stages * spec.pipeline.microbatch
    spec = spec.with_values(values)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(num_stages, num_replicas)
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-5
        assert max(owed) > 0, "nothing was owed"

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_taken_out_while_something_is_owed_leaves_nothing(
    tmp_path: Path, seed: int
) -> None:
    """A feeder dies: what it had in flight is retracted, and its slots are made by others."""
    spec = tiny_spec(tmp_path, num_stages=3, rounds=ROUNDS, num_layers=6)

    async def scenario(swarm: Swarm) -> None:
        for name, stage in (("a", 0), ("b", 0), ("middle", 1), ("last", 2)):
            swarm.start(name, stage=stage, feeds=stage == 0)
        await swarm.until_round(2)
        middle = swarm.members["middle"].peer.replica
        assert middle is not None

        def owes_for_b() -> bool:
            pending = middle.ledger.pending(middle.round)
            return middle.stage.is_owing and any(e.feeder == "b" for e in pending)

        await swarm.until(owes_for_b)
        swarm.kill("b")
        await swarm.until_round(ROUNDS, 120.0)
        assert swarm.total("retracted") > 0
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-5

    in_virtual_time(scenario, spec, seed=seed)
