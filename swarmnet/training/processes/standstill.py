"""Whether processes that compute together have come to a standstill: which is what a process that
hangs, or two that wait for each other, look like from outside.

Time alone does not tell: between two collectives a process may compute for minutes, and all others
wait for it. So a call counts as hanging when *none* of those at it has done anything for so long.
A process works while one of its threads has a processor, wants one, or waits for a disk
(`system.processor_use`). One that waits for another, or for something that never comes, does not,
though a thread of a library may look around all the time: on a busy machine that one waits for a
processor too whenever it is seen, but it goes to sleep by itself between. One that runs in circles
works, by this.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

from swarmnet.system import ProcessorUse

TICKS_S = 0.05
"""Of processor time: what the system's ticks do not tell from none."""
SHARE = 0.02
"""Of a processor: less is what threads use that wait and look now and then, as gloo's do."""
SLEEPS = 2
"""Between two looks: a thread that has gone to sleep more often looks around, and does not want to
compute."""
LATE = 1 / 4
"""Of the limit: of a look that comes late no more counts, for this process stood still too, or got
no processor."""
FIRST = 1 / 20
"""Of the limit: from then on processes are looked at; most calls are shorter."""

LIBRARY = Path(threading.__file__).parent


class Standstill:
    """Watches one call after the other."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: without work."""
        self._limit_s = limit_s
        self._at: Hashable | None = None
        self._still_s = 0.0
        self._last = 0.0
        self._used_s: float | None = None
        self._ready: dict[int, int] = {}
        """Threads that could compute at the look before."""

    def see(
        self,
        now: float,
        at: Hashable | None,
        uses: Callable[[], Sequence[ProcessorUse | None]],
    ) -> bool:
        """True when they stand still. To be called several times within the limit.

        Args:
            now: in seconds.
            at: how far they are with the call that is under way; None for none.
            uses: reads what each process has used; None of one that cannot be seen.
        """
        since_last_s = min(now - self._last, LATE * self._limit_s)
        self._last = now
        if at is None or at != self._at:
            self._at, self._still_s, self._used_s = at, 0.0, None
            return False
        self._still_s += since_last_s
        if self._still_s < FIRST * self._limit_s:
            return False
        found = uses()
        before = self._ready
        self._ready = {t: n for use in found if use is not None for t, n in use.ready.items()}
        waiting = [use for use in found if use is not None and not _wants(use, before)]
        used_s = sum(use.used_s for use in waiting)
        if len(waiting) < len(found):
            self._still_s, self._used_s = 0.0, None
        elif self._used_s is None:
            self._used_s = used_s
        elif used_s < self._used_s or used_s - self._used_s > TICKS_S + SHARE * self._still_s:
            # Less than before is of a helper that has ended.
            self._still_s, self._used_s = 0.0, used_s
        return self._still_s > self._limit_s


def _wants(use: ProcessorUse, before: Mapping[int, int]) -> bool:
    """It waits for a disk, or a thread wanted to compute at the look before and does still."""
    return use.waits_for_disk or any(
        thread in before and sleeps - before[thread] <= SLEEPS
        for thread, sleeps in use.ready.items()
    )


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
