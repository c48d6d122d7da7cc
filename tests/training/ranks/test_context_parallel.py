"""A stage whose sequences lie on several ranks computes what a stage on one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.batch import Batch
from swarmnet.errors import SpecError
from swarmnet.spec import LoraSpec, RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.memory import offload
from swarmnet.training.memory.plan import BF16, FP32, Precision, plan_memory, stage_activations
from swarmnet.training.ranks.context_parallel_stage import (
    build_context_parallel_stage,
    check_sequences,
)
from swarmnet.training.ranks.zigzag import is_long_enough
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.swarm.lora_runs import LORA
from tests.training.flights import fly_batch, gradient, parameters, stages_of
from tests.training.memory.test_memory_plan import kept_bytes
from tests.training.packed import lengths_of
from tests.training.ranks.test_lora_ranks import ALL_OF_LLAMA, randomize
from tests.training.ranks.test_tensor_parallel import (
    ONE_STAGE,
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
from tests.training.test_lora import tokens as tokens_of_four

POLICIES = ("keep", "blocks", "recompute", "offload")


@pytest.mark.parametrize(
    ("num_ranks", "length", "num_kv_heads", "subspace"),
    [
        (2, 16, 4, 0),
        (2, 17, 2, 8),
        (3, 19, 1, 0),
        pytest.param(4, 31, 2, 0, marks=pytest.mark.long),
    ],
)
def test_losses_gradients_and_logits_are_those_of_one_rank(
    num_ranks: int, length: int, num_kv_heads: int, subspace: int
) -> None:
    model = {
        "num_key_value_heads": num_kv_heads,
        "vocab_size": 257,
        "max_position_embeddings": length,
        "subspace": subspace,
    }
    spec = small_spec(model=model, pipeline=ONE_STAGE)
    one = build_stage(spec, 0)
    with rank_threads(spec, num_ranks, mode="context") as group:
        many = build_context_parallel_stage(spec, 0, group)
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


@pytest.mark.parametrize("activations", POLICIES)
def test_documents_stay_apart_whatever_is_kept(
    activations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    spec = small_spec(
        model={"num_key_value_heads": 1, "vocab_size": 257, "max_position_embeddings": 19},
        pipeline=ONE_STAGE,
        data={"document_mask": True},
    )
    computing = Computing("fp32", activations, folder=str(tmp_path))
    with rank_threads(spec, 2, mode="context") as group:
        many = build_context_parallel_stage(spec, 0, group, computing)
        compare_packed(build_stage(spec, 0), many, spec)


@pytest.mark.parametrize("activations", POLICIES)
def test_stages_between_others_give_whole_sequences(
    activations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    spec = small_spec(
        model={"max_position_embeddings": 18},
        pipeline={"num_stages": 3},
        data={"document_mask": True},
    )
    computing = Computing("fp32", activations, folder=str(tmp_path))
    with rank_threads(spec, 2, mode="context") as group:
        inputs = tokens(spec, 1)
        for index in range(2):
            one = build_stage(spec, index)
            many = build_context_parallel_stage(spec, index, group, computing)
            grad: Array | None = None
            lengths = tuple(lengths_of(18, i) for i in range(2))
            sent = inputs
            for number in range(2):
                out, expected = (s.forward((0, number), inputs, lengths) for s in (many, one))
                close(to_tensor(out), to_tensor(expected))
                sent = expected
                grad = from_tensor(torch.randn(out.shape))
            assert grad is not None
            for number in (1, 0):
                back, wanted = many.backward((0, number), grad), one.backward((0, number), grad)
                assert (back is None) == (wanted is None) == (index == 0)
                if back is not None and wanted is not None:
                    close(to_tensor(back), to_tensor(wanted))
            close_by_name(one, gradient(many), gradient(one))
            for stage in (one, many):
                stage.retract((0, 0))
            close_by_name(one, gradient(many), gradient(one))
            inputs = sent


def test_what_crosses_a_narrow_boundary_is_whole_too() -> None:
    """Coordinates and tokens, between a stage of two ranks and one of three."""
    spec = small_spec(
        model={"max_position_embeddings": 18, "subspace": 8},
        pipeline={"num_stages": 2},
        data={"document_mask": True},
    )
    one = stages_of(spec)
    lengths = tuple(lengths_of(18, i) for i in range(2))
    batch = Batch(tokens(spec, 1), tokens(spec, 2), lengths)
    with (
        rank_threads(spec, 2, mode="context") as first,
        rank_threads(spec, 3, mode="context") as last,
    ):
        many: list[TorchStage] = [
            build_context_parallel_stage(spec, k, group) for k, group in enumerate((first, last))
        ]
        results = [fly_batch(stages, (0, 0), batch) for stages in (one, many)]
        assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=TOLERANCE)
        for ours, theirs in zip(many, one, strict=True):
            close_by_name(theirs, gradient(ours), gradient(theirs))


def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that it goes on from is left out."""
    lora = LoraSpec.model_validate({**LORA, "target_modules": ALL_OF_LLAMA})
    spec = small_spec(pipeline={"num_stages": 1, "microbatch": 4})
    spec = spec.model_copy(update={"lora": lora})
    monkeypatch.setattr(RunSpec, "from_canonical", lambda _: spec)
    one = build_stage(spec, 0, computing=Computing())
    with rank_threads(spec, 2, mode="context") as group:
        many = build_context_parallel_stage(spec, 0, group, Computing())
        for stage in (one, many):
            for number, size in enumerate(stage.base.shard_sizes):
                generator = torch.Generator().manual_seed(number)
                stage.base.put(number, from_tensor(torch.randn(size, generator=generator) / 10))
            randomize([stage])
        for key in ((1, 0), (1, 1)):
            inputs, targets = tokens_of_four(1), tokens_of_four(2)
            results = [s.forward_backward(key, inputs, targets) for s in (one, many)]
            assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=TOLERANCE)
        close_by_name(one, gradient(many), gradient(one))


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.003)])
def test_ranks_in_low_precision(precision: Any, tolerance: float) -> None:
    """Close to one rank in fp32; what is taken out again leaves nothing but rounding."""
    spec = small_spec(pipeline=ONE_STAGE)
    one = build_stage(spec, 0, computing=Computing("fp32"))
    with rank_threads(spec, 2, mode="context") as group:
        many = build_context_parallel_stage(spec, 0, group, Computing(precision, "recompute"))
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
            for stage in (one, many):
                stage.finish_round()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda p: p.name)
