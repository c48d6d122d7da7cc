"""Whether processes that compute together have come to a standstill: which is what a process that
hangs, or two that wait for each other, look like from outside.

Time alone does not tell: between two collectives a process may compute for minutes, and all others
wait for it. So a call counts as hanging when *none* of those at it has worked for so long, though
it could. A process works while its threads use processors (`system.processor_use`). The thread that
does the call works whenever it uses one: it waits for another, or for something that never comes,
asleep. Threads of libraries may look around all the time. They take little of a processor between
two sleeps, on a busy or a slow machine too, and one that computes takes much.

While a thread waits for a disk, or for a processor, time does not count: it could not have worked.
One that runs in circles works, by this.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path

from swarmnet.system import ProcessorUse, ThreadUse

TICKS_S = 0.05
"""Of processor time: what the system's ticks do not tell from none."""
SHARE = 0.02
"""Of a processor: less is what those use that wait and look now and then."""
GLANCE_S = 0.001
"""Of processor time between two sleeps: what a look around may take. gloo's threads take a
fiftieth of that, a hundred times a second."""
SLEEPS = 2
"""Between two looks: a thread that has gone to sleep more often had a processor."""
LATE = 1 / 4
"""Of the limit: of a look that comes late no more counts, for this process stood still too, or got
no processor."""
FIRST = 1 / 20
"""Of the limit: from then on processes are looked at; most calls are shorter."""

LIBRARY = Path(threading.__file__).parent
NEW = ThreadUse(0.0, 0, is_ready=False)


class Standstill:
    """Watches one call after the other."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: without work."""
        self._limit_s = limit_s
        self._at: Hashable | None = None
        self._still_s = 0.0
        self._last = 0.0
        self._began: Mapping[int, ThreadUse] | None = None
        """All threads, at the first look since there was work."""
        self._before: Mapping[int, ThreadUse] = {}
        """At the look before."""

    def see(
        self,
        now: float,
        at: Hashable | None,
        uses: Callable[[], Sequence[ProcessorUse | None]],
        callers: Collection[int] = (),
    ) -> bool:
        """True when they stand still. To be called several times within the limit.

        Args:
            now: in seconds.
            at: how far they are with the call that is under way; None for none.
            uses: reads what each process has used; None of one that cannot be seen.
            callers: the threads that do the call, by the system's numbers.
        """
        since_last_s = min(now - self._last, LATE * self._limit_s)
        self._last = now
        if at is None or at != self._at:
            self._at, self._still_s, self._began = at, 0.0, None
            return False
        if self._still_s + since_last_s < FIRST * self._limit_s:
            self._still_s += since_last_s
            return False
        read = uses()
        found = [use for use in read if use is not None]
        threads = {number: thread for use in found for number, thread in use.threads.items()}
        before, self._before = self._before, threads
        could_work = not any(use.waits_for_disk for use in found) and not _starved(before, threads)
        if len(found) < len(read):
            self._still_s, self._began = 0.0, None
        elif self._began is None:
            self._began = threads
        elif _used_s(self._began, threads, callers) > TICKS_S + SHARE * self._still_s:
            self._still_s, self._began = 0.0, threads
        elif could_work:
            self._still_s += since_last_s
        return self._still_s > self._limit_s


def _starved(before: Mapping[int, ThreadUse], now: Mapping[int, ThreadUse]) -> bool:
    """A thread wanted a processor at the look before, and does still."""
    return any(
        thread.is_ready
        and number in before
        and before[number].is_ready
        and thread.sleeps - before[number].sleeps <= SLEEPS
        for number, thread in now.items()
    )


def _used_s(
    began: Mapping[int, ThreadUse], now: Mapping[int, ThreadUse], callers: Collection[int]
) -> float:
    """Of processors, without what it takes to look around. One that has ended has worked."""
    if not began.keys() <= now.keys():
        return float("inf")
    used_s = 0.0
    for number, thread in now.items():
        old = began.get(number, NEW)
        glances_s = 0.0 if number in callers else GLANCE_S * (thread.sleeps - old.sleeps)
        used_s += max(0.0, thread.used_s - old.used_s - glances_s)
    return used_s


def place_of(thread: threading.Thread) -> str:
    """Where in the code a thread of this process is, for people. Of Python's own library it is the
    caller."""
    innermost = frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  documented so
    while frame is not None and Path(frame.f_code.co_filename).parent == LIBRARY:
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its end"
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
