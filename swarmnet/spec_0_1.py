"""How swarmnet 0.1 named a run: frozen, so that its state folders can be continued.

0.1 wrote every key with its value, also where it was at its default, and numbers as Python's `repr`
does. It named a run before it had chosen what the spec left open. Nothing here follows later
versions: a key that they add is not in `KEYS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

from pydantic import BaseModel

from swarmnet.protocol.codecs import AUTO, AUTO_BOUNDARY_CODEC, AUTO_UPDATE_CODEC
from swarmnet.run_identity import run_id_of, written_values

REQUIRED = object()
"""In place of the default of a key that must be given."""

KEYS: dict[str, Any] = {
    "name": "swarmnet run",
    "seed": 0,
    "model": {
        "kind": "llama",
        "hidden_size": 0,
        "num_hidden_layers": 0,
        "num_attention_heads": 0,
        "num_key_value_heads": 0,
        "intermediate_size": 0,
        "vocab_size": 0,
        "max_position_embeddings": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "builder": "",
        "options": {},
    },
    "data": {
        "paths": [],
        "include": ["*.txt", "*.md", "*.rst", "*.py"],
        "tokenizer": "bytes",
        "held_out_fraction": 0.02,
        "held_out_microbatches": 8,
    },
    "optimizer": {
        "kind": "adamw",
        "learning_rate": REQUIRED,
        "min_learning_rate_ratio": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "warmup_rounds": 0,
        "rounds": REQUIRED,
        "grad_clip_norm": 1.0,
    },
    "pipeline": {
        "num_stages": REQUIRED,
        "layers": [],
        "global_batch": REQUIRED,
        "microbatch": REQUIRED,
        "precision": "auto",
        "activations": "auto",
        "max_in_flight": 0,
        "evaluate_every": 10,
    },
    "sync": {
        "mode": "zero",
        "warmup_rounds": -1,
        "local_steps": 20,
        "fragments": 1,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
        "gossip_momentum": 0.5,
        "shard_parameters": 0,
        "replication": 2,
        "aggregation": "median_clip",
        "optimizer_store": "memory",
    },
    "security": {"admission": "open", "owner": ""},
}
"""Every key of 0.1 with its default, by table; keys outside a table first."""

WARMUP_PART, MAX_WARMUP_ROUNDS = 3, 1000
"""0.1's choice of `[sync] warmup_rounds`: one in so many rounds, and at most so many."""


def canonical_of_0_1(spec: BaseModel) -> bytes | None:
    """The text of which 0.1 made the run's id: of the spec as a person wrote it, with nothing
    resolved. None for a spec that uses a key which 0.1 did not know."""
    values = _values(spec)
    return None if values is None else _text(values)


def run_id_of_0_1(spec: BaseModel) -> str | None:
    """The run's id in 0.1; see `canonical_of_0_1`."""
    text = canonical_of_0_1(spec)
    return None if text is None else run_id_of(text)


def possible_run_ids_of_0_1(spec: BaseModel) -> tuple[str, ...]:
    """The ids that a run may have had in 0.1, from its resolved spec: 0.1 had the same numbers
    where the person gave them as where the program chose them. The cut and the size of shards are
    taken for the program's choice without looking."""
    values = _values(spec, AUTO_BOUNDARY_CODEC, AUTO_UPDATE_CODEC)
    return () if values is None else tuple(run_id_of(_text(v)) for v in _less_resolved(values))


def _values(spec: BaseModel, boundary: str = AUTO, update: str = AUTO) -> dict[str, Any] | None:
    """None where the spec uses a newer key. `boundary` and `update`: codecs that the program may
    have chosen."""
    used, given = written_values(spec), spec.model_dump(mode="json")
    used.pop("files", None)  # a later version adds them when it resolves a spec
    used.get("data", {}).pop("fingerprint", None)  # likewise
    for table, chosen in (("pipeline", boundary), ("sync", update)):
        if used.get(table, {}).get("codec") == chosen:
            del used[table]["codec"]  # likewise for a file that does not say
    values: dict[str, Any] = {}
    if used.keys() - KEYS.keys():
        return None
    for name, default in KEYS.items():
        if name in ("name", "seed"):
            values[name] = given.get(name, default)
            continue
        if used.get(name, {}).keys() - default.keys():
            return None
        values[name] = default | {k: v for k, v in given.get(name, {}).items() if k in default}
    return values


def _less_resolved(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spec itself, and those that leave something open which it has."""
    rounds, sync = values["optimizer"]["rounds"], values["sync"]
    opens: list[tuple[str, str, Any]] = []
    if sync["warmup_rounds"] == min(rounds // WARMUP_PART, MAX_WARMUP_ROUNDS):
        opens.append(("sync", "warmup_rounds", -1))
    if sync["shard_parameters"]:
        opens.append(("sync", "shard_parameters", 0))
    if values["pipeline"]["layers"]:
        opens.append(("pipeline", "layers", []))
    for chosen in product((False, True), repeat=len(opens)):
        copied = deepcopy(values)
        for is_open, (table, key, value) in zip(chosen, opens, strict=True):
            if is_open:
                copied[table][key] = value
        yield copied


def _text(values: dict[str, Any]) -> bytes:
    text = json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()
