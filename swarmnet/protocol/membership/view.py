"""What a peer knows of all peers: a set of versioned records that merge in any order.

Two views that have seen the same records are equal, whatever the order in which these came. A
record does not say whether its peer is alive: a peer is live in a view as long as there is news of
it (see `failure_detector`). A live peer takes part in the run: its samples count, and it has its
place among the owners of shards. It need not be in reach of this peer: `reaches` says that. Peers
that are out of reach together, with no path of serving peers to them, are the other side of a
partition, and not live here, whatever news an onlooker brings; what their feeders count there is
not counted here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from swarmnet.protocol.membership.agreement import Agreement
from swarmnet.protocol.membership.failure_detector import SILENCE_S, FailureDetector
from swarmnet.protocol.membership.indices import (
    ALL,
    AnswerCache,
    Digest,
    RoundCounters,
    StageIndex,
)
from swarmnet.protocol.membership.reach import Reach
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, LEFT, Record, Stamp

T = TypeVar("T")

MAX_PEERS = 16_384
"""Known peers at most."""


class View:
    """The records known to one peer.

    The list of live peers is read far more often than it changes. So answers are remembered, for
    each stage apart, until a record of that stage changes or the first of its live peers may have
    been silent for too long.

    `detector`, `digest`, `counters` and `agreement` are to be read by others; only the view changes
    them. What happens to a peer is told to `reach`."""

    def __init__(self, own_peer_id: str, *, silence_s: float = SILENCE_S) -> None:
        self.own_peer_id = own_peer_id
        self.detector = FailureDetector(own_peer_id, silence_s)
        self.digest = Digest()
        self.counters = RoundCounters()
        self.agreement = Agreement(own_peer_id)
        self._records: dict[str, Record] = {}
        self._index = StageIndex()
        self._answers = AnswerCache(
            lambda stage, now: self.detector.next_silence_at(self._index.ids(stage), now)
        )
        self._newest_round = 0
        """Of any record of another peer, ever."""
        self.reach = Reach(
            own_peer_id,
            self.detector,
            self._records,
            self._index,
            self.counters,
            self._answers,
        )

    def __len__(self) -> int:
        return len(self._records)

    @property
    def silence_s(self) -> float:
        """A peer whose stamp has not advanced for this long is not live."""
        return self.detector.silence_s

    def set_silence(self, silence_s: float) -> None:
        """A peer is silent after so long from now on."""
        if silence_s != self.detector.silence_s:
            self.detector.silence_s = silence_s
            self._answers.clear()

    # -- records ---------------------------------------------------------------------------

    def merge(self, record: Record, now: float) -> bool:
        """Takes a record in. Returns True when it was news: a higher stamp than the known one.

        The own record comes in the same way. A caller that hears its own id from others decides
        itself whether to take that record in."""
        peer_id, stage = record.peer_id, record.stage
        if not self.digest.is_news(peer_id, record.stamp):
            return False
        before = self._records.get(peer_id)
        if before is None:
            if not self._make_room(now):
                return False
            self._index.add(peer_id, stage)
            self.counters.add(record)
        else:
            if before.stage != stage:
                self._index.move(peer_id, before.stage, stage)
                self._answers.drop(before.stage)
            if before.counts != record.counts and self.reach.counts(peer_id):
                self.counters.remove(before)
                self.counters.add(record)
        self._records[peer_id] = record
        self.digest.put(peer_id, record.stamp)
        self._answers.drop(stage)
        self.reach.merged(before, record, now)
        if before is None or _told(before) != _told(record):
            self.agreement.heard(record)
        if record.round > self._newest_round and peer_id != self.own_peer_id:
            self._newest_round = record.round
        return True

    def get(self, peer_id: str) -> Record | None:
        """The known record of a peer."""
        return self._records.get(peer_id)

    def records(self) -> list[Record]:
        """All known records, the own one included, by peer id."""
        return [self._records[p] for p in self._index.ids(ALL)]

    def newer_than(self, stamps: Mapping[str, Stamp]) -> list[Record]:
        """Records that the owner of `stamps` lacks or has older, by peer id."""
        return [self._records[p] for p in self.digest.newer_than(stamps)]

    # -- live peers ------------------------------------------------------------------------

    def reaches(self, peer_id: str, now: float) -> bool:
        """Whether a peer is live and can be called."""
        return self.is_live(peer_id, now) and not self.detector.is_lost(peer_id)

    def is_live(self, peer_id: str, now: float) -> bool:
        """Known, not LEFT, heard of within `silence_s`, also since it was lost, and in this part
        of the swarm. A peer never finds itself silent or lost."""
        self.reach.awake_s(now)
        record = self._records.get(peer_id)
        return record is not None and record.state != LEFT and self.detector.is_sound(peer_id, now)

    def gone_s(self, peer_id: str, now: float) -> float:
        """For how long a peer has not been live or not in reach, seconds: 0 for one that is,
        infinity for one that has left or is not known."""
        if self.reaches(peer_id, now):
            return 0.0
        record = self._records.get(peer_id)
        if record is None or record.state == LEFT:
            return math.inf
        return self.detector.gone_s(peer_id, now)

    def live(self, now: float, stage: int = ALL) -> Sequence[Record]:
        """Records of the live peers of a stage, or of all live peers, by peer id."""
        return self.remembered(stage, "live", now, lambda: self._live_in(stage, now))

    def replicas(self, stage: int, now: float) -> Sequence[Record]:
        """Live replicas that serve `stage` now, by peer id."""
        return self.remembered(
            stage, "replicas", now, lambda: [r for r in self.live(now, stage) if r.is_replica]
        )

    def in_reach(self, stage: int, now: float) -> Sequence[Record]:
        """The replicas of a stage that can be called, by peer id."""
        lost = self.detector.is_lost
        return self.remembered(
            stage,
            "in reach",
            now,
            lambda: [r for r in self.replicas(stage, now) if not lost(r.peer_id)],
        )

    def members(self, stage: int, now: float) -> Sequence[Record]:
        """Live peers of `stage`, joining and leaving ones included, by peer id."""
        return self.remembered(
            stage,
            "members",
            now,
            lambda: [r for r in self.live(now, stage) if r.state in (JOINING, ACTIVE, LEAVING)],
        )

    def lost(self, stage: int, now: float) -> list[Record]:
        """Records of peers of `stage` that are known, and not live or out of reach, by peer id."""
        is_lost = self.detector.is_lost
        live = {r.peer_id for r in self.live(now, stage) if not is_lost(r.peer_id)}
        return [self._records[p] for p in self._index.ids(stage) if p not in live]

    def is_past(self, round_index: int, now: float) -> bool:
        """Another live replica, of any stage, has begun a later round."""
        if self._newest_round <= round_index:
            return False
        own = self.own_peer_id
        return any(
            r.round > round_index and r.is_replica and r.peer_id != own for r in self.live(now)
        )

    def remembered(self, stage: int, name: object, now: float, ask: Callable[[], T]) -> T:
        """`ask()`, or what it returned the last time, where nothing has changed since that concerns
        the peers of `stage` (`ALL`: any peer). The caller must not change the answer."""
        self.reach.awake_s(now)
        return self._answers.get(stage, name, now, ask)

    # -- forgetting ------------------------------------------------------------------------

    def forget_old(self, now: float, after_s: float) -> list[str]:
        """Drops every peer (but the own) that has been silent, suspected or LEFT for `after_s`
        seconds; returns their ids, sorted. Feeders of the newest rounds are kept for their
        counters, because rounds may be longer than that. The old records are not taken in again for
        another `after_s`: a peer that forgets later would bring them back."""
        self.digest.expire(now, after_s)
        since = now - after_s
        old = [
            p
            for p in self._index.ids(ALL)
            if self.detector.heard_at(p) <= since
            and p != self.own_peer_id
            and not self.is_live(p, now)
            and not self._has_counted(p)
        ]
        for peer_id in old:
            self._forget(peer_id, now)
        return old

    def forget(self, peer_id: str, now: float) -> None:
        """Drops another peer, where it is known, for lack of room. Its record from now is not taken
        in again before `forget_old` says so."""
        if peer_id in self._records and peer_id != self.own_peer_id:
            self._forget(peer_id, now)

    # -- within ----------------------------------------------------------------------------

    def _live_in(self, stage: int, now: float) -> list[Record]:
        records, sound = self._records, self.detector.sound(self._index.ids(stage), now)
        return [r for p in sound if (r := records[p]).state != LEFT]

    def _has_counted(self, peer_id: str) -> bool:
        """The record of a peer has samples of a round that may not have ended."""
        newest = self._newest_round
        own = self._records.get(self.own_peer_id)
        if own is not None:
            newest = max(newest, own.round)
        return any(c.committed and c.round >= newest for c in self._records[peer_id].counts)

    def _make_room(self, now: float) -> bool:
        """Forgets the peer that has been silent longest when the view is full; False where all
        are live."""
        if len(self._records) < MAX_PEERS:
            return True
        ids = self._index.ids(ALL)
        silent = [p for p in ids if not self.is_live(p, now) and p != self.own_peer_id]
        if not silent:
            return False
        self._forget(min(silent, key=lambda p: (self.detector.heard_at(p), p)), now)
        return True

    def _forget(self, peer_id: str, now: float) -> None:
        record = self._records.pop(peer_id)
        self._index.remove(peer_id, record.stage)
        self.reach.forget(record)
        self.digest.forget(peer_id, now)
        self.agreement.forget(peer_id)
        self._answers.drop(record.stage)


def _told(record: Record) -> tuple[int, int, bytes]:
    """With which parameters a peer has begun its round, as it says."""
    return record.stage, record.round, record.digests
