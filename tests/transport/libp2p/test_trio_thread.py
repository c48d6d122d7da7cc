"""The thread that runs trio beside an asyncio loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import trio
import trio.lowlevel

from swarmnet.transport.libp2p.trio_thread import ThreadEnded, TrioThread

JOIN_TIMEOUT_S = 30.0


class Main:
    """What the thread runs: ready at once, until `stop`."""

    async def __call__(self, ready: Callable[[], None]) -> None:
        self._stopping = trio.Event()
        ready()
        await self._stopping.wait()

    def stop(self) -> None:
        self._stopping.set()


async def started() -> tuple[TrioThread, Main]:
    thread, main = TrioThread("test-trio"), Main()
    await thread.start(main)
    return thread, main


def test_work_runs_in_trio_and_answers_in_asyncio() -> None:
    async def work() -> str:
        await trio.lowlevel.checkpoint()
        return threading.current_thread().name

    async def main() -> None:
        thread, life = await started()
        assert await thread.run(work) == "test-trio"
        thread.soon(life.stop)
        assert await thread.join(JOIN_TIMEOUT_S)

    asyncio.run(main())


def test_errors_of_work_reach_the_caller_and_nobody_else() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    async def work() -> int:
        return 1

    async def main() -> None:
        thread, life = await started()
        with pytest.raises(ValueError, match="mine"):
            await thread.run(fail)
        assert await thread.run(work) == 1
        thread.soon(life.stop)
        assert await thread.join(JOIN_TIMEOUT_S)

    asyncio.run(main())


def test_cancelling_the_caller_cancels_the_work() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async def main() -> None:
        thread, life = await started()
        task = asyncio.create_task(thread.run(work))
        await asyncio.to_thread(begun.wait, JOIN_TIMEOUT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cancelled.wait, JOIN_TIMEOUT_S)
        thread.soon(life.stop)
        assert await thread.join(JOIN_TIMEOUT_S)

    asyncio.run(main())


def test_a_result_that_comes_too_late_is_discarded() -> None:
    begun, go = threading.Event(), threading.Event()
    discarded: asyncio.Queue[str]

    async def work() -> str:
        begun.set()
        go.wait(JOIN_TIMEOUT_S)  # holds trio, so that the cancellation comes too late
        return "late"

    async def main() -> None:
        nonlocal discarded
        discarded = asyncio.Queue()
        thread, life = await started()
        task = asyncio.create_task(thread.run(work, discarded.put_nowait))
        await asyncio.to_thread(begun.wait, JOIN_TIMEOUT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        assert await discarded.get() == "late"
        thread.soon(life.stop)
        assert await thread.join(JOIN_TIMEOUT_S)

    asyncio.run(main())


def test_an_error_before_it_is_ready_reaches_start() -> None:
    async def fail(ready: Callable[[], None]) -> None:
        raise OSError("no port")

    async def main() -> None:
        thread = TrioThread("test-trio")
        with pytest.raises(OSError, match="no port"):
            await thread.start(fail)
        assert await thread.join(JOIN_TIMEOUT_S)
        with pytest.raises(ThreadEnded):
            await thread.run(trio.sleep_forever)

    asyncio.run(main())


def test_work_that_is_running_when_the_thread_ends_is_told() -> None:
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await trio.sleep_forever()

    async def main() -> None:
        thread, life = await started()
        task = asyncio.create_task(thread.run(work))
        await asyncio.to_thread(begun.wait, JOIN_TIMEOUT_S)
        thread.soon(life.stop)
        with pytest.raises(ThreadEnded):
            await task
        assert await thread.join(JOIN_TIMEOUT_S)
        assert "test-trio" not in [t.name for t in threading.enumerate()]

    asyncio.run(main())
