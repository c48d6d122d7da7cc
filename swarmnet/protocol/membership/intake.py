"""In what order the records that others send are checked, and how much of them may wait. Pure.

To check a signature takes a hundred times as long as to look at a record, so it is done beside the
event loop, a batch at a time. What waits for that is in three lanes: what members say of members,
what is likely to be of use besides, and all else. Each lane has its share of the checks while it
has something to do, its senders take turns in it, and its room is bounded: beyond that, the sender
that has most waiting loses some of it, so that who sends little is not kept out. Of the last two
lanes together so much is checked in a second, whatever comes: nobody makes this peer's machine
check signatures without end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnet.protocol.rate import TokenBucket

T = TypeVar("T")

MEMBERS, LIKELY, OTHERS = range(3)
"""Lanes: what a member brings of members; what it brings of others, what a sender says of itself,
and what this peer has asked for; all else."""
SHARES = {MEMBERS: 8, LIKELY: 4, OTHERS: 1}
"""Of the checks, for each lane that has something to do."""
LANE_BYTES = {MEMBERS: 64 << 20, LIKELY: 16 << 20, OTHERS: 8 << 20}
"""Waiting in a lane, at most."""
SENDER_BYTES = 8 << 20
"""Waiting of one sender, at most: two of the longest messages."""
TICKET_BYTES = 1 << 10
"""What waits is counted as so much at least."""

STRANGERS_PER_S, STRANGERS_BURST = 500.0, 4096.0
"""Checks of the lanes `LIKELY` and `OTHERS`: of one core a fifteenth. The burst is for a newcomer,
to which all peers of a large swarm are new."""
AT_ONCE_PER_S, AT_ONCE_BURST = 200.0, 40.0
"""Checks that are made on the event loop, where little has come."""
MAX_AT_ONCE = 2
"""Records of one message that are checked on the event loop."""
BATCH = 32.0
"""Checks that are made in one turn."""
CHECK_BYTES = 64 << 10
"""To hash so many bytes takes as long as the check itself."""


def cost(num_bytes: int) -> float:
    """Of checking a record, in checks of a short one."""
    return 1.0 + num_bytes / CHECK_BYTES


def batches(items: Sequence[T], sizes: Sequence[int]) -> Iterator[list[T]]:
    """Records of these lengths, in order, a turn's worth at a time."""
    batch: list[T] = []
    total = 0.0
    for item, num_bytes in zip(items, sizes):
        if batch and total + cost(num_bytes) > BATCH:
            yield batch
            batch, total = [], 0.0
        batch.append(item)
        total += cost(num_bytes)
    if batch:
        yield batch


@dataclass(eq=False, slots=True)
class Ticket:
    """Records of one message that wait to be checked."""

    sender: str
    lane: int
    num_bytes: int
    """That wait."""
    cost: float = 0.0
    """Of the next batch."""
    is_dropped: bool = False
    """There was no room for it: it is not checked."""


