"""The best plan: into how many stages, cut where, on which machine.

To choose both the cut and the machines of its stages is hard (DT-FM, Yuan et al. 2022, arXiv
2206.01288). Here dynamic programming over cuts gives beginnings (as Alpa, Zheng et al. 2022, arXiv
2201.12023, over layers and devices in a fixed order), and small changes improve them: the objective
is tokens a second of the whole round, which has the exchange, the bubble and the links in it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, permutations

from swarmnet.protocol.planning.cost import Costs, Round, StageCost
from swarmnet.protocol.planning.cuts import split_layers
from swarmnet.protocol.planning.model import Cut, Machine

MAX_STAGES = 64
"""That are tried where the number is open."""
IN_ORDER = 32
"""With no more machines than so many, cuts are made for machines in an order; of more, each stage
has several, whose sums can be made even for any cut."""
LOOKS = 300_000
"""Machines looked at while beginnings are improved, one after the other."""
LOOKS_TOGETHER = 4
"""That a stage of a plan is worth where machines share links, and all stages are looked at."""
STEPS = 10
"""Halvings in the search for the best flow."""
FEW, FINELY = 10_000, 2
"""Cuts are made in all ways for any number of stages of which stages x layers^2 is no more; else
for so many numbers of stages, the best ones."""
SPACING = 3
"""Of the numbers of stages that are tried for many machines."""
FEW_HOUSES = 3
"""Of no more, all orders along the stages are tried."""
COPIES = 2
"""Of a stage: with as many it outlives any one machine."""
WHOLE_PART = 4
"""Of the looks, so small a part is for plans that use all machines."""
OUT = -1
"""In place of a stage: the machine is left out, since a round would last longer with it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A cut, and the stage of each machine."""

    cut: Cut
    serves: tuple[int, ...]
    """The stage of each machine, in their order; `OUT` of one that is left out."""
    round: Round

    def replicas(self, stage: int) -> list[int]:
        """Indices of its machines."""
        return [i for i, s in enumerate(self.serves) if s == stage]


def best_plan(
    costs: Costs,
    machines: Sequence[Machine],
    *,
    num_stages: int | None = None,
    cut: Cut | None = None,
) -> Plan | None:
    """The plan with the most tokens a second that respects the memory of every machine; None where
    none is found. `num_stages`, `cut`: given ones."""
    begun = _all_begun(costs, machines, num_stages, cut)
    found = _improved(begun, machines, LOOKS, may_cut=cut is None)
    return max(found, key=lambda s: s.worth).plan() if found else None


def plans_of(
    costs: Costs,
    machines: Sequence[Machine],
    *,
    num_stages: int | None = None,
    cut: Cut | None = None,
) -> list[Plan]:
    """The plans that `best_plan` chooses from, the best first; among them the best ones that are
    found of those that give every stage `COPIES` machines and leave out none that fits."""
    begun = _all_begun(costs, machines, num_stages, cut)
    whole = [replace(s, serves=list(s.serves), stages=list(s.stages)) for s in begun if s.is_whole]
    found = _improved(begun, machines, LOOKS, may_cut=cut is None)
    if len(machines) >= COPIES:
        of_each = _spread(whole)[: len({len(s.cut) for s in whole})]
        kept = [replace(s, stays_whole=True) for s in of_each]
        found += _improved(kept, machines, LOOKS // WHOLE_PART, may_cut=cut is None)
    plans = {(s.cut, tuple(s.serves)): s.plan() for s in found}
    return sorted(plans.values(), key=lambda p: -p.round.tokens_per_s)


def _all_begun(
    costs: Costs, machines: Sequence[Machine], num_stages: int | None, cut: Cut | None
) -> list[_State]:
    """Beginnings, the best first."""
    most = len(costs.job.layers) - costs.job.last_layers + 1
    counts = range(1, min(most, len(machines), MAX_STAGES) + 1)
    if cut is not None:
        num_stages = len(cut)
    if num_stages is not None:
        counts = range(num_stages, num_stages + 1)
    possible = [k for k in _thinned(counts, len(machines)) if k <= min(len(machines), most)]
    found: list[_State] = []
    for k in possible:
        found += _begun(costs, machines, _proportional(costs, k) if cut is None else cut)
    found.sort(key=lambda s: -s.worth)
    if cut is None:
        best_counts = list(dict.fromkeys(len(s.cut) for s in found))
        best_counts += [k for k in possible if k not in best_counts]
        for i, k in enumerate(best_counts):
            work = k * len(costs.job.layers) ** 2
            others = even_cuts(costs, k) if i < FINELY or work <= FEW else []
            if len(machines) <= IN_ORDER and (i < FINELY or work <= FEW):
                others += _cuts_in_order(costs, machines, k)
            for begun in dict.fromkeys(others):
                found += _begun(costs, machines, begun)
    found.sort(key=lambda s: -s.worth)
    return found


def _improved(
    begun: Sequence[_State], machines: Sequence[Machine], looks: int, *, may_cut: bool
) -> list[_State]:
    """The best beginnings, each improved until all looks are spent."""
    kinds = {m: i for i, m in enumerate(machines)}
    begun_at = set[tuple[Cut, tuple[tuple[int, int], ...]]]()
    found: list[_State] = []
    for state in _spread(begun):
        kind_of = (kinds[m] for m in machines)
        key = state.cut, tuple(sorted(zip(kind_of, state.serves, strict=True)))
        if key in begun_at:
            continue
        begun_at.add(key)
        state.looks = looks
        _improve(state, may_cut=may_cut)
        looks = state.looks
        found.append(state)
        if looks <= 0:
            break
    return found


def _spread(states: Sequence[_State]) -> list[_State]:
    """The best of every number of stages first, then the others."""
    first: dict[int, _State] = {}
    for state in states:
        first.setdefault(len(state.cut), state)
    best = sorted(first.values(), key=lambda s: -s.worth)
    return [*best, *(s for s in states if first[len(s.cut)] is not s)]


def _thinned(counts: range, num_machines: int) -> list[int]:
    """Numbers of stages to try: all, and of many machines each a third more than the last."""
    if num_machines <= IN_ORDER:
        return list(counts)
    found: list[int] = []
    for k in counts:
        if not found or k >= found[-1] * (1 + 1 / SPACING):
            found.append(k)
    return found


def _begun(costs: Costs, machines: Sequence[Machine], cut: Cut) -> list[_State]:
    """All machines at a stage, and one machine a stage; and houses one after the other."""
    limits = (len(machines), 1) if len(machines) <= IN_ORDER else (len(machines),)
    states = (_assigned(costs, machines, cut, most) for most in limits)
    return [*(s for s in states if s is not None), *_by_house(costs, machines, cut)]


def _by_house(costs: Costs, machines: Sequence[Machine], cut: Cut) -> list[_State]:
    """The machines of a house at neighbouring stages, so that little crosses its link: houses with
    most machines first or last, of few all orders. And the machines of one house alone."""
    houses: dict[str | int, list[int]] = {}
    for i, m in enumerate(machines):
        houses.setdefault(m.house or i, []).append(i)
    if all(len(mine) == 1 for mine in houses.values()):
        return []
    names = sorted(houses, key=lambda name: (len(houses[name]), str(name)))
    orders: Sequence[Sequence[str | int]] = [names, names[::-1]]
    if len(names) <= FEW_HOUSES:
        orders = list(permutations(names))
    found: list[_State | None] = []
    for order in orders:
        serves = _in_a_row(costs, machines, cut, [i for name in order for i in houses[name]])
        found.append(_state(costs, machines, cut, serves))
    if len(machines) <= IN_ORDER:
        for mine in houses.values():
            if 1 < len(mine) >= len(cut):
                for most in (len(mine), 1):
                    found.append(_assigned(costs, machines, cut, most, mine))
    return [s for s in found if s is not None]


def _in_a_row(
    costs: Costs, machines: Sequence[Machine], cut: Cut, order: Sequence[int]
) -> list[int]:
    """The stage of each machine, where they are laid along the layers in this order, each beside so
    much of the work as it has of all FLOP/s; the nearest stage that it fits."""
    whole = sum(machines[i].flops_per_s for i in order)
    ends = list(accumulate(costs.flops(*stage) for stage in cut))
    serves, before = [OUT] * len(machines), 0.0
    for i in order:
        own = machines[i].flops_per_s
        middle = (before + own / 2) / whole * ends[-1]
        before += own
        wanted = min(bisect_left(ends, middle), len(cut) - 1)
        by_distance = sorted(range(len(cut)), key=lambda k: (abs(k - wanted), k))
        serves[i] = next(
            (k for k in by_distance if costs.rates(machines[i], *cut[k], len(cut)) is not None), OUT
        )
    if set(range(len(cut))) - set(serves):
        options = [
            [(k, 0.0) for k, x in enumerate(cut) if costs.rates(m, *x, len(cut)) is not None]
            for m in machines
        ]
        _covered(options, serves, len(cut))
    return serves


def _proportional(costs: Costs, num_stages: int) -> Cut:
    """Each border where a stage's part of the FLOPs is reached: quick, and almost even."""
    num_layers, tail = len(costs.job.layers), costs.job.last_layers
    sums = [costs.flops(0, end) for end in range(num_layers + 1)]
    ends: list[int] = []
    for k in range(1, num_stages):
        least = ends[-1] + 1 if ends else 1
        most = num_layers - tail + 1 - (num_stages - k)
        wanted = sums[-1] * k / num_stages
        at = bisect_left(sums, wanted)
        at -= at > 0 and wanted - sums[at - 1] < sums[min(at, num_layers)] - wanted
        ends.append(min(max(at, least), most))
    ends.append(num_layers)
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def even_cuts(costs: Costs, num_stages: int) -> list[Cut]:
    """By FLOPs, by parameters, by layers."""
    layers = costs.job.layers
    found = []
    for weights in (
        [x.flops for x in layers],
        [float(x.parameters) for x in layers],
        [1.0 for _ in layers],
    ):
        tail = len(layers) - costs.job.last_layers
        parts = split_layers([*weights[:tail], sum(weights[tail:])], num_stages)
        found.append(cut_of([*(len(p) for p in parts[:-1]), len(layers) - parts[-1].start]))
    return found


