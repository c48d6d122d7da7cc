"""`swarmnet export`: the model as a Hugging Face folder, from a live swarm or from checkpoints."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnet.errors import SpecError, UserError
from swarmnet.runtime.options import TransportName
from swarmnet.runtime.seats import further_seats
from swarmnet.spec import BYTES_TOKENIZER, RunSpec
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery.model_fetch import fetch_model
from swarmnet.swarm.settings import Limits
from swarmnet.training.checkpoint import (
    CheckpointError,
    Meta,
    find_checkpoints,
    load_parameters,
)
from swarmnet.training.same_run import may_continue
from swarmnet.training.stage import stage_parameter_ranges, stage_shard_sizes
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.export")

SHOWN_CHARACTERS = 12
"""Of a run's id."""
MODEL_FILE, CONFIG_FILE, README_FILE = "model.safetensors", "config.json", "README.md"
NOTE = """# {name}

Parameters of round {round} of the swarmnet run `{run_id}`, fp32.

{tokenizer}
"""
BYTES_NOTE = (
    "There is no tokenizer file: a token is a byte. Encode with `list(text.encode())`, decode with "
    '`bytes(tokens).decode(errors="replace")`.'
)


async def export_live(
    addresses: Sequence[str], out: Path, *, transport: TransportName = "p2pd", invite: str = ""
) -> str:
    """Writes the model of the run behind an address; returns what was done, in a line. Raises
    `UserError`."""
    from swarmnet.runtime.observer import Observer

    _check_out(out)
    async with await Observer.join(addresses, transport=transport, invite=invite) as observer:
        round_index, named = await fetch_named(observer.spec, observer.transport, observer.gossip)
        return write_folder(out, observer.spec, round_index, named)


async def fetch_named(
    spec: RunSpec, transport: Transport, gossip: Gossip
) -> tuple[int, dict[str, Tensor]]:
    """A round of the live run, and all its parameters by name."""
    import torch

    from swarmnet.training.arrays import to_tensor

    if spec.model.kind != "llama":
        raise UserError("a custom model can be exported from --state-dir only")
    stages = range(spec.pipeline.num_stages)
    sizes = [stage_shard_sizes(spec, k) for k in stages]
    round_index, shards = await fetch_model(transport, gossip, sizes, Limits(), gossip.rng)
    named: dict[str, Tensor] = {}
    for k in stages:
        flat = torch.cat([to_tensor(shard) for shard in shards[k]])
        for r in stage_parameter_ranges(spec, k):
            named[r.name] = flat[r.start : r.stop].view(r.shape)
    return round_index, named


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which checkpoints are meant, where a person says so."""

    round: int | None = None
    """None: the newest."""
    run_id: str = ""
    """The beginning of the run's id; empty where the folders hold one run only."""


def export_checkpoints(state_dirs: Sequence[Path], out: Path, wanted: Wanted = Wanted()) -> str:
    """Writes the newest round of which the folders hold every stage undamaged, or the wanted one;
    returns what was done, in a line. Raises `UserError`."""
    _check_out(out)
    folders = [folder for path in state_dirs for folder in (path, *further_seats(path))]
    unreadable: list[str] = []
    found: Found = [one for path in folders for one in find_checkpoints(path, unreadable)]
    for line in unreadable:
        log.warning("a checkpoint cannot be used: %s", line)
    if not found:
        raise UserError(f"no checkpoint in {', '.join(str(path) for path in state_dirs)}")
    found = _of_one_run(found, wanted.run_id)
    whole = _whole_rounds([meta for _, meta in found])
    keys = [key for key in whole if wanted.round in (None, key[1])]
    if not keys:
        others = ", ".join(str(r) for r in sorted({r for _, r in whole}))
        raise UserError(f"round {wanted.round} is not there with all stages; there are: {others}")
    for key in keys:
        try:
            named, chosen = _load_round(found, key)
        except CheckpointError as e:
            log.warning("round %d cannot be used: %s", key[1], e)
            continue
        further = max((r for history, r in whole if history < key[0]), default=0)
        if wanted.round is None and further > chosen.round:
            log.warning(
                "an earlier history of this run had come to round %d: --round %d writes that",
                further,
                further,
            )
        return write_folder(
            out,
            RunSpec.from_checkpoint(chosen.spec, chosen.run_id),
            chosen.round,
            named,
            chosen.run_id,
        )
    raise UserError("no undamaged round; name the --state-dir of more peers")


