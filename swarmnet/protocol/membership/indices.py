"""What a view keeps up to date with every record, because it is asked for far more often than it
changes: stamps (`Digest`), sums of the counters of rounds (`RoundCounters`), peers by stage
(`StageIndex`), and answers about stages (`AnswerCache`)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarmnet.protocol.membership.records import NO_STAMP, Record, RoundCount, Stamp

T = TypeVar("T")

MAX_FORGOTTEN = 16_384
"""Peers remembered as forgotten at most."""
ALL = -2
"""In place of a stage: the peers of every stage."""


@dataclass(slots=True)
class _Forgotten:
    stamp: Stamp
    at: float


class Digest:
    """Stamps of the known records, and of those that were forgotten a while ago: another peer that
    forgets later would bring these back."""

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp] = {}
        self._forgotten: dict[str, _Forgotten] = {}

    def is_news(self, peer_id: str, stamp: Stamp) -> bool:
        """The stamp is higher than the one that is known, or that was forgotten."""
        known = self._stamps.get(peer_id)
        if known is None:
            forgotten = self._forgotten.get(peer_id)
            known = NO_STAMP if forgotten is None else forgotten.stamp
        return stamp > known

    def put(self, peer_id: str, stamp: Stamp) -> None:
        """A record with this stamp is known now."""
        self._stamps[peer_id] = stamp
        self._forgotten.pop(peer_id, None)

    def forget(self, peer_id: str, now: float) -> None:
        """The record of a known peer was dropped. The oldest forgotten stamp makes room."""
        stamp = self._stamps.pop(peer_id)
        if len(self._forgotten) >= MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        self._forgotten[peer_id] = _Forgotten(stamp, now)

    def expire(self, now: float, after_s: float) -> None:
        """Stamps that were forgotten `after_s` seconds ago, or earlier, may come in again."""
        if self._forgotten:
            self._forgotten = {p: f for p, f in self._forgotten.items() if now - f.at < after_s}

    # -- comparison ------------------------------------------------------------------------

    def stamps(self) -> dict[str, Stamp]:
        """Peer id to stamp, of the known records: what gossip sends."""
        return dict(self._stamps)

    def newer_than(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """Peer ids of records that the owner of `stamps` lacks or has older, sorted."""
        get = stamps.get
        return sorted(p for p, stamp in self._stamps.items() if stamp > get(p, NO_STAMP))

    def wanted_from(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """Peer ids of which the owner of `stamps` has newer records, sorted."""
        get = self._stamps.get
        wanted = [p for p, stamp in stamps.items() if stamp > get(p, NO_STAMP)]
        forgotten = self._forgotten
        return sorted(p for p in wanted if p not in forgotten or stamps[p] > forgotten[p].stamp)


@dataclass(slots=True)
class _Sum:
    """Of one round, in slots; a slot that two feeders name counts twice."""

    launched: int = 0
    committed: int = 0


class RoundCounters:
    """Sums of the counters of rounds over all records of a view, live or not."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}
        self._counts: dict[int, dict[str, RoundCount]] = {}

    def add(self, record: Record) -> None:
        """A record became known. Of two counters for one round, the first holds."""
        for count in record.counts:
            self._put(record.peer_id, count)

    def remove(self, record: Record) -> None:
        """A record that was added is replaced or forgotten."""
        for count in record.counts:
            self._remove(record.peer_id, count)

    def replace(self, before: Record, after: Record) -> None:
        """A record that was added is replaced by a newer one of its peer, whose counters are mostly
        the same."""
        if not (_are_of_unlike_rounds(before) and _are_of_unlike_rounds(after)):
            self.remove(before)
            self.add(after)
            return
        for count in before.counts:
            if count not in after.counts:
                self._remove(before.peer_id, count)
        for count in after.counts:
            if count not in before.counts:
                self._put(after.peer_id, count)

    def committed(self, round_index: int) -> int:
        """Slots committed in a round, at most, by the word of all known peers."""
        sums = self._sums.get(round_index)
        return 0 if sums is None else sums.committed

    def launched_at_most(self, round_index: int) -> int:
        """Slots launched in a round, at most, those included that died with their feeder."""
        sums = self._sums.get(round_index)
        return 0 if sums is None else sums.launched

    def by_peer(self, round_index: int) -> list[tuple[str, RoundCount]]:
        """Peer ids with their counters of a round, live or not, sorted by peer id."""
        return sorted(self._counts.get(round_index, {}).items(), key=lambda item: item[0])

    def _put(self, peer_id: str, count: RoundCount) -> None:
        counts = self._counts.setdefault(count.round, {})
        if peer_id not in counts:
            self._add(count, 1)
            counts[peer_id] = count

    def _remove(self, peer_id: str, count: RoundCount) -> None:
        counts = self._counts.get(count.round, {})
        known = counts.pop(peer_id, None)
        if known is not None:
            self._add(known, -1)
        if not counts:
            self._counts.pop(count.round, None)

    def _add(self, count: RoundCount, sign: int) -> None:
        sums = self._sums.setdefault(count.round, _Sum())
        sums.launched += sign * len(count.launched)
        sums.committed += sign * (len(count.committed) + len(count.settled))
        if not (sums.launched or sums.committed):
            del self._sums[count.round]


