"""Targets without a loss, and documents that share a sample: a swarm makes the update of one
process, which runs each document alone and divides by the targets that have a loss."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from swarmnet.spec import RunSpec
from swarmnet.training.data import open_data
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec
from tests.training.packed import PackedData

ROUNDS = 8


def mostly_masked(index: int) -> float:
    """Most samples have no loss at all, so that many microbatches have none."""
    rng = Random(index)
    return 1.0 if rng.random() < 0.75 else rng.random()


def spec_of(folder: Path, rounds: int, mode: str = "zero", **data: Any) -> RunSpec:
    spec = tiny_spec(folder, num_stages=2, rounds=rounds, num_layers=3, sync={"mode": mode})
    return spec.with_values(spec.model_dump() | {"data": spec.data.model_dump() | data})


def start(swarm: Swarm, data: PackedData) -> None:
    for i in range(4):
        swarm.start(f"peer-{i}", data=data)


@pytest.mark.parametrize("has_documents", [False, True])
def test_a_swarm_makes_the_updates_of_one_process(tmp_path: Path, has_documents: bool) -> None:
    spec = spec_of(tmp_path, ROUNDS, document_mask=has_documents)
    data = PackedData(open_data(spec), mostly_masked, has_documents)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, data)
        await swarm.until_round(ROUNDS)
        await swarm.until(lambda: _held_out(swarm) is not None)
        trainer = replay(spec, swarm.counted, ROUNDS, data)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4
        assert _held_out(swarm) == pytest.approx(trainer.held_out_loss(), rel=1e-4)
        assert all(len(ids) == len(set(ids)) == 4 for ids in swarm.counted.values())
        assert swarm.total("samples_lost") == swarm.total("retracted") == 0

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("mode", ["zero", "delayed", "local", "gossip"])
def test_rounds_without_any_loss_leave_the_parameters_as_they_are(
    tmp_path: Path, mode: str
) -> None:
    spec = spec_of(tmp_path, ROUNDS, mode)
    data = PackedData(open_data(spec), lambda index: 1.0, has_documents=False)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, data)
        await swarm.until_round(ROUNDS)
        untouched = replay(spec, {}, 0, data)
        assert relative_difference(swarm.parameters(), untouched.state_dict()) == 0
        assert all(len(ids) == 4 for ids in swarm.counted.values())
        assert swarm.total("samples_lost") == swarm.total("rerouted") == 0
        assert _held_out(swarm) is None

    in_virtual_time(scenario, spec)


def _held_out(swarm: Swarm) -> float | None:
    """The loss that the swarm measured with its final parameters."""
    for member in swarm.members.values():
        held_out = member.peer.gossip.own.held_out
        if held_out is not None and held_out.round == swarm.spec.optimizer.rounds:
            return held_out.loss
    return None
