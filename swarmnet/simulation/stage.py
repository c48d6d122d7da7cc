"""A stage and its optimizer without a neural network, for thousands of peers in one process.

Vectors are real but tiny: a shard is `NUMBERS` fp32 numbers, whatever size it claims on the wire.
A microbatch adds a vector of small whole numbers that depend only on its (round, id) and the stage.
So sums are exact in any order, a retraction subtracts exactly what was added, and equal histories
have equal digests. Beside the numbers every gradient carries the multiset of microbatches
that went into it (`Gradient.ids`); `check_sum` proves that the two agree.

An array *claims* its size by its shape; its buffer is small. So the production code checks shapes
and the network charges bytes as if the arrays were whole. That works only where messages are
handed over as they are (`MemoryHub(copy=False)`).
"""

from __future__ import annotations

import math
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import xxhash

from swarmnet.batch import Batch, Documents
from swarmnet.errors import ProtocolViolation
from swarmnet.ports import (
    CodingErrors,
    Generation,
    LossResult,
    Passage,
    Rest,
    RouterReport,
    ShardCodec,
    StageResult,
    StepKey,
    undivided,
)
from swarmnet.protocol.codecs import (
    NONE,
    TOKEN_BYTES,
    BoundaryCodec,
    boundary_codec,
    coded_form,
    row_bytes,
    update_codec,
)
from swarmnet.protocol.sync_modes import AUTO, DELAYED, GOSSIP, LOCAL
from swarmnet.simulation.coding import Coding, CodingTime
from swarmnet.wire import Array

NUMBERS = 4
"""fp32 numbers that stand for a shard; the first of a gradient counts its microbatches."""
LARGEST = 1 << 10
"""Of a microbatch's numbers; sums of 2^14 of them are exact in fp32."""
REST_PARTS = 8
"""Parts of what a passage has left to do."""
DECAY, RATE = 0.5, 2.0**-10
"""Of the momentum, and of the step."""

_FLOATS = struct.Struct(f"<{NUMBERS}f")
_KEY = struct.Struct("<qq")
OF_DATA = -1
"""In place of the round, where an array is samples and not yet an activation."""

Numbers = tuple[float, ...]
Observer = Callable[..., None]


def packed(numbers: Iterable[float]) -> bytes:
    """As fp32."""
    return _FLOATS.pack(*numbers)


def numbers_of(array: Array) -> Numbers:
    """The reverse, of an array's data."""
    return _FLOATS.unpack(bytes(array.data))


def rounded(numbers: Iterable[float]) -> Numbers:
    """To fp32."""
    return _FLOATS.unpack(packed(numbers))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a stage claims."""

    num_shards: int = 2
    shard_parameters: int = 4096
    """fp32 numbers a shard."""
    activation_numbers: int = 4096
    """Numbers a microbatch between two stages."""
    width: int = 128
    """Of a token: so many of these numbers are coded as a row."""
    codec: str = NONE
    """`[pipeline] codec` of these numbers."""
    has_tokens: bool = False
    """The token of each row goes with an activation, as with `[model] subspace`."""
    update_codec: str = NONE
    """`[sync] codec` of the shards."""
    tokens_per_microbatch: int = 32

    def __post_init__(self) -> None:
        if self.activation_numbers % self.width:
            raise ValueError(f"{self.activation_numbers} numbers are not rows of {self.width}")

    @property
    def boundary(self) -> BoundaryCodec:
        """The codecs of both ways."""
        return boundary_codec(self.codec)

    @property
    def num_rows(self) -> int:
        """Of a microbatch between two stages."""
        return self.activation_numbers // self.width

    @property
    def activation_bytes(self) -> int:
        """Of the activation of a microbatch on the wire."""
        beside = TOKEN_BYTES if self.has_tokens else 0
        return self.num_rows * (row_bytes(self.boundary.activations, self.width) + beside)

    @property
    def gradient_bytes(self) -> int:
        """Of its gradient, on the way back."""
        return self.num_rows * row_bytes(self.boundary.gradients, self.width)

    def crossing_form(self, codec: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of what crosses a boundary in this codec."""
        return coded_form(codec, (self.num_rows, self.width), 1)


class Gradient(bytes):
    """Numbers of a gradient shard, and the microbatches that are in them."""

    ids: Counter[StepKey]

    @classmethod
    def of(cls, numbers: Sequence[float], ids: Counter[StepKey]) -> Gradient:
        gradient = cls(packed(numbers))
        gradient.ids = ids
        return gradient


