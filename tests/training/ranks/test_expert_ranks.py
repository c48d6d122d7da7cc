"""A stage whose experts lie on several ranks computes what a stage on one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.batch import IGNORED
from swarmnet.errors import SpecError
from swarmnet.ports import LossResult
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.memory import offload
from swarmnet.training.memory.plan import (
    BF16,
    FP32,
    Precision,
    held_parts,
    plan_memory,
    stage_activations,
)
from swarmnet.training.memory.plan import EXPERTS as EXPERTS_ARE
from swarmnet.training.ranks.expert_stage import build_expert_stage, check_experts
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.flights import gradient, named, parameters
from tests.training.memory.test_memory_plan import kept_bytes
from tests.training.models.test_routers import FAMILIES
from tests.training.packed import lengths_of
from tests.training.passes.test_generation import at_once, change, copy_all, through, tokens_of
from tests.training.ranks.test_family_ranks import compare as compare_family
from tests.training.ranks.test_family_ranks import renew
from tests.training.ranks.test_family_ranks import spec_of as family_of
from tests.training.ranks.test_tensor_parallel import (
    TOLERANCE,
    close,
    close_by_name,
    compare_evaluation,
    compare_microbatches,
    compare_packed,
    ranks,
    tokens,
)
from tests.training.ranks.threads import rank_threads
from tests.training.specs import small_spec

POLICIES = ("keep", "blocks", "recompute", "offload")
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "router_aux_loss_coef": 0.5,
    "router_z_loss_coef": 0.1,
}
"""Routers that choose unlike, and whose losses weigh as much as the model's."""


def spec_of(
    num_stages: int = 1, microbatch: int = 2, document_mask: bool = False, **model: Any
) -> RunSpec:
    return small_spec(
        model=EXPERTS | model,
        pipeline={"num_stages": num_stages, "microbatch": microbatch, "global_batch": 60},
        data={"document_mask": document_mask},
    )


def same_reports(one: TorchStage, many: TorchStage) -> None:
    assert [r.layer for r in many.routed] == [r.layer for r in one.routed] != []
    for ours, theirs in zip(many.routed, one.routed, strict=True):
        assert ours.shares == pytest.approx(theirs.shares)
        assert ours.dropped == pytest.approx(theirs.dropped)
        assert ours.entropy == pytest.approx(theirs.entropy, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("num_ranks", "microbatch", "model"),
    [
        (2, 2, {"shared_expert_intermediate_size": 16}),
        (2, 3, {"num_experts_per_tok": 1, "norm_topk_prob": False, "capacity_factor": 0.5}),
        (3, 5, {"num_experts": 5, "num_experts_per_tok": 3, "capacity_factor": 1.0}),
    ],
    ids=["shared", "switch", "uneven"],
)
def test_losses_gradients_logits_and_reports_are_those_of_one_rank(
    num_ranks: int, microbatch: int, model: dict[str, Any]
) -> None:
    spec = spec_of(microbatch=microbatch, **model)
    one = build_stage(spec, 0)
    with rank_threads(spec, num_ranks, mode="experts") as group:
        many = build_expert_stage(spec, 0, group)
        assert torch.equal(parameters(many), parameters(one))
        compare_microbatches(one, many, spec)
        compare_evaluation(one, many, spec)
        new = torch.randn(one.shard_sizes[1], generator=torch.Generator().manual_seed(5)) / 50
        for stage in (one, many):
            stage.stage_parameters(1, from_tensor(new))
            stage.finish_round()
        same_reports(one, many)
        for shard in range(len(one.shard_sizes)):
            assert many.digest(shard) == one.digest(shard)
        assert not gradient(many).any()
        compare_microbatches(one, many, spec)


