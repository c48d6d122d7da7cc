"""What `swarmnet plan` is asked: a run, and what of it is open; and the plans that answer it."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from peer.planning.cards import DISK_GB_S, TERA, card_named
from peer.planning.machines import (
    GB,
    HERE,
    Described,
    Links,
    RoundEnds,
    alone,
    sharing_links,
)
from swarmnet.errors import SpecError
from swarmnet.plurals import counted
from swarmnet.protocol.codecs import AUTO
from swarmnet.protocol.planning.choice import WORTH, Size, Way, choose
from swarmnet.protocol.planning.cost import Costs, Round
from swarmnet.protocol.planning.model import Cut, Held, Layer, Machine
from swarmnet.protocol.planning.search import OUT, Plan, best_plan, cut_of, first_fit
from swarmnet.protocol.sync_modes import DELAYED, GOSSIP, LOCAL, ZERO
from swarmnet.spec import LoraSpec, RunSpec, load_spec, parse_spec
from swarmnet.training.memory.activation_choice import FREE_PART
from swarmnet.training.memory.plan import FSDP
from swarmnet.training.memory.stage_table import MachineMemory, StageTable, memory_of

MICROBATCHES = (1, 2, 4, 8)
BATCHES = (64, 128, 256, 512, 1024)
FIXED, BEST = "as the run says", "most tokens/s that the memories allow"
MANY_PEERS = 64
"""Of more, it is not told what as many replicas of each stage would come to."""
MODEL_CONFIG = "config.json"
LIKE_THIS_ONE = 8
LOOPBACK_LINKS = Links(1e9, 1e9, 0.0001)
"""Between processes of one machine."""
QUICK_FLOPS = 2e11
"""Of a layer's passes: so many are timed as they are, of more a matrix product tells the speed."""
PRODUCT_SIZE, PRODUCTS, PRODUCT_PART = 1024, 5, 0.5
"""Training reaches about this part of what a large matrix product does."""
FOLDER_SPEC = """[model]
from = {source}
{lora}
[data]
paths = {paths}

[optimizer]
learning_rate = {learning_rate}
rounds = 1000

[pipeline]
num_stages = {num_stages}
global_batch = {global_batch}
microbatch = {microbatch}
{layers}
[sync]
mode = "{mode}"
"""
"""Of a Hugging Face folder. What it leaves to a person: the data, the rate, the rounds."""
DATA = "your-data"
LEARNING_RATE, LORA_LEARNING_RATE = 1e-5, 2e-4


@dataclass(frozen=True, slots=True)
class Asked:
    """A run, as it is asked about."""

    spec: RunSpec
    source: str
    """Its folder, where it has no file yet; else empty."""
    is_open: bool
    """Stages, microbatch and batch are to be chosen."""
    is_mode_open: bool
    codecs: frozenset[str]
    """Tables of the file that name one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A key of the run, and why it has its value."""

    key: str
    value: str
    why: str


@dataclass(slots=True)
class Found:
    """A plan, with what it was made from."""

    table: StageTable
    costs: Costs
    machines: list[Machine]
    plan: Plan
    choices: list[Choice] = field(default_factory=list)
    described: Sequence[Described] = ()
    """The machines, in the same order."""
    peers: str = ""
    """How there are peers on the machines, in words."""
    others: list[tuple[str, float]] = field(default_factory=list)
    """Other ways to have peers on machines with several cards, and their tokens/s."""
    most: float = 0.0
    """Tokens/s of the quickest plan that was found, of any size where that was open."""
    outlives: bool = False
    """The plan, the loss of any one machine."""

    @property
    def spec(self) -> RunSpec:
        """With what was chosen."""
        layers = tuple(end - first for first, end in self.plan.cut)
        pipeline = {"num_stages": len(layers), "layers": layers}
        return _with_pipeline(self.table.spec, **pipeline)

    @property
    def best(self) -> str:
        """Why it is this plan."""
        if _rate(self) >= self.most * (1 - 1e-9):
            return BEST
        words = f"within a tenth of the {BEST}, {self.most:,.0f}"
        return f"{words}; it outlives the loss of any machine" if self.outlives else words