@dataclass(slots=True)
class _Lane:
    """Tickets by sender; the senders take turns."""

    lane: int
    num_bytes: int = 0
    senders: dict[str, deque[Ticket]] = field(default_factory=dict)
    """In the order of their turns; a sender's own tickets in the order in which they came."""
    passed: float = 0.0
    """Checks that it has had, over its share: the lane with the least is next."""

    @property
    def is_limited(self) -> bool:
        """What is checked of it in a second is bounded."""
        return self.lane != MEMBERS

    def next(self) -> Ticket | None:
        return next((queue[0] for queue in self.senders.values()), None)

    def put(self, ticket: Ticket) -> None:
        self.senders.setdefault(ticket.sender, deque()).append(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Where it is there. What its sender has besides goes to the end of the turns."""
        queue = self.senders.get(ticket.sender)
        if queue is None or ticket not in queue:
            return
        queue.remove(ticket)
        del self.senders[ticket.sender]
        if queue:
            self.senders[ticket.sender] = queue


class Intake:
    """What waits, who is next, and what may be checked at once. Times are seconds of the caller's
    clock. At most one ticket is at work."""

    def __init__(self) -> None:
        self._lanes = [_Lane(lane) for lane in SHARES]
        self._bytes: dict[str, int] = {}
        """Waiting, by sender."""
        self._at_work: Ticket | None = None
        self._dropped: list[Ticket] = []
        self._passed = 0.0
        """Of the lane that was next last: one that has had nothing to do begins there, and has
        saved nothing up."""
        self._strangers = TokenBucket(STRANGERS_PER_S, STRANGERS_BURST, STRANGERS_BURST, -math.inf)
        self._at_once = TokenBucket(AT_ONCE_PER_S, AT_ONCE_BURST, AT_ONCE_BURST, -math.inf)

    @property
    def waiting_bytes(self) -> int:
        """Of all senders."""
        return sum(self._bytes.values())

    def may_check_at_once(self, sizes: Sequence[int], now: float) -> bool:
        """Whether records of these lengths, which a member brings of members, may be checked on the
        event loop: they count as checked there."""
        if len(sizes) > MAX_AT_ONCE:
            return False
        return self._at_once.take(now, sum(map(cost, sizes)))

    def enter(self, sender: str, lane: int, num_bytes: int) -> Ticket | None:
        """Something has come; None where there is no room for it."""
        num_bytes = max(num_bytes, TICKET_BYTES)
        here = self._lanes[lane]
        if self._bytes.get(sender, 0) + num_bytes > SENDER_BYTES:
            return None
        while here.num_bytes + num_bytes > LANE_BYTES[lane]:
            if not self._drop_of_largest(here, self._bytes.get(sender, 0) + num_bytes):
                return None
        here.num_bytes += num_bytes
        self._bytes[sender] = self._bytes.get(sender, 0) + num_bytes
        return Ticket(sender, lane, num_bytes)

    def queue(self, ticket: Ticket, cost: float) -> None:
        """A ticket that is in waits for its next batch, which costs so much."""
        lane = self._lanes[ticket.lane]
        ticket.cost = cost
        if not lane.senders:
            lane.passed = max(lane.passed, self._passed)
        lane.put(ticket)

    def next(self, now: float) -> Ticket | None:
        """The ticket whose batch is checked now; None where one is at work already, and where none
        waits that may."""
        for ticket in self._first():
            lane = self._lanes[ticket.lane]
            if lane.is_limited and not self._strangers.take(now, ticket.cost):
                continue
            self._passed = lane.passed
            lane.passed += ticket.cost / SHARES[ticket.lane]
            lane.remove(ticket)
            self._at_work = ticket
            return ticket
        return None

    def wait_s(self, now: float) -> float | None:
        """How long until `next` finds one, where nothing else happens before; None: nothing is
        there to be found."""
        waits = [
            self._strangers.wait_s(now, ticket.cost) if self._lanes[ticket.lane].is_limited else 0.0
            for ticket in self._first()
        ]
        return min(waits, default=None)

    def _first(self) -> list[Ticket]:
        """Of those that wait: whose turn it is, and of the limited lanes one, so that what costs
        little does not keep out what costs more. The next of all is the first."""
        if self._at_work is not None:
            return []
        found: list[Ticket] = []
        for lane in sorted(self._lanes, key=lambda lane: lane.passed):
            ticket = lane.next()
            if ticket is not None and not (
                lane.is_limited and any(self._lanes[t.lane].is_limited for t in found)
            ):
                found.append(ticket)
        return found

    def done(self, ticket: Ticket) -> None:
        """A batch has been checked."""
        if self._at_work is ticket:
            self._at_work = None

    def leave(self, ticket: Ticket) -> None:
        """Nothing of a ticket waits any more. Idempotent."""
        self.done(ticket)
        lane, num_bytes = self._lanes[ticket.lane], ticket.num_bytes
        lane.remove(ticket)
        ticket.num_bytes = 0
        lane.num_bytes -= num_bytes
        left = self._bytes.get(ticket.sender, 0) - num_bytes
        if left > 0:
            self._bytes[ticket.sender] = left
        else:
            self._bytes.pop(ticket.sender, None)

    def drop(self, sender: str) -> None:
        """A sender has lied: nothing that it has sent is checked."""
        for lane in self._lanes:
            for ticket in list(lane.senders.get(sender, ())):
                self._drop(ticket)

    def _drop_of_largest(self, lane: _Lane, at_least: int) -> bool:
        """Drops the newest ticket of the sender that has most waiting, if that is more than
        `at_least`; False where there is none."""
        largest = max(lane.senders, key=self._bytes.__getitem__, default=None)
        if largest is None or self._bytes[largest] <= at_least:
            return False
        self._drop(lane.senders[largest][-1])
        return True

    def take_dropped(self) -> list[Ticket]:
        """Those that waited for a turn and get none. Each is returned once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _drop(self, ticket: Ticket) -> None:
        ticket.is_dropped = True
        self._dropped.append(ticket)
        self.leave(ticket)