def _are_of_unlike_rounds(record: Record) -> bool:
    """Each counter is of another round; a record may say otherwise."""
    return len({count.round for count in record.counts}) == len(record.counts)


class StageIndex:
    """Sorted peer ids, of each stage and of all."""

    def __init__(self) -> None:
        self._ids: dict[int, list[str]] = {ALL: []}

    def ids(self, stage: int) -> Sequence[str]:
        """The peers of a stage (`ALL`: of every one), sorted. The sequence changes with the
        index."""
        return self._ids.get(stage, ())

    def add(self, peer_id: str, stage: int) -> None:
        """A peer that was not in the index."""
        insort(self._ids[ALL], peer_id)
        insort(self._ids.setdefault(stage, []), peer_id)

    def remove(self, peer_id: str, stage: int) -> None:
        """A peer of this stage."""
        _discard(self._ids[ALL], peer_id)
        _discard(self._ids[stage], peer_id)

    def move(self, peer_id: str, source: int, target: int) -> None:
        """A peer of the stage `source` is in the stage `target` now."""
        _discard(self._ids[source], peer_id)
        insort(self._ids.setdefault(target, []), peer_id)


class AnswerCache:
    """Remembers answers about the peers of a stage, for each stage apart, until `drop` says that
    one of them has changed, or until they lapse with time."""

    def __init__(self, lapses_at: Callable[[int, float], float]) -> None:
        """`lapses_at(stage, now)`: the time up to which answers that are found now hold."""
        self._lapses_at = lapses_at
        self._answers: dict[int, dict[object, object]] = {}
        self._until: dict[int, float] = {}

    def get(self, stage: int, name: object, now: float, ask: Callable[[], T]) -> T:
        """`ask()`, or what it returned the last time for this stage and name."""
        answers = self._answers.get(stage)
        if answers is None or now > self._until[stage]:
            if now > self._until.get(stage, -math.inf):
                self._until[stage] = self._lapses_at(stage, now)
            answers = self._answers[stage] = {}
        try:
            return answers[name]  # type: ignore[return-value]
        except KeyError:
            pass
        answers[name] = found = ask()
        return found

    def drop(self, stage: int) -> None:
        """A peer of this stage has changed."""
        self._answers.pop(stage, None)
        self._answers.pop(ALL, None)

    def clear(self) -> None:
        """Everything may have changed, the times at which answers lapse included."""
        self._answers.clear()
        self._until.clear()


def _discard(ordered: list[str], peer_id: str) -> None:
    index = bisect_left(ordered, peer_id)
    if index < len(ordered) and ordered[index] == peer_id:
        del ordered[index]
