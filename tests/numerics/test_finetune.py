"""The example that tunes a model, as a person types it, over a model that computes in no time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.running import RUN_LIMIT_S, machine
from tests.swarm.initial.test_weights import folder_of
from tests.training.data.making import CHATML

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune"
LONGEST = 512


def example_over(model: Path, folder: Path) -> Path:
    """The run.toml of the example over another model, whose tokens are bytes."""
    text = (EXAMPLE / "run.toml").read_text()
    for pattern, value in (
        (r"^from = .*", f'from = "{model}"'),
        (r"^paths = .*", f'paths = "{EXAMPLE / "talks.jsonl"}"'),
        (r"^epochs = .*", "epochs = 5"),
    ):
        text, count = re.subn(pattern, value, text, flags=re.MULTILINE)
        assert count == 1, pattern
    path = folder / "run.toml"
    path.write_text(text)
    return path


def output_of(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_learns_what_a_plain_loop_learns_and_answers(tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model", max_position_embeddings=LONGEST)
    (model / "chat_template.jinja").write_text(CHATML)
    spec = example_over(model, tmp_path)
    tuned, metrics = tmp_path / "tuned", tmp_path / "losses.jsonl"
    with machine() as running:
        local = running.start(
            "local",
            "local",
            "--spec",
            str(spec),
            "--peers",
            "4",
            "--out",
            str(tuned),
            "--plain",
            "--metrics",
            str(metrics),
        )
        assert running.wait(local, RUN_LIMIT_S) == 0, running.describe()
    said = output_of("benchmarks/finetune.py", spec, metrics)
    found = re.search(r"largest relative difference in (\d+) rounds: (\S+)", said)
    assert found is not None, said
    assert int(found[1]) >= 5, said
    assert float(found[2]) < 1e-4, said
    answers = output_of(EXAMPLE / "ask.py", model, tuned, "Who are you?")
    base, adapted = re.findall(r"^  (?:base|tuned): (.*)", answers, flags=re.MULTILINE)
    assert base != adapted
