"""The end of a command's process, with what its threads still do."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

THREAD_GRACE_S = 1.0
"""What threads have to end what is short, such as writing a small file."""


def end_process(code: int) -> NoReturn:
    """Ends it, when what libraries have registered for the end is done. The interpreter would wait
    for threads that nobody waits for any more, one that tokenizes gigabytes for minutes; and it
    would free some hundred thousand objects one by one, for seconds on a busy machine, where the
    kernel frees all of them at once."""
    with suppress(KeyboardInterrupt):
        if not _are_threads_left(time.monotonic() + THREAD_GRACE_S):
            atexit._run_exitfuncs()  # noqa: SLF001  there is no public name for it
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _are_threads_left(until_s: float) -> bool:
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.current_thread():
            continue
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            return True
    return False