@pytest.mark.parametrize("activations", POLICIES)
def test_documents_stay_apart_whatever_is_kept(
    activations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where fewer tokens have a target than another rank's, or none."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    spec = spec_of(document_mask=True)
    computing = Computing("fp32", activations, folder=str(tmp_path))
    with rank_threads(spec, 2, mode="experts") as group:
        compare_packed(build_stage(spec, 0), build_expert_stage(spec, 0, group, computing), spec)


@pytest.mark.parametrize("activations", POLICIES)
def test_stages_between_others_give_whole_microbatches(
    activations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    spec = spec_of(num_stages=3, microbatch=3, document_mask=True, capacity_factor=1.0)
    computing = Computing("fp32", activations, folder=str(tmp_path))
    lengths = tuple(lengths_of(16, i) for i in range(3))
    targets = to_tensor(tokens(spec, 2)).clone()
    targets[0, 4:] = IGNORED
    wanted = from_tensor(targets)
    with rank_threads(spec, 2, mode="experts") as group:
        inputs = tokens(spec, 1)
        for index in range(2):
            one = build_stage(spec, index)
            many = build_expert_stage(spec, index, group, computing)
            out, sent = inputs, inputs
            for number in range(2):
                out, sent = (s.forward((0, number), inputs, lengths, wanted) for s in (many, one))
                close(to_tensor(out), to_tensor(sent))
            # Another pass, of other samples, comes between those of a microbatch.
            few = from_tensor(to_tensor(inputs)[:1])
            value, expected = (s.evaluate(few, None, lengths[:1]) for s in (many, one))
            assert isinstance(value, Array)
            assert isinstance(expected, Array)
            close(to_tensor(value), to_tensor(expected))
            grad = from_tensor(torch.randn(out.shape))
            for number in (1, 0):
                back, theirs = (s.backward((0, number), grad) for s in (many, one))
                assert (back is None) == (theirs is None) == (index == 0)
                if back is not None and theirs is not None:
                    close(to_tensor(back), to_tensor(theirs))
            close_by_name(one, gradient(many), gradient(one))
            for stage in (one, many):
                stage.retract((0, 0))
            close_by_name(one, gradient(many), gradient(one))
            for stage in (one, many):
                stage.finish_round()
            same_reports(one, many)
            inputs = sent


@pytest.mark.parametrize("activations", ["keep", "blocks"])
def test_a_rank_whose_experts_nobody_chooses_takes_part(activations: Any) -> None:
    """Of four experts the first two win: the weights of one are those of the other, negated, and
    the rest have none."""
    spec = spec_of(num_experts_per_tok=1)
    one = build_stage(spec, 0)
    new = parameters(one).clone()
    for name, values in named(one, new).items():
        if name.endswith("mlp.gate.weight"):
            values[1], values[2:] = -values[0], 0.0
    with rank_threads(spec, 2, mode="experts") as group:
        many = build_expert_stage(spec, 0, group, Computing("fp32", activations))
        for stage in (one, many):
            start = 0
            for shard, size in enumerate(stage.shard_sizes):
                stage.stage_parameters(shard, from_tensor(new[start : start + size].clone()))
                start += size
            stage.finish_round()
        compare_microbatches(one, many, spec)
        for stage in (one, many):
            stage.finish_round()
        assert all(r.shares[2:] == (0.0, 0.0) for r in many.routed)
        same_reports(one, many)


def test_a_batch_of_fewer_samples_than_ranks_is_evaluated() -> None:
    spec = spec_of(microbatch=3)
    one = build_stage(spec, 0)
    with rank_threads(spec, 3, mode="experts") as group:
        many = build_expert_stage(spec, 0, group)
        for num_samples in (1, 2):
            inputs, targets = (
                from_tensor(to_tensor(tokens(spec, seed))[:num_samples, :7]) for seed in (1, 2)
            )
            loss, expected = (s.evaluate(inputs, targets) for s in (many, one))
            assert isinstance(loss, LossResult)
            assert isinstance(expected, LossResult)
            assert loss.num_tokens == expected.num_tokens
            assert loss.loss_sum == pytest.approx(expected.loss_sum, rel=TOLERANCE)
            logits, wanted = (s.evaluate(inputs, None) for s in (many, one))
            assert isinstance(logits, Array)
            assert isinstance(wanted, Array)
            close(to_tensor(logits), to_tensor(wanted))


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.2), ("fp16", 0.05)])
def test_ranks_in_low_precision(precision: Any, tolerance: float) -> None:
    """Close to one rank in fp32, as close as one rank is in this precision: rounding sends some
    tokens elsewhere. What is taken out again leaves nothing but rounding."""
    spec = spec_of(initializer_range=0.1, shared_expert_intermediate_size=16)
    one = build_stage(spec, 0, computing=Computing("fp32"))
    with rank_threads(spec, 2, mode="experts") as group:
        many = build_expert_stage(spec, 0, group, Computing(precision, "recompute"))
        for r in range(2):
            for index in range(2):
                inputs, targets = tokens(spec, index), tokens(spec, 10 + index)
                expected = one.forward_backward((r, index), inputs, targets)
                result = many.forward_backward((r, index), inputs, targets)
                assert result.loss_sum == pytest.approx(expected.loss_sum, rel=0.02)
            ours, theirs = gradient(many), gradient(one)
            assert ((ours - theirs).norm() / theirs.norm()).item() < tolerance
            for index in range(2):
                many.retract((r, index))
            assert gradient(many).abs().max() < 1e-3 * theirs.abs().max()
            for stage in (one, many):
                stage.finish_round()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda p: p.name)
def test_a_rank_has_what_the_plan_says(
    precision: Precision, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts and all else, and of one microbatch more in flight so much more. Each token goes
    to all experts, so that all ranks get as many."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    spec = spec_of(
        3, 4, num_experts_per_tok=4, shared_expert_intermediate_size=16, max_position_embeddings=64
    )
    computing = Computing(precision.name, policy, folder=str(tmp_path))  # type: ignore[arg-type]
    inputs, targets = tokens(spec, 1), tokens(spec, 2)
    about: dict[str, Any] = {"precision": precision, "activations": policy, "num_replicas": 1}
    about |= {"num_ranks": 2, "shared": EXPERTS_ARE}
    one, two = (plan_memory(spec, in_flight=n, **about) for n in (1, 2))
    for k in range(3):
        with rank_threads(spec, 2, mode="experts") as group:
            stage = build_expert_stage(spec, k, group, computing)
            held = sum(p.numel() for p in stage.layers.parameters())
            assert one[k].gradients == pytest.approx(precision.gradients * held)
            assert one[k].weights == pytest.approx(precision.weights * held)
            measured, output = kept_bytes(stage, inputs, targets)
            group.join()
        first, second = one[k].activations, two[k].activations
        assert first is not None
        assert second is not None
        if not stage.is_last:
            assert second - first == pytest.approx(measured, rel=0.01), f"stage {k}"
        elif policy == "keep":
            planned = stage_activations(spec, k, precision, 2, EXPERTS_ARE)
            assert planned is not None
            assert first - planned.passing == pytest.approx(measured, rel=0.01)
        inputs = output or inputs


