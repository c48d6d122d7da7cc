"""`swarmnet plan --join`: what a live swarm could do otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_high

from rich.console import Console

from peer.machine.measured_layers import write_values
from peer.options import PlanOptions
from peer.planning.machines import Links, read_links
from swarmnet.errors import SpecError, UsageError
from swarmnet.observe.text import short_id
from swarmnet.plurals import counted
from swarmnet.printable import printable
from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.planning.live import (
    PAYS,
    Live,
    Missed,
    Said,
    Usual,
    better_cut,
    better_moves,
    live_swarm,
    most_missed,
    with_one_more,
)
from swarmnet.protocol.planning.model import Cut
from swarmnet.protocol.planning.search import Plan, cut_of
from swarmnet.runtime.observing import JoinRun, RunObserver, join_run, with_invite
from swarmnet.runtime.text import shown_run, size
from swarmnet.spec import RunSpec, load_spec
from swarmnet.training.memory.plan import PRECISIONS
from swarmnet.training.memory.stage_table import StageTable

LOOK_S = 3.0
"""How long an observer gathers records before it judges."""
MOVES = 1.05
"""What the best assignment to the present stages must gain to be worth a line."""
RUN_CHARACTERS = 16
"""Of a run's id, as its folder of checkpoints is called."""
STATE_PRECISION = "fp32"
"""A peer's parameters, gradients and moments are in fp32, whatever its passes are."""


@dataclass(frozen=True, slots=True)
class OtherCut:
    """A cut that pays."""

    layers: list[int]
    tokens_per_s: float
    fewest_replicas: int
    state_bytes: float
    """Of its largest stage."""
    present_state_bytes: float
    commands: list[str]


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """What is said of a live swarm."""

    run: str
    machines: int
    layers: list[int]
    replicas: list[int]
    """Of each stage."""
    tokens_per_s: float
    is_measured: bool
    """By its last rounds; else planned."""
    planned_tokens_per_s: float
    poorest_stage: int
    one_more_stage: int
    one_more: float
    """Tokens/s."""
    missed: Missed
    moved: float
    """Tokens/s if the machines served the present stages as well as they can; 0 where they do."""
    other: OtherCut | None
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        counts = self.replicas
        each = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
        how = "as its last rounds were" if self.is_measured else "by what its machines say"
        stages = counted(len(counts), "stage")
        return (
            f"{self.run}: {stages} x {counted(each, 'replica')}, about {self.tokens_per_s:,.0f} "
            f"tokens/s {how}; stage {self.poorest_stage} has least"
        )

    def lines(self) -> list[str]:
        """Below the verdict."""
        now = self.tokens_per_s
        out = [
            f"one more machine of middle speed: {_change(self.one_more, now)}, at stage "
            f"{self.one_more_stage}"
        ]
        lost = self.missed
        who = f"without {short_id(lost.peer_id)} of stage {lost.stage}"
        out.append(
            f"{who}: {_change(lost.tokens_per_s, now)}"
            if lost.tokens_per_s
            else f"{who}: training stands still until another one serves that stage"
        )
        if self.moved:
            out.append(
                f"with the same stages and other machines at them: {_change(self.moved, now)}; "
                "peers move by themselves"
            )
        if self.other is None:
            out.append(
                f"no other cut is {100 * (PAYS - 1):.0f} % faster than the present one can be"
            )
        else:
            out += self._other_lines(self.other)
        return [*out, *self.notes]

    def _other_lines(self, other: OtherCut) -> list[str]:
        many = counted(len(other.layers), "stage")
        more = other.state_bytes > other.present_state_bytes
        room = (
            f"; a replica of its largest stage keeps {size(other.state_bytes)} beside activations, "
            f"now {size(other.present_state_bytes)}, and no record says what machines have room for"
        )
        first, *rest = other.commands
        return [
            f"another cut would pay: {many}, layers = {other.layers}: "
            f"{_change(other.tokens_per_s, self.tokens_per_s)}{room * more}",
            f"  1. {first}",
            "  2. stop the peers (Ctrl-C: each saves its part), bring their state folders beside "
            f"each other, and there: {' '.join(rest)}",
            "  parameters and the optimizer's moments go on; rounds, rate and the order of the "
            "data begin anew",
        ]


