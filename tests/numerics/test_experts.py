"""A swarm that trains experts makes the updates of one process, the losses of routers with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmnet.spec import RunSpec
from swarmnet.training.data import open_data
from tests.numerics.test_masked_targets import mostly_masked
from tests.numerics.test_same_update import _held_out
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec
from tests.training.packed import PackedData

ROUNDS = 8
LOSSES = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
"""So large that an update without them is another one."""
KINDS: dict[str, dict[str, Any]] = {
    "top 2, shared, capacity": {
        "shared_expert_intermediate_size": 16,
        "moe_intermediate_size": 24,
        "capacity_factor": 1.0,
    },
    "switch": {"num_experts_per_tok": 1, "norm_topk_prob": False, "capacity_factor": 1.25},
    "dropless": {},
}


def spec_of(folder: Path, *, num_stages: int = 2, **model: Any) -> RunSpec:
    spec = tiny_spec(folder, num_stages=num_stages, rounds=ROUNDS, num_layers=3)
    values = spec.model_dump()
    wide = {"num_experts": 4, "initializer_range": 0.1, **LOSSES, **model}
    return with_model(spec, {k: v for k, v in values["model"].items() if v} | wide)


def with_model(spec: RunSpec, model: dict[str, Any]) -> RunSpec:
    return spec.with_values(spec.model_dump() | {"model": model})


@pytest.mark.parametrize(
    ("kind", "optimizer"), [*((kind, "adamw") for kind in KINDS), ("dropless", "muon")]
)
def test_a_swarm_makes_the_updates_of_one_process(
    tmp_path: Path, kind: str, optimizer: str
) -> None:
    spec = spec_of(tmp_path, **KINDS[kind])
    values = spec.model_dump()
    values["optimizer"]["kind"] = optimizer
    spec = spec.with_values(values)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(ROUNDS)
        await swarm.until(lambda: _held_out(swarm) is not None)
        found, trainer = swarm.parameters(), replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(found, trainer.state_dict()) < 1e-5
        assert _held_out(swarm) == pytest.approx(trainer.held_out_loss(), rel=1e-5)
        without = with_model(spec, spec.model.model_dump() | dict.fromkeys(LOSSES, 0.0))
        other = replay(without, swarm.counted, ROUNDS).state_dict()
        assert relative_difference(found, other) > 1e-3, "their routers learn from the loss alone"

    in_virtual_time(scenario, spec)


def test_microbatches_that_are_taken_out_leave_nothing(tmp_path: Path) -> None:
    """A feeder dies: what it had in flight is retracted, and its slots are made by others."""
    spec = spec_of(tmp_path, num_stages=3, capacity_factor=1.0)

    async def scenario(swarm: Swarm) -> None:
        for name, stage in (("a", 0), ("b", 0), ("middle", 1), ("last", 2)):
            swarm.start(name, stage=stage, feeds=stage == 0)
        await swarm.until_round(2)
        replica = swarm.members["middle"].peer.replica
        assert replica is not None
        pending = replica.ledger.pending
        await swarm.until(lambda: any(e.feeder == "b" for e in pending(replica.round)))
        swarm.kill("b")
        await swarm.until_round(ROUNDS, 120.0)
        assert swarm.total("retracted") > 0
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-5
        assert replica.stage.routed

    in_virtual_time(scenario, spec)


def test_documents_and_masked_targets(tmp_path: Path) -> None:
    """Routers' losses count as many tokens as the model's loss does."""
    spec = spec_of(tmp_path)
    values = spec.model_dump()
    values["data"]["document_mask"] = True
    spec = spec.with_values(values)
    data = PackedData(open_data(spec), mostly_masked, has_documents=True)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", data=data)
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, swarm.counted, ROUNDS, data)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-5

    in_virtual_time(scenario, spec)
