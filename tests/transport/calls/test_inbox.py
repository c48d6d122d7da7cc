"""Frames of a peer, assembled to messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarmnet.errors import NotReady, ProtocolViolation
from swarmnet.transport.base import Request, Traffic
from swarmnet.transport.calls.holdings import Holdings
from swarmnet.transport.calls.inbox import OTHER, Inbox
from swarmnet.transport.calls.outbox import Outgoing
from swarmnet.transport.calls.pending import PendingCalls
from swarmnet.transport.calls.replies import ReplyRoom
from swarmnet.transport.calls.served import ServedCalls
from swarmnet.transport.frames import (
    CANCEL,
    HELLO,
    NOTIFY,
    REPLY,
    REPLY_PART,
    REQUEST,
    REQUEST_PART,
    Head,
    Reader,
    head_frame,
    part_frames,
)
from swarmnet.transport.handlers import Handlers
from swarmnet.wire import Array, Message

ARRAYS = (Array("uint8", (10,), bytes(range(10))),)
ANNOUNCED = head_frame(REQUEST, 1, {"m": "m", "b": 5}, ARRAYS)
PARTS = b"".join(part_frames(REQUEST_PART, 1, ARRAYS))


class World:
    """An inbox behind a reader; it is its own greeting, which admits all but hellos."""

    remote, run_id, is_open, waiting_bytes = "peer", "run", True, 0

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.calls = PendingCalls()
        self.traffic = Traffic()
        handlers = Handlers()
        self.standing = True
        self.holdings = Holdings(self)
        served = ServedCalls(handlers, self, self, self.holdings, ReplyRoom(self))

        async def hear(request: Request) -> Message:
            self.heard.append(request.message)
            return Message()

        handlers.add("m", hear)
        self.inbox = Inbox(
            self,
            self.calls,
            served,
            lambda size: memoryview(bytearray(size)),
            self.traffic,
            self.holdings,
        )
        self.feed = Reader(self.inbox).feed_bytes

    def has_standing(self, machine: str) -> bool:
        return self.standing

    def expects(self, kind: int) -> None:
        pass

    def admits(self, head: Head) -> bool:
        return head.kind != HELLO

    def send(self, message: Outgoing) -> None:
        pass

    def abort(self, reason: str) -> None:
        self.is_open = False

    def withdraw_reply(self, call_id: int) -> None:
        pass


def play(scenario: Callable[[World], Any]) -> None:
    async def main() -> None:
        w = World()
        await scenario(w)

    asyncio.run(main())


def test_a_request_is_served_when_its_last_part_is_there() -> None:
    async def scenario(w: World) -> None:
        w.feed(ANNOUNCED)
        assert w.inbox.receiving_bytes == 10
        w.feed(PARTS)
        w.feed(head_frame(NOTIFY, 0, {"m": "m", "b": 6}))
        await asyncio.sleep(0)
        assert w.inbox.receiving_bytes == 0
        assert [m.body for m in w.heard] == [5, 6]
        assert bytes(w.heard[0].arrays[0].data) == ARRAYS[0].data

    play(scenario)


def test_a_request_given_up_half_sent_is_forgotten() -> None:
    async def scenario(w: World) -> None:
        w.feed(ANNOUNCED + head_frame(CANCEL, 1, {}))
        await asyncio.sleep(0)
        assert w.inbox.receiving_bytes == 0
        with pytest.raises(ProtocolViolation, match="a part of nothing"):
            w.feed(PARTS)
        assert w.heard == []

    play(scenario)


def test_a_reply_goes_to_its_call_and_is_read_past_where_the_caller_gave_up() -> None:
    async def scenario(w: World) -> None:
        futures = [w.calls.add(w.calls.next_id(), "peer", "m", None) for _ in range(2)]
        w.calls.remove(2)
        for call_id in (1, 2):
            w.feed(head_frame(REPLY, call_id, {"b": call_id}, ARRAYS))
            w.feed(b"".join(part_frames(REPLY_PART, call_id, ARRAYS)))
        assert (await futures[0]).body == 1
        assert not futures[1].done()
        with pytest.raises(ProtocolViolation, match="an answer to no call"):
            w.feed(head_frame(REPLY, 3, {"b": 3}))

    play(scenario)


def test_bytes_are_counted_under_names_that_mean_something_here() -> None:
    async def scenario(w: World) -> None:
        for method in ("m", "x" * 99, "y"):
            w.feed(head_frame(NOTIFY, 0, {"m": method}))
        w.feed(head_frame(HELLO, 0, {}) + head_frame(CANCEL, 7, {}))
        assert set(w.traffic.received_bytes) == {"m", OTHER, "hello"}

    play(scenario)


def test_nothing_is_left_when_the_stream_is_gone() -> None:
    async def scenario(w: World) -> None:
        w.feed(ANNOUNCED)
        w.inbox.clear()
        with pytest.raises(ProtocolViolation, match="a part of nothing"):
            w.inbox.assembly(REQUEST_PART, 1)

    play(scenario)


def test_a_reply_that_does_not_come_in_time_is_its_calls_failure() -> None:
    async def scenario(w: World) -> None:
        future = w.calls.add(w.calls.next_id(), "peer", "m", None)
        parts = b"".join(part_frames(REPLY_PART, 1, ARRAYS))
        w.feed(head_frame(REPLY, 1, {"b": 1}, ARRAYS))
        for _ in range(2):  # what had begun a lease ago, and nothing came since
            assert not future.done()
            assert w.inbox.expire()
        with pytest.raises(NotReady, match="did not come in time"):
            await asyncio.wait_for(future, 1.0)
        assert w.holdings.held_by("peer") == 0
        w.feed(parts)
        assert w.inbox.receiving_bytes == 0

    play(scenario)
