"""What a channel has to send, and in which order. Sans I/O.

Small messages go first, then notifications, then parts of large messages: so gossip never waits
behind a tensor. Of the large ones the one with the fewest bytes left goes on, so that they arrive
one after the other and the receiver can work on the first while the second comes; every fourth
part is of the one that has waited longest, so that none starves. What waits is
bounded: notifications by dropping the oldest, small messages by giving the stream up (`Stalled`),
large ones because only a few are begun at a time and those that wait hold nothing but references to
their senders' arrays.

Large messages in the background (`Message.is_background`) come last, one after the other, and only
when they are asked for: whether they may go depends on the other channels too (`pacing`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from swarmnet.errors import TransportError
from swarmnet.transport.frames import (
    BACKGROUND_PART_BYTES,
    HEADER,
    MAX_RECEIVING_BYTES,
    PART_BYTES,
    PARTS_OF,
    REPLY,
    head_frame,
    part_frames,
    sealed_part_frames,
)
from swarmnet.wire import Array

MAX_NOTES = 256
"""Notifications that wait; beyond it the oldest are dropped."""
MAX_SMALL_BYTES = 64 << 20
"""Small messages that wait; a peer that leaves more unread is not reading."""
MAX_TURNS = 16
"""Large messages that are begun at a time."""

FAIR_EVERY = 4
"""Every so many parts, one of the message that has waited longest."""
Frame = tuple[bytes | memoryview, ...]
"""In pieces that follow each other on the stream."""


class Stalled(TransportError):
    """The peer does not read what is sent to it."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message on its way out."""

    kind: int
    call_id: int
    method: str
    first: bytes
    """Its first frame."""
    arrays: tuple[Array, ...] = ()
    left_bytes: int = 0
    """Of the arrays, not yet taken."""
    is_background: bool = False
    is_begun: bool = False
    parts: Iterator[Frame] = field(default_factory=lambda: iter(()))

    @property
    def unsent_bytes(self) -> int:
        """Of all of it, not yet taken."""
        return self.left_bytes + (0 if self.is_begun else len(self.first))


def outgoing(
    kind: int,
    call_id: int,
    head: dict[str, object],
    arrays: tuple[Array, ...],
    method: str,
    *,
    is_background: bool = False,
) -> Outgoing:
    """Makes a message ready to be sent. Raises `ProtocolViolation` where it cannot travel."""
    first = head_frame(kind, call_id, head, arrays)
    num_bytes = sum(a.num_bytes for a in arrays)
    arrays = arrays if num_bytes else ()
    return Outgoing(kind, call_id, method, first, arrays, num_bytes, is_background)


_left_bytes = attrgetter("left_bytes")


