"""Adapters over a base that several ranks share: the numbers of one rank, and a part of the base
on each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from swarmnet.errors import ProtocolViolation, SpecError
from swarmnet.ports import LossResult
from swarmnet.spec import LoraSpec, RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.models.frozen import FrozenLinear
from swarmnet.training.models.initial_weights import InitialLayout, InitialSources
from swarmnet.training.models.lora import LoraLinear
from swarmnet.training.ranks.context_parallel_stage import (
    build_context_parallel_stage,
    check_sequences,
)
from swarmnet.training.ranks.cut_check import check_cut
from swarmnet.training.ranks.expert_stage import build_expert_stage, check_experts
from swarmnet.training.ranks.fsdp import check_split
from swarmnet.training.ranks.rank_stage import LeadStage
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage
from swarmnet.training.stage import TorchStage, build_stage
from tests.swarm.lora_runs import LORA, lora_run
from tests.training.flights import gradient
from tests.training.ranks.test_family_ranks import close, close_by_name
from tests.training.ranks.test_tensor_parallel import ranks
from tests.training.ranks.threads import rank_threads
from tests.training.specs import small_spec
from tests.training.test_families import folder_of
from tests.training.test_lora import gradient_of, stages_of, tokens

ALL_OF_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
ALL = {**LORA, "target_modules": "all-linear"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases, one matrix": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "norms of heads": ("qwen3", {"head_dim": 16}),
    "whole outputs": ("olmo2", {}),
    "scaled embedding": ("gemma2", {"head_dim": 16, "sliding_window": 8}),
    "experts": ("mixtral", {"num_local_experts": 4}),
    "adapted experts": ("mixtral", {"num_local_experts": 4}),
}
"""What is special in the cut."""
WHOLE: dict[str, tuple[Callable[..., None], Callable[..., LeadStage]]] = {
    "context": (check_sequences, build_context_parallel_stage),
    "experts": (check_experts, build_expert_stage),
}
"""Ranks that have whole matrices: what says whether they can, and what builds theirs."""
ON_EXPERTS = {**LORA, "target_modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}


def fill(stage: TorchStage, spec: RunSpec, folder: Path) -> None:
    """Its base, as it comes from others: in any order."""
    layout = InitialLayout.of(spec)
    sources = InitialSources(spec, layout, folder, None)
    numbers = range(len(layout.base_sizes[stage.stage_index]))
    assert stage.base.missing == list(numbers)
    for number in reversed(numbers):
        values = sources.read(stage.stage_index, number)
        assert values is not None
        stage.base.put(number, from_tensor(values))
    assert not stage.base.missing


def randomize(stages: list[TorchStage]) -> None:
    """B is not zero: so that the gradient of A is not either."""
    for stage in stages:
        for j, size in enumerate(stage.shard_sizes):
            generator = torch.Generator().manual_seed(100 * stage.stage_index + j)
            stage.stage_parameters(j, from_tensor(torch.randn(size, generator=generator) / 30))
        stage.finish_round()


def random_biases(kind: str, folder: Path) -> None:
    """A model's begin with zeros, which nobody would miss."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    named = load_file(path)
    generator = torch.Generator().manual_seed(3)
    for name, values in named.items():
        if name.endswith(".bias"):
            values.normal_(0.0, 0.1, generator=generator)
    save_file(named, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_a_family_have_the_numbers_of_one_rank(family: str, tmp_path: Path) -> None:
    kind, more = FAMILIES[family]
    folder = tmp_path / "model"
    folder_of(folder, kind, **more)
    random_biases(kind, folder)
    lora = ON_EXPERTS if family == "adapted experts" else ALL
    spec, _ = lora_run(folder, tmp_path, lora=lora)
    one = stages_of(spec, folder, Computing())
    with rank_threads(spec, 2) as first, rank_threads(spec, 2) as last:
        many: list[TorchStage] = []
        for k, group in enumerate((first, last)):
            check_cut(spec, 2)
            many.append(build_parallel_stage(spec, k, group, Computing(activations="blocks")))
            fill(many[-1], spec, folder)
        gradients = []
        for stages in (one, many):
            randomize(stages)
            gradients.append(gradient_of(stages, (1, 1)))
        size = 0
        for stage in one:
            stop = size + stage.num_parameters
            close_by_name(stage, gradients[1][size:stop], gradients[0][size:stop])
            size = stop
        for stage in (*one, *many):
            stage.retract((1, 1))
        assert gradient_of(many, (1, 2)).norm() > 0
        close(gradient_of(many, (1, 3)) / 2, gradient_of(one, (1, 3)), 1e-5)


@pytest.mark.parametrize(("num_kv_heads", "sequence_parallel"), [(2, False), (1, True)])
def test_adapters_of_the_built_in_llama(
    num_kv_heads: int, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks may hold the only key/value head. The run that it goes on from is left out."""
    lora = LoraSpec.model_validate({**LORA, "target_modules": ALL_OF_LLAMA})
    spec = small_spec(
        model={"num_key_value_heads": num_kv_heads, "subspace": 8},
        pipeline={"num_stages": 1, "microbatch": 4},
    ).model_copy(update={"lora": lora})
    monkeypatch.setattr(RunSpec, "from_canonical", lambda _: spec)
    check_cut(spec, 2, sequence_parallel=sequence_parallel)
    one = build_stage(spec, 0, computing=Computing())
    with rank_threads(spec, 2, sequence_parallel=sequence_parallel) as group:
        many = build_parallel_stage(spec, 0, group, Computing())
        for stage in (one, many):
            for number, size in enumerate(stage.base.shard_sizes):
                generator = torch.Generator().manual_seed(number)
                values = torch.randn(size, generator=generator) / 10
                stage.base.put(number, from_tensor(values))
            randomize([stage])
        for key in ((1, 0), (1, 1)):
            results = [s.forward_backward(key, tokens(1), tokens(2)) for s in (one, many)]
            assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=1e-5)
        many.retract((1, 1))
        one.retract((1, 1))
        close_by_name(one, gradient(many), gradient(one))


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_each_rank_has_its_part_of_the_base(dtype: str, tmp_path: Path) -> None:
    """Rounded once where the run says so, and no more than it, whoever asks."""
    folder = tmp_path / "model"
    folder_of(folder, "llama")
    spec, _ = lora_run(folder, tmp_path, lora={**LORA, "base_dtype": dtype}, num_stages=1)
    (one,) = stages_of_one(spec, folder)
    with rank_threads(spec, 2) as group:
        many = build_parallel_stage(spec, 0, group, Computing())
        with pytest.raises(ProtocolViolation):
            many.base.put(0, from_tensor(torch.zeros(3)))
        fill(many, spec, folder)
        held = {n: p for m in many.layers.modules for n, p in m.named_parameters()}
        whole = {n: p for m in one.layers.modules for n, p in m.named_parameters()}
        for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight"):
            assert held[name].numel() * 2 == whole[name].numel()
            assert held[name].dtype == whole[name].dtype
        assert torch.equal(held["self_attn.q_proj.weight"], whole["self_attn.q_proj.weight"][:16])
        assert torch.equal(held["mlp.down_proj.weight"], whole["mlp.down_proj.weight"][:, :24])
        for stage in (one, many):
            randomize([stage])
        results = [s.forward_backward((1, 0), tokens(1), tokens(2)) for s in (one, many)]
        assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=1e-5)


def stages_of_one(spec: RunSpec, folder: Path) -> list[TorchStage]:
    stage = build_stage(spec, 0, computing=Computing())
    fill(stage, spec, folder)
    return [stage]


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
"""Two ranks have whole blocks of nf4."""


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_a_base_of_few_bits_is_that_of_one_rank(family: str, kind: str, tmp_path: Path) -> None:
    """To the bit, and of a rank it is a part. Biases, and matrices of two."""
    pytest.importorskip("torchao")
    folder = tmp_path / "model"
    folder_of(folder, family, **WIDE)
    spec, _ = lora_run(folder, tmp_path, lora={**ALL, "base_dtype": kind}, num_stages=1)
    check_cut(spec, 2)
    (one,) = stages_of_one(spec, folder)
    with rank_threads(spec, 2) as group:
        many = build_parallel_stage(spec, 0, group, Computing(activations="blocks"))
        fill(many, spec, folder)
        wholes, parts = (
            [
                m
                for x in stage.layers.modules
                for m in x.modules()
                if isinstance(m, FrozenLinear) and m.packing
            ]
            for stage in (one, many)
        )
        assert len(parts) == len(wholes) > 0
        for whole, part in zip(wholes, parts, strict=True):
            assert whole.packed is not None
            assert part.packed is not None
            assert part.weight.numel() == 0
            assert part.packed.num_bytes < 0.6 * whole.packed.num_bytes
            values, mine = (m.packed.unpacked(torch.float32) for m in (whole, part) if m.packed)
            assert torch.isin(mine, values).all()
        for stage in (one, many):
            randomize([stage])
        results = [s.forward_backward((1, 0), tokens(1), tokens(2)) for s in (one, many)]
        assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=1e-5)
        close_by_name(one, gradient(many), gradient(one))
        evaluated = [stage.evaluate(tokens(3), tokens(4)) for stage in (one, many)]
        losses = [result.loss_sum for result in evaluated if isinstance(result, LossResult)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_blocks_that_ranks_cannot_share_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet.training.models.lora.check_packing", lambda _: None)
    folder = tmp_path / "model"
    folder_of(folder, "llama", **{**WIDE, "intermediate_size": 192})
    spec, _ = lora_run(folder, tmp_path, lora={**LORA, "base_dtype": "nf4"})
    message = r"nf4 has a scale for 64 inputs, and those of .*mlp.down_proj \(192\)"
    with pytest.raises(SpecError, match=rf"--tp 2: .*{message}.*; take --tp 2 --local fsdp"):
        check_cut(spec, 2)
    check_split(spec, 2)
    check_cut(spec, 1)
    folder_of(folder, "llama", **{**WIDE, "intermediate_size": 96})
    for check in (check_cut, check_split):
        with pytest.raises(SpecError, match=r"\(96\) cannot be shared out so; take --tp 1"):
            check(lora_run(folder, tmp_path, lora={**LORA, "base_dtype": "nf4"})[0], 2)


def test_adapters_over_experts_that_ranks_divide(tmp_path: Path) -> None:
    """In processes: dropout seeds torch, that of the model too. Of four samples two are on rank 0;
    linear layers of the shared expert get tokens, others samples."""
    folder = tmp_path / "model"
    sizes = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16}
    folder_of(folder, "qwen2_moe", num_experts_per_tok=2, attention_dropout=0.2, **sizes)
    lora = {**ALL, "lora_dropout": 0.3, "base_dtype": "bfloat16"}
    spec, _ = lora_run(folder, tmp_path, lora=lora, num_stages=1)
    (one,) = stages_of_one(spec, folder)
    with ranks(spec, 3, mode="experts") as group:
        many = build_expert_stage(spec, 0, group, Computing(activations="blocks"))
        fill(many, spec, folder)
        held = {n: p for m in many.layers.modules for n, p in m.named_parameters()}
        assert held["mlp.experts.down_proj"].shape[0] == 1
        losses = []
        for stage in (one, many):
            randomize([stage])
            losses.append(stage.forward_backward((1, 0), tokens(1), tokens(2)).loss_sum)
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        close_by_name(one, gradient(many), gradient(one))
        many.retract((1, 0))
        assert gradient(many).norm() < 1e-5 * gradient(one).norm()


@pytest.mark.parametrize("activations", ["keep", "blocks"])
def test_ranks_have_the_adapters_of_their_experts(activations: Any, tmp_path: Path) -> None:
    """Of four experts one rank has two; of four samples too."""
    folder = tmp_path / "model"
    folder_of(folder, "mixtral", num_local_experts=4)
    spec, _ = lora_run(folder, tmp_path, lora=ON_EXPERTS, num_stages=1)
    (one,) = stages_of_one(spec, folder)
    with rank_threads(spec, 3, mode="experts") as group:
        many = build_expert_stage(spec, 0, group, Computing(activations=activations))
        fill(many, spec, folder)
        held = {n: tuple(p.shape) for m in many.layers.modules for n, p in m.named_parameters()}
        assert held["mlp.expert_adapters.gate_up_proj.lora_A.weight"] == (4, 32)
        assert held["mlp.expert_adapters.gate_up_proj.lora_B.weight"] == (96, 4)
        assert held["mlp.expert_adapters.down_proj.lora_B.weight"] == (32, 4)
        compare(one, many)


def compare(one: TorchStage, many: TorchStage) -> None:
    """Losses and gradients, and what is left where a microbatch is taken out again."""
    losses = []
    for stage in (one, many):
        randomize([stage])
        losses.append(stage.forward_backward((1, 0), tokens(1), tokens(2)).loss_sum)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    whole = gradient(one)
    close_by_name(one, gradient(many), whole)
    many.retract((1, 0))
    assert gradient(many).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("kept", ["", "int8"])
def test_adapters_on_experts_of_the_built_in_model(
    kept: Literal["", "int8"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven: of three experts rank 1 has two. The run that it goes on from is left out."""
    if kept:
        pytest.importorskip("torchao")
    targets = ["shared_expert.down_proj", "experts.gate_up_proj", "experts.down_proj"]
    lora = LoraSpec.model_validate({**LORA, "target_modules": targets, "base_dtype": kept})
    mixture = {"num_experts": 3, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}
    spec = small_spec(
        model=mixture, pipeline={"num_stages": 1, "microbatch": 4, "global_batch": 8}
    ).model_copy(update={"lora": lora})
    monkeypatch.setattr(RunSpec, "from_canonical", lambda _: spec)
    one = build_stage(spec, 0, computing=Computing())
    with rank_threads(spec, 2, mode="experts") as group:
        many = build_expert_stage(spec, 0, group, Computing())
        for stage in (one, many):
            for number, size in enumerate(stage.base.shard_sizes):
                generator = torch.Generator().manual_seed(number)
                values = torch.randn(size, generator=generator) / 5
                stage.base.put(number, from_tensor(values))
        compare(one, many)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("mode", ["context", "experts"])
def test_a_base_of_few_bits_that_each_rank_has(mode: str, kind: str, tmp_path: Path) -> None:
    """As one rank has it, of inputs that are no whole blocks of nf4 too."""
    pytest.importorskip("torchao")
    check, make = WHOLE[mode]
    folder = tmp_path / "model"
    if mode == "experts":
        folder_of(folder, "mixtral", num_local_experts=4)
    else:
        folder_of(folder, "qwen2")
    spec, _ = lora_run(folder, tmp_path, lora={**ALL, "base_dtype": kind}, num_stages=1)
    check(spec, 2)
    (one,) = stages_of_one(spec, folder)
    with rank_threads(spec, 2, mode=mode) as group:
        many = make(spec, 0, group, Computing(activations="blocks"))
        fill(many, spec, folder)
        linears = [m for x in many.layers.modules for m in x.modules() if isinstance(m, LoraLinear)]
        assert all(m.packed is not None and m.weight.numel() == 0 for m in linears)
        compare(one, many)


@pytest.mark.parametrize("mode", ["tensor", "context"])
def test_what_dropout_leaves_out_is_that_of_one_rank(mode: str, tmp_path: Path) -> None:
    """In processes: dropout seeds torch, which threads have in common. The inputs of some adapters
    are cut, and those of others not, or each rank has two pieces of every sequence."""
    check, make = {"tensor": (check_cut, build_parallel_stage), **WHOLE}[mode]
    folder = tmp_path / "model"
    folder_of(folder, "llama")
    spec, _ = lora_run(folder, tmp_path, lora={**ALL, "lora_dropout": 0.3}, num_stages=1)
    check(spec, 2)
    with ranks(spec, 2, mode=mode) as group:
        stages = [
            build_stage(spec, 0, computing=Computing()),
            make(spec, 0, group, Computing(activations="blocks")),
        ]
        losses = []
        for stage in stages:
            fill(stage, spec, folder)
            randomize([stage])
            losses.append(stage.forward_backward((1, 0), tokens(1), tokens(2)).loss_sum)
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        close_by_name(stages[0], gradient(stages[1]), gradient(stages[0]))
        stages[1].retract((1, 0))
        assert gradient(stages[1]).norm() < 1e-5 * gradient(stages[0]).norm()
