"""A stage on ranks in rows, which cut matrices within a row and share sequences, or experts and
samples, among rows: the numbers of one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from swarmnet.errors import SpecError
from swarmnet.spec import LoraSpec, RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.memory import offload
from swarmnet.training.memory.plan import BF16, FP32, Precision, plan_memory
from swarmnet.training.memory.plan import EXPERTS as SHARE_EXPERTS
from swarmnet.training.memory.plan import SEQUENCES as SHARE_SEQUENCES
from swarmnet.training.models.frozen import FrozenLinear
from swarmnet.training.ranks.cut_check import check_cut
from swarmnet.training.ranks.cut_plan import cut_plan
from swarmnet.training.ranks.cuts import in_rows
from swarmnet.training.ranks.expert_layers import ExpertCut
from swarmnet.training.ranks.rows.row_stage import build_row_stage, check_rows
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage
from swarmnet.training.stage import TorchStage, build_stage
from tests.swarm.lora_runs import LORA, lora_run
from tests.training.flights import gradient, parameters
from tests.training.memory.test_memory_plan import kept_bytes
from tests.training.models.test_routers import FAMILIES
from tests.training.passes.test_generation import at_once, copy_all, through, tokens_of
from tests.training.ranks.test_expert_ranks import EXPERTS, same_reports
from tests.training.ranks.test_expert_ranks import spec_of as mixture_of
from tests.training.ranks.test_family_ranks import close_by_name, renew
from tests.training.ranks.test_family_ranks import compare as compare_family
from tests.training.ranks.test_family_ranks import spec_of as family_of
from tests.training.ranks.test_lora_ranks import (
    ALL,
    ALL_OF_LLAMA,
    WIDE,
    fill,
    randomize,
    stages_of_one,
)
from tests.training.ranks.test_lora_ranks import compare as compare_adapters
from tests.training.ranks.test_tensor_parallel import (
    ONE_STAGE,
    TOLERANCE,
    compare_evaluation,
    compare_microbatches,
    compare_packed,
    ranks,
    tokens,
)
from tests.training.ranks.threads import draw_by_thread, rank_threads
from tests.training.specs import small_spec
from tests.training.test_families import folder_of
from tests.training.test_lora import gradient_of, stages_of

POLICIES = ("keep", "blocks", "recompute", "offload")
SEQUENCES, OF_EXPERTS = "context", "experts"


def sequences_of(length: int = 19, **changes: Any) -> RunSpec:
    model = {"vocab_size": 257, "intermediate_size": 49, "num_key_value_heads": 2}
    model |= {"max_position_embeddings": length}
    return small_spec(model=model | changes.pop("model", {}), pipeline=ONE_STAGE, **changes)


def compare(spec: RunSpec, mode: str, num_ranks: int, row_size: int) -> None:
    """Also after other parameters have come."""
    one = build_stage(spec, 0)
    with rank_threads(spec, num_ranks, mode=mode, row_size=row_size) as group:
        many = build_row_stage(spec, 0, group)
        assert torch.equal(parameters(many), parameters(one))
        compare_microbatches(one, many, spec)
        compare_evaluation(one, many, spec)
        new = torch.randn(one.shard_sizes[1], generator=torch.Generator().manual_seed(5)) / 50
        for stage in (one, many):
            stage.stage_parameters(1, from_tensor(new))
            stage.finish_round()
        if mode == OF_EXPERTS:
            same_reports(one, many)
        for shard in range(len(one.shard_sizes)):
            assert many.digest(shard) == one.digest(shard)
        assert not gradient(many).any()
        compare_microbatches(one, many, spec)


@pytest.mark.parametrize(
    ("microbatch", "row_size", "model"),
    [
        (2, 2, {"shared_expert_intermediate_size": 15}),
        (3, 2, {"num_experts_per_tok": 1, "norm_topk_prob": False, "capacity_factor": 0.5}),
        pytest.param(
            5,
            3,
            {"num_experts": 5, "num_key_value_heads": 3, "num_attention_heads": 3}
            | {"hidden_size": 24, "capacity_factor": 1.0},
            marks=pytest.mark.long,
        ),
    ],
    ids=["shared", "switch", "uneven"],
)
def test_experts_and_matrices(microbatch: int, row_size: int, model: dict[str, Any]) -> None:
    compare(mixture_of(microbatch=microbatch, **model), OF_EXPERTS, 2 * row_size, row_size)


@pytest.mark.parametrize(
    "model",
    [
        {"shared_expert_intermediate_size": 15, "capacity_factor": 1.0},
        pytest.param({"num_experts_per_tok": 1}, marks=pytest.mark.long),
    ],
)
def test_experts_that_one_row_cuts(model: dict[str, Any]) -> None:
    spec = mixture_of(**model)
    one = build_stage(spec, 0)
    with rank_threads(spec, 2) as group:
        many = build_parallel_stage(spec, 0, group)
        assert sum(p.numel() for p in many.layers.parameters()) < 0.6 * many.num_parameters
        compare_microbatches(one, many, spec)
        compare_evaluation(one, many, spec)
        for stage in (one, many):
            stage.finish_round()
        same_reports(one, many)


def test_routers_of_a_family_that_one_row_cuts() -> None:
    sizes = {"initializer_range": 0.1, "num_experts_per_tok": 2, "num_local_experts": 4}
    spec = family_of("mixtral", 1, num_hidden_layers=2, **sizes)
    losses = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    spec = spec.model_copy(update={"model": spec.model.model_copy(update=losses)})
    one = build_stage(spec, 0, computing=Computing())
    with rank_threads(spec, 2) as group:
        many = build_parallel_stage(spec, 0, group, Computing(activations="blocks"))
        compare_family([one], [many])
        for stage in (one, many):
            stage.finish_round()
        same_reports(one, many)


@pytest.mark.parametrize(
    ("num_rows", "row_size", "num_kv_heads"),
    [
        (2, 2, 2),
        pytest.param(2, 4, 2, marks=pytest.mark.long),
        pytest.param(3, 2, 1, marks=pytest.mark.long),
    ],
)
def test_sequences_and_matrices(num_rows: int, row_size: int, num_kv_heads: int) -> None:
    spec = sequences_of(model={"num_key_value_heads": num_kv_heads, "subspace": 8})
    compare(spec, SEQUENCES, num_rows * row_size, row_size)


@pytest.mark.parametrize(
    ("mode", "activations"),
    [
        pytest.param(mode, policy, marks=() if policy in soon else pytest.mark.long)
        for mode, soon in ((SEQUENCES, ("blocks",)), (OF_EXPERTS, ("recompute",)))
        for policy in POLICIES
    ],
)
def test_documents_stay_apart_whatever_is_kept(
    mode: str, activations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    spec = sequences_of(data={"document_mask": True})
    if mode == OF_EXPERTS:
        spec = mixture_of(document_mask=True)
    computing = Computing("fp32", activations, folder=str(tmp_path))
    with rank_threads(spec, 4, mode=mode, row_size=2) as group:
        compare_packed(build_stage(spec, 0), build_row_stage(spec, 0, group, computing), spec)


@pytest.mark.parametrize(
    ("mode", "kind", "sizes"),
    [
        (OF_EXPERTS, "qwen3_moe", {"head_dim": 16, "moe_intermediate_size": 24}),
        (SEQUENCES, "qwen3", {"head_dim": 16}),
        pytest.param(OF_EXPERTS, "mixtral", {}, marks=pytest.mark.long),
        pytest.param(
            OF_EXPERTS,
            "qwen2_moe",
            {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
            marks=pytest.mark.long,
        ),
        pytest.param(SEQUENCES, "phi3", {}, marks=pytest.mark.long),
        pytest.param(SEQUENCES, "mistral", {"sliding_window": 24}, marks=pytest.mark.long),
        pytest.param(
            SEQUENCES,
            "gemma2",
            {"head_dim": 16, "attn_logit_softcapping": 0.02, "sliding_window": 8},
            marks=pytest.mark.long,
        ),
    ],
)
def test_families(mode: str, kind: str, sizes: dict[str, Any]) -> None:
    """Over two stages, of which the first is on rows; losses, gradients, logits and texts."""
    if mode == OF_EXPERTS:
        sizes = sizes | {"initializer_range": 0.1, "num_experts_per_tok": 2, FAMILIES[kind]: 4}
    spec = family_of(kind, 2, tied=kind == "qwen3", num_hidden_layers=2, **sizes)
    if mode == OF_EXPERTS:
        losses = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
        spec = spec.model_copy(update={"model": spec.model.model_copy(update=losses)})
    one = [build_stage(spec, k, computing=Computing()) for k in range(2)]
    with (
        rank_threads(spec, 4, mode=mode, row_size=2) as first,
        rank_threads(spec, 4, mode=mode, row_size=2) as last,
    ):
        many: list[TorchStage] = [
            build_row_stage(spec, k, group, Computing(activations="blocks"))
            for k, group in enumerate((first, last))
        ]
        compare_family(one, many)
        renew(one, many)
        compare_family(one, many, round_index=1)
        words = tokens_of(spec)
        found = [
            through(many, words[:, b:e], b, is_copied=False) for b, e in ((0, 7), (7, 8), (8, 12))
        ]
        copy_all(many)
        found.append(through(many, words, 0))
        expected = [at_once(one, words[:, :end]) for end in (7, 8, 12, words.shape[1])]
        torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [OF_EXPERTS, pytest.param(SEQUENCES, marks=pytest.mark.long)])
def test_adapters_of_a_family(mode: str, tmp_path: Path) -> None:
    """A base in bf16, whose experts are cut in two dimensions, and so are their adapters."""
    folder, lora = tmp_path / "model", {**ALL, "base_dtype": "bfloat16"}
    if mode == OF_EXPERTS:
        lora["target_modules"] = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
        folder_of(folder, "mixtral", num_local_experts=4)
    else:
        folder_of(folder, "qwen2")
    spec, _ = lora_run(folder, tmp_path, lora=lora)
    one = stages_of(spec, folder, Computing())
    with (
        rank_threads(spec, 4, mode=mode, row_size=2) as first,
        rank_threads(spec, 4, mode=mode, row_size=2) as last,
    ):
        many: list[TorchStage] = []
        for k, group in enumerate((first, last)):
            many.append(build_row_stage(spec, k, group, Computing(activations="blocks")))
            fill(many[-1], spec, folder)
        gradients = []
        for stages in (one, many):
            randomize(stages)
            gradients.append(gradient_of(stages, (1, 1)))
        start = 0
        for stage in one:
            stop = start + stage.num_parameters
            close_by_name(stage, gradients[1][start:stop], gradients[0][start:stop])
            start = stop


@pytest.mark.parametrize("mode", [pytest.param(SEQUENCES, marks=pytest.mark.long), OF_EXPERTS])
def test_adapters_of_the_built_in_model(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that it goes on from is left out."""
    modules = [*ALL_OF_LLAMA, "up_proj"]
    if mode == OF_EXPERTS:
        modules += ["shared_expert_gate", "experts.gate_up_proj", "experts.down_proj"]
    lora = LoraSpec.model_validate({**LORA, "target_modules": modules})
    model = EXPERTS | {"shared_expert_intermediate_size": 16} if mode == OF_EXPERTS else {}
    spec = small_spec(model=model, pipeline={"num_stages": 1, "microbatch": 2})
    spec = spec.model_copy(update={"lora": lora})
    monkeypatch.setattr(RunSpec, "from_canonical", lambda _: spec)
    one = build_stage(spec, 0, computing=Computing())
    with rank_threads(spec, 4, mode=mode, row_size=2) as group:
        many = build_row_stage(spec, 0, group, Computing())
        for stage in (one, many):
            for number, size in enumerate(stage.base.shard_sizes):
                generator = torch.Generator().manual_seed(number)
                stage.base.put(number, from_tensor(torch.randn(size, generator=generator) / 10))
            randomize([stage])
        for key in ((1, 0), (1, 1)):
            inputs, targets = tokens(spec, 1), tokens(spec, 2)
            results = [s.forward_backward(key, inputs, targets) for s in (one, many)]
            assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=TOLERANCE)
        close_by_name(one, gradient(many), gradient(one))


