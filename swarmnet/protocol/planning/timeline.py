"""Schedules in time: when each pass begins and ends, and what that comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnet.protocol.planning.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, Step


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
    hop_s: Callable[[int, int, bool], float] = lambda source, target, is_back: 0.0,
) -> Timeline:
    """`hop_s(from device, to device, is back)`: seconds on the way, forward or back. Raises
    `ValueError` where there is no such schedule."""
    schedule = make(len(times), num_microbatches)
    spans = spans_of(schedule, times, hop_s)
    round_s = max(s[-1].end_s for s in spans if s)
    if not schedule.is_flushed:
        twice = spans_of(make(len(times), 2 * num_microbatches), times, hop_s)
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
    schedule: Schedule,
    times: Sequence[StageTimes],
    hop_s: Callable[[int, int, bool], float] = lambda source, target, is_back: 0.0,
) -> tuple[tuple[Span, ...], ...]:
    """Each device does its steps in order, each as soon as what it needs is there. Raises
    `ValueError` where all wait for each other."""
    ends: dict[tuple[str, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.steps]
    free, at = [0.0] * schedule.num_devices, [0] * schedule.num_devices

    def ready(s: Step) -> float | None:
        path = schedule.path(s.microbatch)
        place, here = path.index(s.chunk), schedule.device_of[s.chunk]
        if s.kind == WEIGHT:
            return ends.get((INPUT, s.chunk, s.microbatch))
        if s.kind == FORWARD:
            needed, is_back = place - 1, False
            if place == 0:
                return 0.0
        else:
            needed, is_back = place + 1, True
            if needed == len(path):
                return ends.get((FORWARD, s.chunk, s.microbatch))
        chunk = path[needed]
        kinds = (BACKWARD, INPUT) if is_back else (FORWARD,)
        found = [ends[key] for kind in kinds if (key := (kind, chunk, s.microbatch)) in ends]
        there = schedule.device_of[chunk]
        way_s = 0.0 if there == here else hop_s(there, here, is_back)
        return found[0] + way_s if found else None

    goes_on = True
    while goes_on:
        goes_on = False
        for k, steps in enumerate(schedule.steps):
            parts = schedule.chunks_at(k)
            while at[k] < len(steps) and (since := ready(steps[at[k]])) is not None:
                s = steps[at[k]]
                begin = max(free[k], since)
                free[k] = begin + times[k].of(s.kind) / parts
                ends[s.kind, s.chunk, s.microbatch] = free[k]
                spans[k].append(Span(s, begin, free[k]))
                at[k] += 1
                goes_on = True
    if any(n < len(steps) for n, steps in zip(at, schedule.steps, strict=True)):
        raise ValueError(f"{schedule.name}: devices wait for each other")
    return tuple(tuple(lane) for lane in spans)


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
