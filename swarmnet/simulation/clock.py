"""An asyncio event loop in virtual time.

The loop never sleeps: when nothing is ready it sets its clock to the next timer. Hours of
protocol run in seconds, on one thread, and with the same inputs in the same order each time:
callbacks that are due at the same instant run in the order in which they were scheduled.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from asyncio import base_events, tasks
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

RESOLUTION_S = 1e-7
"""Timers closer together than this fire at the same instant (exact up to 10^8 s in a double)."""
MIN_CANCELLED = 64
"""The heap is rebuilt without cancelled timers when there are more than this, at least."""
MAX_LISTED_TASKS = 16
"""Tasks named in an error."""

logger = logging.getLogger(__name__)


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, but a task still waits."""


class VirtualTimeLimit(RuntimeError):
    """The run went past its limit of virtual time."""


class VirtualLoop(base_events.BaseEventLoop):
    """`time()` starts at 0 and moves only when nothing is ready. No sockets, threads or signals."""

    def __init__(self, *, limit_s: float | None = None) -> None:
        """`limit_s`: virtual seconds after which the loop raises `VirtualTimeLimit`."""
        super().__init__()
        self._now = 0.0
        self._limit_s = limit_s
        self._num_timers = 0
        self._clock_resolution = RESOLUTION_S
        self._scheduled: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_cancelled_count = 0

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        """Sets the clock to the next timer."""
        when = self._scheduled[0][0]
        if self._limit_s is not None and when > self._limit_s:
            raise VirtualTimeLimit(
                f"not done after {self._limit_s} s; waiting: {self.describe_tasks()}"
            )
        self._now = max(self._now, when)

    def lift_limit(self) -> None:
        """Virtual time may go on for ever, so that tasks that are cancelled can clean up."""
        self._limit_s = None

    def stand_still(self, seconds: float) -> None:
        """Time passes and nothing runs, as when a machine is suspended: timers that were due
        meanwhile are due at once."""
        self._now += seconds

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        self._num_timers += 1
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, (when, self._num_timers, timer))
        timer._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001  loops set it
        return timer

    def _run_once(self) -> None:
        """One turn of the loop, as in `BaseEventLoop`; but the heap holds tuples, which keep the
        order of timers of the same instant and are compared without a call."""
        scheduled, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        if self._timer_cancelled_count > max(MIN_CANCELLED, len(scheduled) // 2):
            live = [entry for entry in scheduled if not entry[2].cancelled()]
            heapq.heapify(live)
            scheduled[:] = live
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0][2].cancelled():
            heapq.heappop(scheduled)
            self._timer_cancelled_count -= 1
        if not ready:
            if scheduled:
                self.jump()
            elif not self._stopping:  # type: ignore[attr-defined]
                waiting = self.describe_tasks()
                raise Deadlock(f"nothing can happen any more; waiting: {waiting}")
        end = self._now + RESOLUTION_S
        while scheduled and scheduled[0][0] < end:
            timer = heapq.heappop(scheduled)[2]
            if timer.cancelled():
                self._timer_cancelled_count -= 1
            else:
                timer._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001  likewise
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001  only a loop runs handles

    def describe_tasks(self) -> str:
        """The tasks that are not done, and the line at which each one waits."""
        waiting = _in_order(tasks.all_tasks(self))
        lines = [_where(task) for task in waiting[:MAX_LISTED_TASKS]]
        if len(waiting) > MAX_LISTED_TASKS:
            lines.append(f"and {len(waiting) - MAX_LISTED_TASKS} more")
        return "; ".join(lines) or "no task"

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> NoReturn:
        raise RuntimeError("there are no threads in virtual time")

    def _process_events(self, event_list: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(
    coro: Coroutine[Any, Any, T],
    *,
    seed: int | None = None,
    limit_s: float | None = None,
    leftovers: list[str] | None = None,
) -> T:
    """Runs a coroutine in virtual time, as `asyncio.run` does in real time.

    Tasks that are left at the end are cancelled, awaited and reported: logged, and their
    descriptions appended to `leftovers` where given. `seed` seeds Python's global generator for
    the length of the run, for libraries that use it. Raises `Deadlock`, or `VirtualTimeLimit`
    after `limit_s` virtual seconds."""
    loop = VirtualLoop(limit_s=limit_s)
    state = random.getstate()
    if seed is not None:
        random.seed(seed)
    try:
        return loop.run_until_complete(coro)
    finally:
        try:
            loop.lift_limit()
            _cancel_leftovers(loop, leftovers)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            if seed is not None:
                random.setstate(state)


def _cancel_leftovers(loop: VirtualLoop, leftovers: list[str] | None) -> None:
    left = _in_order(tasks.all_tasks(loop))
    if not left:
        return
    found = [_where(task) for task in left]
    logger.info("cancelled %d leftover tasks: %s", len(found), loop.describe_tasks())
    if leftovers is not None:
        leftovers.extend(found)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _in_order(unordered: Iterable[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """By name, numbers in names by value: automatic names count up."""
    return sorted(unordered, key=lambda t: (len(t.get_name()), t.get_name()))


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    code = getattr(task.get_coro(), "__qualname__", "?")
    if not frames:
        return f"{task.get_name()} ({code})"
    frame = frames[-1]
    return f"{task.get_name()} ({code}, {frame.f_code.co_filename}:{frame.f_lineno})"
