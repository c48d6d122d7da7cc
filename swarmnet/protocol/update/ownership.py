"""Ownership of shards: who is responsible for one, as the records of the stage's replicas say.

`placement` orders the replicas of a stage for each shard by their weights. Here is what records add
to that: who holds the optimizer state of a shard, who is the first primary of its update, who makes
the step with it, and when state that lacks or that is spare may be given up. What is called round
here is the number of an exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from swarmnet.protocol.membership.records import Record, bitmap
from swarmnet.protocol.sync_modes import LEAST_QUORUM, LOCAL, SyncPlan, least_quorum, least_to_lead
from swarmnet.protocol.timing import PATIENCE_S
from swarmnet.protocol.update import robust
from swarmnet.protocol.update.placement import Placement, weights_from
from swarmnet.protocol.update.roster import Roster, first_ballot

CUT_WEIGHT = 1e-6
"""By this the weight of an owner shrinks for each replica of its stage that it cannot call, and
that of a root for each replica."""
OUT_OF_REACH_S = PATIENCE_S
"""So long, a replica that lacks a shard's state waits for a holder that is cut off from it: as a
rule, a relay joins them earlier (tests/swarm/membership/test_relaying.py)."""

RecordOf = Callable[[str], Record | None]
"""The newest record of a peer; None where it is not known."""


def fit(
    candidates: Sequence[Record], cuts: Mapping[str, int], flops_per_byte: float = 0.0
) -> dict[str, float]:
    """Weights of possible owners (`weights_from`). Those who are cut from others (`num_cuts`) come
    behind those who are not, with whom everybody can exchange gradients."""
    weights = weights_from(candidates, flops_per_byte)
    return {p: w * CUT_WEIGHT ** cuts.get(p, 0) for p, w in weights.items()}


def without_slow(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights of possible owners, those with far slower uplinks behind the others."""
    least = least_to_lead(weights.values())
    return {p: w if w >= least else w * CUT_WEIGHT for p, w in weights.items()}


def quorum(plan: SyncPlan, exchange: int, rule: str, members: Sequence[Record]) -> int:
    """`Roster.quorum` of an exchange of the whole stage. All are waited for in a warm-up, which has
    one every round, in the last, after which there is none, and in one before that by less than
    half of the usual rounds: what is late would not come in time, or be far larger than what others
    have. And where somebody's uplink is unknown: one that is slow might lead, and would be late
    itself with what it has taken. A robust rule needs as many as can have a majority, where there
    are so many."""
    steps = plan.steps_until_due(exchange)
    if plan.mode != LOCAL or steps < 2 or exchange + steps // 2 >= plan.rounds - 1:
        return 0
    if any(r.upload_bytes_per_s <= 0 for r in members):
        return 0
    return least_quorum(majority(rule), len(members))


def majority(rule: str) -> int:
    """Contributions that a rule of aggregation needs to find a wrong one among them."""
    return LEAST_QUORUM if rule == robust.MEAN else robust.MIN_CONTRIBUTORS


def holders(
    order: Iterable[str],
    record_of: RecordOf,
    plan: SyncPlan,
    round_index: int,
    shard: int,
    *,
    own: str,
    has_state: bool,
) -> tuple[str, ...]:
    """Those of `order` that hold the state of a shard at the beginning of a round; who took it over
    since comes last. `has_state`: of the own replica, which knows better than its record."""
    oldest = round_index - 1
    found, fresh = list[str](), list[str]()
    for peer_id in order:
        record = record_of(peer_id)
        if record is None or not record.holds_shard(shard):
            continue
        is_there = has_state if peer_id == own else plan.parameter_version(record.round) >= oldest
        if is_there:
            (fresh if record.is_fresh(shard) else found).append(peer_id)
    return (*found, *fresh)


def followers(
    placement: Placement, order: Iterable[str], record_of: RecordOf, shard: int
) -> tuple[str, ...]:
    """Those who make the step of a shard with its primary: its owners; and as long as some of them
    have not said that they hold it, the next in order that do, so that there are always
    `Placement.replication` that hold it."""

    def holds(peer_id: str) -> bool:
        record = record_of(peer_id)
        return record is not None and record.holds_shard(shard)

    owners = placement.owners(shard)
    if all(map(holds, owners)):
        return owners
    there = list(filter(holds, order))[: placement.replication]
    return tuple(dict.fromkeys([*owners, *there]))


