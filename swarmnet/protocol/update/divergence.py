"""The choice between two results of one round.

The two sides of a partition may both finish a round. When they hear of each other again, replicas
of one stage are in the same round with different parameters. The result with more samples is valid;
of equal ones, that of the lower peer id. Every record is ranked by itself: the owner of the best
one keeps its parameters, and every peer that sees it adopts them. So two sides with different views
cannot adopt each other's parameters in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarmnet.protocol.membership.records import ACTIVE, DIGEST_BYTES, JOINING, LEAVING, Record


def best(records: Iterable[Record]) -> Record | None:
    """The record with the valid parameters, of replicas of one stage in one round; leaving ones
    count too."""
    known = [r for r in records if r.stage >= 0 and r.state in (ACTIVE, LEAVING) and r.digests]
    return min(known, key=lambda r: (-r.samples, r.peer_id), default=None)


def newest(records: Iterable[Record]) -> Record | None:
    """The record with the valid parameters of the newest round, of replicas of one stage: no other
    round of theirs goes on as it is."""
    known = list(records)
    last = max((r.round for r in known), default=0)
    return best(r for r in known if r.round == last)


def holding(records: Iterable[Record]) -> list[Record]:
    """The replicas with the valid parameters of their round, of replicas of one stage; in the same
    order."""
    by_round: dict[int, list[Record]] = {}
    for r in records:
        by_round.setdefault(r.round, []).append(r)
    kept: list[Record] = []
    for group in by_round.values():
        winner = best(group)
        kept += [r for r in group if winner is not None and r.digests == winner.digests]
    return kept


def donors(
    members: Iterable[Record], own: str, num_shards: int, round_index: int | None = None
) -> list[Record]:
    """Live replicas of a stage that have published digests, of one round or of any; where they
    differ in a round, those whose parameters hold. Leaving replicas only where no other is there.
    `own`: the peer id of who asks."""
    known = [
        r
        for r in members
        if r.peer_id != own
        and r.state != JOINING
        and len(r.digests) == num_shards * DIGEST_BYTES
        and (round_index is None or r.round == round_index)
    ]
    staying = [r for r in known if r.state == ACTIVE]
    return holding(staying or known)


def winner_over(own: Record, others: Sequence[Record]) -> Record | None:
    """The replica whose parameters `own` should adopt; None where its own are valid, as far as is
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
