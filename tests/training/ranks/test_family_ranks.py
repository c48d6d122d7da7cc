"""Families of transformers, cut over ranks by their own plans: the numbers of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.ports import LossResult
from swarmnet.spec import RunSpec, load_spec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import ActivationsName, Computing
from swarmnet.training.models.model_config import load_config
from swarmnet.training.ranks import cut_plan, cut_trial
from swarmnet.training.ranks.cut_check import check_cut
from swarmnet.training.ranks.fsdp import check_split
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.flights import copied_gradient, gradient, parameters
from tests.training.ranks.test_tensor_parallel import ranks
from tests.training.ranks.threads import rank_threads
from tests.training.test_adapter import COMMON, FAMILIES, LENGTH, VOCABULARY, run_of, saved

CUSTOM = Path(__file__).parents[3] / "examples" / "custom_model.toml"
TOLERANCE = 1e-5
DOCUMENTS = (((10, 14), (1, 20, 3)), ((LENGTH,), (5, 19)))
CUT_OTHERWISE = {"phi3": {}, "olmo2": {}, "glm4": {"head_dim": 16}}
"""Packed matrices, whole outputs of matrices that are cut, biases."""


def spec_of(
    kind: str, num_stages: int, tied: bool = False, document_mask: bool = True, **more: Any
) -> RunSpec:
    values = {"model_type": kind, **COMMON, "tie_word_embeddings": tied, **more}
    values = {k: v for k, v in values.items() if k != "sliding_window_pattern"}
    return RunSpec.model_validate(
        {
            "model": {"kind": "transformers", "config": load_config(values).canonical_values},
            "data": {
                "paths": ["python-stdlib"],
                "sequence_length": LENGTH,
                "document_mask": document_mask,
            },
            "optimizer": {"learning_rate": 1e-3, "rounds": 4},
            "pipeline": {"num_stages": num_stages, "global_batch": 4, "microbatch": 2},
            "sync": {"shard_parameters": 4096},
        }
    )


def tokens(seed: int, num_ignored: int = 0) -> Array:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(VOCABULARY, (2, LENGTH), generator=generator, dtype=torch.int32)
    found[:, LENGTH - num_ignored :] = -100
    return from_tensor(found)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (found - expected).norm() <= tolerance * expected.norm()


def close_by_name(
    one: TorchStage, found: Tensor, expected: Tensor, tolerance: float = TOLERANCE
) -> None:
    """Each parameter's gradient, where it is not next to nothing beside the others."""
    least = expected.norm() / len(one.parameter_ranges)
    for r in one.parameter_ranges:
        part, wanted = found[r.start : r.stop], expected[r.start : r.stop]
        assert (part - wanted).norm() <= tolerance * max(wanted.norm(), least), r.name


def compare(
    one: Sequence[TorchStage],
    many: Sequence[TorchStage],
    tolerance: float = TOLERANCE,
    round_index: int = 0,
) -> None:
    """Microbatches of several documents through the stages and back, of which one is retracted;
    losses and logits of evaluation."""
    flown = []
    for stages in (one, many):
        losses = []
        for index in range(3):
            key, documents = (round_index, index), DOCUMENTS[index % 2]
            x, targets = tokens(index), tokens(10 + index, num_ignored=3 * index)
            for stage in stages[:-1]:
                x = stage.forward(key, x, documents)
            result = stages[-1].forward_backward(key, x, targets, documents)
            losses.append(result.loss_sum)
            grad = result.grad_inputs
            for stage in reversed(stages[:-1]):
                assert grad is not None
                grad = stage.backward(key, grad)
            if index == 1:
                copied = [copied_gradient(stage) for stage in stages]
        for stage in stages:
            stage.retract((round_index, 1))
        flown.append((losses, copied, [gradient(stage) for stage in stages]))
    (losses, *exact), (found_losses, *found) = flown
    assert found_losses == pytest.approx(losses, rel=tolerance)
    for ours, theirs in zip(found, exact, strict=True):
        for stage, part, wanted in zip(one, ours, theirs, strict=True):
            close_by_name(stage, part, wanted, tolerance)
    compare_evaluation(one, many, tolerance)