def _cuts_in_order(costs: Costs, machines: Sequence[Machine], num_stages: int) -> list[Cut]:
    cuts = (_cut_in_order(costs, order, num_stages) for order in _orders(machines))
    return [cut for cut in cuts if cut is not None]


def _orders(machines: Sequence[Machine]) -> Iterator[list[Machine]]:
    by_speed = sorted(machines, key=lambda m: m.flops_per_s)
    by_link = sorted(machines, key=lambda m: m.up_bytes_per_s)
    for order in (by_speed, by_link):
        yield order
        yield order[::-1]
    half = by_speed[::2] + by_speed[1::2][::-1]
    yield half


def _cut_in_order(costs: Costs, machines: Sequence[Machine], num_stages: int) -> Cut | None:
    """Stages take machines from an order, one after the other, until they have a flow; the most
    flow with which all layers have machines enough, by halving."""

    def reach(flow: float) -> Cut | None:
        return _reached(costs, machines, num_stages, flow)

    best, low = reach(0.0), 0.0
    if best is None:
        return None
    high = sum(m.flops_per_s for m in machines) / max(1.0, costs.flops(0, len(costs.job.layers)))
    for _ in range(STEPS):
        middle = (low + high) / 2
        cut = reach(middle)
        if cut is None:
            high = middle
        else:
            best, low = cut, middle
    return best