def write_folder(
    out: Path, spec: RunSpec, round_index: int, named: dict[str, Tensor], run_id: str = ""
) -> str:
    """A Hugging Face folder, whole or not at all; returns what was done, in a line. `run_id`: that
    of the checkpoint, where an earlier version of swarmnet named the run. Raises `UserError` where
    it cannot be written."""
    from safetensors.torch import save_file

    beside = out.with_name(f".{out.name}.{os.getpid()}")
    run_id = run_id or spec.run_id
    about = {"format": "pt", "run_id": run_id, "round": str(round_index)}
    try:
        beside.mkdir(parents=True)
        try:
            tensors = {name: named[name].contiguous() for name in sorted(named)}
            save_file(tensors, beside / MODEL_FILE, metadata=about)
            if spec.model.kind == "llama":
                (beside / CONFIG_FILE).write_text(json.dumps(llama_config(spec), indent=2) + "\n")
            (beside / README_FILE).write_text(_readme(spec, run_id, round_index))
            shutil.copymode(beside / README_FILE, beside / MODEL_FILE)  # it is to be shared
            if out.is_dir():
                out.rmdir()
            beside.rename(out)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror or e}") from None
    num_parameters = sum(t.numel() for t in named.values())
    return f"{out}: round {round_index}, {num_parameters:,} parameters"


def llama_config(spec: RunSpec) -> dict[str, Any]:
    """config.json of `transformers.LlamaForCausalLM`."""
    model = spec.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "initializer_range": model.initializer_range,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _check_out(out: Path) -> None:
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UserError(f"{out} is there already; name a new folder")
    except OSError as e:
        raise UserError(f"cannot use {out}: {e.strerror or e}") from None


Found = Sequence[tuple[Path, Meta]]


def _of_one_run(found: Found, run: str) -> Found:
    """Those of the run whose id begins so; of the only one where nothing is said. What swarmnet 0.1
    began under another id belongs to the run that goes on with it."""
    one_run = _same_runs([meta for _, meta in found])
    runs = sorted(
        {new for old, new in one_run.items() if run in (old[: len(run)], new[: len(run)])}
    )
    if len(runs) == 1:
        return [(path, meta) for path, meta in found if one_run[meta.run_id] == runs[0]]
    if not runs:
        runs = sorted(set(one_run.values()))
        wrong = f"no checkpoint of a run {run}"
    else:
        wrong = f"checkpoints of {len(runs)} runs"
    names = {meta.run_id: meta.spec.get("name", "?") for _, meta in found}
    listed = ", ".join(f"{run_id[:SHOWN_CHARACTERS]} ({names[run_id]})" for run_id in runs)
    raise UserError(f"{wrong}; choose one with --run-id: {listed}")


def _same_runs(metas: Sequence[Meta]) -> dict[str, str]:
    """By id of a run in some checkpoints, the id under which it goes on in others of them; its own
    where it does not."""
    by_id = {meta.run_id: meta for meta in metas}
    specs: dict[str, RunSpec] = {}
    for run_id, meta in by_id.items():
        with suppress(SpecError):
            spec = RunSpec.from_checkpoint(meta.spec, run_id)
            if spec.run_id == run_id and not spec.open_keys:
                specs[run_id] = spec
    newer = {
        old: new
        for old, meta in by_id.items()
        for new, spec in specs.items()
        if old not in specs and may_continue(meta.spec, old, spec)
    }
    return {run_id: newer.get(run_id, run_id) for run_id in by_id}


def _whole_rounds(metas: Sequence[Meta]) -> list[tuple[int, int]]:
    """(history, round) of which every stage is there, the newest first: the stages of a round must
    be of one history. Raises `UserError` where there is none."""
    stages: dict[tuple[int, int], set[int]] = {}
    for meta in metas:
        stages.setdefault((meta.history, meta.round), set()).add(meta.stage)
    num_stages = metas[0].num_stages
    whole = [key for key, have in stages.items() if have >= set(range(num_stages))]
    if not whole:
        present = {meta.stage for meta in metas}
        missing = [f"stage {k}" for k in range(num_stages) if k not in present]
        what = f"{', '.join(missing)} missing" if missing else "no round has all stages"
        raise UserError(f"{what}; name the --state-dir of more peers")
    return sorted(whole, reverse=True)


def _load_round(found: Found, key: tuple[int, int]) -> tuple[dict[str, Tensor], Meta]:
    """All parameters of a whole round. Raises `CheckpointError`."""
    of_round = [(path, meta) for path, meta in found if (meta.history, meta.round) == key]
    named: dict[str, Tensor] = {}
    for stage in range(of_round[0][1].num_stages):
        named |= _load_stage([(path, meta) for path, meta in of_round if meta.stage == stage])
    return named, of_round[0][1]


def _load_stage(found: Found) -> dict[str, Tensor]:
    """From the first undamaged one of these checkpoints of a stage. Raises `CheckpointError`."""
    error = CheckpointError("nothing there")
    for folder, meta in found:
        try:
            return load_parameters(folder, meta)
        except CheckpointError as e:
            error = e
    raise error


def _readme(spec: RunSpec, run_id: str, round_index: int) -> str:
    note = BYTES_NOTE
    if spec.model.kind != "llama":
        note = "A custom model: load `model.safetensors` into what the run's builder makes."
    elif spec.data.tokenizer != BYTES_TOKENIZER:
        # Not copied: a spec may come over the network, and never chooses files of this machine.
        name = Path(spec.data.tokenizer).name
        note = f"The tokenizer is the run's `{name}`: copy it here as `tokenizer.json`."
    return NOTE.format(name=spec.name, round=round_index, run_id=run_id, tokenizer=note)