def test_all_ranks_help_to_write_texts() -> None:
    spec = spec_of(num_stages=2)
    words = tokens_of(spec)
    one = [build_stage(spec, k, computing=Computing()) for k in range(2)]
    with (
        rank_threads(spec, 2, mode="experts") as first,
        rank_threads(spec, 2, mode="experts") as last,
    ):
        many: list[TorchStage] = [
            build_expert_stage(spec, k, group, Computing()) for k, group in enumerate((first, last))
        ]
        expected = [at_once(one, words[:, :end]) for end in (7, 8, 12)]
        copy_all(many)
        found = []
        for begin, end in ((0, 7), (7, 8), (8, 12)):
            found.append(through(many, words[:, begin:end], begin))
            change(many)
        torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)
        for stage in many:
            assert stage.generation is not None
            stage.generation.drop_copy()
        now = [through(many, words[:, b:e], b, is_copied=False) for b, e in ((0, 11), (11, 12))]
        change(one)
        change(one)
        change(one)
        torch.testing.assert_close(now[-1], at_once(one, words[:, :12]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_mixtures_of_transformers(family: str) -> None:
    """Losses, gradients, logits and texts, over two stages."""
    sizes = {"num_experts_per_tok": 2, "initializer_range": 0.1, FAMILIES[family]: 4}
    if family != "mixtral":
        sizes["moe_intermediate_size"] = 24
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 16
    spec = family_of(family, 2, tied=family == "qwen3_moe", **sizes)
    losses = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    spec = spec.model_copy(update={"model": spec.model.model_copy(update=losses)})
    one = [build_stage(spec, k, computing=Computing()) for k in range(2)]
    with (
        rank_threads(spec, 2, mode="experts") as first,
        rank_threads(spec, 2, mode="experts") as last,
    ):
        many = [
            build_expert_stage(spec, k, group, Computing(activations="blocks"))
            for k, group in enumerate((first, last))
        ]
        for ours, theirs in zip(many, one, strict=True):
            held = sum(p.numel() for p in ours.layers.parameters())
            assert held == pytest.approx(
                held_parts(spec, ours.stage_index, 2)[0] * len(parameters(theirs))
            )
        compare_family(one, many)
        renew(one, many)
        for ours, theirs in zip(many, one, strict=True):
            same_reports(theirs, ours)
        compare_family(one, many, round_index=1)
        words = tokens_of(spec)
        found = [
            through(many, words[:, b:e], b, is_copied=False) for b, e in ((0, 7), (7, 8), (8, 12))
        ]
        expected = [at_once(one, words[:, :end]) for end in (7, 8, 12)]
        torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_processes_have_experts_each() -> None:
    """The rest of this page has threads."""
    spec = spec_of()
    with ranks(spec, 2, mode="experts") as group:
        compare_microbatches(build_stage(spec, 0), build_expert_stage(spec, 0, group), spec)


@pytest.mark.parametrize(
    ("model", "microbatch", "num_ranks", "message"),
    [
        ({"num_experts": 0, "num_experts_per_tok": 0}, 4, 2, "models with experts go with it"),
        ({}, 3, 4, "3 samples in a microbatch; take --ep 3, or less"),
        ({}, 8, 5, "4 experts; take --ep 4, or less"),
        ({}, 1, 2, "1 samples in a microbatch; leave it out"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_one_line(
    model: dict[str, Any], microbatch: int, num_ranks: int, message: str
) -> None:
    values = EXPERTS | model
    if not values["num_experts"]:
        values = {}
    spec = small_spec(
        model=values, pipeline={"num_stages": 1, "microbatch": microbatch, "global_batch": 24}
    )
    with pytest.raises(SpecError, match=rf"--ep {num_ranks}: .*{message}"):
        check_experts(spec, num_ranks)
    check_experts(spec, 1)


def test_what_cannot_be_drawn_for_some_samples_is_one_line() -> None:
    """Noise before routers is no dropout."""
    spec = family_of("mixtral", 1, num_local_experts=4, router_jitter_noise=0.1)
    with pytest.raises(SpecError, match=r"--ep 2: .*mixtral draws cannot .*; leave it out"):
        check_experts(spec, 2)
    check_experts(family_of("mixtral", 1, num_local_experts=4, attention_dropout=0.1), 2)
