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
import os
import signal
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swarmnet.system import ending_signals, fastest_loop

T = TypeVar("T")

ORPHAN_GRACE_S = 10
"""A peer whose parent died has this long to end, from the SIGTERM that it gets then, before an
alarm that nothing in the process can hold up ends it."""
SIGNALS_BEFORE_EXIT = 3


class Stopped(Exception):
    """A signal ended the command."""


def run(main: Coroutine[Any, Any, T], parent_pid: int | None = None) -> T:
    """Runs `main` in a fresh event loop. Raises `Stopped` where a signal ended it; a
    coroutine that returns in spite of the signal has ended well. Where `parent_pid` is given and
    gone when the signal comes, what is left of this process is bounded by `ORPHAN_GRACE_S`."""
    before = {number: signal.getsignal(number) for number in ending_signals()}
    try:
        with asyncio.Runner(loop_factory=fastest_loop()) as runner:
            outcome = runner.run(_supervise(main, parent_pid))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # uvloop leaves them with the loop that is closed
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

    for number in ending_signals():
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
