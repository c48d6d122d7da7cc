"""`swarmnet plan`: whether these machines can train a run, how fast, and what would help."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from rich.console import Console

from peer.machine.measured_layers import write_values
from peer.observe.table import WholeTable
from peer.options import PlanOptions, PrecisionName
from peer.planning.answer import (
    Answer,
    answer_of,
    compared,
    household_choice,
    late,
    left_out,
    links_choice,
    smaller_batches,
)
from peer.planning.machines import (
    Described,
    alone,
    in_houses,
    peers_here,
    read_links,
    read_machines,
)
from peer.planning.question import (
    Asked,
    Found,
    Planner,
    asked,
    by_compute_alone,
    folder_text,
    like_this_one,
    on_this_one,
    without_keys,
)
from peer.planning.schedules import show_schedules
from swarmnet.errors import SpecError, UsageError
from swarmnet.files import write_whole
from swarmnet.plurals import counted
from swarmnet.protocol.planning.model import Held
from swarmnet.protocol.planning.search import OUT, cut_of, even_cuts
from swarmnet.protocol.sync_modes import DELAYED, LOCAL, ZERO
from swarmnet.runtime.text import size
from swarmnet.spec import LoraSpec, RunSpec
from swarmnet.training.memory.plan import FP16, FP32
from swarmnet.training.memory.stage_table import StageTable, memory_of

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
NEW_FILE = Path("run.toml")
GAIN = 1.05
"""A change that brings less is not worth a line."""


def show_plan(options: PlanOptions, console: Console) -> bool:
    """Prints the answer, and writes it where that is wanted; False where it is that nothing fits.
    Raises `SpecError`, `UsageError`."""
    tokens, links = read_tokens(options.tokens), read_links(options.links)
    num_here = peers_here(options.machines)
    machines = [] if num_here or not options.machines else read_machines(options.machines)
    question = asked(options.file, lora=options.lora, choose=options.choose)
    seconds: dict[int, tuple[float, ...]] = {}
    if not machines:
        about = question.spec, options.precision, options.device
        timed = on_this_one(*about, num_here) if num_here else like_this_one(*about)
        machines, seconds = timed.described, timed.seconds
    machines = in_houses(machines, links)
    planner = Planner(machines, links, options.precision, seconds)
    found = planner.answer(question)
    notes = [
        *dict.fromkeys(m.note for m in machines if m.note),
        f"links: {options.links}, where a machine has none of its own; without one microbatch's "
        "losses, repeats and newcomers",
    ]
    if found is None:
        impossible, changes = _impossible(planner, question)
        _say_impossible(options, console, impossible, changes, notes)
        return False
    if options.schedules or options.picture is not None:
        show_schedules(found, console, picture=options.picture, as_json=options.as_json)
        return True
    kind = _usual_kind(found, machines)
    more = planner.find(found.table, is_open=question.is_open, more=[kind])
    answer = answer_of(found, wanted_tokens=tokens, more=more, kind=kind.name)
    without = without_keys(found)
    household = None if without is None else household_choice(answer, without)
    by_links = links_choice(answer, by_compute_alone(found))
    answer = replace(answer, choices=[*answer.choices, *filter(None, [household, by_links])])
    helps = [
        *smaller_batches(found),
        *late(found),
        *left_out(found),
        *_helps(planner, question, found),
    ]
    answer = replace(answer, helps=helps, notes=notes)
    if options.write:
        written = _write(options, question, found)
        answer = replace(answer, notes=[*notes, written])
    if not options.as_json:
        _say(console, [answer.verdict])
        console.print(_table(answer))
        _say(console, answer.lines())
    explained = {"memory": _explained(options, console, found)} if options.explain else {}
    if options.as_json:
        values = {"fits": True, "verdict": answer.verdict, **asdict(answer), **explained}
        console.print_json(json.dumps(values), ensure_ascii=True)
    return True


def _explained(options: PlanOptions, console: Console, found: Found) -> dict[str, object] | None:
    """The memory of a replica of the plan's stages by formula, in the precision of the first one's
    machine; where stages have different numbers of replicas, of one with fewest."""
    from peer.planning.memory_tables import show_tables_of

    plan = found.plan
    replicas = min(len(plan.replicas(k)) for k in range(len(plan.cut)))
    precision = memory_of(found.machines[plan.replicas(0)[0]]).precision
    about = replace(options, replicas=replicas, precision=cast(PrecisionName, precision))
    return show_tables_of(found.spec, about, console)


def read_tokens(text: str) -> float:
    """Of `--tokens`. Raises `UsageError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMBTmbt]?)", text.strip())
    number = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
    if not 0 < number < 1e18:
        raise UsageError(f"--tokens {text!r}: a number of tokens, such as 500M or 1B")
    return number


def _usual_kind(found: Found, machines: Sequence[Described]) -> Described:
    """Of which there are most at work; of all, where peers there have a part of a machine. Behind a
    link of its own."""
    serves = zip(found.described, found.plan.serves, strict=True)
    at_work = Counter(alone(one) for one, stage in serves if stage != OUT and one in machines)
    return (at_work or Counter(map(alone, machines))).most_common(1)[0][0]


def _say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _table(answer: Answer) -> WholeTable:
    has_host = any(r.is_gpu for r in answer.rows)
    names = ("stage", "layers", "device", *(("host",) * has_host), "activ.", "up/day", "down/day")
    rows = []
    for r in answer.rows:
        host = _of(r.host_bytes, r.host_room) if r.is_gpu else ""
        rows.append(
            (
                f"{r.count} x {r.machine}",
                str(r.stage),
                f"{r.layers[0]}-{r.layers[1] - 1}",
                _of(r.device_bytes, r.device_room),
                *((host,) * has_host),
                r.activations,
                *(size(x) for x in (r.up_per_day, r.down_per_day)),
            )
        )
    return WholeTable(("machine", *names), rows)


def _of(used: float, room: float) -> str:
    return f"{used / 1e9:.3g}/{room / 1e9:.3g} GB"


def _helps(planner: Planner, question: Asked, found: Found) -> list[str]:
    """Changes of what the run fixes that would gain: number of stages, mode, codec."""
    spec, now = found.table.spec, found.plan.round.tokens_per_s
    lines = []

    def tried(name: str, other: Found | None, beside: str = "") -> None:
        if other is not None and other.plan.round.tokens_per_s > GAIN * now:
            lines.append(f"{name}: {compared(other.plan.round.tokens_per_s, now)}{beside}")

    if not question.is_open:
        freed = planner.find(found.table, is_open=True)
        if freed is not None and len(freed.plan.cut) != len(found.plan.cut):
            tried(f"with num_stages = {len(freed.plan.cut)}", freed)
    cut = found.plan.cut
    for mode in (DELAYED, LOCAL):
        if mode != spec.sync.mode and spec.sync.mode != LOCAL:
            changed = spec.sync.model_copy(update={"mode": mode})
            table = found.table.with_spec(spec.model_copy(update={"sync": changed}))
            beside = "; the model learns otherwise (docs/convergence.md)"
            tried(
                f'with [sync] mode = "{mode}"', planner.find(table, is_open=False, cut=cut), beside
            )
    if spec.pipeline.codec != "int4":
        changed_pipeline = spec.pipeline.model_copy(update={"codec": "int4"})
        table = found.table.with_spec(spec.model_copy(update={"pipeline": changed_pipeline}))
        tried('with [pipeline] codec = "int4"', planner.find(table, is_open=False, cut=cut))
    return lines


def _impossible(planner: Planner, question: Asked) -> tuple[str, list[str]]:
    """What is impossible, and changes that make it possible, the cheapest first."""
    spec = question.spec
    table = StageTable(spec)
    machines = planner.machines(spec)
    count = len(machines)
    stages = min(count, len(table.plan.layers)) if question.is_open else spec.pipeline.num_stages
    adapters = "with adapters" if table.plan.has_base else "in full training"
    parameters = sum(table.trained) - table.tied
    names = ", ".join(f"{n} x {m.name}" for m, n in Counter(planner.described).items())
    changes = _changes(planner, question, table)
    if stages > count:
        what = (
            f"impossible: {counted(stages, 'stage')} on {counted(count, 'machine')}: as peers of "
            f"{counted(-(-stages // count), 'stage')} each they have not memory enough"
        )
    else:
        what = (
            f"impossible: {_parameters(parameters, table)} {adapters} on {names}: with "
            f"{counted(stages, 'stage')} one needs {_least_short(planner, spec, table, stages)}"
        )
    return what, changes


def _parameters(trained: int, table: StageTable) -> str:
    if not table.plan.has_base:
        return f"a model of {trained / 1e9:.3g} B parameters"
    return f"{trained / 1e6:.3g} M trained parameters"


def _least_short(planner: Planner, spec: RunSpec, table: StageTable, stages: int) -> str:
    """What the stage needs that lacks most, in the cut that lacks least of those with even stages,
    where larger stages are on machines with more memory."""
    costs = planner.costs(table)

    def needed(stage: tuple[int, int], one: Described) -> tuple[float, Held]:
        """The part of its memory, and what it is."""
        held = table.needed(*stage, stages, planner.machine(one, spec).memory)
        host = held.host_bytes / one.free_host_bytes if one.is_gpu else 0.0
        return max(held.device_bytes / one.free_device_bytes, host), held

    cuts = [cut_of(spec.pipeline.layers)] if spec.pipeline.layers else even_cuts(costs, stages)
    found: list[tuple[float, Held, Described]] = []
    for cut in cuts:
        usual = max(planner.described, key=lambda one: one.free_device_bytes)
        order = sorted(cut, key=lambda stage: -needed(stage, usual)[0])
        kinds = {one: needed(order[0], one)[0] for one in planner.described}
        roomy = sorted(planner.described, key=kinds.__getitem__)
        found.append(
            max(
                ((*needed(stage, one), one) for stage, one in zip(order, roomy, strict=False)),
                key=lambda x: x[0],
            )
        )
    _, held, one = min(found, key=lambda x: x[0])
    device = f"{size(held.device_bytes)} of the {size(one.free_device_bytes)} that"
    if not one.is_gpu:
        return f"{device} a {one.name} has free"
    return (
        f"{device} a {one.name} has on the device, and {size(held.host_bytes)} of "
        f"{size(one.free_host_bytes)} of main memory"
    )


def _changes(planner: Planner, question: Asked, table: StageTable) -> list[str]:
    spec, found = question.spec, []
    if any(memory_of(m).precision == FP16.name for m in planner.machines(spec)):
        # weights that lie elsewhere are not for fp16
        exact = Planner(planner.described, planner.links, FP32.name)
        if exact.find(table, is_open=question.is_open) is not None:
            found.append("--precision fp32")

    def possible(changed: RunSpec, *, is_open: bool) -> int:
        """Stages of the plan that fits; 0 where none does."""
        plan = planner.find(table.with_spec(changed), is_open=is_open)
        return 0 if plan is None else len(plan.plan.cut)

    pipeline = spec.pipeline
    if pipeline.activations not in ("auto", "blocks"):
        blocks = pipeline.model_copy(update={"activations": "blocks"})
        if possible(spec.model_copy(update={"pipeline": blocks}), is_open=question.is_open):
            found.append('activations = "blocks"')
    free = pipeline.model_copy(update={"activations": "auto", "layers": ()})
    freed = spec.model_copy(update={"pipeline": free})
    freed_stages = 0 if question.is_open else possible(freed, is_open=True)
    if freed_stages:
        found.append(f"num_stages = {freed_stages}")
    if pipeline.microbatch > 1 and not found:
        small = spec.model_copy(update={"pipeline": free.model_copy(update={"microbatch": 1})})
        if stages := possible(small, is_open=True):
            found.append(f"microbatch = 1 and num_stages = {stages}")
    if spec.lora is None and spec.model.kind == "transformers" and spec.model.source:
        found += _with_adapters(planner, spec)
    if spec.sync.mode == DELAYED:
        in_step = spec.model_copy(update={"sync": spec.sync.model_copy(update={"mode": ZERO})})
        if possible(in_step, is_open=question.is_open):
            found.append(f'[sync] mode = "{ZERO}"')
    return found + _with_more(planner, question, table.with_spec(freed), bool(freed_stages))


def _with_more(
    planner: Planner, question: Asked, table: StageTable, is_possible: bool
) -> list[str]:
    """Further machines that make the run possible. `is_possible`: with another number of stages it
    is without any."""
    stages = None if question.is_open else table.spec.pipeline.num_stages
    needed = planner.needed_machines(table, stages)
    if needed is not None and needed[0]:
        return [_more(planner, needed[0], needed[1])]
    if needed is not None or is_possible or question.is_open:
        return []
    needed = planner.needed_machines(table)
    if needed is None:
        return []
    more, kind, number = needed
    return [f"num_stages = {number} and {_more(planner, more, kind)}"]


def _more(planner: Planner, more: int, kind: Described) -> str:
    in_all = counted(len(planner.described) + more, "machine")
    return f"{more} more {kind.name} ({in_all} in all)"


def _with_adapters(planner: Planner, spec: RunSpec) -> list[str]:
    """`[lora]`, where it makes the run possible on these machines, or on few more."""
    from swarmnet.training.resolving import described

    adapted = described(parse_lora(spec))
    free = adapted.pipeline.model_copy(update={"layers": ()})
    table = StageTable(adapted.model_copy(update={"pipeline": free}))
    plan = planner.find(table, is_open=True)
    if plan is not None:
        stages = len(plan.plan.cut)
        rate = plan.plan.round.tokens_per_s
        return [f"[lora] and num_stages = {stages} (then about {rate:,.0f} tokens/s)"]
    needed = planner.needed_machines(table)
    if needed is None:
        return []
    in_all = counted(len(planner.described) + needed[0], "machine")
    return [f"[lora], num_stages = {needed[2]} and {in_all} in all"]


def parse_lora(spec: RunSpec) -> RunSpec:
    """With adapters of the usual kind; its config is read again, for their names."""
    model = spec.model.model_copy(update={"config": {}})
    return spec.model_copy(update={"lora": LoraSpec(), "model": model})


def _say_impossible(
    options: PlanOptions, console: Console, what: str, changes: list[str], notes: list[str]
) -> None:
    wanted = "possible with " + ", or with ".join(changes) if changes else "no change that is tried"
    line = f"{what}; {wanted}"
    if options.write:
        raise SpecError(f"{line}; nothing is written")
    if options.as_json:
        values = {"fits": False, "verdict": line, "changes": changes, "notes": notes}
        console.print_json(json.dumps(values), ensure_ascii=True)
        return
    _say(console, [line, *notes])


def _write(options: PlanOptions, question: Asked, found: Found) -> str:
    """Puts what was chosen into the file. Raises `SpecError`."""
    spec = found.spec
    pipeline = {
        "num_stages": spec.pipeline.num_stages,
        "layers": spec.pipeline.layers,
        "global_batch": spec.pipeline.global_batch,
        "microbatch": spec.pipeline.microbatch,
    }
    if not question.source:
        tables: dict[str, dict[str, object]] = {"pipeline": pipeline}
        if question.is_mode_open:
            tables["sync"] = {"mode": spec.sync.mode}
        write_values(options.file, tables)
        return f"{options.file} has this plan now"
    if NEW_FILE.exists():
        raise SpecError(f"{NEW_FILE} is there already; move it away, or plan it with --spec")
    text = folder_text(
        question.source,
        lora=spec.lora is not None,
        num_stages=spec.pipeline.num_stages,
        global_batch=spec.pipeline.global_batch,
        microbatch=spec.pipeline.microbatch,
        layers=spec.pipeline.layers,
        mode=spec.sync.mode,
    )
    try:
        write_whole(NEW_FILE, text)
    except OSError as e:
        raise SpecError(f"{NEW_FILE} cannot be written: {e.strerror}") from None
    return f"{NEW_FILE} is written: name the data in it, and look at learning_rate and rounds"
