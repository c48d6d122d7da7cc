"""What a plan comes to, for people and for programs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from peer.planning.question import Choice, Found
from swarmnet.plurals import counted
from swarmnet.protocol.planning.cost import Costs, Round
from swarmnet.protocol.planning.model import Machine
from swarmnet.protocol.planning.search import OUT, best_plan
from swarmnet.runtime.text import size
from swarmnet.training.computing import AUTO
from swarmnet.training.memory.plan import BF16, FP32, FP32_BYTES, LOW_BYTES, layers_base_bytes
from swarmnet.training.memory.stage_table import MachineMemory, memory_of

HOUR_S, DAY_S = 3600.0, 86400.0
MOMENTS_BYTES = 8
LINKS_DECIDE = 0.98
"""Of the tokens/s: what an assignment that looks at no link reaches, where links decided."""
MANY = 10.0
"""Times as fast: more is not told in percent."""
MOST_TIMES, NEARLY = 64.0, 0.001
"""Of a memory, how much more is tried to keep all, and how exactly."""
LONGER = 1.005
"""Of a round: less is not told as longer."""
LEAST_S = 1e-6
"""Less is what sums of other parts leave."""
FEW_MACHINES = 32
"""With no more, the loss of one is planned anew; of more, the others stay where they are."""


@dataclass(frozen=True, slots=True)
class Row:
    """Machines of one kind at one stage."""

    machine: str
    count: int
    stage: int
    """-1: left out."""
    layers: tuple[int, int]
    """First and end."""
    device_bytes: float
    host_bytes: float
    device_room: float
    host_room: float
    is_gpu: bool
    precision: str
    activations: str
    in_flight: int
    ranks: int
    """Of a peer; memory is that of one card."""
    local: str
    """What they divide: tensor, fsdp, or empty for one rank."""
    weights: str
    """Where they lie: device, host or disk."""
    up_per_round: float
    """Bytes, of one machine."""
    down_per_round: float
    up_per_day: float
    down_per_day: float


@dataclass(frozen=True, slots=True)
class Loss:
    """What it costs that one machine is gone."""

    machine: str
    stages: list[int]
    """Of its peers."""
    tokens_per_s: float
    """Of those that are left; 0 where training stands still until another one joins."""
    needs_move: bool
    """One of the others has to go to its stage."""


@dataclass(frozen=True, slots=True)
class Answer:
    """All that is said of a plan that fits."""

    rows: list[Row]
    tokens_per_s: float
    tokens_per_day: float
    round_s: dict[str, float]
    samples: int
    tokens: int
    """Of a round."""
    wanted_tokens: float
    hours: float
    """To that many."""
    up_per_round: float
    """Bytes, of the machine that sends most, with all its peers."""
    down_per_round: float
    """Of the one that gets most."""
    up_per_day: float
    joiner_bytes: float
    joiner_s: float
    """At the stage where that takes longest."""
    one_more: float
    """Tokens/s with one more of the most frequent kind; 0 where that was not asked."""
    one_more_kind: str
    losses: list[Loss]
    first_short: str = ""
    """The machine that lacks most memory to keep all by its own choice, and by which policy it does
    without; empty where none lacks any, or the run says what is kept."""
    choices: list[Choice] = field(default_factory=list)
    helps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        stages = max(r.stage for r in self.rows) + 1
        counts = [sum(r.count for r in self.rows if r.stage == k) for k in range(stages)]
        each = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
        parts = {k: s for k, s in self.round_s.items() if k != "seconds"}
        most = max(parts, key=lambda k: parts[k])
        share = 100 * parts[most] / self.round_s["seconds"]
        return (
            f"fits: {_many(stages, 'stage')} x {each} {'replica' if each == '1' else 'replicas'}, "
            f"about {_number(self.tokens_per_s)} tokens/s; up to {size(self.up_per_day)} of data "
            f"up a day and machine; {share:.0f} % of a round is {most}"
            + (f"; first machine short of memory: {self.first_short}" if self.first_short else "")
        )

    def lines(self) -> list[str]:
        """Below the table."""
        parts = ", ".join(
            f"{name} {_seconds(s)}" for name, s in self.round_s.items() if name != "seconds"
        )
        out = [
            f"a round: {counted(self.samples, 'sample', ',')}, "
            f"{counted(self.tokens, 'token', ',')}, {_seconds(self.round_s['seconds'])}: {parts}; "
            f"{size(self.up_per_round)} up and {size(self.down_per_round)} down at the busiest "
            "machine",
            f"{counted(_number(self.wanted_tokens), 'token')}: {_hours(self.hours)} "
            f"({counted(_number(self.tokens_per_day), 'token')} a day)",
            f"a newcomer downloads {size(self.joiner_bytes)}, about {_seconds(self.joiner_s)}",
        ]
        if self.one_more:
            more = compared(self.one_more, self.tokens_per_s)
            out.append(f"one more {self.one_more_kind}: {more}")
        out += [_loss_line(x, self.tokens_per_s) for x in _told(self.losses)]
        out += [f"{c.key} = {c.value}: {c.why}" for c in self.choices]
        return [*out, *self.helps, *self.notes]


def _told(losses: list[Loss]) -> list[Loss]:
    """The worst one, and the least bad."""
    order = sorted(losses, key=lambda x: (x.tokens_per_s, x.stages, x.machine))
    return order if len(order) < 3 else [order[0], order[-1]]


def _loss_line(loss: Loss, now: float) -> str:
    stages = ", ".join(map(str, loss.stages))
    which = f"without one {loss.machine} of {_many(len(loss.stages), 'stage')[2:]} {stages}"
    if not loss.tokens_per_s:
        return f"{which}: training stands still until another one joins"
    moved = ", after others have moved" * loss.needs_move
    return f"{which}: {compared(loss.tokens_per_s, now)}{moved}"


def answer_of(found: Found, *, wanted_tokens: float, more: Found | None, kind: str) -> Answer:
    """`more`: the plan with one more machine of that `kind`."""
    costs, plan = found.costs, found.plan
    job, now = costs.job, plan.round
    presence = _presence(found)
    per_day = now.tokens_per_s * DAY_S * presence
    seconds = _work_s(found, wanted_tokens) / presence
    joiner_bytes, joiner_s = _joining(found)
    sent = _sent(found)
    up, down, up_per_day = (max(of.values()) for of in _of_machines(found, sent))
    return Answer(
        rows=_rows(found, sent),
        tokens_per_s=now.tokens_per_s,
        tokens_per_day=per_day,
        round_s={**_parts_of(now), "seconds": now.seconds},
        samples=job.global_batch,
        tokens=now.tokens,
        wanted_tokens=wanted_tokens,
        hours=seconds / HOUR_S,
        up_per_round=up,
        down_per_round=down,
        up_per_day=up_per_day,
        joiner_bytes=joiner_bytes,
        joiner_s=joiner_s,
        one_more=0.0 if more is None else more.plan.round.tokens_per_s,
        one_more_kind=kind,
        losses=_losses(found),
        first_short=_first_short(found),
        choices=found.choices,
    )


def household_choice(answer: Answer, without: Found) -> Choice | None:
    """What the key of a household is worth; None where nothing. `without`: the plan without one."""
    rate = without.plan.round.tokens_per_s
    up = max(_of_machines(without, _sent(without))[2].values())
    if rate >= answer.tokens_per_s and up <= answer.up_per_day:
        return None  # each stage is in one house
    return Choice(
        "swarmnet peer",
        "--household FILE",
        "put it, with one key, on all machines of a house: each shard crosses its uplink once; "
        f"without it {compared(rate, answer.tokens_per_s)}, and up to {size(up)} of data up a day "
        "and machine",
    )


def links_choice(answer: Answer, alone_per_s: float) -> Choice | None:
    """That links decided which machine takes which stage; None where they did not. `alone_per_s`:
    as of `by_compute_alone`."""
    if not 0 < alone_per_s < LINKS_DECIDE * answer.tokens_per_s:
        return None
    return Choice(
        "swarmnet peer",
        "--stage, as the table has them",
        "links decided which machine takes which stage: chosen by compute alone it may be "
        f"{compared(alone_per_s, answer.tokens_per_s)}",
    )


def _work_s(found: Found, num_tokens: float) -> float:
    """Until so many tokens are done, from the first round of the run on."""
    return sum(
        min(tokens, max(0.0, num_tokens - before)) / rate for before, tokens, rate in _phases(found)
    )


def _phases(found: Found) -> Iterator[tuple[float, float, float]]:
    """Of a batch that grows: the tokens before each size, those with it, and tokens/s."""
    costs, plan, before = found.costs, found.plan, 0.0
    steps = found.spec.pipeline.batch_ramp or ((0, costs.job.global_batch),)
    ends = (*(first for first, _ in steps[1:]), math.inf)
    for (first, samples), end in zip(steps, ends, strict=True):
        of_size = Costs(replace(costs.job, global_batch=samples))
        made = of_size.of(plan.cut, found.machines, plan.serves)
        assert made is not None  # memory does not depend on it
        tokens = (end - first) * made.tokens
        yield before, tokens, made.tokens_per_s
        before += tokens


def smaller_batches(found: Found) -> list[str]:
    """What rounds come to before the batch has grown."""
    steps = found.spec.pipeline.batch_ramp
    return [
        f"before round {end:,}: rounds of {counted(samples, 'sample', ',')}, about {_number(rate)} "
        "tokens/s"
        for (_, samples), (end, _), (_, _, rate) in zip(
            steps[:-1], steps[1:], _phases(found), strict=False
        )
    ]


def _presence(found: Found) -> float:
    """Part of the day's work that is done, where machines are there for some hours only and these
    are spread over the day: that of the stage which has least of its flow."""
    costs, plan = found.costs, found.plan
    least: list[tuple[float, float]] = []
    for k, (first, end) in enumerate(plan.cut):
        rates = [
            (found.machines[i], costs.rates(found.machines[i], first, end, len(plan.cut)))
            for i in plan.replicas(k)
        ]
        flow = sum(r.flow for _, r in rates if r is not None)
        here = sum(r.flow * m.hours / 24 for m, r in rates if r is not None)
        least.append((flow, here))
    return min(1.0, min(here for _, here in least) / min(flow for flow, _ in least))


def _sent(found: Found) -> dict[int, tuple[float, float]]:
    """By the index of a machine, the bytes of a round over its link, up and down."""
    costs, plan, sent = found.costs, found.plan, dict[int, tuple[float, float]]()
    loads = costs.loads(plan.cut, found.machines, plan.serves)
    for k, (first, end) in enumerate(plan.cut):
        indices = plan.replicas(k)
        replicas = [found.machines[i] for i in indices]
        exchanged = costs.exchanged_bytes(first, end, replicas)
        at_work = _late_at(found, k)
        rates = [
            rate * at_work.get(m, 1.0) for m, (rate, _, _) in zip(replicas, loads[k], strict=True)
        ]
        for i, rate, (_, out, into), (up, down) in zip(
            indices, rates, loads[k], exchanged, strict=True
        ):
            samples = costs.job.global_batch * rate / sum(rates)
            sent[i] = samples * out + up, samples * into + down
    return sent


def _of_machines(
    found: Found, sent: dict[int, tuple[float, float]]
) -> tuple[dict[str | int, float], dict[str | int, float], dict[str | int, float]]:
    """Bytes up and down in a round, and up in a day, of each machine with all its peers. `sent`: as
    of `_sent`."""
    up, down, per_day = (defaultdict[str | int, float](float) for _ in range(3))
    for i, (up_round, down_round) in sent.items():
        machine = found.described[i].seat_of or i
        up[machine] += up_round
        down[machine] += down_round
        per_day[machine] += up_round * _rounds_a_day(found, found.machines[i])
    return up, down, per_day


def _rounds_a_day(found: Found, machine: Machine) -> float:
    return DAY_S / found.plan.round.seconds * machine.hours / 24


def _rows(found: Found, sent: dict[int, tuple[float, float]]) -> list[Row]:
    """`sent`: as of `_sent`."""
    costs, plan = found.costs, found.plan
    rows: list[Row] = []
    for k, (first, end) in enumerate(plan.cut):
        seen: dict[tuple[Machine, float, float], int] = {}
        for i in plan.replicas(k):
            m, (up_round, down_round) = found.machines[i], sent[i]
            kind = replace(m, house=""), up_round, down_round
            if kind in seen:
                seen[kind] += 1
                continue
            seen[kind] = 1
            held = costs.held(first, end, len(plan.cut), m)
            assert held is not None
            memory = memory_of(m)
            day = _rounds_a_day(found, m)
            rows.append(
                Row(
                    m.name,
                    0,
                    k,
                    (first, end),
                    held.device_bytes,
                    held.host_bytes,
                    memory.device_bytes,
                    memory.host_bytes,
                    memory.is_apart,
                    memory.precision,
                    held.activations,
                    held.in_flight,
                    held.ranks,
                    held.local,
                    held.weights,
                    up_round,
                    down_round,
                    up_round * day,
                    down_round * day,
                )
            )
        counts = list(seen.values())
        start = len(rows) - len(counts)
        rows[start:] = [replace(row, count=n) for row, n in zip(rows[start:], counts, strict=True)]
    return rows


def _first_short(found: Found) -> str:
    """As `Answer.first_short`."""
    cut, lacking = found.plan.cut, list[tuple[float, str]]()
    if found.spec.pipeline.activations != AUTO:
        return ""
    for k, (first, end) in enumerate(cut):
        for machine in {found.machines[i] for i in found.plan.replicas(k)}:
            held = found.costs.held(first, end, len(cut), machine)
            if held is None or held.activations == "keep":
                continue
            lacks, where = _lacks_to_keep(found, (first, end), memory_of(machine))
            unless = f"activations = {held.activations}"
            if held.weights != "device":
                unless += f" and weights on the {held.weights}"
            lacking.append((lacks, f"{machine.name}, by {size(lacks)} {where}, unless {unless}"))
    lacks, said = max(lacking, default=(0.0, ""))
    return said if lacks > 0 else ""


def _lacks_to_keep(
    found: Found, stage: tuple[int, int], memory: MachineMemory
) -> tuple[float, str]:
    """Bytes with which a machine would keep all of a stage on its device, beyond those it has, and
    of which memory they are: of two that of which it takes fewer. 0 where no number would do."""

    def more(changed: Callable[[float], MachineMemory], now: float) -> float:
        """Of the memory that `changed` sets."""

        def keeps(num_bytes: float) -> bool:
            held = found.table.held(*stage, len(found.plan.cut), changed(num_bytes))
            return held is not None and (held.activations, held.weights) == ("keep", "device")

        low = high = now
        while not keeps(high):
            low, high = high, 2 * high
            if high > MOST_TIMES * now:
                return 0.0
        while high - low > NEARLY * high:
            middle = (low + high) / 2
            low, high = (low, middle) if keeps(middle) else (middle, high)
        return high - now

    if not memory.is_apart:
        one = more(lambda n: replace(memory, device_bytes=n, host_bytes=n), memory.device_bytes)
        return one, "of memory"
    device = more(lambda n: replace(memory, device_bytes=n), memory.device_bytes)
    host = more(lambda n: replace(memory, host_bytes=n), memory.host_bytes)
    lacking = [x for x in ((device, "on the device"), (host, "of main memory")) if x[0]]
    return min(lacking, default=(0.0, ""))


def _joining(found: Found) -> tuple[float, float]:
    """(bytes, seconds) of a newcomer, where these are most: parameters, the moments of its shards,
    and with adapters the model's own weights as they are kept."""
    costs, plan, table = found.costs, found.plan, found.table
    worst = (0.0, 0.0)
    replication = table.spec.sync.replication
    for k, (first, end) in enumerate(plan.cut):
        givers = [found.machines[i] for i in plan.replicas(k)]
        parameters, after = costs.parameters(first, end), len(givers) + 1
        muon = costs.muon_parameters(first, end)
        moments = (MOMENTS_BYTES * parameters - FP32_BYTES * muon) * min(replication, after) / after
        layers = table.plan.layers[first:end]
        base = 0.0
        if table.plan.has_base:
            exact = layers_base_bytes(table.spec, table.plan, layers, FP32)
            low = layers_base_bytes(table.spec, table.plan, layers, BF16)
            base = min(low, exact * LOW_BYTES / FP32_BYTES)
        whole = parameters * FP32_BYTES + moments + base
        up = sum(m.up_bytes_per_s for m in givers)
        down = min(m.down_bytes_per_s for m in givers)
        worst = max(worst, (whole / min(up, down), whole))
    return worst[1], worst[0]


