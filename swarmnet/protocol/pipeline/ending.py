"""When a run ends that its owner stops."""

from __future__ import annotations

import math
from collections.abc import Collection

from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.timing import ANSWER_S, BULK_S

MARGIN_ROUNDS = 2
"""After the present one, at least: who hears of the order late has rounds to do until then."""
MAX_MARGIN_ROUNDS = 10_000


def stop_round(replicas: Collection[Record], rounds: int) -> int:
    """The round that a run of so many is to end with, by the records of its replicas: all have
    heard of the order when it begins, and so save it."""
    newest = max((r.round for r in replicas), default=0)
    lengths = [r.last_open_s + r.last_exchange_s for r in replicas if r.last_open_s]
    usual_s = min(lengths, default=ANSWER_S)
    margin = math.ceil(ANSWER_S / usual_s)
    return min(rounds, newest + max(MARGIN_ROUNDS, min(margin, MAX_MARGIN_ROUNDS)))


def is_over(replicas: Collection[Record], round_index: int) -> bool:
    """All replicas that are left have come to a round."""
    return all(r.round >= round_index for r in replicas)


def state_of(replicas: Collection[Record]) -> tuple[int, int]:
    """What changes as long as a run goes on: its newest round, and how much counts."""
    counted = sum(len(count.committed) for r in replicas for count in r.counts)
    return max((r.round for r in replicas), default=0), counted


def may_stand_still_s(replicas: Collection[Record]) -> float:
    """For so long, before nobody waits for its last round any more."""
    return BULK_S + max((r.last_open_s for r in replicas), default=0.0)
