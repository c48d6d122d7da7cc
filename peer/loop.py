"""Running a command's coroutine to its end, and ending it when somebody asks.

The first SIGINT or SIGTERM cancels the coroutine, which then drains and hands over in a time
that it bounds itself. The second cancels again: the cleanup is cut short. The third ends the
process.

A thread cannot be cancelled. What one still does when the coroutine has ended (it may tokenize
gigabytes) is of no use to anybody, so neither the loop nor the process (`peer.ending`) waits for
it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

ORPHAN_GRACE_S = 10
"""A peer whose parent died has this long to end before the kernel ends it."""
SIGNALS_BEFORE_EXIT = 3
PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """A signal ended the command."""


def run(main: Coroutine[Any, Any, T], parent_pid: int | None = None) -> T:
    """Runs `main` in a fresh event loop (uvloop). Raises `Stopped` where a signal ended it; a
    coroutine that returns in spite of the signal has ended well. Where `parent_pid` is given and
    gone when the signal comes, what is left of this process is bounded by `ORPHAN_GRACE_S`."""
    import uvloop

    outcome = uvloop.run(_supervise(main, parent_pid))
    if isinstance(outcome, Stopped):
        raise outcome
    return outcome


async def _supervise(main: Coroutine[Any, Any, T], parent_pid: int | None) -> T | Stopped:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    num_signals = 0

    def stop() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals >= SIGNALS_BEFORE_EXIT:
            os._exit(1)
        if parent_pid is not None and os.getppid() != parent_pid:
            signal.alarm(ORPHAN_GRACE_S)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, stop)
    threads = ThreadPoolExecutor(thread_name_prefix="beside")
    loop.set_default_executor(threads)
    try:
        return await task
    except asyncio.CancelledError:
        if num_signals == 0:
            raise
        return Stopped()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        loop.set_default_executor(ThreadPoolExecutor(1))  # which the loop waits for when it closes


def end_with_parent(parent_pid: int) -> None:
    """From now on this process ends when its parent does, however that ends (Linux).

    The kernel sends SIGTERM, so that what can be tidied is, and an alarm that nothing in this
    process can hold up follows."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