def _losses(found: Found) -> list[Loss]:
    """Of each kind of machine at each stage, or with peers of the same stages."""
    costs, plan = found.costs, found.plan
    peers: dict[str | int, list[int]] = {}
    for i, one in enumerate(found.described):
        peers.setdefault(one.seat_of or i, []).append(i)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    losses = []
    for gone in peers.values():
        stages = sorted({plan.serves[i] for i in gone} - {OUT})
        name = found.machines[gone[0]].name.removeprefix("seat of ").removeprefix("card of ")
        if not stages or (name, tuple(stages)) in seen:
            continue
        seen.add((name, tuple(stages)))
        rest = [m for j, m in enumerate(found.machines) if j not in gone]
        serves = [s for j, s in enumerate(plan.serves) if j not in gone]
        stay = costs.of(plan.cut, rest, serves)
        rate, moves = 0.0 if stay is None else stay.tokens_per_s, False
        if stay is None and rest and len(rest) <= FEW_MACHINES:
            again = best_plan(costs, rest, cut=plan.cut)
            if again is not None:
                rate, moves = again.round.tokens_per_s, True
        losses.append(Loss(name, stages, rate, moves))
    return losses


def _late_at(found: Found, stage: int) -> dict[Machine, float]:
    """Machines of a stage for which no exchange waits: the part of a round in which each works."""
    plan, now = found.plan, found.plan.round
    replicas = [found.machines[i] for i in plan.replicas(stage)]
    cost = found.costs.stage(*plan.cut[stage], len(plan.cut), replicas)
    assert cost is not None
    return {x.machine: x.at_work(now.seconds - now.exchange_s) for x in cost.late}


