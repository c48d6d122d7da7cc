"""Standing between a peer and its callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from swarmnet.transport.base import Request, Transport
from swarmnet.transport.memory import MemoryTransport
from swarmnet.wire import Message

Handler = Callable[[Request], Awaitable[Message]]


def handler_of(transport: Transport, method: str) -> Handler:
    """What answers calls of a method at a peer now; for tests that wrap it."""
    assert isinstance(transport, MemoryTransport)
    return transport._handlers[method]  # noqa: SLF001  production code never wraps a handler


Go = Callable[[Message], Awaitable[Message]]
Around = Callable[[str, Message, Go], Awaitable[Message]]


def intercept_calls(transport: Transport, method: str, around: Around) -> None:
    """Has `around(peer_id, message, go)` answer each call that this peer makes of a method; `go`
    makes the call."""
    call = transport.call

    async def intercepted(peer_id: str, called: str, message: Message, **options: Any) -> Message:
        if called != method:
            return await call(peer_id, called, message, **options)
        return await around(peer_id, message, lambda m: call(peer_id, called, m, **options))

    transport.call = intercepted  # type: ignore[method-assign]