def compare_evaluation(
    one: Sequence[TorchStage], many: Sequence[TorchStage], tolerance: float
) -> None:
    evaluated = []
    for stages in (one, many):
        x = tokens(5)
        for stage in stages[:-1]:
            outputs = stage.evaluate(x, None, DOCUMENTS[0])
            assert isinstance(outputs, Array)
            x = outputs
        logits = stages[-1].evaluate(x, None, DOCUMENTS[0])
        loss = stages[-1].evaluate(x, tokens(6), DOCUMENTS[0])
        assert isinstance(logits, Array)
        assert isinstance(loss, LossResult)
        evaluated.append((to_tensor(logits), loss))
    (expected, wanted), (found, result) = evaluated
    close(found, expected, tolerance)
    assert result.loss_sum == pytest.approx(wanted.loss_sum, rel=tolerance)


def renew(one: Sequence[TorchStage], many: Sequence[TorchStage]) -> None:
    """Other parameters, and the next round."""
    for index, pair in enumerate(zip(one, many, strict=True)):
        generator = torch.Generator().manual_seed(index)
        new = from_tensor(torch.randn(pair[0].shard_sizes[0], generator=generator) / 30)
        for stage in pair:
            stage.stage_parameters(0, new)
            stage.finish_round()
        assert pair[0].digest(0) == pair[1].digest(0)
        assert not gradient(pair[1]).any()


POLICIES: tuple[ActivationsName, ...] = ("keep", "blocks", "recompute", "offload")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **FAMILIES,
    **{kind: (kind, more) for kind, more in CUT_OTHERWISE.items()},
}


@pytest.mark.parametrize("family", MODELS)
def test_a_family_on_two_ranks_has_the_numbers_of_one(family: str, tmp_path: Path) -> None:
    kind, more = MODELS[family]
    number = list(MODELS).index(family)
    activations, tied = POLICIES[number % 4], number % 2 == 0
    spec = spec_of(kind, 1, tied, **more)
    check_cut(spec, 2)
    one = [build_stage(spec, 0, computing=Computing())]
    with rank_threads(spec, 2) as group:
        computing = Computing(activations=activations, folder=str(tmp_path))
        many = [build_parallel_stage(spec, 0, group, computing)]
        assert torch.equal(parameters(many[0]), parameters(one[0]))
        compare(one, many)
        renew(one, many)
        compare(one, many, round_index=1)


@pytest.mark.parametrize(("family", "tied"), [("gemma3", True), ("qwen3", False)])
def test_stages_between_others(family: str, tied: bool) -> None:
    """Where embedding and output matrix are one, both stages have the whole of it."""
    kind, more = FAMILIES[family]
    spec = spec_of(kind, 2, tied, **more)
    one = [build_stage(spec, k, computing=Computing()) for k in range(2)]
    with rank_threads(spec, 2) as first, rank_threads(spec, 2) as last:
        many = [
            build_parallel_stage(spec, k, group, Computing())
            for k, group in enumerate((first, last))
        ]
        assert many[0].tied_shards == one[0].tied_shards
        assert bool(many[0].tied_shards) == tied
        compare(one, many)
        renew(one, many)
        compare(one, many, round_index=1)


@pytest.mark.parametrize(
    ("family", "precision", "tolerance"),
    [("gemma3", "bf16", 0.05), ("mixtral", "bf16", 0.05), ("mixtral", "fp16", 0.005)],
)
def test_low_precision(family: str, precision: Any, tolerance: float) -> None:
    """Close to one rank in fp32; what is taken out again leaves nothing but rounding."""
    kind, more = FAMILIES[family]
    spec = spec_of(kind, 1, True, **more)
    one = build_stage(spec, 0, computing=Computing())
    with rank_threads(spec, 2) as group:
        many = build_parallel_stage(spec, 0, group, Computing(precision))
        for r in range(2):
            for stage in (one, many):
                stage.forward_backward((r, 0), tokens(1), tokens(2), DOCUMENTS[0])
            ours, theirs = gradient(many), gradient(one)
            assert 1e-5 < ((ours - theirs).norm() / theirs.norm()) < tolerance
            many.retract((r, 0))
            assert gradient(many).abs().max() < 1e-4 * theirs.abs().max()
            renew([one], [many])


def test_ranks_that_are_processes(tmp_path: Path) -> None:
    """Buffers, matrices that are one, and documents, over the socket."""
    saved(tmp_path, "gemma3", True)
    spec = run_of(tmp_path, 1, document_mask=True)
    with ranks(spec, 2) as group:
        compare([build_stage(spec, 0)], [build_parallel_stage(spec, 0, group)])