def late(found: Found) -> list[str]:
    """Machines whose contributions count an exchange later, with what that leaves of them."""
    lines = []
    for k in range(len(found.plan.cut)):
        names = [found.machines[i].name for i in found.plan.replicas(k)]
        parts = {m.name: part for m, part in _late_at(found, k).items()}
        lines += [
            f"late: {names.count(name)} x {name}: no exchange waits for it; it works "
            f"{100 * part:.0f} % of the time"
            for name, part in parts.items()
        ]
    return lines


def left_out(found: Found) -> list[str]:
    """Machines that no stage has, with why."""
    costs: Costs = found.costs
    lines, seen = [], set[str]()
    for i, stage in enumerate(found.plan.serves):
        machine = found.machines[i]
        if stage != OUT or machine.name in seen:
            continue
        seen.add(machine.name)
        count = sum(
            s == OUT and found.machines[j].name == machine.name
            for j, s in enumerate(found.plan.serves)
        )
        cut = found.plan.cut
        fits = [k for k, x in enumerate(cut) if costs.held(*x, len(cut), machine) is not None]
        why = (
            _longer(found, i, fits)
            if fits
            else f"no stage fits into its memory: {_shortest(found, machine)}"
        )
        lines.append(f"left out: {count} x {machine.name}: {why}")
    return lines


