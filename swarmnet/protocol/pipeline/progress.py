"""Rounds without a coordinator: when an update is due, and which feeder launches the rest.

Each feeder publishes in its record which slots of a round it has launched and committed, and
whether it has sealed the round (nothing of its own in flight and nothing more to launch). The
unions over a view are the progress of the round, whatever the order in which records come. When a
feeder dies, the slots that it had launched and not committed count as never launched; a feeder
that had sealed then unseals and launches them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.membership.assignment import feeders
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record, RoundCount
from swarmnet.protocol.membership.view import ALL, View
from swarmnet.protocol.pipeline.contests import Committed, Held
from swarmnet.protocol.slots import all_slots, share_of, slots_in


class Shown(Enum):
    """What a call of a microbatch shows of the round that is open here."""

    NOTHING = auto()
    LAUNCHED = auto()
    """All of it is launched."""
    OVER = auto()


def shown_by_call(
    view: View, caller: str, asked: int, round_index: int, now: float, *, overlaps: bool
) -> Shown:
    """What another replica asks for tells how far it is: it works on the next round when this one
    is over, or, where rounds may be opened ahead (`overlaps`), when all of this one is launched.
    `asked`: the round of the microbatch; `round_index`: the one that is open here. That a round is
    over one alone does not show (`View.shown_round`); the view is told of each."""
    record = view.get(caller)
    ahead = asked - round_index
    if ahead not in (1, 2) or record is None or not record.is_replica:
        return Shown.NOTHING
    if record.round < round_index:  # it is not that far itself, by its own record
        return Shown.NOTHING
    view.called(caller, asked - overlaps)
    if ahead == 1 and overlaps:
        return Shown.LAUNCHED
    is_over = view.is_past(round_index, now) and (ahead == 1 or overlaps)
    return Shown.OVER if is_over else Shown.NOTHING


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The progress of a round, as one view sees it."""

    round: int
    launched: int
    """Slots, without those that died with their feeder."""
    committed: int
    """Slots."""
    num_flights: int
    """Microbatches behind `tokens`: a slot that two feeders committed has two."""
    missing: int
    """Slots that nobody has launched, a mask (`slots.slots_in`)."""
    given_up: int
    """Of these, once all else is launched, those of feeders that nobody waits for."""
    tokens: int
    """Of the committed slots."""
    loss_sum: float
    """Nats, over these tokens."""
    num_feeders: int
    """Live feeders now."""
    drained: bool
    """Every slot is committed and none is in flight: the update is due."""


def round_progress(view: View, round_index: int, now: float, num_slots: int) -> RoundProgress:
    """The unions of a round over a view.

    Slots that a peer committed before it restarted are gone from its record. Whoever launches them
    again finds them counted where they were (`RoundCount.settled`)."""
    return view.remembered(
        ALL,
        ("progress", round_index, num_slots),
        now,
        lambda: _united(view, round_index, now, num_slots),
    )


def is_drained(view: View, round_index: int, now: float, num_slots: int) -> bool:
    """`RoundProgress.drained`; quick in the usual case that far too little is committed."""
    if view.counters.committed(round_index) < num_slots:
        return False
    return round_progress(view, round_index, now, num_slots).drained


def is_launched(view: View, round_index: int, now: float, num_slots: int) -> bool:
    """True when every slot has been launched; as quick as `is_drained`."""
    if view.counters.launched_at_most(round_index) < num_slots:
        return False
    return not round_progress(view, round_index, now, num_slots).missing


def _counts(view: View, round_index: int, now: float) -> list[tuple[str, RoundCount]]:
    """By peer id, of those that take part in the run."""
    told = view.counters.by_peer(round_index)
    return [(peer_id, count) for peer_id, count in told if view.takes_part(peer_id, now)]


def _united(view: View, round_index: int, now: float, num_slots: int) -> RoundProgress:
    committed = num_flights = tokens = 0
    loss_sum = 0.0
    claims: list[tuple[str, int, bool]] = []
    for peer_id, count in _counts(view, round_index, now):
        committed |= count.committed.mask | count.settled.mask
        num_flights += len(count.committed)
        tokens += count.tokens
        loss_sum += count.loss_sum
        record = view.get(peer_id)
        if count.launched and record is not None and view.is_live(peer_id, now):
            sealed = count.sealed or record.round > round_index
            claims.append((peer_id, count.launched.mask, sealed))
    whole = all_slots(num_slots)
    committed &= whole
    launched, all_sealed = _claimed(claims)
    launched = (launched | committed) & whole
    given_up = 0
    if launched == whole and not view.awaits_all:
        launched, all_sealed = _claimed([c for c in claims if view.awaits(c[0])])
        launched = (launched | committed) & whole
        given_up = whole & ~launched
    return RoundProgress(
        round=round_index,
        launched=launched.bit_count(),
        committed=committed.bit_count(),
        num_flights=num_flights,
        missing=whole & ~launched,
        given_up=given_up,
        tokens=tokens,
        loss_sum=loss_sum,
        num_feeders=len(feeders(view, now)),
        drained=committed == whole and all_sealed,
    )


def _claimed(claims: Sequence[tuple[str, int, bool]]) -> tuple[int, bool]:
    """The slots that feeders have launched, a mask, and whether all of them have sealed."""
    launched, all_sealed = 0, True
    for _, mask, sealed in claims:
        launched |= mask
        all_sealed = all_sealed and sealed
    return launched, all_sealed


