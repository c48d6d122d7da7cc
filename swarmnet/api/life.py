"""A session on a thread with an event loop of its own.

So it does not matter whether the caller has a loop (a notebook has one, which runs all the time),
nor how long the caller's keeps still: whoever looks at a run has to hear of it all the while. The
kernel ends peers and daemons with the thread that has started them, and this one outlives them.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from threading import Thread, current_thread
from typing import Any, TypeVar

from swarmnet.api.answers import Answer
from swarmnet.api.session import Session
from swarmnet.errors import SwarmnetError, UsageError
from swarmnet.parsing.process import parsing
from swarmnet.system import fastest_loop

T = TypeVar("T")
STOPPED = "the run was stopped; open it again"
KILL_WAIT_S = 5.0
"""For what is left of a session, when its processes were killed."""

_living: dict[Life, None] = {}
"""Those that the end of the process has to stop, in the order of their beginning."""


class Life:
    """Opens a session, keeps it until it is stopped, and closes it. Its public methods are for
    other threads."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[Session]]) -> None:
        self._opening = opening
        self._pid = os.getpid()
        self._loop = (fastest_loop() or asyncio.new_event_loop)()
        self._is_stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self._asked: dict[Answer[Any], asyncio.Task[Any] | None] = {}
        """What others wait for, and who works on it."""
        self._failure: Exception | None = None
        self._follower: Thread | None = None
        self._follower_error: Exception | None = None
        self._opened: Answer[Session] = Answer()
        self._ended: Answer[None] = Answer()

    # ---- for other threads ------------------------------------------------------------------

    def start(self) -> Answer[Session]:
        """What it opens, or the error where that fails."""
        _living[self] = None
        Thread(target=self._run, name="swarmnet", daemon=True).start()
        return self._opened

    def submit(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> Answer[T]:
        """Work with the session, on its loop. Raises `UsageError` where the session is closed; the
        answer does where it is closed meanwhile."""
        session = self._opened.result()
        if self._is_stopping.is_set():
            raise UsageError(STOPPED)
        answer: Answer[T] = Answer()
        self._asked[answer] = None  # first: at its end the thread answers all that is here
        if not self._tell(partial(self._take, work, session, answer)):
            self._asked.pop(answer, None)
            answer.fail(UsageError(STOPPED))
        return answer

    def give_up(self, answer: Answer[Any]) -> None:
        """Nobody waits for it any more: the work is cancelled."""
        self._tell(partial(self._cancel_work, answer))

    def follow(self, work: Callable[[], None]) -> None:
        """Work beside the run, on a thread of its own; it ends with the run. Once. Those that wait
        for the end wait for it too, and are told what it raised."""

        def do() -> None:
            try:
                work()
            except Exception as error:
                self._follower_error = error

        self._follower = Thread(target=do, name="swarmnet-follower", daemon=True)
        self._follower.start()

    def _join_follower(self) -> None:
        if self._follower is None or self._follower is current_thread():
            return
        self._follower.join()
        if self._follower_error is not None:
            raise self._follower_error

    def stop(self) -> Answer[None]:
        """Begins to close the session, also one that is being opened. The answer comes when all is
        gone; it is the error that the session ended by, if any."""
        self._tell(self._stop)
        return self._ended

    def hurry(self) -> None:
        """Of one that is being closed: its processes are killed."""
        self._tell(self._cancel)

    @property
    def is_over(self) -> bool:
        """All is gone, and so is the thread."""
        return self._ended.is_given

    def wait_end(self) -> None:
        """Stops it and waits; Ctrl-C kills what is left. Raises the error that it ended by, or that
        of its follower."""
        try:
            self.stop().result()
            self._join_follower()
        except KeyboardInterrupt:
            self.hurry()
            self._ended.wait(KILL_WAIT_S)
            raise

    async def ended(self) -> None:
        """Likewise, on the caller's loop; cancelled, it kills what is left."""
        try:
            await self.stop().on_loop()
            if self._follower is not None:
                await asyncio.to_thread(self._join_follower)
        except asyncio.CancelledError:
            self.hurry()
            raise

    @property
    def is_here(self) -> bool:
        """This process has begun it, and was not forked from that one."""
        return os.getpid() == self._pid

    def _tell(self, what: Callable[[], None]) -> bool:
        """False where the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            return False
        return True

    # ---- on its own thread ------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except asyncio.CancelledError:
            error = SwarmnetError(STOPPED)
        except BaseException as e:
            error = e
        _living.pop(self, None)
        if not _living:
            parsing().close()  # its child would stay for minutes
        if not self._opened.is_given:
            self._opened.fail(error or SwarmnetError(STOPPED))
        for answer in list(self._asked):
            answer.fail(UsageError(STOPPED))
        if isinstance(error, Exception) and self._opened.error is None:
            self._ended.fail(error)
        else:
            self._ended.give(None)

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        threads = ThreadPoolExecutor(thread_name_prefix="swarmnet")
        loop.set_default_executor(threads)
        try:
            if not self._is_stopping.is_set():
                async with self._opening() as session:
                    await self._keep(session)
        finally:
            # What a thread still does (it may tokenize gigabytes) is of no use to anybody.
            threads.shutdown(wait=False, cancel_futures=True)
            loop.set_default_executor(ThreadPoolExecutor(1))

    async def _keep(self, session: Session) -> None:
        self._opened.give(session)
        self._begin(self._watch(session))
        try:
            await self._is_stopping.wait()
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            session.history.end()
        if self._failure is not None:
            raise self._failure

    async def _watch(self, session: Session) -> None:
        try:
            await session.watch()
        except Exception as error:
            self._failure = error
        session.history.end(self._failure)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _take(
        self,
        work: Callable[[Session], Coroutine[Any, Any, T]],
        session: Session,
        answer: Answer[T],
    ) -> None:
        if self._is_stopping.is_set():
            self._asked.pop(answer, None)
            answer.fail(UsageError(STOPPED))
            return
        task = self._asked[answer] = self._begin(work(session))
        task.add_done_callback(partial(self._answer, answer))

    def _answer(self, answer: Answer[T], task: asyncio.Task[T]) -> None:
        self._asked.pop(answer, None)
        if task.cancelled():
            is_over = self._is_stopping.is_set()
            answer.fail(UsageError(STOPPED) if is_over else asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            answer.fail(error)
        else:
            answer.give(task.result())

    def _cancel_work(self, answer: Answer[Any]) -> None:
        task = self._asked.get(answer)
        if task is not None:
            task.cancel()

    def _stop(self) -> None:
        self._is_stopping.set()
        if not self._opened.is_given:
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _stop_all() -> None:
    lives = [life for life in _living if life.is_here]
    for life in lives:
        life.stop()
    for life in lives:
        with suppress(Exception):
            life.wait_end()


atexit.register(_stop_all)
