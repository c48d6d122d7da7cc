"""What arrives on a channel: frames in, messages to the calls that they belong to. Sans I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from swarmnet.errors import Busy, NotReady, ProtocolViolation
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.transport.base import Traffic
from swarmnet.transport.calls.heads import method_of, parse_error
from swarmnet.transport.calls.hello import Greeting
from swarmnet.transport.calls.holdings import Hold, Holdings, Overfull, bytes_of_call
from swarmnet.transport.calls.pending import PendingCalls
from swarmnet.transport.calls.served import ServedCalls
from swarmnet.transport.frames import (
    BUFFER_BYTES,
    CALLS,
    CANCEL,
    HEADER,
    HELLO,
    MAX_RECEIVING_BYTES,
    NOTIFY,
    PARTS_OF,
    PROGRESS,
    REPLY,
    REPLY_PART,
    REQUEST,
    REQUEST_PART,
    Assembly,
    Head,
)
from swarmnet.wire import Message

OTHER = "other"
"""Bytes of messages that belong to no method or call known here are counted under this."""


MAX_BEGUN = 64
"""Messages of a stream whose arrays are on their way; a sender sends no more than 16 in turns."""


class Inbox:
    """A `frames.Sink`: assembles messages and hands them to the calls of a channel."""

    def __init__(
        self,
        greeting: Greeting,
        calls: PendingCalls,
        served: ServedCalls,
        allocate: Callable[[int], memoryview],
        traffic: Traffic,
        holdings: Holdings,
    ) -> None:
        """`greeting`: what may come; `calls`: those made here; `served`: those of the peer;
        `allocate`: memory of a size for an array that arrives; `holdings`: the room for what
        arrives."""
        self.receiving_bytes = 0
        """Array bytes that are announced and have not come."""
        self._is_silent = False
        """Nothing has come since `expire` was asked last."""
        self._greeting = greeting
        self._calls = calls
        self._served = served
        self._allocate = allocate
        self._traffic = traffic
        self._holdings = holdings
        self._assemblies: dict[tuple[int, int], Assembly] = {}
        self._holds: dict[tuple[int, int], Hold] = {}
        """Of the assemblies that keep anything."""
        self._opening: Hold | None = None
        """Of the head that arrives now, where it is long."""
        self._aging: list[object] = []
        """What had begun when `expire` was asked last."""

    def heard(self) -> None:
        """Something has come, be it a part of a frame."""
        self._is_silent = False

    def opening(self, kind: int, head_bytes: int) -> None:
        """`frames.Sink`. Raises `Overfull` where there is no room for the head."""
        self._greeting.expects(kind)
        if head_bytes > BUFFER_BYTES:
            self._opening = self._holdings.take(self._greeting.remote, head_bytes)
            if self._opening is None:
                raise Overfull(f"no room for a message of {head_bytes} bytes")

    def head(self, head: Head, num_bytes: int) -> None:
        """`frames.Sink`"""
        self._close_opening()
        books = self._books(head)
        self._traffic.add_received(books, num_bytes)
        if not self._greeting.admits(head):
            return
        if head.kind == REQUEST:
            self._check_new(head.call_id)
        if head.kind == CANCEL:
            self._cancel(head.call_id)
        elif head.kind in CALLS and not self._served.may_come(head, books):
            if head.array_bytes:  # they come all the same, for the caller sends them now
                self._read_past(head, books)
        elif head.array_bytes:
            self._assemble(head, books)
        else:
            self._deliver(head, Message(head.values.get("b"), _empty(head)), books, None)

    def assembly(self, kind: int, call_id: int) -> Assembly:
        """`frames.Sink`"""
        assembly = self._assemblies.get((kind, call_id))
        if assembly is None:
            raise ProtocolViolation("a part of nothing")
        return assembly

    def part(self, kind: int, call_id: int, payload_bytes: int, is_end: bool) -> None:
        """`frames.Sink`"""
        key = (kind, call_id)
        assembly = self._assemblies[key]
        head = assembly.head
        self.receiving_bytes -= payload_bytes
        self._traffic.add_received(assembly.books, HEADER.size + payload_bytes)
        if is_end != (assembly.left_bytes == 0):
            raise ProtocolViolation("a message that ends too early or not at all")
        if kind == REPLY_PART:
            self._calls.part(call_id, payload_bytes)
        if not is_end:
            return
        del self._assemblies[key]
        hold = self._holds.pop(key, None)
        if assembly.is_wanted:
            message = Message(head.values.get("b"), assembly.arrays())
            self._deliver(head, message, assembly.books, hold)

    def give_up(self, call_id: int) -> None:
        """Nobody waits for the reply to a call any more: its arrays are read past from now on."""
        self._discard((REPLY_PART, call_id))

    def expire(self) -> bool:
        """To be asked at regular times: gives up the arrays of messages that had begun when it was
        asked last, where the peer is a stranger or has sent nothing since. False where a head
        arrives for so long."""
        is_due = self._is_silent or self._holdings.is_stranger(self._greeting.remote)
        aged = self._aging if is_due else []
        is_stuck = any(x is self._opening for x in aged) if self._opening is not None else False
        for key, assembly in list(self._assemblies.items()):
            if assembly.is_wanted and any(x is assembly for x in aged):
                self._discard(key)
                late = NotReady("its arrays did not come in time")
                if key[0] == REQUEST_PART:
                    self._served.refuse(assembly.head, assembly.books, late)
                else:
                    self._calls.fail(assembly.head.call_id, late)
        self._aging = [a for a in self._assemblies.values() if a.is_wanted]
        if self._opening is not None:
            self._aging.append(self._opening)
        self._is_silent = True
        return not is_stuck

    def clear(self) -> None:
        """Nothing more arrives: forgets the messages that are not complete, and ends the work that
        is for nobody else."""
        self._served.end()
        self._close_opening()
        for hold in self._holds.values():
            self._holdings.give_back(hold)
        self._holds.clear()
        self._assemblies.clear()

    def _close_opening(self) -> None:
        if self._opening is not None:
            self._holdings.give_back(self._opening)
            self._opening = None

    def _discard(self, key: tuple[int, int]) -> None:
        """Gives up the memory of a message whose parts are still coming."""
        assembly, hold = self._assemblies.get(key), self._holds.pop(key, None)
        if assembly is not None:
            assembly.discard()
        if hold is not None:
            self._holdings.give_back(hold)

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
        if head.kind != REQUEST:
            if key in self._assemblies or not self._calls.was_made(head.call_id):
                raise ProtocolViolation("a reply to no call")
            if head.call_id not in self._calls:  # the caller gave up
                return self._read_past(head, books)
        self._announce(head)
        num_bytes = bytes_of_call(head.values.get("b"), head.array_bytes)
        hold = self._holdings.take(self._greeting.remote, num_bytes)
        if hold is not None:
            self._holds[key] = hold
            self._assemblies[key] = Assembly(head, self._allocate, books)
            return None
        self._assemblies[key] = _unwanted(head, books)
        busy = Busy("no room for more arrays", backlog_s=FIRST_PAUSE_S)
        if head.kind == REQUEST:
            self._served.refuse(head, books, busy)
        else:
            self._calls.fail(head.call_id, busy)
        return None

    def _read_past(self, head: Head, books: str) -> None:
        """Nobody wants the arrays of a message, whose parts will follow."""
        self._announce(head)
        self._assemblies[PARTS_OF[head.kind], head.call_id] = _unwanted(head, books)

    def _announce(self, head: Head) -> None:
        if len(self._assemblies) >= MAX_BEGUN:
            raise ProtocolViolation(f"more than {MAX_BEGUN} messages begun and not ended")
        if self.receiving_bytes + head.array_bytes > MAX_RECEIVING_BYTES:
            raise ProtocolViolation(f"more than {MAX_RECEIVING_BYTES} bytes on their way")
        self.receiving_bytes += head.array_bytes

    def _cancel(self, call_id: int) -> None:
        """The caller gave up: its reply is not sent, and of its request no more will come."""
        key = (REQUEST_PART, call_id)
        self._discard(key)
        assembly = self._assemblies.pop(key, None)
        if assembly is not None:
            self.receiving_bytes -= assembly.left_bytes
        self._served.cancel(call_id)

    def _deliver(self, head: Head, message: Message, books: str, hold: Hold | None) -> None:
        """`hold`: of the arrays."""
        if head.kind == REQUEST:
            return self._served.request(head, message, books, hold)
        if hold is not None:  # a reply: its memory is the caller's, who asked for it
            self._holdings.give_back(hold)
        if head.kind == NOTIFY:
            return self._served.note(head, message)
        return self._answer(head, message)

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


def _unwanted(head: Head, books: str) -> Assembly:
    """Keeps nothing of a message, not even its body."""
    return Assembly(replace(head, values={}), None, books)


def _empty(head: Head) -> tuple[Any, ...]:
    """The arrays of a message that has none, or only such without a byte."""
    return Assembly(head, lambda num_bytes: memoryview(b"")).arrays() if head.arrays else ()
