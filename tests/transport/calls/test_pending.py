"""Calls that wait for their replies."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.errors import Busy, ChannelClosed
from swarmnet.transport.calls.pending import PendingCalls
from swarmnet.wire import Message


def begin(
    calls: PendingCalls, remote: str = "b", told: list[object] | None = None
) -> tuple[int, asyncio.Future[Message]]:
    call_id = calls.next_id()
    on_progress = None if told is None else lambda note: told.append(note.body)
    return call_id, calls.add(call_id, remote, "m", on_progress)


def test_a_call_hears_of_its_progress_and_its_reply() -> None:
    async def main() -> None:
        calls, told = PendingCalls(), list[object]()
        call_id, future = begin(calls, told=told)
        assert (call_id, calls.method_of(call_id), call_id in calls) == (1, "m", True)
        calls.progress(call_id, Message("half"))
        calls.reply(call_id, Message("done"))
        assert (await future).body == "done"
        assert told == ["half"]
        assert not calls.is_waiting(call_id)
        calls.fail(call_id, Busy("too late", backlog_s=1.0))
        calls.remove(call_id)
        calls.remove(call_id)
        assert call_id not in calls
        assert calls.method_of(call_id) is None
        calls.reply(call_id, Message("again"))

    asyncio.run(main())


def test_an_error_is_the_calls() -> None:
    async def main() -> None:
        calls = PendingCalls()
        call_id, future = begin(calls)
        calls.fail(call_id, Busy("full", backlog_s=1.0))
        with pytest.raises(Busy, match="full"):
            await future

    asyncio.run(main())


def test_a_lost_peer_fails_its_calls_and_no_others() -> None:
    async def main() -> None:
        calls = PendingCalls()
        (_, lost), (other_id, other) = begin(calls), begin(calls, "c")
        calls.lose("test", "b")
        with pytest.raises(ChannelClosed, match="the channel to b closed: test"):
            await lost
        assert calls.is_waiting(other_id)
        calls.lose("test")
        with pytest.raises(ChannelClosed):
            await other

    asyncio.run(main())


def test_ids_count_up() -> None:
    calls = PendingCalls()
    assert not calls.was_made(1)
    assert [calls.next_id() for _ in range(3)] == [1, 2, 3]
    assert [calls.was_made(n) for n in (1, 3, 4)] == [True, True, False]
