"""What a peer has in memory: nothing that only other peers need."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.processes.running import SWARMNET, Machine, tiny_run

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[3]
WATCH = """
import atexit, json, sys
if any("peer" in word for word in sys.orig_argv):
    def tell():
        with open({path!r}, "w") as file:
            json.dump(sorted(sys.modules), file)
    atexit.register(tell)
"""
LARGE = (
    *("aioquic", "grpc", "huggingface_hub", "jinja2", "libp2p", "networkx", "peft", "pyarrow"),
    *("scipy", "starlette", "sympy", "tokenizers", "torch._dynamo"),
    *("torch._inductor", "torchao", "transformers", "trio", "triton", "uvicorn", "zstandard"),
)
"""What others are for: other carriers, files, formats and models, the page, compiled layers."""
USED = {f"hivemind.{part}" for part in ("hivemind_cli", "dht", "p2p", "proto", "utils")}
"""Of hivemind, whose own file imports all of it."""


def test_a_peer_imports_no_more_than_it_uses(running: Machine, tmp_path: Path) -> None:
    """As in the default run, a Llama on bytes; it trains alone, to the end of its run."""
    told = tmp_path / "modules.json"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(path=str(told)))
    spec = tiny_run(running.folder, num_stages=1, rounds=5)
    peer = running.start_peer(
        "a",
        *("--spec", str(spec), "--exit-when-done"),
        command=SWARMNET,
        environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    assert running.wait(peer) == 0, peer.describe()
    modules = json.loads(told.read_text())
    assert {"torch.nn", *USED} <= set(modules)
    assert [m for m in modules if m in LARGE] == []
    assert {m for m in modules if m.count(".") == 1 and m.startswith("hivemind.")} == USED
