"""Pieces that several peers could give: each comes from whom is done first, of those that were
asked as `protocol.least_rate` says. All downloads go this way: files, data, initial shards, and the
parameters that a joiner or an export fetches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from swarmnet.causes import Failures
from swarmnet.errors import Busy, NotReady, Stale, SwarmnetError
from swarmnet.protocol.least_rate import LeastRate
from swarmnet.protocol.moments import NEVER, Deadline, Since
from swarmnet.protocol.timing import BULK_S
from swarmnet.swarm.timing import LOOK_LESS_S, RETRY_S

PieceT = TypeVar("PieceT")


class _Asked(Generic[PieceT]):
    """Those that were asked for one piece: the first of them, and the newest, are at work."""

    def __init__(self) -> None:
        self.ever: dict[str, Deadline] = {}
        """Who was asked, and when each may be asked again: those that were busy."""
        self.newest = Since()
        """When it was asked."""
        self._at_work: dict[asyncio.Future[PieceT], tuple[str, Since]] = {}

    def add(self, giver: str, asking: Awaitable[PieceT], now: float) -> str | None:
        """One more is asked; returns who is left for it."""
        left = None
        if len(self._at_work) > 1:
            task = list(self._at_work)[-1]
            left, _ = self._at_work.pop(task)
            task.cancel()
        self._at_work[asyncio.ensure_future(asking)] = (giver, Since(now))
        self.newest.begin(now)
        self.ever[giver] = Deadline(NEVER)
        return left

    def failed(self, giver: str, error: SwarmnetError, now: float) -> None:
        """One gives nothing, or has no time now: another is asked at once."""
        self.newest = Since()
        if isinstance(error, Busy):
            self.ever[giver] = Deadline.after(now, max(RETRY_S, min(error.backlog_s, BULK_S)))

    def left_of(self, givers: Sequence[str], now: float) -> list[str]:
        """Of them, those that may be asked."""
        return [g for g in givers if g not in self.ever or self.ever[g].is_over(now)]

    def givers(self) -> list[str]:
        """That are at work."""
        return [giver for giver, _ in self._at_work.values()]

    async def done(self) -> list[tuple[asyncio.Future[PieceT], str, Since]]:
        """Those that are done, with when they were asked; none after a while."""
        await asyncio.wait(self._at_work, timeout=LOOK_LESS_S, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in self._at_work if task.done()]
        return [(task, *self._at_work.pop(task)) for task in done]

    async def end(self) -> None:
        """Nobody is waited for any more."""
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)


class Downloads:
    """Asks for pieces, and learns who gives them."""

    def __init__(self, rng: random.Random, failures: Failures | None = None) -> None:
        """`failures`: takes why peers do not give what they were asked for."""
        self._rng = rng
        self._least = LeastRate()
        self.failures = Failures() if failures is None else failures

    async def piece(
        self,
        givers: Sequence[str],
        ask: Callable[[str], Awaitable[PieceT]],
        num_bytes: int,
        prefer: str = "",
    ) -> tuple[str, PieceT]:
        """Who gave a piece first, and what `ask(giver)` has returned, which checks what it gets.
        `givers`: others may be added while they are asked. `num_bytes`: of the piece.
        `prefer`: whom to ask first, unless it was asked in vain before. Raises the
        last `SwarmnetError` where nobody gives it, and `Stale` as soon as it is said."""
        asked: _Asked[PieceT] = _Asked()
        error: SwarmnetError = NotReady("nobody to ask")
        loop = asyncio.get_running_loop()
        try:
            while (left := asked.left_of(givers, loop.time())) or asked.givers():
                if left and self._asks_another(asked, num_bytes, loop.time()):
                    is_first = not asked.ever
                    giver = self._least.next_of(left, self._rng, is_first=is_first, prefer=prefer)
                    slow = asked.add(giver, ask(giver), loop.time())
                    if slow is not None:
                        self._least.in_vain(slow)
                for task, giver, since in await asked.done():
                    try:
                        piece = task.result()
                    except SwarmnetError as e:
                        asked.failed(giver, e, loop.time())
                        self.failures.add(e, giver)
                        error = e
                        if isinstance(e, Stale):
                            raise
                        self._least.in_vain(giver, is_busy=isinstance(e, Busy))
                        continue
                    self.failures.answered(giver)
                    self._least.came(giver, num_bytes, since.s(loop.time()))
                    for slow in asked.givers():
                        self._least.in_vain(slow)
                    return giver, piece
            raise error
        finally:
            await asked.end()

    def _asks_another(self, asked: _Asked[PieceT], num_bytes: int, now: float) -> bool:
        if not asked.givers():
            return True
        return asked.newest.is_older(now, self._least.may_take_s(num_bytes, len(asked.ever)))
