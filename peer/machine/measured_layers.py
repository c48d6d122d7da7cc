"""`swarmnet plan --measure`: cuts a run's layers into stages by what they take on this machine.

The cut is a part of the spec, and so of the run's id: only who starts a run can choose it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from peer.options import PlanOptions
from swarmnet.errors import SpecError
from swarmnet.files import text_of, write_whole
from swarmnet.plurals import counted
from swarmnet.spec import RunSpec, load_spec, parse_spec


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut the layers into stages."""

    layers: tuple[int, ...]
    """Of each stage."""
    slowest_s: float
    """Seconds that the slowest stage takes for a microbatch, by what was measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a machine found."""

    seconds: tuple[float, ...]
    """Of each layer, forward and backward of one microbatch."""
    present: Cut
    """What the run would do: as its spec says, else by estimated cost."""
    best: Cut
    where: str
    """Device and precision."""


def measure_cut(spec: RunSpec, *, precision: str, device: str) -> Measured:
    """Runs every kind of layer a few times. Raises `SpecError`. Blocks."""
    import swarmnet.training.accelerators as accelerators
    from swarmnet.training.computing import DTYPES, choose_precision
    from swarmnet.training.layer_costs import measure_layers
    from swarmnet.training.models.registry import model_plan, split_counts, split_stages

    if device == "auto":
        device = accelerators.kind()
    name = choose_precision(spec, precision, device)
    num_stages = spec.pipeline.num_stages
    pipeline = spec.pipeline.model_copy(update={"layers": ()})
    plan = model_plan(spec.model_copy(update={"pipeline": pipeline}))
    seconds = measure_layers(
        plan,
        microbatch=spec.pipeline.microbatch,
        seed=spec.seed,
        dtype=DTYPES[name],
        device=device,
    )
    present = spec.pipeline.layers
    if sum(present) != len(seconds):
        present = tuple(len(stage) for stage in split_stages(plan, num_stages))
    best = split_counts(plan, seconds, num_stages)
    return Measured(
        tuple(seconds), _cut(present, seconds), _cut(best, seconds), f"{device}, {name}"
    )


def _cut(layers: Sequence[int], seconds: Sequence[float]) -> Cut:
    sums = list(accumulate(seconds, initial=0.0))
    ends = list(accumulate(layers, initial=0))
    slowest = max(sums[b] - sums[a] for a, b in pairwise(ends))
    return Cut(tuple(layers), slowest)


def show_measured(options: PlanOptions, console: Console) -> None:
    """Measures and prints, and puts the cut into the file where that is wanted. Raises
    `SpecError`."""
    from swarmnet.training.resolving import described

    if options.file.is_dir():
        raise SpecError(
            f"--measure cuts a run's file, and {options.file} is a folder; make a file of it with "
            f"swarmnet plan --spec {options.file} --write"
        )
    spec = described(load_spec(options.file))
    found = measure_cut(spec, precision=options.precision, device=options.device)
    if options.write:
        write_layers(options.file, found.best.layers)
    if options.as_json:
        values = {
            "layer_s": found.seconds,
            "layers": found.best.layers,
            "slowest_stage_s": found.best.slowest_s,
            "present_layers": found.present.layers,
            "present_slowest_stage_s": found.present.slowest_s,
            "where": found.where,
        }
        console.print_json(json.dumps(values), ensure_ascii=True)
        return
    is_given = found.present.layers == spec.pipeline.layers
    means = "its [pipeline] layers" if is_given else "estimated cost"
    for line in (
        f"{counted(len(found.seconds), 'layer')}, a microbatch of {spec.pipeline.microbatch} on "
        f"{found.where}: {_milliseconds(min(found.seconds))} to "
        f"{_milliseconds(max(found.seconds))} each",
        f"cut by {means}: {list(found.present.layers)}, the slowest stage takes "
        f"{_milliseconds(found.present.slowest_s)}",
        f"cut as measured: {list(found.best.layers)}, the slowest stage takes "
        f"{_milliseconds(found.best.slowest_s)}",
        f"{options.file}: [pipeline] has this cut now"
        if options.write
        else "to use it, put this into [pipeline] before the run starts (or --write):",
    ):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if not options.write:
        line = f"layers = {list(found.best.layers)}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def write_layers(path: Path, layers: Sequence[int]) -> None:
    """Puts `layers` into the `[pipeline]` of a spec's file, all else left as it is. Raises
    `SpecError` where that cannot be done."""
    write_values(path, {"pipeline": {"layers": tuple(layers)}})


def write_values(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts values into tables of a spec's file, all else left as it is. Raises `SpecError` where
    that cannot be done."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise SpecError(f"cannot read {path}: {e.strerror}") from None
    written = text_of(raw, path, SpecError)
    before = written.replace("\r\n", "\n")
    after, wanted = before, parse_spec(before)
    for table, values in tables.items():
        for key, value in values.items():
            after = _with_entry(after, table, key, _toml(value))
        changed = getattr(wanted, table).model_copy(update=dict(values))
        wanted = wanted.model_copy(update={table: changed})
    if parse_spec(after) != wanted:
        entries = "; ".join(
            f"[{table}] {key} = {_toml(value)}"
            for table, values in tables.items()
            for key, value in values.items()
        )
        tables_said = ", ".join(f"[{table}]" for table in tables)
        raise SpecError(
            f"{path}: {tables_said} is written in a way that cannot be edited; put {entries} into "
            "it by hand"
        )
    if before != written:
        after = after.replace("\n", "\r\n")
    mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
    try:
        write_whole(path, mark + after.encode())
    except OSError as e:
        raise SpecError(f"{path} cannot be written: {e.strerror}") from None


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _with_entry(text: str, name: str, key: str, value: str) -> str:
    """Replaces the entry of a table, or adds it below the table's head, or adds the table."""
    entry = f"{key} = {value}"
    head = re.search(rf"^[ \t]*\[[ \t]*{name}[ \t]*\].*$", text, re.MULTILINE)
    if head is None:
        return f"{text.rstrip()}\n\n[{name}]\n{entry}\n"
    rest = text[head.end() :]
    table = re.search(r"^[ \t]*\[", rest, re.MULTILINE)
    end = table.start() if table else len(rest)
    own, others = rest[:end], rest[end:]
    present = rf"^[ \t]*{key}[ \t]*=[ \t]*(?:\[[^\]]*\]|\"[^\"\n]*\"|'[^'\n]*'|[^\s#\[\"']+)"
    own, replaced = re.subn(present, lambda _: entry, own, count=1, flags=re.MULTILINE)
    if not replaced:
        own = f"\n{entry}{own}"
    return text[: head.end()] + own + others


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
