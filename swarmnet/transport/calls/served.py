"""The calls of one peer that are being served on a channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from swarmnet.errors import Busy, NotReady, ProtocolViolation, RemoteError, SwarmnetError
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.transport.base import Envelope
from swarmnet.transport.calls.heads import (
    MAX_TEXT,
    Route,
    as_remote,
    describe,
    method_of,
    route_of,
)
from swarmnet.transport.calls.holdings import Hold, Holdings, Standing, bytes_of_call
from swarmnet.transport.calls.outbox import Outgoing, outgoing
from swarmnet.transport.calls.replies import SMALL_UNREAD_BYTES, ReplyRoom
from swarmnet.transport.frames import ERROR, PROGRESS, REPLY, REQUEST, Head
from swarmnet.wire import Message, Packed

log = logging.getLogger("swarmnet.transport")

UNREAD = "no room for more replies that are not read"
MAX_OPEN_CALLS = 8192
"""Requests (and notifications) of one peer that are being served; more are answered `Busy`."""


class Service(Standing, Protocol):
    """The handlers of a transport."""

    def serves(self, method: str) -> bool:
        """Is there a handler?"""

    def ends_with_caller(self, method: str) -> bool:
        """Is the handler of a method to be cancelled when its caller waits no more?"""

    def allows(self, remote: str) -> bool:
        """Counts a call of a peer; False where it calls too often."""

    def num_running(self, remote: str) -> int:
        """Handlers that work for a peer."""

    def check(self, route: Route, envelope: Envelope) -> None:
        """Raises what a call would be refused with before its body is decoded."""

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


class Answers(Protocol):
    """The way back to a caller."""

    remote: str
    is_open: bool

    @property
    def waiting_bytes(self) -> int:
        """That are to be sent, and that the network has not taken yet."""

    def send(self, message: Outgoing) -> None:
        """Sends a message unless the stream has ended. Never raises."""

    def withdraw_reply(self, call_id: int) -> None:
        """Does not send a reply that still waits for those before it."""

    def abort(self, reason: str) -> None:
        """Closes the stream at once."""


class Said(Protocol):
    """The peer's greeting."""

    @property
    def run_id(self) -> str:
        """The run that it says it belongs to."""


@dataclass(slots=True)
class Serving:
    """A call that is being served."""

    books: str
    """The method that it is counted under."""
    is_cancelled: bool = False
    """The caller waits no more."""
    work: asyncio.Task[None] | None = None
    """Where that ends with its caller, from its beginning."""

    def cancel(self) -> None:
        """The caller gives it up: its reply is not sent."""
        self.is_cancelled = True
        if self.work is not None:
            self.work.cancel()


