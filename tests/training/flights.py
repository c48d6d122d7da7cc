"""Microbatches and updates without a network, for the tests of `swarmnet.training`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from swarmnet.batch import Batch
from swarmnet.ports import Data, LossResult
from swarmnet.runtime.compose import run_settings
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import to_tensor
from swarmnet.training.optimizer.local_steps import build_optimizer
from swarmnet.training.optimizer.sharded import ShardedOptimizer
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array


def stages_of(spec: RunSpec) -> list[TorchStage]:
    return [build_stage(spec, i) for i in range(spec.pipeline.num_stages)]


def batch(data: Data, n: int) -> tuple[Array, Array]:
    """The n-th microbatch of the data, in its own order; again from the start where it ends."""
    size = data.samples_per_microbatch
    indices: Sequence[int] = range(n * size, (n + 1) * size)
    indices = [i % data.num_samples if data.num_samples else i for i in indices]
    return data.microbatch(indices).arrays


def batch_of_slot(spec: RunSpec, data: Data, round_index: int, slot: int) -> tuple[Array, Array]:
    """The microbatch of a slot, as a feeder makes it."""
    indices = run_settings(spec).samples_of(round_index, slot, data.num_samples)
    return data.microbatch(indices).arrays


def fly(
    stages: list[TorchStage], key: tuple[int, int], inputs: Array, targets: Array
) -> LossResult:
    """One microbatch through the stages and back."""
    return fly_batch(stages, key, Batch(inputs, targets))


def fly_batch(stages: list[TorchStage], key: tuple[int, int], batch: Batch) -> LossResult:
    """The same, with its documents."""
    activation, targets = batch.arrays
    for stage in stages[:-1]:
        stage.check(activation, targets, batch.documents)
        activation = stage.forward(key, activation, batch.documents)
    result = stages[-1].forward_backward(key, activation, targets, batch.documents)
    grad = result.grad_inputs
    for stage in reversed(stages[:-1]):
        assert grad is not None
        grad = stage.backward(key, grad)
    assert grad is None
    return result


def gradient(stage: TorchStage) -> torch.Tensor:
    return torch.cat([to_tensor(stage.gradient_shard(j)) for j in range(len(stage.shard_sizes))])


def copied_gradient(stage: TorchStage) -> torch.Tensor:
    return torch.cat([to_tensor(stage.copy_gradient(j)) for j in range(len(stage.shard_sizes))])


def parameters(stage: TorchStage) -> torch.Tensor:
    return torch.cat([to_tensor(stage.parameter_shard(j)) for j in range(len(stage.shard_sizes))])


def named(stage: TorchStage, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {r.name: flat[r.start : r.stop].view(r.shape) for r in stage.parameter_ranges}


def optimizers_of(spec: RunSpec, stages: Sequence[TorchStage]) -> list[ShardedOptimizer]:
    """An optimizer a stage, which owns all of its shards."""
    optimizers = [build_optimizer(spec, stage) for stage in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        for j in range(len(stage.shard_sizes)):
            optimizer.create(j)
    return optimizers


def update(
    stages: Sequence[TorchStage],
    optimizers: Sequence[ShardedOptimizer],
    num_tokens: int,
    clip: float,
    r: int,
) -> None:
    """A round's update of every shard, clipped over all stages."""
    pairs = list(zip(stages, optimizers, strict=True))
    squares = sum(
        o.sum_of_squares(s.gradient_shard(j)) for s, o in pairs for j in range(len(s.shard_sizes))
    )
    scale = min(1.0, clip / (math.sqrt(squares) / num_tokens + 1e-6)) / num_tokens
    for stage, optimizer in pairs:
        for j in range(len(stage.shard_sizes)):
            old, gradient = stage.parameter_shard(j), stage.gradient_shard(j)
            stage.stage_parameters(j, optimizer.step(j, old, gradient, scale, r)[0])
        stage.finish_round()
