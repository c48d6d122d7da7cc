"""A stage works on two rounds at a time, each with its own parameters and gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.data import open_data
from swarmnet.training.stage import TorchStage, build_stage
from tests.swarm.harness import tiny_spec
from tests.training.flights import batch, fly, gradient, parameters


def delayed(tmp_path: Path) -> RunSpec:
    return tiny_spec(tmp_path, num_stages=2, sync={"mode": "delayed"})


def pair(spec: RunSpec, precision: str) -> list[TorchStage]:
    computing = Computing(precision=precision)
    return [build_stage(spec, i, computing=computing) for i in range(2)]


def put_aside(stage: TorchStage, seed: int) -> torch.Tensor:
    """New parameters for the coming round."""
    rng = torch.Generator().manual_seed(seed)
    flat = parameters(stage) + 0.01 * torch.randn(stage.num_parameters, generator=rng)
    for j, part in enumerate(flat.split(stage.shard_sizes[0])):
        stage.stage_parameters(j, from_tensor(part.contiguous()))
    return flat


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_rounds_at_a_time_are_as_one_after_the_other(tmp_path: Path, precision: str) -> None:
    spec = delayed(tmp_path)
    data = open_data(spec)
    mixed, plain = pair(spec, precision), pair(spec, precision)
    for r in range(3):
        for stages in (mixed, plain):
            fly(stages, (r, 0), *batch(data, 0))
        # In `mixed` microbatch 1 of the round is in the middle of its way when the next begins.
        inputs, targets = batch(data, 1)
        activation = mixed[0].forward((r, 1), inputs)
        for stage in mixed:
            put_aside(stage, r)
            stage.open_ahead(r + 1)
        fly(mixed, (r + 1, 7), *batch(data, 7))
        fly(mixed, (r + 1, 8), *batch(data, 8))
        grad = mixed[1].forward_backward((r, 1), activation, targets).grad_inputs
        assert grad is not None
        mixed[0].backward((r, 1), grad)
        mixed[0].retract((r + 1, 8))
        mixed[1].retract((r + 1, 8))
        fly(plain, (r, 1), inputs, targets)
        kept = []
        for one, other in zip(mixed, plain, strict=True):
            assert torch.equal(gradient(one), gradient(other))
            kept.append([one.copy_gradient(j) for j in range(len(one.shard_sizes))])
            one.finish_round()
        for one, other, copies in zip(mixed, plain, kept, strict=True):
            assert torch.equal(torch.cat([to_tensor(c) for c in copies]), gradient(other))
            put_aside(other, r)
            other.finish_round()
            assert torch.equal(parameters(one), parameters(other))
        fly(plain, (r + 1, 7), *batch(data, 7))
        for one, other in zip(mixed, plain, strict=True):
            # What was retracted leaves what rounding leaves.
            torch.testing.assert_close(gradient(one), gradient(other), rtol=1e-2, atol=2e-4)
            one.finish_round()
            other.finish_round()
            assert len(one.kept) == len(other.kept) == 0


def test_a_round_ahead_that_is_dropped_leaves_its_parameters_put_aside(tmp_path: Path) -> None:
    spec = delayed(tmp_path)
    data = open_data(spec)
    mixed, plain = pair(spec, "fp32"), pair(spec, "fp32")
    coming = [put_aside(stage, 1) for stage in mixed]
    for stage in mixed:
        stage.open_ahead(1)
    fly(mixed, (1, 0), *batch(data, 0))
    for stage in mixed:
        stage.drop_ahead()
        assert len(stage.kept) == 0
    for stages in (mixed, plain):
        fly(stages, (0, 3), *batch(data, 3))
    for one, other in zip(mixed, plain, strict=True):
        assert torch.equal(gradient(one), gradient(other))
        assert torch.equal(parameters(one), parameters(other))
    for is_ahead_again, stage, wanted in zip((True, False), mixed, coming, strict=True):
        if is_ahead_again:
            stage.open_ahead(1)
        stage.finish_round()
        assert not gradient(stage).any()
        assert torch.equal(parameters(stage), wanted), "what was put aside still is"
