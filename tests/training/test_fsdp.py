"""A stage that is fully sharded over ranks computes what a stage on one rank computes, with
less memory a rank. In a process of its own, for the mesh is global to the process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, torch
from pathlib import Path
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.fsdp import build_fsdp_stage, open_default_group
from swarmnet.training.local_group import LocalGroup
from swarmnet.training.stage import build_stage
from swarmnet.training.tensor_parallel_stage import rank_options
from tests.training.flights import fly, gradient
from tests.training.specs import MODEL, small_spec
from tests.training.test_tensor_parallel import close_by_name, compare_evaluation, \\
    compare_microbatches

def private_bytes(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(l.split()[1]) * 1024 for l in lines if l.startswith("Private_Dirty"))

num_ranks = int(sys.argv[1])
spec = small_spec(pipeline={"num_stages": 1, "global_batch": 8, "microbatch": 4})
group = LocalGroup(num_ranks, threads=1, options=rank_options(spec, mode="fsdp"),
                   open_group=open_default_group)
try:
    one, many = build_stage(spec, 0), build_fsdp_stage(spec, 0, group)
    assert many.num_held_elements <= -(-one.num_parameters // num_ranks) + 64
    compare_microbatches(one, many, spec)
    compare_evaluation(one, many, spec)
    new = torch.randn(one.shard_sizes[1]) / 50
    for stage in (one, many):
        stage.stage_parameters(1, from_tensor(new))
        stage.finish_round()
    for shard in range(len(one.shard_sizes)):
        assert many.digest(shard) == one.digest(shard)
    compare_microbatches(one, many, spec)

    cut = small_spec(pipeline={"num_stages": 3, "global_batch": 8, "microbatch": 4})
    one, many = build_stage(cut, 1), build_fsdp_stage(cut, 1, group)
    shape = (4, MODEL["max_position_embeddings"], MODEL["hidden_size"])
    x, grad = from_tensor(torch.randn(shape)), from_tensor(torch.randn(shape))
    for number in range(2):
        out, expected = many.forward((0, number), x), one.forward((0, number), x)
        assert torch.allclose(to_tensor(out), to_tensor(expected), rtol=1e-5, atol=1e-6)
    for number in (1, 0):
        back, wanted = many.backward((0, number), grad), one.backward((0, number), grad)
        assert torch.allclose(to_tensor(back), to_tensor(wanted), rtol=1e-4, atol=1e-6)
    close_by_name(one, gradient(many), gradient(one))
    del one, many, stage
    before = private_bytes(group.pids[0])
    model = dict(MODEL, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    group.close()
    big = small_spec(model=model, pipeline={"num_stages": 1, "global_batch": 8, "microbatch": 4},
                     sync={"shard_parameters": 1_000_000})
    torch.distributed.destroy_process_group()
    group = LocalGroup(num_ranks, threads=1, options=rank_options(big, mode="fsdp"),
                       open_group=open_default_group)
    stage = build_fsdp_stage(big, 0, group)
    from tests.training.test_tensor_parallel import tokens
    stage.forward_backward((0, 0), tokens(big, 1), tokens(big, 2))
    group.join()
    print(json.dumps({"private": private_bytes(group.pids[0]) - before,
                      "whole": 8 * stage.num_parameters}))
finally:
    group.close()
"""


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_same_numbers_and_less_memory_a_rank(num_ranks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(num_ranks)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["private"] < (1 / num_ranks + 0.25) * measured["whole"], measured
