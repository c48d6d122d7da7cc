"""The checks of signatures: beside the event loop, a batch at a time, in the order that
`protocol.membership.intake` says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from swarmnet.protocol.membership.intake import Intake, Ticket
from swarmnet.protocol.timing import LEAST_WAIT_S

T = TypeVar("T")


class Signer(Protocol):
    """Signs as this peer and checks the signatures of others."""

    def sign(self, data: bytes) -> bytes: ...

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        """Called on any thread."""

    async def beside(self, work: Callable[[], T]) -> T:
        """Runs `work`, which verifies signatures, where it holds nobody up."""


class RecordChecks:
    """Turns of those whose records wait to be checked."""

    def __init__(self) -> None:
        self._intake = Intake()
        self._turns: dict[Ticket, asyncio.Future[bool]] = {}
        """Those that wait for one: False where it does not come."""
        self._timer: asyncio.TimerHandle | None = None

    def may_check_at_once(self, sizes: Sequence[int]) -> bool:
        """As `Intake.may_check_at_once`."""
        return self._intake.may_check_at_once(sizes, asyncio.get_running_loop().time())

    def enter(self, sender: str, lane: int, num_bytes: int) -> Ticket | None:
        """As `Intake.enter`. A ticket has to `leave`."""
        ticket = self._intake.enter(sender, lane, num_bytes)
        self._tell_dropped()
        return ticket

    @asynccontextmanager
    async def turn(self, ticket: Ticket, cost: float) -> AsyncIterator[bool]:
        """The ticket's turn to have so much checked, when it has come; False where it was dropped
        and none comes."""
        if ticket.is_dropped:
            yield False
            return
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._intake.queue(ticket, cost)
        self._grant()
        try:
            yield await turn
        except BaseException:
            self._turns.pop(ticket, None)
            self._intake.leave(ticket)
            raise
        finally:
            self._intake.done(ticket)
            self._grant()

    def leave(self, ticket: Ticket) -> None:
        """Nothing of it waits any more."""
        self._intake.leave(ticket)

    def drop(self, sender: str) -> None:
        """Nothing of a sender is checked that waits now."""
        self._intake.drop(sender)
        self._tell_dropped()

    def close(self) -> None:
        """No turn comes any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _grant(self) -> None:
        loop = asyncio.get_running_loop()
        ticket = self._intake.next(loop.time())
        if ticket is not None:
            self._end(ticket, True)
            return
        wait_s = self._intake.wait_s(loop.time())
        if wait_s is not None and self._timer is None:
            self._timer = loop.call_later(max(LEAST_WAIT_S, wait_s), self._grant_later)

    def _grant_later(self) -> None:
        self._timer = None
        self._grant()

    def _tell_dropped(self) -> None:
        for ticket in self._intake.take_dropped():
            self._end(ticket, False)

    def _end(self, ticket: Ticket, has_come: bool) -> None:
        turn = self._turns.pop(ticket, None)
        if turn is not None and not turn.done():
            turn.set_result(has_come)