def first_roster(
    order: Sequence[str],
    known: Sequence[str],
    backups: tuple[str, ...],
    *,
    own: str,
    is_holder: bool,
    may_lead: bool,
    clips: bool,
    quorum: int = 0,
) -> Roster:
    """The roles in the update of a shard, as an exchange begins. The primary is the first of those
    that hold the state (`known`, of `order`); where none does, the first of all, which then starts
    afresh."""
    known = held(order, known, own=own, is_holder=is_holder)
    first = known[0] if known else (order[0] if order else "")
    return Roster(
        first_ballot(first, is_holder=bool(known)),
        tuple(dict.fromkeys((*known, *order))),
        tuple(known),
        backups,
        is_holder=is_holder,
        may_lead=may_lead,
        clips=clips,
        quorum=quorum,
    )


def held(order: Sequence[str], known: Sequence[str], *, own: str, is_holder: bool) -> Sequence[str]:
    """Those of `order` that hold the state: `known`, or this replica where nobody has said so
    yet."""
    return (own,) if not known and is_holder and own in order else known


def without(roster: Roster, is_barred: Callable[[str], bool]) -> Roster:
    """A roster in which who is barred comes last, and makes no step with others. So it is primary
    only where there is no other that holds the state."""
    if not any(map(is_barred, roster.order)):
        return roster
    backups = tuple(p for p in roster.backups if not is_barred(p))
    return replace(_with_last(roster, is_barred), backups=backups)


def passing_over(roster: Roster, is_last: Callable[[str], bool]) -> Roster:
    """A roster in which these lead nothing, and do what they do else. Where they alone hold the
    state it begins anew, as after their deaths: else every exchange would wait for them."""
    if all(map(is_last, roster.order)):
        return roster
    found = _with_last(roster, is_last)
    if not is_last(found.ballot.primary):
        return found
    return replace(found, ballot=first_ballot(found.order[0], is_holder=False), holders=())


def _with_last(roster: Roster, is_last: Callable[[str], bool]) -> Roster:
    if not any(map(is_last, roster.order)):
        return roster
    order, known = (tuple(sorted(p, key=is_last)) for p in (roster.order, roster.holders))
    first = known[0] if known else order[0]
    ballot = first_ballot(first, is_holder=bool(known))
    return replace(roster, ballot=ballot, order=order, holders=known)


def is_settled(record: Record, owned: list[int], num_shards: int) -> bool:
    """A replica holds what it owns and nothing else, and has since its round began: as far as is
    known, it will say the same when the next one begins."""
    return not any(record.fresh) and record.holds == bitmap(owned, num_shards)


def may_be_elsewhere(
    lost: Iterable[Record], plan: SyncPlan, round_index: int, shard: int, waited_s: float
) -> bool:
    """The optimizer state of a shard need not be lost, though nobody that can be called has it. A
    holder out of reach, of whom there is news, takes part in the run; as long as that one is in the
    same exchange it may be cut off as much as this replica, and is waited for `OUT_OF_REACH_S`.
    `lost`: members of the stage that cannot be called."""
    return any(
        plan.parameter_version(m.round) > round_index or waited_s < OUT_OF_REACH_S
        for m in lost
        if m.holds_shard(shard)
    )


def have_begun(
    peer_ids: Iterable[str], record_of: RecordOf, plan: SyncPlan, round_index: int
) -> bool:
    """True where what these hold is known of a round's beginning, and not of the one before: who
    held a shard then need not have made the step since."""
    records = map(record_of, peer_ids)
    return all(r is not None and plan.parameter_version(r.round) >= round_index for r in records)


def is_spare(
    shard: int, owners: Sequence[str], record_of: RecordOf, plan: SyncPlan, round_index: int
) -> bool:
    """The owners of a shard all have what a replica has of it that owns it no more."""
    records = map(record_of, owners)
    return (
        bool(owners)
        and have_begun(owners, record_of, plan, round_index)
        and all(r is not None and r.holds_shard(shard) for r in records)
    )
