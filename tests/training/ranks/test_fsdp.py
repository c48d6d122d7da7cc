"""A stage that is fully sharded over ranks computes what a stage on one rank computes, with
less memory a rank. In a process of its own, for the mesh is global to the process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
                        data={"document_mask": True}, model={"subspace": 8})
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


BEGIN = """
import tempfile, torch
from pathlib import Path
from swarmnet.training.computing import Computing
from swarmnet.training.arrays import from_tensor
from swarmnet.training.ranks.fsdp import build_fsdp_stage, open_default_group
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.tensor_parallel_stage import rank_options
from swarmnet.training.stage import build_stage
from tests.training.flights import gradient
from tests.training.ranks.test_family_ranks import DOCUMENTS, compare, renew, spec_of, tokens

def start(spec):
    return LocalGroup(2, threads=1, options=rank_options(spec, mode="fsdp"),
                      open_group=open_default_group)
"""

FAMILY = (
    BEGIN
    + """
from tests.training.passes.test_generation import at_once, change, copy_all, through, tokens_of
from tests.training.test_adapter import FAMILIES

spec = spec_of("gemma3_text", 1, True, **FAMILIES["gemma3"][1])
group = start(spec)
try:
    one = [build_stage(spec, 0, computing=Computing())]
    many = [build_fsdp_stage(spec, 0, group, Computing())]
    compare(one, many)
    renew(one, many)
    compare(one, many, round_index=1)

    renew(one, many)
    words = tokens_of(spec)
    expected = torch.cat([at_once(one, words[:, :end]) for end in (7, 12, 13)])
    for is_copied in (False, True):
        if is_copied:
            copy_all(many)
            change(many)
        begin, found = 0, []
        for end in (7, 12, 13):
            found.append(through(many, words[:, begin:end], begin, is_copied=is_copied))
            begin = end
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)
    change(one)
    compare(one, many, round_index=3)

    half = build_fsdp_stage(spec, 0, group, Computing("fp16"))
    one = build_stage(spec, 0, computing=Computing())
    for r in range(2):
        for stage in (one, half):
            stage.forward_backward((r, 0), tokens(1), tokens(2), DOCUMENTS[0])
            stage.forward_backward((r, 1), tokens(3), tokens(4), DOCUMENTS[1])
        ours, theirs = gradient(half), gradient(one)
        assert 1e-5 < ((ours - theirs).norm() / theirs.norm()).item() < 0.01
        for index in range(2):
            half.retract((r, index))
        assert gradient(half).abs().max() < 1e-4 * theirs.abs().max()
        renew([one], [half])
finally:
    group.close()
"""
)

OVERFLOW = (
    BEGIN
    + """
from tests.training.specs import MODEL, small_spec

# Of the embedding of one token: one of the ranks has the samples and the rows.
spec = small_spec(model={"max_position_embeddings": 64, "subspace": 8},
                  pipeline={"num_stages": 3, "microbatch": 4})
group = start(spec)
try:
    one = build_stage(spec, 0)
    half = build_fsdp_stage(spec, 0, group, Computing("fp16"))
    for number, token in enumerate((3, 253)):
        x = torch.full((4, 64), 90 + number, dtype=torch.int32)
        x[:2] = token
        grad = from_tensor(torch.ones(4, 64, 8) * 30)
        for stage in (one, half):
            stage.forward((number, 0), from_tensor(x))
            stage.backward((number, 0), grad)
        ours, theirs = gradient(half), gradient(one)
        assert ((ours - theirs).norm() / theirs.norm()).item() < 0.01
        one.finish_round()
        half.finish_round()
    assert half.loss_scale.num_overflows > 0
finally:
    group.close()
"""
)

ADAPTERS = (
    BEGIN
    + """
from tests.swarm.lora_runs import LORA, lora_run
from tests.training.ranks.test_lora_ranks import ON_EXPERTS, fill, randomize
from tests.training.ranks.test_family_ranks import close_by_name
from tests.training.test_families import folder_of
from tests.training.test_lora import tokens as of_four

