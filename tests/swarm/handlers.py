"""Standing between a peer and its callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swarmnet.transport.base import Request, Transport
from swarmnet.transport.memory import MemoryTransport
from swarmnet.wire import Message

Handler = Callable[[Request], Awaitable[Message]]


def handler_of(transport: Transport, method: str) -> Handler:
    """What answers calls of a method at a peer now; for tests that wrap it."""
    assert isinstance(transport, MemoryTransport)
    return transport._handlers[method]  # noqa: SLF001  production code never wraps a handler