def held(view: View, round_index: int, now: float, num_slots: int, stages: Iterable[int]) -> Held:
    """What the end of a round waits for, beside this peer: where every slot has been launched, the
    live feeders that have one in flight; where every slot is committed too, those that have not
    sealed. Where this peer is among them, or more than half of the feeders that count, or one of
    the `stages` has no replica, nobody alone holds the end up."""
    return view.remembered(
        ALL,
        ("held", round_index, num_slots),
        now,
        lambda: _held(view, round_index, now, num_slots, stages),
    )


def _held(view: View, round_index: int, now: float, num_slots: int, stages: Iterable[int]) -> Held:
    counts = _counts(view, round_index, now)
    is_known = view.reputation.counts
    committed = by_known = 0
    for peer_id, count in counts:
        done = count.committed.mask | count.settled.mask
        committed |= done
        by_known |= done if is_known(peer_id) else 0
    whole = all_slots(num_slots)
    num_committed = (by_known & whole).bit_count()
    state = round_progress(view, round_index, now, num_slots)
    if state.missing or state.drained:
        return Held(num_committed)
    is_whole = not whole & ~committed
    found = [
        peer_id
        for peer_id, count in counts
        if (record := view.get(peer_id)) is not None
        and view.is_live(peer_id, now)
        and (
            count.launched and not count.sealed and record.round <= round_index
            if is_whole
            else count.launched.mask & ~committed & whole
        )
    ]
    own = view.own_peer_id
    if own in found or any(not view.replicas(stage, now) for stage in stages):
        return Held(num_committed)
    known = frozenset(p for p in found if is_known(p))
    if not known:
        return Held(num_committed, by_unknown=bool(found))
    num_known = sum(map(is_known, feeders(view, now)))
    return Held(num_committed, known if 2 * len(known) <= num_known else frozenset())


def committed_by(view: View, round_index: int, now: float) -> tuple[Committed, Committed]:
    """What feeders have committed in a round: those that count, and those that do not yet."""
    found = {True: Committed(), False: Committed()}
    for peer_id, count in _counts(view, round_index, now):
        is_known = view.reputation.counts(peer_id)
        slots, tokens = found[is_known].num_slots, found[is_known].num_tokens
        found[is_known] = Committed(slots + len(count.committed), tokens + count.tokens)
    return found[True], found[False]


def is_committed_elsewhere(
    view: View, round_index: int, slot: int, own_peer_id: str, now: float
) -> bool:
    """Whether another feeder has committed a slot, as far as is known here."""
    return any(
        slot in count.committed
        for peer_id, count in _counts(view, round_index, now)
        if peer_id != own_peer_id
    )


def doubled(view: View, round_index: int, now: float) -> dict[int, list[str]]:
    """Slots that several feeders committed, over different replicas: they are in the update as
    often. By slot, the feeders' ids, ascending."""
    once = twice = 0
    counts = _counts(view, round_index, now)
    for _, count in counts:
        twice |= once & count.committed.mask
        once |= count.committed.mask
    return {slot: [p for p, c in counts if slot in c.committed] for slot in slots_in(twice)}


FEW_FEEDERS = 8
"""More than this number of feeders do not learn of each other's launches at once."""


def late_slots(
    missing: int, num_launched: Sequence[int], num_slots: int, age_s: float, spread_s: float
) -> list[int]:
    """Missing slots that many feeders launch in place of those whose share they are in, the latest
    first: those that their own feeders do not come to within the time that news take.

    `missing`: a mask, as known here, which is how it was `spread_s` seconds ago; `num_launched`: by
    rank of the feeders, of the round, which has lasted `age_s` seconds. A feeder goes through its
    share in order, as fast as it has so far."""
    found = []
    for rank, launched in enumerate(num_launched):
        share = share_of(rank, len(num_launched), num_slots)
        if not share:
            continue
        own = slots_in(missing & all_slots(len(share)) << share[0])
        each_s = age_s / launched if launched else math.inf
        found += [(n * each_s, slot) for n, slot in enumerate(own, 1) if n * each_s > spread_s]
    return [slot for _, slot in sorted(found, reverse=True)]


def turn_of(age_s: float, spread_s: float) -> int:
    """Feeders that help others take turns, each of the time that news take to spread: the number of
    the present one, in a round that has lasted `age_s` seconds."""
    return int(age_s / max(spread_s, FIRST_PAUSE_S))


def helping_slot(late: Sequence[int], rank: int, num_feeders: int, turn: int) -> int | None:
    """Which of the late slots the feeder of this rank launches; None for none. Feeders that know
    the same launch different ones, and where there are fewer slots than feeders these take
    turns (`turn_of`)."""
    place = (rank + turn) % num_feeders
    if len(late) >= num_feeders:
        return late[place * len(late) // num_feeders]
    return late[place] if place < len(late) else None


def stuck_slot(
    missing: int, rank: int, num_feeders: int, quiet_s: float, spread_s: float
) -> int | None:
    """Where no launch has become known for longer than news take to spread (`quiet_s`, since that
    or the own last launch), the feeders that have the rest in their share do not launch it: as many
    feeders as slots are missing launch one each, the next ones after another such time."""
    if spread_s <= 0 or quiet_s <= spread_s:
        return None
    rest = slots_in(missing)
    place = (rank + int(quiet_s / spread_s)) % num_feeders
    return rest[place] if place < len(rest) else None


def newest_round(view: View, now: float, stage: int | None = None) -> int:
    """The newest round that live, serving peers have begun, as far as they show it together
    (`View.shown_round`); of `stage`, where given, whatever one of them says. 0 when there are
    none."""
    if stage is not None:
        return _newest(view.members(stage, now))
    return view.shown_round(now) or _newest(view.counted(now))


def _newest(records: Sequence[Record]) -> int:
    return max((r.round for r in records if r.state in (ACTIVE, LEAVING)), default=0)
