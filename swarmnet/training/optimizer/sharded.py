"""The optimizer state of the shards that a replica holds, whatever steps are made with it.

The state of a shard is a few fp32 vectors and a step count (ZeRO, Rajbhandari et al., 2020). Where
the parameters that replicas get are not the optimizer's own ones, by how much they are *ahead* is
one more vector, and taken away before the next step. So what coding has lost of a result is in the
next one (error feedback).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.ports import ShardCodec
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.update import robust
from swarmnet.training.arrays import check_shape, from_tensor, is_finite, sum_of_squares, to_tensor
from swarmnet.training.codecs.shards import coded_result, shard_codec_of
from swarmnet.training.optimizer import aggregation
from swarmnet.training.optimizer.store import MemoryStore, Store
from swarmnet.wire import Array


@dataclass(slots=True)
class ShardState:
    """Of one shard."""

    vectors: tuple[Tensor, ...]
    """fp32; what each is, the optimizer knows."""
    steps: int
    ahead: Tensor | None = None
    """By how much the parameters that replicas have are ahead of the optimizer's own."""


class ShardedOptimizer(ABC):
    """Implements `ports.Optimizer`, but for the step itself."""

    num_vectors: ClassVar[int]
    """Of the state of a shard, without `ahead`."""
    max_steps: ClassVar[int]

    def __init__(
        self, shard_sizes: Sequence[int], store: Store | None = None, codec: str = NONE
    ) -> None:
        """`store`: where the state lies; in memory where it is left out. `codec`: of updates."""
        self.codec: ShardCodec = shard_codec_of(codec, shard_sizes)
        self._store = store or MemoryStore()
        self._sizes = tuple(shard_sizes)
        self._states: dict[int, ShardState] = {}

    @abstractmethod
    def _advance(
        self,
        shard_index: int,
        state: ShardState,
        own: Tensor,
        gradient: Tensor,
        round_index: int,
        is_delayed: bool,
    ) -> tuple[Tensor, Tensor]:
        """Makes a step from the optimizer's own parameters. Returns the new ones, and those that
        replicas are to have; the arrays given may be overwritten. Raises `ProtocolViolation`, the
        state unchanged."""

    # ---- which shards -----------------------------------------------------------------------

    def owned(self) -> list[int]:
        return sorted(self._states)

    def steps(self, shard_index: int) -> int:
        state = self._states.get(shard_index)
        return -1 if state is None else state.steps

    def create(self, shard_index: int) -> None:
        size = self._sizes[shard_index]
        vectors = tuple(self._store.zeros(size) for _ in range(self.num_vectors))
        self._states[shard_index] = ShardState(vectors, 0)

    def drop(self, shard_index: int) -> None:
        self._states.pop(shard_index, None)

    # ---- gradients --------------------------------------------------------------------------

    def sum(self, contributions: Sequence[Array]) -> Array:
        """Raises `ProtocolViolation` where the contributions are not fp32 of one shape."""
        first, *others = _alike(contributions)
        if not others:
            return from_tensor(first.clone())
        total = first + others[0]
        for values in others[1:]:
            total.add_(values)
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
        tensors = _alike(contributions)
        if rule == robust.TRIMMED_MEAN:
            return from_tensor(aggregation.trimmed_mean(tensors, tokens))
        if rule == robust.CENTERED_CLIP:
            return from_tensor(aggregation.centered_clip(tensors, tokens))
        return from_tensor(aggregation.scaled_sum(tensors, factors))

    def sum_of_squares(self, values: Array) -> float:
        return sum_of_squares(to_tensor(values))

    # ---- steps ------------------------------------------------------------------------------

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
        the wrong length or is not finite, or leads to parameters that no stage takes, and
        `KeyError` where the state is not held."""
        state = self._states[shard_index]
        present = self._values(shard_index, "parameters", parameters)
        gradient = self._values(shard_index, "gradient", gradient_sum) * scale
        if not is_finite(gradient):
            raise ProtocolViolation(f"the gradient of shard {shard_index} is not finite")
        own = present.clone() if state.ahead is None else present - state.ahead
        new, wanted = self._advance(shard_index, state, own, gradient, round_index, is_delayed)
        result, published = coded_result(self.codec.names.results, present, wanted)
        if published is new:
            state.ahead = None
            return result, result
        if state.ahead is None:
            state.ahead = self._store.zeros(new.numel())
        torch.sub(published, new, out=state.ahead)
        return result, from_tensor(published)

    # ---- on its way -------------------------------------------------------------------------

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        state = self._states[shard_index]
        kept = (*state.vectors, state.ahead)
        arrays = tuple(from_tensor(values.clone()) for values in kept if values is not None)
        return {"steps": state.steps}, arrays

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        if not 0 <= shard_index < len(self._sizes):
            raise ProtocolViolation("optimizer state of a shard that this stage does not have")
        steps, most = values.get("steps"), self.max_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < most:
            raise ProtocolViolation("optimizer state with an impossible step count")
        n = self.num_vectors
        if len(arrays) not in (n, n + 1):
            raise ProtocolViolation(f"optimizer state is {n} arrays, or {n + 1}")
        vectors = [self._values(shard_index, "moments", array) for array in arrays]
        if not (all(map(is_finite, vectors)) and self._is_possible(vectors)):
            raise ProtocolViolation("optimizer state with values that cannot be")
        kept = [self._store.zeros(v.numel()).copy_(v) for v in vectors]
        ahead = kept[n] if len(kept) > n else None
        self._states[shard_index] = ShardState(tuple(kept[:n]), steps, ahead)

    def _is_possible(self, vectors: Sequence[Tensor]) -> bool:
        """Whether finite numbers can be such a state."""
        return True

    def _values(self, shard_index: int, what: str, array: Array) -> Tensor:
        size = self._sizes[shard_index]
        check_shape(f"{what} of shard {shard_index}", array, "float32", (size,))
        return to_tensor(array)


def _alike(contributions: Sequence[Array]) -> list[Tensor]:
    if not contributions:
        raise ValueError("a sum of nothing")
    for c in contributions:
        if c.dtype != "float32" or c.shape != contributions[0].shape:
            raise ProtocolViolation("contributions of unlike dtype or shape")
    return [to_tensor(c) for c in contributions]
