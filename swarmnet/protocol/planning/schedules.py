"""Orders of a pipeline's passes, as lists of instructions.

A device serves one chunk of the model's layers, or several. Of each microbatch it makes a forward
pass through each of its chunks, and a backward pass: whole, or in two parts, the gradient of the
input, for which the chunk before waits, and that of the weights, which nobody waits for (Qi et al.,
2023, arXiv 2401.10241). A schedule says in which order each device does that. It knows nothing of
time: `timeline` plays it.

What is the swarm's own order is not here, for that is decided as it goes (`training.device`:
backward passes first, the oldest first).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

FORWARD, BACKWARD = "F", "B"
INPUT, WEIGHT = "I", "W"
"""Parts of a backward pass: the gradient of the input, and that of the weights."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pass."""

    kind: str
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Of a round of `num_microbatches`."""

    name: str
    num_microbatches: int
    device_of: tuple[int, ...]
    """Of each chunk."""
    paths: tuple[tuple[int, ...], ...]
    """Chunks that a microbatch passes, in order; microbatches take the paths in equal blocks."""
    steps: tuple[tuple[Step, ...], ...]
    """Of each device, in order."""
    copies: int = 1
    """Of the weights, on each device, beside those that microbatches in flight need."""
    is_flushed: bool = True
    """A round ends before the next one begins: all its microbatches see the same weights."""
    most_versions: int = 0
    """Of the weights on a device, where rounds are not ended; 0 for one a microbatch in flight."""

    @property
    def num_devices(self) -> int:
        return len(self.steps)

    def path(self, microbatch: int) -> tuple[int, ...]:
        """The chunks that it passes."""
        return self.paths[microbatch * len(self.paths) // self.num_microbatches]

    def chunks_at(self, device: int) -> int:
        """How many a device has of one model."""
        return max(sum(self.device_of[c] == device for c in path) for path in self.paths)


class _Lane:
    """The instructions of one device, as they are written down."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._count: Counter[tuple[str, int]] = Counter()
        self._owed: deque[Step] = deque()

    def add(self, kind: str, chunk: int) -> None:
        """The pass of the next microbatch."""
        of = BACKWARD if kind == INPUT else kind
        microbatch = self._count[of, chunk]
        self._count[of, chunk] += 1
        self.steps.append(Step(kind, chunk, microbatch))
        if kind == INPUT:
            self._owed.append(Step(WEIGHT, chunk, microbatch))

    def done(self, kind: str, chunk: int) -> int:
        """Passes that are written down."""
        return self._count[kind, chunk]

    def weights(self, chunk: int | None = None) -> None:
        """The gradient of the weights that is owed for longest, if one is; of one chunk, or any."""
        owed = next((s for s in self._owed if chunk is None or s.chunk == chunk), None)
        if owed is not None:
            self._owed.remove(owed)
            self.steps.append(owed)

    @property
    def num_owed(self) -> int:
        return len(self._owed)


def _straight(
    name: str, num_devices: int, num_microbatches: int, lane: Callable[[int, _Lane], None]
) -> Schedule:
    """A chunk a device."""
    if num_devices < 1 or num_microbatches < 1:
        raise ValueError("a schedule has a device and a microbatch at least")
    lanes = [_Lane() for _ in range(num_devices)]
    for k, one in enumerate(lanes):
        lane(k, one)
    chunks = tuple(range(num_devices))
    return Schedule(name, num_microbatches, chunks, (chunks,), tuple(tuple(x.steps) for x in lanes))