@pytest.mark.parametrize("mode", [SEQUENCES, OF_EXPERTS])
@pytest.mark.parametrize("precision", [FP32, pytest.param(BF16, marks=pytest.mark.long)])
def test_a_rank_keeps_no_more_than_the_plan_says(mode: str, precision: Precision) -> None:
    """Weights and gradients, and of one microbatch more in flight its activations."""
    model = {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 16}
    spec = mixture_of(3, 4, max_position_embeddings=64, **model)
    if mode == SEQUENCES:
        spec = small_spec(model={"max_position_embeddings": 64}, pipeline={"num_stages": 3})
    inputs, targets = tokens(spec, 1), tokens(spec, 2)
    shared = SHARE_EXPERTS if mode == OF_EXPERTS else SHARE_SEQUENCES
    about: dict[str, Any] = {"precision": precision, "activations": "keep", "num_replicas": 1}
    about |= {"num_ranks": 2, "shared": shared}
    one, two = (plan_memory(spec, in_flight=n, row_size=2, **about) for n in (1, 2))
    alone = plan_memory(spec, in_flight=1, **about)
    for k in range(2):
        with rank_threads(spec, 4, mode=mode, row_size=2) as group:
            stage = build_row_stage(spec, k, group, Computing(precision.name))  # type: ignore[arg-type]
            held = sum(p.numel() for p in stage.layers.parameters())
            measured, output = kept_bytes(stage, inputs, targets, has_own_tables=True)
            group.join()
        assert one[k].gradients == alone[k].gradients / 2
        assert one[k].gradients == pytest.approx(precision.gradients * held, rel=0.02)
        assert one[k].weights == pytest.approx(precision.weights * held, rel=0.02)
        first, second, whole = (of[k].activations for of in (one, two, alone))
        assert first is not None
        assert second is not None
        assert whole is not None
        assert measured < 1.02 * (second - first), f"stage {k}"
        if precision is FP32:  # of a small model in bf16 the plan counts nothing as cut
            assert 0.8 * (second - first) < measured, f"stage {k}"
            assert first < 0.95 * whole
        inputs = output or inputs


