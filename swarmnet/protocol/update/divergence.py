"""The choice between two results of one round.

The two sides of a partition may both finish a round. When they hear of each other again, replicas
of one stage are in the same round with different parameters. The result that more replicas share is
valid; of equal ones that with more samples, then that of the lower peer id. So what one peer says
of parameters of its own is worth nothing beside others that agree.

A side counts the replicas of the other one by what they have published of this very round, and its
own by what they published last, which may have been a round ago. So two sides whose news of each
other are incomplete keep what they have, and do not adopt each other's parameters in turn. And
parameters are adopted only from a side that was one with this one before, unless this peer is alone
on its own side.

The records that come in here are those of peers that count (`membership.view.View.replicas`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from swarmnet.protocol.membership.agreement import Agreement
from swarmnet.protocol.membership.records import ACTIVE, DIGEST_BYTES, JOINING, LEAVING, Record

MOST = 0.5
"""Of the replicas of a stage: as many are not the word of one, unless they are two."""


def best(records: Iterable[Record]) -> Record | None:
    """A record with the valid parameters, of replicas of one stage in one round; leaving ones count
    too."""
    known = [r for r in records if r.stage >= 0 and r.state in (ACTIVE, LEAVING) and r.digests]
    shared = Counter(r.digests for r in known)
    return min(known, key=lambda r: (-shared[r.digests], -r.samples, r.peer_id), default=None)


def reached(records: Iterable[Record]) -> int:
    """The newest round that replicas have begun: half of them are in it, in the one before, or
    beyond. A later one is only somebody's word. 0 where there is none."""
    rounds = sorted((r.round for r in records), reverse=True)
    if not rounds:
        return 0
    half = rounds[(len(rounds) - 1) // 2]
    return max(r for r in rounds if r <= half + 1)


def newest(records: Iterable[Record]) -> Record | None:
    """The record with the valid parameters of the newest round, of replicas of one stage: no other
    round of theirs goes on as it is."""
    known = list(records)
    last = reached(known)
    return best(r for r in known if r.round == last)


def holding(records: Iterable[Record]) -> list[Record]:
    """The replicas with the valid parameters of their round, of replicas of one stage; in the same
    order. None in a round that is only somebody's word."""
    known = list(records)
    last = reached(known)
    by_round: dict[int, list[Record]] = {}
    for r in known:
        if r.round <= last:
            by_round.setdefault(r.round, []).append(r)
    kept: list[Record] = []
    for group in by_round.values():
        winner = best(group)
        kept += [r for r in group if winner is not None and r.digests == winner.digests]
    return kept


def donors(
    members: Iterable[Record],
    own: str,
    num_shards: int,
    round_index: int | None = None,
    believed: Callable[[Sequence[Record]], Sequence[Record]] = lambda replicas: replicas,
) -> list[Record]:
    """Live replicas of a stage that have published digests, of one round or of any; where they
    differ in a round, those whose parameters hold. Leaving replicas only where no other is there.
    `own`: the peer id of who asks. `believed`: those among replicas of any round whose word it
    takes; the others may give the same. None are: all."""
    told = [
        r
        for r in members
        if r.peer_id != own and r.state != JOINING and len(r.digests) == num_shards * DIGEST_BYTES
    ]

    def there(replicas: Sequence[Record]) -> list[Record]:
        known = [r for r in replicas if round_index is None or r.round == round_index]
        return [r for r in known if r.state == ACTIVE] or known

    held = {(r.round, r.digests) for r in holding(there(believed(told) or told))}
    return [r for r in there(told) if (r.round, r.digests) in held]


def common(stages: Sequence[Sequence[Record]]) -> tuple[int, tuple[bytes, ...]] | None:
    """A round in which every stage has replicas, and the digests of each stage: those that most
    replicas of the stage share. The newest of the rounds in which most replicas of each stage are;
    where there is none, that in which most are. None where no round has all stages."""
    found: dict[int, tuple[float, tuple[bytes, ...]]] = {}
    by_round = [Counter((r.round, r.digests) for r in replicas) for replicas in stages]
    for last in set.intersection(*({r for r, _ in counts} for counts in by_round)):
        digests, parts = [], []
        for counts in by_round:
            num, name = max((n, name) for (r, name), n in counts.items() if r == last)
            digests.append(name)
            parts.append(num / counts.total())
        found[last] = min(parts), tuple(digests)
    if not found:
        return None
    last = max(found, key=lambda r: (min(found[r][0], MOST), r))
    return last, found[last][1]


def winner_over(own: Record, others: Sequence[Record], agreement: Agreement) -> Record | None:
    """The replica whose parameters `own` should adopt; None where its own are valid, as far as is
    known. `others`: live replicas of the stage, of any round."""
    if not own.is_replica or not own.digests:
        return None
    stage, round_index, digests = own.stage, own.round, own.digests
    same = [
        r
        for r in others
        if r.round == round_index
        and r.stage == stage
        and r.state in (ACTIVE, LEAVING)
        and len(r.digests) == len(digests)
    ]
    if all(r.digests == digests for r in same):
        return None
    same = [own, *same]
    agree, ids = agreement.agree, [r.peer_id for r in others]
    ours = [p for p in ids if agree(own.peer_id, p)]
    sides = {own.digests: [own.peer_id, *ours]}
    for one in same:
        if one.digests not in sides:
            sides[one.digests] = [p for p in ids if p not in ours and agree(one.peer_id, p)]
    if ours:
        same = [r for r in same if r is own or any(map(agreement.shares, sides[r.digests]))]
    winner = min(same, key=lambda r: (-len(sides[r.digests]), -r.samples, r.peer_id))
    return None if winner.digests == own.digests else winner
