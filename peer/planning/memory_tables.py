"""`swarmnet plan --explain`: what a replica of each stage of a run holds in memory, by formula, by
policy and by sync mode."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console

from peer.observe.table import WholeTable
from peer.options import PlanOptions
from swarmnet.plurals import counted
from swarmnet.protocol.codecs import leaves_out
from swarmnet.protocol.planning.exchange import codec_in, number_bytes
from swarmnet.runtime.text import size
from swarmnet.spec import RunSpec
from swarmnet.training.memory.activation_choice import POLICIES, known_activations
from swarmnet.training.memory.plan import (
    EXPERTS,
    MODES,
    PRECISIONS,
    SEQUENCES,
    Precision,
    StageMemory,
    coding_bytes,
    copy_bytes,
    exchange_bytes,
    optimizer_share,
    plan_memory,
)


def show_tables(options: PlanOptions, console: Console) -> None:
    """Prints the table. Raises `SpecError`."""
    from peer.planning.question import asked

    spec = asked(options.file, lora=options.lora, choose=False).spec
    found = show_tables_of(spec, options, console)
    if options.as_json:
        console.print_json(json.dumps(found), ensure_ascii=True)


def show_tables_of(
    spec: RunSpec, options: PlanOptions, console: Console
) -> dict[str, object] | None:
    """Prints the tables of a run; for programs it returns them. Raises `SpecError`."""
    from swarmnet.training.ranks.context_parallel_stage import check_sequences
    from swarmnet.training.ranks.cut_check import check_cut
    from swarmnet.training.ranks.expert_stage import check_experts
    from swarmnet.training.ranks.rows.row_stage import check_rows

    known = None if spec.model.kind == "custom" else known_activations
    precision = precision_of(spec, options)
    num_rows = max(options.cp, options.ep)
    if min(num_rows, options.tp) > 1:
        check_rows(spec, "experts" if options.ep > 1 else "context", num_rows, options.tp)
    else:
        check_sequences(spec, options.cp)
        check_experts(spec, options.ep)
        check_cut(spec, options.tp)

    def rows_of(policy: str | None, mode: str | None = None) -> list[StageMemory]:
        return plan_memory(
            spec,
            num_replicas=options.replicas,
            in_flight=options.in_flight,
            precision=precision,
            activations=policy,
            mode=mode,
            num_ranks=num_rows,
            row_size=options.tp,
            shared=EXPERTS if options.ep > 1 else SEQUENCES,
            known=known,
        )

    rows = rows_of(None)
    policies: dict[str, list[StageMemory]] = {policy: rows_of(policy) for policy in POLICIES}
    modes = {mode: rows_of(None, mode) for mode in MODES}
    if options.as_json:
        stages = [
            asdict(r)
            | {"state": r.state, "total": r.total}
            | {"by_policy": {p: found[r.stage].activations for p, found in policies.items()}}
            | {"by_mode": {m: _of_mode(found[r.stage]) for m, found in modes.items()}}
            for r in rows
        ]
        return {
            "replicas": options.replicas,
            "precision": precision.name,
            "mode": spec.sync.mode,
            "ranks": num_rows * options.tp,
            "stages": stages,
        }
    console.print(_table(rows, num_rows * options.tp))
    console.print(_policies(policies))
    console.print(_modes(modes))
    for line in _formulae(spec, options, precision):
        console.print(line, soft_wrap=True)
    return None


def precision_of(spec: RunSpec, options: PlanOptions) -> Precision:
    """What the person asked for, else what the run says, on a machine without a GPU."""
    from swarmnet.training.computing import choose_precision

    name = options.precision
    return PRECISIONS[choose_precision(spec) if name == "auto" else name]


def _policies(policies: dict[str, list[StageMemory]]) -> WholeTable:
    found = [
        (
            str(rows[0].stage),
            *("?" if r.activations is None else size(r.activations) for r in rows),
        )
        for rows in zip(*policies.values(), strict=True)
    ]
    return WholeTable(("stage", *policies), found, "Activations by policy")


def _of_mode(row: StageMemory) -> dict[str, float]:
    """For programs."""
    return {"state": row.state, "sent_per_round": row.sent}


def _modes(modes: dict[str, list[StageMemory]]) -> WholeTable:
    found = []
    for mode, rows in modes.items():
        r = max(rows, key=lambda r: r.num_parameters)
        parts = (r.weights, r.gradients, r.optimizer, r.exchange, r.state, r.sent)
        found.append((mode, *(size(x) for x in parts)))
    names = ("mode", "weights", "grads", "optim.", "sync", "state", "sent")
    title = "By sync mode: the largest stage, and what a replica sends in a round"
    return WholeTable(names, found, title)


def _table(rows: list[StageMemory], num_ranks: int) -> WholeTable:
    title = "Memory of one replica"
    if num_ranks > 1:
        title = (
            f"Memory of rank 0 of {num_ranks}; the others have no optimizer, and nothing to sync"
        )
    names = (
        "stage",
        "params",
        "weights",
        "grads",
        "optim.",
        "sync",
        "activ.",
        "total",
        "no ZeRO",
    )
    found = [
        (
            str(r.stage),
            count(r.num_parameters),
            size(r.weights),
            size(r.gradients),
            size(r.optimizer),
            size(r.exchange),
            "?" if r.activations is None else size(r.activations),
            size(r.total),
            size(r.unsharded + (r.activations or 0.0)),
        )
        for r in rows
    ]
    return WholeTable(names, found, title)


MUON_SENT = "; of matrices that Muon steps backups get the result too, and partners three numbers"


def _sizes(mode: str, codec: str) -> str:
    """Bytes of what an update sends, a parameter."""
    names = codec_in(mode, codec)
    kinds = {
        "g": (names.contributions, "gradients"),
        "r": (names.results, "results"),
        "s": (names.for_backups, "results" if names.tells_results else "sums"),
    }
    return ", ".join(f"{k} = {number_bytes(c):.3g} ({what})" for k, (c, what) in kinds.items())


def _formulae(spec: RunSpec, options: PlanOptions, p: Precision) -> list[str]:
    sync = spec.sync
    share = optimizer_share(options.replicas, sync.replication)
    store = "in files" if sync.optimizer_store == "disk" else "in the host's memory"
    if sync.mode == "zero":
        store += " (of a machine with one GPU: in that, where it has room)"
    is_own = sync.mode in ("local", "gossip")
    owned = options.replicas, sync.replication
    beside = exchange_bytes(sync.mode, *owned, p, sync.update_codec)
    without = exchange_bytes(sync.mode, 1, 1, p, sync.update_codec)
    coding = coding_bytes(sync.mode, *owned, sync.update_codec)
    coded = f" + {coding:.2f} for coding ({sync.codec})" * bool(coding)
    a_parameter = p.weights + p.gradients + p.optimizer * (1 if is_own else share) + beside
    is_muon = spec.optimizer.kind == "muon"
    of_muon = ", 4 of matrices that Muon steps, which is not counted here" * is_muon
    optimizer = f"optimizer (master {p.master} + moments {p.moments}{of_muon})"
    parts = {
        "local": f"{optimizer} of own steps + common parameters 4 + outer momentum 4 x "
        "min(R, N) / N",
        "gossip": f"{optimizer} of own steps + slow parameters 4 + outer momentum 4",
        "zero": f"{optimizer} x min(R, N) / N",
    }
    delayed = (
        f"{parts['zero']} + {p.weights + p.gradients} for a second pair of weights and gradients + "
        "4 for the gradient under way + 4 x min(R, N) / N for how far parameters are ahead "
        "(auto: where it chooses delayed)"
    )
    every_round = "zero" if sync.mode == "local" else sync.mode
    of_local = f", with {_sizes('local', sync.update_codec)}" * leaves_out(sync.update_codec)
    first = spec.sync_warmup_rounds
    warm_up = (
        f"; both in each of the first {counted(first, 'round')}, the warm-up of this run"
        * bool(first)
    )
    return [
        f"Bytes a parameter ({p.name}, {sync.mode}): weights {p.weights} + gradients {p.gradients} "
        f"+ {parts.get(sync.mode, delayed)}{coded} = {a_parameter:.2f}, with R = "
        f"{counted(sync.replication, 'owner')} of a shard and N = "
        f"{counted(options.replicas, 'replica')} of a stage: one that is alone holds all of it, "
        f"once; {p.total + without:g} without ZeRO (Rajbhandari et al., 2020: 16 in mixed "
        "precision).",
        "Sent, bytes a parameter: zero and delayed (g (N - 1) + s (R - 1) + r (N - R)) / N a "
        f"round, with {_sizes(every_round, sync.update_codec)}; local the same every H = "
        f"{counted(sync.local_steps, 'round')}{of_local}; gossip four numbers every H rounds, to "
        f"one partner{warm_up}{MUON_SENT * is_muon}. Activations and their gradients come on top.",
        f"Optimizer state lies {store}, or where --optimizer-memory says. The table has the part "
        "of a replica with average upload bandwidth; one with a faster uplink holds more.",
        f"Activations are those of {counted(options.in_flight, 'microbatch')} of "
        f"{counted(spec.pipeline.microbatch, 'sample')} that wait for their backward pass, with "
        "activations "
        f'= "{spec.pipeline.activations}"{_unsaid(spec.pipeline.activations)}. offload moves the '
        "rest of the graph out of the device's memory; the table has what stays.",
        f"Texts (swarmnet generate): while one is written, a replica that has room for it holds a "
        f"copy of the weights, {copy_bytes(1, p)} bytes a parameter, and the keys and values of "
        "the text's tokens.",
    ]


def _unsaid(policy: str) -> str:
    """What a table by `auto` shows."""
    return ': each machine chooses by its free memory, and the table shows "keep"' * (
        policy == "auto"
    )


def count(number: float) -> str:
    """A number of parameters as people read it."""
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g} G"