def _longer(found: Found, index: int, stages: Sequence[int]) -> str:
    """How much longer rounds would be with a machine at one of these stages, where it does least
    harm, and what of them."""
    plan, now = found.plan, found.plan.round
    made = []
    for k in stages:
        serves = [*plan.serves[:index], k, *plan.serves[index + 1 :]]
        with_it = found.costs.of(plan.cut, found.machines, serves)
        assert with_it is not None
        made.append((with_it.seconds, k, with_it))
    seconds, k, best = min(made, key=lambda x: x[:2])
    if seconds <= now.seconds * LONGER:
        return f"rounds would be no shorter with it at stage {k}"
    parts, before = _parts_of(best), _parts_of(now)
    most = max(parts, key=lambda name: parts[name] - before[name])
    return (
        f"at stage {k} it would make a round {_seconds(seconds)} instead of "
        f"{_seconds(now.seconds)}: {most} {_seconds(parts[most])} instead of "
        f"{_seconds(before[most])}"
    )


def _parts_of(made: Round) -> dict[str, float]:
    """Where its seconds go."""
    return {
        "compute": made.compute_s,
        "links": made.links_s,
        "exchange": made.exchange_s,
        "latency": made.latency_s,
        "bubble": made.bubble_s,
        "update": made.update_s,
    }