def _reached(costs: Costs, machines: Sequence[Machine], num_stages: int, flow: float) -> Cut | None:
    """A cut whose stages have the flow; None where the machines do not suffice. Dynamic
    programming: the fewest machines that the first k stages up to a layer need."""
    num_layers, tail = len(costs.job.layers), costs.job.last_layers
    before: dict[int, tuple[int, Cut]] = {0: (0, ())}
    for k in range(num_stages):
        is_last = k == num_stages - 1
        now: dict[int, tuple[int, Cut]] = {}
        for first, (used, cut) in before.items():
            left = num_stages - k - 1
            ends = (
                [num_layers]
                if is_last
                else range(first + 1, num_layers - max(0, left - 1) - tail + 1)
            )
            for end in ends:
                after = _taken(costs, machines, used, (first, end), num_stages, flow)
                if after is None:
                    break  # more layers need more
                if end not in now or after < now[end][0]:
                    now[end] = after, (*cut, (first, end))
        before = now
    return before[num_layers][1] if num_layers in before else None


def _taken(
    costs: Costs,
    machines: Sequence[Machine],
    used: int,
    stage: tuple[int, int],
    num_stages: int,
    flow: float,
) -> int | None:
    """Machines of the order that are used when the stage has the flow; None where it gets none."""
    total = 0.0
    for i in range(used, len(machines)):
        rates = costs.rates(machines[i], *stage, num_stages)
        if rates is not None:
            total += rates.flow
            if total >= flow:
                return i + 1
    return None


