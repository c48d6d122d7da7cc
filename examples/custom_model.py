"""A model of your own: not of language, but of points in the plane.

Three spiral arms wind around each other; a residual network of fully connected layers says to
which arm a point belongs. Everything that swarmnet needs of it is the `ModelPlan` that `build`
returns; the protocol is documented in `swarmnet/training/models/base.py`. Try it:

    swarmnet local --spec examples/custom_model.toml
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_numpy
from swarmnet.training.models.base import LayerBuilder, ModelPlan, TensorSpec
from swarmnet.wire import Array

NUM_ARMS = 3
NUM_HELD_OUT = 4
FIRST_HELD_OUT = 1 << 64
"""Held-out samples have indices from here on, which no training sample has."""


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
    """Noisy points on the arms. A sample is a pure function of the seed and its index."""

    bytes_per_token = 0.0  # not text
    num_samples = None  # there is no end of them
    num_held_out = NUM_HELD_OUT

    def __init__(self, seed: int, samples_per_microbatch: int, noise: float) -> None:
        self.samples_per_microbatch = samples_per_microbatch
        self._seed = seed
        self._noise = noise

    def microbatch(self, indices: Sequence[int]) -> tuple[Array, Array]:
        points, arms = zip(*(self._sample(index) for index in indices))
        return from_numpy(np.stack(points)), from_numpy(np.array(arms, dtype=np.int32))

    def held_out(self, index: int) -> tuple[Array, Array]:
        first = FIRST_HELD_OUT + index * self.samples_per_microbatch
        return self.microbatch(range(first, first + self.samples_per_microbatch))

    def _sample(self, index: int) -> tuple[np.ndarray, int]:
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=index << 64))
        arm = int(rng.integers(NUM_ARMS))
        radius = math.sqrt(rng.random())
        angle = 2 * math.pi * (arm / NUM_ARMS + radius)
        point = radius * np.array([math.cos(angle), math.sin(angle)])
        return (point + self._noise * rng.standard_normal(2)).astype(np.float32), arm


def build(width: int = 64, num_blocks: int = 4, noise: float = 0.02) -> ModelPlan:
    """The plan; the arguments are `[model.options]` of the spec."""
    layers = [
        LayerBuilder("embed", lambda: nn.Linear(2, width), 4 * width, (width,)),
        *(
            LayerBuilder(
                f"blocks.{i}", lambda: Residual(width), 8 * width * width, (width,), is_block=True
            )
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
