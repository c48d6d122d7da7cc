"""Replicas that make steps of their own go on with them after everybody was killed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.protocol.pairing import partner
from swarmnet.protocol.records import ACTIVE
from swarmnet.protocol.recovery import SETTLE_S
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.ports import LocalSteps, Snapshot
from swarmnet.swarm.recovery import Disk
from swarmnet.training.arrays import to_tensor
from swarmnet.training.checkpoint import CheckpointStore
from swarmnet.training.reference_modes import GossipReference, LocalReference
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, tiny_spec

ROUNDS = 14
EVERY = 3
TOLERANCE = 1e-5
LOCAL: dict[str, Any] = {"mode": "local", "local_steps": 4}
STAGGERED: dict[str, Any] = {"mode": "local", "local_steps": 4, "fragments": 2}
GOSSIP: dict[str, Any] = {"mode": "gossip", "local_steps": 4}


def start(swarm: Swarm, folder: Path, name: str, **options: Any) -> Peer:
    """A peer with a state folder, as a process that was started again would find it."""
    store = CheckpointStore(folder / name, swarm.spec)
    disk = Disk(store, InlineWorker(), EVERY, store.available())
    return swarm.start(name, disk=disk, **options)


async def start_together(swarm: Swarm, folder: Path, num_stages: int, num_replicas: int) -> None:
    """Every replica is there from the first round on: the one that feeds comes last."""
    last = num_stages * num_replicas - 1
    for i in range(last):
        start(swarm, folder, f"peer-{i}", stage=i % num_stages, feeds=False)
    await swarm.until(lambda: swarm.rounds() == [0] * last)
    start(swarm, folder, f"peer-{last}", stage=last % num_stages)


async def restart(swarm: Swarm, folder: Path, rng: random.Random) -> int:
    """Kills everybody and starts them again; returns the round that they go on from."""
    names = sorted(swarm.members)
    for name in names:
        swarm.kill(name)
    newest = [CheckpointStore(folder / n, swarm.spec).available()[-1].round for n in names]
    for r in [r for r in swarm.paths if r >= min(newest)]:
        del swarm.paths[r]  # what was counted there did not happen
    for name in rng.sample(names, len(names)):
        start(swarm, folder, name, feeds=name == names[-1])
        await asyncio.sleep(rng.uniform(0.0, 0.8 * SETTLE_S))
    await swarm.until(
        lambda: all(m.peer.gossip.own.state == ACTIVE for m in swarm.members.values())
    )
    return min(newest)


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("sync", [LOCAL, GOSSIP], ids=lambda sync: sync["mode"])
def test_a_run_that_was_killed_whole_goes_on_as_if_it_had_not_been(
    tmp_path: Path, sync: dict[str, Any], num_stages: int, num_replicas: int
) -> None:
    """In the middle between two exchanges: nothing that replicas had done alone is lost."""
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=ROUNDS, sync=sync)
    rng = random.Random(f"{sync} {num_stages} {num_replicas}")

    async def scenario(swarm: Swarm) -> None:
        await start_together(swarm, tmp_path, num_stages, num_replicas)
        await swarm.until_round(2 * EVERY + 1)
        await asyncio.sleep(0.1)
        assert await restart(swarm, tmp_path, rng) == 2 * EVERY
        await swarm.until_round(ROUNDS)
        assert swarm.total("shard_reset") == swarm.total("stage_restarted") == 0
        assert sorted(swarm.paths) == list(range(ROUNDS))
        stages = {n: m.peer.gossip.own.stage for n, m in swarm.members.items()}
        if sync["mode"] == "local":
            oracle = LocalReference(spec, stages)
            for r in range(ROUNDS):
                oracle.step(r, swarm.paths[r])
            assert relative_difference(swarm.parameters(), oracle.state_dict()) < TOLERANCE
            return
        pairs = GossipReference(spec, stages)
        for r in range(ROUNDS):
            partners = {
                n: partner(n, [m for m in stages if stages[m] == s], s, r)
                for n, s in stages.items()
            }
            pairs.step(r, swarm.paths[r], partners)
        for name in stages:
            found, wanted = swarm.named(name), pairs.state_dict(name)
            assert relative_difference(found, wanted) < TOLERANCE

    in_virtual_time(scenario, spec)
