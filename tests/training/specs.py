"""Small runs for the tests of `swarmnet.training`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarmnet.spec import RunSpec

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 256,
    "max_position_embeddings": 16,
}
TEXT = "".join(
    f"{n} bottles of ink on the shelf, take one down, write {n - 1}.\n" for n in range(99)
)


def write_text(folder: Path) -> str:
    """A file of text; returns its path."""
    path = folder / "text.txt"
    path.write_text(TEXT)
    return str(path)


def small_spec(text: str = "text.txt", **changes: dict[str, Any]) -> RunSpec:
    """A tiny Llama; `changes` are fields by table, such as `pipeline={"num_stages": 3}`."""
    values: dict[str, Any] = {
        "seed": 7,
        "model": dict(MODEL),
        "data": {"paths": [text], "held_out_fraction": 0.1, "held_out_microbatches": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_rounds": 4, "rounds": 20},
        "pipeline": {"num_stages": 2, "global_batch": 8, "microbatch": 2},
        "sync": {"shard_parameters": 1000},
    }
    for table, fields in changes.items():
        values[table] = values[table] | fields
    return RunSpec.model_validate(values)
