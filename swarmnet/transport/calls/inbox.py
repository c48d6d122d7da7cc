"""What arrives on a channel: frames in, messages to the calls that they belong to. Sans I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from swarmnet.errors import ProtocolViolation
from swarmnet.transport.base import Traffic
from swarmnet.transport.calls.heads import method_of
from swarmnet.transport.calls.pending import PendingCalls
from swarmnet.transport.calls.remote_errors import parse_error
from swarmnet.transport.calls.served import ServedCalls
from swarmnet.transport.frames import (
    CANCEL,
    HEADER,
    HELLO,
    MAX_RECEIVING_BYTES,
    NOTIFY,
    PARTS_OF,
    PROGRESS,
    REPLY,
    REQUEST,
    REQUEST_PART,
    Assembly,
    Head,
)
from swarmnet.wire import Message

OTHER = "other"
"""Bytes of messages that belong to no method or call known here are counted under this."""


class Door(Protocol):
    """Decides which messages a channel takes."""

    def admits(self, head: Head) -> bool:
        """Does the message belong to a call? A hello does not. Raises `ProtocolViolation` where
        the peer may not send it now."""


class Inbox:
    """A `frames.Sink`: assembles messages and hands them to the calls of a channel."""

    def __init__(
        self,
        door: Door,
        calls: PendingCalls,
        served: ServedCalls,
        allocate: Callable[[int], memoryview],
        traffic: Traffic,
    ) -> None:
        """`calls`: those made here; `served`: those of the peer; `allocate`: memory of a size for
        an array that arrives."""
        self.receiving_bytes = 0
        """Array bytes that are announced and have not come."""
        self._door = door
        self._calls = calls
        self._served = served
        self._allocate = allocate
        self._traffic = traffic
        self._assemblies: dict[tuple[int, int], Assembly] = {}

    def head(self, head: Head, num_bytes: int) -> None:
        """`frames.Sink`"""
        books = self._books(head)
        self._traffic.add_received(books, num_bytes)
        if not self._door.admits(head):
            return
        if head.kind == CANCEL:
            self._cancel(head.call_id)
        elif head.array_bytes:
            self._assemble(head, books)
        else:
            if head.kind == REQUEST:
                self._check_new(head.call_id)
            self._deliver(head, Message(head.values.get("b"), _empty(head)), books)

    def assembly(self, kind: int, call_id: int) -> Assembly:
        """`frames.Sink`"""
        assembly = self._assemblies.get((kind, call_id))
        if assembly is None:
            raise ProtocolViolation("a part of nothing")
        return assembly

    def part(self, kind: int, call_id: int, payload_bytes: int, is_end: bool) -> None:
        """`frames.Sink`"""
        assembly = self._assemblies[kind, call_id]
        head = assembly.head
        self.receiving_bytes -= payload_bytes
        self._traffic.add_received(assembly.books, HEADER.size + payload_bytes)
        if is_end != (assembly.left_bytes == 0):
            raise ProtocolViolation("a message that ends too early or not at all")
        if not is_end:
            return
        del self._assemblies[kind, call_id]
        message = Message(head.values.get("b"), assembly.arrays())
        self._deliver(head, message, assembly.books)

    def clear(self) -> None:
        """Nothing more arrives: forgets the messages that are not complete."""
        self._assemblies.clear()

    def _books(self, head: Head) -> str:
        """Under which method a message is counted. Only names that mean something here: a peer must
        not be able to fill the books."""
        if head.kind in (REQUEST, NOTIFY):
            method = method_of(head)
            return method if self._served.serves(method) else OTHER
        if head.kind == HELLO:
            return "hello"
        if head.kind == CANCEL:
            return self._served.books(head.call_id) or OTHER
        return self._calls.method_of(head.call_id) or OTHER

    def _check_new(self, call_id: int) -> None:
        if call_id in self._served or (REQUEST_PART, call_id) in self._assemblies:
            raise ProtocolViolation("a call id that is in use")

    def _assemble(self, head: Head, books: str) -> None:
        """A message of which parts will follow; `books`: as `_books` says."""
        key = (PARTS_OF[head.kind], head.call_id)
        is_wanted = True
        if head.kind == REQUEST:
            self._check_new(head.call_id)
        else:
            if key in self._assemblies or not self._calls.was_made(head.call_id):
                raise ProtocolViolation("a reply to no call")
            is_wanted = head.call_id in self._calls
        if self.receiving_bytes + head.array_bytes > MAX_RECEIVING_BYTES:
            raise ProtocolViolation(f"more than {MAX_RECEIVING_BYTES} bytes on their way")
        self.receiving_bytes += head.array_bytes
        allocate = self._allocate if is_wanted else None
        self._assemblies[key] = Assembly(head, allocate, books)

    def _cancel(self, call_id: int) -> None:
        """The caller gave up: its reply is not sent, and of its request no more will come."""
        assembly = self._assemblies.pop((REQUEST_PART, call_id), None)
        if assembly is not None:
            self.receiving_bytes -= assembly.left_bytes
        self._served.cancel(call_id)

    def _deliver(self, head: Head, message: Message, books: str) -> None:
        if head.kind == REQUEST:
            self._served.request(head, message, books)
        elif head.kind == NOTIFY:
            self._served.note(head, message)
        else:
            self._answer(head, message)

    def _answer(self, head: Head, message: Message) -> None:
        if not self._calls.was_made(head.call_id):
            raise ProtocolViolation("an answer to no call")
        if head.kind == REPLY:
            self._calls.reply(head.call_id, message)
        elif not self._calls.is_waiting(head.call_id):
            return  # the caller gave up
        elif head.kind == PROGRESS:
            self._calls.progress(head.call_id, message)
        else:
            self._calls.fail(head.call_id, parse_error(head.values.get("e")))


def _empty(head: Head) -> tuple[Any, ...]:
    """The arrays of a message that has none, or only such without a byte."""
    return Assembly(head, lambda num_bytes: memoryview(b"")).arrays() if head.arrays else ()