@pytest.mark.parametrize(
    ("kind", "more", "activations"),
    [
        ("qwen3", {"head_dim": 16}, "keep"),
        ("gemma2", {"head_dim": 16, "sliding_window": 8}, "blocks"),
        ("phi3", {"resid_pdrop": 0.3, "embd_pdrop": 0.2}, "recompute"),
    ],
    ids=["fused attention", "attention with weights", "whole heads"],
)
def test_what_a_model_leaves_out_is_that_of_one_rank(
    kind: str, more: dict[str, Any], activations: ActivationsName
) -> None:
    """In processes: dropout seeds torch, which threads have in common."""
    spec = spec_of(kind, 1, attention_dropout=0.3, **more)
    check_cut(spec, 2)
    with ranks(spec, 2) as group:
        one = [build_stage(spec, 0, computing=Computing())]
        compare(one, [build_parallel_stage(spec, 0, group, Computing(activations=activations))])


@pytest.mark.long
@pytest.mark.parametrize("family", MODELS)
def test_four_ranks(family: str) -> None:
    kind, more = MODELS[family]
    spec = spec_of(kind, 1, **{**more, "num_key_value_heads": 4})
    with rank_threads(spec, 4) as group:
        many = build_parallel_stage(spec, 0, group, Computing())
        compare([build_stage(spec, 0, computing=Computing())], [many])


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("llama", {}, 3, "4 heads and 2 key/value heads cannot be cut so; possible: 1, 2"),
    ("llama", {}, 4, "possible: 1, 2"),
    ("gpt_oss", {"num_local_experts": 4}, 2, "transformers declares no tensor parallelism for"),
    ("deepseek_v2", {}, 2, "is cut as 'mla_kv_a_proj', which is not known here"),
    (
        "mixtral",
        {"num_local_experts": 4, "router_jitter_noise": 0.1},
        2,
        "model_type mixtral computes something else than one rank does",
    ),
]


@pytest.mark.parametrize(
    ("kind", "more", "num_ranks", "message"),
    REFUSED,
    ids=["heads", "too many ranks", "no plan", "style", "other draws"],
)
def test_what_cannot_be_cut_is_one_line(
    kind: str, more: dict[str, Any], num_ranks: int, message: str
) -> None:
    spec = spec_of(kind, 1, document_mask=False, **more)
    with pytest.raises(SpecError, match=rf"--tp {num_ranks}: .*{message}") as caught:
        check_cut(spec, num_ranks)
    assert "\n" not in str(caught.value)
    check_cut(spec, 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            spec_of("mixtral", 1, num_local_experts=4, router_jitter_noise=0.1),
            "what model_type mixtral draws cannot be drawn for some samples",
        ),
        (load_spec(CUSTOM), "a model of one's own that draws random numbers"),
    ],
    ids=["noise", "of one's own"],
)
def test_draws_that_samples_do_not_divide_are_one_line(
    spec: RunSpec, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet.training.ranks.fsdp.draws_itself", lambda _: True)
    with pytest.raises(SpecError, match=f"--tp 2 --local fsdp: {message}.*; take --tp 1"):
        check_split(spec, 2)
    check_split(spec, 1)


def test_routers_that_learn_are_not_of_some_samples_but_are_cut() -> None:
    spec = spec_of("mixtral", 1, num_local_experts=4)
    model = spec.model.model_copy(update={"router_aux_loss_coef": 0.01})
    spec = spec.model_copy(update={"model": model})
    with pytest.raises(SpecError, match="whole microbatches; leave --local fsdp out"):
        check_split(spec, 2)
    check_cut(spec, 2)


def test_sequence_parallel_is_for_the_built_in_llama() -> None:
    with pytest.raises(SpecError, match="--sequence-parallel is for the built-in Llama"):
        check_cut(spec_of("llama", 1), 2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.*.self_attn.q_norm": ""}, "computes something else"),
        ({"model.layers.*.self_attn.o_proj": "colwise"}, "does not work here"),
    ],
)
def test_a_plan_that_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    """Heads of several ranks share the norm's weight, for one."""
    config = spec_of("qwen3", 1, head_dim=32).model.config
    cut_trial.try_small.cache_clear()
    cut_trial.check_family(config)
    right = cut_plan.cut_plan

    def wrong(model: Any) -> Any:
        plan = right(model)
        return replace(plan, styles={**plan.styles, **changes})

    monkeypatch.setattr(cut_trial, "cut_plan", wrong)
    cut_trial.try_small.cache_clear()
    with pytest.raises(SpecError, match=message):
        cut_trial.check_family(config)
    cut_trial.try_small.cache_clear()
