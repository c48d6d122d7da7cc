"""The end of a command's process, with what its threads still do."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

THREAD_GRACE_S = 1.0
"""What threads have to end what is short, such as writing a small file."""


def end_process(code: int) -> NoReturn:
    """Ends it. The interpreter would wait for threads that nobody waits for any more, one that
    tokenizes gigabytes for minutes."""
    with suppress(KeyboardInterrupt):
        if not _are_threads_left(time.monotonic() + THREAD_GRACE_S):
            sys.exit(code)
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
