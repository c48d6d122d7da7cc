"""What a peer believes of all others: a set of versioned records that merge in any order.

Two views that have seen the same records are equal, whatever came first. Being alive is not
part of a record: a peer is live in a view as long as its stamp goes on advancing there and
nobody's suspicion of that stamp stands (the suspicion and its refutation by a higher stamp
are those of SWIM, Das, Gupta and Motivala 2002).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmnet.protocol.records import ACTIVE, JOINING, LEAVING, LEFT, Record

Stamp = tuple[int, int]
"""(incarnation, version)"""

SILENCE_S = 10.0
"""A peer whose stamp has not advanced for this long is not live."""
MAX_PEERS = 16_384
"""Peers known at most, and peers remembered as forgotten at most."""
MAX_SUSPICIONS = 256
"""Suspicions told to others at once, the newest."""
MAX_STAMP_LEAD = 256
"""Versions by which a suspicion may run ahead of the record that is known here. A lie about a
version far in the future would otherwise silence a peer for good."""
NO_STAMP: Stamp = (-1, -1)


@dataclass(slots=True)
class _Known:
    record: Record
    heard_at: float
    """When its stamp last advanced here."""


@dataclass(slots=True)
class _Forgotten:
    stamp: Stamp
    at: float


class View:
    """The records known to one peer. `silence_s` may be changed at any time."""

    def __init__(self, own_peer_id: str, *, silence_s: float = SILENCE_S) -> None:
        self.own_peer_id = own_peer_id
        self.silence_s = silence_s
        self._known: dict[str, _Known] = {}
        self._ids: list[str] = []
        self._ids_of_stage: dict[int, list[str]] = {}
        self._suspected: dict[str, Stamp] = {}
        self._forgotten: dict[str, _Forgotten] = {}

    def __len__(self) -> int:
        return len(self._known)

    # -- records ---------------------------------------------------------------------------

    def merge(self, record: Record, now: float) -> bool:
        """Takes a record in; True when it was news (a higher stamp than what is known).

        The own record comes in the same way: a caller that hears its own id from others decides
        itself whether to take it."""
        peer_id = record.peer_id
        known = self._known.get(peer_id)
        if known is not None:
            if record.stamp <= known.record.stamp:
                return False
            if known.record.stage != record.stage:
                _discard(self._ids_of_stage[known.record.stage], peer_id)
                self._index_stage(record)
            known.record = record
            known.heard_at = now
        else:
            if record.stamp <= self._forgotten_stamp(peer_id) or not self._make_room(now):
                return False
            self._forgotten.pop(peer_id, None)
            self._known[peer_id] = _Known(record, now)
            insort(self._ids, peer_id)
            self._index_stage(record)
        if self._suspected.get(peer_id, record.stamp) < record.stamp:
            del self._suspected[peer_id]
        return True

    def get(self, peer_id: str) -> Record | None:
        known = self._known.get(peer_id)
        return None if known is None else known.record

    def records(self) -> list[Record]:
        """All known records, the own one included, by peer id."""
        return [self._known[p].record for p in self._ids]

    def stamps(self) -> dict[str, Stamp]:
        """The digest that gossip swaps: peer id to stamp, by peer id."""
        return {p: self._known[p].record.stamp for p in self._ids}

    def newer_than(self, stamps: Mapping[str, Stamp]) -> list[Record]:
        """Records that the owner of `stamps` lacks or has older, by peer id."""
        records = self.records()
        return [r for r in records if stamps.get(r.peer_id, NO_STAMP) < r.stamp]

    def wanted_from(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """Peer ids of which the owner of `stamps` has newer records, sorted."""
        return sorted(p for p, stamp in stamps.items() if stamp > self._stamp(p))

    # -- who is live -----------------------------------------------------------------------

    def suspect(self, peer_id: str, stamp: Stamp, now: float) -> bool:
        """Takes in that somebody found a peer silent when its stamp was `stamp`. The suspicion
        holds until a record with a higher stamp comes in.

        Returns True when it was news. Of the own peer nothing is kept: True means that the
        own stamp must rise above `stamp` to refute it."""
        known = self._known.get(peer_id)
        if peer_id == self.own_peer_id:
            return known is None or stamp >= known.record.stamp
        if known is None or stamp < known.record.stamp:
            return False
        incarnation, version = known.record.stamp
        stamp = min(stamp, (incarnation, version + MAX_STAMP_LEAD))
        if stamp <= self._suspected.get(peer_id, NO_STAMP):
            return False
        self._suspected.pop(peer_id, None)  # so that the newest suspicion is the last
        self._suspected[peer_id] = stamp
        return True

    def suspicions(self) -> list[tuple[str, Stamp]]:
        """The suspicions in force (the newest `MAX_SUSPICIONS`), by peer id."""
        newest = list(self._suspected.items())[-MAX_SUSPICIONS:]
        return sorted(newest)

    def is_suspected(self, peer_id: str) -> bool:
        return peer_id in self._suspected

    def is_live(self, peer_id: str, now: float) -> bool:
        """Known, not LEFT, not suspected, and heard of within `silence_s`. A peer never finds
        itself silent or suspected."""
        known = self._known.get(peer_id)
        if known is None or known.record.state == LEFT:
            return False
        if peer_id == self.own_peer_id:
            return True
        return peer_id not in self._suspected and known.heard_at >= now - self.silence_s

    def live(self, now: float) -> list[Record]:
        """Records of the live peers, by peer id."""
        return self._live_of(self._ids, now)

    def replicas(self, stage: int, now: float) -> list[Record]:
        """Live replicas that serve `stage` now, by peer id."""
        live = self._live_of(self._ids_of_stage.get(stage, ()), now)
        return [r for r in live if r.is_replica]

    def members(self, stage: int, now: float) -> list[Record]:
        """Live peers of `stage`, those on their way in or out included, by peer id."""
        live = self._live_of(self._ids_of_stage.get(stage, ()), now)
        return [r for r in live if r.state in (JOINING, ACTIVE, LEAVING)]

    # -- forgetting ------------------------------------------------------------------------

    def forget_old(self, now: float, after_s: float) -> list[str]:
        """Drops every peer (but the own) that has been silent, suspected or LEFT for `after_s`;
        returns their ids, sorted. Their old records are not taken in again for another
        `after_s`: a peer that forgets later would bring them back."""
        self._forgotten = {p: f for p, f in self._forgotten.items() if now - f.at < after_s}
        old = [
            p
            for p in self._ids
            if p != self.own_peer_id
            and not self.is_live(p, now)
            and now - self._known[p].heard_at >= after_s
        ]
        for peer_id in old:
            self._forget(peer_id, now)
        return old

    # -- within ----------------------------------------------------------------------------

    def _live_of(self, peer_ids: Iterable[str], now: float) -> list[Record]:
        known, suspected, since = self._known, self._suspected, now - self.silence_s
        live = []
        for peer_id in peer_ids:  # `is_live` for many, without its calls: the hot path of a swarm
            entry = known[peer_id]
            sound = entry.heard_at >= since and peer_id not in suspected
            if (sound or peer_id == self.own_peer_id) and entry.record.state != LEFT:
                live.append(entry.record)
        return live

    def _stamp(self, peer_id: str) -> Stamp:
        known = self._known.get(peer_id)
        return self._forgotten_stamp(peer_id) if known is None else known.record.stamp

    def _forgotten_stamp(self, peer_id: str) -> Stamp:
        forgotten = self._forgotten.get(peer_id)
        return NO_STAMP if forgotten is None else forgotten.stamp

    def _index_stage(self, record: Record) -> None:
        insort(self._ids_of_stage.setdefault(record.stage, []), record.peer_id)

    def _make_room(self, now: float) -> bool:
        """Forgets the peer that has been silent longest when the view is full; False where all
        are live."""
        if len(self._known) < MAX_PEERS:
            return True
        silent = [p for p in self._ids if not self.is_live(p, now) and p != self.own_peer_id]
        if not silent:
            return False
        self._forget(min(silent, key=lambda p: (self._known[p].heard_at, p)), now)
        return True

    def _forget(self, peer_id: str, now: float) -> None:
        record = self._known.pop(peer_id).record
        _discard(self._ids, peer_id)
        _discard(self._ids_of_stage[record.stage], peer_id)
        self._suspected.pop(peer_id, None)
        if len(self._forgotten) >= MAX_PEERS:
            del self._forgotten[next(iter(self._forgotten))]
        self._forgotten[peer_id] = _Forgotten(record.stamp, now)


def _discard(ordered: list[str], peer_id: str) -> None:
    index = bisect_left(ordered, peer_id)
    if index < len(ordered) and ordered[index] == peer_id:
        del ordered[index]
