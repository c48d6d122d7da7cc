"""Small runs that train adapters over a model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from swarmnet.spec import RunSpec
from swarmnet.training.models.base import build_layer, own_parameters
from swarmnet.training.models.registry import model_plan
from swarmnet.training.resolving import resolve_run
from tests.swarm.harness import tiny_spec

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def lora_run(
    folder: Path, tmp_path: Path, *, rounds: int = 20, lora: Any = LORA, **changes: Any
) -> tuple[RunSpec, bytes]:
    """A run of two stages over a folder's model, and the list of its initial shards' hashes."""
    changes = {"num_stages": 2, **changes}
    values = tiny_spec(tmp_path, rounds=rounds, **changes).model_dump()
    values["model"] = {"from": str(folder)}
    values["lora"] = lora
    values["data"] |= {"sequence_length": 16, "tokenizer": "bytes"}
    values["optimizer"] |= {"learning_rate": 1e-2}
    resolved = resolve_run(RunSpec.model_validate(values))
    return resolved.spec, resolved.contents["weights.sha256"]


def initial_adapters(spec: RunSpec) -> dict[str, torch.Tensor]:
    """By name, where they begin at random."""
    plan = model_plan(spec)
    modules = [build_layer(plan, layer, spec.seed) for layer in plan.layers]
    return {n: p.detach() for n, p in own_parameters(plan.layers, modules)}