def asked(path: Path, *, lora: bool, choose: bool) -> Asked:
    """Reads the run: a `run.toml`, a folder, or ORG/NAME of the hub. Raises `SpecError`."""
    from swarmnet.training.resolving import described

    if path.name == MODEL_CONFIG:
        raise SpecError(f"{path} is a model's, and no run; give its folder: --spec {path.parent}")
    is_file = path.suffix == ".toml" or path.is_file()
    if is_file:
        spec = load_spec(path)
        mode_open = "mode" not in spec.sync.model_fields_set
        if lora and spec.lora is None:
            spec = spec.model_copy(update={"lora": LoraSpec()})
    else:
        spec, mode_open = parse_spec(folder_text(str(path), lora=lora), source=str(path)), True
    named = {"pipeline": spec.pipeline.codec, "sync": spec.sync.codec}
    codecs = frozenset(table for table, codec in named.items() if codec != AUTO)
    source = "" if is_file else str(path)
    if choose and spec.pipeline.batch_ramp:
        raise SpecError(
            f"{path}: [pipeline] batch_ramp says how large batches are, and --choose would choose "
            "one; leave one of them out"
        )
    if choose:
        spec = _with_pipeline(spec, layers=())
    is_open = choose or not is_file
    return Asked(described(spec), source, is_open, mode_open or choose, codecs)


