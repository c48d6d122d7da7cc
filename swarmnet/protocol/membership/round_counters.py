"""Sums of the counters of rounds over all records of a view, live or not."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.protocol.membership.records import Record, RoundCount


@dataclass(slots=True)
class _Sum:
    """Of one round, in slots; a slot that two feeders name counts twice."""

    launched: int = 0
    committed: int = 0


class RoundCounters:
    """Kept up to date with every record, because they are asked for far more often than counters
    change."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}
        self._counts: dict[int, dict[str, RoundCount]] = {}

    def add(self, record: Record) -> None:
        """A record became known. Of two counters for one round, the first holds."""
        for count in record.counts:
            counts = self._counts.setdefault(count.round, {})
            if record.peer_id not in counts:
                self._add(count, 1)
                counts[record.peer_id] = count

    def remove(self, record: Record) -> None:
        """A record that was added is replaced or forgotten."""
        for count in record.counts:
            counts = self._counts.get(count.round, {})
            known = counts.pop(record.peer_id, None)
            if known is not None:
                self._add(known, -1)
            if not counts:
                self._counts.pop(count.round, None)

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

    def _add(self, count: RoundCount, sign: int) -> None:
        sums = self._sums.setdefault(count.round, _Sum())
        sums.launched += sign * len(count.launched)
        sums.committed += sign * (len(count.committed) + len(count.settled))
        if sums == _Sum():
            del self._sums[count.round]
