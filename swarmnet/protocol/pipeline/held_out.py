"""Which feeder measures the loss on held-out data, and in which rounds."""

from __future__ import annotations

from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress


def is_due(round_index: int, *, every: int, rounds: int) -> bool:
    """Whether the loss is measured in a round of a run of so many: each `every` rounds (0: never),
    and with the parameters that the run ends with."""
    return round_index >= rounds or (every > 0 and round_index % every == 0)


def measurer(
    view: View, round_index: int, *, num_stages: int, num_slots: int, now: float
) -> str | None:
    """Who measures it in a round: the first of the feeders. None where a peer that was first before
    has done so, or where a stage has no replica."""
    # A record names the newest one, which may be ahead of this.
    told = {p.held_out.round for p in view.live(now) if p.held_out is not None}
    if round_index in told or round_index + 1 in told:
        return None
    if not all(view.replicas(s, now) for s in range(num_stages)):
        return None
    feeders = assignment.measurers(view, now)
    if progress.is_launched(view, round_index, now, num_slots):
        # One that came when all slots were launched holds no round: it would end before the
        # measurement.
        counts = dict(view.counters.by_peer(round_index))
        feeders = [p for p in feeders if p in counts and counts[p].launched] or feeders
    return feeders[0] if feeders else None


def is_held(view: View, round_index: int, *, rounds: int, num_slots: int, now: float) -> bool:
    """Whether a round waits for nothing but the measurement; after the last one nothing waits."""
    if round_index >= rounds:
        return False
    return progress.round_progress(view, round_index, now, num_slots).committed >= num_slots