def test_a_rank_keeps_what_the_plan_says(
    precision: Precision, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the passes: with one microbatch more in flight there is so much more."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    spec = small_spec(model={"max_position_embeddings": 64}, pipeline={"num_stages": 3})
    computing = Computing(precision.name, policy, folder=str(tmp_path))  # type: ignore[arg-type]
    inputs, targets = tokens(spec, 1), tokens(spec, 2)
    for k in range(3):
        with rank_threads(spec, 2, mode="context") as group:
            stage = build_context_parallel_stage(spec, k, group, computing)
            measured, output = kept_bytes(stage, inputs, targets, has_own_tables=True)
            group.join()
        about: dict[str, Any] = {"precision": precision, "activations": policy, "num_ranks": 2}
        one, two = (
            plan_memory(spec, num_replicas=1, in_flight=n, **about)[k].activations for n in (1, 2)
        )
        assert one is not None
        assert two is not None
        if not stage.is_last:
            assert two - one == pytest.approx(measured, rel=0.01), f"stage {k}"
        elif policy == "keep":
            planned = stage_activations(spec, k, precision, 2)
            assert planned is not None
            assert one - planned.passing == pytest.approx(measured, rel=0.01)
        inputs = output or inputs


def test_processes_share_sequences() -> None:
    """The rest of this page has threads."""
    spec = small_spec(pipeline=ONE_STAGE, model={"max_position_embeddings": 21})
    with ranks(spec, 2, mode="context") as group:
        compare_microbatches(
            build_stage(spec, 0), build_context_parallel_stage(spec, 0, group), spec
        )


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({"model": {"num_experts": 4}}, 2, "experts"),
        ({"model": {"max_position_embeddings": 7}}, 4, "too short.*take --cp 3, or less"),
    ],
)
def test_sequences_that_ranks_cannot_share_are_one_line(
    changes: dict[str, Any], num_ranks: int, message: str
) -> None:
    with pytest.raises(SpecError, match=rf"--cp {num_ranks}: .*{message}"):
        check_sequences(small_spec(**changes), num_ranks)
    check_sequences(small_spec(**changes), 1)
    assert is_long_enough(8, 4)
    check_sequences(small_spec(model={"max_position_embeddings": 8}), 4)
