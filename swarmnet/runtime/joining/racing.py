"""Happy eyeballs: many addresses are tried, and the first that answers wins (RFC 8305)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.dialing.addresses import stagger_s

T = TypeVar("T")

LOOK_S = 0.5
"""Between two looks at what is new."""


def nothing_new() -> Sequence[str]:
    return ()


class NoneAnswers(SwarmnetError):
    """Every attempt failed."""

    def __init__(self, reasons: dict[str, SwarmnetError]) -> None:
        super().__init__("; ".join(f"{address}: {e}" for address, e in reasons.items()))
        self.reasons = reasons
        """By address, in the order in which they were tried."""


async def race(
    attempt: Callable[[str], Coroutine[Any, Any, T]],
    addresses: Sequence[str],
    news: Callable[[], Sequence[str]] = nothing_new,
) -> T:
    """What the first successful attempt returns; the others are cancelled. The next address is
    tried when the one before has failed, or `stagger_s` after it. `news`: addresses at which
    somebody listens since the last look, tried at once, also where they were tried before. Raises
    `NoneAnswers`."""
    loop = asyncio.get_running_loop()
    waiting = deque(dict.fromkeys(addresses))
    pause_s = stagger_s(len(waiting))
    reasons: dict[str, SwarmnetError] = dict.fromkeys(waiting, SwarmnetError("not tried"))
    tasks: dict[asyncio.Task[T], str] = {}
    next_at = loop.time()
    try:
        while waiting or tasks:
            if waiting and (not tasks or loop.time() >= next_at):
                address = waiting.popleft()
                tasks[loop.create_task(attempt(address))] = address
                next_at = loop.time() + pause_s
            left_s = max(0.0, next_at - loop.time()) if waiting else LOOK_S
            await asyncio.wait(
                tasks, timeout=min(left_s, LOOK_S), return_when=asyncio.FIRST_COMPLETED
            )
            for task in [t for t in tasks if t.done()]:
                address = tasks.pop(task)
                try:
                    return task.result()
                except SwarmnetError as e:
                    reasons[address] = e
                    next_at = loop.time()
            for address in news():
                tasks[loop.create_task(attempt(address))] = address
        raise NoneAnswers(reasons)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
