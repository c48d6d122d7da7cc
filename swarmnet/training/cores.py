"""Long vectors, part by part, on the cores that the device leaves free.

A pass over a vector is cut into parts that stay in a processor's cache, so that what is done to a
part one thing after the other reads and writes main memory once. Between two rounds the device
waits for the update, and helpers work on it, one for each thread that torch has (`--threads`).
Where a CPU is the device, they leave as soon as it has a pass to make, which has all those threads:
then the thread that makes the update goes on alone.

The numbers are the same, whoever works on a part. Cores are the process's, and so is what this
module knows of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

PART = 1 << 17
"""Numbers; a multiple of a row of coded shards. A torch operation costs microseconds beside its
numbers, so that parts should not be small."""
MOST_HELPERS = 16
"""More of them wait for the interpreter and for memory, and not for numbers."""

Work = Callable[[slice], None]
"""On a part of a vector. Parts are worked on in any order, by several threads."""


class Cores:
    """Those that may be used here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_passes = 0
        self._share = 1.0
        self._pool: ThreadPoolExecutor | None = None

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
        num_helpers = min(int(torch.get_num_threads() * self._share), MOST_HELPERS)
        return 0 if self._num_passes or num_helpers < 2 else num_helpers

    def over(self, num_numbers: int, work: Work, *, in_parts: bool = True) -> None:
        """Has all of a vector worked on. Raises what `work` raises; then some parts are done and
        some are not. `in_parts`: False where it cannot be cut."""
        size = PART if in_parts else max(num_numbers, 1)
        parts = [slice(a, min(a + size, num_numbers)) for a in range(0, num_numbers, size)]
        wanted = min(self.num_helpers, len(parts))
        if wanted < 2:
            for part in parts:
                work(part)
            return
        turns = _Turns(parts, work, wanted)
        for _ in range(wanted):
            self._helpers().submit(self._help, turns)
        turns.until_left()
        while turns.next():
            pass
        turns.check()

    def _help(self, turns: _Turns) -> None:
        try:
            while not self._num_passes and turns.next():
                pass
        finally:
            turns.leave()

    def _helpers(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    MOST_HELPERS, "helper", initializer=_narrow, initargs=(torch.get_num_threads(),)
                )
            return self._pool


def _narrow(num_threads: int) -> None:
    """Has torch's operations in this thread use no other one. `num_threads`: of the process, which
    threads that come later are to have: torch gives them the number that was set last."""
    torch.get_num_threads()  # else the first operation takes over what was set last
    torch.set_num_threads(1)
    others = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    others.start()
    others.join()


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


def scratch(name: str, num_numbers: int) -> Tensor:
    """fp32 [num_numbers], of this thread, and whatever was left there under this name: memory that
    is new costs more than numbers."""
    if num_numbers > PART:
        return torch.empty(num_numbers)
    vector = _scratch.vectors.get(name)
    if vector is None:
        vector = _scratch.vectors[name] = torch.empty(PART)
    return vector[:num_numbers]


CORES = Cores()
"""Of this process."""
