"""Documents that share a sample, and targets without a loss: a stage's numbers are those of each
document alone, over the targets that have a loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from swarmnet.batch import IGNORED, MAX_DOCUMENTS, Batch, check_documents, num_wanted
from swarmnet.errors import ProtocolViolation, SpecError
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.attention import packed, varlen
from swarmnet.training.attention.varlen import VarlenSequence
from swarmnet.training.computing import ActivationsName, Computing
from swarmnet.training.data import open_data
from swarmnet.training.models.registry import model_plan
from swarmnet.training.stage import TorchStage, build_stage
from tests.oracles.reference import ReferenceTrainer
from tests.training.attention.test_varlen import by_document, missing
from tests.training.flights import fly_batch, gradient, named
from tests.training.packed import PackedData, lengths_of, tokens
from tests.training.ranks.test_family_ranks import DOCUMENTS as FAMILY_DOCUMENTS
from tests.training.ranks.test_family_ranks import spec_of
from tests.training.ranks.test_family_ranks import tokens as family_tokens
from tests.training.specs import small_spec, write_text

MICROBATCHES = 3


def half(index: int) -> float:
    return 0.5


def packed_spec(folder: Path, num_stages: int = 1, **pipeline: Any) -> RunSpec:
    data = {"document_mask": True}
    return small_spec(
        write_text(folder), data=data, pipeline={"num_stages": num_stages, **pipeline}
    )


def batches(spec: RunSpec, masked: Any = half) -> list[Batch]:
    data = PackedData(open_data(spec), masked)
    return [data.microbatch([2 * i, 2 * i + 1]) for i in range(MICROBATCHES)]


class Given:
    """The microbatches of a list, as data."""

    num_samples = None

    def __init__(self, given: list[Batch]) -> None:
        self._given = iter(given)

    def microbatch(self, indices: Any) -> Batch:
        return next(self._given)


def gradients(
    spec: RunSpec, given: list[Batch], computing: Computing | None = None
) -> tuple[float, int, dict[str, Tensor], list[TorchStage]]:
    stages = [build_stage(spec, k, computing=computing) for k in range(spec.pipeline.num_stages)]
    results = [fly_batch(stages, (0, i), batch) for i, batch in enumerate(given)]
    found = {n: g for stage in stages for n, g in named(stage, gradient(stage)).items()}
    loss_sum = sum(r.loss_sum for r in results)
    return loss_sum, sum(r.num_tokens for r in results), found, stages


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("activations", ["keep", "blocks", "recompute", "offload"])
def test_a_packed_microbatch_is_as_its_documents_alone(
    tmp_path: Path, num_stages: int, activations: ActivationsName
) -> None:
    spec = packed_spec(tmp_path, num_stages)
    given = batches(spec)
    trainer = ReferenceTrainer(spec, Given(given))  # type: ignore[arg-type]
    loss_sum, num_tokens = trainer.accumulate(0, range(MICROBATCHES))
    computing = Computing(activations=activations, folder=tmp_path)
    found_loss, found_tokens, found, stages = gradients(spec, given, computing)
    assert 0 < found_tokens == num_tokens < MICROBATCHES * 2 * 16
    assert math.isclose(found_loss, loss_sum, rel_tol=1e-6)
    for name, expected in trainer.gradients().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)
    for stage in stages:
        for i in range(MICROBATCHES):
            stage.retract((0, i))
        assert float(gradient(stage).abs().max()) < 1e-4


def test_a_mask_of_all_scores_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices other than CPUs, and in a model that does not attend by sequences."""
    spec = packed_spec(tmp_path, 2)
    given = batches(spec)
    loss, _, in_parts, _ = gradients(spec, given)
    monkeypatch.setattr(packed, "PACKED", {})
    masked_loss, _, masked, _ = gradients(spec, given)
    assert math.isclose(loss, masked_loss, rel_tol=1e-6)
    for name, expected in masked.items():
        torch.testing.assert_close(in_parts[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activations", ["keep", "blocks", "recompute", "offload"])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_one_kernel_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: ActivationsName, has_kernel: bool
) -> None:
    """As on GPUs, whose kernel is tried within the first pass; without it a mask is made."""
    spec = packed_spec(tmp_path, 2)
    given = batches(spec)
    loss, _, in_parts, _ = gradients(spec, given)
    kernel = mock.Mock(side_effect=by_document if has_kernel else missing)
    monkeypatch.setattr(varlen, "_kernel", lambda: kernel)
    monkeypatch.setattr(packed, "PACKED", {"cpu": VarlenSequence})
    varlen.is_right_on.cache_clear()
    computing = Computing(activations=activations, folder=tmp_path)
    found_loss, _, found, _ = gradients(spec, given, computing)
    varlen.is_right_on.cache_clear()
    assert (kernel.call_count > 1) == has_kernel
    assert math.isclose(loss, found_loss, rel_tol=1e-6)
    for name, expected in in_parts.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_one_kernel_for_families(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    spec = spec_of(kind, 1, num_hidden_layers=2)
    kernel = mock.Mock(side_effect=by_document)
    monkeypatch.setattr(varlen, "_kernel", lambda: kernel)
    found = []
    varlen.is_right_on.cache_clear()
    for ways in ({"cpu": VarlenSequence}, {}):
        monkeypatch.setattr(packed, "PACKED", ways)
        stage = build_stage(spec, 0)
        stage.forward_backward((0, 0), family_tokens(1), family_tokens(2), FAMILY_DOCUMENTS[0])
        found.append(gradient(stage).clone())
    varlen.is_right_on.cache_clear()
    assert kernel.call_count > 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_no_mask_of_all_scores_is_made(tmp_path: Path) -> None:
    """A pass takes no memory like its length squared."""
    spec = packed_spec(tmp_path, 1)
    (given,) = batches(spec)[:1]
    stage = build_stage(spec, 0)
    with mock.patch("swarmnet.training.passes.layers.with_mask", side_effect=AssertionError):
        fly_batch([stage], (0, 0), given)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_packed_documents_in_other_precisions(tmp_path: Path, precision: Any) -> None:
    spec = packed_spec(tmp_path, 2)
    given = batches(spec)
    exact = gradients(spec, given)[2]
    found = gradients(spec, given, Computing(precision=precision))[2]
    apart = math.sqrt(sum(float((found[n] - exact[n]).square().sum()) for n in exact))
    assert apart < 0.02 * math.sqrt(sum(float(g.square().sum()) for g in exact.values()))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_microbatch_without_any_loss_is_zero(tmp_path: Path, precision: Any) -> None:
    spec = packed_spec(tmp_path, 2)
    given = batches(spec, lambda index: 1.0)
    loss_sum, num_tokens, found, stages = gradients(spec, given, Computing(precision=precision))
    assert (loss_sum, num_tokens) == (0.0, 0)
    assert all(not g.any() for g in found.values())
    stages[1].retract((0, 0))
    assert not gradient(stages[1]).any()


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (None, "none are named"),
        (((16,),), "1 samples instead of 2"),
        (((16,), (8, 7)), "different lengths"),
        (((8,), (8,)), "8 tokens instead of 16"),
        (((16, 0), (16,)), "without tokens"),
        (((20, -4), (16,)), "without tokens"),
    ],
)
def test_documents_that_do_not_fill_a_sample_are_refused(
    tmp_path: Path, documents: Any, message: str
) -> None:
    spec = packed_spec(tmp_path)
    stage = build_stage(spec, 0)
    inputs = tokens((2, 16), spec.model.vocab_size, 0)
    for call in (
        lambda: stage.check(inputs, inputs, documents),
        lambda: stage.forward_backward((0, 0), inputs, inputs, documents),
    ):
        with pytest.raises(ProtocolViolation, match=message):
            call()
    assert len(stage.kept) == 0


