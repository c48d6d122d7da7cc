"""Handlers of several seats, and the tasks in which they run."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.errors import NotReady
from swarmnet.protocol.rate import RateLimiter
from swarmnet.transport.base import Request
from swarmnet.transport.handlers import Handlers
from swarmnet.wire import Message


async def says_who(request: Request) -> Message:
    return Message([request.remote, request.run_id, request.method])


async def ask(handlers: Handlers, seat: int, method: str = "who") -> object:
    message = Message()
    reply = await handlers.answer((3, seat), "peer", "run", method, message, lambda note: None)
    return reply.body


def test_each_seat_has_handlers_of_its_own() -> None:
    async def main() -> None:
        handlers = Handlers()
        handlers.add("who", says_who)
        handlers.open_seat(1)
        handlers.add("other", says_who, 1)
        assert handlers["who"] is says_who
        assert await ask(handlers, 0) == ["peer/3", "run", "who"]
        assert await ask(handlers, 1, "other") == ["peer/3", "run", "other"]
        assert (handlers.serves("other"), handlers.serves("nothing")) == (True, False)
        for seat, method in ((0, "other"), (1, "who"), (2, "who")):
            with pytest.raises(NotReady, match=f"{method} is not served here"):
                await ask(handlers, seat, method)
        handlers.remove_seat(1)
        handlers.add("other", says_who, 1)
        assert not handlers.serves("other")

    asyncio.run(main())


def test_what_runs_is_counted_by_peer_until_it_ends() -> None:
    async def main() -> None:
        handlers = Handlers()
        ended: list[str] = []

        async def work(name: str) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(name)

        for name in ("a", "a", "b"):
            handlers.start(name, work(name))
        await asyncio.sleep(0)
        assert [handlers.num_running(name) for name in "abc"] == [2, 1, 0]
        await handlers.close()
        assert handlers.is_closed
        assert ended == ["a", "a", "b"]
        assert [handlers.num_running(name) for name in "ab"] == [0, 0]

    asyncio.run(main())


def test_a_peer_that_calls_too_often_is_not_allowed_to() -> None:
    async def main() -> None:
        handlers = Handlers(RateLimiter(0.001, 2.0))
        assert [handlers.allows("a") for _ in range(3)] == [True, True, False]
        assert handlers.allows("b")
        assert all(Handlers().allows("a") for _ in range(100))

    asyncio.run(main())