@pytest.mark.long
@pytest.mark.parametrize("mode", [SEQUENCES, OF_EXPERTS])
def test_ranks_that_are_processes(mode: str) -> None:
    """The rest of this page has threads."""
    spec = sequences_of() if mode == SEQUENCES else mixture_of()
    with ranks(spec, 4, mode=mode, row_size=2) as group:
        compare_microbatches(build_stage(spec, 0), build_row_stage(spec, 0, group), spec)


@pytest.mark.parametrize(
    ("mode", "changes", "row_size", "message"),
    [
        (SEQUENCES, {}, 3, "--tp 3: 4 heads .* cannot be cut so; possible: 1, 2, 4"),
        (SEQUENCES, {"model": {"max_position_embeddings": 3}}, 2, "--cp 2: .*too short"),
        (OF_EXPERTS, {}, 2, "--ep 2: models with experts go with it"),
    ],
)
def test_rows_that_cannot_be_are_one_line(
    mode: str, changes: dict[str, Any], row_size: int, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        check_rows(small_spec(**changes), mode, 2, row_size)


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        (SEQUENCES, "nf4"),
        (OF_EXPERTS, "int8"),
        pytest.param(SEQUENCES, "int8", marks=pytest.mark.long),
        pytest.param(OF_EXPERTS, "nf4", marks=pytest.mark.long),
    ],
)
def test_a_base_in_few_bits(mode: str, kept: str, tmp_path: Path) -> None:
    """Of a rank it is the part of its row."""
    pytest.importorskip("torchao")
    folder = tmp_path / "model"
    if mode == OF_EXPERTS:
        folder_of(folder, "mixtral", num_local_experts=4, **WIDE)
    else:
        folder_of(folder, "qwen2", **WIDE)
    spec, _ = lora_run(folder, tmp_path, lora={**ALL, "base_dtype": kept}, num_stages=1)
    (one,) = stages_of_one(spec, folder)
    with rank_threads(spec, 4, mode=mode, row_size=2) as group:
        many = build_row_stage(spec, 0, group, Computing(activations="blocks"))
        fill(many, spec, folder)
        packed, whole = (
            sum(
                m.packed.num_bytes
                for x in stage.layers.modules
                for m in x.modules()
                if isinstance(m, FrozenLinear) and m.packed
            )
            for stage in (many, one)
        )
        assert 0 < packed < 0.6 * whole
        compare_adapters(one, many)


