"""The assignment of peers to stages, and of feeders."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Protocol

from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.membership.seats import stages_beside
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.planning.flow import flow_of
from swarmnet.protocol.timing import UPKEEP_S

MANY = 8
"""With this many replicas in a stage, no single one makes much of a difference."""
WORTH = 0.5
"""A moving replica must add at least this part of what it could add to its new stage."""
LONG_PASSAGE_S = UPKEEP_S
"""A moving replica accepts no new microbatches until its last one has returned. Where that takes
longer than the time between two looks, it costs as much as many moves gain."""
DEFAULT_DEVICE_SPEED = 1.0
"""Cost units a second of an unmeasured device, while no device has been measured."""


def choose_stage(
    view: View,
    num_stages: int,
    now: float,
    rng: random.Random,
    *,
    costs: Sequence[float] | None = None,
    allowed: Sequence[int] | None = None,
    copies: int = 1,
) -> int:
    """The stage that a newcomer should serve: the one with the fewest replicas while one has fewer
    than `copies`, else the one with the least throughput.

    `copies`: the replication factor of the run. A stage with fewer replicas can lose its state with
    fewer deaths than the run survives, so that comes before speed (docs/decisions/0013).

    Peers that are joining a stage count as its replicas. A replica that is to move there and still
    serves another stage does not: the move takes a while, and is dropped where a newcomer comes
    first. Leaving peers and the own record do not count. Stages that the same machine serves
    already come last. `rng` breaks ties, so that newcomers with the same knowledge spread out; a
    stage next to one that the machine serves comes first, because it saves the link between them.
    `costs`: of each stage, in any unit; equal when not given. `allowed`: the stages to choose from,
    at least one; all when not given."""
    candidates = range(num_stages) if allowed is None else allowed
    staff = Staff(view, num_stages, now, without=view.own_peer_id, costs=costs, only_leaving=True)
    beside = stages_beside(view, view.own_peer_id, num_stages, now)
    stages = [k for k in candidates if k not in beside] or list(candidates)
    held = [min(len(members), copies) for members in staff.members]
    fewest = min(held[k] for k in stages)
    thin = [k for k in stages if held[k] == fewest]
    if not fewest:
        return rng.choice(_next_to(beside, thin))
    rates = staff.rates()
    least = min(rates[k] for k in thin)
    return rng.choice(_next_to(beside, [k for k in thin if rates[k] <= least]))


def settle(
    view: View,
    num_stages: int,
    now: float,
    chosen: int,
    before: Collection[str],
    *,
    costs: Sequence[float] | None = None,
    allowed: Sequence[int] | None = None,
    copies: int = 1,
) -> int:
    """The final stage of a newcomer that chose one a moment ago, when others may have chosen as
    well: the same one, or another. `before`: peers that were joining or serving a stage when it
    chose. `copies`: as for `choose_stage`.

    All newcomers since then are placed in the order of their ids. A newcomer is placed in the stage
    of its choice, with two exceptions: another one has fewer replicas, and fewer than `copies`, or
    the throughput of its choice exceeds that of the poorest stage by more than half of what the
    newcomer adds. Then it is placed there. Peers with equal views compute the same places."""
    staff = Staff(view, num_stages, now, costs=costs, only_leaving=True)
    own = view.own_peer_id
    rates, held = [0.0] * num_stages, [0] * num_stages
    newcomers: list[tuple[str, int, float]] = []
    for k, records in enumerate(staff.members):
        for r in records:
            if r.peer_id == own or (r.state == JOINING and r.peer_id not in before):
                newcomers.append((r.peer_id, k, staff.rate(r, k)))
            else:
                rates[k] += staff.rate(r, k)
                held[k] = min(held[k] + 1, copies)
    beside = stages_beside(view, own, num_stages, now)
    mine = range(num_stages) if allowed is None else allowed
    mine = [k for k in mine if k not in beside] or mine
    for peer_id, stage, rate in sorted(newcomers):
        stages = mine if peer_id == own else range(num_stages)
        poorest = min(stages, key=lambda k: (held[k], rates[k], k))
        is_thin = held[poorest] < held[stage]
        is_rich = rates[stage] - rates[poorest] > rate / 2
        place = poorest if is_thin or is_rich else stage
        if peer_id == own:
            return place
        rates[place] += rate * staff.costs[stage] / staff.costs[place]
        held[place] = min(held[place] + 1, copies)
    return chosen


def _next_to(beside: frozenset[int], stages: list[int]) -> list[int]:
    """The stages that are next to one of `beside`; all where none is."""
    return [k for k in stages if k - 1 in beside or k + 1 in beside] or stages


def feeders(view: View, now: float) -> Sequence[str]:
    """Sorted peer ids of the feeders, which launch microbatches: the active replicas of stage 0
    that have data. Where none of them has data, the active peer with data that has the lowest
    id."""
    first = view.remembered(
        0, "feeders", now, lambda: [r.peer_id for r in view.replicas(0, now) if r.has_data]
    )
    if first:
        return first
    others = [r.peer_id for r in view.live(now) if r.has_data and r.state == ACTIVE]
    return others[:1]


def measurers(view: View, now: float) -> Sequence[str]:
    """Those of the feeders, in the same order, that have held-out data to measure losses on."""
    records = [view.get(peer_id) for peer_id in feeders(view, now)]
    return [record.peer_id for record in records if record is not None and record.measures]


def measurers_among(live: Iterable[Record]) -> Sequence[str]:
    """`measurers`, for an onlooker that has the records of those that live, and no view."""
    with_data = sorted(
        (r for r in live if r.has_data and r.state == ACTIVE), key=lambda r: r.peer_id
    )
    first = [r for r in with_data if r.stage == 0] or with_data[:1]
    return [r.peer_id for r in first if r.measures]


@dataclass(frozen=True, slots=True)
class Move:
    """One replica should change its stage."""

    peer_id: str
    source: int
    target: int
    gain: float
    """Relative speed-up of the poorer of the two stages: 0.5 is one and a half times as fast;
    infinite when `target` had too few replicas, or where that does not matter."""


def propose_move(
    view: View,
    num_stages: int,
    now: float,
    *,
    margin: float,
    costs: Sequence[float] | None = None,
    without: Collection[str] = (),
    copies: int = 1,
) -> Move | None:
    """The best move of one active replica, or None. `without`: peers that must not be named.

    Copies come first, as for `choose_stage`: a stage with fewer than `copies` replicas gets one
    from a stage that has more left then, whatever that does to throughput, and no move leaves a
    stage with fewer than that for the sake of throughput.

    Else the poorest stage gets one. Such a move is worth it when the poorer of its two stages is
    afterwards faster than the poorest stage is now by the fraction `margin`. Between stages of
    `MANY` replicas no single replica makes that much of a difference; there the speed-up must be
    `WORTH` of what it could add at most. Then the stage that it leaves stays the richer one by
    enough that moving back does not pay. (Comparing those two stages rather than the whole swarm
    lets two equally poor stages be helped one after the other. Every move raises the sorted list of
    copies, or leaves it and raises the sorted list of throughputs, so moves come to an end.) The
    source always keeps an active replica.

    Hysteresis: `margin`, and `MoveGate`. A replica of unknown speed moves only to a stage with too
    few replicas. The decision uses nothing but records, so peers with equal views name the same
    candidate."""
    staff = Staff(view, num_stages, now, costs=costs)
    rates, sizes = staff.rates(), [len(members) for members in staff.members]
    thinnest = min(range(num_stages), key=lambda k: (min(sizes[k], copies), k))
    if sizes[thinnest] < copies:
        sources = [k for k in range(num_stages) if sizes[k] - 1 > sizes[thinnest]]
        found = list(_moves(staff, sources, thinnest, without))
        if found:
            best_after = max(after for after, _, _ in found)
            # Of those that are about as good always the same one, however rates waver. (The stage
            # goes by its number alone for the same reason.)
            near = [(r.peer_id, k) for after, r, k in found if after * (1 + margin) >= best_after]
            peer_id, source = min(near)
            return Move(peer_id, source, thinnest, float("inf"))
    target = min(range(num_stages), key=lambda k: (rates[k], k))
    sources = [k for k in range(num_stages) if not _thins(sizes[k], sizes[target], copies)]
    best: Move | None = None
    best_after = rates[target]
    for after, record, source in _moves(staff, sources, target, without):
        if not record.samples_per_s or not rates[target]:
            continue
        gain = after / rates[target] - 1
        most = staff.rate_at(record, source, target) / rates[target]
        is_large = min(sizes[source], sizes[target]) >= MANY
        needed = min(margin, WORTH * most) if is_large else margin
        if gain >= needed and after > best_after:
            best, best_after = Move(record.peer_id, source, target, gain), after
    return best


def _moves(
    staff: Staff, sources: Collection[int], target: int, without: Collection[str]
) -> Iterator[tuple[float, Record, int]]:
    """The moves that are possible: the throughput of the poorer of the two stages afterwards, who
    moves, and from where."""
    rates = staff.rates()
    there = {machine_of(r.peer_id) for r in staff.members[target]}
    for source in sources:
        active = [r for r in staff.members[source] if r.state == ACTIVE and not r.is_moving]
        if source == target or len(active) < 2:
            continue
        for record in active:
            if record.peer_id not in without and machine_of(record.peer_id) not in there:
                left = rates[source] - staff.rate(record, source)
                grown = rates[target] + staff.rate_at(record, source, target)
                yield min(left, grown), record, source


def _thins(source: int, target: int, copies: int) -> bool:
    """Whether one replica's move between stages of so many leaves fewer copies."""
    before = sorted((min(source, copies), min(target, copies)))
    return sorted((min(source - 1, copies), min(target + 1, copies))) < before


