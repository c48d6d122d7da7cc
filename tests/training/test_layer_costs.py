"""Layers measured by the clock, and stages cut as the run says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swarmnet.errors import SpecError
from swarmnet.protocol.planning.cuts import split_layers
from swarmnet.training.layer_costs import TIMED_PASSES, WARM_PASSES, measure_layers
from swarmnet.training.models.base import LayerBuilder, ModelPlan, TensorSpec
from swarmnet.training.models.registry import model_plan, split_stages, stage_parameter_ranges
from tests.oracles.reference import ReferenceTrainer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec
from tests.training.specs import small_spec

MICROBATCH, WIDTH = 3, 8


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(nn.Module):
    """A layer that takes as long as it says."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.clock, self.seconds, self.passes = clock, seconds, 0

    def extra_repr(self) -> str:
        return str(self.seconds)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape == (MICROBATCH, WIDTH)
        self.clock.now += self.seconds
        return self.linear(x)  # type: ignore[no-any-return]


def test_layers_are_measured_in_order_and_each_kind_once() -> None:
    clock, built = Clock(), list[Slow]()

    def layer(i: int, seconds: float) -> LayerBuilder:
        def build() -> Slow:
            built.append(Slow(clock, seconds))
            return built[-1]

        return LayerBuilder(f"layer{i}", build, 1.0, (WIDTH,))

    seconds = [1.0, 1.0, 1.0, 5.0, 1.0, 1.0]
    plan = ModelPlan(
        tuple(layer(i, s) for i, s in enumerate(seconds)),
        TensorSpec("float32", (WIDTH,)),
        TensorSpec("float32", (WIDTH,)),
        lambda outputs, targets: (outputs - targets).square().sum(),
        len,
    )
    assert measure_layers(plan, microbatch=MICROBATCH, clock=clock) == seconds
    # The first and the last one are like others, but for what comes in and the loss.
    assert clock.now == (1 + 5 + 1) * (WARM_PASSES + TIMED_PASSES)
    estimated = [len(stage) for stage in split_stages(plan, 2)]
    measured = [len(part) for part in split_layers(seconds, 2)]
    assert (estimated, measured) == ([3, 3], [3, 3])
    assert [len(part) for part in split_layers(seconds, 3)] == [3, 1, 2]
    assert [len(stage) for stage in split_stages(plan, 3)] == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_model_is_measured(dtype: torch.dtype) -> None:
    plan = model_plan(small_spec())
    seconds = measure_layers(plan, microbatch=2, dtype=dtype)
    assert len(seconds) == len(plan.layers)
    assert all(s > 0 for s in seconds)


def test_stages_are_what_the_run_says() -> None:
    by_cost = small_spec()
    total = len(model_plan(by_cost).layers)
    spec = small_spec(pipeline={"layers": [1, total - 1]})
    assert spec.run_id != by_cost.run_id, "peers that cut otherwise are in another run"
    names = [[r.name for r in stage_parameter_ranges(spec, k)] for k in (0, 1)]
    assert names[0] == ["model.embed_tokens.weight"]
    every = [r.name for k in (0, 1) for r in stage_parameter_ranges(by_cost, k)]
    assert [n for stage in names for n in stage] == every
    with pytest.raises(SpecError, match="add up to"):
        model_plan(small_spec(pipeline={"layers": [total, 1]}))


def test_a_swarm_that_is_cut_otherwise_makes_the_same_update(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4, layers=[1, 5], num_layers=3)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(4)
        reference: ReferenceTrainer = replay(spec, swarm.counted, 4)
        assert relative_difference(swarm.parameters(), reference.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)
