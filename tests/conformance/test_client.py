"""A client that was written from `docs/protocol.md` alone speaks with real peers."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.running import Machine, machine

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
RUN = """
seed = 7
[model]
kind = "llama"
hidden_size = 32
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 60
vocab_size = 256
max_position_embeddings = 16
[data]
paths = ["{text}"]
tokenizer = "bytes"
[optimizer]
learning_rate = 1e-3
rounds = 1
grad_clip_norm = 0.5
[pipeline]
num_stages = 2
layers = [4, 2]
global_batch = 32
microbatch = 4
codec = "none"
[sync]
codec = "none"
shard_parameters = 4096
"""


@pytest.fixture
def running() -> Iterator[Machine]:
    with machine() as started:
        yield started


def speaks(*arguments: str) -> None:
    """Runs a half of the client."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.client", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_client_by_the_page_follows_a_run(running: Machine) -> None:
    rng = random.Random(0)
    text = running.folder / "text.txt"
    text.write_bytes(bytes(rng.choice(b"abcdefgh \n") for _ in range(20_000)))
    path = running.folder / "run.toml"
    path.write_text(RUN.format(text=text))
    folder = str(running.folder)

    first = running.start_peer("peer-0", "--spec", str(path), "--stage", "0", "--serve-data")
    running.until_ready(first)
    speaks("begins", first.address, folder)
    join = ("--join", first.address, "--data", str(text), "--stage", "1")
    second = running.start_peer("peer-1", *join)
    running.until_ready(second)
    speaks("ends", first.address, second.address, folder)

    for peer in (first, second):
        running.interrupt(peer)
    assert [running.wait(peer) for peer in (first, second)] == [0, 0], running.describe()