def _change(tokens_per_s: float, now: float) -> str:
    return f"about {tokens_per_s:,.0f} tokens/s ({100 * (tokens_per_s / now - 1):+.0f} %)"


async def show_live(
    options: PlanOptions, console: Console, *, join: JoinRun = join_run, look_s: float = LOOK_S
) -> None:
    """Prints the answer, and writes the other cut where that is wanted. Raises `UserError` where
    nobody answers, `SpecError`, `UsageError`."""
    links = read_links(options.links)
    if links.house > 1:
        raise UsageError(
            f"--links {options.links!r}: with --join machines are as their records say, and none "
            "says who shares its link; leave ,house= out"
        )
    own = None if options.spec is None else load_spec(options.spec)
    observer = await with_invite(join, options.invite)(list(options.join), options.transport)
    try:
        records = await _look(observer, look_s)
        spec = observer.spec
    finally:
        await observer.close()
    spec = _known_here(spec, own)
    live, table = found_live(spec, records, links)
    answer = await asyncio.to_thread(live_answer, live, table, options)
    if options.write:
        note = _write(options, answer, spec)
        answer.notes.append(note)
    if options.as_json:
        values = {"verdict": answer.verdict, **asdict(answer)}
        console.print_json(json.dumps(values), ensure_ascii=True)
        return
    for line in (answer.verdict, *answer.lines()):
        console.print(printable(line), soft_wrap=True, highlight=False, markup=False)


async def _look(observer: RunObserver, look_s: float) -> Sequence[Record]:
    """Records of the live replicas that count, after a while of gossip."""
    loop = asyncio.get_running_loop()
    until = loop.time() + look_s
    while (now := loop.time()) < until:
        await observer.wait_news(max(0.0, until - now))
    stages = range(observer.spec.pipeline.num_stages)
    return [r for k in stages for r in observer.view.replicas(k, now)]


def _known_here(spec: RunSpec, own: RunSpec | None) -> RunSpec:
    """The run as this machine can build its model. Raises `UsageError`."""
    if own is not None and _shape(own) != _shape(spec):
        raise UsageError(
            f"--spec is another run than {shown_run(spec.name, spec.run_id)} behind --join"
        )
    if spec.model.kind != "custom":
        return spec
    if own is None:
        raise UsageError(
            "the run has a custom model, whose code comes from no other machine; give --spec FILE "
            "of the run"
        )
    return spec.with_builder(own.model.builder)


def _shape(spec: RunSpec) -> tuple[object, ...]:
    """By which two runs are told apart whose data nobody has read here."""
    pipeline = spec.pipeline
    return (
        spec.name,
        spec.model.kind,
        pipeline.num_stages,
        pipeline.layers,
        pipeline.global_batch,
        pipeline.microbatch,
    )


def found_live(spec: RunSpec, records: Sequence[Record], links: Links) -> tuple[Live, StageTable]:
    """Raises `UsageError` where too little is known of the swarm, `SpecError`."""
    from swarmnet.training.models.registry import split_stages

    table = StageTable(spec)
    cut = cut_of([len(x) for x in split_stages(table.plan, spec.pipeline.num_stages)])
    said = [
        Said(
            r.peer_id,
            r.stage,
            r.samples_per_s,
            r.upload_bytes_per_s,
            r.last_open_s,
            r.last_exchange_s,
        )
        for r in records
        if r.is_replica
    ]
    usual = Usual(links.up, links.down, links.latency_s)
    rounds = [r.round for r in records if r.is_replica]
    batch = spec.pipeline.batch_of(median_high(rounds) if rounds else 0)
    job = replace(table.job(), global_batch=batch)
    live = live_swarm(job, cut, said, usual)
    if live is None:
        served = {r.stage for r in said}
        missing = [k for k in range(len(cut)) if k not in served]
        why = (
            f"stage {missing[0]} has no replica"
            if missing
            else "no machine says how fast it is yet; ask again after a round"
        )
        raise UsageError(f"{shown_run(spec.name, spec.run_id)} cannot be planned: {why}")
    return live, table


