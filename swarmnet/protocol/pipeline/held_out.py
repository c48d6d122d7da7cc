"""Which feeder measures the loss on held-out data, and in which rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import HeldOut, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress


def is_due(round_index: int, *, every: int, rounds: int) -> bool:
    """Whether the loss is measured in a round of a run of so many: each `every` rounds (0: never),
    and with the parameters that the run ends with."""
    return round_index >= rounds or (every > 0 and round_index % every == 0)


def turn(peer_ids: Iterable[str], round_index: int) -> str | None:
    """Whose turn it is to measure a round, of some peers: another's in each, by a hash (rendezvous
    hashing), so that one that lies or is silent spoils its own rounds only."""

    def place(peer_id: str) -> bytes:
        return blake2b(f"{round_index}|{peer_id}".encode(), digest_size=8).digest()

    return min(peer_ids, key=place, default=None)


def measurer(
    view: View, round_index: int, *, num_stages: int, num_slots: int, now: float
) -> str | None:
    """Who measures it in a round: the feeder whose turn it is. None where that one has done so, or
    where a stage has no replica. What others say that they have measured changes nothing."""
    if not all(view.replicas(s, now) for s in range(num_stages)):
        return None
    feeders = assignment.measurers(view, now)
    if progress.is_launched(view, round_index, now, num_slots):
        # One that came when all slots were launched holds no round: it would end before the
        # measurement.
        counts = dict(view.counters.by_peer(round_index))
        feeders = [p for p in feeders if p in counts and counts[p].launched] or feeders
    first = turn(feeders, round_index)
    record = None if first is None else view.get(first)
    newest = None if record is None else record.held_out
    # A record names the newest one, which may be ahead of this.
    is_told = newest is not None and newest.round in (round_index, round_index + 1)
    return None if is_told else first


def told(records: Iterable[Record], measurers: Collection[str]) -> dict[int, HeldOut]:
    """By round, what was measured by whoever had the turn. `records`: all known ones, since whoever
    has measured may be gone. `measurers`: the peers that may measure now."""
    known = list(records)
    found: dict[int, HeldOut] = {}
    for record in known:
        measured = record.held_out
        if measured is None or not (record.has_data and record.measures):
            continue
        if record.peer_id not in measurers and not any(c.launched for c in record.counts):
            continue  # it has never fed, so that it has measured nothing
        r = measured.round
        asked = {*measurers, record.peer_id}
        launched = [p.peer_id for p in known if p.peer_id in asked and p.count(r).launched]
        is_turn = record.peer_id in (turn(asked, r), turn(launched, r))
        if is_turn and r <= record.round + 1:
            found[r] = measured
    return found


def is_held(view: View, round_index: int, *, rounds: int, num_slots: int, now: float) -> bool:
    """Whether a round waits for nothing but the measurement; after the last one nothing waits."""
    if round_index >= rounds:
        return False
    return progress.round_progress(view, round_index, now, num_slots).committed >= num_slots
