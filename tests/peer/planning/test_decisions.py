"""The table at the top of docs/parallelism.md is what the planner answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peer.cli import app

PAGE = Path(__file__).parents[3] / "docs" / "parallelism.md"
SHAPES: dict[str, dict[str, Any]] = {
    "155 M": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "1 B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8 B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "70 B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""Those that Llama 3 has under these names, and a small one."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
ROW = re.compile(
    r"\| `(?P<machines>[^`]+)` \| `(?P<links>[^`]+)` \| (?P<model>[^|]+) \|(?P<says>.*)\|"
)
ROWS = [found.groupdict() for found in map(ROW.match, PAGE.read_text().splitlines()) if found]


def answer(folder: Path, machines: str, links: str, model: str) -> str:
    name, _, adapters = model.strip().partition(", ")
    (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES[name]))
    command = ["plan", "--spec", str(folder), "--machines", machines, "--links", links, "--json"]
    result = CliRunner().invoke(app, [*command, *(["--lora"] if adapters else [])])
    plan = json.loads(result.stdout)
    verdict: str = plan["verdict"]
    said = verdict.split("; up to ")[0]
    policies = ", ".join(sorted({row["activations"] for row in plan.get("rows", [])}))
    left = [x.split(": ")[1] for x in plan.get("helps", []) if x.startswith("left out: ")]
    return "; ".join(
        (
            said,
            *([f"activations: {policies}"] if policies else []),
            *(f"left out: {x}" for x in left),
        )
    )


def test_there_is_a_table() -> None:
    assert len(ROWS) >= 6


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_a_row_is_what_the_planner_answers(tmp_path: Path, row: dict[str, str]) -> None:
    assert row["says"].strip() == answer(tmp_path, row["machines"], row["links"], row["model"])