def test_documents_without_document_mask_are_refused(tmp_path: Path) -> None:
    spec = small_spec(write_text(tmp_path))
    inputs = tokens((2, 16), spec.model.vocab_size, 0)
    with pytest.raises(ProtocolViolation, match="does not keep documents apart"):
        build_stage(spec, 0).check(inputs, inputs, ((16,), (16,)))


def test_the_number_of_documents_is_bounded() -> None:
    most = ((1,) * (MAX_DOCUMENTS // 2),) * 2
    check_documents(most, 2, MAX_DOCUMENTS // 2)
    with pytest.raises(ProtocolViolation, match="more than 65536 documents"):
        check_documents(((1,) * (MAX_DOCUMENTS + 1),), 1, MAX_DOCUMENTS + 1)


def test_only_targets_may_be_ignored(tmp_path: Path) -> None:
    spec = packed_spec(tmp_path)
    stage = build_stage(spec, 0)
    good = tokens((2, 16), spec.model.vocab_size, 0)
    masked, wrong = (to_tensor(good).clone() for _ in range(2))
    masked[0, :5], wrong[0, 0] = IGNORED, IGNORED + 1
    documents = ((16,), (16,))
    assert num_wanted(from_tensor(masked)) == 27
    assert stage.forward_backward((0, 0), good, from_tensor(masked), documents).num_tokens == 27
    for pair in ((masked, to_tensor(good)), (to_tensor(good), wrong)):
        inputs, targets = map(from_tensor, pair)
        with pytest.raises(ProtocolViolation, match="outside"):
            stage.forward_backward((0, 1), inputs, targets, documents)


def test_a_custom_model_that_mixes_documents_is_refused(tmp_path: Path) -> None:
    values = packed_spec(tmp_path).model_dump()
    values["model"] = {"kind": "custom", "builder": "examples/custom_model.py:build"}
    with pytest.raises(SpecError, match="does not say takes_context") as caught:
        model_plan(RunSpec.model_validate(values))
    assert "\n" not in str(caught.value)


def test_documents_of_any_lengths_fill_a_sample() -> None:
    assert {sum(lengths_of(16, seed)) for seed in range(50)} == {16}
    assert {len(lengths_of(16, seed)) for seed in range(50)} == {1, 2, 3, 4}
