"""A swarm that is at work, as its records tell of it: machines for the cost model, and what it
could do otherwise.

A record says how fast its machine computes its stage and how fast it uploads, as measured there,
and how long its last round took. What one peer says of itself counts within bounds: a speed up to
`FASTEST` times that of the middle machine, and of the rounds' lengths the median. So names that lie
move the answer by no more than as many of the fastest honest machines would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from swarmnet.protocol.planning.cost import Costs, Round
from swarmnet.protocol.planning.model import Cut, Held, Job, Machine
from swarmnet.protocol.planning.search import IN_ORDER, Plan, best_plan
from swarmnet.protocol.sync_modes import AUTO, DELAYED

FASTEST = 10.0
"""A machine's numbers count up to this multiple of the median, and rounds that are by more than so
much longer or shorter than planned are not believed."""
PAYS = 1.15
"""So much faster must another cut be: everything stops for it, and machines fetch other layers."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a replica's record says of it."""

    peer_id: str
    stage: int
    samples_per_s: float
    """Of its device at its stage, if it were never idle; 0 while unknown."""
    upload_bytes_per_s: float
    """0 while unknown."""
    open_s: float
    """Of its last round; 0 before the first."""
    exchange_s: float
    """After it, or beside the next one."""


@dataclass(frozen=True, slots=True)
class Usual:
    """What a machine's links are taken for where its record does not say."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Live:
    """A swarm at one moment."""

    costs: Costs
    cut: Cut
    machines: tuple[Machine, ...]
    """By peer id, which is their name."""
    serves: tuple[int, ...]
    planned: Round
    round_s: float
    """Of the last rounds, as the machines took them; 0 while unknown, or not believed."""
    num_assumed: int
    """Machines of which no speed is known yet."""
    num_limited: int
    """Machines that say more of themselves than is believed."""

    @property
    def correction(self) -> float:
        """Seconds of a round over the planned ones; 1 while unknown."""
        return self.round_s / self.planned.seconds if self.round_s else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Of rounds as long as the last ones were."""
        return self.planned.tokens_per_s / self.correction

    def corrected(self, planned: Round) -> float:
        """Tokens/s of another plan, if its rounds were as much longer than planned."""
        return planned.tokens_per_s / self.correction


def without_memory(job: Job) -> Job:
    """Records say nothing of memory: every stage is taken to fit."""
    held = Held(0.0, 0.0, "", 0, computes_again=False)
    return replace(job, memory=lambda first, end, num_stages, memory: held)


def live_swarm(job: Job, cut: Cut, said: Sequence[Said], usual: Usual) -> Live | None:
    """`said`: of the live replicas. None where a stage has no replica, or no machine says how fast
    it is."""
    costs = Costs(without_memory(job))
    replicas = sorted((r for r in said if 0 <= r.stage < len(cut)), key=lambda r: r.peer_id)
    speeds = [_flops_per_s(costs, cut[r.stage], r) for r in replicas]
    known = [x for x in speeds if x > 0]
    if not known:
        return None
    middle = median(known)
    ups = [r.upload_bytes_per_s for r in replicas if r.upload_bytes_per_s > 0]
    most_up = FASTEST * median(ups) if ups else 0.0
    machines = tuple(
        Machine(
            name=r.peer_id,
            flops_per_s=min(speed or middle, FASTEST * middle),
            up_bytes_per_s=min(r.upload_bytes_per_s, most_up) or usual.up_bytes_per_s,
            down_bytes_per_s=max(usual.down_bytes_per_s, min(r.upload_bytes_per_s, most_up)),
            latency_s=usual.latency_s,
        )
        for r, speed in zip(replicas, speeds, strict=True)
    )
    serves = tuple(r.stage for r in replicas)
    planned = costs.of(cut, machines, serves)
    if planned is None:
        return None
    limited = sum(
        speed > FASTEST * middle or r.upload_bytes_per_s > most_up > 0
        for r, speed in zip(replicas, speeds, strict=True)
    )
    round_s = _round_s(replicas, is_beside=job.update.mode in (DELAYED, AUTO))
    if not _are_near(round_s, planned.seconds):
        round_s = 0.0
    assumed = len(replicas) - len(known)
    return Live(costs, cut, machines, serves, planned, round_s, assumed, limited)


