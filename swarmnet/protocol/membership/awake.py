"""Time that counts only while this process ran, for deadlines of other peers. Pure.

A machine that swaps, or is suspended, or has a disk that hangs, stops for seconds without knowing.
When it goes on, deadlines of others have passed, and what these sent meanwhile has not been read:
the others were not silent. So such deadlines are kept in time awake."""

from __future__ import annotations

import math

TICK_S = 0.5
"""Between two ticks of a process that runs; what passes by time alone is looked at with them, and a
callee that has not answered by then is probed. It protects from waiting for the deadline of a call
whose callee is silent (tests/swarm/update/test_live_calls.py)."""
LATE_S = 1.0
"""A tick that comes so much later shows that the process has stood still. It protects others from
this process's own stalls (tests/protocol/membership/test_awake.py)."""


class AwakeTime:
    """Of one process, which ticks every `TICK_S` while it runs."""

    def __init__(self) -> None:
        self._due = math.inf
        """When the next tick ought to come; infinity while it does not tick."""
        self.stalled_s = 0.0
        """How long the process has stood still, in all."""

    def tick(self, now: float) -> None:
        """The process runs, and ticks again after `TICK_S`. `stall` comes first."""
        self._due = now + TICK_S

    def stop(self) -> None:
        """No further tick comes: from now on it is an ordinary clock."""
        self._due = math.inf

    def stall(self, now: float) -> float:
        """For how long the process has just stood still, seconds; 0 as a rule. Each stall is
        returned once, to the first that asks after it."""
        late_s = now - self._due
        if late_s <= LATE_S:
            return 0.0
        self._due = now
        self.stalled_s += late_s
        return late_s

    def time(self, now: float) -> float:
        """`now` without the stalls; never runs backwards by more than `LATE_S`."""
        return now - self.stalled_s
