"""The alarm of the system that ends a parsing process, whatever a library in it is doing.

It counts the time that the process has on a core: where the machine stands still, or has much else
to do, a file is not to blame.
"""

from __future__ import annotations

import signal
import time

_until = float("inf")
"""Of the present call, by `time.process_time`."""


def begin(seconds: float) -> None:
    """A call, of at most so many seconds. SIGPROF, which nobody handles, ends the process then."""
    global _until
    _until = time.process_time() + seconds
    signal.setitimer(signal.ITIMER_PROF, seconds)


def within(seconds: float) -> None:
    """The alarm comes in so many seconds, or at the end of the call's time if that is earlier: for
    a part of a call. Does nothing in a process that has not begun a call."""
    left = _until - time.process_time()
    if left < float("inf"):
        signal.setitimer(signal.ITIMER_PROF, max(min(left, seconds), 1e-3))


def end() -> None:
    """The call is over."""
    global _until
    _until = float("inf")
    signal.setitimer(signal.ITIMER_PROF, 0)
