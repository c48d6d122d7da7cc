"""How many microbatches a feeder keeps in flight."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

IN_FLIGHT_PER_REPLICA = 2.5
"""Microbatches in flight for each replica of a small swarm: one that it works on, one on its way,
and what evens out that they come at random times."""
FIRST_IN_FLIGHT = 1.5
"""The same in any swarm, in the beginning."""
IN_FLIGHT_OF_MANY = 4.5
"""The same in a large one, where replicas are asked when they could begin. What is on its way to a
replica that said that it is free takes seconds on a home link: something must wait there then."""
IN_FLIGHT_UNASKED = 9.0
"""The same where nobody asks. Many feeders, who do not know of each other's microbatches, send them
to a replica at random times: more must wait for none to be idle."""
MOST_OF_A_ROUND = 0.55
"""In the air in a large swarm, of a round's microbatches. As great a part of the time in which a
round is fed its last ones are on their way home; then its exchange begins, which must be over when
the next round is fed, or all wait for it."""
FASTEST = 10.0
"""A feeder counts as at most so many times as fast as the usual one."""


def part_of_feeder(own_rate: float, rates: Sequence[float]) -> float:
    """This feeder's part of what all feeders have in flight, by its announced rate among `rates`
    of all of them (samples/s, 0 while unknown): it serves stage 0 to its own microbatches. Equal
    parts where nothing is known of it or of the others; nobody's word makes the others stop."""
    known = [rate for rate in rates if rate > 0]
    if own_rate <= 0 or not known:
        return 1.0 / max(1, len(rates))
    usual = median(known)
    most = FASTEST * usual
    return min(own_rate, most) / sum(min(rate or usual, most) for rate in rates)


def window(
    num_replicas: int, part: float, num_microbatches: int, *, is_small: bool, asks: bool
) -> int:
    """Microbatches that a feeder keeps in flight, with this part of a swarm of so many replicas,
    of all stages, and of rounds of so many microbatches; at least one. `asks`: callers ask replicas
    when they could begin."""
    if is_small:
        return int(IN_FLIGHT_PER_REPLICA * num_replicas * part) + 1
    each = IN_FLIGHT_OF_MANY if asks else IN_FLIGHT_UNASKED
    most = min(each * num_replicas, MOST_OF_A_ROUND * num_microbatches)
    return int(most * part) + 1


def slow_start(window: int, num_replicas: int, part: float, num_completed: int) -> int:
    """Of a `window`, as much as a feeder may use of whose microbatches `num_completed` are
    completed by now: few at first, and one more for each of these. Else, as a forward pass is a
    third of the work, everything that is launched at once would soon stand before the last stage,
    and the others would have nothing to do until it has come back; and who does not yet know of the
    other feeders would launch their parts of the first round as well."""
    return min(window, int(FIRST_IN_FLIGHT * num_replicas * part) + 1 + num_completed)


def send_window_room(most: int, num_waiting: int, *, queued_bytes: int, sent_bytes: int) -> int:
    """Microbatches that a feeder which works on its own data may launch now: none while more than
    `most` of them, `sent_bytes` each, wait for its uplink, and never more than `most` before its
    device, where `num_waiting` pieces of work are."""
    if queued_bytes > most * sent_bytes:
        return 0
    return max(0, most - num_waiting)
