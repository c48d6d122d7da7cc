"""Schedules in time: when each pass begins and ends, and what that comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from swarmnet.protocol.planning.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, Step
from swarmnet.protocol.planning.ways import Links, Ways, nothing


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one microbatch at one device, through all that it has of the model."""

    forward_s: float
    input_s: float
    """Of the backward pass, the gradient of the input."""
    weight_s: float
    """And that of the weights."""
    again_s: float = 0.0
    """A forward pass once more before a backward pass, and before each part of one."""

    def of(self, kind: str) -> float:
        """Of a pass."""
        if kind == FORWARD:
            return self.forward_s
        if kind == INPUT:
            return self.again_s + self.input_s
        if kind == WEIGHT:
            return self.again_s + self.weight_s
        return self.again_s + self.input_s + self.weight_s


@dataclass(frozen=True, slots=True)
class Span:
    """A pass, in time."""

    step: Step
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule that was played."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """Of each device."""
    round_s: float
    """Of a round after the first; the whole of it where it is ended before the next one."""
    bubble: float
    """Part of a round in which a device does nothing, mean over the devices."""
    peak_activations: float
    """Microbatches between their passes on the device that has most: of all that a device has of
    the model."""
    weight_versions: int
    """On the device that has most."""


def played(
    make: Callable[[int, int], Schedule],
    times: Sequence[StageTimes],
    num_microbatches: int,
    ways: Ways = nothing,
) -> Timeline:
    """Raises `ValueError` where there is no such schedule."""
    schedule = make(len(times), num_microbatches)
    spans = spans_of(schedule, times, ways)
    round_s = max(s[-1].end_s for s in spans if s)
    if not schedule.is_flushed:
        twice = spans_of(make(len(times), 2 * num_microbatches), times, ways)
        round_s = max(s[-1].end_s for s in twice if s) - round_s
    busy = sum(s.end_s - s.begin_s for lane in spans for s in lane)
    versions = schedule.copies
    if not schedule.is_flushed:
        versions = schedule.most_versions or max(_most_in_flight(lane) for lane in spans)
    peak = max(
        _most_in_flight(lane) / schedule.chunks_at(k) for k, lane in enumerate(spans) if lane
    )
    bubble = max(0.0, 1 - busy / (schedule.num_devices * round_s)) if round_s else 0.0
    return Timeline(schedule, spans, round_s, bubble, peak, versions)


def spans_of(
    schedule: Schedule, times: Sequence[StageTimes], ways: Ways = nothing
) -> tuple[tuple[Span, ...], ...]:
    """Each device does its steps in order, each as soon as what it needs is there. Raises
    `ValueError` where all wait for each other."""
    return _Player(schedule, times, ways).spans()


class _Player:
    """A schedule, in the order of time."""

    def __init__(self, schedule: Schedule, times: Sequence[StageTimes], ways: Ways) -> None:
        self._schedule, self._times = schedule, times
        self._links = Links(ways, schedule.num_devices)
        self._spans: list[list[Span]] = [[] for _ in schedule.steps]
        self._is_busy = [False] * schedule.num_devices
        self._there = set[tuple[bool, int, int]]()
        """Is back, chunk, microbatch: what this chunk needs for the pass is at its device."""
        self._owed = set[tuple[int, int]]()
        """Chunk, microbatch: gradients of inputs that are made."""
        self._events: list[tuple[float, int, int, Step, bool]] = []
        self._num_events = 0

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        now, touched = 0.0, set(range(self._schedule.num_devices))
        while True:
            for k in sorted(touched):
                self._begin(k, now)
            if not self._events:
                break
            now, touched = self._events[0][0], set()
            while self._events and self._events[0][0] == now:
                _, _, k, step, is_end = heappop(self._events)
                touched.add(k)
                if is_end:
                    self._is_busy[k] = False
                    self._ended(k, step, now)
                else:
                    self._there.add((step.kind != FORWARD, step.chunk, step.microbatch))
        spans, steps = self._spans, self._schedule.steps
        if any(len(done) < len(all_) for done, all_ in zip(spans, steps, strict=True)):
            raise ValueError(f"{self._schedule.name}: devices wait for each other")
        return tuple(tuple(lane) for lane in spans)

    def _later(self, at_s: float, device: int, step: Step, *, is_end: bool) -> None:
        heappush(self._events, (at_s, self._num_events, device, step, is_end))
        self._num_events += 1

    def _begin(self, device: int, now: float) -> None:
        """The next step, where the device is free for it."""
        done, steps = len(self._spans[device]), self._schedule.steps[device]
        if self._is_busy[device] or done == len(steps) or not self._is_ready(steps[done]):
            return
        step = steps[done]
        took_s = self._times[device].of(step.kind) / self._schedule.chunks_at(device)
        self._is_busy[device] = True
        self._spans[device].append(Span(step, now, now + took_s))
        self._later(now + took_s, device, step, is_end=True)

    def _is_ready(self, step: Step) -> bool:
        if step.kind == WEIGHT:
            return (step.chunk, step.microbatch) in self._owed
        is_first = self._schedule.path(step.microbatch)[0] == step.chunk
        if step.kind == FORWARD and is_first:
            return True
        return (step.kind != FORWARD, step.chunk, step.microbatch) in self._there

    def _ended(self, device: int, step: Step, now: float) -> None:
        """What it has made goes where it is needed."""
        if step.kind == WEIGHT:
            return
        if step.kind == INPUT:
            self._owed.add((step.chunk, step.microbatch))
        path, is_back = self._schedule.path(step.microbatch), step.kind != FORWARD
        place = path.index(step.chunk)
        if is_back and place == 0:
            return
        if not is_back and place == len(path) - 1:  # the loss
            self._there.add((True, step.chunk, step.microbatch))
            return
        chunk = path[place - 1 if is_back else place + 1]
        there = self._schedule.device_of[chunk]
        wanted = Step(BACKWARD if is_back else FORWARD, chunk, step.microbatch)
        arrives = now
        if there != device:
            arrives = self._links.arrives(device, there, is_back, now)
        self._later(arrives, there, wanted, is_end=False)


def _most_in_flight(lane: Sequence[Span]) -> int:
    """Forward passes whose backward pass is not over, at a time; of a split one, with the gradient
    of the weights."""
    now = most = 0
    has_parts = {(s.step.chunk, s.step.microbatch) for s in lane if s.step.kind == INPUT}
    held: dict[tuple[int, int], int] = defaultdict(int)
    for span in lane:
        key = span.step.chunk, span.step.microbatch
        if span.step.kind == FORWARD:
            now += 1
            held[key] = 1
            most = max(most, now)
        elif span.step.kind == (WEIGHT if key in has_parts else BACKWARD):
            now -= held.pop(key)
    return most
