"""What is late in mode `local` counts in the next exchange, with its tokens: as in a plain loop
that does so."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.protocol import bandwidth
from swarmnet.simulation import network as simulated
from swarmnet.simulation.network import FAST_LINK, SimulatedNetwork
from swarmnet.swarm.update.exchange.late import LateContributions
from swarmnet.transport import memory
from swarmnet.transport.memory import MemoryHub
from tests.oracles.reference_modes import LocalReference
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, tiny_spec

STEPS, ROUNDS = 8, 45
UPLOAD_S = 4.0
"""Of the slow one: longer than a grace, and shorter than the rounds between two exchanges."""
SLOW = "peer-1"


def test_late_contributions_are_those_of_a_loop_that_takes_them_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sync = {"mode": "local", "local_steps": STEPS, "warmup_rounds": 1, "aggregation": "mean"}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, global_batch=64, sync=sync)
    network, taken = SimulatedNetwork(random.Random(0)), dict[int, list[tuple[str, int]]]()
    take = LateContributions.take

    async def seen(
        self: LateContributions, exchange: int, shard: int, sender: str, *others: Any
    ) -> bool:
        found = await take(self, exchange, shard, sender, *others)
        assert found
        taken.setdefault(exchange, []).append((sender, shard))
        return found

    monkeypatch.setattr(LateContributions, "take", seen)
    monkeypatch.setattr(bandwidth, "ENOUGH_BYTES", 1 << 14)  # the stage is a small one
    monkeypatch.setattr(simulated, "SMALL_BYTES", 1 << 12)
    monkeypatch.setattr(memory, "METERED_BYTES", 1 << 12)

    async def scenario(swarm: Swarm) -> None:
        names = [f"peer-{i}" for i in range(5)]
        for name in names:
            network.add(name, FAST_LINK)
        for name in names[:-1]:
            swarm.start(name, stage=0, feeds=False, speed=0.25)
        await swarm.until(lambda: swarm.rounds() == [0] * 4)
        replica = swarm.members[SLOW].peer.replica
        assert replica is not None
        num_bytes = 4 * sum(replica.stage.shard_sizes)
        for name in names:
            uplink = num_bytes / UPLOAD_S * (1 if name == SLOW else 8)
            network.add(name, replace(FAST_LINK, up_bytes_per_s=uplink))
        swarm.start(names[-1], stage=0, speed=0.25)
        await swarm.until_round(ROUNDS)
        oracle = LocalReference(spec, dict.fromkeys(names, 0))
        for r in range(ROUNDS):
            oracle.step(r, swarm.paths[r], taken.get(r, ()))
        assert relative_difference(swarm.parameters(), oracle.state_dict()) < 1e-4
        # Before the first of these, some uplinks are not known yet.
        assert set(taken) >= {31, 39}
        assert {name for late in taken.values() for name, _ in late} == {SLOW}
        assert swarm.total("samples_lost") == swarm.total("late_shards") == 0

    in_virtual_time(scenario, spec, hub=MemoryHub(network=network))