def naive(num_devices: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time: one device works."""

    def lane(k: int, one: _Lane) -> None:
        for _ in range(num_microbatches):
            one.add(FORWARD, k)
            one.add(BACKWARD, k)

    return _straight("naive", num_devices, num_microbatches, lane)


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al., 2019)."""

    def lane(k: int, one: _Lane) -> None:
        for kind in (FORWARD, BACKWARD):
            for _ in range(num_microbatches):
                one.add(kind, k)

    return _straight("GPipe", num_devices, num_microbatches, lane)


def one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    """Forward and backward in turns as soon as the first gradient is back: device k has K - k
    microbatches in flight (PipeDream-flush; Narayanan et al., 2021, arXiv 2006.09503)."""
    return replace(_endless("1F1B", num_devices, num_microbatches, 0), is_flushed=True)


def interleaved(num_devices: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Several chunks a device, each a part of the layers far from the next (Narayanan et al., 2021,
    arXiv 2104.04473). Microbatches go in groups of about as many as there are devices. Raises
    `ValueError` where they cannot be divided into such groups."""
    return _in_turns("interleaved 1F1B", num_devices, num_microbatches, num_chunks, split=False)


def zb_h1(num_devices: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B with as many in flight, whose gradients of weights wait, longer on later devices, so
    that they fill the end (Qi et al., 2023, arXiv 2401.10241)."""
    return _in_turns("ZB-H1", num_devices, num_microbatches, num_chunks, split=True)


def _in_turns(
    name: str, num_devices: int, num_microbatches: int, num_chunks: int, *, split: bool
) -> Schedule:
    groups = max(1, num_microbatches // num_devices)
    if num_devices < 1 or num_microbatches < 1 or num_microbatches % groups:
        raise ValueError(
            f"{num_microbatches} microbatches cannot be divided into {groups} groups of about "
            f"{num_devices}"
        )
    group = num_microbatches // groups
    total, hop = num_microbatches * num_chunks, 1 if split or num_chunks == 1 else 2
    lanes = []
    for k in range(num_devices):
        one = _Lane()
        first = min(total, (num_chunks - 1) * group + hop * (num_devices - 1 - k))

        def add(kind: str, number: int, one: _Lane = one, k: int = k) -> None:
            local = number // group % num_chunks
            if kind != FORWARD:
                local = num_chunks - 1 - local
            one.add(kind, local * num_devices + k)

        for i in range(first):
            add(FORWARD, i)
        for i in range(total):
            if first + i < total:
                add(FORWARD, first + i)
            add(INPUT if split else BACKWARD, i)
            if one.num_owed > k:
                one.weights()
        while one.num_owed:
            one.weights()
        lanes.append(tuple(one.steps))
    chunks = tuple(range(num_devices * num_chunks))
    devices = tuple(c % num_devices for c in chunks)
    return Schedule(name, num_microbatches, devices, (chunks,), tuple(lanes))


def zb_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Two chunks a device, the second half of the model back from the last device to the first (Qi
    et al., 2023, arXiv 2401.10241, section 6): with F = I = W nothing is idle but at the
    beginning."""
    most = max(2 * num_devices - 1, num_microbatches)

    def lane(k: int, one: _Lane) -> None:
        down, up = k, 2 * num_devices - 1 - k

        def back(chunk: int) -> None:
            one.add(INPUT, chunk)
            one.weights(chunk)

        for _ in range(2 * (num_devices - k) - 1):
            one.add(FORWARD, down)
        for _ in range(k):
            one.add(FORWARD, up)
            one.add(FORWARD, down)
        for _ in range(num_devices - k):
            one.add(FORWARD, up)
            back(up)
        while one.done(FORWARD, down) < most or one.done(FORWARD, up) < one.done(FORWARD, down):
            if one.done(FORWARD, down) < most:
                one.add(FORWARD, down)
            back(down)
            one.add(FORWARD, up)
            back(up)
        for _ in range(k):
            one.add(INPUT, down)
            one.add(INPUT, up)
        for _ in range(num_devices - k):
            one.add(INPUT, down)
            one.weights(down)
        for chunk in (up, down):
            for _ in range(k):
                one.weights(chunk)

    return _vee("ZB-V", num_devices, num_microbatches, lane)


def dualpipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """The two directions of DualPipe (DeepSeek-V3, 2024, arXiv 2412.19437) folded into a V: forward
    passes of one half beside backward passes of the other. Here the two of a pair come one after
    the other. Raises `ValueError` with fewer microbatches than two a device."""
    if num_microbatches < 2 * num_devices:
        raise ValueError(f"DualPipeV needs {2 * num_devices} microbatches")

    def lane(k: int, one: _Lane) -> None:
        down, up, behind = k, 2 * num_devices - 1 - k, num_devices - 1 - k
        for _ in range(2 * behind):
            one.add(FORWARD, down)
        for _ in range(k + 1):
            one.add(FORWARD, down)
            one.add(FORWARD, up)
        for _ in range(behind):
            one.add(INPUT, up)
            one.weights()
            one.add(FORWARD, up)
        for _ in range(num_microbatches - 2 * num_devices + k + 1):
            one.add(FORWARD, down)
            one.add(BACKWARD, up)
            one.add(FORWARD, up)
            one.add(BACKWARD, down)
        for _ in range(behind):
            one.add(BACKWARD, up)
            one.add(FORWARD, up)
            one.add(BACKWARD, down)
        whole = 2 * ((k + 1) // 2) + (0 if k % 2 else 1)
        for i in range(k + 1):
            one.add(BACKWARD if 2 * i < whole else INPUT, up)
            one.add(BACKWARD if 2 * i + 1 < whole else INPUT, down)
        for _ in range(behind):
            one.weights()
            one.add(INPUT, down)
        while one.num_owed:
            one.weights()

    return _vee("DualPipeV", num_devices, num_microbatches, lane)


def _vee(
    name: str, num_devices: int, num_microbatches: int, lane: Callable[[int, _Lane], None]
) -> Schedule:
    """Two chunks a device; of a microbatch that there is not, nothing is done."""
    if num_devices < 1 or num_microbatches < 1:
        raise ValueError("a schedule has a device and a microbatch at least")
    lanes = []
    for k in range(num_devices):
        one = _Lane()
        lane(k, one)
        lanes.append(tuple(s for s in one.steps if s.microbatch < num_microbatches))
    chunks = tuple(range(2 * num_devices))
    devices = tuple(min(c, 2 * num_devices - 1 - c) for c in chunks)
    return Schedule(name, num_microbatches, devices, (chunks,), tuple(lanes))


def chimera(num_devices: int, num_microbatches: int) -> Schedule:
    """Two pipelines in opposite directions, each with a copy of the weights and half of the
    microbatches (Li and Hoefler, 2021, arXiv 2107.06925). Raises `ValueError` where devices or
    microbatches are odd in number.

    With passes of one slot each, stage s of either makes forward pass m of a block of K/2 in slot
    s + 2m and its backward pass in slot 2K - 1 - s + 2m, and blocks follow each other after 2K
    slots: with K even no two passes of a device meet. The order of these slots is the schedule."""
    if num_devices % 2 or num_microbatches % 2 or min(num_devices, num_microbatches) < 2:
        raise ValueError("Chimera needs an even number of devices and of microbatches")
    half, block = num_microbatches // 2, num_devices // 2
    slots: list[list[tuple[int, Step]]] = [[] for _ in range(num_devices)]
    for way, stage, number in product((0, 1), range(num_devices), range(half)):
        begin = 2 * num_devices * (number // block) + 2 * (number % block)
        chunk, microbatch = way * num_devices + stage, way * half + number
        device = num_devices - 1 - stage if way else stage
        back = begin + 2 * num_devices - 1 - stage
        slots[device] += [
            (begin + stage, Step(FORWARD, chunk, microbatch)),
            (back, Step(BACKWARD, chunk, microbatch)),
        ]
    chunks = tuple(range(2 * num_devices))
    devices = tuple(min(c, 2 * num_devices - 1 - c) for c in chunks)
    steps = tuple(tuple(s for _, s in sorted(own, key=lambda x: x[0])) for own in slots)
    paths = chunks[:num_devices], chunks[num_devices:]
    return Schedule("Chimera", num_microbatches, devices, paths, steps, copies=2)


def pipedream(num_devices: int, num_microbatches: int) -> Schedule:
    """1F1B that is never ended: each microbatch is an update, and its backward pass sees the
    weights that its forward pass saw (Narayanan et al., 2019)."""
    return _endless("PipeDream", num_devices, num_microbatches, 0)


def two_bw(num_devices: int, num_microbatches: int) -> Schedule:
    """The same with an update a round, of which two versions are enough (Narayanan et al., 2021,
    arXiv 2006.09503). Raises `ValueError` with fewer microbatches than devices."""
    if num_microbatches < num_devices:
        raise ValueError(f"2BW needs {num_devices} microbatches")
    return _endless("PipeDream-2BW", num_devices, num_microbatches, 2)


def _endless(name: str, num_devices: int, num_microbatches: int, versions: int) -> Schedule:
    def lane(k: int, one: _Lane) -> None:
        first = min(num_microbatches, num_devices - 1 - k)
        for _ in range(first):
            one.add(FORWARD, k)
        for i in range(num_microbatches):
            if first + i < num_microbatches:
                one.add(FORWARD, k)
            one.add(BACKWARD, k)

    made = _straight(name, num_devices, num_microbatches, lane)
    return replace(made, is_flushed=False, most_versions=versions)


SCHEDULES: tuple[Callable[[int, int], Schedule], ...] = (
    naive,
    gpipe,
    one_f_one_b,
    interleaved,
    zb_h1,
    zb_v,
    dualpipe_v,
    chimera,
    pipedream,
    two_bw,
)
