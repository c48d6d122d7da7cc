"""How much of this process's memory replies may fill that other machines have asked for and do not
read. Sans I/O.

A reply waits from when it is made until the network has taken it: in the outbox of its channel, and
in what was written to the stream. A machine with standing has an account of its own, as for what it
makes this process hold (`holdings`). All others share a small one. Where that is full, the one
whose replies have waited longest gives way to the next, after a while in which others would have
read them: any number of names asks, and none is kept out for long.

A call is refused before its work where its caller has no room; a reply that has none after all is
not sent, its caller is told that this peer is busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarmnet.protocol.timing import CONNECT_S
from swarmnet.transport.calls.holdings import MEMBER_BYTES, STRANGER_BYTES, Standing

STRANGERS_UNREAD_BYTES = 32 << 20
"""Of all machines without standing together; of one of them `STRANGER_BYTES`, or one reply."""
SMALL_UNREAD_BYTES = 32 << 10
"""Of a stream to such a machine, beside that: errors, by which it is told that there is no room.
One that leaves more of them unread loses the stream."""
USUAL_BYTES = (1 << 20) + (4 << 10)
"""Of a reply whose size is not known yet: a part of a file or of data, and its head."""
GIVES_WAY_AFTER_S = CONNECT_S
"""Such a machine has so long to read before another one may take its room."""


class Reader(Protocol):
    """The other end of a stream, which has asked for something."""

    def give_up(self) -> None:
        """Ends the stream. It is told that nothing waits for it any more as soon as it has."""


@dataclass(slots=True)
class Unread:
    """What waits for one reader."""

    machine: str
    num_bytes: int
    since: float
    """Something has waited ever since."""
    is_stranger: bool


class ReplyRoom:
    """The room of one process. A machine may have several readers."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._unread: dict[Reader, Unread] = {}
        self._by_machine: dict[str, int] = {}
        self.strangers_bytes = 0
        """That wait for machines without standing."""

    def waits(self, reader: Reader, machine: str, num_bytes: int, now: float) -> None:
        """So many bytes wait for a reader now, on that machine; 0: it has read everything, or is
        gone."""
        known = self._unread.get(reader)
        if known is None:
            if num_bytes:
                self._unread[reader] = Unread(machine, 0, now, self.is_stranger(machine))
                self._count(self._unread[reader], num_bytes)
            return
        self._count(known, num_bytes - known.num_bytes)
        if not num_bytes:
            del self._unread[reader]

    def is_stranger(self, machine: str) -> bool:
        """Is it one of those that share one account?"""
        return not self._standing.has_standing(machine)

    def may_ask(self, machine: str, now: float) -> bool:
        """Whether there is room for a usual reply to a machine: for a call is made what it asks for
        only then."""
        return self.fits(machine, USUAL_BYTES, now)

    def fits(self, machine: str, num_bytes: int, now: float) -> bool:
        """Whether there is room for a reply, when others have given way."""
        held = self._by_machine.get(machine, 0)
        if not self.is_stranger(machine):
            return not held or held + num_bytes <= MEMBER_BYTES
        if held and held + num_bytes > STRANGER_BYTES:
            return False
        missing = self.strangers_bytes + num_bytes - STRANGERS_UNREAD_BYTES
        return missing <= 0 or missing <= sum(u.num_bytes for _, u in self._late(machine, now))

    def give_way(self, machine: str, num_bytes: int, now: float) -> list[Reader]:
        """Readers that have to end for a reply that `fits`, the oldest first."""
        if not self.is_stranger(machine):
            return []
        ended: list[Reader] = []
        missing = self.strangers_bytes + num_bytes - STRANGERS_UNREAD_BYTES
        for reader, unread in self._late(machine, now) if missing > 0 else ():
            if missing > 0:
                missing -= unread.num_bytes
                ended.append(reader)
        return ended

    def _late(self, machine: str, now: float) -> list[tuple[Reader, Unread]]:
        """Those that give way to another machine, the oldest first."""
        late = [
            (reader, unread)
            for reader, unread in self._unread.items()
            if unread.is_stranger
            and unread.machine != machine
            and now - unread.since >= GIVES_WAY_AFTER_S
        ]
        return sorted(late, key=lambda item: item[1].since)

    def _count(self, unread: Unread, more_bytes: int) -> None:
        unread.num_bytes += more_bytes
        left = self._by_machine.get(unread.machine, 0) + more_bytes
        if left:
            self._by_machine[unread.machine] = left
        else:
            self._by_machine.pop(unread.machine, None)
        if unread.is_stranger:
            self.strangers_bytes += more_bytes
