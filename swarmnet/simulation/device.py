"""Devices and threads in virtual time: the work is real, its duration is made up."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmnet.errors import Busy
from swarmnet.swarm.ports import PRIORITIES, Check

T = TypeVar("T")

MAX_WAITING = 1024
"""Pieces of work queued at most."""


@dataclass(slots=True, eq=False)
class _Job:
    kind: str
    work: Callable[[], Any]
    check: Check | None
    result: asyncio.Future[Any]
    seat: SyntheticSeat | None = None
    took_s: float = 0.0


class SyntheticDevice:
    """`ports.Device` on which a piece of work of some kind takes `seconds(kind)` of loop time.

    The work function itself runs at the end of that time, on the event loop; its check runs at the
    beginning and at the end. One piece of work runs at a time, in the order of the port."""

    def __init__(self, seconds: Callable[[str], float], *, max_waiting: int = MAX_WAITING) -> None:
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._heap: list[tuple[int, int, int, _Job]] = []
        """By turn, priority, and number of submission."""
        self._num_submitted = 0
        self._running: _Job | None = None
        self._busy_s = 0.0
        self._started_at = 0.0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_waiting(self) -> int:
        return len(self._heap) + (self._running is not None)

    def waiting_until(self, turn: int) -> int:
        """As the port says."""
        earlier = sum(entry[0] <= turn for entry in self._heap)
        return earlier + (self._running is not None)

    @property
    def busy_s(self) -> float:
        if self._running is None:
            return self._busy_s
        return self._busy_s + asyncio.get_running_loop().time() - self._started_at

    def seat(self) -> SyntheticSeat:
        """As the port says."""
        return SyntheticSeat(self)

    async def run(
        self,
        kind: str,
        work: Callable[[], T],
        turn: int = 0,
        check: Check | None = None,
        seat: SyntheticSeat | None = None,
    ) -> T:
        """Raises as `timed`."""
        return (await self.timed(kind, work, turn, check, seat))[0]

    async def timed(
        self,
        kind: str,
        work: Callable[[], T],
        turn: int = 0,
        check: Check | None = None,
        seat: SyntheticSeat | None = None,
    ) -> tuple[T, float]:
        """Raises `Busy` when the queue is full and `RuntimeError` when closed, else what `work`
        raises."""
        if self._closed:
            raise RuntimeError("the device is closed")
        if self.num_waiting >= self._max_waiting:
            raise Busy(
                "the device's queue is full", backlog_s=self.num_waiting * self._seconds(kind)
            )
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(kind, work, check, result, seat)
        self._num_submitted += 1
        heapq.heappush(self._heap, (turn, PRIORITIES[kind], self._num_submitted, job))
        if self._running is None:
            self._start_next()
        try:
            return await result, job.took_s
        except asyncio.CancelledError:
            self._heap = [entry for entry in self._heap if entry[3] is not job]
            heapq.heapify(self._heap)
            raise

    async def close(self) -> None:
        """Cancels work that has not started and waits for work that has. Idempotent."""
        self._closed = True
        waiting, self._heap = self._heap, []
        for *_, job in sorted(waiting, key=lambda entry: entry[:3]):
            job.result.cancel()
        await self._idle.wait()

    def _start_next(self) -> None:
        self._running = job = self._next()
        if job is None:
            self._idle.set()
            return
        self._idle.clear()
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        loop.call_later(max(0.0, self._seconds(job.kind)), self._finish, job)

    def _next(self) -> _Job | None:
        """The next piece of work that is still wanted."""
        while self._heap:
            job = heapq.heappop(self._heap)[3]
            if _is_wanted(job):
                return job
        return None

    def _finish(self, job: _Job) -> None:
        job.took_s = asyncio.get_running_loop().time() - self._started_at
        self._busy_s += job.took_s
        if job.seat is not None:
            job.seat.busy_s += job.took_s
        if _is_wanted(job):  # the work is done only now: its check must see the changes meanwhile
            try:
                value = _beside_the_loop(job.work)
            except Exception as error:
                if not job.result.done():
                    job.result.set_exception(error)
            else:
                if not job.result.done():
                    job.result.set_result(value)
        self._start_next()


def _is_wanted(job: _Job) -> bool:
    """False where the check failed, and the waiter got its error."""
    try:
        if job.check is not None:
            job.check()
    except Exception as error:
        if not job.result.done():
            job.result.set_exception(error)
        return False
    return True


def _beside_the_loop(work: Callable[[], T]) -> T:
    """Returns `work()`, which finds no event loop, as on the thread of a real device or worker."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)  # noqa: SLF001  asyncio keeps it for event loops
    try:
        return work()
    finally:
        asyncio._set_running_loop(loop)  # noqa: SLF001  likewise


class SyntheticSeat:
    """`ports.Device`: one seat's view of a device that several seats share."""

    def __init__(self, device: SyntheticDevice) -> None:
        self.busy_s = 0.0
        self._device = device

    @property
    def num_waiting(self) -> int:
        return self._device.num_waiting

    def waiting_until(self, turn: int) -> int:
        """As the port says."""
        return self._device.waiting_until(turn)

    async def run(
        self, kind: str, work: Callable[[], T], turn: int = 0, check: Check | None = None
    ) -> T:
        """Raises as `SyntheticDevice.run`."""
        return await self._device.run(kind, work, turn, check, self)

    async def timed(
        self, kind: str, work: Callable[[], T], turn: int = 0, check: Check | None = None
    ) -> tuple[T, float]:
        """Raises as `SyntheticDevice.timed`."""
        return await self._device.timed(kind, work, turn, check, self)

    def seat(self) -> SyntheticSeat:
        """As the port says."""
        return SyntheticSeat(self._device)

    async def close(self) -> None:
        """Does nothing: the machine closes the device."""


class InlineWorker:
    """`ports.Worker` without a thread: one piece of work at a time, in order, on the event loop,
    each after `seconds` of loop time. What it returns is there `taken()` seconds later."""

    def __init__(self, seconds: float = 0.0, taken: Callable[[], float] = lambda: 0.0) -> None:
        """`taken()`: what the work that has just been done takes besides."""
        self._seconds = seconds
        self._taken = taken
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Raises `RuntimeError` when closed, else what `work` raises."""
        if self._closed:
            raise RuntimeError("the worker is closed")
        async with self._turn:
            await asyncio.sleep(self._seconds)
            try:
                return _beside_the_loop(work)
            finally:
                if taken_s := self._taken():
                    await asyncio.sleep(taken_s)

    async def close(self) -> None:
        """Waits for work that has begun. Idempotent."""
        self._closed = True
        async with self._turn:
            pass
