"""Replicas in fp32, bf16 and fp16 train together, and what they train is what they would alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing, PrecisionName
from swarmnet.training.optimizer.local_steps import build_optimizer
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage, rank_options
from swarmnet.training.stage import build_stage
from tests.oracles.reference import ReferenceTrainer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS = 12
BF16_DIGITS = 2.0**-8
"""Relative rounding of one bf16 number."""


def build(spec: RunSpec, computing: Computing, stage_index: int) -> tuple[Any, Any]:
    stage = build_stage(spec, stage_index, computing=computing)
    return stage, build_optimizer(spec, stage)


def equal_digests(swarm: Swarm) -> bool:
    digests: dict[int, set[bytes]] = {}
    for member in swarm.members.values():
        replica = member.peer.replica
        assert replica is not None
        found = b"".join(replica.stage.digest(j) for j in range(replica.num_shards))
        digests.setdefault(replica.index, set()).add(found)
    return all(len(found) == 1 for found in digests.values())


def moved(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], start: Any) -> float:
    """Distance of two models, relative to how far training has moved them."""
    apart = sum(float((a[k] - b[k]).square().sum()) for k in a)
    way = sum(float((b[k] - start[k]).square().sum()) for k in a)
    return (apart / way) ** 0.5


def low_loop(spec: RunSpec, counted: dict[int, list[int]], dtype: torch.dtype) -> Any:
    """A plain loop in low precision over the same microbatches: fp32 parameters, cast for each
    pass; fp32 sums of gradients."""
    trainer = ReferenceTrainer(spec)
    model = trainer.model
    low = ReferenceTrainer(spec).model.to(dtype)
    for r in range(ROUNDS):
        for ours, theirs in zip(low.parameters(), model.parameters(), strict=True):
            ours.data.copy_(theirs.detach())
            theirs.grad = torch.zeros_like(theirs)
        num_tokens = 0
        for slot in sorted(counted[r]):
            inputs, targets = trainer.microbatch(r, slot)
            trainer.plan.loss(low(inputs).float(), targets).backward()
            num_tokens += targets.numel()
            for ours, theirs in zip(low.parameters(), model.parameters(), strict=True):
                theirs.grad += ours.grad
                ours.grad = None
        trainer.update(r, num_tokens)
    return trainer


def test_a_bf16_swarm_follows_the_bf16_loop_closely_and_the_fp32_loop_as_far_as_its_digits(
    tmp_path: Path,
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, num_layers=3, precision="bf16")

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(ROUNDS)
        assert equal_digests(swarm)
        ours = swarm.parameters()
        start = {n: p.clone() for n, p in ReferenceTrainer(spec).state_dict().items()}
        exact = replay(spec, swarm.counted, ROUNDS).state_dict()
        low = low_loop(spec, swarm.counted, torch.bfloat16).state_dict()
        to_low, to_exact = moved(ours, low, start), moved(ours, exact, start)
        print(f"of the way: {to_low:.4f} from the bf16 loop, {to_exact:.4f} from the fp32 loop")
        assert to_low < BF16_DIGITS / 2
        assert to_low < to_exact < 8 * BF16_DIGITS
        assert relative_difference(ours, exact) < 0.01

    in_virtual_time(scenario, spec)


KINDS: dict[str, PrecisionName] = {
    "peer-0-0": "fp32",
    "peer-0-1": "bf16",
    "peer-0-2": "fp16",
    "peer-1-0": "bf16",
    "peer-1-1": "fp32",
}


def test_replicas_of_any_precision_and_number_of_ranks_stay_one(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=6)
    group = LocalGroup(2, threads=1, options=rank_options(spec))

    def ranked(stage_index: int) -> tuple[Any, Any]:
        stage = build_parallel_stage(spec, stage_index, group, Computing("bf16", "blocks"))
        return stage, build_optimizer(spec, stage)

    async def scenario(swarm: Swarm) -> None:
        for name, precision in KINDS.items():
            make = functools.partial(build, spec, Computing(precision))
            swarm.start(name, stage=int(name.split("-")[1]), build=make)
        swarm.start("peer-1-2", stage=1, build=ranked)
        await swarm.until_round(6)
        assert equal_digests(swarm)
        exact = replay(spec, swarm.counted, 6).state_dict()
        assert relative_difference(swarm.parameters(), exact) < 0.01
        assert all(len(ids) == len(set(ids)) for ids in swarm.counted.values())

    try:
        in_virtual_time(scenario, spec)
    finally:
        group.close()


@pytest.mark.parametrize("hopeless", [False, True])
def test_an_overflow_in_fp16_costs_no_sample(tmp_path: Path, hopeless: bool) -> None:
    """Of two replicas of the first stage one computes in fp16, and its gradient overflows: now and
    then, or (`hopeless`) always. In the end every sample has counted once."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=6, global_batch=32)
    overflows = 0

    def overflowing(stage_index: int) -> tuple[Any, Any]:
        stage, optimizer = build(spec, Computing("fp16"), stage_index)
        assert stage.loss_scale is not None
        passes = iter(range(10**9))

        def spoil(_: Any, grads: tuple[torch.Tensor, ...], __: Any) -> Any:
            nonlocal overflows
            if hopeless or next(passes) % 5 == 0:
                overflows += 1
                return tuple(g if g is None else g * float("inf") for g in grads)
            return None

        stage.layers.modules[-1].register_full_backward_hook(spoil)
        return stage, optimizer

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", stage=0, build=overflowing)
        for name, stage in (("peer-1", 0), ("peer-2", 1), ("peer-3", 1)):
            make = functools.partial(build, spec, Computing("fp32"))
            swarm.start(name, stage=stage, build=make)
        await swarm.until_round(6)
        assert overflows > 0
        assert equal_digests(swarm)
        batch = spec.pipeline.global_batch // spec.pipeline.microbatch
        for ids in swarm.counted.values():
            assert len(ids) == len(set(ids)) == batch
        exact = replay(spec, swarm.counted, 6).state_dict()
        assert relative_difference(swarm.parameters(), exact) < 0.005

    in_virtual_time(scenario, spec)
