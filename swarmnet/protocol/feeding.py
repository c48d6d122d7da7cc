"""How many microbatches a feeder keeps in the air."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

IN_FLIGHT_PER_REPLICA = 1.5
"""Microbatches in the air for each replica of a small swarm."""
IN_FLIGHT_OF_MANY = 9.0
"""The same in a large one. Many feeders, who do not know of each other's microbatches, send them to
a replica at random times: more must wait for none to be idle."""
FASTEST = 10.0
"""A feeder counts as at most so many times as fast as the usual one."""


def part_of_feeder(own_rate: float, rates: Sequence[float]) -> float:
    """This feeder's part of what all feeders have in the air, by its announced rate among `rates`
    of all of them (samples/s, 0 while unknown): it serves stage 0 to its own microbatches. Equal
    parts where nothing is known of it or of the others; nobody's word makes the others stop."""
    known = [rate for rate in rates if rate > 0]
    if own_rate <= 0 or not known:
        return 1.0 / max(1, len(rates))
    usual = median(known)
    most = FASTEST * usual
    return min(own_rate, most) / sum(min(rate or usual, most) for rate in rates)


def window(num_replicas: int, part: float, *, is_small: bool) -> int:
    """Microbatches that a feeder keeps in the air, with this part of a swarm of so many replicas,
    of all stages; at least one."""
    each = IN_FLIGHT_PER_REPLICA if is_small else IN_FLIGHT_OF_MANY
    return int(each * num_replicas * part) + 1


def room_at_home(most: int, num_waiting: int, *, queued_bytes: int, sent_bytes: int) -> int:
    """Microbatches that a feeder which works on its own data may launch now: none while more than
    `most` of them, `sent_bytes` each, wait for its uplink, and never more than `most` before its
    device, where `num_waiting` pieces of work are."""
    if queued_bytes > most * sent_bytes:
        return 0
    return max(0, most - num_waiting)
