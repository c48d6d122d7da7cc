"""Tables and the picture of the pages that are the planner's answers. As a program it writes them
anew:

python -m tests.peer.planning.decisions
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text
from typer.testing import CliRunner

from peer.cli import app
from tests.peer.pictures import IMAGES, drawn

DOCS = Path(__file__).parents[3] / "docs"
TOKENS = {"parallelism.md": "", "finetune.md": "10M", "pretrain.md": "10B"}
"""By page: the tokens whose time its table has, if it has one."""
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
THIS_FILE = "this file"
"""In the column of models: the first run.toml of the page."""
PICTURE = IMAGES / "plan.svg"
PICTURED = ("--lora", "--machines", "12GB-gpu*4", "--links", "20Mbit/100Mbit,30ms")
ROW = re.compile(
    r"(?P<asks>\| `(?P<machines>[^`]+)` \| `(?P<links>[^`]+)` \| (?P<model>[^|]+) \|)(?P<says>.*)\|"
)


@dataclass(frozen=True, slots=True)
class Row:
    page: str
    asks: str
    """The cells of the question, as they stand there."""
    machines: str
    links: str
    model: str
    says: str


def rows() -> Iterator[Row]:
    for page in TOKENS:
        for found in map(ROW.match, (DOCS / page).read_text().splitlines()):
            if found:
                yield Row(page, **{name: text.strip() for name, text in found.groupdict().items()})


def answer(row: Row, folder: Path) -> str:
    """The cells of the answer. `folder` is empty, and gets what the command reads."""
    name, _, adapters = row.model.partition(", ")
    if name == THIS_FILE:
        spec, options = folder / "run.toml", ["--choose"]
        shown = re.search(r"```toml\n(.*?)```", (DOCS / row.page).read_text(), re.DOTALL)
        assert shown is not None
        spec.write_text(shown[1])
    else:
        spec, options = folder, ["--lora"] if adapters else []
        (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES[name]))
    tokens = TOKENS[row.page]
    command = ["plan", "--spec", str(spec), "--machines", row.machines, "--links", row.links]
    command += [*options, "--json", *(["--tokens", tokens] if tokens else [])]
    plan = json.loads(CliRunner().invoke(app, command).stdout)
    verdict: str = plan["verdict"]
    policies = ", ".join(sorted({each["activations"] for each in plan.get("rows", [])}))
    elsewhere = ", ".join(sorted({each["weights"] for each in plan.get("rows", [])} - {"device"}))
    left = [x.split(": ")[1] for x in plan.get("helps", []) if x.startswith("left out: ")]
    said = (
        verdict.split("; up to ")[0],
        *([f"activations: {policies}"] if policies else []),
        *([f"weights: {elsewhere}"] if elsewhere else []),
        *(f"left out: {x}" for x in left),
    )
    cells = ["; ".join(said)]
    if tokens:
        up = plan["up_per_day"]
        hours = plan["hours"]
        cells += [f"{up / 1e9:,.3g} GB" if up < 1e12 else f"{up / 1e12:.3g} TB"]
        cells += [f"{plan['joiner_bytes'] / 1e9:.3g} GB"]
        cells += [f"{hours:.2g} hours" if hours < 48 else f"{hours / 24:.3g} days"]
    return " | ".join(cells)


def picture(folder: Path) -> str:
    """A terminal that shows the plan of an 8 B model with adapters, as SVG. `folder` is empty."""
    (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES["8 B"]))
    command = ["plan", "--spec", str(folder), *PICTURED, "--tokens", "10M"]
    said = CliRunner().invoke(app, command).stdout
    title = f"swarmnet plan --spec FOLDER {' '.join(PICTURED)}"
    return drawn(Text(said.rstrip()), title, "plan")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(picture(Path(folder)))
    for row in list(rows()):
        with tempfile.TemporaryDirectory() as folder:
            says = answer(row, Path(folder))
        path = DOCS / row.page
        lines = path.read_text().splitlines(keepends=True)
        new = (f"{row.asks} {says} |\n" if x.startswith(row.asks) else x for x in lines)
        path.write_text("".join(new))


if __name__ == "__main__":
    main()
