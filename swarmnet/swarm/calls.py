"""The methods of the table over a transport: what is called and what is served has types, and what
comes is decoded and checked by the method's row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from swarmnet.methods.method import Method, ReplyT, RequestT
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message


def serve(
    transport: Transport,
    method: Method[RequestT, ReplyT],
    handler: Callable[[Request[RequestT]], Awaitable[Message[ReplyT]]],
) -> None:
    """As `Transport.handle`. The body has been decoded by the gate (`membership.callers`)."""
    transport.handle(method.name, handler)


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
    a progress message of another form is not heard."""
    hear = None
    if on_progress is not None:

        def hear(note: Message) -> None:
            on_progress(method.progress_in(note))

    reply = await transport.call(
        peer_id, method.name, message, timeout_s=timeout_s, on_progress=hear
    )
    return method.reply_in(reply)


def notify(
    transport: Transport, peer_id: str, method: Method[RequestT, Any], message: Message[RequestT]
) -> None:
    """As `Transport.notify`."""
    transport.notify(peer_id, method.name, message)
