"""Devices and threads in virtual time: the work is real, its duration is made up.

Where a device is given a `coding`, a coder stands beside it, and the two divide a `Passage` as the
threads of `training.device` do. The coder does one thing at a time, in order: it decodes what comes
of the device's next passage, and codes what goes of its last one. The device does not wait for it:
what the coder has not begun when the turn of a passage has come, the device decodes itself. And it
is at most one passage ahead of the coder. Results come in the order in which the device did the
work.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

from swarmnet.errors import Busy
from swarmnet.ports import PRIORITIES, REST, Check, Passage, undivided
from swarmnet.simulation.coding import NO_CODING, PassCoding

T = TypeVar("T")

MAX_WAITING = 1024
"""Pieces of work queued at most."""


class _Arrival(Enum):
    """Of what comes of a passage."""

    OPEN = auto()
    """Nobody has begun to decode it."""
    COMING = auto()
    """The coder decodes it."""
    THERE = auto()
    """It is decoded, or is by the device."""


@dataclass(slots=True, eq=False)
class _Job:
    kind: str
    work: Callable[[], Any]
    check: Check | None
    result: asyncio.Future[Any]
    seat: SyntheticSeat | None = None
    took_s: float = 0.0
    coding: PassCoding = NO_CODING
    """Of it, beside the device."""
    arrival: _Arrival = _Arrival.OPEN
    is_expected: bool = False
    """The coder has been told of it."""
    turn: int = 0
    number: int = 0
    """Of its submission."""


class _Coder:
    """A thread beside a device, which does what it is given, one thing at a time, in order."""

    def __init__(self, standstill_s: Callable[[], float]) -> None:
        self._standstill_s = standstill_s
        self._waiting: deque[tuple[Callable[[], float], Callable[[], None]]] = deque()
        self._is_at_work = False

    def submit(self, begin: Callable[[], float], end: Callable[[], None]) -> None:
        """`begin()` says how many seconds it takes, when its turn has come; then `end()`."""
        self._waiting.append((begin, end))
        if not self._is_at_work:
            self._go_on()

    def _go_on(self) -> None:
        self._is_at_work = True
        while self._waiting:
            begin, end = self._waiting.popleft()
            if seconds := begin():
                loop = asyncio.get_running_loop()
                loop.call_later(self._standstill_s() + seconds, self._ended, end)
                return
            end()
        self._is_at_work = False

    def _ended(self, end: Callable[[], None]) -> None:
        end()
        self._go_on()


class SyntheticDevice:
    """`ports.Device` on which a piece of work of some kind takes `seconds(kind)` of loop time.

    The work function itself runs at the end of that time, on the event loop; its check runs at the
    beginning and at the end. One piece of work runs at a time, in the order of the port."""

    def __init__(
        self,
        seconds: Callable[[str], float],
        coding: Callable[[str], PassCoding] | None = None,
        standstill_s: Callable[[], float] = lambda: 0.0,
        *,
        max_waiting: int = MAX_WAITING,
        most_owed: Callable[[], int] = lambda: MAX_WAITING,
    ) -> None:
        """
        Args:
            seconds: of the device, by the kind of work.
            coding: of a passage, by its kind, beside the device; None where nothing is beside it.
            standstill_s: how long the machine stands still from now on; asked when work begins.
            max_waiting: pieces of work queued at most.
            most_owed: passes that may have left something to do.
        """
        self._seconds = seconds
        self._coding = coding
        self._standstill_s = standstill_s
        self._max_waiting = max_waiting
        self._most_owed = most_owed
        self._heap: list[tuple[int, int, int, _Job]] = []
        """By turn, priority, and number of submission."""
        self._num_submitted = 0
        self._running: _Job | None = None
        self._done: tuple[_Job, Callable[[], Any]] | None = None
        """What runs is computed, and waits for the coder, with what this has to do."""
        self._leaving: _Job | None = None
        """A passage that the coder has to end."""
        self._coder = _Coder(standstill_s)
        self._busy_s = 0.0
        self._num_rests = 0
        self._rests_s = 0.0
        """Seconds of what passes have left, all of them together."""
        self._started_at: float | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_waiting(self) -> int:
        passes = [*(entry[3] for entry in self._heap), self._running, self._leaving]
        return sum(job is not None and job.kind != REST for job in passes)

    def waiting_until(self, turn: int) -> int:
        """As the port says."""
        earlier = sum(entry[:2] < (turn, PRIORITIES[REST]) for entry in self._heap)
        return earlier + (self._running is not None)

    @property
    def busy_s(self) -> float:
        if self._started_at is None:
            return self._busy_s
        return self._busy_s + asyncio.get_running_loop().time() - self._started_at

    def seat(self) -> SyntheticSeat:
        """As the port says."""
        return SyntheticSeat(self)

    async def run(
        self, kind: str, work: Callable[[], T], turn: int = 0, check: Check | None = None
    ) -> T:
        """Raises as `timed`."""
        return (await self.timed(kind, work, turn, check))[0]

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
        job = _Job(kind, work, check, result, seat, turn=turn)
        if self._coding is not None and isinstance(work, Passage):
            job.coding = self._coding(kind)
        self._push(job)
        if self._running is None:
            self._start_next()
        else:
            self._expect_next()
        has_rest = isinstance(work, Passage) and work.rest is not None
        try:
            value = await result
            if has_rest:  # nobody waits for it, but it is a part of the work
                job.took_s += self._rests_s / max(1, self._num_rests)
            return value, job.took_s
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

    def _push(self, job: _Job) -> None:
        if not job.number:
            self._num_submitted += 1
            job.number = self._num_submitted
        entry = (job.turn, PRIORITIES[job.kind], job.number, job)
        heapq.heappush(self._heap, entry)

    def _start_next(self) -> None:
        self._running = job = self._next()
        if job is None:
            self._rest()
            return
        self._idle.clear()
        self._started_at = asyncio.get_running_loop().time()
        self._expect_next()
        if job.arrival is _Arrival.COMING:
            return  # goes on when it is there
        arrive_s = job.coding.arrive_s if job.arrival is _Arrival.OPEN else 0.0
        job.arrival = _Arrival.THERE
        self._compute(job, arrive_s)

    def _next(self) -> _Job | None:
        """The next piece of work that is still wanted."""
        while self._heap:
            job = self._owed_first() or heapq.heappop(self._heap)[3]
            if _is_wanted(job):
                return job
        return None

    def _owed_first(self) -> _Job | None:
        """What the oldest pass has left, where the next one would leave too much."""
        work = self._heap[0][3].work
        if not isinstance(work, Passage) or work.rest is None:
            return None
        owed = [entry for entry in self._heap if entry[1] == PRIORITIES[REST]]
        if len(owed) < self._most_owed():
            return None
        self._heap.remove(oldest := min(owed))
        heapq.heapify(self._heap)
        return oldest[3]

    def _compute(self, job: _Job, arrive_s: float = 0.0) -> None:
        """After the device has spent `arrive_s` on what comes."""
        took_s = self._standstill_s() + arrive_s + self._seconds(job.kind)
        asyncio.get_running_loop().call_later(max(0.0, took_s), self._computed, job)

    def _computed(self, job: _Job) -> None:
        assert self._started_at is not None
        job.took_s = asyncio.get_running_loop().time() - self._started_at
        self._started_at = None
        self._busy_s += job.took_s
        if job.seat is not None:
            job.seat.busy_s += job.took_s
        if not _is_wanted(job):  # what is done only now must see the changes meanwhile
            self._start_next()
            return
        work = job.work
        passage = work if isinstance(work, Passage) else undivided(work)
        done = _attempt(job, lambda: passage.compute(passage.arrive()))
        if job.kind == REST:
            self._rests_s += job.took_s
            if done is not True:
                self._num_rests += 1
            elif not self._closed:
                self._push(job)
        if done is not FAILED and passage.rest is not None and not self._closed:
            self._push(_Job(REST, passage.rest, None, _unheard(), job.seat, turn=job.turn))
        depart = partial(passage.depart, done)
        if done is not FAILED and self._coding is not None and passage is work:
            self._done = job, depart
            if self._leaving is None:
                self._leave()
            return
        if done is not FAILED and self._leaving is not None:
            self._coder.submit(lambda: 0.0, partial(_settle, job, depart))
        elif done is not FAILED:
            _settle(job, depart)
        self._start_next()

    def _leave(self) -> None:
        """What is computed goes to the coder, and the device goes on."""
        assert self._done is not None
        (job, depart), self._done = self._done, None
        self._running = None
        self._leaving = job
        self._coder.submit(lambda: job.coding.depart_s, partial(self._left, job, depart))
        self._start_next()

    def _left(self, job: _Job, depart: Callable[[], Any]) -> None:
        self._leaving = None
        _settle(job, depart)
        if self._done is not None:
            self._leave()
        else:
            self._rest()

    def _rest(self) -> None:
        if self._running is None and self._leaving is None:
            self._idle.set()

    def _expect_next(self) -> None:
        """Has what comes of the next passage decoded, while the device is at work."""
        if not self._heap:
            return
        job = self._heap[0][3]
        if job.coding.arrive_s and not job.is_expected:
            job.is_expected = True
            self._coder.submit(partial(self._begin_arrival, job), partial(self._arrived, job))

    def _begin_arrival(self, job: _Job) -> float:
        if job.arrival is not _Arrival.OPEN:
            return 0.0
        job.arrival = _Arrival.COMING
        return job.coding.arrive_s

    def _arrived(self, job: _Job) -> None:
        if job.arrival is not _Arrival.COMING:
            return
        job.arrival = _Arrival.THERE
        if job is self._running:
            self._compute(job)


FAILED = object()


def _unheard() -> asyncio.Future[Any]:
    """For what nobody waits for."""
    return asyncio.get_running_loop().create_future()


def _attempt(job: _Job, work: Callable[[], Any]) -> Any:
    """What `work` returns; or `FAILED`, and the waiter has its error."""
    try:
        return _beside_the_loop(work)
    except Exception as error:
        if not job.result.done():
            job.result.set_exception(error)
        return FAILED


def _settle(job: _Job, work: Callable[[], Any]) -> None:
    """The waiter gets what `work` returns, or raises."""
    result = _attempt(job, work)
    if result is not FAILED and not job.result.done():
        job.result.set_result(result)


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
        """Raises as `SyntheticDevice.timed`."""
        return (await self.timed(kind, work, turn, check))[0]

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

    async def run_all(self, pieces: Sequence[Callable[[], object]], *, side_by_side: bool) -> None:
        """Raises as `run`."""
        await self.run(lambda: [piece() for piece in pieces])

    async def close(self) -> None:
        """Waits for work that has begun. Idempotent."""
        self._closed = True
        async with self._turn:
            pass
