"""A stage whose weights lie elsewhere and come layer by layer: here to a second part of memory."""

from __future__ import annotations

import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.data import open_data
from swarmnet.training.memory.device_copies import Coming
from swarmnet.training.resolving import resolve_run
from swarmnet.training.stage import TorchStage, build_stage
from tests.swarm.initial.test_weights import folder_of
from tests.training.flights import batch, fly, gradient, optimizers_of, parameters, update
from tests.training.memory.test_device_copies import Logged, stage_apart
from tests.training.specs import small_spec, write_text
from tests.training.test_ahead import delayed, put_aside

NUM_STAGES = 2


class Weighed(Logged):
    """Knows how many bytes of weights are on the device, and were at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.num_copies = 0
        self.fails_at = -1
        """Number of the copy for which there is no room."""

    def ahead(self, tensor: torch.Tensor) -> Coming:
        self.num_copies += 1
        if self.num_copies == self.fails_at:
            raise RuntimeError("no room")
        moved = tensor.clone()
        self.now += moved.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(moved.untyped_storage(), self._left, moved.nbytes)
        return Coming(moved)

    def _left(self, num_bytes: int) -> None:
        self.now -= num_bytes


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return small_spec(write_text(tmp_path), pipeline={"num_stages": NUM_STAGES})


def adapted(text: str) -> RunSpec:
    """Adapters beside what another run ended with."""
    values = small_spec(text, pipeline={"num_stages": NUM_STAGES}).model_dump()
    values["model"]["continues"] = f"{'a' * 32}@4"
    values["lora"] = {"r": 2, "lora_alpha": 4, "target_modules": ("q_proj", "down_proj")}
    return RunSpec.model_validate(values)


def both(
    spec: RunSpec, tmp_path: Path, place: Any, precision: Any = "fp32", activations: Any = "blocks"
) -> tuple[list[TorchStage], list[TorchStage], list[Weighed]]:
    """The stages with all weights here, and with those that come."""
    usual = Computing(precision, activations)
    streamed = Computing(precision, activations, weights=place, folder=str(tmp_path / "weights"))
    logs = [Weighed() for _ in range(NUM_STAGES)]
    return (
        [build_stage(spec, i, computing=usual) for i in range(NUM_STAGES)],
        [stage_apart(spec, i, log, computing=streamed) for i, log in enumerate(logs)],
        logs,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("activations", ["blocks", "recompute"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_numbers_are_those_of_weights_that_stay(
    spec: RunSpec, tmp_path: Path, precision: Any, activations: Any, place: Any
) -> None:
    data = open_data(spec)
    *rows, logs = both(spec, tmp_path, place, precision, activations)
    here, streamed = rows
    optimizers = [optimizers_of(spec, row) for row in rows]
    for r in range(3):
        for i in range(3):
            a, b = (fly(row, (r, i), *batch(data, 3 * r + i)) for row in rows)
            assert a.loss_sum == b.loss_sum
        for row in rows:
            row[0].retract((r, 1))
        for ours, theirs in zip(streamed, here, strict=True):
            assert torch.equal(gradient(ours), gradient(theirs))
        for row, owned in zip(rows, optimizers, strict=True):
            update(row, owned, 2 * a.num_tokens, 1.0, r)
        for ours, theirs in zip(streamed, here, strict=True):
            assert torch.equal(parameters(ours), parameters(theirs))
            assert not gradient(ours).any()
    inputs, targets = batch(data, 0)
    losses = [
        row[1].evaluate(row[0].evaluate(inputs, None), targets)  # type: ignore[arg-type]
        for row in rows
    ]
    assert losses[0] == losses[1]
    assert [log.now for log in logs] == [0, 0], "no weights stay on the device"
    assert not list((tmp_path / "weights").glob("*")), "files go with their stage"


def test_no_more_than_two_layers_are_there_at_a_time(spec: RunSpec, tmp_path: Path) -> None:
    data = open_data(spec)
    _, streamed, logs = both(spec, tmp_path, "host")
    for i in range(2):
        fly(streamed, (0, i), *batch(data, i))
    for stage, log in zip(streamed, logs, strict=True):
        layers = [sum(4 * p.numel() for p in m.parameters()) for m in stage.layers.modules]
        two = max(a + b for a, b in pairwise(layers))
        assert max(layers) <= log.most <= two < sum(layers)
        assert all(p.untyped_storage().nbytes() <= 4 for p in stage.layers.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_texts_and_recomputations_are_the_same(
    spec: RunSpec, tmp_path: Path, precision: Any
) -> None:
    """Texts of the present parameters and of a copy of others, and what an audit computes again."""
    data = open_data(spec)
    *rows, _ = both(spec, tmp_path, "host", precision)
    inputs, targets = batch(data, 3)
    for row in rows:
        for stage in row:
            assert stage.generation is not None
            others = parameters(stage) * 1.25
            stage.generation.copy([from_tensor(part) for part in others.split(stage.shard_sizes)])
    tokens = from_tensor(torch.arange(5, dtype=torch.int32).unsqueeze(0))
    for is_copied in (False, True, False):
        logits = []
        for here in rows:
            array = tokens
            for stage in here:
                assert stage.generation is not None
                (array,) = stage.generation.extend(
                    "text", array, 0, is_copied=is_copied, num_logits=0
                )
            logits.append(bytes(array.data))
        assert logits[0] == logits[1]
    results = []
    for row in rows:
        hidden = row[0].forward((0, 0), inputs)
        last = row[1].recompute_pass((0, 0), hidden, targets, None)()
        assert last.grad_inputs is not None
        first = row[0].recompute_pass((0, 0), inputs, targets, last.grad_inputs)()
        assert first.outputs is not None
        results.append((bytes(last.grad_inputs.data), last.loss_sum, bytes(first.outputs.data)))
        assert not gradient(row[0]).any()
    assert results[0] == results[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_rounds_at_a_time(tmp_path: Path, precision: Any) -> None:
    """A pass of one round while the other one has a microbatch in the middle of its way."""
    spec = delayed(tmp_path)
    data = open_data(spec)
    *rows, _ = both(spec, tmp_path, "host", precision)
    for row in rows:
        fly(row, (0, 0), *batch(data, 0))
        inputs, targets = batch(data, 1)
        activation = row[0].forward((0, 1), inputs)
        for stage in row:
            put_aside(stage, 3)
            stage.open_ahead(1)
        fly(row, (1, 7), *batch(data, 7))
        grad = row[1].forward_backward((0, 1), activation, targets).grad_inputs
        assert grad is not None
        row[0].forward((1, 8), inputs)
        row[0].backward((0, 1), grad)
    for when in ("before", "after"):
        for ours, theirs in zip(*rows, strict=True):
            assert torch.equal(gradient(ours), gradient(theirs)), when
            assert torch.equal(parameters(ours), parameters(theirs)), when
            ours.finish_round()
            theirs.finish_round()


def test_of_adapters_the_base_comes_too(tmp_path: Path) -> None:
    spec = adapted(write_text(tmp_path))
    data = open_data(spec)
    *rows, logs = both(spec, tmp_path, "host")
    for row in rows:
        rng = torch.Generator().manual_seed(1)
        for stage in row:
            for j, size in enumerate(stage.base.shard_sizes):
                stage.base.put(j, from_tensor(0.1 * torch.randn(size, generator=rng)))
        for i in range(3):
            fly(row, (0, i), *batch(data, i))
    for ours, theirs, log in zip(*rows, logs, strict=True):
        assert gradient(ours).any()
        assert torch.equal(gradient(ours), gradient(theirs))
        base = sum(4 * p.numel() for m in ours.layers.modules for p in m.parameters())
        assert log.now == 0 < log.most < base


def test_tied_matrices_of_one_stage_have_one_gradient(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", tie_word_embeddings=True)
    values = small_spec(write_text(tmp_path), pipeline={"num_stages": 1}).model_dump()
    values["model"] = {"from": str(folder)}
    values["data"] |= {"sequence_length": 16}
    spec = resolve_run(RunSpec.model_validate(values)).spec
    data = open_data(spec)
    gradients = []
    for place in ("device", "host"):
        computing = Computing("bf16", "blocks", weights=place)  # type: ignore[arg-type]
        stage = stage_apart(spec, 0, Weighed(), computing=computing)
        fly([stage], (0, 0), *batch(data, 0))
        gradients.append(gradient(stage))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("backward_layers", [1, 2, 4])
def test_a_pass_that_fails_leaves_nothing_for_the_next_round(
    spec: RunSpec, tmp_path: Path, backward_layers: int
) -> None:
    """Half way in its backward pass."""
    data = open_data(spec)
    _, streamed, logs = both(spec, tmp_path, "host")
    stage, log = streamed[1], logs[1]
    hidden = streamed[0].forward((0, 0), batch(data, 0)[0])
    sizes = [sum(1 for _ in m.parameters()) for m in stage.layers.modules]
    log.fails_at = sum(sizes) + sum(sizes[-backward_layers:])
    with pytest.raises(RuntimeError, match="no room"):
        stage.forward_backward((0, 0), hidden, batch(data, 0)[1])
    assert gradient(stage).isnan().all()
    stage.finish_round()
    fresh = both(spec, tmp_path, "host")[1]
    for row in (streamed, fresh):
        fly(row, (1, 0), *batch(data, 0))
    assert torch.equal(gradient(stage), gradient(fresh[1]))