def live_answer(live: Live, table: StageTable, options: PlanOptions) -> LiveAnswer:
    """Blocks for as long as the search takes."""
    spec = table.spec
    counts = [live.serves.count(k) for k in range(len(live.cut))]
    flows = []
    for k, layers in enumerate(live.cut):
        replicas = [m for m, s in zip(live.machines, live.serves, strict=True) if s == k]
        found = live.costs.stage(*layers, len(live.cut), replicas)
        flows.append(0.0 if found is None else found.flow)
    stage, rate = with_one_more(live)
    moved = better_moves(live, spec.sync.replication)
    gain = 1.0 if moved is None else moved.round.tokens_per_s / live.planned.tokens_per_s
    other = better_cut(live, spec.sync.replication)
    return LiveAnswer(
        run=shown_run(spec.name, spec.run_id),
        machines=len(live.machines),
        layers=[end - first for first, end in live.cut],
        replicas=counts,
        tokens_per_s=live.tokens_per_s,
        is_measured=live.round_s > 0,
        planned_tokens_per_s=live.planned.tokens_per_s,
        poorest_stage=flows.index(min(flows)),
        one_more_stage=stage,
        one_more=rate,
        missed=most_missed(live),
        moved=gain * live.tokens_per_s if gain >= MOVES else 0.0,
        other=None if other is None else _other(live, table, other, options),
        notes=_notes(live, options),
    )


def _other(live: Live, table: StageTable, plan: Plan, options: PlanOptions) -> OtherCut:
    file = options.spec or Path("run.toml")
    addresses = " ".join(f"--join {address}" for address in options.join)
    return OtherCut(
        layers=[end - first for first, end in plan.cut],
        tokens_per_s=live.corrected(plan.round),
        fewest_replicas=min(len(plan.replicas(k)) for k in range(len(plan.cut))),
        state_bytes=_state_bytes(table, plan.cut),
        present_state_bytes=_state_bytes(table, live.cut),
        commands=[
            f"swarmnet plan {addresses} --spec {file} --write",
            f"swarmnet peer --spec {file}",
        ],
    )


def _state_bytes(table: StageTable, cut: Cut) -> float:
    """Of a replica that is alone at the largest stage, without activations."""
    needs = [table.needs(*stage, PRECISIONS[STATE_PRECISION]) for stage in cut]
    return max(n.weights + n.gradients + n.base + n.exchange + n.optimizer for n in needs)


def _notes(live: Live, options: PlanOptions) -> list[str]:
    notes = []
    if live.round_s:
        notes.append(
            f"a round took {live.round_s:.3g} s (the median of what the machines say), planned "
            f"{live.planned.seconds:.3g} s: all is corrected by that"
        )
    if live.num_assumed:
        notes.append(
            f"{counted(live.num_assumed, 'machine')} without a speed yet: taken for the middle one"
        )
    if live.num_limited:
        notes.append(
            f"{counted(live.num_limited, 'machine')} with more than ten times the speed that the "
            "middle one says: taken for ten times"
        )
    notes.append(f"links: upload as machines measured it; else {options.links}")
    return notes


def _write(options: PlanOptions, answer: LiveAnswer, spec: RunSpec) -> str:
    """Puts the other cut into the run's file. Raises `SpecError`."""
    if options.spec is None:
        raise UsageError("--write puts the other cut into the run's file; give --spec FILE too")
    if answer.other is None:
        raise SpecError("no other cut would pay; nothing is written")
    layers = tuple(answer.other.layers)
    write_values(
        options.spec,
        {
            "model": {"continues": spec.run_id[:RUN_CHARACTERS]},
            "pipeline": {"num_stages": len(layers), "layers": layers},
        },
    )
    return f"{options.spec} goes on with this run in another cut now"
