"""Compiled layers on several ranks compute what plain ones do on one. In processes of their own:
compiling starts helpers."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from swarmnet.training.computing import Computing
from swarmnet.training.ranks import fsdp
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage
from swarmnet.training.stage import build_stage
from tests.training.ranks import test_family_ranks as families
from tests.training.ranks import test_tensor_parallel as plain
from tests.training.ranks.eager_rank import without_compiler
from tests.training.specs import small_spec

what = sys.argv[1]
without_compiler()
spec = small_spec(
    pipeline=plain.ONE_STAGE, data={"document_mask": True}, model={"num_hidden_layers": 2}
)
if what == "family":
    spec = families.spec_of("qwen3", 1, tied=True)
kept = {"built-in": "keep", "split": "recompute", "family": "blocks", "fsdp": "recompute"}[what]
computing = Computing("fp32", kept, compile=True)
one = build_stage(spec, 0)
how = {"sequence_parallel": what == "split"}
make = build_parallel_stage
if what == "fsdp":
    make, how = fsdp.build_fsdp_stage, {"mode": "fsdp", "open_group": fsdp.open_default_group}
with plain.ranks(spec, 2, timeout_s=240.0, **how) as group:
    many = make(spec, 0, group, computing)
    if what == "family":
        families.compare([one], [many])
    else:
        plain.compare_packed(one, many, spec)
found = torch._dynamo.utils.counters["stats"]
assert found["unique_graphs"] > 0, found
assert found["calls_captured"] > 40, found
"""


@pytest.mark.parametrize("what", ["built-in", "split", "family", "fsdp"])
def test_compiled_layers_give_the_same_gradients(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
