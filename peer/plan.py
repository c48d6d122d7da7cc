"""`swarmnet plan`: what a replica of each stage of a run will hold in memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from swarmnet.spec import RunSpec, load_spec
from swarmnet.training.activation_choice import POLICIES
from swarmnet.training.memory_plan import (
    PRECISIONS,
    Precision,
    StageMemory,
    optimizer_share,
    plan_memory,
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Of the command line."""

    spec: Path
    replicas: int
    in_flight: int
    precision: str
    as_json: bool


def show_plan(options: PlanOptions, console: Console) -> None:
    """Prints the table. Raises `SpecError`."""
    spec = load_spec(options.spec)
    precision = precision_of(spec, options)

    def rows_of(policy: str | None) -> list[StageMemory]:
        return plan_memory(
            spec,
            num_replicas=options.replicas,
            in_flight=options.in_flight,
            precision=precision,
            activations=policy,
        )

    rows = rows_of(None)
    policies: dict[str, list[StageMemory]] = {policy: rows_of(policy) for policy in POLICIES}
    if options.as_json:
        stages = [
            asdict(r)
            | {"state": r.state, "total": r.total}
            | {"by_policy": {p: found[r.stage].activations for p, found in policies.items()}}
            for r in rows
        ]
        plan = {"replicas": options.replicas, "precision": precision.name, "stages": stages}
        console.print_json(json.dumps(plan))
        return
    console.print(_table(rows))
    console.print(_policies(policies))
    for line in _formulae(spec, options, precision):
        console.print(line, soft_wrap=True)


def precision_of(spec: RunSpec, options: PlanOptions) -> Precision:
    """What the person asked for, else what the run says, on a machine without a GPU."""
    from swarmnet.training.computing import choose_precision

    name = options.precision
    return PRECISIONS[choose_precision(spec) if name == "auto" else name]


def _policies(policies: dict[str, list[StageMemory]]) -> Table:
    table = Table(
        title="Activations by policy", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("stage")
    for policy in policies:
        table.add_column(policy, justify="right", no_wrap=True)
    for rows in zip(*policies.values(), strict=True):
        shown = ("?" if r.activations is None else size(r.activations) for r in rows)
        table.add_row(str(rows[0].stage), *shown)
    return table


def _table(rows: list[StageMemory]) -> Table:
    table = Table(
        title="Memory of one replica", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("stage")
    for name in (
        "params",
        "weights",
        "grads",
        "optimizer",
        "activ.",
        "total",
        "no ZeRO",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        activations = "?" if r.activations is None else size(r.activations)
        table.add_row(
            str(r.stage),
            count(r.num_parameters),
            size(r.weights),
            size(r.gradients),
            size(r.optimizer),
            activations,
            size(r.total),
            size(r.unsharded + (r.activations or 0.0)),
        )
    return table


def _formulae(spec: RunSpec, options: PlanOptions, p: Precision) -> list[str]:
    share = optimizer_share(options.replicas, spec.sync.replication)
    store = "in files" if spec.sync.optimizer_store == "disk" else "in the host's memory"
    a_parameter = p.weights + p.gradients + p.optimizer * share
    return [
        f"Bytes a parameter ({p.name}): weights {p.weights} + gradients {p.gradients} + optimizer "
        f"(master {p.master} + moments {p.moments}) x R / N = {a_parameter:.2f}, with R = "
        f"{spec.sync.replication} owners of a shard and N = {options.replicas} replicas of a "
        f"stage; {p.total} without ZeRO (Rajbhandari et al., 2020: 16 in mixed precision).",
        f"Optimizer: {store}, the share of a replica of average upload bandwidth. Activations: "
        f"{options.in_flight} microbatches of {spec.pipeline.microbatch} samples in flight, "
        f'activations = "{spec.pipeline.activations}" (auto: each machine by its free memory; here '
        "as keep); offload moves the rest out of the device's memory.",
    ]


def count(number: float) -> str:
    """A number of parameters as people read it."""
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g} G"


def size(num_bytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 100 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