def pays(move: Move, passage_s: float, *, margin: float) -> bool:
    """Whether a peer should make a move, where microbatches take `passage_s` seconds to return to
    it. A gain below `margin` does not pay where that is long: newcomers close the gap sooner."""
    return move.gain >= margin or passage_s <= LONG_PASSAGE_S


def is_worth_it(
    view: View,
    num_stages: int,
    now: float,
    move: Move,
    *,
    costs: Sequence[float] | None = None,
    copies: int = 1,
) -> bool:
    """Whether a move that was decided a while ago still adds a copy that is missing, or makes the
    poorer of its stages faster. The records contain the move already: the peer publishes its
    target."""
    source, target = move.source, move.target
    staff = Staff(view, num_stages, now, costs=costs)
    others = [r for r in staff.members[target] if r.peer_id != move.peer_id]
    # Of two that decided in one moment, the one with the lower id goes.
    later = [r for r in others if r.stage == source and r.state == ACTIVE]
    later = [r for r in later if r.peer_id > move.peer_id]
    others = [r for r in others if r not in later]
    if machine_of(move.peer_id) in {machine_of(r.peer_id) for r in others}:
        return False
    left, there = len(staff.members[source]) + len(later), len(others)
    if there < copies and there < left:
        return True
    if _thins(left + 1, there, copies):
        return False
    rates = staff.rates()
    stays = rates[source] + sum(staff.rate_at(r, target, source) for r in later)
    grown = rates[target] - sum(staff.rate(r, target) for r in later)
    return min(stays, grown) > sum(staff.rate(r, target) for r in others)


