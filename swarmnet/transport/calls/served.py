"""The calls of one peer that are being served on a channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from swarmnet.errors import Busy, NotReady, ProtocolViolation, RemoteError, SwarmnetError
from swarmnet.transport.calls.heads import MAX_TEXT, Route, method_of, route_of
from swarmnet.transport.calls.outbox import Outgoing, outgoing
from swarmnet.transport.calls.remote_errors import as_remote, describe
from swarmnet.transport.frames import ERROR, PROGRESS, REPLY, Head
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.transport")

MAX_OPEN_CALLS = 8192
"""Requests (and notifications) of one peer that are being served; more are answered `Busy`."""
MAX_SERVING_BYTES = 4 << 30
"""Array bytes of the requests of one peer that are being served; more are answered `Busy`."""
BUSY_BACKLOG_S = 1.0
"""What a `Busy` of the channel itself says."""


class Service(Protocol):
    """The handlers of a transport."""

    def serves(self, method: str) -> bool:
        """Is there a handler?"""

    def allows(self, remote: str) -> bool:
        """Counts a call of a peer; False where it calls too often."""

    def num_running(self, remote: str) -> int:
        """Handlers that work for a peer."""

    def start(self, remote: str, work: Coroutine[Any, Any, None]) -> object:
        """Runs a handler for a peer. It outlives its channel, not the transport."""

    async def answer(
        self,
        route: Route,
        remote: str,
        run_id: str,
        method: str,
        message: Message,
        progress: Callable[[Message], None],
    ) -> Message:
        """What the handler of a method says. Raises `NotReady` where there is none."""


class Caller(Protocol):
    """The channel on which a peer's calls arrive."""

    remote: str
    run_id: str
    is_open: bool

    def send(self, message: Outgoing) -> None:
        """Sends a message unless the channel has ended. Never raises."""


@dataclass(slots=True)
class Serving:
    """A call that is being served."""

    books: str
    """The method that it is counted under."""
    is_cancelled: bool = False
    """The caller waits no more."""


class ServedCalls:
    """Runs the handlers of a channel's requests and sends what they answer."""

    def __init__(self, service: Service, caller: Caller) -> None:
        self.serves = service.serves
        """Is there a handler of a method?"""
        self._service = service
        self._caller = caller
        self._serving: dict[int, Serving] = {}
        self._num_bytes = 0

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._serving

    def books(self, call_id: int) -> str | None:
        """The method that an open call is counted under; None where there is no such call."""
        serving = self._serving.get(call_id)
        return None if serving is None else serving.books

    def request(self, head: Head, message: Message, books: str) -> None:
        """A request has arrived. Beyond a limit its answer is `Busy`. Raises
        `ProtocolViolation`."""
        remote, call_id, num_bytes = self._caller.remote, head.call_id, head.array_bytes
        is_full = self._service.num_running(remote) >= MAX_OPEN_CALLS
        if not self._service.allows(remote):
            busy = Busy("too many calls a second", backlog_s=BUSY_BACKLOG_S)
            return self._send_error(call_id, books, busy)
        if is_full or (self._serving and self._num_bytes + num_bytes > MAX_SERVING_BYTES):
            busy = Busy("too many calls at a time", backlog_s=BUSY_BACKLOG_S)
            return self._send_error(call_id, books, busy)
        self._serving[call_id] = Serving(books)
        self._num_bytes += num_bytes
        work = self._serve(call_id, method_of(head), message, num_bytes, route_of(head))
        self._service.start(remote, work)
        return None

    def note(self, head: Head, message: Message) -> None:
        """A notification has arrived. Beyond a limit it is dropped. Raises `ProtocolViolation`."""
        remote = self._caller.remote
        is_full = self._service.num_running(remote) >= MAX_OPEN_CALLS
        if not is_full and self._service.allows(remote):
            work = self._hear(method_of(head), message, route_of(head))
            self._service.start(remote, work)

    def cancel(self, call_id: int) -> None:
        """The caller gave up: its reply is not sent."""
        serving = self._serving.get(call_id)
        if serving is not None:
            serving.is_cancelled = True

    async def _serve(
        self, call_id: int, method: str, message: Message, num_bytes: int, route: Route
    ) -> None:
        serving, caller = self._serving[call_id], self._caller

        def progress(note: Message) -> None:
            if caller.is_open and not serving.is_cancelled and call_id in self._serving:
                try:
                    head = {"b": note.body}
                    caller.send(outgoing(PROGRESS, call_id, head, note.arrays, method))
                except SwarmnetError as e:
                    log.warning("progress of %s was not sent: %s", method, e)

        try:
            reply = await self._service.answer(
                route, caller.remote, caller.run_id, method, message, progress
            )
            if not serving.is_cancelled:
                caller.send(outgoing(REPLY, call_id, {"b": reply.body}, reply.arrays, method))
        except asyncio.CancelledError:
            self._send_error(call_id, serving.books, NotReady("given up here"))
            raise
        except SwarmnetError as e:
            self._send_error(call_id, serving.books, as_remote(e))
        except Exception as e:
            log.exception("%s failed", method)
            self._send_error(call_id, serving.books, as_remote(e))
        finally:
            del self._serving[call_id]
            self._num_bytes -= num_bytes

    async def _hear(self, method: str, message: Message, route: Route) -> None:
        """A notification: nobody waits for its outcome."""
        caller = self._caller
        try:
            await self._service.answer(
                route, caller.remote, caller.run_id, method, message, lambda _: None
            )
        except SwarmnetError as e:
            log.debug("%s from %s: %s", method, caller.remote[-8:], e)
        except Exception:
            log.exception("%s failed", method)

    def _send_error(self, call_id: int, books: str, e: RemoteError) -> None:
        try:
            message = outgoing(ERROR, call_id, {"e": describe(e)}, (), books)
        except ProtocolViolation as wrong:
            log.warning("the details of an error of %s cannot travel: %s", books, wrong)
            message = outgoing(ERROR, call_id, {"e": [e.code, str(e)[:MAX_TEXT], {}]}, (), books)
        self._caller.send(message)
