"""The sync modes make the updates of plain PyTorch loops."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swarmnet.protocol.update.pairing import partner
from swarmnet.simulation.network import FAST_LINK, Link, SimulatedNetwork
from swarmnet.transport.memory import MemoryHub
from tests.oracles.reference_modes import (
    DelayedReference,
    GossipReference,
    LocalReference,
    SparseLocalReference,
)
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, tiny_spec

ROUNDS = 12


WARMUPS = pytest.mark.parametrize("warmup_rounds", [0, 5])


@WARMUPS
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (2, 2), (2, 3)])
def test_delayed_updates_are_those_of_a_loop_that_is_one_update_late(
    tmp_path: Path, num_stages: int, num_replicas: int, warmup_rounds: int
) -> None:
    sync = {"mode": "delayed", "warmup_rounds": warmup_rounds}
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=ROUNDS, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(num_stages, num_replicas)
        await swarm.until_round(ROUNDS)
        oracle = DelayedReference(spec)
        for r in range(ROUNDS):
            oracle.step(r, sorted(swarm.counted[r]))
        oracle.finish()
        assert relative_difference(swarm.parameters(), oracle.trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_a_held_out_loss_is_of_the_parameters_of_its_round(tmp_path: Path) -> None:
    """It is measured as soon as the round is open ahead, beside that before."""
    sync = {"mode": "delayed", "warmup_rounds": 2}
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync=sync, evaluate_every=1)
    found: dict[int, float] = {}

    async def scenario(swarm: Swarm) -> None:
        def look() -> bool:
            for member in swarm.members.values():
                told = member.peer.gossip.own.held_out
                if told is not None:
                    found[told.round] = told.loss
            return ROUNDS in found

        swarm.start_grid(2, 2)
        await swarm.until(look)
        oracle, wanted = DelayedReference(spec), dict[int, float]()
        for r in range(ROUNDS):
            wanted[r] = oracle.held_out_loss()
            oracle.step(r, sorted(swarm.counted[r]))
        oracle.finish()
        wanted[ROUNDS] = oracle.held_out_loss()
        assert found == pytest.approx({r: wanted[r] for r in found}, rel=1e-5)
        steps = [abs(wanted[r] - wanted[r + 1]) for r in range(ROUNDS)]
        assert sum(step > 1e-4 * wanted[0] for step in steps) > ROUNDS - 3, "nothing was learned"

    in_virtual_time(scenario, spec)
    assert len(found) > ROUNDS // 2


@WARMUPS
def test_delayed_updates_stay_those_of_the_loop_though_all_owners_are_replaced(
    tmp_path: Path, warmup_rounds: int
) -> None:
    """Newcomers take over optimizer state, and with it how far parameters are ahead. They begin
    with the parameters that the others have, though the round that they fetch ends meanwhile."""
    rounds = 16
    sync = {"mode": "delayed", "warmup_rounds": warmup_rounds}
    spec = tiny_spec(tmp_path, num_stages=1, rounds=rounds, global_batch=32, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, 3)
        for i in range(3):
            await swarm.until_round(4 + 4 * i)
            newcomer = f"newcomer-{i}"
            swarm.start(newcomer)
            await swarm.until(lambda name=newcomer: name in synced(swarm))  # type: ignore[misc]
            leaver = swarm.members.pop(f"peer-{i}")
            leaver.peer.stop()
            await swarm.until(leaver.life.done)
        await swarm.until_round(rounds)
        replicas = [m.peer.replica for m in swarm.members.values()]
        assert all(r is not None and r.optimizer.owned() for r in replicas)
        assert swarm.total("samples_lost") == swarm.total("shard_reset") == 0
        oracle = DelayedReference(spec)
        for r in range(rounds):
            oracle.step(r, sorted(swarm.counted[r]))
        oracle.finish()
        assert relative_difference(swarm.parameters(), oracle.trainer.state_dict()) < 1e-5

    for seed in range(2):
        in_virtual_time(scenario, spec, seed=seed)


def synced(swarm: Swarm) -> list[str]:
    """Who serves microbatches."""
    replicas = {n: m.peer.replica for n, m in swarm.members.items()}
    return [n for n, replica in replicas.items() if replica is not None and replica.synced]


@WARMUPS
@pytest.mark.parametrize(
    ("num_stages", "num_replicas"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
        (2, 3),
    ],
)
@pytest.mark.parametrize("fragments", [1, 3])
def test_local_updates_are_those_of_as_many_models_in_one_process(
    tmp_path: Path, num_stages: int, num_replicas: int, warmup_rounds: int, fragments: int
) -> None:
    sync = {
        "mode": "local",
        "local_steps": 4,
        "warmup_rounds": warmup_rounds,
        "fragments": fragments,
    }
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=ROUNDS - 1, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        await start_together(swarm, num_stages, num_replicas)
        await swarm.until_round(ROUNDS - 1)
        stages = {n: m.peer.gossip.own.stage for n, m in swarm.members.items()}
        oracle = LocalReference(spec, stages)
        for r in range(ROUNDS - 1):
            oracle.step(r, swarm.paths[r])
        assert relative_difference(swarm.parameters(), oracle.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


@WARMUPS
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (2, 3)])
def test_local_updates_of_few_numbers_are_those_of_a_loop_that_sends_no_more(
    tmp_path: Path, num_stages: int, num_replicas: int, warmup_rounds: int
) -> None:
    sync = {"mode": "local", "local_steps": 4, "warmup_rounds": warmup_rounds}
    sync |= {"codec": "topk", "topk_density": 0.05}
    rounds = 22
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=rounds, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        await start_together(swarm, num_stages, num_replicas)
        await swarm.until_round(rounds)
        stages = {n: m.peer.gossip.own.stage for n, m in swarm.members.items()}
        oracle = SparseLocalReference(spec, stages, 208)
        for r in range(rounds):
            oracle.step(r, swarm.paths[r])
        assert relative_difference(swarm.parameters(), oracle.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


@WARMUPS
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 2), (2, 3)])
def test_gossip_makes_the_steps_of_as_many_pairs_in_one_process(
    tmp_path: Path, num_stages: int, num_replicas: int, warmup_rounds: int
) -> None:
    sync = {"mode": "gossip", "local_steps": 4, "warmup_rounds": warmup_rounds}
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=ROUNDS - 1, sync=sync)

    async def scenario(swarm: Swarm) -> None:
        await start_together(swarm, num_stages, num_replicas)
        await swarm.until_round(ROUNDS - 1)
        stages = {n: m.peer.gossip.own.stage for n, m in swarm.members.items()}
        oracle = GossipReference(spec, stages)
        for r in range(ROUNDS - 1):
            partners = {
                n: partner(n, [m for m in stages if stages[m] == s], s, r)
                for n, s in stages.items()
            }
            oracle.step(r, swarm.paths[r], partners)
        for name in stages:
            mine = swarm.named(name)
            assert relative_difference(mine, oracle.state_dict(name)) < 1e-4
            spread = swarm.members[name].peer.gossip.own.spread
            assert spread == pytest.approx(oracle.spread[name], rel=1e-3)
        assert 0 < min(oracle.spread.values()) <= max(oracle.spread.values()) < 0.2

    in_virtual_time(scenario, spec)


def test_auto_changes_with_the_network_and_every_update_is_still_that_of_one_process(
    tmp_path: Path,
) -> None:
    rounds = 36
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=rounds, sync={"mode": "auto", "warmup_rounds": 0}
    )
    network = SimulatedNetwork(random.Random(0))

    def lay(link: Link) -> None:
        for i in range(4):
            network.add(f"peer-{i}", link)

    async def scenario(swarm: Swarm) -> None:
        lay(Link(4e5, 4e5, 0.01))  # an exchange takes half as long as a round
        swarm.start_grid(2, 2)
        await swarm.until_round(12)
        lay(FAST_LINK)
        await swarm.until_round(rounds)
        plans = [m.peer.replica.plan for m in swarm.members.values() if m.peer.replica]
        assert len(set(plans)) == 1
        assert [s.mode for s in plans[0].switches] == ["delayed", "zero"]
        oracle = DelayedReference(spec)
        for r in range(rounds):
            oracle.step(r, sorted(swarm.counted[r]))
            if not plans[0].is_delayed(r):
                oracle.finish()
        assert relative_difference(swarm.parameters(), oracle.trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec, hub=MemoryHub(network=network))


async def start_together(swarm: Swarm, num_stages: int, num_replicas: int) -> None:
    """Every replica is there from the first round on: the one that feeds comes last."""
    last = num_stages * num_replicas - 1
    for i in range(last):
        swarm.start(f"peer-{i}", stage=i % num_stages, feeds=False)
    await swarm.until(lambda: swarm.rounds() == [0] * last)
    swarm.start(f"peer-{last}", stage=last % num_stages)
