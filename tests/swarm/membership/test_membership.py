"""Joining, leaving and dying, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnet.protocol.membership.records import JOINING, Record
from swarmnet.swarm.initial.files import fetch_spec
from swarmnet.swarm.update.state_sync import StateSync
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec


def test_newcomers_spread_over_the_stages(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(3, 3)
        await swarm.until_round(2)
        stages = [m.peer.gossip.own.stage for m in swarm.members.values()]
        # All at one instant, each knowing only one other: no stage is left thin.
        assert min(stages.count(k) for k in range(3)) >= 2

    in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=3), is_synthetic=True)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_newcomers_that_know_their_speed_make_equally_fast_stages(
    copies: int, tmp_path: Path
) -> None:
    """One machine is as fast as the six others together: they leave it alone, but for those that
    keep the copies of its state."""
    speeds = {"p0": 1.0, "p1": 6.0, "p2": 1.0, "p3": 1.0, "p4": 1.0, "p5": 1.0, "p6": 1.0}

    async def scenario(swarm: Swarm) -> None:
        for name, speed in speeds.items():
            swarm.start(name, speed=speed, is_measured=True)
        await swarm.until(lambda: all(m.peer.replica for m in swarm.members.values()))
        stages = {name: m.peer.gossip.own.stage for name, m in swarm.members.items()}
        assert sum(k == stages["p1"] for k in stages.values()) == copies
        await swarm.until_round(2)

    spec = tiny_spec(tmp_path, num_stages=2, sync={"replication": copies})
    in_virtual_time(scenario, spec, seed=1, is_synthetic=True)


def test_a_joiner_in_the_middle_downloads_its_stage_and_trains(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=16)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 1)
        await swarm.until_round(5)
        joiner = swarm.start("late")
        await swarm.until_round(12)
        assert joiner.replica is not None
        assert joiner.replica.device.busy_s > 0.5, "the joiner served no microbatch"
        assert joiner.replica.optimizer.owned(), "the joiner owns no optimizer state"
        await swarm.until_round(16)
        trainer = replay(spec, swarm.counted, 16)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    "moment_s",
    [0.0, 0.1, 0.25, *(pytest.param(s, marks=pytest.mark.long) for s in (0.05, 0.17, 0.4))],
)
def test_a_killed_replica_costs_no_more_than_its_own_microbatches(
    tmp_path: Path, moment_s: float
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=16)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(5)
        await asyncio.sleep(moment_s)
        victim = next(n for n, m in swarm.members.items() if m.peer.gossip.own.stage == 1)
        replica = swarm.members[victim].peer.replica
        assert replica is not None
        inside = replica.ledger.num_samples(replica.round)
        swarm.kill(victim)
        await swarm.until_round(16)
        assert swarm.total("shard_reset") == 0, "moments of the optimizer were lost"
        assert swarm.total("samples_lost") <= inside
        trainer = replay(spec, swarm.counted, 16)
        tolerance = 1e-4 if swarm.total("samples_lost") == 0 else 2e-2
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < tolerance

    in_virtual_time(scenario, spec)


def test_a_peer_that_leaves_hands_its_shards_over(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=16)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(5)
        name = "peer-0"
        swarm.members[name].peer.stop()
        await swarm.until(lambda: swarm.members[name].life.done(), limit_s=30)
        del swarm.members[name]
        await swarm.until_round(16)
        assert swarm.total("shard_reset") == 0
        trainer = replay(spec, swarm.counted, 16)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_the_bootstrap_peer_may_die(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=12)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(3)
        swarm.kill("peer-0")
        await swarm.until_round(6)
        swarm.start("late", neighbours=["peer-1"])
        await swarm.until_round(12)

    in_virtual_time(scenario, spec, is_synthetic=True)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_last_of_a_stage_leaves_it_to_a_newcomer(
    tmp_path: Path, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is downloading the stage when Ctrl-C is pressed."""
    spec = tiny_spec(tmp_path, num_stages=num_stages, rounds=5, global_batch=200)
    ask = StateSync.ask

    async def slowly(self: StateSync, donor: Record, round_index: int, j: int) -> Array:
        await asyncio.sleep(10.0)
        return await ask(self, donor, round_index, j)

    monkeypatch.setattr(StateSync, "ask", slowly)

    async def scenario(swarm: Swarm) -> None:
        for i in range(num_stages):
            swarm.start(f"peer-{i}", stage=i)
        await swarm.until_round(2)
        await asyncio.sleep(
            0.5
        )  # into the round: at its very beginning it gets the update's result
        last = num_stages - 1
        newcomer = swarm.start("newcomer", stage=last)
        await swarm.until(lambda: newcomer.gossip.own.state == JOINING and bool(newcomer.replica))
        await asyncio.sleep(0.5)
        leaver = swarm.members.pop(f"peer-{last}")
        assert newcomer.replica is not None
        assert not newcomer.replica.synced
        leaver.peer.stop()
        await leaver.life
        swarm.hub.kill(f"peer-{last}")
        await swarm.until_round(5)
        assert swarm.total("stage_restarted") == swarm.total("shard_reset") == 0
        assert swarm.total("samples_lost") == 0
        reference = replay(spec, swarm.counted, 5).state_dict()
        assert relative_difference(swarm.parameters(), reference) < 1e-4

    in_virtual_time(scenario, spec)


def test_newcomers_make_the_update_when_all_before_them_are_gone(tmp_path: Path) -> None:
    """Two peers join a stage in the middle of a round, in which they own nothing yet, and its only
    owner dies before that round ends."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=6)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("first", speed=0.1)
        await swarm.until_round(1)
        for name in ("second", "third"):
            swarm.start(name)
        await swarm.until(lambda: swarm.rounds()[1:] == [1, 1])
        await asyncio.sleep(0.2)
        records = [swarm.members[n].peer.gossip.own for n in ("second", "third")]
        assert [(r.round, r.active_from) for r in records] == [(1, 2), (1, 2)]
        swarm.kill("first")
        await swarm.until_round(6)
        swarm.parameters()
        assert swarm.total("stage_restarted") == 0

    in_virtual_time(scenario, spec)


def test_a_peer_says_once_that_another_run_is_started_where_its_own_is_alive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("here")
        starter, joiner = swarm.hub.transport("starter"), swarm.hub.transport("joiner")
        for run_id in ("", spec.run_id):
            joiner.set_run(run_id)
            assert (await fetch_spec(joiner, "here")).run_id == spec.run_id
        assert not caplog.messages
        for run_id in ("another", "another", *(f"made up {n}" for n in range(100))):
            starter.set_run(run_id)
            assert (await fetch_spec(starter, "here")).run_id == spec.run_id

    in_virtual_time(scenario, spec, is_synthetic=True)
    lines = [m for m in caplog.messages if "starts another run" in m]
    assert sum("(another)" in line for line in lines) == 1
    assert len(lines) <= 4, "anybody may name any"
