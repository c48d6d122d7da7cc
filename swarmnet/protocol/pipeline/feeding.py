"""How many microbatches a feeder keeps in flight, and when it rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from swarmnet.protocol.backoff import LONGEST_PAUSE_S
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.planning.flow import IN_FLIGHT_PER_REPLICA

FIRST_IN_FLIGHT = 1.5
"""The same in any swarm, at the beginning."""
IN_FLIGHT_OF_MANY = 4.5
"""The same in a large swarm, where replicas are asked when they could begin. A microbatch takes
seconds on a home link to a replica that said that it is free: others must wait there meanwhile."""
IN_FLIGHT_UNASKED = 9.0
"""The same where replicas are not asked. Many feeders, which do not know each other's microbatches,
send them to a replica at random times: more must wait there, so that no replica is idle."""
MOST_OF_A_ROUND = 0.55
"""Part of a round's microbatches that is in flight in a large swarm. For the same part of the time
in which a round is fed, its last microbatches are returning. Then the exchange begins, which must
end before the next round is fed; otherwise all peers wait for it."""
FASTEST = 10.0
"""A feeder's rate counts up to this multiple of the median rate."""
SLOWER = 0.9
"""Part of the median rate below which a feeder is slower than others, however those vary."""
MAX_REFUSED = 8
"""Microbatches that stage 0 refuses one after the other before a feeder takes its data for unusable
and rests."""
REST_S = LONGEST_PAUSE_S


def part_of_feeder(own_rate: float, rates: Sequence[float]) -> float:
    """This feeder's part of all microbatches in flight, by its announced rate among the `rates` of
    all feeders (samples/s, 0 while unknown), because it serves stage 0 to its own microbatches. The
    parts are equal where its own rate or all others are unknown. No announcement can make the other
    feeders stop."""
    known = [rate for rate in rates if rate > 0]
    if own_rate <= 0 or not known:
        return 1.0 / max(1, len(rates))
    usual = median(known)
    most = FASTEST * usual
    return min(own_rate, most) / sum(min(rate or usual, most) for rate in rates)


def window(
    num_replicas: int, part: float, num_microbatches: int, *, is_small: bool, asks: bool
) -> int:
    """Microbatches that a feeder with this `part` keeps in flight; at least one. `num_replicas`: of
    all stages; `num_microbatches`: of a round; `asks`: callers ask replicas when they could
    begin."""
    if is_small:
        return int(IN_FLIGHT_PER_REPLICA * num_replicas * part) + 1
    each = IN_FLIGHT_OF_MANY if asks else IN_FLIGHT_UNASKED
    most = min(each * num_replicas, MOST_OF_A_ROUND * num_microbatches)
    return int(most * part) + 1


def slow_start(window: int, num_replicas: int, part: float, num_completed: int) -> int:
    """The part of a `window` that a feeder may use when `num_completed` of its microbatches are
    completed: few at first, and one more for each completed one. A forward pass is a third of the
    work. If everything were launched at once, it would soon queue before the last stage, and the
    other stages would be idle until it has returned. Also, a feeder that does not know the other
    feeders yet would launch their parts of the first round as well."""
    return min(window, int(FIRST_IN_FLIGHT * num_replicas * part) + 1 + num_completed)


def send_window_room(most: int, num_waiting: int, *, queued_bytes: int, sent_bytes: int) -> int:
    """Microbatches that a feeder which works on its own data may launch now: none while more than
    `most` of them, `sent_bytes` bytes each, wait for its uplink, and at most as many as keep `most`
    pieces of work waiting for its device, where `num_waiting` are now."""
    if queued_bytes > most * sent_bytes:
        return 0
    return max(0, most - num_waiting)


def does_own(own_rate: float, rates: Sequence[float], *, wait_s: float, upload_s: float) -> bool:
    """Whether the own replica of stage 0 is to do what this feeder of a small swarm launches now.
    All have equal parts of a round there. A slower one would do its part itself while the others
    are idle, so it keeps what it can begin sooner than the arrays get to another (`wait_s`,
    `upload_s`), and the rest goes to whoever does it soonest. One that is as fast as others does
    its own: the way to them would be for nothing. Rates as of `part_of_feeder`."""
    known = [rate for rate in rates if rate > 0]
    if wait_s <= upload_s or own_rate <= 0 or not known:
        return True
    return own_rate >= SLOWER * median(known)


@dataclass(slots=True)
class Rest:
    """When a feeder takes its data for unusable, and tries it again."""

    num_refused: int = 0
    """Its newest microbatches that were refused, one after the other."""
    _end: Deadline | None = None

    def accepted(self) -> None:
        """A microbatch was not refused."""
        self.num_refused = 0

    def refused(self, now: float, *, feeds: bool) -> bool:
        """A microbatch was: whether a rest begins. `feeds`: none has begun already."""
        self.num_refused += 1
        if self.num_refused < MAX_REFUSED or not feeds:
            return False
        self._end = Deadline.after(now, REST_S)
        return True

    def ends(self, now: float) -> bool:
        """Whether a rest is over, which is said once."""
        if self._end is None or not self._end.is_over(now):
            return False
        self.num_refused, self._end = 0, None
        return True
