"""How much memory the records of peers take that do not matter here, and which of them go first
where that is too much. Pure.

Identities are free, and a record may be long. So there is a room for all such records together, and
a smaller one for those that one machine has brought. Where a room is full, peers without a channel
go first, and of these the ones with the longest records: a newcomer has a channel and a short one.
Some room is made at a time, so that a flood costs no search for each of its records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.membership.view import View

ROOM_BYTES = 64 << 20
"""Of all such records."""
SENDER_BYTES = 16 << 20
"""Of those that one machine has brought."""
LEFT_PART = 0.875
"""Of a room, filled after some was made."""
RECORD_BYTES, ENTRY_BYTES = 2 << 10, 150
"""What a record takes at least, and each entry of its lists."""


def kept_bytes(num_bytes: int, record: Record) -> int:
    """What a record takes whose signed form has so many bytes: both forms are kept."""
    entries = (
        len(record.totals)
        + len(record.strikes)
        + len(record.restorable)
        + len(record.unreached)
        + len(record.owing)
        + len(record.addresses)
        + len(record.switches)
        + len(record.counts)
    )
    return 2 * num_bytes + RECORD_BYTES + ENTRY_BYTES * entries


@dataclass(frozen=True, slots=True)
class _Kept:
    num_bytes: int
    sender: str


class StrangerRoom:
    """The records of peers that do not matter."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        """The oldest first."""
        self._by_sender: dict[str, dict[str, None]] = {}
        self._sender_bytes: dict[str, int] = {}
        self.num_bytes = 0

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._kept

    def put(self, peer_id: str, num_bytes: int, sender: str) -> None:
        """A machine has brought the record of a peer, in place of the one before."""
        before = self._kept.get(peer_id)
        if before is not None:
            sender = before.sender
            self.drop(peer_id)
        self._kept[peer_id] = _Kept(num_bytes, sender)
        self._by_sender.setdefault(sender, {})[peer_id] = None
        self._sender_bytes[sender] = self._sender_bytes.get(sender, 0) + num_bytes
        self.num_bytes += num_bytes

    def drop(self, peer_id: str) -> None:
        """A peer is not known any more, or matters now."""
        kept = self._kept.pop(peer_id, None)
        if kept is None:
            return
        self.num_bytes -= kept.num_bytes
        self._sender_bytes[kept.sender] -= kept.num_bytes
        theirs = self._by_sender[kept.sender]
        del theirs[peer_id]
        if not theirs:
            del self._by_sender[kept.sender], self._sender_bytes[kept.sender]

    def make_room(self, sender: str, view: View) -> list[str]:
        """Peers that are to be forgotten, now that a machine has brought something. They are not in
        the room any more."""
        gone = []
        if self._sender_bytes.get(sender, 0) > SENDER_BYTES:
            excess = self._sender_bytes[sender] - LEFT_PART * SENDER_BYTES
            gone += self._drop_worst(self._by_sender[sender], excess, view)
        if self.num_bytes > ROOM_BYTES:
            gone += self._drop_worst(self._kept, self.num_bytes - LEFT_PART * ROOM_BYTES, view)
        return gone

    def _drop_worst(self, peer_ids: Iterable[str], num_bytes: float, view: View) -> list[str]:
        """At least so many bytes of these."""
        has_channel, kept = view.detector.has_channel, self._kept
        newest_first = list(peer_ids)[::-1]
        by_worth = sorted(newest_first, key=lambda p: (has_channel(p), -kept[p].num_bytes))
        gone = []
        for peer_id in by_worth:
            if num_bytes <= 0:
                break
            num_bytes -= kept[peer_id].num_bytes
            self.drop(peer_id)
            gone.append(peer_id)
        return gone
