"""Which of two results of one round holds.

The two sides of a partition may both finish a round. When they hear of each other again, replicas
of one stage are in the same round with different parameters. The result with more samples behind
it holds, then that of the lower peer id. Every record is ranked by itself: the owner of the best
one never gives way, and whoever sees it goes over to it, so views that differ cannot send two
sides after each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record


def best(records: Iterable[Record]) -> Record | None:
    """The record whose parameters hold, of replicas of one stage in one round; those that leave
    count too."""
    known = [r for r in records if r.stage >= 0 and r.state in (ACTIVE, LEAVING) and r.digests]
    return min(known, key=lambda r: (-r.samples, r.peer_id), default=None)


def holding(records: Iterable[Record]) -> list[Record]:
    """Of replicas of one stage, those whose parameters hold in their round; the order
    stays."""
    by_round: dict[int, list[Record]] = {}
    for r in records:
        by_round.setdefault(r.round, []).append(r)
    kept: list[Record] = []
    for group in by_round.values():
        winner = best(group)
        kept += [r for r in group if winner is not None and r.digests == winner.digests]
    return kept


def winner_over(own: Record, others: Sequence[Record]) -> Record | None:
    """The replica to whose parameters `own` is to go over; None where its own hold, as far as is
    known. `others`: live replicas of the stage."""
    if not own.is_replica or not own.digests:
        return None
    same = [
        r
        for r in others
        if r.round == own.round and r.stage == own.stage and len(r.digests) == len(own.digests)
    ]
    winner = best([own, *same])
    return winner if winner is not None and winner.digests != own.digests else None