def _shortest(found: Found, machine: Machine) -> str:
    """What it lacks for the smallest stage."""
    memory = memory_of(machine)
    cut = found.plan.cut
    needed = [found.table.needed(*x, len(cut), memory).device_bytes for x in cut]
    return f"the smallest needs {size(min(needed))}, and {size(memory.device_bytes)} are there"


def compared(tokens_per_s: float, now: float) -> str:
    """A speed, and how it compares with the plan's."""
    times = tokens_per_s / now
    how = counted(_number(times), "time") if times > MANY else f"{round(100 * (times - 1)):+d} %"
    return f"{_number(tokens_per_s)} tokens/s ({how})"


def _number(value: float) -> str:
    """A count as people read it: 1,900, 12 M, 1 B."""
    for unit, most in (("", 1e5), (" k", 1e6), (" M", 1e9), (" B", 1e12)):
        if value < most:
            scale = {"": 1.0, " k": 1e3, " M": 1e6, " B": 1e9}[unit]
            scaled = value / scale
            return (
                f"{float(f'{scaled:.3g}'):,.0f}{unit}" if scaled >= 100 else f"{scaled:.3g}{unit}"
            )
    return f"{value / 1e12:.3g} T"


def _many(count: int, what: str) -> str:
    return counted(count, what)


def _seconds(seconds: float) -> str:
    if seconds < LEAST_S:
        return "0 s"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _hours(hours: float) -> str:
    return counted(hours, "hour", ".3g") if hours < 48 else counted(hours / 24, "day", ",.3g")
