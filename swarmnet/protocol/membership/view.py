"""What a peer believes of all others: a set of versioned records that merge in any order.

Two views that have seen the same records are equal, whatever came first. Being alive is not
part of a record: a peer is live in a view as long as its stamp goes on advancing there and
nobody's suspicion of that stamp stands (the suspicion and its refutation by a higher stamp
are those of SWIM, Das, Gupta and Motivala 2002).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, LEFT, Record, RoundCount

T = TypeVar("T")
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


ALL = -2
"""In place of a stage, in what is remembered: every peer."""


@dataclass(slots=True)
class _Sum:
    """Of the counters of one round, over all records, live or not; in samples."""

    launched: int = 0
    committed: int = 0


class View:
    """The records known to one peer. `silence_s` may be changed at any time.

    Who is live is asked far more often than it changes. So answers are remembered, for each stage
    apart, until a record of that stage changes or the first of its live peers may have been silent
    for too long."""

    def __init__(self, own_peer_id: str, *, silence_s: float = SILENCE_S) -> None:
        self.own_peer_id = own_peer_id
        self._silence_s = silence_s
        self._answers: dict[int, dict[object, object]] = {}
        self._until: dict[int, float] = {}
        self._sums: dict[int, _Sum] = {}
        self._counting: dict[int, dict[str, RoundCount]] = {}
        self._newest_round = 0
        """Of any record of another peer, ever."""
        self._known: dict[str, _Known] = {}
        self._stamps: dict[str, Stamp] = {}
        """Of the known records: they are compared with those of others all the time."""
        self._ids: list[str] = []
        self._ids_of_stage: dict[int, list[str]] = {}
        self._suspected: dict[str, Stamp] = {}
        self._suspected_at: dict[str, float] = {}
        self._forgotten: dict[str, _Forgotten] = {}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def silence_s(self) -> float:
        """A peer whose stamp has not advanced for this long is not live."""
        return self._silence_s

    @silence_s.setter
    def silence_s(self, silence_s: float) -> None:
        if silence_s != self._silence_s:
            self._silence_s = silence_s
            self._answers.clear()
            self._until.clear()

    # -- records ---------------------------------------------------------------------------

    def merge(self, record: Record, now: float) -> bool:
        """Takes a record in; True when it was news (a higher stamp than what is known).

        The own record comes in the same way: a caller that hears its own id from others decides
        itself whether to take it."""
        peer_id = record.peer_id
        known = self._known.get(peer_id)
        stamp = record.stamp
        if known is not None:
            if stamp <= self._stamps[peer_id]:
                return False
            before = known.record
            if before.stage != record.stage:
                _discard(self._ids_of_stage[before.stage], peer_id)
                self._index_stage(record)
                self._answers.pop(before.stage, None)
            if before.counts != record.counts:
                self._uncount(before)
                self._count(record)
            known.record = record
            known.heard_at = now
        else:
            if stamp <= self._forgotten_stamp(peer_id) or not self._make_room(now):
                return False
            self._forgotten.pop(peer_id, None)
            self._known[peer_id] = _Known(record, now)
            insort(self._ids, peer_id)
            self._index_stage(record)
            self._count(record)
        self._stamps[peer_id] = stamp
        self._changed(record.stage)
        if record.round > self._newest_round and peer_id != self.own_peer_id:
            self._newest_round = record.round
        if self._suspected and self._suspected.get(peer_id, stamp) < stamp:
            del self._suspected[peer_id], self._suspected_at[peer_id]
        return True

    def get(self, peer_id: str) -> Record | None:
        known = self._known.get(peer_id)
        return None if known is None else known.record

    def records(self) -> list[Record]:
        """All known records, the own one included, by peer id."""
        return [self._known[p].record for p in self._ids]

    def stamps(self) -> dict[str, Stamp]:
        """The digest that gossip swaps: peer id to stamp."""
        return dict(self._stamps)

    def newer_than(self, stamps: Mapping[str, Stamp]) -> list[Record]:
        """Records that the owner of `stamps` lacks or has older, by peer id."""
        get = stamps.get
        newer = [p for p, stamp in self._stamps.items() if stamp > get(p, NO_STAMP)]
        newer.sort()
        return [self._known[p].record for p in newer]

    def wanted_from(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """Peer ids of which the owner of `stamps` has newer records, sorted."""
        get = self._stamps.get
        wanted = [p for p, stamp in stamps.items() if stamp > get(p, NO_STAMP)]
        forgotten = self._forgotten
        return sorted(p for p in wanted if p not in forgotten or stamps[p] > forgotten[p].stamp)

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
        self._suspected_at.setdefault(peer_id, now)
        self._changed(known.record.stage)
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

    def stood_still(self, seconds: float, now: float) -> None:
        """The own process has not run for so long: nobody could be heard of."""
        for known in self._known.values():
            known.heard_at = min(now, known.heard_at + seconds)
        for peer_id, at in self._suspected_at.items():
            self._suspected_at[peer_id] = min(now, at + seconds)
        self._answers.clear()
        self._until.clear()

    def gone_s(self, peer_id: str, now: float) -> float:
        """For how long a peer has not been live, seconds; 0 where it is, infinity where it has left
        or is not known."""
        if self.is_live(peer_id, now):
            return 0.0
        known = self._known.get(peer_id)
        if known is None or known.record.state == LEFT:
            return math.inf
        silent_from = known.heard_at + self.silence_s
        return now - min(silent_from, self._suspected_at.get(peer_id, silent_from))

    def silent_s(self, peer_id: str, now: float) -> float:
        """For how long nothing new has been heard of a peer; infinity where it is not known."""
        known = self._known.get(peer_id)
        return math.inf if known is None else now - known.heard_at

    def live(self, now: float) -> Sequence[Record]:
        """Records of the live peers, by peer id."""
        return self.remembered(ALL, "live", now, lambda: self._live_of(self._ids, now))

    def replicas(self, stage: int, now: float) -> Sequence[Record]:
        """Live replicas that serve `stage` now, by peer id."""
        return self.remembered(
            stage, "replicas", now, lambda: [r for r in self._live_in(stage, now) if r.is_replica]
        )

    def members(self, stage: int, now: float) -> Sequence[Record]:
        """Live peers of `stage`, those on their way in or out included, by peer id."""
        return self.remembered(
            stage,
            "members",
            now,
            lambda: [r for r in self._live_in(stage, now) if r.state in (JOINING, ACTIVE, LEAVING)],
        )

    def lost(self, stage: int, now: float) -> list[Record]:
        """Records of peers of `stage` that are known and not live, by peer id."""
        live = {r.peer_id for r in self._live_in(stage, now)}
        ids = self._ids_of_stage.get(stage, ())
        return [self._known[p].record for p in ids if p not in live]

    def is_past(self, round_index: int, now: float) -> bool:
        """Some other live replica, of any stage, has begun a later round."""
        if self._newest_round <= round_index:
            return False
        own = self.own_peer_id
        return any(
            r.round > round_index and r.is_replica and r.peer_id != own for r in self.live(now)
        )

    def committed(self, round_index: int) -> int:
        """Samples committed in a round, by the word of everybody known."""
        sums = self._sums.get(round_index)
        return 0 if sums is None else sums.committed

    def launched_at_most(self, round_index: int) -> int:
        """Samples launched in a round, those included that died with their feeder."""
        sums = self._sums.get(round_index)
        return 0 if sums is None else sums.launched

    def counts(self, round_index: int) -> Sequence[tuple[Record, RoundCount]]:
        """Records that carry counters of a round, live or not, by peer id, with these."""
        counting = self._counting.get(round_index, {})
        return [(self._known[p].record, counting[p]) for p in sorted(counting)]

    def remembered(self, stage: int, name: object, now: float, ask: Callable[[], T]) -> T:
        """`ask()`, or what it said last time where nothing has changed since that concerns the
        peers of `stage` (`ALL`: anybody). Not to be changed by who gets it."""
        if now > self._until.get(stage, float("-inf")):
            self._until[stage] = self._silent_from(stage, now)
            self._answers.pop(stage, None)
        answers = self._answers.get(stage)
        if answers is None:
            answers = self._answers[stage] = {}
        if name not in answers:
            answers[name] = ask()
        return answers[name]  # type: ignore[return-value]

    # -- forgetting ------------------------------------------------------------------------

    def forget_old(self, now: float, after_s: float) -> list[str]:
        """Drops every peer (but the own) that has been silent, suspected or LEFT for `after_s`;
        returns their ids, sorted. Feeders of the newest rounds are kept, for what they counted:
        rounds may be longer than that. Their old records are not taken in again for another
        `after_s`: a peer that forgets later would bring them back."""
        if self._forgotten:
            self._forgotten = {p: f for p, f in self._forgotten.items() if now - f.at < after_s}
        since = now - after_s
        old = [
            p
            for p in self._ids
            if self._known[p].heard_at <= since
            and p != self.own_peer_id
            and not self.is_live(p, now)
            and not self._has_counted(p)
        ]
        for peer_id in old:
            self._forget(peer_id, now)
        return old

    # -- within ----------------------------------------------------------------------------

    def _live_in(self, stage: int, now: float) -> Sequence[Record]:
        ids = self._ids_of_stage.get(stage, ())
        return self.remembered(stage, "live", now, lambda: self._live_of(ids, now))

    def _live_of(self, peer_ids: Sequence[str], now: float) -> list[Record]:
        known, suspected, since = self._known, self._suspected, now - self._silence_s
        live = []
        for peer_id in peer_ids:  # `is_live` for many, without its calls: the hot path of a swarm
            entry = known[peer_id]
            sound = entry.heard_at >= since and peer_id not in suspected
            if (sound or peer_id == self.own_peer_id) and entry.record.state != LEFT:
                live.append(entry.record)
        return live

    def _silent_from(self, stage: int, now: float) -> float:
        """Before this time none of those that are not silent now will be."""
        ids = self._ids if stage == ALL else self._ids_of_stage.get(stage, ())
        known, since = self._known, now - self._silence_s
        heard = [at for p in ids if (at := known[p].heard_at) >= since]
        return min(heard, default=now) + self._silence_s

    def _has_counted(self, peer_id: str) -> bool:
        """Samples of a round that may still be going on are in its record."""
        newest = self._newest_round
        own = self._known.get(self.own_peer_id)
        if own is not None:
            newest = max(newest, own.record.round)
        return any(c.committed and c.round >= newest for c in self._known[peer_id].record.counts)

    def _changed(self, stage: int) -> None:
        self._answers.pop(stage, None)
        self._answers.pop(ALL, None)

    def _count(self, record: Record) -> None:
        for count in record.counts:  # of two for one round, the first holds
            counting = self._counting.setdefault(count.round, {})
            if record.peer_id not in counting:
                self._add(count, 1)
                counting[record.peer_id] = count

    def _add(self, count: RoundCount, sign: int) -> None:
        sums = self._sums.setdefault(count.round, _Sum())
        sums.launched += sign * count.launched
        sums.committed += sign * count.committed
        if sums == _Sum():
            del self._sums[count.round]

    def _uncount(self, record: Record) -> None:
        for count in record.counts:
            counting = self._counting.get(count.round, {})
            known = counting.pop(record.peer_id, None)
            if known is not None:
                self._add(known, -1)
            if not counting:
                self._counting.pop(count.round, None)

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
        del self._stamps[peer_id]
        _discard(self._ids, peer_id)
        _discard(self._ids_of_stage[record.stage], peer_id)
        self._suspected.pop(peer_id, None)
        self._suspected_at.pop(peer_id, None)
        self._uncount(record)
        self._changed(record.stage)
        if len(self._forgotten) >= MAX_PEERS:
            del self._forgotten[next(iter(self._forgotten))]
        self._forgotten[peer_id] = _Forgotten(record.stamp, now)


def _discard(ordered: list[str], peer_id: str) -> None:
    index = bisect_left(ordered, peer_id)
    if index < len(ordered) and ordered[index] == peer_id:
        del ordered[index]
