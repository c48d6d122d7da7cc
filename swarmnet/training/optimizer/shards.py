"""AdamW (Loshchilov and Hutter, 2019) on shards of a stage's flat parameter vector.

The optimizer state of a shard is two fp32 vectors (moments) and a step count; this replica holds it
for the shards that it owns and no others (ZeRO, Rajbhandari et al., 2020). A step is torch's own
fused kernel on slices, so that shards that cover a model make the update that
`torch.optim.AdamW` makes. Weight decay is for matrices; a shard that covers several
parameters is stepped in segments, with decay and without.

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
from typing import Any

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.ports import ShardCodec
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.update import robust
from swarmnet.spec import OptimizerSpec, RunSpec
from swarmnet.training.arrays import from_tensor, is_finite, sum_of_squares, to_tensor
from swarmnet.training.codecs.shards import coded_result, shard_codec_of
from swarmnet.training.models.base import ParameterRange
from swarmnet.training.optimizer import aggregation
from swarmnet.training.optimizer.schedule import learning_rate
from swarmnet.training.optimizer.store import MemoryStore, Store
from swarmnet.training.stage import TorchStage
from swarmnet.wire import Array

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


@dataclass(slots=True)
class ShardState:
    """AdamW's state of one shard, fp32."""

    mean: Tensor
    """Running mean of the gradient."""
    square: Tensor
    """Running mean of its square."""
    steps: int
    ahead: Tensor | None = None
    """By how much the parameters that replicas have are ahead: where exchanges are delayed, and
    where results are coded, which makes up for what coding has lost."""