class Assigner(Protocol):
    """Assigns peers to stages. The swarm uses `Adaptive`; the simulator compares others."""

    def choose(
        self,
        view: View,
        num_stages: int,
        now: float,
        rng: random.Random,
        *,
        costs: Sequence[float] | None = None,
        allowed: Sequence[int] | None = None,
    ) -> int:
        """The stage of a newcomer."""

    def settle(
        self,
        view: View,
        num_stages: int,
        now: float,
        chosen: int,
        before: Collection[str],
        *,
        costs: Sequence[float] | None = None,
        allowed: Sequence[int] | None = None,
    ) -> int:
        """The final stage of a newcomer a moment later, when others may have joined too."""

    def propose(
        self,
        view: View,
        num_stages: int,
        now: float,
        *,
        margin: float,
        costs: Sequence[float] | None = None,
        without: Collection[str] = (),
    ) -> Move | None:
        """The move that is due, of any peer."""

    def confirm(
        self,
        view: View,
        num_stages: int,
        now: float,
        move: Move,
        *,
        costs: Sequence[float] | None = None,
    ) -> bool:
        """Whether to make a move now that was decided a while ago."""


class Adaptive:
    """`choose_stage`, `settle`, `propose_move` and `is_worth_it`."""

    def __init__(self, copies: int = 1) -> None:
        self.choose = partial(choose_stage, copies=copies)
        self.settle = partial(settle, copies=copies)
        self.propose = partial(propose_move, copies=copies)
        self.confirm = partial(is_worth_it, copies=copies)


