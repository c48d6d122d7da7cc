"""The outer step of local training: Nesterov's momentum on the averaged change of replicas.

After `local_steps` steps of their own, replicas average how far they have come from where they all
began; that distance is taken for a gradient, and the common parameters make one step on it as
`torch.optim.SGD(nesterov=True)` makes it (DiLoCo, Douillard et al. 2023). The state of a shard is
one fp32 vector; owners hold it as they hold AdamW's moments in `shards`.

Where results are coded, the parameters that replicas get lack what coding has lost. That is kept, a
second vector, and added before the next step (error feedback).

In the rounds of a warm-up, and in the last of a run, the outer step is the plain mean: the whole
change, no momentum. What momentum adds is for later changes to put right, and after the last there
is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.ports import ShardCodec
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.update import robust
from swarmnet.training.arrays import (
    LARGEST_VALUE,
    from_tensor,
    is_finite,
    sum_of_squares,
    to_tensor,
)
from swarmnet.training.codecs.shards import coded_result, shard_codec_of
from swarmnet.training.optimizer import aggregation
from swarmnet.training.optimizer.store import MemoryStore, Store
from swarmnet.wire import Array

MAX_STEPS = 1 << 40


@dataclass(slots=True)
class OuterState:
    """Of one shard."""

    momentum: Tensor
    """fp32, the decayed sum of the averaged changes."""
    steps: int
    ahead: Tensor | None = None
    """By how much the parameters that replicas have are ahead, where results are coded."""


class OuterNesterov:
    """The outer momentum of the shards that a replica holds; implements `ports.Optimizer`."""

    def __init__(
        self,
        shard_sizes: Sequence[int],
        rate: float,
        momentum: float,
        warmup_rounds: int = 0,
        last_round: int = -1,
        store: Store | None = None,
        codec: str = NONE,
    ) -> None:
        """`store`: where the momentum lies; in memory where it is left out. `codec`: of updates."""
        self.codec: ShardCodec = shard_codec_of(codec, shard_sizes)
        self._store = store or MemoryStore()
        self._warmup_rounds = warmup_rounds
        self._last_round = last_round
        self._sizes = tuple(shard_sizes)
        self._rate = rate
        self._momentum = momentum
        self._states: dict[int, OuterState] = {}

    def owned(self) -> list[int]:
        return sorted(self._states)

    def steps(self, shard_index: int) -> int:
        state = self._states.get(shard_index)
        return -1 if state is None else state.steps

    def create(self, shard_index: int) -> None:
        self._states[shard_index] = OuterState(self._store.zeros(self._sizes[shard_index]), 0)

    def drop(self, shard_index: int) -> None:
        self._states.pop(shard_index, None)

    def sum(self, contributions: Sequence[Array]) -> Array:
        """Raises `ProtocolViolation` where the contributions are not fp32 of one shape."""
        if not contributions:
            raise ValueError("a sum of nothing")
        first = contributions[0]
        if any(c.dtype != "float32" or c.shape != first.shape for c in contributions):
            raise ProtocolViolation("contributions of unlike dtype or shape")
        total = to_tensor(first).clone()
        for c in contributions[1:]:
            total.add_(to_tensor(c))
        return from_tensor(total)

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
        first = contributions[0]
        if any(c.dtype != first.dtype or c.shape != first.shape for c in contributions):
            raise ProtocolViolation("contributions of unlike dtype or shape")
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
        """As the port says; the rate is the same in every round but the plain ones. Raises
        `ProtocolViolation`, the state unchanged, where the change has the wrong length or is not
        finite, or leads to parameters that no stage takes."""
        state = self._states[shard_index]
        change = self._values(shard_index, gradient_sum) * scale
        if not torch.isfinite(change).all():
            raise ProtocolViolation(f"the change of shard {shard_index} is not finite")
        present = self._values(shard_index, parameters)
        before = present if state.ahead is None else present - state.ahead
        if self._is_plain(round_index):
            new = self._checked(shard_index, before - change)
            state.steps += 1
            return self._publish(state, present, new)
        momentum = state.momentum * self._momentum
        momentum.add_(change)
        step = change.add_(momentum, alpha=self._momentum)
        new = self._checked(shard_index, before - self._rate * step)
        state.momentum.copy_(momentum)
        state.steps += 1
        return self._publish(state, present, new)

    def _publish(self, state: OuterState, present: Tensor, new: Tensor) -> tuple[Array, Array]:
        """The result, coded, and what all make of it; keeps how far that is ahead of `new`."""
        result, published = coded_result(self.codec.names.results, present, new)
        if published is not new:
            if state.ahead is None:
                state.ahead = self._store.zeros(new.numel())
            torch.sub(published, new, out=state.ahead)
        return result, from_tensor(published)

    def _is_plain(self, round_index: int) -> bool:
        return round_index < self._warmup_rounds or round_index == self._last_round

    def pair_step(
        self,
        shard_index: int,
        parameters: Tensor,
        change: Tensor,
        mean: Tensor,
        round_index: int,
    ) -> Tensor:
        """A step of one replica with its partner (NoLoCo, Kolehmainen et al. 2025): momentum on
        the `change` averaged over the two, and a pull towards the `mean` of their parameters with
        the same rate, as in the authors' code. Where a step is plain, the mean of where both are.
        Returns the new parameters, fp32 [size]. Raises `ProtocolViolation`, the state unchanged,
        where these would not do."""
        state = self._states[shard_index]
        if self._is_plain(round_index):
            new = self._checked(shard_index, mean - change)
            state.steps += 1
            return new
        momentum = state.momentum * self._momentum
        momentum.add_(change, alpha=-self._rate).add_(mean - parameters, alpha=self._rate)
        new = self._checked(shard_index, parameters + momentum)
        state.momentum.copy_(momentum)
        state.steps += 1
        return new

    def _checked(self, shard_index: int, new: Tensor) -> Tensor:
        if not is_finite(new, LARGEST_VALUE):
            raise ProtocolViolation(
                f"the outer step of shard {shard_index} leads beyond {LARGEST_VALUE:g}"
            )
        return new

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        state = self._states[shard_index]
        kept = (state.momentum, state.ahead)
        arrays = tuple(from_tensor(values.clone()) for values in kept if values is not None)
        return {"steps": state.steps}, arrays

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        if not 0 <= shard_index < len(self._sizes):
            raise ProtocolViolation("outer momentum of a shard that this stage does not have")
        steps = values.get("steps")
        if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < MAX_STEPS:
            raise ProtocolViolation("outer momentum with an impossible step count")
        if len(arrays) not in (1, 2):
            raise ProtocolViolation("outer momentum is one array, or two")
        momentum, *ahead = (self._values(shard_index, a) for a in arrays)
        if not all(map(is_finite, (momentum, *ahead))):
            raise ProtocolViolation("outer momentum with values that are not finite")
        state = OuterState(self._kept(momentum), steps, self._kept(ahead[0]) if ahead else None)
        self._states[shard_index] = state

    def _kept(self, values: Tensor) -> Tensor:
        return self._store.zeros(values.numel()).copy_(values)

    def _values(self, shard_index: int, array: Array) -> Tensor:
        size = self._sizes[shard_index]
        if array.dtype != "float32" or array.shape != (size,):
            raise ProtocolViolation(
                f"shard {shard_index}: {str(array.dtype)[:16]} of shape {str(array.shape)[:64]} "
                f"instead of float32 of ({size},)"
            )
        return to_tensor(array)
