"""A stage on several ranks computes what a stage on one computes."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from swarmnet.batch import IGNORED
from swarmnet.errors import NotReady, ProtocolViolation, SpecError
from swarmnet.ports import LossResult
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.models.registry import model_plan
from swarmnet.training.ranks.cut_check import check_cut
from swarmnet.training.ranks.cut_layers import lay_out
from swarmnet.training.ranks.cut_plan import cut_plan
from swarmnet.training.ranks.local_group import LocalGroup, RankLost, open_process_group
from swarmnet.training.ranks.rank_stage import LeadStage
from swarmnet.training.ranks.tensor_parallel_stage import (
    build_parallel_stage,
    rank_options,
)
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.flights import copied_gradient, gradient, parameters
from tests.training.packed import lengths_of
from tests.training.specs import MODEL, small_spec

ONE_STAGE = {"num_stages": 1, "global_batch": 8, "microbatch": 2}
TOLERANCE = 1e-5


@contextmanager
def ranks(
    spec: RunSpec,
    num_ranks: int,
    *,
    sequence_parallel: bool = False,
    mode: str = "tensor",
    row_size: int = 1,
    **options: Any,
) -> Iterator[LocalGroup]:
    about: dict[str, Any] = {"sequence_parallel": sequence_parallel, "mode": mode}
    if row_size > 1:
        options["open_group"] = functools.partial(open_process_group, row_size=row_size)
    group = LocalGroup(
        num_ranks,
        threads=1,
        options=rank_options(spec, row_size=row_size, **about),
        **options,
    )
    try:
        yield group
    finally:
        group.close()


def tokens(spec: RunSpec, seed: int, *, length: int | None = None) -> Array:
    shape = (spec.pipeline.microbatch, length or spec.model.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    return from_tensor(
        torch.randint(spec.model.vocab_size, shape, generator=generator, dtype=torch.int32)
    )


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert ((a - b).norm() / b.norm().clamp_min(1e-12)).item() < TOLERANCE


def close_by_name(stage: TorchStage, a: torch.Tensor, b: torch.Tensor) -> None:
    for r in stage.parameter_ranges:
        close(a[r.start : r.stop], b[r.start : r.stop])


def compare_microbatches(one: TorchStage, many: LeadStage, spec: RunSpec) -> None:
    """Microbatches of which one is retracted, on a stage that is both first and last. Their
    gradient is copied, and looked at where it lies, right after a change of it."""
    for index in range(3):
        inputs, targets = tokens(spec, index), tokens(spec, 10 + index)
        expected = one.forward_backward((0, index), inputs, targets)
        result = many.forward_backward((0, index), inputs, targets)
        assert result.num_tokens == expected.num_tokens
        assert result.loss_sum == pytest.approx(expected.loss_sum, rel=TOLERANCE)
    close_by_name(one, copied_gradient(many), copied_gradient(one))
    one.retract((0, 1))
    many.retract((0, 1))
    close_by_name(one, gradient(many), gradient(one))


def compare_packed(one: TorchStage, many: LeadStage, spec: RunSpec) -> None:
    """Microbatches with documents and targets without a loss, of a run with `document_mask`."""
    for index in range(3):
        inputs, targets = tokens(spec, index), to_tensor(tokens(spec, 10 + index)).clone()
        targets[0, :9], targets[1:, index::3] = IGNORED, IGNORED
        if index == 2:
            targets[:] = IGNORED
        samples, length = inputs.shape
        documents = tuple(lengths_of(length, 10 * index + i) for i in range(samples))
        expected, result = (
            stage.forward_backward((0, index), inputs, from_tensor(targets), documents)
            for stage in (one, many)
        )
        assert (result.num_tokens == 0) == (index == 2)
        assert result.num_tokens == expected.num_tokens
        assert result.loss_sum == pytest.approx(expected.loss_sum, rel=TOLERANCE)
        evaluated = many.evaluate(inputs, from_tensor(targets), documents)
        assert isinstance(evaluated, LossResult)
        assert evaluated.loss_sum == pytest.approx(expected.loss_sum, rel=TOLERANCE)
    close_by_name(one, gradient(many), gradient(one))
    one.retract((0, 1))
    many.retract((0, 1))
    close_by_name(one, gradient(many), gradient(one))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_documents_stay_apart_on_several_ranks(sequence_parallel: bool) -> None:
    model = {"num_key_value_heads": 1, "vocab_size": 257}
    data = {"document_mask": True}
    spec = small_spec(model=model, pipeline=ONE_STAGE, data=data)
    one = build_stage(spec, 0)
    with ranks(spec, 2, sequence_parallel=sequence_parallel) as group:
        compare_packed(one, build_parallel_stage(spec, 0, group), spec)


def compare_evaluation(one: TorchStage, many: LeadStage, spec: RunSpec) -> None:
    for length in (None, 5):
        inputs, targets = tokens(spec, 3, length=length), tokens(spec, 4, length=length)
        expected, result = one.evaluate(inputs, targets), many.evaluate(inputs, targets)
        assert isinstance(expected, LossResult)
        assert isinstance(result, LossResult)
        assert result.loss_sum == pytest.approx(expected.loss_sum, rel=TOLERANCE)
        logits, wanted = many.evaluate(inputs, None), one.evaluate(inputs, None)
        assert isinstance(logits, Array)
        assert isinstance(wanted, Array)
        close(to_tensor(logits), to_tensor(wanted))


@pytest.mark.parametrize(
    ("num_ranks", "num_kv_heads", "sequence_parallel", "subspace"),
    [
        (2, 4, False, 0),
        (2, 1, True, 0),
        (2, 2, True, 8),
        *(pytest.param(4, 2, parallel, 0, marks=pytest.mark.long) for parallel in (False, True)),
    ],
)
def test_losses_gradients_and_logits_are_those_of_one_rank(
    num_ranks: int, num_kv_heads: int, sequence_parallel: bool, subspace: int
) -> None:
    model = {
        "num_key_value_heads": num_kv_heads,
        "vocab_size": 257,
        "intermediate_size": 49,
        "subspace": subspace,
    }
    spec = small_spec(model=model, pipeline=ONE_STAGE)
    one = build_stage(spec, 0)
    with ranks(spec, num_ranks, sequence_parallel=sequence_parallel) as group:
        many = build_parallel_stage(spec, 0, group)
        assert torch.equal(parameters(many), parameters(one))
        compare_microbatches(one, many, spec)
        compare_evaluation(one, many, spec)
        new = torch.randn(one.shard_sizes[1], generator=torch.Generator().manual_seed(5)) / 50
        for stage in (one, many):
            stage.stage_parameters(1, from_tensor(new))
            stage.finish_round()
        for shard in range(len(one.shard_sizes)):
            assert many.digest(shard) == one.digest(shard)
        assert not gradient(many).any()
        compare_microbatches(one, many, spec)


@pytest.mark.parametrize(
    ("sequence_parallel", "activations"), [(False, "keep"), (True, "recompute")]
)
def test_stages_between_others(sequence_parallel: bool, activations: str) -> None:
    spec = small_spec(pipeline={"num_stages": 3, "activations": activations})
    with ranks(spec, 2, sequence_parallel=sequence_parallel) as group:
        for index in range(2):
            one, many = build_stage(spec, index), build_parallel_stage(spec, index, group)
            shape = (2, MODEL["max_position_embeddings"], MODEL["hidden_size"])
            x = tokens(spec, 1) if index == 0 else from_tensor(torch.randn(shape))
            grad = from_tensor(torch.randn(shape))
            for number in range(2):
                out, expected = many.forward((0, number), x), one.forward((0, number), x)
                close(to_tensor(out), to_tensor(expected))
            for number in (1, 0):
                back, wanted = many.backward((0, number), grad), one.backward((0, number), grad)
                assert (back is None) == (wanted is None) == (index == 0)
                if back is not None and wanted is not None:
                    close(to_tensor(back), to_tensor(wanted))
            close_by_name(one, gradient(many), gradient(one))
            one.retract((0, 0))
            many.retract((0, 0))
            close_by_name(one, gradient(many), gradient(one))
            value, wanted_value = many.evaluate(x, None), one.evaluate(x, None)
            assert isinstance(value, Array)
            assert isinstance(wanted_value, Array)
            close(to_tensor(value), to_tensor(wanted_value))


def use_for_ever(stage: LeadStage, spec: RunSpec) -> None:
    while True:
        stage.forward((0, 1), tokens(spec, 1))
        stage.forget((0, 1))


def test_what_one_rank_refuses_all_refuse_and_go_on_until_one_is_killed() -> None:
    spec = small_spec(pipeline={"num_stages": 2})
    with ranks(spec, 2) as group:
        stage = build_parallel_stage(spec, 0, group)
        shape = (2, MODEL["max_position_embeddings"], MODEL["hidden_size"])
        grad = from_tensor(torch.ones(shape))
        with pytest.raises(ProtocolViolation):
            stage.forward((0, 1), from_tensor(torch.full((2, 16), 10_000, dtype=torch.int32)))
        with pytest.raises(NotReady):
            stage.backward((0, 1), grad)
        stage.forward((0, 2), tokens(spec, 1))
        with pytest.raises(ProtocolViolation):
            stage.backward((0, 2), from_tensor(torch.full(shape, float("nan"))))
        stage.backward((0, 2), grad)
        with pytest.raises(ValueError, match="in the buffer already"):
            stage.backward((0, 2), grad)
        stage.forget((0, 2))
        assert len(stage.kept) == 0
        with pytest.raises(NotReady):
            stage.backward((0, 2), grad)
        group.join()
        assert group.failure is None
        os.kill(group.pids[0], 9)
        with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) ended with SIGKILL"):
            use_for_ever(stage, spec)


@pytest.mark.parametrize(
    ("precision", "sequence_parallel", "activations", "tolerance"),
    [("bf16", True, "keep", 0.02), ("fp16", False, "recompute", 0.003)],
)
def test_ranks_in_low_precision(
    precision: Any, sequence_parallel: bool, activations: Any, tolerance: float
) -> None:
    """Close to one rank in fp32; what is taken out again leaves nothing but rounding."""
    spec = small_spec(pipeline=ONE_STAGE)
    one = build_stage(spec, 0, computing=Computing("fp32"))
    with ranks(spec, 2, sequence_parallel=sequence_parallel) as group:
        many = build_parallel_stage(spec, 0, group, Computing(precision, activations))
        assert torch.equal(parameters(many), parameters(one))
        for r in range(2):
            for index in range(2):
                inputs, targets = tokens(spec, index), tokens(spec, 10 + index)
                expected = one.forward_backward((r, index), inputs, targets)
                result = many.forward_backward((r, index), inputs, targets)
                assert result.loss_sum == pytest.approx(expected.loss_sum, rel=tolerance)
            ours, theirs = gradient(many), gradient(one)
            assert ((ours - theirs).norm() / theirs.norm()).item() < tolerance
            for index in range(2):
                many.retract((r, index))
            assert gradient(many).abs().max() < 1e-4 * theirs.abs().max()
            new = torch.randn(one.shard_sizes[1]) / 50
            for stage in (one, many):
                stage.stage_parameters(1, from_tensor(new))
                stage.finish_round()


def test_ranks_agree_on_an_overflow() -> None:
    """Of the embedding of one token, which only one of the ranks holds."""
    spec = small_spec(
        model={"max_position_embeddings": 64}, pipeline={"num_stages": 3, "microbatch": 4}
    )
    one = build_stage(spec, 0)
    with ranks(spec, 2) as group:
        for token in (3, 253):
            inputs = from_tensor(torch.full((4, 64), token, dtype=torch.int32))
            grad = from_tensor(torch.ones(4, 64, MODEL["hidden_size"]))
            many = build_parallel_stage(spec, 0, group, Computing("fp16"))
            assert many.loss_scale is not None
            for stage in (one, many):
                stage.forward((token, 0), inputs)
                stage.backward((token, 0), grad)
            assert many.loss_scale.num_overflows > 0
            ours, theirs = gradient(many), gradient(one)
            assert ((ours - theirs).norm() / theirs.norm()).item() < 0.003
            one.finish_round()


def test_ranks_hold_parts_that_make_a_whole() -> None:
    spec = small_spec(pipeline=ONE_STAGE)
    plan = cut_plan(spec.model)
    for num_ranks in (1, 2, 4):
        for name, shape in (
            ("model.layers.0.self_attn.q_proj.weight", (32, 32)),
            ("model.layers.0.self_attn.o_proj.weight", (32, 32)),
            ("model.layers.0.mlp.up_proj.weight", (49, 32)),
            ("model.layers.0.mlp.down_proj.weight", (32, 49)),
            ("model.embed_tokens.weight", (257, 32)),
            ("lm_head.weight", (257, 32)),
        ):
            cuts = [plan.cut(name, shape, r, num_ranks) for r in range(num_ranks)]
            assert [c.start for c in cuts] == [0, *(c.stop for c in cuts[:-1])]
            assert cuts[-1].stop == shape[cuts[0].dim]
    layout = lay_out(model_plan(spec).layers, plan, 4, True)
    ends = [
        start + cut.num_elements(r.shape) for n in range(4) for r, cut, start in layout.slots(n)
    ]
    starts = [start for n in range(4) for _, _, start in layout.slots(n)]
    assert [2 * layout.num_parameters, *ends] == [*starts, layout.num_elements]


def test_a_cut_that_cannot_be_is_one_line() -> None:
    with pytest.raises(SpecError, match="possible: 1, 2, 4"):
        check_cut(small_spec(), 3)
