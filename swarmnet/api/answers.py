"""Answers of a run's thread to other threads, which may be interrupted while they wait.

A wait for a `concurrent.futures.Future` takes a lock that the answering thread takes too, in
functions of Python. An interrupt (Ctrl-C, the stop button of a notebook) that comes in one of them
leaves it locked, and the answering thread, with all that the run is, waits for it for ever. Here
nobody who waits or answers holds a lock: lists and `SimpleQueue` change in one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Answer(Generic[T]):
    """Given once; any number of threads and tasks wait for it."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._is_given = False
        self._waiting: list[Callable[[], object]] = []

    def give(self, value: T) -> None:
        """It is this; the first call counts."""
        if not self._is_given:
            self._values.append(value)
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Likewise: those that wait for it are told this."""
        if not self._is_given:
            self._error = error
        self._tell()

    @property
    def is_given(self) -> bool:
        return self._is_given

    @property
    def error(self) -> BaseException | None:
        """What it failed with, as far as is known."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has been given, within that time."""
        woken: SimpleQueue[None] = SimpleQueue()
        self._wake(lambda: woken.put(None))
        with suppress(Empty):
            woken.get(timeout=timeout_s)
        return self._is_given

    def result(self) -> T:
        """Waits for it. Raises what it failed with."""
        self.wait()
        return self._result()

    async def on_loop(self) -> T:
        """Likewise, on the caller's loop."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def tell() -> None:
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(wake)

        self._wake(tell)
        await woken
        return self._result()

    def _result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]

    def _wake(self, tell: Callable[[], object]) -> None:
        self._waiting.append(tell)
        if self._is_given:  # else whoever gives it finds it in the list
            self._tell()

    def _tell(self) -> None:
        self._is_given = True
        while self._waiting:
            with suppress(IndexError):  # another thread was here
                self._waiting.pop()()
