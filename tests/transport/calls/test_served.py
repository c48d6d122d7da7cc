"""Requests of a peer, from their arrival to their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarmnet.errors import Stale
from swarmnet.protocol.rate import RateLimiter
from swarmnet.transport.base import Request
from swarmnet.transport.calls import holdings
from swarmnet.transport.calls import served as module
from swarmnet.transport.calls.holdings import Holdings
from swarmnet.transport.calls.outbox import Outgoing
from swarmnet.transport.calls.replies import ReplyRoom
from swarmnet.transport.calls.served import ServedCalls
from swarmnet.transport.frames import ERROR, NOTIFY, PROGRESS, REPLY, REQUEST, Head
from swarmnet.transport.handlers import Handlers
from swarmnet.wire import Message, Packed, pack


class Caller:
    """The way back to a caller, and what that says of itself: keeps what it is to send."""

    remote, run_id, is_open, waiting_bytes = "peer", "run", True, 0

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.withdrawn: list[int] = []

    def send(self, message: Outgoing) -> None:
        self.sent.append((message.kind, message.call_id))

    def withdraw_reply(self, call_id: int) -> None:
        self.withdrawn.append(call_id)

    def abort(self, reason: str) -> None:
        self.is_open = False


class World:
    def __init__(self, handlers: Handlers) -> None:
        self.handlers = handlers
        self.caller = Caller()
        self.holdings = Holdings(handlers)
        self.replies = ReplyRoom(handlers)
        self.served = ServedCalls(handlers, self.caller, self.caller, self.holdings, self.replies)
        self.go = asyncio.Event()

        async def wait(request: Request) -> Message:
            request.progress(Message())
            await self.go.wait()
            request.progress(Message())
            return Message()

        async def fail(request: Request) -> Message:
            raise Stale("over", round=3)

        handlers.add("wait", wait)
        handlers.add("fail", fail)

    def request(self, call_id: int, method: str = "wait", num_bytes: int = 1) -> None:
        body = Packed(pack(bytes(num_bytes)))
        self.served.request(Head(REQUEST, call_id, {"m": method}, (), 0), Message(body), method)

    async def finish(self) -> None:
        self.go.set()
        while self.handlers.num_running("peer"):  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)


def play(scenario: Callable[[World], Any], handlers: Handlers | None = None) -> None:
    async def main() -> None:
        await scenario(World(handlers or Handlers()))

    asyncio.run(main())


def test_a_request_is_answered_with_progress_and_reply_or_an_error() -> None:
    async def scenario(w: World) -> None:
        for call_id, method in enumerate(("wait", "fail", "unknown"), 1):
            w.request(call_id, method)
        assert 1 in w.served
        assert (w.served.books(1), w.served.books(9)) == ("wait", None)
        await asyncio.sleep(0)
        await w.finish()
        assert w.caller.sent == [(PROGRESS, 1), (ERROR, 2), (ERROR, 3), (PROGRESS, 1), (REPLY, 1)]
        assert 1 not in w.served

    play(scenario)


def test_a_cancelled_request_is_not_answered() -> None:
    async def scenario(w: World) -> None:
        w.request(1)
        w.served.cancel(1)
        w.served.cancel(7)
        await w.finish()
        assert w.caller.sent == []
        assert w.caller.withdrawn == [7], "which may wait to be sent"

    play(scenario)


@pytest.mark.parametrize("turns", [0, 3])
@pytest.mark.parametrize("is_channel_gone", [False, True])
def test_work_that_is_for_its_caller_alone_ends_with_it(turns: int, is_channel_gone: bool) -> None:
    """Before the handler has begun, or later: what the call held is given back."""

    async def scenario(w: World) -> None:
        ended = list[str]()

        async def lasts(request: Request) -> Message:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(request.method)
            raise AssertionError

        w.handlers.add("lasts", lasts, ends_with_caller=True)
        w.request(1, "lasts")
        w.request(2, "wait")
        for _ in range(turns):
            await asyncio.sleep(0)
        if is_channel_gone:
            w.served.end()
        else:
            w.served.cancel(1)
        for _ in range(3):
            await asyncio.sleep(0)
        assert ended == ["lasts"] * bool(turns)
        assert 1 not in w.served
        assert 2 in w.served, "which others may join"
        await w.finish()
        assert w.holdings.held_by("peer") == 0

    play(scenario)


@pytest.mark.parametrize(
    ("where", "name", "limit"), [(module, "MAX_OPEN_CALLS", 1), (holdings, "MEMBER_BYTES", 5000)]
)
def test_requests_beyond_a_limit_are_busy(
    where: Any, name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, limit)

    async def scenario(w: World) -> None:
        w.request(1)
        w.request(2)
        assert w.caller.sent == [(ERROR, 2)]
        await w.finish()
        assert w.holdings.held_by("peer") == 0
        w.request(3, num_bytes=9000)  # alone, any size that the protocol allows
        await w.finish()
        assert w.caller.sent[-1] == (REPLY, 3)

    play(scenario)


def test_calls_that_come_too_often_are_busy_or_dropped() -> None:
    async def scenario(w: World) -> None:
        w.request(1)
        w.request(2)
        w.served.note(Head(NOTIFY, 0, {"m": "wait"}, (), 0), Message())
        assert w.caller.sent == [(ERROR, 2)]
        assert w.handlers.num_running("peer") == 1
        await w.finish()

    play(scenario, Handlers(RateLimiter(0.001, 1.0)))
