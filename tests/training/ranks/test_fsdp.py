"""A stage that is fully sharded over ranks computes what a stage on one rank computes, with
less memory a rank. In a process of its own, for the mesh is global to the process."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys, torch
from swarmnet.training.computing import Computing
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.ranks.fsdp import build_fsdp_stage, open_default_group
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.stage import build_stage
from swarmnet.training.ranks.tensor_parallel_stage import rank_options
from tests.training.flights import fly, gradient
from tests.training.specs import MODEL, small_spec
from tests.training.ranks.test_tensor_parallel import close_by_name, compare_evaluation, \\
    compare_microbatches, compare_packed, tokens

spec = small_spec(pipeline={"num_stages": 1, "global_batch": 8, "microbatch": 4})
def start(spec, num_ranks):
    return LocalGroup(num_ranks, threads=1, options=rank_options(spec, mode="fsdp"),
                      open_group=open_default_group)

def restart(group, spec, num_ranks):
    group.close()
    torch.distributed.destroy_process_group()
    return start(spec, num_ranks)

def parts(one, many):
    # what a rank holds, and all of it
    return many.layers.num_held_elements, 2 * one.num_parameters

group = start(spec, 4)
try:
    one, many = build_stage(spec, 0), build_fsdp_stage(spec, 0, group)
    compare_microbatches(one, many, spec)
    compare_evaluation(one, many, spec)
    of_four = parts(one, many)
    new = torch.randn(one.shard_sizes[1]) / 50
    for stage in (one, many):
        stage.stage_parameters(1, from_tensor(new))
        stage.finish_round()
    for shard in range(len(one.shard_sizes)):
        assert many.digest(shard) == one.digest(shard)
    compare_microbatches(one, many, spec)

    packed = small_spec(pipeline={"num_stages": 1, "global_batch": 8, "microbatch": 4},
                        data={"document_mask": True})
    group = restart(group, packed, 2)
    compare_packed(build_stage(packed, 0), build_fsdp_stage(packed, 0, group), packed)

    cut = small_spec(pipeline={"num_stages": 3, "global_batch": 8, "microbatch": 4})
    group = restart(group, cut, 2)
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
    group = restart(group, spec, 2)
    one = build_stage(spec, 0)
    many = build_fsdp_stage(spec, 0, group, Computing("bf16"))
    of_two = parts(one, many)
    for index in range(3):
        arguments = (0, index), tokens(spec, index), tokens(spec, 10 + index)
        expected, result = (stage.forward_backward(*arguments) for stage in (one, many))
        assert abs(result.loss_sum / expected.loss_sum - 1) < 0.01
    ours, theirs = gradient(many), gradient(one)
    assert 1e-5 < ((ours - theirs).norm() / theirs.norm()).item() < 0.02
    print(json.dumps({"4": of_four, "2": of_two}))
finally:
    group.close()
"""


def run(program: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FAMILY = """
import tempfile, torch
from pathlib import Path
from swarmnet.errors import SpecError
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.ranks.fsdp import build_fsdp_stage, open_default_group
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.tensor_parallel_stage import rank_options
from swarmnet.training.stage import build_stage
from tests.training.flights import gradient
from tests.training.test_adapter import LENGTH, run_of, saved, tokens_of

with tempfile.TemporaryDirectory() as folder:
    saved(Path(folder), "gemma3", True)
    spec, whole = run_of(Path(folder), document_mask=True), run_of(Path(folder), 1)
group = LocalGroup(2, threads=1, options=rank_options(spec, mode="fsdp"),
                   open_group=open_default_group)
try:
    try:
        build_fsdp_stage(whole, 0, group)
    except SpecError as error:
        print(error)
    one, many = build_stage(spec, 0), build_fsdp_stage(spec, 0, group)
    tokens = from_tensor(tokens_of().int())
    for number, documents in enumerate((((LENGTH,),) * 2, ((9, LENGTH - 9),) * 2)):
        outputs = [stage.forward((0, number), tokens, documents) for stage in (one, many)]
        assert torch.allclose(*map(to_tensor, outputs), rtol=1e-5, atol=1e-6)
        grad = from_tensor(torch.randn(to_tensor(outputs[0]).shape))
        one.backward((0, number), grad), many.backward((0, number), grad)
    ours, theirs = gradient(many), gradient(one)
    assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-5
finally:
    group.close()
"""


def test_a_model_of_transformers_has_its_own_constants_at_every_rank() -> None:
    """Gemma 3 keeps the scale of its embedding beside the parameters."""
    assert "embedding and head are one matrix" in run(FAMILY)


def test_same_numbers_and_less_memory_a_rank() -> None:
    """Four ranks with a whole model; two with a stage in the middle, and in bf16."""
    measured = json.loads(run(PROGRAM).splitlines()[-1])
    for num_ranks, (held, whole) in measured.items():
        assert held <= 1.1 * whole / int(num_ranks)
