"""AdamW (Loshchilov and Hutter, 2019) on shards of a stage's flat parameter vector.

The optimizer state of a shard is two fp32 vectors (moments) and a step count; this replica holds it
for the shards that it owns and no others (ZeRO, Rajbhandari et al., 2020). Shards that cover a
model make the update that `torch.optim.AdamW` makes (`adamw`). Weight decay is for matrices; a
shard that covers several parameters is stepped in segments, with decay and without.

Where exchanges are delayed, the parameters that replicas get are not the optimizer's own ones but
*ahead* of them: the update that the next round will lack is foretold from the moments, as in XPipe
(Guan et al. 2019) and PipeMare (Yang et al. 2021), and from the newest gradient. Momentum makes a
late gradient swing: on a quadratic of curvature c, with `beta1` 0.9, steps of rate r are stable up
to r c = 38 if the gradient is of now, and up to 1 if it is one step old; at parameters that are
ahead like this, up to 6. By how much they are ahead is kept, a third vector, and taken away before
the next step.

Where results are coded, the parameters that replicas get are those of the optimizer but for what
coding has lost. That is kept in the same vector: so nothing is lost for good (error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmnet.protocol.codecs import NONE
from swarmnet.spec import OptimizerSpec
from swarmnet.training.memory.device_copies import DeviceCopies
from swarmnet.training.models.base import ParameterRange
from swarmnet.training.optimizer import adamw
from swarmnet.training.optimizer.rates import learning_rate
from swarmnet.training.optimizer.sharded import ShardedOptimizer, ShardState, Stepper
from swarmnet.training.optimizer.store import Store

MAX_STEPS = 1 << 24
"""The kernel counts steps in fp32, which is exact up to here."""
LEAD_OF_MEAN, LEAD_OF_GRADIENT = 0.45, 1.2
"""See `lead`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A slice [start, stop) of a shard with one weight decay."""

    start: int
    stop: int
    has_decay: bool


class ShardedAdamW(ShardedOptimizer):
    """AdamW. The state of a shard: the running means of the gradient and of its square."""

    max_steps = MAX_STEPS

    def __init__(
        self,
        parameters: Sequence[ParameterRange],
        shard_sizes: Sequence[int],
        spec: OptimizerSpec,
        store: Store | None = None,
        codec: str = NONE,
        copies: DeviceCopies | None = None,
    ) -> None:
        """`parameters`: of the stage; the rest as for `ShardedOptimizer`."""
        super().__init__(shard_sizes, store, codec, copies)
        self._spec = spec
        self._segments = cut_segments(parameters, shard_sizes)

    def num_moments(self, shard_index: int) -> int:
        return 2

    def _steps_in_parts(self, shard_index: int) -> bool:
        return True

    def _stepper(
        self, shard_index: int, state: ShardState, round_index: int, *, is_delayed: bool
    ) -> Stepper:
        segments = self._segments[shard_index]
        return adamw_stepper(self._spec, segments, state, round_index, is_delayed=is_delayed)

    def _is_possible(self, shard_index: int, vectors: Sequence[Tensor]) -> bool:
        return is_square(vectors[1])


def is_square(values: Tensor) -> bool:
    """Whether it can be a running mean of squares."""
    return values.min().item() >= 0


def adamw_stepper(
    spec: OptimizerSpec,
    segments: Sequence[Segment],
    state: ShardState,
    round_index: int,
    *,
    is_delayed: bool,
) -> Stepper:
    """AdamW's step on a shard with these segments."""
    steps = state.steps + 1
    rate = learning_rate(spec, round_index)
    about = adamw.Step(rate, spec.beta1, spec.beta2, spec.eps, steps)
    mean, square = state.vectors

    def advance(part: slice, own: Tensor, gradient: Tensor) -> Tensor:
        whole = own, gradient, mean[part], square[part]
        for segment in segments:
            start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
            if start >= stop:
                continue
            here = slice(start - part.start, stop - part.start)
            vectors = whole
            if stop - start < len(own):
                vectors = own[here], gradient[here], mean[start:stop], square[start:stop]
            decay = spec.weight_decay if segment.has_decay else 0.0
            adamw.step(*vectors, about, decay)
        if not is_delayed:
            return own
        ahead = _look_ahead(spec, mean[part], square[part], steps, gradient, rate)
        return ahead.add_(own)

    return advance


def _look_ahead(
    spec: OptimizerSpec, mean: Tensor, square: Tensor, steps: int, gradient: Tensor, rate: float
) -> Tensor:
    """How far the parameters are to be ahead after a step."""
    of_mean, of_gradient = lead(spec.beta1)
    bias, bias_square = (1 - beta**steps for beta in (spec.beta1, spec.beta2))
    root = square.sqrt().div_(math.sqrt(bias_square)).add_(spec.eps)
    ahead = mean * of_mean
    return ahead.add_(gradient, alpha=of_gradient).div_(root).mul_(-rate / bias)


def lead(beta1: float) -> tuple[float, float]:
    """The parts of the gradient's running mean and of the newest gradient in the step by which
    delayed parameters are ahead. Chosen so that the highest stable learning rate is about as high
    as two numbers can make it (`tests/training/optimizer/test_shards.py`)."""
    return LEAD_OF_MEAN * beta1, LEAD_OF_GRADIENT * beta1 * (1 - beta1)


def cut_segments(
    parameters: Sequence[ParameterRange], shard_sizes: Sequence[int]
) -> list[list[Segment]]:
    """Per shard, its segments, in order; neighbours with the same decay are one."""
    cut: list[list[Segment]] = []
    shard_start = 0
    for size in shard_sizes:
        segments: list[Segment] = []
        for p in parameters:
            start, stop = max(p.start - shard_start, 0), min(p.stop - shard_start, size)
            if start >= stop:
                continue
            has_decay = len(p.shape) >= 2
            if segments and segments[-1].has_decay == has_decay:
                start = segments.pop().start
            segments.append(Segment(start, stop, has_decay))
        cut.append(segments)
        shard_start += size
    return cut
