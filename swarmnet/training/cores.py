"""Whose the cores are: of the device while it has a pass to make, else of long vectors.

Where a CPU is the device, operations of its thread have all the threads that torch has
(`--threads`), and those of every other thread one. This is not only fair. OpenMP keeps the threads
that an operation has had; where a process has more of them than the machine has cores, GNU's
library lets them sleep at the end of each loop, and a pass of small operations takes 1.5 times as
long (`benchmarks/device_threads.py`).

A pass over a vector is cut into parts that stay in a processor's cache, so that what is done to a
part one thing after the other reads and writes main memory once. Between two rounds the device
waits for the update, and helpers work on it, one for each of those threads: on parts of one vector,
or each on a short vector of its own. Where a CPU is the
device, they leave as soon as it has a pass to make: then the thread that makes the update goes on
alone.

The numbers of a vector are the same, whoever works on a part; those of a product of matrices are
not. Cores are the process's, and so is what this module knows of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

PART = 1 << 17
"""Numbers that are worked on at a time, at most."""
LEAST_SHARED = 1 << 19
"""Numbers that helpers are called for: on a busy machine it takes milliseconds until they are there
(`benchmarks/round_end.py`)."""
GRAIN = 1 << 13
"""Parts begin at multiples of it: two rows of coded shards."""
PART_APART = 1 << 23
"""Likewise in a device's memory, where each step takes time to start."""
MOST_HELPERS = 16
"""More of them wait for the interpreter and for memory, and not for numbers."""

Work = Callable[[slice], object]
"""On a part of a vector. Parts are worked on in any order, by several threads."""