@pytest.mark.parametrize(
    ("mode", "dropout"), [(OF_EXPERTS, 0.2), pytest.param(SEQUENCES, 0.2, marks=pytest.mark.long)]
)
def test_what_dropout_leaves_out_is_that_of_one_rank(
    mode: str, dropout: float, tmp_path: Path
) -> None:
    """In processes: dropout seeds torch, which threads have in common. Of a model, whose heads are
    cut, and of adapters, some of whose inputs are."""
    folder, lora = tmp_path / "model", {**ALL, "lora_dropout": 0.3}
    if mode == OF_EXPERTS:
        sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 16}
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
        folder_of(folder, "qwen2_moe", attention_dropout=dropout, **sizes)
    else:
        folder_of(folder, "qwen2", attention_dropout=dropout)
    spec, _ = lora_run(folder, tmp_path, lora=lora, num_stages=1)
    (one,) = stages_of_one(spec, folder)
    with ranks(spec, 4, mode=mode, row_size=2) as group:
        many = build_row_stage(spec, 0, group, Computing(activations="blocks"))
        fill(many, spec, folder)
        compare_adapters(one, many)


@pytest.mark.parametrize("mode", ["tensor", OF_EXPERTS])
@pytest.mark.parametrize("kept", ["int8", "nf4", ""])
def test_a_base_in_few_bits_and_dropout_of_the_built_in_mixture(
    kept: Literal["", "int8", "nf4"], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are linear layers, of which a row cuts each; rows may have other ones. Some inputs of
    adapters are cut. The run that it goes on from is left out."""
    if kept:
        pytest.importorskip("torchao")
    modules = [*ALL_OF_LLAMA, "shared_expert.up_proj", "experts.gate_up_proj", "experts.down_proj"]
    drawn = {"lora_dropout": 0.0 if kept else 0.3, "base_dtype": kept}
    modules = modules if kept else modules[:-2]
    lora = LoraSpec.model_validate({**LORA, "target_modules": modules, **drawn})
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 3}
    spec = mixture_of(microbatch=4, shared_expert_intermediate_size=128, **sizes)
    spec = spec.model_copy(update={"lora": lora})
    monkeypatch.setattr(RunSpec, "from_canonical", lambda _: spec)
    one = build_stage(spec, 0, computing=Computing())
    draw_by_thread(monkeypatch, one)
    row_size = 1 if mode == "tensor" else 2
    check_cut(spec, 2)
    make = build_parallel_stage if mode == "tensor" else build_row_stage
    with rank_threads(spec, 2 * row_size, mode=mode, row_size=row_size) as group:
        many = make(spec, 0, group, Computing(activations="blocks"))
        for stage in (one, many):
            for number, size in enumerate(stage.base.shard_sizes):
                generator = torch.Generator().manual_seed(number)
                stage.base.put(number, from_tensor(torch.randn(size, generator=generator) / 10))
            randomize([stage])
        packed = [
            sum(
                m.packed.num_bytes
                for x in stage.layers.modules
                for m in x.modules()
                if isinstance(m, FrozenLinear) and m.packed
            )
            for stage in (many, one)
        ]
        assert (0 < packed[0] < 0.55 * packed[1]) if kept else packed == [0, 0]
        for key in ((1, 0), (1, 1)):
            inputs, targets = tokens(spec, 1), tokens(spec, 2)
            results = [s.forward_backward(key, inputs, targets) for s in (one, many)]
            assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=TOLERANCE)
        close_by_name(one, gradient(many), gradient(one))


def test_a_part_of_a_part_is_read_and_written_where_it_lies() -> None:
    """Of six experts' matrices, a gate and what it gates, and of the adapters of these."""
    plans = {
        "model.layers.0.mlp.experts.gate_up_proj": (6, 10, 4),
        "model.layers.0.mlp.experts.down_proj": (6, 4, 5),
        "model.layers.0.mlp.expert_adapters.gate_up_proj.lora_B.weight": (10, 12),
        "model.layers.0.mlp.expert_adapters.down_proj.lora_A.weight": (12, 5),
    }
    plan = cut_plan(mixture_of(num_experts=6).model)
    both = in_rows(ExpertCut(6), plan, 2, 4)
    for name, shape in plans.items():
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        seen = torch.zeros(whole.numel())
        for rank in range(4):
            cut = both.cut(name, shape, rank, 4)
            mine = cut.of(whole).reshape(cut.shape(shape))
            assert mine.numel() == cut.num_elements(shape)
            seen[mine.flatten().long()] += 1
            put = torch.full(cut.shape(shape), -1.0)
            for first in range(0, whole.numel(), 7):
                cut.put(put, shape, first, whole.flatten()[first : first + 7])
            assert torch.equal(put, mine)
        assert (seen == 1).all(), name
