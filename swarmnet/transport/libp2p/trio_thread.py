"""A thread that runs trio beside an asyncio loop, and the ways between the two.

asyncio asks with `run` (a coroutine of trio's, awaited from the loop) and `soon`; trio answers
with `soon_in_loop`. Nothing blocks either loop. trio is imported in the thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import trio

logger = logging.getLogger(__name__)

T = TypeVar("T")
Main = Callable[[Callable[[], None]], Awaitable[None]]
"""`main(ready)`: calls `ready()` once it can be asked for work; the thread ends when it returns."""


class ThreadEnded(Exception):
    """The thread is not running, or ended while it was asked."""


class TrioThread:
    """One thread, started and ended once. Made and used by one asyncio loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._thread: threading.Thread | None = None

    async def start(self, main: Main) -> None:
        """Returns when `main` is ready; raises what `main` raised before that."""
        self._thread = threading.Thread(
            target=self._run_thread, args=(main,), name=self._name, daemon=True
        )
        self._thread.start()
        await self._ready

    async def run(
        self, work: Callable[[], Awaitable[T]], discard: Callable[[T], None] | None = None
    ) -> T:
        """Runs `work` in trio; raises what it raises, or `ThreadEnded`. Cancelling the caller
        cancels it; `discard` gets a result that nobody waits for any more."""
        if self._token is None or self._nursery is None or self._ended.is_set():
            raise ThreadEnded
        future: asyncio.Future[T] = self._loop.create_future()
        job = _Job(work, discard, future, self)
        try:
            self._token.run_sync_soon(self._nursery.start_soon, job.run)
        except RuntimeError:  # trio.RunFinishedError
            raise ThreadEnded from None
        self._waiting[future] = None
        try:
            return await future
        except asyncio.CancelledError:
            self.soon(job.cancel)
            raise
        finally:
            del self._waiting[future]

    def soon(self, work: Callable[[], None]) -> None:
        """Calls `work()` in trio; drops it where the thread has ended."""
        if self._token:
            with contextlib.suppress(RuntimeError):  # trio.RunFinishedError
                self._token.run_sync_soon(work)

    def soon_in_loop(self, work: Callable[..., None], *args: Any) -> bool:
        """Calls `work(*args)` in the asyncio loop; False where the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(work, *args)
        except RuntimeError:
            return False
        return True

    async def join(self, timeout_s: float) -> bool:
        """Waits for the end of the thread; False where it did not come in time."""
        if self._thread is None:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        if self._ended.is_set():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run_thread(self, main: Main) -> None:
        error: BaseException = ThreadEnded()
        try:
            import trio

            trio.run(self._main, main)
        except BaseException as e:
            while isinstance(e, BaseExceptionGroup) and len(e.exceptions) == 1:
                e = e.exceptions[0]
            error = e
        self.soon_in_loop(self._on_end, error)

    async def _main(self, main: Main) -> None:
        import trio

        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await main(self._tell_ready)
            nursery.cancel_scope.cancel()

    def _tell_ready(self) -> None:
        self.soon_in_loop(self._on_ready)

    def _on_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _on_end(self, error: BaseException) -> None:
        self._ended.set()
        if not self._ready.done():
            self._ready.set_exception(error)
        elif not isinstance(error, ThreadEnded):
            logger.error("the thread %s ended: %r", self._name, error)
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(ThreadEnded())


class _Job:
    """One piece of work that asyncio asked of trio."""

    def __init__(
        self,
        work: Callable[[], Awaitable[T]],
        discard: Callable[[T], None] | None,
        future: asyncio.Future[T],
        thread: TrioThread,
    ) -> None:
        self._work = work
        self._discard = discard
        self._future = future
        self._thread = thread
        self._scope: trio.CancelScope | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """In trio."""
        self._is_cancelled = True
        if self._scope:
            self._scope.cancel()

    async def run(self) -> None:
        """In trio. Always answers."""
        import trio

        if self._is_cancelled:
            return
        try:
            with trio.CancelScope() as self._scope:
                result = await self._work()
                if not self._thread.soon_in_loop(self._on_result, result):
                    self._drop(result)
        except Exception as e:
            self._thread.soon_in_loop(self._on_error, e)

    def _on_result(self, result: Any) -> None:
        if self._future.done():
            self._drop(result)
        else:
            self._future.set_result(result)

    def _on_error(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    def _drop(self, result: Any) -> None:
        if self._discard:
            self._discard(result)