class Outbox:
    """Messages in, frames out."""

    def __init__(
        self, allocate: Callable[[int], memoryview] | None = None, *, is_sealed: bool = False
    ) -> None:
        """`allocate`: memory for parts, see `frames.part_frames`. `is_sealed`: the stream needs no
        copies, see `frames.sealed_part_frames`."""
        self._allocate = allocate
        self._is_sealed = is_sealed
        self._small: deque[Outgoing] = deque()
        self._small_bytes = 0
        self._notes: deque[Outgoing] = deque()
        self._waiting: OrderedDict[tuple[int, int], Outgoing] = OrderedDict()
        """Large messages that are not begun, by kind and call id."""
        self._turns: deque[Outgoing] = deque()
        self._turns_bytes = 0
        self._background: OrderedDict[tuple[int, int], Outgoing] = OrderedDict()
        """The same, of the background."""
        self._behind: Outgoing | None = None
        """The one of the background that is begun."""
        self._num_turns = 0
        self.dropped_notes = 0
        self.waiting_bytes = 0
        """Of all messages, not yet taken."""

    def put(self, message: Outgoing) -> None:
        """Raises `Stalled`."""
        if message.arrays:
            waiting = self._background if message.is_background else self._waiting
            waiting[message.kind, message.call_id] = message
        elif self._small_bytes + len(message.first) > MAX_SMALL_BYTES and self._small:
            raise Stalled("it does not read what is sent to it")
        else:
            self._small.append(message)
            self._small_bytes += len(message.first)
        self.waiting_bytes += message.unsent_bytes

    def put_note(self, message: Outgoing) -> None:
        """As `put`, for a message that may be dropped."""
        if len(self._notes) == MAX_NOTES:
            self.dropped_notes += 1
            self.waiting_bytes -= self._notes.popleft().unsent_bytes
        self._notes.append(message)
        self.waiting_bytes += message.unsent_bytes

    def withdraw(self, message: Outgoing) -> bool:
        """Sends no more of a message; False where not a byte of it was taken."""
        unsent_bytes = message.unsent_bytes
        if message in self._turns:
            self._turns.remove(message)
            self._turns_bytes -= message.left_bytes
        elif self._behind is message:
            self._behind = None
        elif self._waiting.get((message.kind, message.call_id)) is message:
            del self._waiting[message.kind, message.call_id]
        elif self._background.get((message.kind, message.call_id)) is message:
            del self._background[message.kind, message.call_id]
        elif message in self._small:
            self._small.remove(message)
            self._small_bytes -= len(message.first)
        else:
            unsent_bytes = 0
        self.waiting_bytes -= unsent_bytes
        return message.is_begun

    def withdraw_reply(self, call_id: int) -> None:
        """Does not send a large reply that is not begun. One that is has to be sent to its end: no
        word says that no more parts of a reply follow."""
        for waiting in (self._waiting, self._background):
            reply = waiting.pop((REPLY, call_id), None)
            if reply is not None:
                self.waiting_bytes -= reply.unsent_bytes

    def clear(self) -> None:
        """Forgets everything."""
        self._small.clear()
        self._notes.clear()
        self._waiting.clear()
        self._turns.clear()
        self._background.clear()
        self._behind = None
        self._small_bytes = self._turns_bytes = self.waiting_bytes = 0

    @property
    def bulk_bytes(self) -> int:
        """Of the large messages, not yet taken; without those of the background."""
        return self._turns_bytes + sum(m.left_bytes for m in self._waiting.values())

    @property
    def has_bulk(self) -> bool:
        """Does a large message wait, begun or not? Those of the background do not count."""
        return bool(self._waiting or self._turns)

    @property
    def has_background(self) -> bool:
        """Does a message of the background wait, begun or not?"""
        return bool(self._background) or self._behind is not None

    def take(self, *, bulk: bool = True) -> tuple[str, Frame] | None:
        """The frame that is to be written next, and the method that it is for; None where nothing
        is, but for the background. `bulk`: large messages too."""
        if self._small:
            message = self._small.popleft()
            self._small_bytes -= len(message.first)
        elif self._notes:
            message = self._notes.popleft()
        elif bulk and self._waiting and self._fits(next(iter(self._waiting.values()))):
            message = self._begin(self._waiting.popitem(last=False)[1])
        elif bulk and self._turns:
            return self._turn()
        elif bulk and self._waiting:  # it does not fit beside what is begun in the background
            return self.take_background()
        else:
            return None
        return self._first(message)

    def take_background(self) -> tuple[str, Frame] | None:
        """The same of the background."""
        message = self._behind
        if message is not None:
            frame = next(message.parts)
            num_bytes = sum(map(len, frame)) - HEADER.size
            message.left_bytes -= num_bytes
            self.waiting_bytes -= num_bytes
            if not message.left_bytes:
                self._behind = None
            return message.method, frame
        if not self._background or not self._fits(next(iter(self._background.values()))):
            return None
        message = self._behind = self._cut(self._background.popitem(last=False)[1])
        return self._first(message)

    def _first(self, message: Outgoing) -> tuple[str, Frame]:
        """Of a message that begins."""
        message.is_begun = True
        self.waiting_bytes -= len(message.first)
        return message.method, (message.first,)

    def _fits(self, message: Outgoing) -> bool:
        """May it be begun now, so that the receiver never has more than it takes?"""
        begun_bytes = self._turns_bytes + (self._behind.left_bytes if self._behind else 0)
        return not begun_bytes or (
            len(self._turns) < MAX_TURNS and begun_bytes + message.left_bytes <= MAX_RECEIVING_BYTES
        )

    def _begin(self, message: Outgoing) -> Outgoing:
        self._turns.append(self._cut(message))
        self._turns_bytes += message.left_bytes
        return message

    def _cut(self, message: Outgoing) -> Outgoing:
        """Has its parts made when they are taken."""
        kind, call_id, arrays = PARTS_OF[message.kind], message.call_id, message.arrays
        part_bytes = BACKGROUND_PART_BYTES if message.is_background else PART_BYTES
        if self._is_sealed:
            message.parts = sealed_part_frames(kind, call_id, arrays, part_bytes)
        else:
            whole = part_frames(kind, call_id, arrays, self._allocate, part_bytes)
            message.parts = ((frame,) for frame in whole)
        return message

    def _turn(self) -> tuple[str, Frame]:
        """The next part of the message whose turn it is."""
        self._num_turns += 1
        message = self._turns[0]
        if len(self._turns) > 1 and self._num_turns % FAIR_EVERY:
            message = min(self._turns, key=_left_bytes)
        self._turns.remove(message)
        frame = next(message.parts)
        num_bytes = sum(map(len, frame)) - HEADER.size
        message.left_bytes -= num_bytes
        self._turns_bytes -= num_bytes
        self.waiting_bytes -= num_bytes
        if message.left_bytes:
            self._turns.append(message)
        return message.method, frame
