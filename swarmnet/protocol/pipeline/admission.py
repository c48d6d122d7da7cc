"""Whether a replica takes one more microbatch, how long it would wait there, and when callers ask
for that before they send it (`admit`). The places that are kept are `reservations`."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnet.protocol.moments import Deadline, Since
from swarmnet.protocol.timing import PATIENCE_S

# ---- at the caller ------------------------------------------------------------------------------

ASK_S = 0.2
"""Replicas are asked first when they could begin where sending the arrays takes longer than
this (tests/swarm/pipeline/test_room.py)..."""
ASK_WORK_S = 1.0
"""...or the work for it does, at a usual one of them. Both protect callers from sending work to a
replica that is full (tests/swarm/pipeline/test_room.py)..."""
CROWDED_S = PATIENCE_S
"""...and for so long at a stage that has turned away a call which did not ask, where its wait would
have been longer than `ASK_S` too. So long after a replica has said that it has no room, its stage
is not suspected either."""


def shares_work(upload_s: float, work_s: float | None) -> bool:
    """Whether any free replica does the first work for a peer's own data, as well as its own does:
    the way there is nothing beside the work. `work_s`: None while unknown."""
    return work_s is not None and work_s > ASK_WORK_S and upload_s <= ASK_S


@dataclass(slots=True)
class FullStages:
    """What one caller knows of stages whose replicas have no room."""

    _crowded: dict[int, Deadline] = field(default_factory=dict)
    """By stage, until when its queues count as long."""
    _full: dict[int, Since] = field(default_factory=dict)
    """By stage, when a replica said last that it had no room."""

    def asks(self, stage: int, upload_s: float, work_s: float | None, now: float) -> bool:
        """Whether several replicas are asked first. It pays where the arrays' way or the work
        (`work_s`, None while unknown) takes far longer than asking: callers that guess send bursts
        to some and nothing to others, and none finds out that it is full only when the activation
        has gone up the link for nothing. So it does where queues are long: callers that have asked
        fill them."""
        if work_s is not None and work_s > ASK_WORK_S:
            return True
        crowded = self._crowded.get(stage)
        return upload_s > ASK_S or (crowded is not None and not crowded.is_over(now))

    def is_full(self, stage: int, now: float) -> bool:
        """Replicas of a stage live, and have no room: they will."""
        full = self._full.get(stage)
        return full is not None and not full.is_older(now, CROWDED_S)

    def has_no_room(self, stage: int, now: float) -> None:
        """A replica that was asked says so."""
        self._full[stage] = Since(now)

    def turned_away(self, stage: int, backlog_s: float, now: float) -> None:
        """A replica of a stage had no room for a call that came without asking."""
        self._full[stage] = Since(now)
        if backlog_s >= ASK_S:
            self._crowded[stage] = Deadline.after(now, CROWDED_S)


# ---- at the replica -----------------------------------------------------------------------------

IN_HAND_PART = 0.03
"""How much the work for the microbatches that are inside a replica weighs against that which waits
before its device. It protects slow replicas from work that fast ones would have done sooner
(tests/simulation/test_scheduling.py)."""
LEAST_IN_HAND = 0.1
"""Counted for a replica that has none, so that of two idle ones the faster one is chosen."""


def queue_room(most: int, most_announced: int, most_s: float, piece_s: float) -> int:
    """Pieces of work that may wait before a device where callers have asked: up to
    `most_announced`, as long as they keep it busy for no more than `most_s`; `most` in any case,
    and where it does not know yet how long a piece takes (`piece_s` 0), for then it must not be
    trusted with many."""
    if piece_s <= 0:
        return most
    return max(most, min(most_announced, int(most_s / piece_s)))


def most_inside(most_open: int, most_in_flight: int, *, is_coming: bool) -> int:
    """Microbatches inside a replica at a time, by the bounds of peer and stage. Those of a coming
    round get half: the present one always has room to come to its end."""
    most = min(most_open, most_in_flight)
    return max(1, most // 2) if is_coming else most


def wait_s(
    *, device_s: float, link_s: float, each_s: float, num_inside: int, is_last: bool
) -> float:
    """Seconds until work on one more microbatch would begin at a replica, behind what waits for the
    device or for the uplink, whichever takes longer; and a part of the work for all that it has in
    flight, for that comes back.

    Not until it would be *done*: then slow devices would stand idle beside short queues of fast
    ones, and twice as many microbatches would have to be in flight to keep all of them at work.
    Only of a round's last ones (`is_last`), when the next one has work for all devices, nothing
    counts but when they are completed. `each_s`: for one microbatch."""
    if is_last:
        return max(device_s, link_s) + each_s
    # Of two that could begin at once, the faster one.
    in_hand = max(num_inside, LEAST_IN_HAND)
    return max(device_s, link_s) + IN_HAND_PART * in_hand * each_s