def folder_text(
    source: str,
    *,
    lora: bool,
    num_stages: int = 1,
    global_batch: int = BATCHES[0],
    microbatch: int = 1,
    layers: Sequence[int] = (),
    mode: str = ZERO,
) -> str:
    """A `run.toml` that begins from a folder."""
    return FOLDER_SPEC.format(
        source=_quoted(source),
        lora="\n[lora]\n" if lora else "",
        paths=_quoted(DATA),
        learning_rate=LORA_LEARNING_RATE if lora else LEARNING_RATE,
        num_stages=num_stages,
        global_batch=global_batch,
        microbatch=microbatch,
        layers=f"layers = {list(layers)}\n" if layers else "",
        mode=mode,
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _with_pipeline(spec: RunSpec, **values: object) -> RunSpec:
    return spec.model_copy(update={"pipeline": spec.pipeline.model_copy(update=values)})


def _with_mode(spec: RunSpec, mode: str) -> RunSpec:
    return spec.model_copy(update={"sync": spec.sync.model_copy(update={"mode": mode})})


@dataclass(slots=True)
class Planner:
    """Makes plans of a run for some machines."""

    described: Sequence[Described]
    links: Links
    precision: str
    """fp32, bf16, fp16, or auto: as the run says, else as each machine would choose."""
    seconds: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Of each layer, measured, by microbatch, where all machines are like this one."""
    _made: dict[Described, Machine] = field(default_factory=dict)
    _possible: dict[int, tuple[tuple[int, str], ...]] = field(default_factory=dict)

    def machine(self, one: Described, spec: RunSpec) -> Machine:
        if one not in self._made:
            wanted = spec.pipeline.precision if self.precision == "auto" else self.precision
            precision = one.precision(wanted)
            memory = MachineMemory(
                one.free_device_bytes,
                one.free_host_bytes,
                one.is_gpu,
                precision,
                cards=one.cards,
                ranks=self._ranks(spec, one.cards),
                flops_per_s=one.flops(precision),
                between_bytes_per_s=one.between_bytes_per_s,
                host_bytes_per_s=one.host_bytes_per_s,
                disk_bytes_per_s=GB * DISK_GB_S * one.part,
            )
            self._made[one] = one.machine(precision, self.links, memory)
        return self._made[one]

    def _ranks(self, spec: RunSpec, cards: int) -> tuple[tuple[int, str], ...]:
        """Of a peer on a machine with so many cards, as `MachineMemory.ranks`."""
        if cards not in self._possible:
            from swarmnet.training.ranks.cut_check import check_cut
            from swarmnet.training.ranks.fsdp import check_split

            found = [(1, "")]
            for n in range(2, cards + 1):
                even = _with_pipeline(spec, microbatch=n)  # which one it will be is open
                for local, check in (("tensor", check_cut), (FSDP, check_split)):
                    with suppress(SpecError):
                        check(even, n)
                        found.append((n, local))
            self._possible[cards] = tuple(found)
        return self._possible[cards]

    def machines(self, spec: RunSpec, more: Sequence[Described] = ()) -> list[Machine]:
        return [self.machine(one, spec) for one in (*self.described, *more)]

    def _peers(
        self, num_stages: int | None, more: Sequence[Described]
    ) -> Iterator[tuple[str, list[Described]]]:
        """The ways to have peers on the machines: one on each; where there are several cards, one
        for each card; where there are fewer machines than stages, one of several stages. With the
        words for each."""
        machines = [*self.described, *more]
        yield "one peer a machine", machines
        names = [f"machine {i}" for i in range(len(machines))]
        if any(m.cards > 1 for m in machines):
            apart = [
                m.divided(m.cards, self.links, name, by_cards=True) if m.cards > 1 else [m]
                for m, name in zip(machines, names, strict=True)
            ]
            yield "a peer for each card", sharing_links([one for ms in apart for one in ms])
        if num_stages is not None and num_stages > len(machines):
            seats = -(-num_stages // len(machines))
            divided = [
                replace(m, cards=1).divided(seats, self.links, name, by_cards=False)
                for m, name in zip(machines, names, strict=True)
            ]
            yield f"--stages {seats}", sharing_links([one for ms in divided for one in ms])

    def costs(self, table: StageTable) -> Costs:
        job = table.job()
        seconds = self.seconds.get(job.microbatch)
        if seconds is not None:  # in FLOPs that the machines do in so long
            speed = self.machine(self.described[0], table.spec).flops_per_s
            passes = (1 + job.backward) * job.microbatch
            layers = (
                replace(x, flops=s * speed / passes)
                for x, s in zip(job.layers, seconds, strict=True)
            )
            job = replace(job, layers=tuple[Layer, ...](layers))
        return Costs(job)

    def find(
        self,
        table: StageTable,
        *,
        is_open: bool,
        more: Sequence[Described] = (),
        cut: Cut | None = None,
    ) -> Found | None:
        """The best plan; None where none fits. `is_open`: whatever number of stages."""
        pipeline = table.spec.pipeline
        size = Size(pipeline.global_batch, pipeline.microbatch)
        return self._chosen(table, [size], is_open=is_open, more=more, cut=cut)

    def _chosen(
        self,
        table: StageTable,
        sizes: Sequence[Size],
        *,
        is_open: bool,
        more: Sequence[Described] = (),
        cut: Cut | None = None,
    ) -> Found | None:
        """The best plan of all sizes of a round."""
        spec = table.spec
        if cut is None and spec.pipeline.layers and not is_open:
            cut = cut_of(spec.pipeline.layers)
        stages = None if is_open else spec.pipeline.num_stages
        tables = {
            size: table.with_spec(
                _with_pipeline(spec, microbatch=size.microbatch, global_batch=size.global_batch)
            )
            for size in sizes
        }
        peers = list(self._peers(len(cut) if cut else stages, more))
        ways = [
            Way([self.machine(one, spec) for one in described], _owners(described))
            for _, described in peers
        ]
        costs = {size: self.costs(of_size) for size, of_size in tables.items()}
        chosen = choose(costs, ways, num_stages=stages, cut=cut)
        if chosen is None:
            return None
        words, described = peers[chosen.way]
        machines = list(ways[chosen.way].peers)
        found = Found(tables[chosen.size], costs[chosen.size], machines, chosen.plan)
        found.described, found.peers = described, words
        found.others = [
            (peers[i][0], rate) for i, rate in chosen.quickest.items() if i != chosen.way
        ]
        found.most, found.outlives = chosen.most, chosen.outlives
        return found

    def answer(self, question: Asked) -> Found | None:
        """The best plan with what is open chosen, each with a reason."""
        table, is_open = StageTable(question.spec), question.is_open
        pipeline = question.spec.pipeline
        sizes = [Size(pipeline.global_batch, pipeline.microbatch)]
        if is_open:
            sizes = [Size(batch, each) for batch in BATCHES for each in MICROBATCHES]
        found = self._by_mode(table, sizes, question)
        if found is None:
            return None
        sized = _sizes(found) if is_open else []
        found.choices[:0] = [*_given(found, self.precision, question), *sized]
        return found

    def _by_mode(self, table: StageTable, sizes: Sequence[Size], question: Asked) -> Found | None:
        is_open = question.is_open
        found = self._chosen(table, sizes, is_open=is_open)
        if not question.is_mode_open:
            return found
        delayed = table.with_spec(_with_mode(table.spec, DELAYED))
        if found is not None:
            each = found.table.spec.pipeline.microbatch
            sizes = [size for size in sizes if size.microbatch == each]
        other = self._chosen(delayed, sizes, is_open=is_open)
        is_worth = other is not None and (found is None or other.most > WORTH * found.most)
        chosen = other if is_worth else found
        if chosen is not None:
            why = (
                "exchanges beside the next round gain more than a tenth, and there is memory for it"
                if is_worth
                else "updates are exact, and delayed would gain less than a tenth, or does not fit"
            )
            chosen.choices.append(Choice("[sync] mode", chosen.table.spec.sync.mode, why))
        return chosen

    def needed_machines(
        self, table: StageTable, num_stages: int | None = None
    ) -> tuple[int, Described, int] | None:
        """(machines that have to come, of which kind they are, stages) with which the run would
        fit; None where no number would do. `num_stages`: a given one."""
        kind, _ = Counter(map(alone, self.described)).most_common(1)[0]
        costs, most = self.costs(table), len(table.plan.layers)
        for more in range(most + 1):
            cut = first_fit(costs, self.machines(table.spec, [kind] * more), num_stages)
            if cut is not None:
                return more, kind, len(cut)
        return None


def _owners(described: Sequence[Described]) -> list[str | int]:
    """Of each peer, the machine that it is lost with."""
    return [one.seat_of or i for i, one in enumerate(described)]


def _sizes(found: Found) -> list[Choice]:
    """Why the batch and the microbatch are what was chosen."""
    pipeline = found.table.spec.pipeline
    such = ["outlives the loss of any machine"] if found.outlives else []
    such += ["leaves none out"] if OUT not in found.plan.serves else []
    words = ", ".join([*such, "is within a tenth of the most tokens/s"])
    *batches, last = (f"{batch:,}" for batch in BATCHES)
    return [
        Choice(
            "[pipeline] microbatch",
            str(pipeline.microbatch),
            "the smallest of 1, 2, 4 and 8 that larger ones do not beat by a tenth",
        ),
        Choice(
            "[pipeline] global_batch",
            str(pipeline.global_batch),
            f"the smallest of {', '.join(batches)} and {last} with a plan that {words}",
        ),
    ]


def without_keys(found: Found) -> Found | None:
    """The same plan where no household has a key; None where there is none, or modes make no use of
    it."""
    if found.table.spec.sync.mode in (LOCAL, GOSSIP) or not any(m.has_key for m in found.machines):
        return None
    machines = [replace(m, has_key=False) for m in found.machines]
    plan = found.plan
    made = found.costs.of(plan.cut, machines, plan.serves)
    assert made is not None  # memory does not depend on it
    return replace(found, machines=machines, plan=replace(plan, round=made))


def by_compute_alone(found: Found) -> float:
    """Tokens/s of the same stages, where machines were chosen for them as if all links were alike;
    0 where they are. Of machines that are as quick either may come first: the worse choice."""
    links = [(m.up_bytes_per_s, m.down_bytes_per_s, m.latency_s, m.house) for m in found.machines]
    if len(set(links)) < 2:
        return 0.0
    up, down, _, _ = map(max, zip(*links, strict=True))
    alike = [
        replace(m, up_bytes_per_s=up, down_bytes_per_s=down, latency_s=0.0, house="", sharing=1)
        for m in found.machines
    ]
    rates = []
    for step in (1, -1):
        plan = best_plan(found.costs, alike[::step], cut=found.plan.cut)
        if plan is not None:
            made = found.costs.of(plan.cut, found.machines[::step], plan.serves)
            assert made is not None  # memory does not depend on links
            rates.append(made.tokens_per_s)
    return min(rates, default=0.0)


def _given(found: Found, precision: str, question: Asked) -> list[Choice]:
    """`precision`: as `Planner` was told."""
    spec, plan = found.table.spec, found.plan
    usual = "of what crosses the links; shown to change no loss (docs/convergence.md)"

    def codec(table: str, value: str) -> Choice:
        return Choice(f"[{table}] codec", value, FIXED if table in question.codecs else usual)

    return [
        Choice(
            "[pipeline] num_stages", str(len(plan.cut)), found.best if question.is_open else FIXED
        ),
        _layers(found, question),
        _replicas(found),
        codec("pipeline", spec.pipeline.codec),
        codec("sync", spec.sync.codec),
        *_computing(found, precision),
        *_at_machines(found),
    ]


def _layers(found: Found, question: Asked) -> Choice:
    """The cut; of a run that leaves it open, what its own one, by the layers' costs, would come
    to."""
    plan, pipeline = found.plan, question.spec.pipeline
    name, layers = "[pipeline] layers", [end - first for first, end in plan.cut]
    if question.is_open:
        return Choice(name, str(layers), found.best)
    if pipeline.layers:
        return Choice(name, str(layers), FIXED)
    from swarmnet.training.models.registry import split_stages

    own = [len(stage) for stage in split_stages(found.table.plan, pipeline.num_stages)]
    if own == layers:
        return Choice(name, str(layers), f"{found.best}, and what the run does by itself")
    made = best_plan(found.costs, found.machines, cut=cut_of(own))
    if made is None:
        words = f"{own}, as the run does by itself, does not fit"
    else:
        rate, best = made.round.tokens_per_s, plan.round.tokens_per_s
        words = f"without this line the run takes {own}: {rate:,.0f} tokens/s "
        words += f"({100 * (rate / best - 1):+.0f} %)"
    return Choice(name, str(layers), f"{found.best}; {words}")


def _replicas(found: Found) -> Choice:
    """How many each stage has; where that is uneven, what even ones would come to."""
    plan, num_stages = found.plan, len(found.plan.cut)
    counts = [plan.serves.count(k) for k in range(num_stages)]
    rest = plan.serves.count(OUT)
    if len(set(counts)) == 1:
        value = f"{counts[0]} of each stage" if num_stages > 1 else str(counts[0])
        left = f"{found.best}; why others are left out is below"
        return Choice("replicas", value, left if rest else "all peers are at work")
    of_counts: dict[int, list[int]] = {}
    for k, count in enumerate(counts):
        of_counts.setdefault(count, []).append(k)
    value = ", ".join(f"{n} of {_stages(ks)}" for n, ks in sorted(of_counts.items()))
    if len(plan.serves) > MANY_PEERS:
        return Choice("replicas", value, found.best)
    even = _evened(found)
    if even is None:
        return Choice("replicas", value, f"{found.best}; no other peer fits there")
    numbers = sorted({even.serves.count(k) for k in range(num_stages)})
    if even.serves == plan.serves:
        return Choice("replicas", value, f"{found.best}; more even they cannot be")
    many = " or ".join(map(str, numbers))
    rate, now = even.round.tokens_per_s, plan.round.tokens_per_s
    compared = f"{many} of each would have {rate:,.0f} tokens/s ({100 * (rate / now - 1):+.0f} %)"
    copies = found.table.spec.sync.replication
    if min(counts) < copies and max(counts) - min(counts) > 1:
        compared += (
            f", as peers make it that are told no --stage: {counted(copies, 'copy')} of a stage "
            "come before speed, so that it outlives a machine"
        )
    return Choice("replicas", value, f"{found.best}; {compared}")


def _evened(found: Found) -> Plan | None:
    """The plan with machines moved from stages that have most to those that have fewest, until they
    have as many, or one more; the best move each time. None where a stage can get none."""
    plan, costs, num_stages = found.plan, found.costs, len(found.plan.cut)
    serves, made = list(plan.serves), plan.round
    while True:
        counts = [serves.count(k) for k in range(num_stages)]
        most, fewest = max(counts), min(counts)
        if most - fewest < 2:
            return replace(plan, serves=tuple(serves), round=made)
        best: tuple[float, list[int], Round] | None = None
        for i, k in enumerate(serves):
            for there in range(num_stages):
                if k == OUT or counts[k] != most or counts[there] != fewest:
                    continue
                moved = [*serves[:i], there, *serves[i + 1 :]]
                found_round = costs.of(plan.cut, found.machines, moved)
                if found_round is None:
                    continue
                if best is None or found_round.tokens_per_s > best[0]:
                    best = found_round.tokens_per_s, moved, found_round
        if best is None:
            return None
        _, serves, made = best


def _computing(found: Found, wanted: str) -> list[Choice]:
    """In which precision machines compute, and what they keep meanwhile. `wanted`: precision, as
    `Planner` was told."""
    pipeline, cut = found.table.spec.pipeline, found.plan.cut
    precisions: dict[str, set[str]] = {}
    policies: dict[str, dict[int, set[str]]] = {}
    for k, stage in enumerate(cut):
        for i in found.plan.replicas(k):
            machine = found.machines[i]
            held = found.costs.held(*stage, len(cut), machine)
            assert held is not None
            precisions.setdefault(memory_of(machine).precision, set()).add(machine.name)
            policies.setdefault(held.activations, {}).setdefault(k, set()).add(machine.name)
    of_machines = {name: ", ".join(sorted(names)) for name, names in precisions.items()}
    several = Counter(k for of in policies.values() for k in of)
    of_stages = {}
    for name, of in policies.items():
        alike = [k for k in sorted(of) if several[k] == 1]
        words = [_stages(alike)] if alike else []
        words += [f"{', '.join(sorted(of[k]))} of stage {k}" for k in sorted(of) if several[k] > 1]
        of_stages[name] = ", ".join(words)
    chosen = "what suits each device: bf16, on GPUs without it fp16, and fp32 on a CPU"
    said = "as --precision says" if wanted != "auto" else FIXED
    is_chosen = wanted == pipeline.precision == "auto"
    fits = (
        f"of keep, blocks, recompute and offload, the first that fits into {100 * FREE_PART:.0f} % "
        "of the free memory, else what has room for most microbatches"
    )
    return [
        Choice("[pipeline] precision", _parted(of_machines), chosen if is_chosen else said),
        Choice(
            "[pipeline] activations",
            _parted(of_stages),
            fits if pipeline.activations == "auto" else FIXED,
        ),
    ]


def _stages(numbers: Sequence[int]) -> str:
    return f"{'stage' if len(numbers) == 1 else 'stages'} {', '.join(map(str, numbers))}"


def _parted(values: Mapping[str, str]) -> str:
    """A value; of several, each with where it is so."""
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(f"{value} ({where})" for value, where in sorted(values.items()))


def _at_machines(found: Found) -> list[Choice]:
    """What machines are told when they join, where it is not what they would do by themselves or
    they have several cards."""
    choices = []
    peers = [found.peers, *(words for words, _ in found.others)]
    if len(peers) > 1 or peers[0].startswith("--"):
        others = ", ".join(f"{words} would have {rate:,.0f}" for words, rate in found.others)
        why = f"tokens/s: {others}" if others else "the run has more stages than there are machines"
        choices.append(Choice("swarmnet peer", found.peers, why))
    reasons: dict[tuple[str, str], dict[int, str]] = {}
    for k, (first, end) in enumerate(found.plan.cut):
        for i in found.plan.replicas(k):
            machine, one = found.machines[i], found.described[i]
            held = found.costs.held(first, end, len(found.plan.cut), machine)
            assert held is not None
            told = _told(held) or ("--tp 1" if one.cards > 1 else "")
            if told:
                why = _why(held, found, machine, (first, end))
                reasons.setdefault((one.name, told), {}).setdefault(k, why)
    for (name, told), by_stage in reasons.items():
        stages = ", ".join(map(str, by_stage))
        where = f"swarmnet peer on {name}, stage {stages}"
        choices.append(Choice(where, told, next(iter(by_stage.values()))))
    return choices


def _told(held: Held) -> str:
    """The options of its peer."""
    words = [f"--tp {held.ranks}"] if held.ranks > 1 else []
    words += ["--local fsdp"] if held.local == FSDP else []
    words += [f"--weights-memory {held.weights}"] if held.weights != "device" else []
    return " ".join(words)


def _why(held: Held, found: Found, machine: Machine, stage: tuple[int, int]) -> str:
    """With what it costs, of a microbatch."""
    job = found.costs.job
    flops = found.costs.flops(*stage) * job.microbatch
    computing_s = held.computing_s(flops, job.backward, machine.flops_per_s)
    of = f"of a microbatch, {computing_s:.3g} s are computing"
    if held.weights != "device":
        return (
            "it has no room for the stage in another way: each layer's weights come for its part "
            f"of a pass; {of}, and {held.moved_s:.3g} s copies beside it"
        )
    if held.local == FSDP:
        return f"cards hold parts of each layer; {of}, and {held.moved_s:.3g} s copies beside it"
    if held.ranks > 1:
        between_s = held.between_s * job.microbatch
        return f"cards divide each layer; {of}, and {between_s:.3g} s sums between cards"
    return "other ways to use several cards do not fit, are slower, or do not go with the model"


def _rate(found: Found) -> float:
    return found.plan.round.tokens_per_s


@dataclass(frozen=True, slots=True)
class Timed:
    """This machine, as a plan takes it."""

    described: list[Described]
    seconds: dict[int, tuple[float, ...]]
    """Of each layer, by microbatch, where they were measured."""


def like_this_one(spec: RunSpec, precision: str, device: str = "auto") -> Timed:
    """Eight machines with this one's free memory and speed. Blocks."""
    return _timed(spec, precision, device, "this-machine", LIKE_THIS_ONE, None)


def this_one(spec: RunSpec, precision: str, device: str = "auto") -> Timed:
    """This machine alone. Blocks."""
    return _timed(spec, precision, device, "this-machine", 1, None)


def on_this_one(spec: RunSpec, precision: str, device: str, num_peers: int) -> Timed:
    """So many peers on this machine, as `swarmnet local` starts them: they share its cores and its
    memory, and are timed as they will work, all at once. Blocks."""
    return _timed(spec, precision, device, HERE, num_peers, num_peers)


def _timed(
    spec: RunSpec, precision: str, device: str, name: str, count: int, num_peers: int | None
) -> Timed:
    """`num_peers`: that share this machine; None where each has one like it."""
    import psutil
    import torch

    import swarmnet.training.accelerators as accelerators
    from swarmnet.runtime.computing import free_bytes_of
    from swarmnet.training.computing import DTYPES, choose_precision
    from swarmnet.training.layer_costs import measure_layers
    from swarmnet.training.models.base import describe_parameters, num_parameters
    from swarmnet.training.models.registry import model_plan
    from swarmnet.training.optimizer.measured import measure_round_end

    if device == "auto":
        device = accelerators.kind()
    is_gpu = device != "cpu"
    dtype = DTYPES[choose_precision(spec, precision, device)]
    microbatch = spec.pipeline.microbatch
    plan = model_plan(spec)
    passes = microbatch * (2.0 if plan.has_base else 3.0)
    shared = _Shared(num_peers or 1, is_gpu)
    seconds: dict[int, tuple[float, ...]] = {}

    def measure() -> list[float]:
        return measure_layers(
            plan,
            microbatch=microbatch,
            seed=spec.seed,
            dtype=dtype,
            device=device,
            clock=shared.clock if num_peers else time.perf_counter,
            of=median if num_peers else min,
        )

    def ends() -> RoundEnds | None:
        parameters = num_parameters(describe_parameters(plan.layers)) // spec.pipeline.num_stages
        clock = shared.clock if num_peers else time.perf_counter
        took = None if is_gpu else measure_round_end(spec, max(1, parameters), clock=clock)
        return None if took is None else RoundEnds(*(1 / (shared.slower * s) for s in took))

    with shared.at_work(measure if num_peers else None):
        ended = ends()
        if passes * max(x.cost for x in plan.layers) <= QUICK_FLOPS:
            found = [shared.slower * s for s in measure()]
            seconds[microbatch] = tuple(found)
            speed = passes * sum(x.cost for x in plan.layers) / sum(found)
            note = "this machine's layers were timed"
        else:
            product = _product_flops_per_s(device, choose_precision(spec, precision, device))
            speed = PRODUCT_PART * product / shared.slower
            note = "this machine's speed: half of what a matrix product has"
    host = psutil.virtual_memory().available / GB / shared.num_peers
    maker, _, _ = accelerators.name_of(torch.device(device)).partition(",")
    one = Described(
        name,
        free_bytes_of(device) / GB / shared.num_peers if is_gpu else host,
        host,
        is_gpu,
        card_named(maker) if is_gpu else None,
        speed,
        note if num_peers is None else f"{note}, with {counted(num_peers, 'peer')} at work on it",
        ends=ended,
        links=LOOPBACK_LINKS if num_peers else None,
        is_free=True,
    )
    return Timed([one] * count, seconds)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Peers that share a machine."""

    num_peers: int
    is_gpu: bool

    @property
    def threads(self) -> int:
        """Of each, as `swarmnet local` gives them."""
        return max(1, (os.cpu_count() or 1) // self.num_peers)

    @property
    def clock(self) -> Callable[[], float]:
        """Of one thread's own work, where there is one: other programs do not count."""
        return time.thread_time if self.threads == 1 and not self.is_gpu else time.perf_counter

    @property
    def at_once(self) -> int:
        """Peers that have all their threads at once."""
        if self.is_gpu:
            return 1
        return max(1, min(self.num_peers, (os.cpu_count() or 1) // self.threads))

    @property
    def slower(self) -> float:
        """Than while others wait: all peers work in turns."""
        return self.num_peers / self.at_once

    @contextmanager
    def at_work(self, work: Callable[[], object] | None) -> Iterator[None]:
        """The others do what is timed in this context, where there is something to do."""
        import torch

        if work is None:
            yield
            return
        before, is_over = torch.get_num_threads(), threading.Event()

        def again() -> None:
            while not is_over.is_set():
                work()

        torch.set_num_threads(self.threads)
        others = [threading.Thread(target=again) for _ in range(self.at_once - 1)]
        for other in others:
            other.start()
        try:
            yield
        finally:
            is_over.set()
            for other in others:
                other.join()
            torch.set_num_threads(before)


def _product_flops_per_s(device: str, precision: str) -> float:
    import torch

    from swarmnet.training.computing import DTYPES

    a = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=DTYPES[precision], device=device)
    best = float("inf")
    for _ in range(PRODUCTS):
        started = time.perf_counter()
        b = a @ a
        b[0, 0].item()  # waits for it
        best = min(best, time.perf_counter() - started)
    return 2 * PRODUCT_SIZE**3 / best


def tera(flops_per_s: float) -> str:
    """As people read it."""
    return f"{flops_per_s / TERA:.3g} TFLOP/s"
