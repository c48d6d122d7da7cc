"""The swarm's own order of passes, which is decided as it goes, written down as a schedule.

A device makes the backward pass of the oldest microbatch that is there, else the forward pass of
the oldest one (`training.device`). A feeder has so many microbatches in flight (`window`). With
backward passes in two parts the gradient of the input goes on at once, and that of the weights
is made when there is nothing else to do, or when those of too many microbatches are owed
(`owed`). The first stage's stay whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from swarmnet.protocol.planning.owed import most_owed
from swarmnet.protocol.planning.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, Step
from swarmnet.protocol.planning.timeline import StageTimes
from swarmnet.protocol.planning.ways import Links, Ways, nothing


class _Device:
    """One stage's, as it works."""

    def __init__(self, stage: int, window: int, *, is_split: bool) -> None:
        self.steps: list[Step] = []
        self.is_busy = False
        self._stage, self._window = stage, window
        self._most_owed = most_owed(stage) if is_split else 0
        self._back_kind = INPUT if self._most_owed else BACKWARD
        self._forward: list[int] = []
        self._back: list[int] = []
        self._owed: deque[int] = deque()
        self._num_kept = 0

    def came(self, kind: str, microbatch: int) -> None:
        """There is work."""
        heappush(self._forward if kind == FORWARD else self._back, microbatch)

    def begun(self) -> Step | None:
        """What it does next; None where there is nothing to do."""
        if self.is_busy:
            return None
        if self._back and 0 < self._most_owed <= len(self._owed):
            step = Step(WEIGHT, self._stage, self._owed.popleft())
        elif self._back:
            step = Step(self._back_kind, self._stage, heappop(self._back))
        elif self._forward and (self._num_kept < self._window or not self._owed):
            step = Step(FORWARD, self._stage, heappop(self._forward))
            self._num_kept += 1
        elif self._owed:
            step = Step(WEIGHT, self._stage, self._owed.popleft())
        else:
            return None
        self.is_busy = True
        self.steps.append(step)
        return step

    def ended(self, step: Step) -> None:
        """A step is done."""
        self.is_busy = False
        if step.kind == INPUT:
            self._owed.append(step.microbatch)
        elif step.kind != FORWARD:
            self._num_kept -= 1


def own_order(
    times: Sequence[StageTimes],
    num_microbatches: int,
    window: int,
    ways: Ways = nothing,
    *,
    is_split: bool = False,
) -> Schedule:
    """Of one device a stage. `window`: microbatches in flight."""
    last = len(times) - 1
    if last < 0 or num_microbatches < 1 or window < 1:
        raise ValueError("an order has a device, a microbatch and one in flight at least")
    devices = [_Device(k, window, is_split=is_split) for k in range(last + 1)]
    links = Links(ways, len(devices))
    events: list[tuple[float, int, int, Step, bool]] = []
    num_events = num_launched = num_back = 0

    def later(at_s: float, stage: int, step: Step, *, is_end: bool) -> None:
        nonlocal num_events
        heappush(events, (at_s, num_events, stage, step, is_end))
        num_events += 1

    def feed() -> None:
        nonlocal num_launched
        while num_launched < min(num_microbatches, num_back + window):
            devices[0].came(FORWARD, num_launched)
            num_launched += 1

    def go_on(step: Step, now: float) -> None:
        nonlocal num_back
        k, microbatch = step.chunk, step.microbatch
        if step.kind == FORWARD and k == last:
            devices[k].came(BACKWARD, microbatch)
        elif step.kind == FORWARD:
            there = Step(FORWARD, k + 1, microbatch)
            later(links.arrives(k, k + 1, False, now), k + 1, there, is_end=False)
        elif step.kind != WEIGHT and k:
            there = Step(BACKWARD, k - 1, microbatch)
            later(links.arrives(k, k - 1, True, now), k - 1, there, is_end=False)
        elif step.kind != WEIGHT:
            num_back += 1
            feed()

    feed()
    now, touched = 0.0, {0}
    while True:
        for k in sorted(touched):
            step = devices[k].begun()
            if step is not None:
                later(now + times[k].of(step.kind), k, step, is_end=True)
        if not events:
            break
        now, touched = events[0][0], {0}  # the first one is fed
        while events and events[0][0] == now:  # all that is there at one moment, then the choice
            _, _, k, step, is_end = heappop(events)
            touched.add(k)
            if is_end:
                devices[k].ended(step)
                go_on(step, now)
            else:
                devices[k].came(step.kind, step.microbatch)
    chunks = tuple(range(last + 1))
    name = "own order, split" if is_split else "own order"
    return Schedule(
        name, num_microbatches, chunks, (chunks,), tuple(tuple(d.steps) for d in devices)
    )