def _are_near(one: float, other: float) -> bool:
    return one <= FASTEST * other and other <= FASTEST * one


def _flops_per_s(costs: Costs, stage: tuple[int, int], record: Said) -> float:
    """0 where the record does not say."""
    return record.samples_per_s * (1 + costs.job.backward) * costs.flops(*stage)


def _round_s(replicas: Sequence[Said], *, is_beside: bool) -> float:
    """The median of what the replicas' last rounds took. `is_beside`: exchanges are beside the
    next round."""
    took = [
        max(r.open_s, r.exchange_s) if is_beside else r.open_s + r.exchange_s
        for r in replicas
        if r.open_s > 0
    ]
    return median(took) if took else 0.0


def with_one_more(live: Live) -> tuple[int, float]:
    """(the stage that a further machine of middle speed helps most, tokens/s with it)."""
    machines = live.machines
    middle = Machine(
        "one more",
        median(m.flops_per_s for m in machines),
        median(m.up_bytes_per_s for m in machines),
        median(m.down_bytes_per_s for m in machines),
        median(m.latency_s for m in machines),
    )
    found = []
    for stage in range(len(live.cut)):
        planned = live.costs.of(live.cut, [*machines, middle], [*live.serves, stage])
        if planned is not None:
            found.append((live.corrected(planned), -stage))
    rate, stage = max(found)
    return -stage, rate


@dataclass(frozen=True, slots=True)
class Missed:
    """What the loss of the machine costs that is missed most."""

    peer_id: str
    stage: int
    tokens_per_s: float
    """0 where nobody else serves its stage."""


def most_missed(live: Live) -> Missed:
    """Of all machines."""
    found = []
    for i, (machine, stage) in enumerate(zip(live.machines, live.serves, strict=True)):
        rest = [m for j, m in enumerate(live.machines) if j != i]
        serves = [s for j, s in enumerate(live.serves) if j != i]
        planned = live.costs.of(live.cut, rest, serves)
        rate = 0.0 if planned is None else live.corrected(planned)
        found.append((rate, stage, machine.name))
    rate, stage, name = min(found)
    return Missed(name, stage, rate)


def better_moves(live: Live, copies: int) -> Plan | None:
    """The best assignment to the present stages, where it is faster than the present one and leaves
    no stage with fewer than the copies that are wanted."""
    found = best_plan(live.costs, live.machines, cut=live.cut)
    if found is None or found.round.tokens_per_s <= live.planned.tokens_per_s:
        return None
    return found if _fewest(found.serves, live.cut) >= _wanted(live, copies) else None


def _fewest(serves: Sequence[int], cut: Cut) -> int:
    """Replicas of the stage that has fewest."""
    return min(serves.count(k) for k in range(len(cut)))


def _wanted(live: Live, copies: int) -> int:
    """Replicas that a stage of another plan has at least: as many as the run wants copies, or as
    all stages have now."""
    return max(1, min(copies, _fewest(live.serves, live.cut)))


def better_cut(live: Live, copies: int) -> Plan | None:
    """The best plan with any stages that have replicas enough, where it beats all that moves could
    do by `PAYS`."""
    wanted = _wanted(live, copies)
    moved = better_moves(live, copies)
    now = live.planned if moved is None else moved.round

    def found(num_stages: int | None) -> Plan | None:
        plan = best_plan(live.costs, live.machines, num_stages=num_stages)
        return None if plan is None or _fewest(plan.serves, plan.cut) < wanted else plan

    best = found(None)
    if best is None and len(live.machines) <= IN_ORDER:
        most = min(len(live.costs.job.layers), len(live.machines) // wanted)
        plans = [plan for k in range(1, most + 1) if (plan := found(k)) is not None]
        best = max(plans, key=lambda plan: plan.round.tokens_per_s, default=None)
    if best is None or best.cut == live.cut:
        return None
    return best if best.round.tokens_per_s >= PAYS * now.tokens_per_s else None
