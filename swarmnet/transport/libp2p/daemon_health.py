"""Whether the network daemon hangs, or only lacks a processor.

A daemon that hangs is replaced, and all its connections end. One that lacks a processor answers
late, and another in its place would lack it too. So silence counts only as far as the daemon could
have answered: while none of its threads wants a processor, and by the processor time that it gets
where one does. What this process missed because it stood still itself does not count either.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable

from swarmnet.system import ProcessorUse

log = logging.getLogger("swarmnet.transport")

PING_EVERY_S = 0.5
LOOK_S = 0.25
"""Between two looks at a daemon that has not answered yet; more than that counts of none."""
HANGS_S = 2.0
"""Of silence in which it could have answered."""
LONGEST_S = 60.0
"""Of silence, whatever it is said to wait for: a thread may wait for a broken disk for ever."""

NOTHING_SAID = "does not answer"
STILL_SILENT = f"has not answered for {LONGEST_S:.0f} s"
OVERLOADED = (
    "the network daemon (p2pd) gets hardly any processor time, so connections stand still: this "
    "machine has too much to do"
)


class Silence:
    """Of a daemon that was asked at `now`. Pure."""

    def __init__(self, now: float, use: ProcessorUse | None) -> None:
        self._looked_at = now
        self._use = use
        self.all_s = 0.0
        self.could_answer_s = 0.0

    def look(self, now: float, use: ProcessorUse | None) -> str:
        """It has not answered. `use`: of all its threads, since it began; None where the system
        does not say. Returns why it is to be replaced; empty where it may still answer."""
        part_s = min(now - self._looked_at, LOOK_S)
        self.all_s += part_s
        if use is not None and use.wants_more:
            before_s = self._use.used_s if self._use is not None else use.used_s
            part_s = min(part_s, max(0.0, use.used_s - before_s))
        self.could_answer_s += part_s
        self._looked_at, self._use = now, use
        if self.could_answer_s >= HANGS_S:
            return NOTHING_SAID
        return STILL_SILENT if self.all_s >= LONGEST_S else ""


async def until_broken(
    ended: asyncio.Future[int],
    ask: Callable[[], Awaitable[object]],
    use: Callable[[], ProcessorUse | None],
) -> str:
    """Asks a daemon again and again. Returns what is wrong with it: it has `ended`, with an exit
    code, or it hangs."""
    while True:
        await asyncio.wait((ended,), timeout=PING_EVERY_S)
        reason = await _until_answered(ended, ask, use)
        if reason:
            return reason


async def _until_answered(
    ended: asyncio.Future[int],
    ask: Callable[[], Awaitable[object]],
    use: Callable[[], ProcessorUse | None],
) -> str:
    """Empty where it has answered, else as `until_broken`."""
    loop = asyncio.get_running_loop()
    silence, is_said = Silence(loop.time(), use()), False
    asking = asyncio.ensure_future(ask())
    try:
        while not ended.done():
            await asyncio.wait((ended, asking), timeout=LOOK_S, return_when=FIRST_COMPLETED)
            if asking.done():
                if asking.exception() is None:
                    return ""
                await asyncio.wait((ended,), timeout=LOOK_S)  # refused: it dies, as a rule
                asking = asyncio.ensure_future(ask())
            reason = silence.look(loop.time(), use())
            if reason:
                return reason
            if silence.all_s >= HANGS_S and not is_said:
                log.warning("%s", OVERLOADED)
                is_said = True
        return f"ended with code {ended.result()}"
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
