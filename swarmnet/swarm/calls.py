"""The methods of the table over a transport: what is called and what is served has types, and what
comes is decoded and checked by the method's row."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from swarmnet.errors import Busy, ProtocolViolation, SwarmnetError
from swarmnet.methods.method import Method, ReplyT, RequestT
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
        e.peer_id = peer_id
        raise


def notify(
    transport: Transport, peer_id: str, method: Method[RequestT, Any], message: Message[RequestT]
) -> None:
    """As `Transport.notify`."""
    transport.notify(peer_id, method.name, message)


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