@dataclass(slots=True)
class _State:
    """A plan that is being improved."""

    costs: Costs
    machines: Sequence[Machine]
    cut: Cut
    serves: list[int]
    stages: list[StageCost]
    worth: float = 0.0
    """Tokens/s."""
    looks: int = field(default=LOOKS)
    stays_whole: bool = False
    """No machine leaves, and no stage gets fewer than `COPIES`."""

    @property
    def is_whole(self) -> bool:
        """Every stage has `COPIES` machines."""
        return all(self.serves.count(k) >= COPIES for k in range(len(self.cut)))

    def plan(self) -> Plan:
        return Plan(self.cut, tuple(self.serves), self.costs.round(self.stages))

    def stage(self, k: int, cut: Cut, serves: Sequence[int]) -> StageCost | None:
        mine = [self.machines[i] for i, s in enumerate(serves) if s == k]
        self.looks -= len(self.machines) // 8 + len(mine)
        return self.costs.stage(*cut[k], len(cut), mine)

    def take(self, cut: Cut, serves: list[int], changed: Sequence[int]) -> bool:
        """Goes there where that is better. `changed`: stages."""
        if self.stays_whole and (
            serves.count(OUT) > self.serves.count(OUT)
            or any(serves.count(k) < COPIES for k in changed)
        ):
            return False
        stages = list(self.stages)
        for k in changed:
            stage = self.stage(k, cut, serves)
            if stage is None:
                return False
            stages[k] = stage
        if any(stage.sharing is not None for stage in stages):
            self.looks -= LOOKS_TOGETHER * len(stages)
        worth = self.costs.round(stages).tokens_per_s
        if worth <= self.worth * (1 + 1e-9):
            return False
        self.cut, self.serves, self.stages, self.worth = cut, serves, stages, worth
        return True


def _assigned(
    costs: Costs,
    machines: Sequence[Machine],
    cut: Cut,
    most_each: int,
    among: Sequence[int] | None = None,
) -> _State | None:
    """Each machine to the poorest stage that it fits and that has fewer than `most_each`; those
    that fit few stages first, the quick ones before the slow ones. `among`: of these alone."""
    num_stages = len(cut)
    of_kind: dict[Machine, list[tuple[int, float]]] = {}
    for m in machines:
        if m not in of_kind:
            rates = [(k, costs.rates(m, *cut[k], num_stages)) for k in range(num_stages)]
            of_kind[m] = [(k, r.flow) for k, r in rates if r is not None]
    options = [of_kind[m] for m in machines]
    if among is not None:
        options = [o if i in among else [] for i, o in enumerate(options)]
    order = sorted(
        (i for i in range(len(machines)) if options[i]),
        key=lambda i: (len(options[i]), -max(rate for _, rate in options[i]), i),
    )
    flows, serves = [0.0] * num_stages, [OUT] * len(machines)
    room = [most_each] * num_stages
    for i in order:
        if mine := [o for o in options[i] if room[o[0]]]:
            k, rate = min(mine, key=lambda o: (flows[o[0]], -o[1], o[0]))
            serves[i] = k
            flows[k] += rate
            room[k] -= 1
    if not all(flows) and not _covered(options, serves, num_stages):
        return None
    return _state(costs, machines, cut, serves)


def _state(costs: Costs, machines: Sequence[Machine], cut: Cut, serves: list[int]) -> _State | None:
    """None where a stage has no machine."""
    state = _State(costs, machines, cut, serves, [])
    for k in range(len(cut)):
        stage = state.stage(k, cut, serves)
        if stage is None:
            return None
        state.stages.append(stage)
    state.worth = costs.round(state.stages).tokens_per_s
    return state


def _covered(
    options: Sequence[Sequence[tuple[int, float]]], serves: list[int], num_stages: int
) -> bool:
    """Gives a machine to each stage that has none, by a matching of stages and machines (augmenting
    paths). False where there is none. Machines outside it stay where they are."""
    holder: dict[int, int] = {}

    def place(i: int, seen: set[int]) -> bool:
        for k, _ in options[i]:
            if k not in seen:
                seen.add(k)
                if k not in holder or place(holder[k], seen):
                    holder[k] = i
                    return True
        return False

    for i in range(len(options)):
        place(i, set())
    if len(holder) < num_stages:
        return False
    for k, i in holder.items():
        serves[i] = k
    return True


