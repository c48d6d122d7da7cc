"""A peer that pauses hands over and stays connected, and comes back; virtual time, memory
transport."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UserError
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.checkpoint import CheckpointStore
from tests.swarm.harness import (
    InlineWorker,
    Swarm,
    in_virtual_time,
    relative_difference,
    replay,
    tiny_spec,
)

REASON = "its owner paused it"


def pause(peer: Peer, reason: str = REASON) -> None:
    peer.resource_limits.why_paused = reason
    peer.resource_limits.tell()


def is_paused(peer: Peer) -> bool:
    return peer.gossip.own.paused != ""


async def grid(swarm: Swarm) -> None:
    """Two replicas of each of two stages, all serving."""
    for i in range(4):
        swarm.start(f"peer-{i}", stage=i % 2)
    await swarm.until(lambda: all(r >= 1 for r in swarm.rounds()))


def test_a_pause_loses_nothing_and_ends_with_a_join(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=24)

    async def scenario(swarm: Swarm) -> None:
        await grid(swarm)
        peer = swarm.members["peer-2"].peer  # of stage 0: it feeds
        other = swarm.members["peer-1"].peer
        stage = weakref.ref(peer.replica.stage) if peer.replica else None
        pause(peer)
        await swarm.until(lambda: is_paused(peer))
        assert peer.replica is None
        gc.collect()
        assert stage is not None
        assert stage() is None, "a paused peer's memory is the machine's"
        seen = other.view.get("peer-2")
        assert seen is not None
        await swarm.until(lambda: (r := other.view.get("peer-2")) is not None and r.paused != "")
        seen = other.view.get("peer-2")
        assert seen is not None
        assert (seen.state, seen.paused, seen.stage) == (OBSERVING, REASON, -1)
        began = max(swarm.rounds())
        await swarm.until(lambda: max(swarm.rounds()) >= began + 3)
        pause(peer, "")
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)
        assert peer.gossip.own.paused == ""
        await swarm.until_round(spec.optimizer.rounds)
        assert swarm.total("samples_lost") == swarm.total("shard_reset") == 0
        reference = replay(spec, swarm.counted, spec.optimizer.rounds)
        model = swarm.parameters()
        assert relative_difference(model, reference.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_pauses_in_any_order_do_not_stop_a_run(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=30)

    async def scenario(swarm: Swarm) -> None:
        await grid(swarm)
        for name in ("peer-0", "peer-1", "peer-2", "peer-3", "peer-0"):
            peer = swarm.members[name].peer
            pause(peer)
            await swarm.until(lambda p=peer: is_paused(p))  # type: ignore[misc]
            pause(peer, "")
            await swarm.until(lambda p=peer: p.gossip.own.state == ACTIVE)  # type: ignore[misc]
        await swarm.until_round(spec.optimizer.rounds)
        swarm.parameters()

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize("error", [UserError("stage 0 needs 2 GB"), MemoryError()])
def test_a_machine_without_memory_after_a_pause_is_tried_again(
    tmp_path: Path, error: Exception
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=100_000)
    is_full, tries = False, 0

    async def scenario(swarm: Swarm) -> None:
        nonlocal is_full

        def build(stage_index: int) -> tuple[Any, Any]:
            nonlocal tries
            tries += is_full
            if is_full:
                raise error
            return swarm.build(stage_index)

        swarm.start("other")
        peer = swarm.start("peer", build=build)
        await swarm.until_round(2)
        pause(peer)
        await swarm.until(lambda: is_paused(peer))
        is_full = True
        pause(peer, "")
        await swarm.until(lambda: tries == 3)
        assert peer.gossip.own.state == OBSERVING
        assert peer.gossip.own.paused == (str(error) or "no memory")
        is_full = False
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)
        assert not is_paused(peer)

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_at_the_start_a_stage_that_cannot_be_built_ends_the_peer(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=1)

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            raise UserError("stage 0 needs 2 GB")

        swarm.start("peer", build=build)
        with pytest.raises(UserError, match="needs 2 GB"):
            await swarm.until_round(1)
        swarm.members.clear()

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_a_change_of_mind_while_it_hands_over(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=12)

    async def scenario(swarm: Swarm) -> None:
        await grid(swarm)
        peer = swarm.members["peer-3"].peer
        pause(peer)
        await swarm.until(lambda: peer.gossip.own.state != ACTIVE)
        pause(peer, "")
        await swarm.until_round(spec.optimizer.rounds)
        assert peer.gossip.own.state == ACTIVE

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_a_peer_that_begins_paused_waits_and_then_joins(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=10)

    async def scenario(swarm: Swarm) -> None:
        first = swarm.start("peer-0", stage=0)
        late = swarm.start("peer-1", stage=1)
        late.resource_limits.why_paused = REASON
        await swarm.until(lambda: is_paused(late) and first.gossip.own.state == ACTIVE)
        assert late.replica is None
        pause(late, "")
        await swarm.until_round(spec.optimizer.rounds)

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_a_paused_peer_can_be_stopped(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=10)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0")
        peer = swarm.start("peer-1")
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)
        pause(peer)
        await swarm.until(lambda: is_paused(peer))
        peer.stop()
        await swarm.members["peer-1"].life

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_a_stage_that_does_not_fit_is_not_taken(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=10)

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            peer = swarm.start(f"peer-{i}", stage=None if i else 0)
            if i:
                peer.resource_limits.unfit = lambda k: "too large" if k == 0 else ""
        await swarm.until_round(spec.optimizer.rounds)
        stages = [m.peer.gossip.own.stage for m in swarm.members.values()]
        assert stages == [0, 1, 1]

    in_virtual_time(scenario, spec)


def test_memory_bounds_the_microbatches_inside(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=6)

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}", stage=min(i, 1))
        small = swarm.members["peer-1"].peer
        small.resource_limits.max_open_steps = lambda stage_index: 1
        most = 0

        def look() -> bool:
            nonlocal most
            most = max(most, small.steps.num_in_flight)
            return all(r >= spec.optimizer.rounds for r in swarm.rounds())

        await swarm.until(look)
        assert most == 1

    in_virtual_time(scenario, spec, is_synthetic=True)


def disk_of(swarm: Swarm, folder: Path, name: str) -> Disk:
    store = CheckpointStore(folder / name, swarm.spec, every=10)
    return Disk(store, InlineWorker(), 10, store.available())


def test_a_pause_where_the_disk_cannot_be_read_ends_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=30)

    def failing(store: CheckpointStore) -> list[Any]:
        raise UserError("input/output error")

    async def scenario(swarm: Swarm) -> None:
        swarm.start("a")
        peer = swarm.start("b", disk=disk_of(swarm, tmp_path, "b"))
        await swarm.until_round(2)
        monkeypatch.setattr(CheckpointStore, "available", failing)
        pause(peer)
        await swarm.until(lambda: is_paused(peer))
        pause(peer, "")
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)

    in_virtual_time(scenario, spec)


def test_a_feeder_that_was_away_while_the_run_went_back_counts_anew(tmp_path: Path) -> None:
    """Its counters of rounds that are to come again would fill them without a sample."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=24)

    async def scenario(swarm: Swarm) -> None:
        feeder = swarm.start("a")
        swarm.start("b", feeds=False, disk=disk_of(swarm, tmp_path, "b"))
        await swarm.until_round(18)
        pause(feeder)
        await swarm.until(lambda: is_paused(feeder))
        swarm.kill("b")
        swarm.start("b", feeds=False, disk=disk_of(swarm, tmp_path, "b"), neighbours=["a"])
        await swarm.until(lambda: swarm.members["b"].peer.gossip.own.state == ACTIVE, 120.0)
        went_back_to = swarm.members["b"].peer.gossip.own.round
        assert went_back_to == 10
        pause(feeder, "")
        swarm.counted.clear()
        await swarm.until_round(24, 60.0)
        per_round = spec.pipeline.global_batch // spec.pipeline.microbatch
        assert {r: len(ids) for r, ids in swarm.counted.items()} == dict.fromkeys(
            range(went_back_to, 24), per_round
        )

    in_virtual_time(scenario, spec)
