"""Calls that end as soon as their callee is not alive any more.

A call may take as long as a whole exchange, and there may be hundreds at a time, to a few dozen
peers. A silent callee would hold its calls up to their deadline. So a callee is probed when an
answer should have come, the less often the longer its calls take anyway, and all calls to it end
when it does not answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import DeadlineExceeded, Gone, SwarmnetError
from swarmnet.methods.method import Method, ReplyT, RequestT
from swarmnet.protocol.membership.failure_detector import ALIVE, LateCallees, State
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.timing import DAY_S, LEAST_S
from swarmnet.swarm.calls import call as call_once
from swarmnet.transport.base import Transport
from swarmnet.wire import Message


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
    """The open calls of one peer."""

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
        """As `swarm.calls.call`. Raises `Unreachable` as soon as the callee is not alive.

        `timeout_s`: of the time in which this process runs. `usual_s`: how long such calls take;
        0 where that is unknown, infinity for a callee that is asked in another way."""
        loop = asyncio.get_running_loop()
        if not self._is_live(peer_id, loop.time()):
            raise _of(peer_id, Gone(f"{peer_id[-8:]} does not answer"))
        try:
            async with asyncio.timeout(None) as scope:
                deadline = Deadline.after(self._awake_s(), timeout_s)
                call = _Call(scope, loop.time(), usual_s, deadline)
                self._open.setdefault(peer_id, {})[call] = None
                call.timer = loop.call_later(timeout_s, self._expire, call)
                return await call_once(
                    self._transport,
                    peer_id,
                    method,
                    message,
                    timeout_s=timeout_s + DAY_S,  # time in which this process stood still
                    on_progress=on_progress,
                )
        except TimeoutError:
            self._transport.traffic.add_failed_call(method.name)
            if call.is_late:
                text = f"{method.name}: {peer_id[-8:]} did not answer within {timeout_s:.1f} s"
                raise _of(peer_id, DeadlineExceeded(text)) from None
            raise _of(peer_id, Gone(f"{peer_id[-8:]} has fallen silent")) from None
        finally:
            if call.timer is not None:
                call.timer.cancel()
            calls = self._open[peer_id]
            del calls[call]
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
        left_s = call.deadline.left_s(self._awake_s())
        if left_s > LEAST_S:  # this process has stood still: the answer may be there, unread
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(left_s, self._expire, call)
            return
        call.is_late = True
        _end(call)


def _of(peer_id: str, error: SwarmnetError) -> SwarmnetError:
    error.peer_id = peer_id
    return error


def _end(call: _Call) -> None:
    if not call.scope.expired():
        call.scope.reschedule(asyncio.get_running_loop().time())
