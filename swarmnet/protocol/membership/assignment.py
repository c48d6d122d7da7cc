"""Which layers make a stage, who serves which stage, and who feeds."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Protocol

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.membership.seats import machine_of, stages_beside
from swarmnet.protocol.membership.view import View

MANY = 8
"""Replicas of a stage from which on no single one makes much of a difference."""
WORTH = 0.5
"""Part of what a replica could add to its new stage that it must add there."""
LONG_PASSAGE_S = 120.0
"""Who moves takes nothing new until its last microbatch has come back: where that takes longer than
this, it costs as much as many moves bring."""
DEFAULT_DEVICE_SPEED = 1.0
"""Cost units a second, of a device that nobody has measured while no other is known either."""


def split_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cuts layers into contiguous, non-empty stages so that the dearest stage is as cheap as can
    be; among such cuts, the most even one (least sum of squares).

    Dynamic programming in O(stages x layers^2). Raises `ValueError` where there are fewer layers
    than stages."""
    num_layers = len(costs)
    if num_stages < 1 or num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot be cut into {num_stages} stages")
    if any(not 0 <= c < float("inf") for c in costs):
        raise ValueError("the cost of a layer must be finite and not negative")
    sums = list(accumulate(costs, initial=0.0))

    def cost(first: int, end: int) -> float:
        return sums[end] - sums[first]

    bottleneck = [cost(0, end) for end in range(num_layers + 1)]
    for k in range(2, num_stages + 1):
        bottleneck = [float("inf")] * k + [
            min(max(bottleneck[cut], cost(cut, end)) for cut in range(k - 1, end))
            for end in range(k, num_layers + 1)
        ]
    limit = bottleneck[num_layers] * (1 + 1e-9)
    return _most_even(sums, num_stages, limit)


