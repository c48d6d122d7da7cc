"""`swarmnet export`: the model as a Hugging Face folder, from a live swarm or from checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from peer.options import TransportName
from peer.seats import further_seats
from swarmnet.errors import SpecError, UserError
from swarmnet.spec import BYTES_TOKENIZER, RunSpec
from swarmnet.swarm.gossip import Gossip
from swarmnet.swarm.model_fetch import fetch_model
from swarmnet.swarm.settings import Limits
from swarmnet.training.checkpoint import Meta, find_checkpoints, load_parameters
from swarmnet.training.stage import stage_parameter_ranges, stage_shard_sizes
from swarmnet.transport.base import Transport

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
    from peer.daemon import Observer

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


def export_checkpoints(state_dirs: Sequence[Path], out: Path) -> str:
    """Writes the newest round of which the folders hold every stage; returns what was done, in a
    line. Raises `UserError`."""
    _check_out(out)
    folders = [folder for path in state_dirs for folder in (path, *further_seats(path))]
    found = [checkpoint for path in folders for checkpoint in find_checkpoints(path)]
    if not found:
        raise UserError(f"no checkpoint in {', '.join(str(path) for path in state_dirs)}")
    runs = sorted({meta.run_id for _, meta in found})
    if len(runs) > 1:
        raise UserError(f"checkpoints of {len(runs)} runs; name the folders of one run only")
    chosen = _newest_with_all_stages([meta for _, meta in found])
    spec = _spec(chosen)
    named: dict[str, Tensor] = {}
    for stage in range(chosen.num_stages):
        named |= _load_stage(found, chosen, stage)
    return write_folder(out, spec, chosen.round, named)


def write_folder(out: Path, spec: RunSpec, round_index: int, named: dict[str, Tensor]) -> str:
    """A Hugging Face folder, whole or not at all; returns what was done, in a line. Raises
    `UserError` where it cannot be written."""
    from safetensors.torch import save_file

    beside = out.with_name(f".{out.name}.{os.getpid()}")
    about = {"format": "pt", "run_id": spec.run_id, "round": str(round_index)}
    try:
        beside.mkdir(parents=True)
        try:
            tensors = {name: named[name].contiguous() for name in sorted(named)}
            save_file(tensors, beside / MODEL_FILE, metadata=about)
            if spec.model.kind == "llama":
                (beside / CONFIG_FILE).write_text(json.dumps(llama_config(spec), indent=2) + "\n")
            (beside / README_FILE).write_text(_readme(spec, round_index))
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


def _newest_with_all_stages(metas: Sequence[Meta]) -> Meta:
    """Of the newest history and round; the stages of a round must be of one history."""
    stages: dict[tuple[int, int], set[int]] = {}
    for meta in metas:
        stages.setdefault((meta.history, meta.round), set()).add(meta.stage)
    num_stages = metas[0].num_stages
    whole = [key for key, have in stages.items() if have >= set(range(num_stages))]
    if not whole:
        have = {meta.stage for meta in metas}
        missing = [f"stage {k}" for k in range(num_stages) if k not in have]
        what = f"{', '.join(missing)} missing" if missing else "no round has all stages"
        raise UserError(f"{what}; name the --state-dir of more peers")
    return next(m for m in metas if (m.history, m.round) == max(whole))


def _load_stage(found: Sequence[tuple[Path, Meta]], chosen: Meta, stage: int) -> dict[str, Tensor]:
    """From the first undamaged checkpoint of the stage."""
    error: UserError | None = None
    for folder, meta in found:
        if (meta.history, meta.round, meta.stage) == (chosen.history, chosen.round, stage):
            try:
                return load_parameters(folder, meta)
            except UserError as e:
                error = e
    assert error is not None
    raise error


def _spec(meta: Meta) -> RunSpec:
    text = json.dumps(meta.spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        spec = RunSpec.from_canonical(text.encode())
    except SpecError as e:
        raise UserError(f"the checkpoint's spec: {e}") from None
    if spec.run_id != meta.run_id:
        raise UserError("the checkpoint's spec is not that of its run")
    return spec


def _readme(spec: RunSpec, round_index: int) -> str:
    note = BYTES_NOTE
    if spec.model.kind != "llama":
        note = "A custom model: load `model.safetensors` into what the run's builder makes."
    elif spec.data.tokenizer != BYTES_TOKENIZER:
        # Not copied: a spec may come over the network, and never chooses files of this machine.
        name = Path(spec.data.tokenizer).name
        note = f"The tokenizer is the run's `{name}`: copy it here as `tokenizer.json`."
    return NOTE.format(name=spec.name, round=round_index, run_id=spec.run_id, tokenizer=note)
