"""Several ways to one peer, tried one after the other without waiting long for any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarmnet.errors import Unreachable
from swarmnet.transport.base import ByteStream

Way = Callable[[], Coroutine[Any, Any, ByteStream]]


async def race(ways: Sequence[Way], head_starts_s: Sequence[float]) -> tuple[int, ByteStream]:
    """The stream of whichever way is open first, and which one that is. Each way is tried when all
    before it have failed, or have had their head start. Raises the last way's error where all
    fail."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[ByteStream]] = []
    won = -1
    try:
        for way, head_start_s in zip(ways, [*head_starts_s, None], strict=True):
            tasks.append(loop.create_task(way()))
            end = None if head_start_s is None else loop.time() + head_start_s
            while (waiting := [t for t in tasks if not t.done()]) and won < 0:
                left_s = None if end is None else end - loop.time()
                if left_s is not None and left_s <= 0:
                    break
                await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                won = _first_open(tasks)
            won = _first_open(tasks)
            if won >= 0:
                return won, tasks[won].result()
        raise tasks[-1].exception() or Unreachable("no way")
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for index, result in enumerate(results):
            if isinstance(result, ByteStream) and index != won:
                result.transport.abort()


def _first_open(tasks: Sequence[asyncio.Task[ByteStream]]) -> int:
    for index, task in enumerate(tasks):
        if task.done() and not task.cancelled() and task.exception() is None:
            return index
    return -1