def _improve(state: _State, *, may_cut: bool) -> None:
    """Takes what is better, until nothing is, or all looks are spent."""
    while state.looks > 0:
        before = state.worth
        if may_cut:
            _shift(state)
        _move(state)
        _swap(state)
        if state.worth <= before:
            return


def _shift(state: _State) -> None:
    """Moves borders between two stages."""
    num_layers, tail = len(state.costs.job.layers), state.costs.job.last_layers
    for k in range(len(state.cut) - 1):
        for step in (1, -1, 2, -2):
            border = state.cut[k][1] + step
            first, end = state.cut[k][0], state.cut[k + 1][1]
            latest = end - (tail if end == num_layers else 1)
            if first < border <= latest and state.looks > 0:
                cut = list(state.cut)
                cut[k], cut[k + 1] = (first, border), (border, end)
                if not state.take(tuple(cut), list(state.serves), (k, k + 1)):
                    _shift_and_move(state, tuple(cut), k)


def _shift_and_move(state: _State, cut: Cut, k: int) -> None:
    """A border moves, and the stages beside it change machines, or one machine changes stages."""
    if len(state.machines) > IN_ORDER:
        return
    other = {k: k + 1, k + 1: k}
    if state.take(cut, [other.get(s, s) for s in state.serves], (k, k + 1)):
        return
    for i, here in enumerate(state.serves):
        for there in (k, k + 1, OUT):
            serves = list(state.serves)
            serves[i] = there
            changed = {s for s in (here, there, k, k + 1) if s != OUT}
            if state.looks > 0 and state.take(cut, serves, sorted(changed)):
                return


def _move(state: _State) -> None:
    """Moves one machine: to another stage, or out, or in."""
    for i in _candidates(state):
        here = state.serves[i]
        for k in (*_targets(state), OUT):
            if k != here and state.looks > 0:
                serves = list(state.serves)
                serves[i] = k
                if state.take(state.cut, serves, [s for s in (here, k) if s != OUT]):
                    break


def _swap(state: _State) -> None:
    """Two machines of different stages change places."""
    candidates = _candidates(state)
    for a in candidates:
        for b in candidates:
            if state.looks <= 0:
                return
            one, other = state.serves[a], state.serves[b]
            if a < b and one != other and state.machines[a] != state.machines[b]:
                serves = list(state.serves)
                serves[a], serves[b] = other, one
                state.take(state.cut, serves, [s for s in (one, other) if s != OUT])


def _candidates(state: _State) -> list[int]:
    """All machines; of many, some of the richest stages, of the poorest and of those outside."""
    if len(state.machines) <= IN_ORDER:
        return list(range(len(state.machines)))
    order = sorted(range(len(state.stages)), key=lambda k: state.stages[k].flow)
    slow = max(range(len(state.stages)), key=lambda k: state.stages[k].exchange_s)
    wanted = {OUT, order[0], slow, *order[-2:]}
    mine = [i for i, s in enumerate(state.serves) if s in wanted]
    return mine[:: math.ceil(len(mine) / IN_ORDER)]


def _targets(state: _State) -> list[int]:
    """All stages; of many, the poorest."""
    order = sorted(range(len(state.stages)), key=lambda k: state.stages[k].flow)
    return order[:8]


def first_fit(
    costs: Costs, machines: Sequence[Machine], num_stages: int | None = None
) -> Cut | None:
    """A cut that fits on the machines, a stage each, however slow; None where none is found.
    `num_stages`: a given one."""
    most = min(len(machines), len(costs.job.layers) - costs.job.last_layers + 1)
    order = sorted(machines, key=lambda m: m.flops_per_s)
    counts = range(most, 0, -1) if num_stages is None else [num_stages]
    for k in counts:
        cut = _reached(costs, order, k, 0.0) if k <= most else None
        if cut is not None:
            return cut
    return None


def cut_of(layers: Sequence[int]) -> Cut:
    """Of so many layers in each stage, as `[pipeline] layers` has them."""
    ends = list(accumulate(layers))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