class ShardedAdamW:
    """The optimizer state of the shards that a replica owns; implements `ports.Optimizer`."""

    def __init__(
        self,
        parameters: Sequence[ParameterRange],
        shard_sizes: Sequence[int],
        spec: OptimizerSpec,
        store: Store | None = None,
        codec: str = NONE,
    ) -> None:
        """`store`: where the state lies; in memory where it is left out. `codec`: of updates."""
        self._store = store or MemoryStore()
        self.codec: ShardCodec = shard_codec_of(codec, shard_sizes)
        self._spec = spec
        self._sizes = tuple(shard_sizes)
        self._segments = cut_segments(parameters, shard_sizes)
        self._states: dict[int, ShardState] = {}

    def owned(self) -> list[int]:
        return sorted(self._states)

    def steps(self, shard_index: int) -> int:
        state = self._states.get(shard_index)
        return -1 if state is None else state.steps

    def create(self, shard_index: int) -> None:
        size = self._sizes[shard_index]
        mean, square = self._store.zeros(size), self._store.zeros(size)
        self._states[shard_index] = ShardState(mean, square, 0)

    def drop(self, shard_index: int) -> None:
        self._states.pop(shard_index, None)

    def sum(self, contributions: Sequence[Array]) -> Array:
        """Raises `ProtocolViolation` where the contributions are not fp32 of one shape."""
        self._check_alike(contributions)
        first, *others = map(to_tensor, contributions)
        if not others:
            return from_tensor(first.clone())
        total = first + others[0]
        for values in others[1:]:
            total.add_(values)
        return from_tensor(total)

    def _check_alike(self, contributions: Sequence[Array]) -> None:
        if not contributions:
            raise ValueError("a sum of nothing")
        for c in contributions:
            if c.dtype != "float32" or c.shape != contributions[0].shape:
                raise ProtocolViolation("contributions of unlike dtype or shape")

    def aggregate(
        self,
        rule: str,
        contributions: Sequence[Array],
        tokens: Sequence[int],
        factors: Sequence[float],
    ) -> Array:
        """As the port says. Raises `ProtocolViolation` as `sum`."""
        if rule in (robust.MEAN, robust.MEDIAN_CLIP) and all(f == 1.0 for f in factors):
            return self.sum(contributions)
        self._check_alike(contributions)
        tensors = [to_tensor(c) for c in contributions]
        if rule == robust.TRIMMED_MEAN:
            return from_tensor(aggregation.trimmed_mean(tensors, tokens))
        if rule == robust.CENTERED_CLIP:
            return from_tensor(aggregation.centered_clip(tensors, tokens))
        return from_tensor(aggregation.scaled_sum(tensors, factors))

    def sum_of_squares(self, values: Array) -> float:
        return sum_of_squares(to_tensor(values))

    def step(
        self,
        shard_index: int,
        parameters: Array,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
    ) -> tuple[Array, Array]:
        """As the port says. Raises `ProtocolViolation`, the state unchanged, where the gradient has
        the wrong length or is not finite, and `KeyError` where the state is not held."""
        state = self._states[shard_index]
        present = self._values(shard_index, "parameters", parameters)
        new = present.clone()
        gradient = self._values(shard_index, "gradient", gradient_sum) * scale
        if not is_finite(gradient):
            raise ProtocolViolation(f"the gradient of shard {shard_index} is not finite")
        rate = learning_rate(self._spec, round_index)
        if state.ahead is not None:
            new -= state.ahead
        state.steps += 1
        self._apply(shard_index, state, new, gradient, rate)
        wanted = new + self._look_ahead(state, gradient, rate) if is_delayed else new
        return self._publish(state, present, new, wanted)

    def _publish(
        self, state: ShardState, present: Tensor, new: Tensor, wanted: Tensor
    ) -> tuple[Array, Array]:
        """The result, coded, and what all make of it; keeps how far that is ahead of `new`."""
        result, published = coded_result(self.codec.names.results, present, wanted)
        if published is new:
            state.ahead = None
            return result, result
        if state.ahead is None:
            state.ahead = self._store.zeros(new.numel())
        torch.sub(published, new, out=state.ahead)
        return result, from_tensor(published)

    def _look_ahead(self, state: ShardState, gradient: Tensor, rate: float) -> Tensor:
        """How far the parameters are to be ahead after a step."""
        spec = self._spec
        of_mean, of_gradient = lead(spec.beta1)
        bias, bias_square = (1 - beta**state.steps for beta in (spec.beta1, spec.beta2))
        root = state.square.sqrt().div_(math.sqrt(bias_square)).add_(spec.eps)
        ahead = state.mean * of_mean
        return ahead.add_(gradient, alpha=of_gradient).div_(root).mul_(-rate / bias)

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        state = self._states[shard_index]
        kept = (state.mean, state.square, state.ahead)
        arrays = tuple(from_tensor(values.clone()) for values in kept if values is not None)
        return {"steps": state.steps}, arrays

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        if not 0 <= shard_index < len(self._sizes):
            raise ProtocolViolation("optimizer state of a shard that this stage does not have")
        steps = values.get("steps")
        if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < MAX_STEPS:
            raise ProtocolViolation("optimizer state with an impossible step count")
        if len(arrays) not in (2, 3):
            raise ProtocolViolation("optimizer state is two arrays, or three")
        mean, square, *ahead = (self._values(shard_index, "moments", a) for a in arrays)
        if not all(map(is_finite, (mean, square, *ahead))) or square.min().item() < 0:
            raise ProtocolViolation("optimizer state with values that cannot be")
        self._states[shard_index] = ShardState(
            self._kept(mean), self._kept(square), steps, self._kept(ahead[0]) if ahead else None
        )

    def _kept(self, values: Tensor) -> Tensor:
        return self._store.zeros(values.numel()).copy_(values)

    def _values(self, shard_index: int, what: str, array: Array) -> Tensor:
        if array.dtype != "float32" or array.shape != (self._sizes[shard_index],):
            raise ProtocolViolation(
                f"{what} of shard {shard_index}: {str(array.dtype)[:16]} of shape "
                f"{str(array.shape)[:64]} instead of float32 of ({self._sizes[shard_index]},)"
            )
        return to_tensor(array)

    def _apply(
        self, shard_index: int, state: ShardState, new: Tensor, gradient: Tensor, rate: float
    ) -> None:
        step = torch.tensor(float(state.steps))
        for segment in self._segments[shard_index]:
            part = slice(segment.start, segment.stop)
            torch._fused_adamw_(
                [new[part]],
                [gradient[part]],
                [state.mean[part]],
                [state.square[part]],
                [],
                [step],
                lr=rate,
                beta1=self._spec.beta1,
                beta2=self._spec.beta2,
                weight_decay=self._spec.weight_decay if segment.has_decay else 0.0,
                eps=self._spec.eps,
                amsgrad=False,
                maximize=False,
            )


def lead(beta1: float) -> tuple[float, float]:
    """The parts of the gradient's running mean and of the newest gradient in the step by which
    delayed parameters are ahead. Chosen so that the highest stable learning rate is about as high
    as two numbers can make it (`tests/training/optimizer/test_shards.py`)."""
    return LEAD_OF_MEAN * beta1, LEAD_OF_GRADIENT * beta1 * (1 - beta1)


def build_optimizer(
    spec: RunSpec, stage: TorchStage, store: Store | None = None, codec: str | None = None
) -> ShardedAdamW:
    """The optimizer of a stage's shards; it owns none yet. `codec`: of updates; the run's where it
    is left out."""
    codec = spec.sync.codec if codec is None else codec
    return ShardedAdamW(stage.parameter_ranges, stage.shard_sizes, spec.optimizer, store, codec)


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
