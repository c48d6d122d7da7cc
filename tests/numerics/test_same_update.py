"""A swarm makes the same update as one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmnet.protocol.codecs import BOUNDARY_CODECS, NONE
from swarmnet.spec import RunSpec
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

ROUNDS, CODED_ROUNDS = 14, 8


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (3, 1), (2, 2), (3, 3)])
def test_a_swarm_makes_the_updates_of_one_process(
    tmp_path: Path, num_stages: int, num_replicas: int
) -> None:
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=ROUNDS, num_layers=3)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(num_stages, num_replicas)
        await swarm.until_round(ROUNDS)
        await swarm.until(lambda: _held_out(swarm) is not None)
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4
        assert _held_out(swarm) == pytest.approx(trainer.held_out_loss(), rel=1e-4)
        assert all(len(ids) == len(set(ids)) for ids in swarm.counted.values())

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
def test_a_swarm_with_narrow_boundaries_makes_the_updates_of_one_process(
    tmp_path: Path, codec: str
) -> None:
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=CODED_ROUNDS, num_layers=3, subspace=8, codec=codec
    )

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(CODED_ROUNDS)
        await swarm.until(lambda: _held_out(swarm) is not None)
        trainer = replay(spec, swarm.counted, CODED_ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4
        assert _held_out(swarm) == pytest.approx(trainer.held_out_loss(), rel=1e-4)

    in_virtual_time(scenario, spec)


def test_recomputed_activations_give_the_same_update(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=5, activations="recompute")

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 1)
        await swarm.until_round(5)
        trainer = replay(spec, swarm.counted, 5)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("codec", [name for name in BOUNDARY_CODECS if name != NONE])
def test_what_is_coded_between_stages_gives_the_update_of_one_process_that_codes(
    tmp_path: Path, codec: str
) -> None:
    rounds = CODED_ROUNDS
    spec = tiny_spec(tmp_path, num_stages=2, rounds=rounds, num_layers=3, codec=codec)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(rounds)
        await swarm.until(lambda: _held_out(swarm) is not None)
        trainer = replay(spec, swarm.counted, rounds)
        parameters = swarm.parameters()
        assert relative_difference(parameters, trainer.state_dict()) < 1e-4
        assert _held_out(swarm) == pytest.approx(trainer.held_out_loss(), rel=1e-4)
        plain = replay(spec.with_values(_uncoded(spec)), swarm.counted, rounds)
        assert relative_difference(parameters, plain.state_dict()) > 1e-4, "nothing was coded"

    in_virtual_time(scenario, spec)


def _uncoded(spec: RunSpec) -> dict[str, Any]:
    values = spec.model_dump()
    values["pipeline"]["codec"] = NONE
    return values


def _held_out(swarm: Swarm) -> float | None:
    """The loss that the swarm measured with its final parameters."""
    for member in swarm.members.values():
        held_out = member.peer.gossip.own.held_out
        if held_out is not None and held_out.round == swarm.spec.optimizer.rounds:
            return held_out.loss
    return None