def _most_even(sums: list[float], num_stages: int, limit: float) -> list[range]:
    """The cut with the least sum of squares among those with no stage above `limit`."""
    num_layers = len(sums) - 1
    infinity = float("inf")
    best: list[list[tuple[float, int]]] = [[(infinity, 0)] * (num_layers + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, num_stages + 1):
        row = [(infinity, 0)] * (num_layers + 1)
        for end in range(k, num_layers + 1):
            row[end] = min(
                (best[k - 1][cut][0] + (sums[end] - sums[cut]) ** 2, cut)
                if sums[end] - sums[cut] <= limit
                else (infinity, cut)
                for cut in range(k - 1, end)
            )
        best.append(row)
    stages, end = [], num_layers
    for k in range(num_stages, 0, -1):
        cut = best[k][end][1]
        stages.append(range(cut, end))
        end = cut
    return stages[::-1]


def choose_stage(
    view: View,
    num_stages: int,
    now: float,
    rng: random.Random,
    *,
    costs: Sequence[float] | None = None,
    allowed: Sequence[int] | None = None,
) -> int:
    """The stage that a newcomer should serve: one without a replica first, else the one with the
    least throughput. Those already on their way to a stage count; who is to move there and serves
    another one yet does not (it takes a while, and stays where a newcomer came first). Those that
    leave do not count, the own record neither, and stages that the same machine serves already
    come last. Ties are broken by `rng`, so that newcomers who know as little as each other spread;
    a machine that serves neighbouring stages spares itself the link between them. `costs`: of each
    stage, in any unit; equal when not given. `allowed`: the stages to choose from, at least one;
    all when not given."""
    candidates = range(num_stages) if allowed is None else allowed
    staff = Staff(
        view, num_stages, now, without=view.own_peer_id, costs=costs, only_who_leaves=True
    )
    beside = stages_beside(view, view.own_peer_id, num_stages, now)
    stages = [k for k in candidates if k not in beside] or list(candidates)
    empty = [k for k in stages if not staff.members[k]]
    if empty:
        return rng.choice(_next_to(beside, empty))
    rates = staff.rates()
    least = min(rates[k] for k in stages)
    return rng.choice(_next_to(beside, [k for k in stages if rates[k] <= least]))


def settle(
    view: View,
    num_stages: int,
    now: float,
    chosen: int,
    before: Collection[str],
    *,
    costs: Sequence[float] | None = None,
    allowed: Sequence[int] | None = None,
) -> int:
    """The stage to which a newcomer goes that chose one a moment ago, when others may have chosen
    as well: the same one, or another. `before`: who was on the way to some stage, or there, when it
    chose.

    Everybody who came since is placed in the order of ids: in the stage of its choice, unless that
    has somebody and another has nobody, or it has more by then than the poorest by more than half
    of what the newcomer adds; else in the poorest. Peers with equal views find the same places
    for all of them."""
    staff = Staff(view, num_stages, now, costs=costs, only_who_leaves=True)
    own = view.own_peer_id
    rates = [0.0] * num_stages
    newcomers: list[tuple[str, int, float]] = []
    for k, records in enumerate(staff.members):
        for r in records:
            if r.peer_id == own or (r.state == JOINING and r.peer_id not in before):
                newcomers.append((r.peer_id, k, staff.rate(r, k)))
            else:
                rates[k] += staff.rate(r, k)
    beside = stages_beside(view, own, num_stages, now)
    mine = range(num_stages) if allowed is None else allowed
    mine = [k for k in mine if k not in beside] or mine
    for peer_id, stage, rate in sorted(newcomers):
        stages = mine if peer_id == own else range(num_stages)
        poorest = min(stages, key=lambda k: (rates[k], k))
        has_nobody = not rates[poorest] and rates[stage] > 0
        is_rich = rates[stage] - rates[poorest] > rate / 2
        place = poorest if has_nobody or is_rich else stage
        if peer_id == own:
            return place
        rates[place] += rate * staff.costs[stage] / staff.costs[place]
    return chosen


def _next_to(beside: frozenset[int], stages: list[int]) -> list[int]:
    """Those of the stages that neighbour one of `beside`; all where none does."""
    return [k for k in stages if k - 1 in beside or k + 1 in beside] or stages


def feeders(view: View, now: float) -> Sequence[str]:
    """Peer ids of those that start microbatches, sorted: the active replicas of stage 0 that have
    data. Where none of them has data, one active peer that has it, with the lowest id."""
    first = view.remembered(
        0, "feeders", now, lambda: [r.peer_id for r in view.replicas(0, now) if r.has_data]
    )
    if first:
        return first
    others = [r.peer_id for r in view.live(now) if r.has_data and r.state == ACTIVE]
    return others[:1]


@dataclass(frozen=True, slots=True)
class Move:
    """One replica should change its stage."""

    peer_id: str
    source: int
    target: int
    gain: float
    """By how much the poorer of the two stages becomes faster: 0.5 is one and a half times as fast;
    infinite when `target` had no throughput at all, or where that does not matter."""


def propose_move(
    view: View,
    num_stages: int,
    now: float,
    *,
    margin: float,
    costs: Sequence[float] | None = None,
    without: Collection[str] = (),
) -> Move | None:
    """The best move of one active replica to the poorest stage, or None. `without`: who is not to
    be named.

    A move is worth it when the poorer of its two stages is afterwards faster than the poorest
    stage is now by the fraction `margin`; or, between stages of `MANY` replicas, where no single
    one makes that much of a difference, by `WORTH` of what it could add at most: then the stage
    that it leaves stays the richer one by enough that it does not pay to come back. (Comparing
    those two rather than the whole swarm lets two equally poor stages be helped one after the
    other; every move raises the sorted list of throughputs, so that moves come to an end.) The
    source keeps an active replica, always.

    Hysteresis: `margin`, and `MoveGate`. Whose speed nobody knows yet moves only to a stage that
    has nobody. Only records decide, so peers with equal views name the same candidate."""
    staff = Staff(view, num_stages, now, costs=costs)
    rates, costs = staff.rates(), staff.costs
    target = min(range(num_stages), key=lambda k: (rates[k], k))
    there = {machine_of(r.peer_id) for r in staff.members[target]}
    best, best_after = None, rates[target]
    for source in range(num_stages):
        active = [r for r in staff.members[source] if r.state == ACTIVE and not r.is_moving]
        if source == target or len(active) < 2:
            continue
        for record in active:
            if record.peer_id in without or (staff.members[target] and not record.samples_per_s):
                continue
            if machine_of(record.peer_id) in there:
                continue
            rate = staff.rate(record, source)
            after = min(rates[source] - rate, rates[target] + rate * costs[source] / costs[target])
            gain = after / rates[target] - 1 if rates[target] > 0 else float("inf")
            most = rate * costs[source] / costs[target] / rates[target] if rates[target] else 0.0
            is_large = min(len(staff.members[source]), len(staff.members[target])) >= MANY
            needed = min(margin, WORTH * most) if is_large else margin
            if gain >= needed and after > best_after:
                best, best_after = Move(record.peer_id, source, target, gain), after
    return best


def pays(move: Move, passage_s: float, *, margin: float) -> bool:
    """Whether its peer should make a move where microbatches take `passage_s` to come back to it.
    What makes less of a difference than `margin` does not pay where that is long: newcomers mend
    it sooner."""
    return move.gain >= margin or passage_s <= LONG_PASSAGE_S


def is_worth_it(
    view: View,
    num_stages: int,
    now: float,
    move: Move,
    *,
    costs: Sequence[float] | None = None,
) -> bool:
    """Whether a move that was decided a while ago still makes the poorer of its stages faster. It
    is in the records already: its peer says where it goes."""
    staff = Staff(view, num_stages, now, costs=costs)
    rates = staff.rates()
    source, target = rates[move.source], rates[move.target]
    members = staff.members[move.target]
    adds = sum(staff.rate(r, move.target) for r in members if r.peer_id == move.peer_id)
    return min(source, target) > target - adds


class Assigner(Protocol):
    """Who serves which stage. The swarm's own way is `Adaptive`; the simulator compares others."""

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
        """The same a moment later, when others may have come too."""

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
        """The move that is due, whosever it is."""

    def confirm(
        self,
        view: View,
        num_stages: int,
        now: float,
        move: Move,
        *,
        costs: Sequence[float] | None = None,
    ) -> bool:
        """Whether a move that was decided a while ago is to be made now."""


class Adaptive:
    """`choose_stage`, `settle`, `propose_move` and `is_worth_it`."""

    choose = staticmethod(choose_stage)
    settle = staticmethod(settle)
    propose = staticmethod(propose_move)
    confirm = staticmethod(is_worth_it)


class MoveGate:
    """Hysteresis in time: lets a peer move only when the same move of its own was proposed
    `times` times running, and not within `cooldown_s` of its last one."""

    def __init__(self, own_peer_id: str, *, times: int = 2, cooldown_s: float = 60.0) -> None:
        self._own_peer_id = own_peer_id
        self._times = times
        self._cooldown_s = cooldown_s
        self._last: tuple[int, int] | None = None
        self._count = 0
        self._moved_at = float("-inf")

    def decide(self, move: Move | None, now: float) -> bool:
        """To be told every proposal; True when the peer should move now."""
        if move is None or move.peer_id != self._own_peer_id:
            self._last, self._count = None, 0
            return False
        path = (move.source, move.target)
        self._count = self._count + 1 if path == self._last else 1
        self._last = path
        if self._count < self._times or now - self._moved_at < self._cooldown_s:
            return False
        self._last, self._count, self._moved_at = None, 0, now
        return True


class PassedOver:
    """Who was named look after look and did not go: bound to its stage by its owner, too small for
    the other one, resting, or stuck. The next best is named then. For a stage that has nobody that
    is soon found, else the best one has time."""

    def __init__(self, own_peer_id: str, *, times: int = 3, patient_times: int = 10) -> None:
        """`times`: looks, for a stage that has nobody; `patient_times`: else."""
        self.peers: set[str] = set()
        self._own_peer_id = own_peer_id
        self._times = times
        self._patient_times = patient_times
        self._last: tuple[str, int, int] | None = None
        self._count = 0

    def heard(self, move: Move | None) -> None:
        """To be told every proposal, which was made without `peers`."""
        if move is None:  # nothing is due, or nobody is left
            self.peers.clear()
            self._last, self._count = None, 0
            return
        path = (move.peer_id, move.source, move.target)
        self._count = self._count + 1 if path == self._last else 1
        self._last = path
        needed = self._times if move.gain == float("inf") else self._patient_times
        if self._count >= needed and move.peer_id != self._own_peer_id:
            self.peers.add(move.peer_id)


def _checked_costs(costs: Sequence[float] | None, num_stages: int) -> Sequence[float]:
    if costs is None:
        return [1.0] * num_stages
    if len(costs) != num_stages or any(not 0 < c < float("inf") for c in costs):
        raise ValueError("one positive cost a stage is needed")
    return costs


class Staff:
    """Per stage, who serves it or is on the way to it, and what they can do of it. Who is about to
    move is counted where it goes, with the rate that it will have there: from the decision on, or
    when it is `LEAVING`."""

    def __init__(
        self,
        view: View,
        num_stages: int,
        now: float,
        *,
        without: str | None = None,
        costs: Sequence[float] | None = None,
        only_who_leaves: bool = False,
    ) -> None:
        def is_going(r: Record) -> bool:
            return r.is_moving and (r.state == LEAVING or not only_who_leaves)

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
        """Samples a second of one of its replicas; as usual where nobody knows."""
        return record.samples_per_s or self._usual_speed / self.costs[stage]

    def rates(self) -> list[float]:
        """Of each stage."""
        return [sum(self.rate(r, k) for r in rs) for k, rs in enumerate(self.members)]