def compare(name, kind, more, lora):
    folder = Path(name) / kind
    folder_of(folder, kind, **more)
    spec, _ = lora_run(folder, Path(name), lora={**LORA, **lora}, num_stages=1)
    group = start(spec)
    try:
        stages = [build_stage(spec, 0, computing=Computing()),
                  build_fsdp_stage(spec, 0, group, Computing())]
        results = []
        for stage in stages:
            fill(stage, spec, folder)
            randomize([stage])
            results.append([stage.forward_backward((1, n), of_four(n), of_four(9 + n)).loss_sum
                            for n in range(2)])
        print(results)
        assert abs(results[1][0] / results[0][0] - 1) < 1e-5
        assert abs(results[1][1] / results[0][1] - 1) < 1e-5
        close_by_name(stages[0], gradient(stages[1]), gradient(stages[0]))
        for stage in stages:
            stage.retract((1, 0))
        close_by_name(stages[0], gradient(stages[1]), gradient(stages[0]))
        evaluated = [s.evaluate(of_four(3), of_four(4)).loss_sum for s in stages]
        assert abs(evaluated[1] / evaluated[0] - 1) < 1e-5
        held = {n: p for m in stages[1].layers.modules for n, p in m.named_parameters()}
        base = held["self_attn.q_proj.weight"]
        assert base.to_local().numel() * 2 == base.numel()
        return base.dtype
    finally:
        group.close()
"""
)

FEW_BITS = (
    BEGIN
    + """
from tests.swarm.lora_runs import LORA, lora_run
from tests.training.ranks.test_family_ranks import close_by_name
from tests.training.ranks.test_lora_ranks import WIDE, fill, randomize
from tests.training.test_families import folder_of
from tests.training.test_lora import tokens as of_four

with tempfile.TemporaryDirectory() as name:
    folder = Path(name) / "model"
    folder_of(folder, "qwen2", **WIDE)
    group = None
    try:
        for kind in ("int8", "nf4"):
            lora = {**LORA, "target_modules": "all-linear", "base_dtype": kind}
            spec, _ = lora_run(folder, Path(name), lora=lora, num_stages=1)
            if group is not None:
                group.close()
                torch.distributed.destroy_process_group()
            group = start(spec)
            stages = [build_stage(spec, 0, computing=Computing()),
                      build_fsdp_stage(spec, 0, group, Computing())]
            losses = []
            for stage in stages:
                fill(stage, spec, folder)
                randomize([stage])
                losses.append(stage.forward_backward((1, 0), of_four(1), of_four(2)).loss_sum)
            assert abs(losses[1] / losses[0] - 1) < 1e-5
            close_by_name(stages[0], gradient(stages[1]), gradient(stages[0]))
            one, many = (s.layers.modules[1].self_attn.q_proj.packed for s in stages)
            assert many.num_bytes < 0.6 * one.num_bytes
    finally:
        group.close()
"""
)

DROPOUT = (
    BEGIN
    + """
from swarmnet.training.ranks.fsdp import check_split

spec = spec_of("phi3", 1, attention_dropout=0.3, resid_pdrop=0.2)
check_split(spec, 2)
group = start(spec)
try:
    one = [build_stage(spec, 0, computing=Computing())]
    compare(one, [build_fsdp_stage(spec, 0, group, Computing())])
finally:
    group.close()
"""
)


def test_a_family_in_every_way() -> None:
    """One matrix in two layers, a buffer, documents, texts, fp16."""
    run(FAMILY)


def test_ranks_agree_on_an_overflow() -> None:
    """Of the embedding of one token, which only one of the ranks has. In a subspace, too."""
    run(OVERFLOW)


def test_adapters_and_their_dropout() -> None:
    """The base in parts, in bf16, with a matrix in two layers."""
    run(f"""{ADAPTERS}
low = {{"target_modules": "all-linear", "lora_dropout": 0.3, "base_dtype": "bfloat16"}}
with tempfile.TemporaryDirectory() as name:
    dtype = compare(name, "qwen2", {{"tie_word_embeddings": True}}, low)
    assert dtype == torch.bfloat16
""")


def test_adapters_on_experts() -> None:
    run(f"""{ADAPTERS}
with tempfile.TemporaryDirectory() as name:
    compare(name, "mixtral", {{"num_local_experts": 4}}, ON_EXPERTS)
""")


def test_a_base_of_few_bits() -> None:
    """Of which a rank keeps some rows."""
    pytest.importorskip("torchao")
    run(FEW_BITS)


def test_what_a_model_leaves_out_is_that_of_one_rank() -> None:
    """Of the weights of attention, and of what a layer adds."""
    run(DROPOUT)


def test_same_numbers_and_less_memory_a_rank() -> None:
    """Four ranks with a whole model; two with a stage in the middle, and in bf16."""
    measured = json.loads(run(PROGRAM).splitlines()[-1])
    for num_ranks, (held, whole) in measured.items():
        assert held <= 1.1 * whole / int(num_ranks)