def contribution(stage_index: int, shard_index: int, key: StepKey) -> Numbers:
    """The numbers that a microbatch adds to a gradient shard; the first is 1."""
    name = struct.pack("<iiqq", stage_index, shard_index, *key)
    digest = blake2b(name, digest_size=2 * (NUMBERS - 1)).digest()
    return (1.0, *(float(x % LARGEST) for x in struct.unpack(f"<{NUMBERS - 1}H", digest)))


def gradient_of(stage_index: int, shard_index: int, ids: Counter[StepKey]) -> Gradient:
    """What these microbatches add up to."""
    total = [0.0] * NUMBERS
    for key, times in ids.items():
        for i, x in enumerate(contribution(stage_index, shard_index, key)):
            total[i] += times * x
    return Gradient.of(total, Counter(ids))


def check_sum(stage_index: int, shard_index: int, gradient: Gradient) -> bool:
    """True where the numbers are those of the microbatches that the gradient names."""
    return gradient_of(stage_index, shard_index, gradient.ids) == gradient


def activation(key: StepKey, sizes: Sizes) -> Array:
    """The activation of a microbatch."""
    crossing = _crossing(key, sizes.boundary.activations, sizes)
    if not sizes.has_tokens:
        return crossing
    return Array("uint8", (sizes.num_rows, sizes.activation_bytes // sizes.num_rows), crossing.data)


def gradient(key: StepKey, sizes: Sizes) -> Array:
    """The gradient of the activation of a microbatch."""
    return _crossing(key, sizes.boundary.gradients, sizes)


def _crossing(key: StepKey, codec: str, sizes: Sizes) -> Array:
    return Array(*sizes.crossing_form(codec), _KEY.pack(*key))


@dataclass(slots=True)
class _Kept:
    """The state of one microbatch in a stage, until it is forgotten."""

    weights: bytes
    added: bool = False


@dataclass
class _Round:
    """The state of one round."""

    index: int
    parameters: list[Numbers]
    ids: Counter[StepKey]
    weights: bytes = b""


class NoBase:
    """All parameters of a synthetic stage are trained."""

    shard_sizes: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    def put(self, shard_index: int, values: Array) -> None:
        raise ProtocolViolation("a synthetic stage has no base")


class SyntheticStage:
    """`ports.Stage`. `observer(event, **facts)` is called at every piece of work; see
    `invariants.InvariantMonitor`."""

    def __init__(
        self,
        stage_index: int,
        num_stages: int,
        sizes: Sizes,
        observer: Observer,
        *,
        owes: bool = False,
    ) -> None:
        """`owes`: passes give the gradient of the input first, where there is a stage before, and
        add what is of the weights when the device has nothing else to do."""
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.max_in_flight = 1 << 16
        self.is_on_host = True
        self.tied_shards = 0
        self.base = NoBase()
        self.routed: tuple[RouterReport, ...] = ()
        self.can_open_ahead = True
        self.generation: Generation | None = None
        self.shard_sizes = (sizes.shard_parameters,) * sizes.num_shards
        self._sizes = sizes
        self._observe = observer
        self._parameters: list[Numbers] = [
            tuple(float(100 * stage_index + 10 * j + i) for i in range(NUMBERS))
            for j in range(sizes.num_shards)
        ]
        self._coming: dict[int, Numbers] = {}
        self._ids: Counter[StepKey] = Counter()
        self._ahead: _Round | None = None
        self._kept: dict[StepKey, _Kept] = {}
        self._rest = self._add_oldest if owes and stage_index else None
        self._owed: deque[StepKey] = deque()
        self._num_parts = 0
        """That are done of the oldest."""
        self.weights = _digest_of(self._parameters)

    def check(self, inputs: Array, targets: Array, documents: Documents | None = None) -> None:
        if len(inputs.data) != _KEY.size:
            raise ProtocolViolation("not an activation of a synthetic stage")

    def check_gradient(self, grad_outputs: Array) -> None:
        form = self._sizes.crossing_form(self._sizes.boundary.gradients)
        if (grad_outputs.dtype, grad_outputs.shape) != form:
            raise ProtocolViolation("not a gradient of a synthetic stage")

    def forward_pass(
        self,
        key: StepKey,
        inputs: Array,
        documents: Documents | None = None,
        targets: Array | None = None,
    ) -> Passage[Array]:
        def forward() -> Array:
            self._check_key(key, inputs)
            weights = self._weights_of(key)
            self._observe("forward", key=key, weights=weights)
            self._kept[key] = _Kept(weights)
            return activation(key, self._sizes)

        return undivided(forward)

    def backward_pass(self, key: StepKey, grad_outputs: Array) -> Passage[Array | None]:
        return replace(undivided(lambda: self._backward(key, grad_outputs)), rest=self._rest)

    def loss_pass(
        self, key: StepKey, inputs: Array, targets: Array, documents: Documents | None = None
    ) -> Passage[LossResult]:
        def both() -> LossResult:
            self.forward_pass(key, inputs)()
            grads = self._backward(key, gradient(key, self._sizes))
            return LossResult(1.0, self._sizes.tokens_per_microbatch, grads)

        return replace(undivided(both), rest=self._rest)

    def _backward(self, key: StepKey, grad_outputs: Array) -> Array | None:
        self._check_key(key, grad_outputs)
        kept = self._kept.get(key)
        assert kept is not None, f"backward of {key} without its forward"
        assert not kept.added, f"backward of {key} twice"
        weights = self._weights_of(key)
        self._observe("backward", key=key, weights=weights, forward_weights=kept.weights)
        kept.added = True
        if self._rest is not None:
            self._owed.append(key)
        else:
            self._ids_of(key)[key] += 1
        if self.stage_index == 0:
            return None
        return gradient(key, self._sizes)

    @property
    def is_owing(self) -> bool:
        return bool(self._owed)

    def _add_oldest(self) -> bool:
        if not self._owed:
            return False
        self._num_parts += 1
        if self._num_parts == REST_PARTS:
            self._num_parts = 0
            key = self._owed.popleft()
            self._ids_of(key)[key] += 1
        return self._num_parts > 0

    def settle(self) -> None:
        self._ids.update(self._owed)
        self._give_up_rest()

    def _give_up_rest(self) -> None:
        self._owed.clear()
        self._num_parts = 0

    def recompute_pass(
        self,
        key: StepKey,
        inputs: Array,
        targets: Array,
        grad_outputs: Array | None,
        documents: Documents | None = None,
    ) -> Passage[StageResult]:
        def again() -> StageResult:
            self._check_key(key, inputs)
            below = gradient(key, self._sizes) if self.stage_index else None
            if self.stage_index == self.num_stages - 1:
                return StageResult(None, below, 1.0, self._sizes.tokens_per_microbatch)
            return StageResult(activation(key, self._sizes), below)

        return undivided(again)

    def difference(self, ours: StageResult, theirs: StageResult) -> float:
        return 0.0 if ours == theirs else math.inf

    def retract(self, key: StepKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is None or not kept.added:
            return
        self._observe("retract", key=key)
        self.settle()
        ids = self._ids_of(key)
        ids[key] -= 1
        if not ids[key]:
            del ids[key]

    def forget(self, key: StepKey) -> None:
        self._kept.pop(key, None)

    def evaluate(
        self,
        inputs: Array,
        targets: Array | None,
        documents: Documents | None = None,
        round_index: int | None = None,
    ) -> Array | LossResult:
        if self.stage_index == self.num_stages - 1:
            return LossResult(1.0, self._sizes.tokens_per_microbatch)
        return inputs

    def gradient_shard(self, shard_index: int) -> Array:
        assert not self._owed, "read before all of it was there"
        return self._claim(gradient_of(self.stage_index, shard_index, self._ids))

    def copy_gradient(self, shard_index: int) -> Array:
        return self.gradient_shard(shard_index)

    def parameter_shard(self, shard_index: int) -> Array:
        return self._claim(packed(self._parameters[shard_index]))

    def digest(self, shard_index: int) -> bytes:
        return xxhash.xxh3_64_digest(packed(self._parameters[shard_index]))

    def stage_parameters(self, shard_index: int, values: Array) -> None:
        if values.dtype != "float32" or values.shape != (self.shard_sizes[shard_index],):
            raise ProtocolViolation("a shard of the wrong size")
        assert self._ahead is None, "the parameters of the round ahead are known"
        self._coming[shard_index] = numbers_of(values)

    def coming_shard(self, shard_index: int) -> Array | None:
        numbers = self._coming.get(shard_index)
        if self._ahead is not None:
            numbers = self._ahead.parameters[shard_index]
        return None if numbers is None else self._claim(packed(numbers))

    def coming_digest(self, shard_index: int) -> bytes:
        coming = self.coming_shard(shard_index)
        return b"" if coming is None else xxhash.xxh3_64_digest(coming.data)

    def open_ahead(self, round_index: int) -> None:
        parameters = [self._coming.get(j, numbers) for j, numbers in enumerate(self._parameters)]
        weights = _digest_of(parameters)
        self._ahead = _Round(round_index, parameters, Counter(), weights)

    def drop_ahead(self) -> None:
        if self._ahead is not None:
            self._forget_all(self._ahead.index)
            self._ahead = None

    def _forget_all(self, round_index: int) -> None:
        for key in [k for k in self._kept if k[0] == round_index]:
            del self._kept[key]

    def _is_ahead(self, key: StepKey) -> bool:
        return self._ahead is not None and key[0] == self._ahead.index

    def _weights_of(self, key: StepKey) -> bytes:
        return self._ahead.weights if self._ahead and self._is_ahead(key) else self.weights

    def _ids_of(self, key: StepKey) -> Counter[StepKey]:
        return self._ahead.ids if self._ahead and self._is_ahead(key) else self._ids

    def finish_round(self) -> None:
        self._give_up_rest()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._coming.clear()
            self._parameters = ahead.parameters
            self._ids = ahead.ids
            self.weights = ahead.weights
            self._kept = {k: kept for k, kept in self._kept.items() if k[0] == ahead.index}
            return
        for j, numbers in self._coming.items():
            self._parameters[j] = numbers
        self._coming.clear()
        self._ids = Counter()
        self._kept.clear()
        self.weights = _digest_of(self._parameters)

    def _claim(self, data: bytes) -> Array:
        return Array("float32", (self._sizes.shard_parameters,), data)

    @staticmethod
    def _check_key(key: StepKey, array: Array) -> None:
        if _KEY.unpack(array.data) != key and _KEY.unpack(array.data)[0] != OF_DATA:
            raise ProtocolViolation("the activation of another microbatch")


class SyntheticShardCodec:
    """`ports.ShardCodec`: nothing is lost, but all claims the size that it has on the wire, and
    takes the time of coding."""

    def __init__(self, sizes: Sizes, time: CodingTime) -> None:
        self.names = update_codec(sizes.update_codec)
        self._size = sizes.shard_parameters
        self._time = time

    def contribution(
        self,
        shard_index: int,
        gradient: Array,
        *,
        keeps_error: bool,
        is_short: bool = False,
        for_others: bool = True,
    ) -> Array:
        codec = self.names.of_contribution(is_short=is_short)
        if keeps_error:  # what coding loses is known when it is decoded
            self._time.decoded(codec, self._size)
        return self._coded(codec, gradient)

    def forget_error(self, shard_index: int) -> None:
        pass

    def errors(self) -> CodingErrors:
        return {}

    def load_errors(self, errors: CodingErrors) -> None:
        pass

    def decoded_contribution(self, shard_index: int, coded: Array) -> Array:
        short = self.names.of_contribution(is_short=True)
        is_short = (coded.dtype, coded.shape) == self.names.form(short, self._size)
        return self._decoded(short if is_short else self.names.contributions, coded)

    def coded_sum(self, shard_index: int, total: Array) -> tuple[Array, Array]:
        coded = self._coded(self.names.sums, total)
        return coded, self._decoded(self.names.sums, coded)

    def decoded_sum(self, shard_index: int, coded: Array) -> Array:
        return self._decoded(self.names.sums, coded)

    def applied(self, shard_index: int, present: Array, result: Array) -> Array:
        if result.dtype == "float32":
            return result
        return self._decoded(self.names.results, result)

    def coded_result(self, parameters: Array) -> tuple[Array, Array]:
        """What a step gives, and what everyone makes of it."""
        result = self._coded(self.names.results, parameters)
        return result, self._decoded(self.names.results, result)

    def _coded(self, codec: str, shard: Array) -> Array:
        self._time.encoded(codec, self._size)
        return Array(*coded_form(codec, (self._size,), 0), shard.data)

    def _decoded(self, codec: str, shard: Array) -> Array:
        if (shard.dtype, shard.shape) != coded_form(codec, (self._size,), 0):
            raise ProtocolViolation("not a coded shard of a synthetic stage")
        self._time.decoded(codec, self._size)
        return Array("float32", (self._size,), shard.data)


def state_vectors(sync_mode: str, codec: str) -> int:
    """Vectors in the optimizer state of a shard: AdamW's two moments, or the one of the outer step;
    and by how much the parameters that replicas have are ahead, where results are coded or late."""
    if sync_mode == GOSSIP:
        return 1
    if sync_mode == LOCAL:
        return 1 + (codec != NONE)
    return 2 + (codec != NONE or sync_mode in (DELAYED, AUTO))


class SyntheticOptimizer:
    """`ports.Optimizer`: momentum, exact enough that equal histories give equal bits."""

    def __init__(
        self,
        stage_index: int,
        sizes: Sizes,
        observer: Observer,
        time: CodingTime | None = None,
        sync_mode: str = DELAYED,
    ) -> None:
        """`time`: of the thread on which updates are coded."""
        self._num_vectors = state_vectors(sync_mode, sizes.update_codec)
        self._shards = SyntheticShardCodec(sizes, time or CodingTime(Coding()))
        self.codec: ShardCodec = self._shards
        self._stage_index = stage_index
        self._sizes = sizes
        self._observe = observer
        self._state: dict[int, tuple[int, Numbers]] = {}

    def num_moments(self, shard_index: int) -> int:
        return self._num_vectors

    def is_repeatable(self, shard_index: int) -> bool:
        return True

    def follow(
        self,
        shard_index: int,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
    ) -> Rest:
        raise NotImplementedError("all steps of a simulation are repeatable")

    def take(
        self, shard_index: int, parameters: Array, result: Array, round_index: int
    ) -> tuple[Array, Array]:
        steps, momentum = self._state[shard_index]
        made = result, self._shards.applied(shard_index, parameters, result)
        self._state[shard_index] = (steps + 1, momentum)
        return made

    def owned(self) -> list[int]:
        return sorted(self._state)

    def steps(self, shard_index: int) -> int:
        return self._state.get(shard_index, (-1, ()))[0]

    def create(self, shard_index: int) -> None:
        self._state[shard_index] = (0, (0.0,) * NUMBERS)
        self._observe("replaced", shard=shard_index)

    def drop(self, shard_index: int) -> None:
        self._state.pop(shard_index, None)

    def sum(self, contributions: Sequence[Array]) -> Array:
        ids: Counter[StepKey] = Counter()
        total = [0.0] * NUMBERS
        for part in contributions:
            ids.update(part.data.ids)
            for i, x in enumerate(_FLOATS.unpack(part.data)):
                total[i] += x
        return Array("float32", contributions[0].shape, Gradient.of(total, ids))

    def aggregate(
        self,
        rule: str,
        contributions: Sequence[Array],
        tokens: Sequence[int],
        factors: Sequence[float],
    ) -> Array:
        if any(factor != 1.0 for factor in factors):
            raise ValueError("synthetic gradients count microbatches: none can be made smaller")
        return self.sum(contributions)

    def sum_of_squares(self, values: Array) -> float:
        return math.fsum(x * x for x in _FLOATS.unpack(values.data))

    def distance(self, one: Array, other: Array) -> float:
        return math.dist(_FLOATS.unpack(one.data), _FLOATS.unpack(other.data))

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
        steps, momentum = self._state[shard_index]
        gradient: Gradient = gradient_sum.data
        self._observe("step", shard=shard_index, round=round_index, gradient=gradient)
        momentum = rounded(
            DECAY * m + scale * g for m, g in zip(momentum, _FLOATS.unpack(gradient), strict=True)
        )
        before = numbers_of(parameters)
        after = rounded(p - RATE * m for p, m in zip(before, momentum, strict=True))
        self._state[shard_index] = (steps + 1, momentum)
        result = Array("float32", parameters.shape, packed(after))
        return self._shards.coded_result(result)

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        steps, momentum = self._state[shard_index]
        shape = (self._sizes.shard_parameters,)
        moments = Array("float32", shape, packed(momentum))
        return {"steps": steps}, (moments,) * self._num_vectors

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        steps = values.get("steps")
        if not isinstance(steps, int) or steps < 0 or not arrays:
            raise ProtocolViolation("optimizer state of no possible form")
        self._state[shard_index] = (steps, numbers_of(arrays[0]))
        self._observe("replaced", shard=shard_index)


class SyntheticData:
    """`ports.Data`: a microbatch is its first sample."""

    bytes_per_token = 0.0
    num_samples = None
    num_held_out = 0

    def __init__(self, samples_per_microbatch: int) -> None:
        self.samples_per_microbatch = samples_per_microbatch

    def microbatch(self, indices: Sequence[int]) -> Batch:
        return Batch(_tokens(indices[0]), _tokens(indices[0]))

    def held_out(self, index: int) -> Batch:
        return Batch(_tokens(index), _tokens(index))


def _tokens(index: int) -> Array:
    return Array("int32", (4,), _KEY.pack(OF_DATA, index))


def _digest_of(parameters: Sequence[Numbers]) -> bytes:
    return xxhash.xxh3_64_digest(b"".join(map(packed, parameters)))
