"""Layers of a few numbers, for the tests of a stage's parts."""

from __future__ import annotations

from typing import Any

import torch

from swarmnet.training.computing import Computing
from swarmnet.training.memory.device_copies import OneMemory
from swarmnet.training.models.base import LayerBuilder, ModelPlan, TensorSpec
from swarmnet.training.passes.layers import StageLayers

WIDTH = 3
NUM_PARAMETERS = 2 * WIDTH * WIDTH
"""Of both layers."""


def linear_plan() -> ModelPlan:
    """Two matrices without bias; the loss is the sum of squared errors."""

    def build() -> torch.nn.Module:
        return torch.nn.Linear(WIDTH, WIDTH, bias=False)

    return ModelPlan(
        layers=tuple(LayerBuilder(name, build, 1, (WIDTH,)) for name in "ab"),
        inputs=TensorSpec("float32", (WIDTH,)),
        targets=TensorSpec("float32", (WIDTH,)),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        count=lambda targets: targets.numel(),
    )


def linear_layers(
    precision: Any = "fp32", plan: ModelPlan | None = None, **changes: Any
) -> StageLayers:
    """All layers of a plan as one stage; `changes` are arguments of `StageLayers`."""
    plan = plan or linear_plan()
    options: dict[str, Any] = {
        "stage_index": 0,
        "num_stages": 1,
        "shard_size": 8,
        "seed": 5,
        "computing": Computing(precision),
        "device": torch.device("cpu"),
        "copies": OneMemory(),
    }
    return StageLayers(plan, plan.layers, **(options | changes))