class Cores:
    """Those that may be used here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_passes = 0
        self._share = 1.0
        self._waiting = SimpleQueue[_Turns]()
        self._num_started = 0
        self._num_devices = 0
        self._place = threading.local()
        """`is_helper`: this thread is one, and others are not waited for there."""
        self._num_threads: int | None = None
        """Of the device's operations, where a CPU is the device."""

    @property
    def num_threads(self) -> int:
        """Threads that an operation of the device has, and helpers that there may be."""
        return self._num_threads or torch.get_num_threads()

    def keep_for_device(self, num_threads: int | None = None) -> None:
        """Operations of a device's thread will have so many threads, by default as many as those of
        this thread have. Those of this thread, and of all that are started later, have one. Best
        before the first operation: what this thread has had stays with it."""
        with self._lock:
            self._num_threads = num_threads or self.num_threads
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def for_device(self) -> Iterator[Callable[[], None]]:
        """In this context a device's thread is started, which begins by calling what comes of
        it."""
        self.keep_for_device()
        with self._lock:
            self._num_devices += 1
        num_threads, is_taken = self.num_threads, threading.Event()

        def take() -> None:
            torch.get_num_threads()  # else the first operation takes over what was set last
            torch.set_num_threads(num_threads)
            is_taken.set()

        yield take
        is_taken.wait()
        torch.set_num_threads(1)  # for what is started later

    def device_closed(self) -> None:
        """Nobody works on a device of `for_device` any more: the thread that says so gets back what
        it had, unless there is another device."""
        with self._lock:
            self._num_devices -= 1
            if self._num_devices or self._num_threads is None:
                return
            num_threads, self._num_threads = self._num_threads, None
        torch.set_num_threads(num_threads)

    @contextlib.contextmanager
    def pass_at_work(self) -> Iterator[None]:
        """The device needs the cores in this context."""
        with self._lock:
            self._num_passes += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_passes -= 1

    def limit_share(self, share: float | None) -> None:
        """The part of the time that the device works at most; so much of the cores is used
        here."""
        self._share = 1.0 if share is None else share

    @property
    def num_helpers(self) -> int:
        """Threads that may work now in place of the one that asks; 0 where they were no help."""
        num_helpers = min(int(self.num_threads * self._share), MOST_HELPERS)
        is_helper = getattr(self._place, "is_helper", False)
        return 0 if is_helper or self._num_passes or num_helpers < 2 else num_helpers

    def over(self, num_numbers: int, work: Work, *, in_parts: bool = True) -> None:
        """Has all of a vector worked on. Raises what `work` raises; then some parts are done and
        some are not. `in_parts`: False where it cannot be cut."""
        num_helpers = self.num_helpers if num_numbers >= LEAST_SHARED else 0
        size = _part_size(num_numbers, num_helpers) if in_parts else max(num_numbers, 1)
        parts = [slice(a, min(a + size, num_numbers)) for a in range(0, num_numbers, size)]
        self._share_out(parts, work, num_helpers)

    def side_by_side(self, pieces: Sequence[Callable[[], object]]) -> None:
        """Does pieces of work that do not depend on each other. Raises what one of them raises;
        then some are done and some are not."""
        turns = [slice(i, i + 1) for i in range(len(pieces))]
        self._share_out(turns, lambda turn: pieces[turn.start](), self.num_helpers)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b`, (m, k) and (k, n) in the host's memory, rows of it by helpers. Its bits depend
        on how many there are."""
        out = a.new_empty(a.shape[0], b.shape[1])
        num_helpers = self.num_helpers if out.numel() >= LEAST_SHARED else 0
        size = -(-len(out) // max(num_helpers, 1))
        parts = [slice(i, min(i + size, len(out))) for i in range(0, len(out), size)]
        self._share_out(parts, lambda rows: torch.mm(a[rows], b, out=out[rows]), num_helpers)
        return out

    def _share_out(self, parts: list[slice], work: Work, num_helpers: int) -> None:
        wanted = min(num_helpers, len(parts))
        if wanted < 2:
            for part in parts:
                work(part)
            return
        self.prepare()
        turns = _Turns(parts, work, wanted)
        for _ in range(wanted):
            self._waiting.put(turns)
        turns.until_left()
        while turns.next():
            pass
        turns.check()

    def prepare(self) -> None:
        """Starts as many helpers as there may be, where they have not been. Best before other
        threads: torch gives each the number of threads that was set last, and that of a helper is
        one for a moment."""
        with self._lock:
            before = torch.get_num_threads()
            wanted = min(self.num_threads, MOST_HELPERS) if self.num_threads > 1 else 0
            if wanted <= self._num_started:
                return
            while self._num_started < wanted:
                self._num_started += 1
                is_ready = threading.Event()
                name, arguments = f"helper-{self._num_started}", (is_ready,)
                threading.Thread(target=self._main, args=arguments, name=name, daemon=True).start()
                is_ready.wait()
            torch.set_num_threads(before)

    def _main(self, is_ready: threading.Event) -> None:
        torch.get_num_threads()  # else the first operation takes over what was set last
        torch.set_num_threads(1)
        self._place.is_helper = True
        is_ready.set()
        while True:
            self._help(self._waiting.get())

    def _help(self, turns: _Turns) -> None:
        try:
            while not self._num_passes and turns.next():
                pass
        finally:
            turns.leave()


def _part_size(num_numbers: int, num_helpers: int) -> int:
    """So that all helpers have about as much to do."""
    if num_helpers < 2:
        return PART
    share = -(-num_numbers // (num_helpers * GRAIN)) * GRAIN
    return min(max(share, GRAIN), PART)


class _Turns:
    """Who works on which part of one vector."""

    def __init__(self, parts: list[slice], work: Work, num_helpers: int) -> None:
        self._parts = parts
        self._work = work
        self._lock = threading.Lock()
        self._num_begun = 0
        self._num_helpers = num_helpers
        self._have_left = threading.Event()
        self._error: BaseException | None = None

    def next(self) -> bool:
        """Works on the next part. False where none is left, or one has failed."""
        with self._lock:
            i = self._num_begun
            if i == len(self._parts) or self._error is not None:
                return False
            self._num_begun += 1
        try:
            self._work(self._parts[i])
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
        return True

    def leave(self) -> None:
        """A helper does not work on it any more."""
        with self._lock:
            self._num_helpers -= 1
            if not self._num_helpers:
                self._have_left.set()

    def until_left(self) -> None:
        """Waits until all helpers have left."""
        self._have_left.wait()

    def check(self) -> None:
        """Raises what the work on a part has raised."""
        if self._error is not None:
            raise self._error


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.vectors: dict[str, Tensor] = {}


_scratch = _Scratch()


def scratch(name: str, like: Tensor) -> Tensor:
    """fp32 of this vector's size and device, of this thread, and whatever was left there under this
    name: memory that is new costs more than numbers."""
    num_numbers = like.numel()
    if num_numbers > PART or not like.is_cpu:  # a device's memory is kept for it by torch
        return torch.empty_like(like, dtype=torch.float32)
    vector = _scratch.vectors.get(name)
    if vector is None:
        vector = _scratch.vectors[name] = torch.empty(PART)
    return vector[:num_numbers]


CORES = Cores()
"""Of this process."""


def over(vector: Tensor, work: Work, *, in_parts: bool = True) -> None:
    """As `Cores.over`, of a vector in the host's memory. One in a device's is worked on there."""
    num_numbers = vector.numel()
    if vector.is_cpu:
        CORES.over(num_numbers, work, in_parts=in_parts)
        return
    size = PART_APART if in_parts else max(num_numbers, 1)
    for start in range(0, num_numbers, size):
        work(slice(start, min(start + size, num_numbers)))
