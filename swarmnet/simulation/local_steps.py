"""Own steps of a synthetic replica, for the modes `local` and `gossip`.

The average of an exchange must be exact in any order, as in `simulation.stage`. So the change of a
shard is not the difference of two rounded vectors but the sum of what its microbatches add, and it
names them. The fast parameters are updated beside it, with rounding. They show whether a microbatch
met the same parameters in its forward and backward pass, and how far partners are apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

from swarmnet.errors import ProtocolViolation
from swarmnet.ports import StepKey
from swarmnet.protocol.codecs import NONE
from swarmnet.simulation.stage import (
    NUMBERS,
    RATE,
    Numbers,
    Observer,
    SyntheticOptimizer,
    SyntheticStage,
    gradient_of,
    numbers_of,
    packed,
    rounded,
)
from swarmnet.wire import Array

MOMENTUM, PULL = 0.5, 0.7
"""Of the outer step of a pair: the weight of the last step, and of the way to the mean."""


class SyntheticLocalSteps:
    """`ports.LocalSteps`. `observer` is called at every step, see `invariants.InvariantMonitor`."""

    def __init__(
        self,
        stage: SyntheticStage,
        outer: SyntheticOptimizer,
        tokens_per_microbatch: int,
        observer: Observer,
    ) -> None:
        """`outer`: its state is the momentum of `meet`."""
        self._stage = stage
        self._outer = outer
        self._tokens_per_microbatch = tokens_per_microbatch
        self._observe = observer
        self._shards = range(len(stage.shard_sizes))
        self._common: list[Numbers] = [numbers_of(stage.parameter_shard(j)) for j in self._shards]
        self._began = list(self._common)
        self._coming: dict[int, Numbers] = {}
        self._stepped: dict[int, Numbers] = {}
        self._moved: list[Counter[StepKey]] = [Counter() for _ in self._shards]
        """Microbatches behind the steps since a shard's last exchange."""
        self._steps = [0 for _ in self._shards]
        self.tokens = [0 for _ in self._shards]
        self.changes = 0

    @property
    def weights(self) -> bytes:
        """Digest of all the common parameters."""
        return xxhash.xxh3_64_digest(b"".join(map(packed, self._common)))

    @property
    def progress(self) -> float:
        """How many own steps the common parameters are away from the initial ones: the first
        number of a step is the same for all."""
        return (self._began[0][0] - self._common[0][0]) / (RATE / self._tokens_per_microbatch)

    def common_shard(self, shard_index: int) -> Array:
        return self._claim(shard_index, self._common[shard_index])

    def set_common(self, shard_index: int, values: Array) -> None:
        self._stage.stage_parameters(shard_index, values)
        self._coming[shard_index] = numbers_of(values)

    def digest(self, shard_index: int) -> bytes:
        return xxhash.xxh3_64_digest(packed(self._common[shard_index]))

    def step(self, num_tokens: int, round_index: int) -> None:
        self._stepped.clear()
        ids: Counter[StepKey] = self._stage.gradient_shard(0).data.ids
        self._observe("own_step", round=round_index, ids=ids, num_tokens=num_tokens)
        if num_tokens <= 0:
            return
        for j in self._shards:
            gradient = numbers_of(self._stage.gradient_shard(j))
            before = numbers_of(self._stage.parameter_shard(j))
            pairs = zip(before, gradient, strict=True)
            after = rounded(p - RATE * g / num_tokens for p, g in pairs)
            self._stepped[j] = after
            self._stage.stage_parameters(j, self._claim(j, after))
            self._moved[j].update(ids)
            self._steps[j] += 1
            self.tokens[j] += num_tokens
        self.changes += 1

    def exchanged(self, shards: Iterable[int]) -> None:
        for j in shards:
            self.tokens[j] = 0

    def change(self, shard_index: int, weight: float) -> Array:
        ids = self._moved[shard_index]
        tokens = self._tokens_per_microbatch * ids.total()
        assert weight == tokens, f"a change of {tokens} tokens is pushed as one of {weight}"
        total = gradient_of(self._stage.stage_index, shard_index, ids)
        return Array("float32", self._shape(shard_index), total)

    def offer(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        values, moments = self.export(shard_index)
        common = self._common[shard_index]
        change = rounded(_minus(common, self._fast(shard_index)))
        arrays = (self.common_shard(shard_index), self._claim(shard_index, change), *moments)
        codec = self._outer.codec
        return values, tuple(codec.coded_sum(shard_index, array)[0] for array in arrays)

    def meet(
        self,
        shard_index: int,
        theirs: tuple[dict[str, Any], tuple[Array, ...]] | None,
        round_index: int,
    ) -> tuple[float, float]:
        common, fast = self._common[shard_index], self._fast(shard_index)
        change, mean, apart = _minus(common, fast), list(common), 0.0
        if theirs is not None:
            if len(theirs[1]) != 4:
                raise ProtocolViolation("an offer is four arrays")
            seen = [self._seen(shard_index, array) for array in theirs[1]]
            their_common, their_change = seen[:2]
            apart = _squares(_minus(fast, _minus(their_common, their_change)))
            change = [(a + b) / 2 for a, b in zip(change, their_change, strict=True)]
            mean = [(a + b) / 2 for a, b in zip(common, their_common, strict=True)]
        outer, (state, *_) = self._outer.export(shard_index)
        momentum = rounded(
            MOMENTUM * m - PULL * c + PULL * (a - p)
            for m, c, a, p in zip(numbers_of(state), change, mean, common, strict=True)
        )
        outer["steps"] += 1
        self._outer.load(shard_index, outer, (self._claim(shard_index, momentum),))
        new = rounded(p + m for p, m in zip(common, momentum, strict=True))
        self.set_common(shard_index, self._claim(shard_index, new))
        return apart, _squares(fast)

    def finish_round(self) -> None:
        self._stepped.clear()
        coming, self._coming = self._coming, {}
        for j, numbers in coming.items():
            self._common[j] = numbers
            self._moved[j] = Counter()

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        zeros = self._claim(shard_index, (0.0,) * NUMBERS)
        return {"steps": self._steps[shard_index]}, (zeros, zeros)

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        self._steps[shard_index] = int(values["steps"])

    def _seen(self, shard_index: int, array: Array) -> Numbers:
        """A partner's vector. What coding does to the own one is subtracted from it, where that is
        more than nothing: here it takes the time."""
        codec = self._outer.codec
        if codec.names.sums != NONE:
            codec.coded_sum(shard_index, self._claim(shard_index, (0.0,) * NUMBERS))
        return numbers_of(codec.decoded_sum(shard_index, array))

    def _fast(self, shard_index: int) -> Numbers:
        """The own parameters after the newest step."""
        stepped = self._stepped.get(shard_index)
        return stepped or numbers_of(self._stage.parameter_shard(shard_index))

    def _shape(self, shard_index: int) -> tuple[int, ...]:
        return (self._stage.shard_sizes[shard_index],)

    def _claim(self, shard_index: int, numbers: Numbers) -> Array:
        return Array("float32", self._shape(shard_index), packed(numbers))


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _squares(numbers: Sequence[float]) -> float:
    return sum(x * x for x in numbers)