class MoveGate:
    """Hysteresis in time: a peer may move only when the same move of its own was proposed `times`
    times in a row, and not within `cooldown_s` seconds of its last move."""

    def __init__(self, own_peer_id: str, *, times: int, cooldown_s: float) -> None:
        self._own_peer_id = own_peer_id
        self._times = times
        self._cooldown_s = cooldown_s
        self._last: tuple[int, int] | None = None
        self._count = 0
        self._moved_at = float("-inf")

    def decide(self, move: Move | None, now: float) -> bool:
        """Takes in every proposal; returns True when the peer should move now."""
        if move is None or move.peer_id != self._own_peer_id:
            self._last = None
            self._count = 0
            return False
        path = (move.source, move.target)
        self._count = self._count + 1 if path == self._last else 1
        self._last = path
        if self._count < self._times or now - self._moved_at < self._cooldown_s:
            return False
        self._last = None
        self._count = 0
        self._moved_at = now
        return True


class PassedOver:
    """Peers that were named at look after look and did not move: bound to their stage by their
    owner, too small for the other one, in their cooldown, or stuck. The next best peer is named
    then. For a stage without replicas this takes few looks; otherwise the best peer has time."""

    def __init__(self, own_peer_id: str, *, times: int = 3, patient_times: int = 10) -> None:
        """`times`: looks, for a stage without replicas; `patient_times`: for any other stage."""
        self.peers: set[str] = set()
        self._own_peer_id = own_peer_id
        self._times = times
        self._patient_times = patient_times
        self._last: tuple[str, int, int] | None = None
        self._count = 0

    def heard(self, move: Move | None, *, is_uncovered: bool) -> None:
        """Takes in every proposal, which was made without `peers`. `is_uncovered`: it goes to a
        stage without replicas."""
        if move is None:  # no move is due, or no peer is left
            self.peers.clear()
            self._last = None
            self._count = 0
            return
        path = (move.peer_id, move.source, move.target)
        self._count = self._count + 1 if path == self._last else 1
        self._last = path
        needed = self._times if is_uncovered else self._patient_times
        if self._count >= needed and move.peer_id != self._own_peer_id:
            self.peers.add(move.peer_id)


def _checked_costs(costs: Sequence[float] | None, num_stages: int) -> Sequence[float]:
    if costs is None:
        return [1.0] * num_stages
    if len(costs) != num_stages or any(not 0 < c < float("inf") for c in costs):
        raise ValueError("one positive cost a stage is needed")
    return costs


class Staff:
    """The replicas of each stage, joining ones included, and their throughput. A replica that is
    about to move is counted at its target, with its future rate there: from the decision on, or
    (`only_leaving`) from when it is `LEAVING`."""

    def __init__(
        self,
        view: View,
        num_stages: int,
        now: float,
        *,
        without: str | None = None,
        costs: Sequence[float] | None = None,
        only_leaving: bool = False,
    ) -> None:
        def is_going(r: Record) -> bool:
            return r.is_moving and (r.state == LEAVING or not only_leaving)

        self.costs = _checked_costs(costs, num_stages)
        here = [
            [r for r in view.members(k, now) if r.peer_id != without] for k in range(num_stages)
        ]
        self.members = [[r for r in rs if r.state != LEAVING and not is_going(r)] for rs in here]
        """By stage."""
        for k, records in enumerate(here):
            for r in records:
                if is_going(r) and r.moving_to < num_stages:
                    rate = r.samples_per_s * self.costs[k] / self.costs[r.moving_to]
                    self.members[r.moving_to].append(replace(r, samples_per_s=rate))
        known = [r.samples_per_s * self.costs[k] for k, rs in enumerate(self.members) for r in rs]
        self._usual_speed = median([x for x in known if x > 0] or [DEFAULT_DEVICE_SPEED])
        """Cost units a second."""

    def rate(self, record: Record, stage: int) -> float:
        """Samples a second of one replica of a stage; the usual rate where its own is unknown."""
        return record.samples_per_s or self._usual_speed / self.costs[stage]

    def rate_at(self, record: Record, stage: int, target: int) -> float:
        """Samples a second that a replica of a stage would do of another one."""
        return self.rate(record, stage) * self.costs[stage] / self.costs[target]

    def rates(self) -> list[float]:
        """Samples a second of each stage."""
        return [flow_of(self.rate(r, k) for r in rs) for k, rs in enumerate(self.members)]
