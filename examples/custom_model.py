"""A model of your own: not of language, but of points in the plane.

Three spiral arms wind around each other; a residual network of fully connected layers says to
which arm a point belongs. Everything that swarmnet needs of it is the `ModelPlan` that `build`
returns; the protocol is documented in `swarmnet/training/models/base.py`. Try it:

    swarmnet local --spec examples/custom_model.toml
"""

from __future__ import annotations

import math

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_numpy
from swarmnet.training.models.base import LayerBuilder, ModelPlan, TensorSpec
from swarmnet.wire import Array

NUM_ARMS = 3
NUM_HELD_OUT = 4
HELD_OUT_IDS = 1 << 64
"""Held-out microbatches are made of ids from here on, which no training microbatch has."""


class Residual(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Spirals:
    """Noisy points on the arms. A microbatch is a pure function of the seed and its id."""

    bytes_per_token = 0.0  # not text
    num_held_out = NUM_HELD_OUT

    def __init__(self, seed: int, samples_per_microbatch: int, noise: float) -> None:
        self.samples_per_microbatch = samples_per_microbatch
        self._seed = seed
        self._noise = noise

    def microbatch(self, microbatch_id: int) -> tuple[Array, Array]:
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=microbatch_id << 64))
        arm = rng.integers(NUM_ARMS, size=self.samples_per_microbatch, dtype=np.int32)
        radius = np.sqrt(rng.random(self.samples_per_microbatch))
        angle = 2 * math.pi * (arm / NUM_ARMS + radius)
        points = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
        points += self._noise * rng.standard_normal(points.shape)
        return from_numpy(points.astype(np.float32)), from_numpy(arm)

    def held_out(self, index: int) -> tuple[Array, Array]:
        return self.microbatch(HELD_OUT_IDS + index)


def build(width: int = 64, num_blocks: int = 4, noise: float = 0.02) -> ModelPlan:
    """The plan; the arguments are `[model.options]` of the spec."""
    layers = [
        LayerBuilder("embed", lambda: nn.Linear(2, width), 4 * width, (width,)),
        *(
            LayerBuilder(f"blocks.{i}", lambda: Residual(width), 8 * width * width, (width,))
            for i in range(num_blocks)
        ),
        LayerBuilder("head", lambda: nn.Linear(width, NUM_ARMS), 2 * width * NUM_ARMS, (NUM_ARMS,)),
    ]

    def data(spec: RunSpec) -> Spirals:
        return Spirals(spec.seed, spec.pipeline.microbatch, noise)

    return ModelPlan(
        layers=tuple(layers),
        inputs=TensorSpec("float32", (2,)),
        targets=TensorSpec("int32", (), num_values=NUM_ARMS),
        loss=lambda outputs, arms: F.cross_entropy(outputs, arms.long(), reduction="sum"),
        count=lambda arms: arms.numel(),
        data=data,
    )