class ServedCalls:
    """Runs the handlers of a channel's requests and sends what they answer."""

    def __init__(
        self,
        service: Service,
        caller: Answers,
        said: Said,
        holdings: Holdings,
        replies: ReplyRoom,
    ) -> None:
        """`said`: what the caller says of itself. `holdings`: the room for what is being served;
        `replies`: that for what is answered."""
        self.serves = service.serves
        """Is there a handler of a method?"""
        self._service = service
        self._caller = caller
        self._said = said
        self._holdings = holdings
        self._replies = replies
        self._serving: dict[int, Serving] = {}

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._serving

    def __len__(self) -> int:
        return len(self._serving)

    def books(self, call_id: int) -> str | None:
        """The method that an open call is counted under; None where there is no such call."""
        serving = self._serving.get(call_id)
        return None if serving is None else serving.books

    def may_come(self, head: Head, books: str) -> bool:
        """Whether a request or a notification whose head has arrived may be made: neither is its
        body decoded nor any of its arrays kept before that. One that may not is answered here.
        Raises `ProtocolViolation`."""
        caller, body = self._caller, head.values.get("b")
        num_bytes = len(body.data) if isinstance(body, Packed) else 0
        envelope = Envelope(
            caller.remote, self._said.run_id, method_of(head), num_bytes, head.array_bytes
        )
        route = route_of(head)
        try:
            self._service.check(route, envelope)
        except (RemoteError, ProtocolViolation) as e:
            self.refuse(head, books, as_remote(e))
            return False
        return True

    def refuse(self, head: Head, books: str, error: RemoteError) -> None:
        """Answers a call that is not served; nobody waits for more of a notification."""
        if head.kind == REQUEST:
            self._send_error(head.call_id, books, error)

    def request(self, head: Head, message: Message, books: str, hold: Hold | None = None) -> None:
        """A request has arrived; `hold`: the room that its arrays take. Beyond a limit its answer
        is `Busy`. Raises `ProtocolViolation`."""
        remote, call_id = self._caller.remote, head.call_id
        if hold is None:
            hold = self._room(message)
        is_full = hold is None or self._service.num_running(remote) >= MAX_OPEN_CALLS
        is_fast = not self._service.allows(remote)
        if hold is None or is_full or is_fast:
            if hold is not None:
                self._holdings.give_back(hold)
            text = "too many calls " + ("a second" if is_fast else "at a time")
            return self._send_error(call_id, books, Busy(text, backlog_s=FIRST_PAUSE_S))
        self._serving[call_id] = Serving(books)
        work = self._serve(call_id, method_of(head), message, hold, route_of(head))
        self._service.start(remote, work)
        return None

    def _room(self, message: Message) -> Hold | None:
        """For a call without arrays; None where there is none."""
        return self._holdings.take(self._caller.remote, bytes_of_call(message.body, 0))

    def note(self, head: Head, message: Message) -> None:
        """A notification has arrived. Beyond a limit it is dropped. Raises `ProtocolViolation`."""
        remote = self._caller.remote
        is_full = self._service.num_running(remote) >= MAX_OPEN_CALLS
        if is_full or not self._service.allows(remote):
            return
        hold = self._room(message)
        if hold is not None:
            work = self._hear(method_of(head), message, hold, route_of(head))
            self._service.start(remote, work)

    def cancel(self, call_id: int) -> None:
        """The caller gave up: its reply is not sent, and work ends that is for nobody else."""
        serving = self._serving.get(call_id)
        if serving is not None:
            serving.cancel()
        else:
            self._caller.withdraw_reply(call_id)

    def end(self) -> None:
        """The channel is gone: its calls have no caller any more."""
        for serving in self._serving.values():
            serving.cancel()

    async def _serve(
        self, call_id: int, method: str, message: Message, hold: Hold, route: Route
    ) -> None:
        serving, caller = self._serving[call_id], self._caller
        ends_with_caller = self._service.ends_with_caller(method)
        serving.work = asyncio.current_task() if ends_with_caller else None

        def progress(note: Message) -> None:
            if caller.is_open and not serving.is_cancelled and call_id in self._serving:
                try:
                    head = {"b": note.body}
                    self._send_small(outgoing(PROGRESS, call_id, head, note.arrays, method))
                except SwarmnetError as e:
                    log.warning("progress of %s was not sent: %s", method, e)

        try:
            if serving.is_cancelled and ends_with_caller:
                return
            if not self._replies.may_ask(caller.remote, asyncio.get_running_loop().time()):
                raise Busy(UNREAD, backlog_s=FIRST_PAUSE_S)
            reply = await self._service.answer(
                route, caller.remote, self._said.run_id, method, message, progress
            )
            if not serving.is_cancelled:
                head = {"b": reply.body}
                behind = reply.is_background
                self._send_reply(
                    outgoing(REPLY, call_id, head, reply.arrays, method, is_background=behind)
                )
        except asyncio.CancelledError:
            if not serving.is_cancelled:
                self._send_error(call_id, serving.books, NotReady("given up here"))
            raise
        except SwarmnetError as e:
            self._send_error(call_id, serving.books, as_remote(e))
        except Exception as e:
            log.exception("%s failed", method)
            self._send_error(call_id, serving.books, as_remote(e))
        finally:
            del self._serving[call_id]
            self._holdings.give_back(hold)

    async def _hear(self, method: str, message: Message, hold: Hold, route: Route) -> None:
        """A notification: nobody waits for its outcome."""
        caller = self._caller
        try:
            await self._service.answer(
                route, caller.remote, self._said.run_id, method, message, lambda _: None
            )
        except SwarmnetError as e:
            log.debug("%s from %s: %s", method, caller.remote[-8:], e)
        except Exception:
            log.exception("%s failed", method)
        finally:
            self._holdings.give_back(hold)

    def _send_error(self, call_id: int, books: str, e: RemoteError) -> None:
        try:
            message = outgoing(ERROR, call_id, {"e": describe(e)}, (), books)
        except ProtocolViolation as wrong:
            log.warning("the details of an error of %s cannot travel: %s", books, wrong)
            message = outgoing(ERROR, call_id, {"e": [e.code, str(e)[:MAX_TEXT], {}]}, (), books)
        self._send_small(message)

    def _send_reply(self, message: Outgoing) -> None:
        """Sends a reply, for which others that do not read may have to give way. Raises `Busy`
        where there is no room for it."""
        caller, room = self._caller, self._replies
        now = asyncio.get_running_loop().time()
        if not room.fits(caller.remote, message.unsent_bytes, now):
            raise Busy(UNREAD, backlog_s=FIRST_PAUSE_S)
        for reader in room.give_way(caller.remote, message.unsent_bytes, now):
            reader.give_up()
        caller.send(message)

    def _send_small(self, message: Outgoing) -> None:
        """Sends an error or a word of progress. A peer that leaves too many of them unread loses
        its channel."""
        caller, room = self._caller, self._replies
        now, num_bytes = asyncio.get_running_loop().time(), message.unsent_bytes
        is_short = caller.waiting_bytes + num_bytes <= SMALL_UNREAD_BYTES
        if is_short or room.fits(caller.remote, num_bytes, now):
            caller.send(message)
        else:
            caller.abort("it does not read what is sent to it")
