"""Gradients of weights that a backward pass leaves for later: the bits of whole passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarmnet.ports import Passage
from swarmnet.protocol.planning.owed import most_owed
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.data import open_data
from swarmnet.training.models.base import LayerBuilder, ModelPlan, TensorSpec
from swarmnet.training.passes.owed_weights import OwedWeights
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.flights import batch, gradient
from tests.training.passes.models import linear_layers
from tests.training.specs import small_spec, write_text

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def spec_of(folder: Path, mode: str = "zero", **changes: dict[str, Any]) -> RunSpec:
    sync = {"mode": mode, "shard_parameters": 1000}
    pipeline = {"num_stages": 3} | changes.pop("pipeline", {})
    return small_spec(write_text(folder), sync=sync, pipeline=pipeline, **changes)


class Pair:
    """The same stage twice: one that leaves gradients for later, and one whose passes are whole."""

    def __init__(self, folder: Path, stage: int, precision: Any = "fp32", **changes: Any) -> None:
        spec = spec_of(folder, **changes)
        computing = Computing(precision)
        self.owing = build_stage(spec, stage, computing=computing)
        self.whole = build_stage(spec_of(folder, "delayed", **changes), stage, computing=computing)
        self.first = build_stage(spec, 0)
        self.data = open_data(spec)

    def inputs(self, n: int) -> tuple[Array, Array]:
        tokens, targets = batch(self.data, n)
        return self.first.forward((0, n), tokens), targets

    def both(self, work: Callable[[TorchStage], Passage[Any]]) -> Any:
        """What both give, which are the same; what the one has left to do it has left."""
        one, other = work(self.owing), work(self.whole)
        assert other.rest is None
        found = one.depart(one.compute(one.arrive()))
        assert bits(found) == bits(other())
        return found

    def forward(self, n: int) -> Array:
        inputs, _ = self.inputs(n)
        found: Array = self.both(lambda s: s.forward_pass((0, n), inputs))
        return found

    def backward(self, n: int) -> None:
        inputs, targets = self.inputs(n)
        if self.owing.is_last:
            self.both(lambda s: s.loss_pass((0, n), inputs, targets))
            return
        grad = from_tensor(torch.randn(inputs.shape, generator=torch.Generator().manual_seed(n)))
        self.both(lambda s: s.backward_pass((0, n), grad))

    def has_same_sum(self) -> bool:
        return torch.equal(self.owing.vectors.present.adding, self.whole.vectors.present.adding)


def bits(found: Any) -> Any:
    """Of a result of a pass."""
    if isinstance(found, Array):
        return bytes(found.data)
    return found.loss_sum, found.num_tokens, bytes(found.grad_inputs.data)


@pytest.mark.parametrize("changes", [{}, {"model": EXPERTS}], ids=["dense", "experts"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_sum_has_the_bits_of_whole_passes(
    tmp_path: Path, stage: int, precision: str, changes: dict[str, Any]
) -> None:
    pair = Pair(tmp_path, stage, precision, **changes)
    num = 5
    for n in range(num if stage == 1 else 0):
        pair.forward(n)
    for n in range(num):
        pair.backward(n)
        if n == 2:  # the device has found time for a part of the oldest
            assert pair.owing.owed is not None
            assert pair.owing.owed.make_next()
        assert pair.owing.is_owing
        assert not pair.has_same_sum()
    assert torch.equal(gradient(pair.owing), gradient(pair.whole)), "who reads it gets all of it"
    assert not pair.owing.is_owing
    assert pair.has_same_sum()


def test_no_more_is_owed_than_can_be_made_while_the_stages_before_end(tmp_path: Path) -> None:
    pair = Pair(tmp_path, 1)
    owed = pair.owing.owed
    assert owed is not None
    for n in range(5):
        pair.forward(n)
    for n in range(5):
        pair.backward(n)
        assert len(owed) == min(n + 1, most_owed(1))
    assert [most_owed(k) for k in range(3)] == [0, 2, 3]


def test_one_of_which_something_is_owed_is_counted_as_one_between_its_passes(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path, 1)
    owed = pair.owing.owed
    assert owed is not None
    pair.owing.max_in_flight = 3
    for n in range(3):
        pair.forward(n)
    pair.backward(0)
    assert len(owed) == 1, "two are between their passes beside it"
    pair.backward(1)
    assert len(owed) == 2
    pair.forward(3)
    assert len(owed) == 1, "there is one more between its passes"
    pair.forward(4)
    assert not owed
    pair.owing.max_in_flight = 2
    pair.backward(2)
    assert not owed, "there is room for none: the pass is whole"
    assert pair.has_same_sum()


def test_what_is_taken_out_is_all_of_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path, 2)
    for n in range(3):
        pair.backward(n)
    for stage in (pair.owing, pair.whole):
        stage.retract((0, 1))
    assert not pair.owing.is_owing
    assert pair.has_same_sum()


def test_whoever_does_a_pass_at_one_go_leaves_nothing(tmp_path: Path) -> None:
    pair = Pair(tmp_path, 2)
    inputs, targets = pair.inputs(0)
    for stage in (pair.owing, pair.whole):
        stage.forward_backward((0, 0), inputs, targets)
    assert not pair.owing.is_owing
    assert pair.has_same_sum()


@pytest.mark.parametrize("reads", [True, False])
def test_parameters_of_the_next_round_are_not_added_to(tmp_path: Path, reads: bool) -> None:
    """They come into the memory of the sum, also where nobody has read it."""
    stage = Pair(tmp_path, 2)
    stage.backward(0)
    one = stage.owing
    if reads:
        gradient(one)
    coming = [torch.full((size,), 0.5) for size in one.shard_sizes]
    for j, values in enumerate(coming):
        one.stage_parameters(j, from_tensor(values))
    one.settle()
    one.finish_round()
    for j, values in enumerate(coming):
        assert torch.equal(to_tensor(one.parameter_shard(j)), values)
    assert not gradient(one).any()


def test_a_round_that_ends_unread_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    pair = Pair(tmp_path, 2)
    pair.backward(0)
    pair.owing.finish_round()
    assert not pair.owing.is_owing
    assert not gradient(pair.owing).any()


def test_a_gradient_that_cannot_be_made_spoils_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(tmp_path, 2)
    pair.backward(0)

    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(torch.Tensor, "mm", fail)
    pair.owing.settle()
    monkeypatch.undo()
    assert "could not be made" in caplog.text
    assert bool(gradient(pair.owing).isnan().all())
    assert not pair.owing.is_owing


@pytest.mark.parametrize(
    ("stage", "mode", "computing"),
    [
        (0, "zero", Computing()),
        (2, "delayed", Computing()),
        (2, "auto", Computing()),
        (2, "zero", Computing("fp16")),
        (2, "zero", Computing(compile=True)),
        (2, "zero", Computing(weights="host")),
    ],
    ids=["first", "delayed", "auto", "fp16", "compile", "weights"],
)
def test_where_passes_stay_whole(
    tmp_path: Path, stage: int, mode: str, computing: Computing
) -> None:
    built = build_stage(spec_of(tmp_path, mode), stage, computing=computing)
    assert built.owed is None
    assert not built.is_owing
    built.settle()


@pytest.mark.parametrize("activations", ["blocks", "recompute"])
def test_nothing_is_computed_twice_for_it(tmp_path: Path, activations: Any) -> None:
    """Where the forward pass is made again for the backward pass, that is whole."""
    spec = spec_of(tmp_path)
    stage = build_stage(spec, 1, computing=Computing(activations=activations))
    first, data = build_stage(spec, 0), open_data(spec)
    inputs = first.forward((0, 0), batch(data, 0)[0])
    outputs = stage.forward((0, 0), inputs)
    passage = stage.backward_pass((0, 0), outputs)
    passage.compute(passage.arrive())
    assert not stage.is_owing


class Shared(nn.Module):
    """One matrix twice, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh())


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 5, 4)])
def test_a_matrix_that_a_pass_meets_twice(shape: tuple[int, ...]) -> None:
    plan = ModelPlan(
        layers=(LayerBuilder("a", Shared, 1, shape[1:]),),
        inputs=TensorSpec("float32", shape[1:]),
        targets=TensorSpec("float32", shape[1:]),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        count=lambda targets: targets.numel(),
    )
    owing, whole = linear_layers(plan=plan), linear_layers(plan=plan)
    owed = OwedWeights(owing)
    generator = torch.Generator().manual_seed(3)
    for n in range(3):
        x = torch.randn(shape, generator=generator)
        grad = torch.randn(shape, generator=generator)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with owed.watched():
            root = owing.run((0, n), mine)
        with owed.leaving(2):
            root.backward(grad)
        whole.run((0, n), theirs).backward(grad)
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
        assert len(owed) == min(n + 1, 2)
    assert not torch.equal(owing.shown.gradients, whole.shown.gradients)
    owed.settle()
    assert torch.equal(owing.shown.gradients, whole.shown.gradients)
    again = whole.run((0, 9), torch.ones(shape, requires_grad=True))
    assert again.requires_grad, "torch's own linear layers are as they were"
