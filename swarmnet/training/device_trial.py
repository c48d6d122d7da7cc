"""A small model trained on a device and on this machine's CPU: whether the device does what a peer
asks of it. `swarmnet doctor --report` tells the outcome."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing, choose_precision
from swarmnet.training.optimizer.local_steps import build_optimizer
from swarmnet.training.optimizer.sharded import ShardedOptimizer
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array

NUM_STAGES, ROUNDS, PASSES, SAMPLES, LENGTH, VOCABULARY = 2, 3, 2, 4, 64, 256
SPEC = {
    "seed": 1,
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
    },
    "data": {"paths": ["none.txt"]},
    "optimizer": {"learning_rate": 1e-2, "warmup_rounds": 1, "rounds": ROUNDS},
    "pipeline": {
        "num_stages": NUM_STAGES,
        "codec": "int8",
        "global_batch": PASSES * SAMPLES,
        "microbatch": SAMPLES,
    },
    "sync": {"codec": "int8"},
}
TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
"""Of the losses of the last round, relative."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it."""

    precision: str
    loss: float
    """Of the last round on the device, nats a token."""
    loss_on_cpu: float
    """Of the same round in fp32."""
    seconds: float
    """On the device, without what it does for the first time."""

    @property
    def is_right(self) -> bool:
        gap = abs(self.loss - self.loss_on_cpu)
        return math.isfinite(self.loss) and gap <= TOLERANCES[self.precision] * self.loss_on_cpu


def try_device(device: str, *, updates_on_device: bool) -> Trial:
    """Trains there and here. Raises what the device raises."""
    spec = RunSpec.model_validate(SPEC)
    precision = choose_precision(spec, device=device)
    there = Computing(precision, updates_on_device=updates_on_device)
    loss, seconds = train(spec, there, device)
    loss_on_cpu, _ = train(spec, Computing(), "cpu")
    return Trial(precision, loss, loss_on_cpu, seconds)


def train(spec: RunSpec, computing: Computing, device: str) -> tuple[float, float]:
    """The loss of the last round, and how long that took."""
    stages = [build_stage(spec, i, computing=computing, device=device) for i in range(NUM_STAGES)]
    optimizers = [build_optimizer(spec, stage) for stage in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        for j in range(len(stage.shard_sizes)):
            optimizer.create(j)
    rng = torch.Generator().manual_seed(spec.seed)
    tokens = torch.randint(8, (SAMPLES, LENGTH + 1), generator=rng, dtype=torch.int32)
    batch = tuple(from_tensor(part.contiguous()) for part in (tokens[:, :-1], tokens[:, 1:]))
    loss = seconds = math.nan
    for r in range(ROUNDS):
        began = time.perf_counter()
        results = [_pass(stages, (r, i), *batch) for i in range(PASSES)]
        num_tokens = sum(result.num_tokens for result in results)
        loss = sum(result.loss_sum for result in results) / num_tokens
        for stage, optimizer in zip(stages, optimizers, strict=True):
            _update(stage, optimizer, 1 / num_tokens, r)
        seconds = time.perf_counter() - began
    return loss, seconds


def _pass(stages: list[TorchStage], key: tuple[int, int], inputs: Array, targets: Array) -> Any:
    first, last = stages
    result = last.forward_backward(key, first.forward(key, inputs), targets)
    assert result.grad_inputs is not None
    first.backward(key, result.grad_inputs)
    return result


def _update(stage: TorchStage, optimizer: ShardedOptimizer, scale: float, r: int) -> None:
    """As a replica that is alone makes it, with all that others would be sent."""
    codec = optimizer.codec
    for j in range(len(stage.shard_sizes)):
        part = codec.contribution(j, stage.gradient_shard(j), keeps_error=True)
        total = optimizer.sum([codec.decoded_contribution(j, part)])
        _, decoded = codec.coded_sum(j, total)
        result, _ = optimizer.step(j, stage.parameter_shard(j), decoded, scale, r)
        to_tensor(result)
        stage.stage_parameters(j, codec.applied(j, stage.parameter_shard(j), result))
    stage.finish_round()
