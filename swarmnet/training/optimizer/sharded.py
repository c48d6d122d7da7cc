"""The optimizer state of the shards that a replica holds, whatever steps are made with it.

The state of a shard is a few fp32 vectors and a step count (ZeRO, Rajbhandari et al., 2020). Where
the parameters that replicas get are not the optimizer's own ones, by how much they are *ahead* is
one more vector, and taken away before the next step. So what coding has lost of a result is in the
next one (error feedback); of results that leave numbers out, a part of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.ports import Rest, ShardCodec
from swarmnet.protocol.codecs import NONE, RESULT_ERROR_DECAY, leaves_out
from swarmnet.protocol.update import robust
from swarmnet.training.arrays import (
    check_shape,
    distance,
    from_tensor,
    is_finite,
    sum_of_squares,
    to_tensor,
)
from swarmnet.training.codecs.shards import (
    coded_part,
    empty_codes,
    round_trip,
    rounded,
    shard_codec_of,
)
from swarmnet.training.cores import over, scratch
from swarmnet.training.late_arrays import Late, array_of, numbers_of, sent
from swarmnet.training.memory.device_copies import DeviceCopies
from swarmnet.training.optimizer import aggregation
from swarmnet.training.optimizer.store import MemoryStore, Store
from swarmnet.wire import Array

Stepper = Callable[[slice, Tensor, Tensor], Tensor]
"""Makes a step on a part of a shard, from the optimizer's own parameters there, which it changes,
and the gradient. Returns what replicas are to have, which may be the same tensor. Raises
`ProtocolViolation`, the state unchanged."""


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

    max_steps: ClassVar[int]

    def __init__(
        self,
        shard_sizes: Sequence[int],
        store: Store | None = None,
        codec: str = NONE,
        copies: DeviceCopies | None = None,
    ) -> None:
        """`store`: where the state lies; in memory where it is left out. `codec`: of updates.
        `copies`: to the device on which sums and steps are made, where that is not the host."""
        self.codec: ShardCodec = shard_codec_of(codec, shard_sizes, copies)
        self._copies = copies
        self._store = store or MemoryStore()
        self._sizes = tuple(shard_sizes)
        self._states: dict[int, ShardState] = {}

    @abstractmethod
    def _stepper(
        self, shard_index: int, state: ShardState, round_index: int, *, is_delayed: bool
    ) -> Stepper:
        """What makes a step, whose number is one more than `state.steps`."""

    @abstractmethod
    def num_moments(self, shard_index: int) -> int:
        """As the port says."""

    @abstractmethod
    def _steps_in_parts(self, shard_index: int) -> bool:
        """A step changes the state part by part. It cannot where one part may be refused, or needs
        the others."""

    def is_repeatable(self, shard_index: int) -> bool:
        """As the port says: so it is where nothing else is said."""
        return True

    def _results(self, round_index: int) -> str:
        """The codec of the result of a step."""
        return self.codec.names.results

    def follow(
        self,
        shard_index: int,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
    ) -> Rest:
        """As the port says; of steps that all owners make alike there is no part to follow."""
        raise NotImplementedError("every owner makes the whole step")

    def take(
        self, shard_index: int, parameters: Array, result: Array, round_index: int
    ) -> tuple[Array, Array]:
        """As the port says; where owners get the sum, each makes the step itself."""
        raise NotImplementedError("every owner makes the step")

    # ---- which shards -----------------------------------------------------------------------

    def owned(self) -> list[int]:
        return sorted(self._states)

    def steps(self, shard_index: int) -> int:
        state = self._states.get(shard_index)
        return -1 if state is None else state.steps

    def create(self, shard_index: int) -> None:
        size = self._sizes[shard_index]
        vectors = tuple(self._store.zeros(size) for _ in range(self.num_moments(shard_index)))
        self._states[shard_index] = ShardState(vectors, 0)

    def drop(self, shard_index: int) -> None:
        self._states.pop(shard_index, None)

    # ---- gradients --------------------------------------------------------------------------

    def sum(self, contributions: Sequence[Array]) -> Array:
        """Raises `ProtocolViolation` where the contributions are not fp32 of one shape."""
        first, *others = self._alike(contributions)
        only = contributions[0]
        if not others and isinstance(only, Late) and only.codec:
            return only  # in memory of its own, that nobody changes
        total = torch.empty_like(first)

        def work(part: slice) -> None:
            out = total[part]
            if not others:
                out.copy_(first[part])
            for i, values in enumerate(others):
                torch.add(out if i else first[part], values[part], out=out)

        over(total, work)
        return array_of(total, self._copies)

    def aggregate(
        self,
        rule: str,
        contributions: Sequence[Array],
        tokens: Sequence[int],
        factors: Sequence[float],
    ) -> Array:
        """As the port says, on the host but for plain sums. Raises `ProtocolViolation` as `sum`."""
        if rule in (robust.MEAN, robust.MEDIAN_CLIP) and all(f == 1.0 for f in factors):
            return self.sum(contributions)
        self._alike(contributions)
        tensors = [to_tensor(c) for c in contributions]
        if rule == robust.TRIMMED_MEAN:
            return from_tensor(aggregation.trimmed_mean(tensors, tokens))
        if rule == robust.CENTERED_CLIP:
            return from_tensor(aggregation.centered_clip(tensors, tokens))
        return from_tensor(aggregation.scaled_sum(tensors, factors))

    def sum_of_squares(self, values: Array) -> float:
        return sum_of_squares(numbers_of(values, self._copies))

    def distance(self, one: Array, other: Array) -> float:
        first, second = (numbers_of(values, self._copies) for values in (one, other))
        return distance(first, second)

    # ---- steps ------------------------------------------------------------------------------

    def step(
        self,
        shard_index: int,
        parameters: Array,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
        for_others: bool = True,
        is_finite: bool = False,
    ) -> tuple[Array, Array]:
        """As the port says. Raises `ProtocolViolation`, the state unchanged, where the gradient has
        the wrong length or is not finite, or leads to parameters that no stage takes, and
        `KeyError` where the state is not held."""
        state = self._states[shard_index]
        total = self._finite(shard_index, gradient_sum, scale, is_known=is_finite)
        is_ahead = is_delayed or self.codec.names.results != NONE
        is_first = state.ahead is None
        size = total.numel()
        new = state.ahead if not is_first else self._store.zeros(size) if is_ahead else None
        kept = state.vectors if new is None else (*state.vectors, new)
        used = [self._near(values) for values in kept]
        near = ShardState(tuple(used[: len(state.vectors)]), state.steps)
        made = self._made(
            shard_index,
            parameters,
            total,
            scale,
            self._stepper(shard_index, near, round_index, is_delayed=is_delayed),
            before=None if is_first else used[-1],
            ahead=used[-1] if is_ahead else None,
            for_others=for_others,
            name=self._results(round_index),
        )
        for there, here in zip(kept, used, strict=True):
            if there is not here:
                there.copy_(here)
        state.steps += 1
        state.ahead = new if is_ahead else None
        return made

    def _finite(
        self, shard_index: int, gradient_sum: Array, scale: float, *, is_known: bool = False
    ) -> Tensor:
        """The gradient's sum. Raises `ProtocolViolation` where it does not fit, or is not finite
        once it is scaled. `is_known`: it is before."""
        total = self._values(shard_index, "gradient", gradient_sum)
        if not (is_known and abs(scale) <= 1) and not is_finite_scaled(total, scale):
            raise ProtocolViolation(f"the gradient of shard {shard_index} is not finite")
        return total

    def _made(
        self,
        shard_index: int,
        parameters: Array,
        total: Tensor,
        scale: float,
        advance: Stepper,
        *,
        before: Tensor | None,
        ahead: Tensor | None,
        for_others: bool,
        name: str,
    ) -> tuple[Array, Array]:
        """What a step gives, as `step` does. `before`: by how much the present parameters are ahead
        of the optimizer's own. `ahead`: where it is kept by how much the new ones are; may be the
        same tensor. `name`: the codec of the result."""
        present = self._values(shard_index, "parameters", parameters)
        size = present.numel()
        left = RESULT_ERROR_DECAY if leaves_out(name) else 1.0
        coded = empty_codes(name, present) if name != NONE and for_others else None
        published = torch.empty_like(present)

        def work(part: slice) -> None:
            at, out = present[part], published[part]
            gradient = torch.mul(total[part], scale, out=scratch("gradient", at))
            own = scratch("own", at) if ahead is not None else out
            if before is None:
                own.copy_(at)
            else:
                torch.sub(at, before[part], out=own)
            wanted = advance(part, own, gradient)
            if name != NONE:
                change = torch.sub(wanted, at, out=scratch("change", at))
                if coded is None:
                    decoded = rounded(name, change)
                else:
                    codes, decoded = round_trip(name, change)
                    coded[coded_part(name, part, size)].copy_(codes)
                torch.add(decoded, at, out=out)
            elif wanted is not out:
                out.copy_(wanted)
            if ahead is not None:
                gap = torch.sub(out, own, out=ahead[part])
                if left != 1.0:
                    gap.mul_(left)

        over(published, work, in_parts=self._steps_in_parts(shard_index))
        result = array_of(published, self._copies)
        return result if coded is None else sent(coded, self._copies), result

    def _near(self, values: Tensor) -> Tensor:
        """A vector of the state, where the step is made."""
        if self._copies is None or values.device.type == self._copies.device.type:
            return values
        return self._copies.to_device(values)

    # ---- on its way -------------------------------------------------------------------------

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        state = self._states[shard_index]
        kept = (*state.vectors, state.ahead)
        arrays = tuple(self._snapshot(values) for values in kept if values is not None)
        return {"steps": state.steps}, arrays

    def _snapshot(self, values: Tensor) -> Array:
        if self._copies is None or values.device.type != self._copies.device.type:
            return from_tensor(values.clone())
        return sent(values, self._copies)

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        if not 0 <= shard_index < len(self._sizes):
            raise ProtocolViolation("optimizer state of a shard that this stage does not have")
        steps, most = values.get("steps"), self.max_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < most:
            raise ProtocolViolation("optimizer state with an impossible step count")
        n = self.num_moments(shard_index)
        if len(arrays) not in (n, n + 1):
            raise ProtocolViolation(f"optimizer state is {n} arrays, or {n + 1}")
        vectors = [self._values(shard_index, "moments", array) for array in arrays]
        is_possible = self._is_possible(shard_index, vectors)
        if not (all(map(is_finite, vectors)) and is_possible):
            raise ProtocolViolation("optimizer state with values that cannot be")
        kept = [self._store.zeros(v.numel()).copy_(v) for v in vectors]
        ahead = kept[n] if len(kept) > n else None
        self._states[shard_index] = ShardState(tuple(kept[:n]), steps, ahead)

    def _is_possible(self, shard_index: int, vectors: Sequence[Tensor]) -> bool:
        """Whether finite numbers can be such a state."""
        return True

    def _values(self, shard_index: int, what: str, array: Array) -> Tensor:
        size = self._sizes[shard_index]
        check_shape(f"{what} of shard {shard_index}", array, "float32", (size,))
        return numbers_of(array, self._copies)

    def _alike(self, contributions: Sequence[Array]) -> list[Tensor]:
        if not contributions:
            raise ValueError("a sum of nothing")
        for c in contributions:
            if c.dtype != "float32" or c.shape != contributions[0].shape:
                raise ProtocolViolation("contributions of unlike dtype or shape")
        return [numbers_of(c, self._copies) for c in contributions]


def is_finite_scaled(values: Tensor, scale: float) -> bool:
    """Whether all products are finite, in fp32. Rounding keeps an order, so that the largest ones
    are those of the largest values, and not larger than these where the scale is not above 1."""
    factor, are_finite = torch.tensor(scale, dtype=torch.float32), list[bool]()

    def work(part: slice) -> None:
        here = values[part]
        if abs(scale) <= 1:
            are_finite.append(is_finite(here))
            return
        ends = torch.stack(torch.aminmax(here)) * factor
        are_finite.append(math.isfinite(ends[0].item()) and math.isfinite(ends[1].item()))

    over(values, work)
    return all(are_finite)
