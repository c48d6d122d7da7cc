"""Routers' losses enter a stage's own backward pass, once for each microbatch that counts, whatever
is kept between the passes and in whatever precision these are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnet.batch import IGNORED
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.data import open_data
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.oracles.reference import ReferenceTrainer
from tests.swarm.harness import relative_difference
from tests.training.flights import batch_of_slot
from tests.training.specs import small_spec, write_text

KEY, OTHER = (0, 1), (0, 2)
EXPERTS = {
    "num_experts": 4,
    "initializer_range": 0.1,
    "router_aux_loss_coef": 0.5,
    "router_z_loss_coef": 0.1,
}


def spec_of(folder: Path, **model: Any) -> RunSpec:
    values = small_spec().model_dump()["model"] | EXPERTS | {"num_experts_per_tok": 2} | model
    return small_spec(write_text(folder), model=values)


def fly(stages: list[TorchStage], key: tuple[int, int], x: Array, targets: Array) -> float:
    first, last = stages
    h = first.forward(key, x, None, targets)
    result = last.forward_backward(key, h, targets)
    assert result.grad_inputs is not None
    first.backward(key, result.grad_inputs)
    return result.loss_sum


def stages_of(spec: RunSpec, computing: Computing | None = None) -> list[TorchStage]:
    return [build_stage(spec, k, computing=computing) for k in range(2)]


def gradients(stages: list[TorchStage]) -> dict[str, Tensor]:
    return {
        r.name: r.part_of(
            torch.cat([s.vectors.gradient_shard(j) for j in range(len(s.shard_sizes))])
        )
        for s in stages
        for r in s.parameter_ranges
    }


def whole(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([named[name].flatten() for name in sorted(named)])


def oracle(spec: RunSpec, slots: list[int]) -> tuple[ReferenceTrainer, float]:
    trainer = ReferenceTrainer(spec)
    loss, _ = trainer.accumulate(0, slots)
    return trainer, loss


def arrays(spec: RunSpec, slot: int) -> tuple[Array, Array]:
    return batch_of_slot(spec, open_data(spec), 0, slot)


@pytest.mark.parametrize(
    ("activations", "weights"),
    [
        ("keep", "device"),
        ("blocks", "device"),
        ("recompute", "device"),
        ("offload", "device"),
        ("recompute", "host"),
    ],
)
@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_gradients_are_those_of_one_process(
    tmp_path: Path, activations: Any, weights: Any, capacity: float
) -> None:
    spec = spec_of(tmp_path, capacity_factor=capacity, shared_expert_intermediate_size=16)
    computing = Computing(activations=activations, folder=str(tmp_path), weights=weights)
    stages = stages_of(spec, computing)
    loss = sum(fly(stages, (0, slot), *arrays(spec, slot)) for slot in range(3))
    trainer, expected = oracle(spec, [0, 1, 2])
    assert loss == pytest.approx(expected, rel=1e-5), "the reported loss is without routers'"
    assert relative_difference(gradients(stages), trainer.gradients()) < 1e-5
    plain, _ = oracle(spec_of(tmp_path, **_unlearning(spec)), [0, 1, 2])
    assert relative_difference(gradients(stages), plain.gradients()) > 1e-2, "they learn nothing"


def _unlearning(spec: RunSpec) -> dict[str, Any]:
    return spec.model.model_dump() | {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_retracted_leaves_nothing(tmp_path: Path, precision: Any) -> None:
    spec = spec_of(tmp_path, capacity_factor=1.0)
    stages, alone = (stages_of(spec, Computing(precision)) for _ in range(2))
    fly(stages, KEY, *arrays(spec, 0))
    fly(stages, OTHER, *arrays(spec, 1))
    fly(alone, KEY, *arrays(spec, 0))
    for stage in stages:
        stage.retract(OTHER)
    tolerance = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}[precision]
    assert relative_difference(gradients(stages), gradients(alone)) < tolerance
    trainer, _ = oracle(spec, [0])
    tolerance = {"fp32": 1e-5, "bf16": 0.2, "fp16": 0.05}[
        precision
    ]  # rounding sends some elsewhere
    ours, exact = (whole(g) for g in (gradients(alone), trainer.gradients()))
    assert (ours - exact).norm() < tolerance * exact.norm()
    for stage, other in zip(stages, alone, strict=True):
        stage.finish_round()
        other.finish_round()
        assert [r.layer for r in stage.routed] == [r.layer for r in other.routed]
        for one, same in zip(stage.routed, other.routed, strict=True):
            assert one.shares == pytest.approx(same.shares)
            assert one.dropped == pytest.approx(same.dropped)
            assert one.entropy == pytest.approx(same.entropy, abs=1e-4)


def test_losses_are_weighted_by_tokens_that_have_a_target(tmp_path: Path) -> None:
    """A microbatch without targets adds nothing, and half of the targets half of the loss."""
    spec = spec_of(tmp_path)
    x, targets = arrays(spec, 0)
    wanted = to_tensor(targets)
    none, half = torch.full_like(wanted, IGNORED), wanted.clone()
    half[:, ::2] = IGNORED
    stages = stages_of(spec)
    fly(stages, KEY, x, from_tensor(none))
    assert all(not g.any() for g in gradients(stages).values())
    stages = stages_of(spec)
    fly(stages, KEY, x, from_tensor(half))
    trainer = ReferenceTrainer(spec)
    trainer.accumulate_of([(to_tensor(x), half)])
    assert relative_difference(gradients(stages), trainer.gradients()) < 1e-5


def test_a_replica_that_computes_it_again_gets_the_same(tmp_path: Path) -> None:
    """An auditor's input gradient has that of the routers' losses in it."""
    spec = spec_of(tmp_path, capacity_factor=1.0)
    x, targets = arrays(spec, 0)
    first, last = stages_of(spec)
    h = first.forward(KEY, x, None, targets)
    made = last.forward_backward(KEY, h, targets)
    again = build_stage(spec, 1).recompute_pass(KEY, h, targets, None)()
    assert again.grad_inputs == made.grad_inputs
    assert again.loss_sum == made.loss_sum


def test_evaluation_drops_no_token(tmp_path: Path) -> None:
    """And what it says is the loss alone."""
    spec, whole = spec_of(tmp_path, capacity_factor=0.25), spec_of(tmp_path)
    x, targets = arrays(spec, 0)
    found = []
    for one in (spec, whole):
        first, last = stages_of(one)
        found.append(last.evaluate(first.evaluate(x, None), targets))
    assert found[0] == found[1]


def test_what_routers_did_is_told_by_round(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, capacity_factor=0.5)
    stages = stages_of(spec)
    assert all(stage.routed == () for stage in stages)
    for slot in range(2):
        fly(stages, (0, slot), *arrays(spec, slot))
    for stage in stages:
        stage.finish_round()
    reports = [r for stage in stages for r in stage.routed]
    assert [r.layer for r in reports] == [f"model.layers.{i}" for i in range(4)]
    for r in reports:
        assert len(r.shares) == 4
        assert sum(r.shares) == pytest.approx(1.0)
        assert 0.5 <= r.dropped < 0.75, "half of the places, used unevenly"
        assert 0.0 < r.entropy < 1.3863
    for stage in stages:
        stage.finish_round()
        assert stage.routed, "the newest round in which there was something"
