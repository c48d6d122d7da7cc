"""Which peers this one can call, and which are in another part of the swarm, over a view's records.

The failure detector knows whether a peer answers, and the records who cannot call whom: each names
the living peers that its peer cannot call. Two peers are *cut* where one names the other; a call
between them needs a third. A partition is a cut of many pairs at once: no path of serving peers
leads to the other side, though there may be news of it through an onlooker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from swarmnet.protocol.membership.failure_detector import (
    DEAD,
    Command,
    FailureDetector,
    Look,
    State,
)
from swarmnet.protocol.membership.indices import ALL, AnswerCache, RoundCounters, StageIndex
from swarmnet.protocol.membership.records import (
    ACTIVE,
    JOINING,
    LEAVING,
    LEFT,
    MAX_UNREACHED,
    NO_STAMP,
    OBSERVER_STAGE,
    Record,
    Stamp,
)

MAX_STAMP_LEAD = 256
"""Versions by which a suspicion may run ahead of the record that is known here. A lie about a
version far in the future would otherwise silence a peer for good."""


def are_cut(one: Record | None, other: Record | None) -> bool:
    """Whether one of two peers says that it cannot call the other."""
    if one is None or other is None:
        return False
    return one.peer_id in other.unreached or other.peer_id in one.unreached


def num_cuts(records: Iterable[Record]) -> dict[str, int]:
    """For each of these peers, from how many of the others it is cut; those from none are left
    out."""
    among = {r.peer_id: r for r in records}
    pairs = {
        (min(r.peer_id, p), max(r.peer_id, p))
        for r in among.values()
        for p in r.unreached
        if p in among and p != r.peer_id
    }
    counts: dict[str, int] = {}
    for pair in sorted(pairs):
        for peer_id in pair:
            counts[peer_id] = counts.get(peer_id, 0) + 1
    return counts


def connected(lost: Mapping[str, Record], others: Iterable[Record]) -> set[str]:
    """Those of `lost`, serving peers that this one cannot call, to which a path of serving peers
    leads through `others`, which it can call. Of these no more are read than it takes: most often
    the first one reaches them all, and a swarm may be large."""
    rest, found = dict(lost), list[Record]()
    for record in chain(others, found):  # `found` grows meanwhile
        if not rest:
            break
        reached = [p for p, r in rest.items() if not are_cut(record, r)]
        found += [rest.pop(p) for p in reached]
    return {r.peer_id for r in found}


class Reach:
    """Of one view, whose parts these are. What has happened to a peer is told here, and what is to
    be done for it comes back."""

    def __init__(
        self,
        own_peer_id: str,
        detector: FailureDetector,
        records: Mapping[str, Record],
        index: StageIndex,
        counters: RoundCounters,
        answers: AnswerCache,
    ) -> None:
        self._own_peer_id = own_peer_id
        self._detector = detector
        self._records = records
        self._index = index
        self._counters = counters
        self._answers = answers
        self._frozen: dict[str, Record] = {}
        """Of peers in another part: the record whose counters count."""
        self._commands: list[Command] = []

    # -- answers ---------------------------------------------------------------------------

    def state_of(self, peer_id: str, now: float) -> State:
        """Whether a peer can be called, as this one has found out: `DEAD` for one that is out of
        reach, has left, or is not known."""
        self.awake_s(now)
        record = self._records.get(peer_id)
        if record is None or record.state == LEFT:
            return DEAD
        return self._detector.state_of(peer_id, now)

    def awake_s(self, now: float) -> float:
        """Time without that in which this process stood still, when it could not hear of any
        peer."""
        before = self._detector.clock.stalled_s
        awake_s = self._detector.awake_s(now)
        if self._detector.clock.stalled_s != before:
            self._answers.clear()
        return awake_s

    def are_cut(self, one: str, other: str) -> bool:
        """Whether one of two peers says that it cannot call the other."""
        return are_cut(self._records.get(one), self._records.get(other))

    def go_betweens(self, origin: str, serving: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """The peers among `serving` that are cut from `origin`, each with the first of the others
        that reaches both."""
        records = self._records
        its_own = records.get(origin)
        if its_own is None:
            return
        for peer_id in serving:
            record = records.get(peer_id)
            if record is None or peer_id == origin:
                continue
            if peer_id not in its_own.unreached and origin not in record.unreached:
                continue  # not asked by a call for each: this is done at all news
            others = (p for p in serving if p not in (peer_id, origin))
            both = (p for p in others if not (self.are_cut(p, peer_id) or self.are_cut(p, origin)))
            yield peer_id, next(both, None)

    def unreached(self) -> tuple[str, ...]:
        """The living members that this peer cannot call, which its record names."""
        found = (self._records.get(p) for p in self._detector.out_of_reach())
        members = [r.peer_id for r in found if r and r.state != LEFT and r.stage != OBSERVER_STAGE]
        return tuple(members[:MAX_UNREACHED])

    def counts(self, peer_id: str) -> bool:
        """Whether what a peer's records count from now on counts here."""
        return peer_id not in self._frozen

    # -- what has happened -----------------------------------------------------------------

    def answered(self, peer_id: str, now: float) -> list[Command]:
        """A peer has answered a call of this one."""
        was_sound = self._detector.is_sound(peer_id, now)
        commands = self._detector.answered(peer_id, now)
        if not was_sound:
            self._answers.clear()
        return self._changed(commands, now)

    def unanswered(self, peer_id: str, stamp: Stamp, now: float) -> list[Command]:
        """A look at a peer, whose stamp was `stamp` when it began, was not answered."""
        stamp = self._bounded(peer_id, stamp)
        return self._changed(self._detector.unanswered(peer_id, stamp, now), now)

    def suspected_by_another(self, peer_id: str, stamp: Stamp, now: float) -> list[Command]:
        """Another peer had no answer from this one, when its stamp was `stamp`."""
        record = self._records.get(peer_id)
        known = record.stamp if record is not None else NO_STAMP
        stamp = self._bounded(peer_id, stamp)
        was_suspected = self._detector.is_suspected(peer_id)
        commands = self._detector.suspected_by_another(peer_id, stamp, known, now)
        if self._detector.is_suspected(peer_id) != was_suspected:  # its death is known now
            self._answers.clear()
            self._find_parts(now)
        return commands

    def merged(self, before: Record | None, record: Record, now: float) -> None:
        """A record has come in, in place of the one `before`."""
        peer_id = record.peer_id
        was_suspected = self._detector.is_suspected(peer_id)
        self._commands += self._detector.heard(peer_id, record.stamp, now)
        is_lost = self._detector.is_lost(peer_id)
        told = before.unreached if before is not None else ()
        if told != record.unreached and peer_id != self._own_peer_id:
            if self._own_peer_id in record.unreached and not is_lost:
                self._commands.append(Look(peer_id))
            for other in told:  # which is reached again
                if other not in record.unreached and self._detector.is_lost(other):
                    self._commands.append(Look(other))
        if before is not None and is_lost and before.addresses != record.addresses:
            self._commands.append(Look(peer_id))  # at a relay, perhaps
        is_the_same = before is not None and _role(before) == _role(record)
        if not is_the_same or self._detector.is_suspected(peer_id) != was_suspected:
            self._find_parts(now)

    def take_commands(self) -> list[Command]:
        """What the records that came in have made due."""
        commands, self._commands = self._commands, []
        return commands

    def forget(self, record: Record) -> None:
        """A peer, with this record, is no longer in the view."""
        self._detector.forget(record.peer_id)
        self._counters.remove(self._frozen.pop(record.peer_id, record))

    # -- within ----------------------------------------------------------------------------

    def _bounded(self, peer_id: str, stamp: Stamp) -> Stamp:
        record = self._records.get(peer_id)
        if record is None:
            return stamp
        incarnation, version = record.stamp
        return min(stamp, (incarnation, version + MAX_STAMP_LEAD))

    def _changed(self, commands: list[Command], now: float) -> list[Command]:
        if commands:
            self._answers.clear()
            self._find_parts(now)
        return commands

    def _find_parts(self, now: float) -> None:
        """Which peers are out of reach in another part of the swarm. Their counters stay as they
        are from then on: what is counted there has no gradient here."""
        detector = self._detector
        missing = detector.out_of_reach()
        apart: frozenset[str] = frozenset()
        if len(missing) > MAX_UNREACHED:  # more than records can name
            apart = frozenset(missing)
        elif missing:
            gone = {r.peer_id: r for p in missing if _serves(r := self._records[p])}
            apart = frozenset(missing) - connected(gone, self._near(missing, now))
        if apart == detector.apart:
            return
        for peer_id in sorted(apart - detector.apart):
            self._frozen[peer_id] = self._records[peer_id]
        for peer_id in sorted(detector.apart - apart):
            frozen = self._frozen.pop(peer_id, None)
            if frozen is not None:
                self._counters.remove(frozen)
                self._counters.add(self._records[peer_id])
        detector.apart = apart
        self._answers.clear()

    def _near(self, missing: Sequence[str], now: float) -> Iterator[Record]:
        """The other peers that serve and can be called: all but those that are `missing`."""
        detector, gone = self._detector, {*missing, self._own_peer_id}
        for peer_id in self._index.ids(ALL):
            record = self._records[peer_id]
            if peer_id in gone or not _serves(record) or detector.is_suspected(peer_id):
                continue
            if detector.silent_s(peer_id, now) <= detector.silence_s:
                yield record


def _role(record: Record) -> tuple[object, ...]:
    """What of a record the parts of a swarm depend on."""
    return record.stage, _serves(record), record.unreached


def _serves(record: Record) -> bool:
    return record.stage >= 0 and record.state in (JOINING, ACTIVE, LEAVING)
