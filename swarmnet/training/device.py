"""The threads that work: one before the device, one that codes beside it, one for averaging.

`DeviceThread` is a priority queue before a thread: backward work first (it frees memory), then
forward, then what passes have left (`Passage.rest`), then other; the oldest first within a kind.
Results come back to the event loop that asked. A piece of work costs some tens of microseconds more
than calling it.

Of a `Passage` the device thread does the middle part. What comes is decoded by the coding thread
while the device is at something else, and what goes is coded there, so that the device goes on at
once. The device thread does not wait for the coding thread: what that has not begun when the turn
of a passage has come, it does itself. And it is at most `MAX_DEPARTING` passages ahead.

Results come in the order in which the device did the work: who hears that a round is closed has
heard of all that is in its gradient.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from swarmnet.errors import Busy, NotReady
from swarmnet.ports import BACKWARD, FORWARD, OTHER, PRIORITIES, REST, Check, Passage
from swarmnet.protocol.resource_limits import rest_s
from swarmnet.training.cores import CORES

MAX_WAITING = 1024
"""Pieces of work before one thread; more are refused with `Busy`."""
LONGEST_REST_S = 60.0
"""After one piece of work."""
KNOWN_AFTER = 5
"""So many passes of a kind tell how long it takes."""
PASSES = (FORWARD, BACKWARD)
"""Kinds of which one piece is as much work as another."""
MAX_DEPARTING = 1
"""Passages that the device thread has done and the coding thread has not: what waits keeps its
tensors, and a GPU must not be given more work than is known to be wanted
(tests/training/passes/test_passages.py)."""
CLOSE_TIMEOUT_S = 10.0
"""How long closing waits for the piece of work that runs."""

T = TypeVar("T")


def set_num_threads(num_threads: int) -> None:
    """Threads that one torch operation uses, in the whole process. To be called before the first
    `DeviceThread` or `WorkerThread` is made: OpenMP reads it once a thread."""
    torch.set_num_threads(num_threads)


@dataclass(frozen=True, slots=True)
class Piece:
    """The work that a thread is at."""

    number: int
    """How many it has begun."""
    longest_s: float | None = None
    """Of a forward or backward pass: seconds of the longest before; None where there were few."""


@dataclass(slots=True)
class _Kind:
    """What is known of pieces of one kind."""

    num_done: int = 0
    longest_s: float = 0.0
    num_rests: int = 0
    rests_s: float = 0.0
    """Seconds of what they have left, all of them together."""

    @property
    def rest_s(self) -> float:
        """Of one, the mean."""
        return self.rests_s / self.num_rests if self.num_rests else 0.0


@dataclass(slots=True)
class _Item:
    kind: str
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    priority: tuple[int, ...]
    seat: DeviceSeat | None = None
    check: Check | None = None
    arrival: _Arrival | None = None
    """Of a passage."""
    is_expected: bool = False
    """The coding thread has been told of it."""
    has_started: bool = False
    number: int = 0
    """See `Piece`."""
    worked_s: float = 0.0
    pause_s: float = 0.0
    """How long to rest after it."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """What a passage has left to do."""

    kind: str
    """Of the passage."""
    seat: DeviceSeat | None
    priority: tuple[int, ...]
    number: int
    """Of its submission."""
    work: Callable[[], bool]


class _Arrival:
    """What comes of a passage: done once, by whichever thread is there first."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: BaseException | None = None

    def prepare(self) -> None:
        """Does it, unless another thread has or does."""
        if self._lock.acquire(blocking=False):
            try:
                self._do()
            finally:
                self._lock.release()

    def take(self) -> Any:
        """What has come. Raises what the work raised."""
        with self._lock:
            self._do()
            value, self._value = self._value, None
        if self._error is not None:
            raise self._error
        return value

    def _do(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            self._value = work()
        except BaseException as error:
            self._error = error


class _CodingThread:
    """Does what it is given, in order."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="coding", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """`work` raises nothing."""
        self._work.put(work)

    def close(self, timeout_s: float) -> None:
        """Waits for what it has been given."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # do not keep its tensors alive while waiting


class WorkerThread:
    """A thread that does one piece of work at a time, by priority, then by age. For averaging,
    digests and data, or for the disk, it is a `ports.Worker`; a `DeviceThread` has one too."""

    def __init__(
        self,
        name: str = "averaging",
        *,
        has_cores: bool = False,
        begin: Callable[[], None] | None = None,
    ) -> None:
        """`has_cores`: its passes are the work of this machine's cores (`cores`). `begin`: the
        first thing that the thread does."""
        self._begin = begin
        self._has_cores = has_cores
        self.busy_s = 0.0
        self.num_waiting = 0
        self.max_share: float | None = None
        self._condition = threading.Condition()
        self._heap: list[tuple[tuple[int, ...], int, _Item | _Rest]] = []
        self._num_submitted = 0
        self._num_begun = 0
        self._at: _Item | None = None
        self._leaving: _Item | None = None
        """A passage that the coding thread has to end."""
        self._coding: _CodingThread | None = None
        self._room = threading.Semaphore(MAX_DEPARTING)
        self._left_s = 0.0
        """When the last passage was over that the device did on its own."""
        self._kinds = defaultdict[str, _Kind](_Kind)
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """Raises as `timed`."""
        return (await self.timed(OTHER, (), work))[0]

    async def run_all(self, pieces: Sequence[Callable[[], object]], *, side_by_side: bool) -> None:
        """As the port says; raises as `timed`."""

        def work() -> None:
            if side_by_side:
                CORES.side_by_side(pieces)
                return
            for piece in pieces:
                piece()

        await self.run(work)

    async def timed(
        self,
        kind: str,
        priority: tuple[int, ...],
        work: Callable[[], T],
        seat: DeviceSeat | None = None,
        check: Check | None = None,
    ) -> tuple[T, float]:
        """As `ports.Device.timed`. Raises `Busy` where `MAX_WAITING` pieces wait, `NotReady` once
        closed."""
        loop = asyncio.get_running_loop()
        item = _Item(kind, work, loop, loop.create_future(), priority, seat, check)
        if isinstance(work, Passage):
            item.arrival = _Arrival(work.arrive)
        with self._condition:
            if self._closed:
                raise NotReady("the device is closed")
            if self.num_waiting >= MAX_WAITING:
                raise Busy("too much work is waiting for the device")
            self._num_submitted += 1
            heapq.heappush(self._heap, (priority, self._num_submitted, item))
            self.num_waiting += 1
            if self._at is not None:
                self._expect_next()
            self._condition.notify()
        try:
            return await item.future, item.worked_s
        except asyncio.CancelledError:
            self._remove(item)
            raise

    def waiting_until(self, turn: int) -> int:
        """As the port says, of work whose priority is a turn and a kind's."""
        first_after = (turn, PRIORITIES[REST])
        with self._condition:
            return sum(entry[0] < first_after for entry in self._heap) + (self._at is not None)

    def at_work(self) -> Piece | None:
        """The piece of work that runs; None for none."""
        with self._condition:
            at = self._at or self._leaving
            if at is None:
                return None
            kind = self._kinds[at.kind]
            is_known = at.kind in PASSES and kind.num_done >= KNOWN_AFTER
            return Piece(at.number, kind.longest_s if is_known else None)

    async def close(self) -> None:
        """Refuses what waits, lets what runs finish. Idempotent."""
        with self._condition:
            self._closed = True
            waiting = [item for _, _, item in self._heap if isinstance(item, _Item)]
            self._heap = []
            self.num_waiting -= len(waiting)
            self._condition.notify()
        for item in waiting:
            _deliver(item, None, NotReady("the device is closed"))
        if self._thread is not threading.current_thread():
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._coding is not None:
            coding, self._coding = self._coding, None
            await asyncio.to_thread(coding.close, CLOSE_TIMEOUT_S)

    def _remove(self, item: _Item) -> None:
        with self._condition:
            if item.has_started:
                return
            kept = [entry for entry in self._heap if entry[2] is not item]
            self.num_waiting -= len(self._heap) - len(kept)
            heapq.heapify(kept)
            self._heap = kept

    def _main(self) -> None:
        if self._begin is not None:
            self._begin()
        while (item := self._next()) is not None:
            pause_s = self._do_rest(item) if isinstance(item, _Rest) else self._do(item)
            del item  # do not keep its tensors alive while waiting
            self._rest(pause_s)

    def _next(self) -> _Item | _Rest | None:
        with self._condition:
            while not self._heap and not self._closed:
                self._condition.wait()
            if not self._heap:
                return None
            item = heapq.heappop(self._heap)[2]
            if isinstance(item, _Rest):
                return item
            item.has_started = True
            self._num_begun += 1
            item.number = self._num_begun
            self._at = item
            self._expect_next()
            return item

    def _expect_next(self) -> None:
        """Has what comes of the next item decoded meanwhile. With the condition held, while the
        device is at work."""
        if not self._heap or self._closed:
            return
        item = self._heap[0][2]
        if isinstance(item, _Item) and item.arrival is not None and not item.is_expected:
            item.is_expected = True
            self._coder().submit(item.arrival.prepare)

    def _coder(self) -> _CodingThread:
        if self._coding is None:
            self._coding = _CodingThread()
        return self._coding

    def _do(self, item: _Item) -> float:
        """Returns how long to rest after it, seconds."""
        result: Any = None
        error: BaseException | None = None
        start_s = time.perf_counter()
        needs_cores = self._has_cores and item.kind in PASSES
        try:
            with CORES.pass_at_work() if needs_cores else contextlib.nullcontext():
                result = _worked(item)
        except BaseException as e:
            error = e
        worked_s = time.perf_counter() - start_s
        if not isinstance(item.work, Passage) or error is not None:
            self._end_in_turn(item, result, error, worked_s)
        else:
            self._room.acquire()  # the one before has left
            depart = functools.partial(self._depart, item, item.work, result, start_s, worked_s)
            with self._condition:
                self._leaving = item
                self._coder().submit(depart)
            if self.max_share is not None:  # how long it took is known when it has left
                with self._room:
                    pass
        with self._condition:
            self._at = None
            if error is None and isinstance(item.work, Passage) and item.work.rest is not None:
                self._num_submitted += 1
                priority = (*item.priority[:-1], PRIORITIES[REST])
                self._leave_rest(
                    _Rest(item.kind, item.seat, priority, self._num_submitted, item.work.rest)
                )
        return item.pause_s

    def _leave_rest(self, rest: _Rest) -> None:
        """For when there is nothing more urgent. With the condition held."""
        if not self._closed:
            heapq.heappush(self._heap, (rest.priority, rest.number, rest))

    def _do_rest(self, rest: _Rest) -> float:
        """A part of it. Returns as `_do`."""
        start_s = time.perf_counter()
        with CORES.pass_at_work() if self._has_cores else contextlib.nullcontext():
            is_more = rest.work()
        worked_s = time.perf_counter() - start_s
        pause_s = min(rest_s(worked_s, self.max_share), LONGEST_REST_S)
        with self._condition:
            self.busy_s += worked_s + pause_s
            if rest.seat is not None:
                rest.seat.worked_s += worked_s + pause_s
            kind = self._kinds[rest.kind]
            kind.rests_s += worked_s + pause_s
            if is_more:
                self._leave_rest(rest)
            else:
                kind.num_rests += 1
        return pause_s

    def _depart(
        self, item: _Item, passage: Passage[Any], done: Any, start_s: float, worked_s: float
    ) -> None:
        """On the coding thread."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = passage.depart(done)
        except BaseException as e:
            error = e
        if passage.is_apart:
            now_s = time.perf_counter()
            worked_s, self._left_s = now_s - max(start_s, self._left_s), now_s
        with self._condition:
            self._leaving = None
        self._end(item, result, error, worked_s)
        self._room.release()

    def _end_in_turn(
        self, item: _Item, result: Any, error: BaseException | None, worked_s: float
    ) -> None:
        """After the passage that is leaving, if one is."""
        if self._room.acquire(blocking=False):
            self._end(item, result, error, worked_s)
            self._room.release()
        else:
            self._coder().submit(functools.partial(self._end, item, result, error, worked_s))

    def _end(self, item: _Item, result: Any, error: BaseException | None, worked_s: float) -> None:
        """An item is done, or has failed."""
        if isinstance(error, StopIteration):  # a future cannot carry it
            error = RuntimeError(f"device work raised {error!r}")
        item.pause_s = min(rest_s(worked_s, self.max_share), LONGEST_REST_S)
        # A device that must rest is slower: who measures its speed by this clock finds it so.
        item.worked_s = worked_s + item.pause_s
        with self._condition:
            if self._at is item:  # who hears of it finds the thread free
                self._at = None
            self.busy_s += item.worked_s
            if item.seat is not None:
                item.seat.worked_s += item.worked_s
            self.num_waiting -= 1
            if error is None:  # what nobody wanted any more was not done
                kind = self._kinds[item.kind]
                kind.num_done += 1
                kind.longest_s = max(kind.longest_s, worked_s)
                if isinstance(item.work, Passage) and item.work.rest is not None:
                    item.worked_s += kind.rest_s  # the reply does not wait for it, the next does
        _deliver(item, result, error)

    def _rest(self, pause_s: float) -> None:
        until_s = time.perf_counter() + pause_s
        with self._condition:
            while not self._closed and (left_s := until_s - time.perf_counter()) > 0:
                self._condition.wait(left_s)


class DeviceSeat:
    """A device as one of the peers that work on it sees it; implements `ports.Device`."""

    def __init__(self, thread: WorkerThread) -> None:
        self.worked_s = 0.0
        """What the device has worked for this seat."""
        self._thread = thread

    @property
    def num_waiting(self) -> int:
        """Of everybody's work."""
        return self._thread.num_waiting

    def waiting_until(self, turn: int) -> int:
        """As the port says."""
        return self._thread.waiting_until(turn)

    @property
    def busy_s(self) -> float:
        return self.worked_s

    async def run(
        self, kind: str, work: Callable[[], T], turn: int = 0, check: Check | None = None
    ) -> T:
        """As the port says; raises as `WorkerThread.timed`."""
        return (await self.timed(kind, work, turn, check))[0]

    async def timed(
        self, kind: str, work: Callable[[], T], turn: int = 0, check: Check | None = None
    ) -> tuple[T, float]:
        """As the port says; raises as `WorkerThread.timed`."""
        return await self._thread.timed(kind, (turn, PRIORITIES[kind]), work, self, check)

    def seat(self) -> DeviceSeat:
        """As the port says."""
        return DeviceSeat(self._thread)

    async def close(self) -> None:
        """The device is its machine's to close."""


class DeviceThread(DeviceSeat):
    """The whole device, with the queue before it."""

    def __init__(self, *, has_cores: bool = True) -> None:
        """`has_cores`: as of `WorkerThread`; not where the device is no CPU."""
        CORES.prepare()
        self._has_cores = has_cores
        if not has_cores:
            super().__init__(WorkerThread("device"))
            return
        with CORES.for_device() as begin:
            super().__init__(WorkerThread("device", has_cores=True, begin=begin))

    @property
    def busy_s(self) -> float:
        return self._thread.busy_s

    def at_work(self) -> Piece | None:
        """As `WorkerThread.at_work`."""
        return self._thread.at_work()

    @property
    def share(self) -> float:
        """The part of the time that it works at most."""
        return 1.0 if self._thread.max_share is None else self._thread.max_share

    def limit_share(self, share: float | None) -> None:
        """Caps the part of the time that it works: after each piece of work it rests in
        proportion. None = no cap. So it is with what works on an update meanwhile."""
        self._thread.max_share = share
        CORES.limit_share(share)

    async def close(self) -> None:
        """As `WorkerThread.close`."""
        await self._thread.close()
        if self._has_cores:
            self._has_cores = False
            CORES.device_closed()


def _worked(item: _Item) -> Any:
    """The result of a piece of work, or what the device has made of a passage."""
    if item.check is not None:
        item.check()
    if isinstance(item.work, Passage):
        assert item.arrival is not None
        return item.work.compute(item.arrival.take())
    return item.work()


def _deliver(item: _Item, result: Any, error: BaseException | None) -> None:
    try:
        item.loop.call_soon_threadsafe(_resolve, item.future, result, error)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
