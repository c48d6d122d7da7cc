"""Replicas whose updates are made in a device's memory, here a second part of main memory, beside
others whose are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.swarm.replica.replica import Replica
from swarmnet.training.computing import Computing
from swarmnet.training.optimizer.local_steps import build_optimizer
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.training.memory.test_device_copies import Logged, stage_apart

ROUNDS = 6


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("num_peers", [1, 3])
def test_it_does_not_matter_where_updates_are_made(
    tmp_path: Path, codec: str, num_peers: int
) -> None:
    """Some primaries have a device and others none; one replica comes later, and one dies."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, sync={"codec": codec})
    found = list[dict[str, torch.Tensor]]()
    logs = list[Logged]()

    def apart(stage_index: int) -> tuple[Any, Any]:
        logs.append(Logged())
        there = Computing(updates_on_device=True)
        stage = stage_apart(spec, stage_index, logs[-1], computing=there)
        return stage, build_optimizer(spec, stage)

    async def scenario(swarm: Swarm) -> None:
        has_devices = len(found) == 1
        for i in range(num_peers):
            swarm.start(f"peer-{i}", **({"build": apart} if has_devices and i != 1 else {}))
        await swarm.until_round(2)
        swarm.start("late", **({"build": apart} if has_devices else {}))
        await swarm.until_round(4)
        swarm.kill("peer-0")
        await swarm.until_round(ROUNDS)
        found.append({name: p.clone() for name, p in swarm.parameters().items()})

    for _ in range(2):
        in_virtual_time(scenario, spec)
    ours, theirs = found
    assert logs
    assert all(log.num_outward for log in logs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_round_is_fed_while_its_digests_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of bytes that come from a device's memory first, and take a pass over all."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)
    measure, are_fed = Replica.measure_digests, list[bool]()

    def apart(stage_index: int) -> tuple[Any, Any]:
        there = Computing(updates_on_device=True)
        stage = stage_apart(spec, stage_index, Logged(), computing=there)
        return stage, build_optimizer(spec, stage)

    async def scenario(swarm: Swarm) -> None:
        async def measured(self: Replica) -> bytes:
            await asyncio.sleep(0.001)
            if 0 < self.round < ROUNDS:
                own = swarm.members["peer-0"].peer.gossip.own
                are_fed.append(bool(own.count(self.round).launched))
            return await measure(self)

        monkeypatch.setattr(Replica, "measure_digests", measured)
        swarm.start("peer-0", build=apart)
        await swarm.until_round(ROUNDS)

    in_virtual_time(scenario, spec)
    assert are_fed
    assert all(are_fed)
