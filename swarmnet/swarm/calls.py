"""The methods of the table over a transport: what is called and what is served has types, and what
comes is decoded and checked by the method's row. Most calls end with their callee (`LiveCalls`)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import Busy, DeadlineExceeded, Gone, ProtocolViolation, SwarmnetError
from swarmnet.methods.method import Method, ReplyT, RequestT
from swarmnet.protocol.membership.failure_detector import ALIVE, LateCallees, State
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.timing import DAY_S, LEAST_S
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.calls")


def serve(
    transport: Transport,
    method: Method[RequestT, ReplyT],
    handler: Callable[[Request[RequestT]], Awaitable[Message[ReplyT]]],
) -> None:
    """As `Transport.handle`. The body has been decoded by the gate (`membership.callers`)."""
    transport.handle(method.name, handler, ends_with_caller=method.ends_with_caller)


async def call(
    transport: Transport,
    peer_id: str,
    method: Method[RequestT, ReplyT],
    message: Message[RequestT],
    *,
    timeout_s: float,
    on_progress: Callable[[Message[Any]], None] | None = None,
) -> Message[ReplyT]:
    """As `Transport.call`. A reply of another form than the method's is a `ProtocolViolation`, and
    a progress message of another form is not heard. What it raises names the peer."""
    hear = None
    if on_progress is not None:

        def hear(note: Message) -> None:
            try:
                decoded = method.progress_in(note)
            except ProtocolViolation as e:
                log.debug("progress of %s: %s", method.name, e)
                return
            on_progress(decoded)

    try:
        reply = await transport.call(
            peer_id, method.name, message, timeout_s=timeout_s, on_progress=hear
        )
        return method.reply_in(reply)
    except SwarmnetError as e:
        e.of(peer_id)
        raise


def notify(
    transport: Transport, peer_id: str, method: Method[RequestT, Any], message: Message[RequestT]
) -> None:
    """As `Transport.notify`."""
    transport.notify(peer_id, method.name, message)


@dataclass(eq=False, slots=True)
class _Call:
    scope: asyncio.Timeout
    began: float
    usual_s: float
    deadline: Deadline
    """In time awake."""
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False


class LiveCalls:
    """The open calls of one peer, which end as soon as their callee is not alive any more.

    A call may take as long as a whole exchange, and there may be hundreds at a time, to a few dozen
    peers. A silent callee would hold its calls up to their deadline. So a callee is probed when an
    answer should have come, the less often the longer its calls take anyway, and all calls to it
    end when it does not answer."""

    def __init__(self, transport: Transport, view: View) -> None:
        self._transport = transport
        self._view = view
        self._open: dict[str, dict[_Call, None]] = {}
        """By callee; the oldest first."""
        self._late = LateCallees()

    async def call(
        self,
        peer_id: str,
        method: Method[RequestT, ReplyT],
        message: Message[RequestT],
        *,
        timeout_s: float,
        on_progress: Callable[[Message[Any]], None] | None = None,
        usual_s: float = 0.0,
    ) -> Message[ReplyT]:
        """As `call` above. Raises `Unreachable` as soon as the callee is not alive.

        `timeout_s`: of the time in which this process runs. `usual_s`: how long such calls take;
        0 where that is unknown, infinity for a callee that is asked in another way."""
        loop = asyncio.get_running_loop()
        if not self._is_live(peer_id, loop.time()):
            raise Gone(f"{peer_id[-8:]} does not answer").of(peer_id)
        try:
            async with asyncio.timeout(None) as scope:
                deadline = Deadline.after(self._awake_s(), timeout_s)
                made = _Call(scope, loop.time(), usual_s, deadline)
                self._open.setdefault(peer_id, {})[made] = None
                made.timer = loop.call_later(timeout_s, self._expire, made)
                return await call(
                    self._transport,
                    peer_id,
                    method,
                    message,
                    timeout_s=timeout_s + DAY_S,  # time in which this process stood still
                    on_progress=on_progress,
                )
        except TimeoutError:
            self._transport.traffic.add_failed_call(method.name)
            if made.is_late:
                text = f"{method.name}: {peer_id[-8:]} did not answer within {timeout_s:.1f} s"
                raise DeadlineExceeded(text).of(peer_id) from None
            raise Gone(f"{peer_id[-8:]} has fallen silent").of(peer_id) from None
        finally:
            if made.timer is not None:
                made.timer.cancel()
            calls = self._open[peer_id]
            del calls[made]
            if not calls:
                del self._open[peer_id]
                self._late.forget(peer_id)

    def changed(self, peer_id: str, state: State) -> None:
        """Ends the calls to a peer that is not alive any more."""
        if state is not ALIVE:
            for call in self._open.get(peer_id, ()):
                _end(call)

    def look(self, now: float) -> list[str]:
        """To be called often: ends the calls to silent callees, and returns those that are late and
        to be probed."""
        late = []
        for peer_id, calls in self._open.items():
            asked = [c for c in calls if c.usual_s != math.inf]
            if asked and self._late.is_due(peer_id, asked[0].began, asked[0].usual_s, now):
                late.append(peer_id)
            if not self._is_live(peer_id, now):
                for call in calls:
                    _end(call)
        return late

    def _is_live(self, peer_id: str, now: float) -> bool:
        return self._view.reach.state_of(peer_id, now) is ALIVE

    def _awake_s(self) -> float:
        return self._view.reach.awake_s(asyncio.get_running_loop().time())

    def _expire(self, call: _Call) -> None:
        now = self._awake_s()
        if call.deadline.has_more_than(LEAST_S, now):
            # This process has stood still: the answer may be there, unread.
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(call.deadline.left_s(now), self._expire, call)
            return
        call.is_late = True
        _end(call)


def _end(call: _Call) -> None:
    if not call.scope.expired():
        call.scope.reschedule(asyncio.get_running_loop().time())


class ServingQueue:
    """Callers that ask for what takes a while to give: a few are served at a time, a bounded number
    waits."""

    def __init__(self, at_once: int, most: int) -> None:
        """`most`: served and waiting."""
        self._at_once = asyncio.Semaphore(at_once)
        self._most = most
        self._num = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The turn of one caller, when it has come. Raises `Busy`."""
        if self._num >= self._most:
            raise Busy("serving others", backlog_s=LOOK_LESS_S)
        self._num += 1
        try:
            async with self._at_once:
                yield
        finally:
            self._num -= 1
