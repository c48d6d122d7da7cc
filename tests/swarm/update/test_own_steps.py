"""Replicas that make steps of their own go on with them after everybody was killed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.ports import LocalSteps, Snapshot
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.recovery import SETTLE_S
from swarmnet.protocol.update.pairing import partner
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.recovery.checkpointing import Disk, _own_steps
from swarmnet.training.arrays import to_tensor
from swarmnet.training.checkpoint import CheckpointStore
from tests.oracles.reference_modes import GossipReference, LocalReference
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


@pytest.mark.parametrize(
    ("num_stages", "num_replicas"), [pytest.param(1, 1, marks=pytest.mark.long), (2, 2)]
)
@pytest.mark.parametrize("sync", [LOCAL, STAGGERED, GOSSIP], ids=["local", "staggered", "gossip"])
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


def own_state(local: LocalSteps, j: int) -> list[torch.Tensor]:
    values, arrays = local.export(j)
    return [torch.tensor(values["steps"]), *(to_tensor(a) for a in arrays)]


def saved(folder: Path, swarm: Swarm, name: str, round_index: int) -> Snapshot:
    return CheckpointStore(folder / name, swarm.spec).load(round_index)


def assert_has(peer: Peer, snapshot: Snapshot) -> None:
    """The replica's own steps are those of the checkpoint, bit for bit."""
    replica = peer.replica
    assert replica is not None
    assert replica.local is not None
    assert len(snapshot.own_steps) == replica.num_shards
    for j, own in enumerate(snapshot.own_steps):
        values, arrays = own.moments
        assert values["steps"] > 0
        assert own.tokens > 0
        wanted = [torch.tensor(values["steps"]), *(to_tensor(a) for a in arrays)]
        for a, b in zip(own_state(replica.local, j), wanted, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(to_tensor(replica.stage.parameter_shard(j)), to_tensor(own.parameters))
        assert replica.local.tokens[j] == own.tokens


@pytest.mark.parametrize("sync", [LOCAL, STAGGERED, GOSSIP], ids=lambda s: "-".join(map(str, s)))
def test_what_was_saved_is_restored_bit_for_bit(tmp_path: Path, sync: dict[str, Any]) -> None:
    """Nobody feeds after the restart, so that everything stays as it was restored."""
    sync = sync | {"local_steps": 10}
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        await start_together(swarm, tmp_path, 2, 2)
        await swarm.until_round(2 * EVERY + 1)
        await asyncio.sleep(0.1)
        names = sorted(swarm.members)
        for name in names:
            swarm.kill(name)
        for name in names:
            start(swarm, tmp_path, name, feeds=False)
        await swarm.until(lambda: swarm.rounds() == [2 * EVERY] * 4)
        snapshots = {n: saved(tmp_path, swarm, n, 2 * EVERY) for n in names}
        for name, member in swarm.members.items():
            assert_has(member.peer, snapshots[name])
        fast = [to_tensor(s.own_steps[0].parameters) for s in snapshots.values() if s.stage == 0]
        assert not torch.equal(*fast), "replicas had not gone ways of their own"

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("sync", [LOCAL, GOSSIP], ids=lambda sync: sync["mode"])
@pytest.mark.parametrize("has_exchanged", [False, True])
def test_one_peer_that_comes_back_goes_on_with_its_own_steps_until_the_next_exchange(
    tmp_path: Path, sync: dict[str, Any], has_exchanged: bool
) -> None:
    """After an exchange that it missed, what it had is no longer worth anything."""
    steps = 10
    spec = tiny_spec(tmp_path, num_stages=1, rounds=2 * steps, sync=sync | {"local_steps": steps})

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            start(swarm, tmp_path, f"peer-{i}")
        await swarm.until_round(EVERY + 1)
        await asyncio.sleep(0.1)
        swarm.kill("peer-0")
        await swarm.until_round(steps + 2 if has_exchanged else 2 * EVERY)
        snapshot = saved(tmp_path, swarm, "peer-0", EVERY)
        assert snapshot.own_steps[0].tokens > 0
        peer = start(swarm, tmp_path, "peer-0", feeds=False)
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)
        replica = peer.replica
        assert replica is not None
        assert replica.local is not None
        is_own = (
            replica.local.tokens[0] == snapshot.own_steps[0].tokens
            and replica.local.export(0)[0] == snapshot.own_steps[0].moments[0]
        )
        assert is_own == (not has_exchanged)
        await swarm.until_round(2 * steps)
        if sync["mode"] == "local":
            swarm.parameters()  # asserts that replicas are bit-identical
        assert swarm.total("shard_reset") == swarm.total("stage_restarted") == 0

    in_virtual_time(scenario, spec)


def test_tokens_of_steps_that_do_not_hold_are_forgotten(tmp_path: Path) -> None:
    """It loads what it saved, and finds that the others have other common parameters: what it does
    from there must not weigh as much as both."""
    steps = 10
    spec = tiny_spec(tmp_path, num_stages=1, rounds=2 * steps, sync=LOCAL | {"local_steps": steps})

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            start(swarm, tmp_path, f"peer-{i}")
        await swarm.until_round(EVERY + 1)
        await asyncio.sleep(0.1)
        swarm.kill("peer-0")
        for member in swarm.members.values():
            to_tensor(member.peer.replica.local.common_shard(0)).add_(0.5)
        now = max(swarm.rounds())
        await swarm.until(lambda: min(swarm.rounds()) > now + 1)
        peer = start(swarm, tmp_path, "peer-0", feeds=False)
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)
        local = peer.replica.local
        before = saved(tmp_path, swarm, "peer-0", EVERY).own_steps[0].tokens
        assert max(local.tokens) < before

    in_virtual_time(scenario, spec)


def test_a_step_meanwhile_spoils_the_copy(tmp_path: Path) -> None:
    """What is saved is of one moment, whoever changes it between two shards."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, sync=LOCAL)

    async def scenario(swarm: Swarm) -> None:
        await start_together(swarm, tmp_path, 1, 1)
        await swarm.until_round(2)
        replica = swarm.members["peer-0"].peer.replica
        assert replica is not None
        assert replica.local is not None
        local, export = replica.local, replica.local.export
        assert await _own_steps(replica) is not None

        def stepping(j: int) -> Any:
            if j == 1:
                local.load(0, *export(0))
            return export(j)

        local.export = stepping  # type: ignore[assignment, method-assign]
        assert await _own_steps(replica) is None

    in_virtual_time(scenario, spec)
