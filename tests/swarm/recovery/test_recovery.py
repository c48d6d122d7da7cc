"""All peers die at once and come back with their state folders, in virtual time."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.ports import Snapshot
from swarmnet.protocol.membership.records import ACTIVE, JOINING
from swarmnet.protocol.recovery import RESTORE_PATIENCE_S, SETTLE_S
from swarmnet.protocol.saved_rounds import STRIDES
from swarmnet.runtime.counted import COUNTED_FILE, CountedMicrobatches, read_counted
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.checkpoint import CheckpointError, CheckpointStore, read_metas
from swarmnet.wire import Array
from tests.oracles.reference_modes import DelayedReference
from tests.swarm.harness import (
    Swarm,
    coded,
    in_virtual_time,
    relative_difference,
    replay,
    stepped_by_parts,
    tiny_spec,
)

ROUNDS = 14
EVERY = 3
TOLERANCE = 1e-5


def start(
    swarm: Swarm,
    folder: Path,
    name: str,
    store: CheckpointStore | None = None,
    *,
    stage: int | None = None,
    begin_anew: bool = False,
) -> Peer:
    """A peer with a state folder, as a process that was started again would find it."""
    state = folder / name
    state.mkdir(exist_ok=True)
    store = store or CheckpointStore(state, swarm.spec, unused=lambda: unused(swarm, folder))
    found = store.available()
    disk = Disk(store, InlineWorker(), EVERY, found, store.unreadable)
    journal = CountedMicrobatches(state / COUNTED_FILE, swarm.spec.run_id)
    return swarm.start(name, stage=stage, disk=disk, begin_anew=begin_anew, journal=journal)


def unused(swarm: Swarm, folder: Path) -> list[Path]:
    """All peers of a folder are on one machine."""
    return [path for path in sorted(folder.glob("peer-*")) if path.name not in swarm.members]


def kill_all(swarm: Swarm) -> None:
    for name in list(swarm.members):
        swarm.kill(name)


def counted(folder: Path) -> dict[int, list[int]]:
    return read_counted(sorted(folder.glob(f"*/{COUNTED_FILE}")))


def newest_whole_round(folder: Path, num_stages: int) -> int:
    """By what lies on the disks."""
    rounds: dict[int, dict[int, set[int]]] = {}
    shards: dict[int, int] = {}
    for path in folder.glob("*/checkpoints/*"):
        for meta in read_metas(path):
            rounds.setdefault(meta.round, {}).setdefault(meta.stage, set()).update(meta.steps)
            shards[meta.stage] = meta.num_shards
    return max(
        r
        for r, stages in rounds.items()
        if len(stages) == num_stages and all(len(stages[k]) == shards[k] for k in stages)
    )


async def first_rounds(swarm: Swarm, count: int) -> list[int]:
    """The round in which each of `count` peers becomes active."""
    seen: dict[str, int] = {}

    def all_seen() -> bool:
        for name, member in swarm.members.items():
            own = member.peer.gossip.own
            if own.state == ACTIVE:
                seen.setdefault(name, own.round)
        return len(seen) == count

    await swarm.until(all_seen)
    return sorted(seen.values())


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))]
)
def test_a_run_goes_on_from_its_newest_whole_round(tmp_path: Path, seed: int) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, global_batch=32)
    rng = random.Random(seed)
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        names = [f"peer-{i}" for i in range(4)]
        for name in names:
            start(swarm, folder, name)
        await swarm.until_round(rng.randrange(EVERY + 1, ROUNDS - 2))
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        kill_all(swarm)
        whole = newest_whole_round(folder, 2)
        assert whole >= EVERY
        rng.shuffle(names)
        for name in names:
            start(swarm, folder, name)
            await asyncio.sleep(rng.uniform(0.0, 0.8 * SETTLE_S))
        assert (await first_rounds(swarm, 4))[0] == whole
        await swarm.until_round(ROUNDS)
        assert swarm.total("shard_reset") == 0, "moments of the optimizer were lost"
        again = counted(folder)
        assert sorted(again) == list(range(ROUNDS))
        for r, slots in again.items():
            assert slots == list(range(8)), f"round {r} counted {slots}"
        trainer = replay(spec, again, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < TOLERANCE

    in_virtual_time(scenario, spec, seed=seed)


@pytest.mark.parametrize("slow_s", [2.0, pytest.param(9.0, marks=pytest.mark.long)])
def test_disks_of_different_speed_have_a_round_in_common(tmp_path: Path, slow_s: float) -> None:
    """A round takes half a second, writing one of its beginnings up to eighteen rounds."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=400, global_batch=16)
    delays = {"peer-0": slow_s, "peer-1": 0.0, "peer-2": slow_s / 3}

    async def scenario(swarm: Swarm) -> None:
        def begin(name: str, stage: int | None = None) -> None:
            store = CheckpointStore(tmp_path / name, spec, every=EVERY)
            disk = Disk(store, InlineWorker(delays[name]), EVERY, store.available())
            swarm.start(name, stage=stage, disk=disk)

        for i, name in enumerate(delays):
            begin(name, i % 2)
        first = 2 * STRIDES[-1] * EVERY
        behind = []
        for r in range(first, first + 50):
            await swarm.until_round(r)
            behind.append(max(swarm.rounds()) - newest_whole_round(tmp_path, 2))
        assert max(behind) <= 2 * STRIDES[-1] * EVERY + 2
        kept = [len(CheckpointStore(tmp_path / name, spec).available()) for name in delays]
        assert max(kept) <= 2 + len(STRIDES)
        kill_all(swarm)
        whole = newest_whole_round(tmp_path, 2)
        await asyncio.sleep(1.0)
        for name in delays:
            begin(name)
        assert (await first_rounds(swarm, len(delays)))[0] == whole
        assert swarm.total("stage_restarted") == 0

    in_virtual_time(scenario, spec)


def test_a_run_dies_twice_and_histories_are_not_mixed(tmp_path: Path) -> None:
    """The second life begins at an older round, without the peers that were furthest; when those
    come back for the third, their checkpoints are of a history that did not happen."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            start(swarm, folder, f"peer-{i}")
        await swarm.until_round(2 * EVERY + 1)
        await asyncio.sleep(0.2)
        kill_all(swarm)
        for i in range(4):  # in round 6 only peers 0 and 1 saved
            if i >= 2:
                shutil.rmtree(CheckpointStore(folder / f"peer-{i}", spec).path(6))
        (folder / "peer-0").rename(folder / "absent")
        for i in range(1, 4):
            start(swarm, folder, f"peer-{i}")
        assert (await first_rounds(swarm, 3))[0] in (EVERY, 2 * EVERY)
        await swarm.until_round(3 * EVERY + 1)
        await asyncio.sleep(0.2)
        kill_all(swarm)
        (folder / "absent").rename(folder / "peer-0")
        for i in range(4):
            start(swarm, folder, f"peer-{i}")
        assert (await first_rounds(swarm, 4))[0] == 3 * EVERY
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, counted(folder), ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < TOLERANCE

    in_virtual_time(scenario, spec)


def test_one_peer_that_comes_back_joins_the_others(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            start(swarm, folder, f"peer-{i}")
        await swarm.until_round(EVERY + 1)
        await asyncio.sleep(0.1)
        stage = swarm.members["peer-3"].peer.gossip.own.stage
        swarm.kill("peer-3")
        await swarm.until_round(EVERY + 4)
        peer = start(swarm, folder, "peer-3")
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)
        assert peer.gossip.own.stage == stage, "it serves another stage than before"
        assert peer.gossip.own.round > EVERY + 3
        await swarm.until_round(ROUNDS)
        swarm.parameters()  # asserts that the replicas are equal

    in_virtual_time(scenario, spec)


async def without_stage_one(swarm: Swarm, folder: Path) -> list[str]:
    """A run of four peers, those of stage 1 killed after two checkpoints; their names."""
    for i in range(4):
        start(swarm, folder, f"peer-{i}")
    await swarm.until_round(2 * EVERY + 1)
    await asyncio.sleep(0.1)
    dead = [n for n, m in swarm.members.items() if m.peer.gossip.own.stage == 1]
    for name in dead:
        swarm.kill(name)
    await asyncio.sleep(1.0)
    return dead


def test_a_stage_that_died_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The other stage lives and waits."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        dead = await without_stage_one(swarm, folder)
        peers = [start(swarm, folder, name) for name in dead]
        await swarm.until(lambda: all(p.gossip.own.state == ACTIVE for p in peers))
        assert all(p.gossip.own.stage == 1 for p in peers)
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, counted(folder), ROUNDS)
        # One to three updates of one stage were lost; a stage from scratch is at distance 1.
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 0.1

    in_virtual_time(scenario, spec)


def test_a_newcomer_waits_for_who_may_be_back_with_the_stage(tmp_path: Path) -> None:
    """As a machine that starts again."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        dead = await without_stage_one(swarm, folder)
        newcomer = swarm.start("newcomer")
        await asyncio.sleep(0.5 * RESTORE_PATIENCE_S)
        assert newcomer.gossip.own.stage == 1
        peers = [start(swarm, folder, name) for name in dead]
        await swarm.until(lambda: all(p.gossip.own.state == ACTIVE for p in peers))
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, counted(folder), ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 0.1

    in_virtual_time(scenario, spec)


def saved_aside(folder: Path) -> list[Path]:
    return sorted(folder.glob("aside-*"))


def spoil(folder: Path) -> None:
    """No meta.json in it can be read any more."""
    for path in folder.glob("peer-*/checkpoints/*/round-*/meta.json"):
        path.write_text("{")


@pytest.fixture
def half_gone(tmp_path: Path) -> tuple[RunSpec, Path, Callable[[Swarm], Awaitable[None]]]:
    """A run of four peers that was killed, and has no checkpoint of stage 1 left but aside."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()

    async def run(swarm: Swarm) -> None:
        for i in range(4):
            start(swarm, folder, f"peer-{i}")
        await swarm.until_round(EVERY + 1)
        await asyncio.sleep(0.1)
        kill_all(swarm)
        for path in folder.glob("*/checkpoints/*"):
            if any(meta.stage == 1 for meta in read_metas(path)):
                path.rename(tmp_path / f"aside-{path.parent.parent.name}-{path.name}")

    return spec, folder, run


HalfGone = tuple[RunSpec, Path, Callable[[Swarm], Awaitable[None]]]


def test_who_alone_has_a_stage_is_waited_for_as_long_as_it_takes(
    half_gone: HalfGone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, folder, run = half_gone

    async def scenario(swarm: Swarm) -> None:
        await run(swarm)
        aside = saved_aside(tmp_path)
        _, holder, run_folder = aside[0].name.rsplit("-", 2)
        holder = f"peer-{holder}"
        with caplog.at_level(logging.WARNING, logger="swarmnet"):
            for i in range(4):
                if f"peer-{i}" != holder:
                    start(swarm, folder, f"peer-{i}")
            await asyncio.sleep(20 * RESTORE_PATIENCE_S)
        assert all(m.peer.gossip.own.state == JOINING for m in swarm.members.values())
        said = [r.message for r in caplog.records if "lacks stage 1" in r.message]
        assert any("--begin-anew" in line for line in said), said
        assert len(said) < 3 * 40, "it is said again and again"
        (folder / holder / "checkpoints").mkdir(exist_ok=True)
        aside[0].rename(folder / holder / "checkpoints" / run_folder)
        start(swarm, folder, holder)
        assert (await first_rounds(swarm, 4))[0] == EVERY
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, counted(folder), ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < TOLERANCE

    in_virtual_time(scenario, spec)


def test_one_peer_is_told_to_begin_anew_and_the_others_follow(
    half_gone: HalfGone, caplog: pytest.LogCaptureFixture
) -> None:
    spec, folder, run = half_gone

    async def scenario(swarm: Swarm) -> None:
        await run(swarm)
        with caplog.at_level(logging.WARNING, logger="swarmnet"):
            for i in range(3):
                start(swarm, folder, f"peer-{i}")
            await asyncio.sleep(2 * RESTORE_PATIENCE_S)
            start(swarm, folder, "peer-3", begin_anew=True)
            assert (await first_rounds(swarm, 4))[0] == 0
        lines = [r.message for r in caplog.records]
        assert any(f"has a checkpoint of round {EVERY} that is not part" in line for line in lines)
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, counted(folder), ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < TOLERANCE

    in_virtual_time(scenario, spec)


def test_who_cannot_read_what_it_saved_does_not_begin_anew_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, tmp_path, "peer-0")
        await swarm.until_round(EVERY + 1)
        await asyncio.sleep(0.1)
        kill_all(swarm)
        spoil(tmp_path)
        with caplog.at_level(logging.WARNING, logger="swarmnet"):
            start(swarm, tmp_path, "peer-0")
            await asyncio.sleep(2 * RESTORE_PATIENCE_S)
        assert swarm.members["peer-0"].peer.gossip.own.state == JOINING
        assert any("cannot be read" in r.message for r in caplog.records)
        swarm.kill("peer-0")
        start(swarm, tmp_path, "peer-0", begin_anew=True)
        assert (await first_rounds(swarm, 1))[0] == 0

    in_virtual_time(scenario, spec)


async def with_fewer_peers(swarm: Swarm, folder: Path, *, is_there: bool = True) -> float:
    """Six peers die, and of each of the two stages one comes back; the shards of the round were
    spread over three. The states of the others are on the same machine, where one `is_there`.
    Seconds until the run goes on."""
    for i in range(6):
        start(swarm, folder, f"peer-{i}")
    await swarm.until_round(2 * EVERY + 1)
    await asyncio.sleep(0.1)
    stages = {n: m.peer.gossip.own.stage for n, m in swarm.members.items()}
    kill_all(swarm)
    for path in sorted(folder.glob("*/checkpoints/*/round-00000003")):  # noqa: ASYNC240
        shutil.rmtree(path)
    back = [next(n for n in stages if stages[n] == stage) for stage in range(2)]
    for name in set(stages) - set(back):
        if not is_there:
            (folder / name).rename(folder / f"elsewhere-{name}")
    began = asyncio.get_running_loop().time()
    for name in back:
        start(swarm, folder, name)
    assert (await first_rounds(swarm, 2))[0] == 2 * EVERY
    return asyncio.get_running_loop().time() - began


def test_who_comes_back_takes_over_what_others_of_the_machine_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        assert await with_fewer_peers(swarm, folder) < RESTORE_PATIENCE_S / 4
        await swarm.until_round(ROUNDS)
        assert swarm.total("shard_reset") == 0
        trainer = replay(spec, counted(folder), ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < TOLERANCE

    in_virtual_time(scenario, spec)
    lines = [m for m in caplog.messages if "takes over what the run lacks" in m]
    assert lines
    assert all(str(folder) in line and "optimizer state of" in line for line in lines)
    sources = [(line.split(",")[0], line.split(" uses ")[1].split(",")[0]) for line in lines]
    assert len(sources) == len(set(sources)), "one line for each folder"
    assert not any("lost" in m or "brings it back" in m for m in caplog.messages)


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_stage_whose_state_lies_beside_a_peer_of_another_stage_is_named(
    half_gone: HalfGone, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_alive: bool
) -> None:
    """With the command that brings it back; a new peer of that stage takes it over too."""
    spec, folder, run = half_gone

    async def scenario(swarm: Swarm) -> None:
        await run(swarm)
        aside = saved_aside(tmp_path)[0]
        kept = folder / "peer-9"
        (kept / "checkpoints").mkdir(parents=True)
        aside.rename(kept / "checkpoints" / aside.name.rsplit("-", 1)[1])
        names = [f"peer-{i}" for i in range(4)]
        zero = [name for name in names if list((folder / name).glob("checkpoints/*"))]
        for name in zero:
            start(swarm, folder, name)
        await asyncio.sleep(2 * SETTLE_S)
        lines = [m for m in caplog.messages if "brings it back" in m]
        assert len(lines) == len(zero)
        assert all("stage 1 of round 3" in line for line in lines)
        assert all(f"swarmnet peer --state-dir {kept} --join " in line for line in lines)
        if is_alive:
            start(swarm, folder, "peer-9")
        else:
            start(swarm, folder, "new", stage=1)
        assert (await first_rounds(swarm, len(zero) + 1))[0] == EVERY

    in_virtual_time(scenario, spec)


def test_missing_moments_begin_again_and_are_told(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        await with_fewer_peers(swarm, folder, is_there=False)
        await swarm.until_round(ROUNDS)
        assert swarm.total("shard_reset") > 0
        swarm.parameters()

    in_virtual_time(scenario, spec)


def test_a_fresh_run_begins_at_once(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        peer = start(swarm, tmp_path, "peer-0")
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE, limit_s=1.0)

    in_virtual_time(scenario, spec)


class FullDisk(CheckpointStore):
    """Nothing fits any more."""

    def save(self, snapshot: Snapshot) -> None:
        raise CheckpointError(f"{self.folder}: No space left on device")


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            start(swarm, tmp_path, f"peer-{i}", FullDisk(tmp_path / f"peer-{i}", spec))
        await swarm.until_round(ROUNDS)
        assert swarm.total("checkpoints") == 0
        assert swarm.total("checkpoints_failed") == 2, "which all onlookers see"
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < TOLERANCE

    with caplog.at_level(logging.WARNING, logger="swarmnet"):
        in_virtual_time(scenario, spec)
    lines = [r.message for r in caplog.records if "No space left" in r.message]
    assert len(lines) == 2  # one of each peer, however often it is tried


def test_a_disk_that_fills_and_empties_is_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, is_full = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS), [True]

    class Filling(CheckpointStore):
        def save(self, snapshot: Snapshot) -> None:
            if is_full:
                raise CheckpointError(f"{self.folder}: Read-only file system")
            super().save(snapshot)

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            start(swarm, tmp_path, f"peer-{i}", Filling(tmp_path / f"peer-{i}", spec))
        await swarm.until_round(2 * EVERY)
        is_full.clear()
        await swarm.until_round(ROUNDS)
        await swarm.until(lambda: swarm.total("checkpoints") >= 2, limit_s=100.0)
        assert swarm.total("checkpoints_failed") == swarm.total("checkpoints_resumed") == 2

    with caplog.at_level(logging.WARNING, logger="swarmnet"):
        in_virtual_time(scenario, spec)
    lines = [r.getMessage() for r in caplog.records]
    for said in ("Read-only file system", "checkpoints are written again"):
        assert len([line for line in lines if said in line]) == 2, "one of each peer"


def test_an_end_that_is_on_no_disk_is_told(tmp_path: Path) -> None:
    """By the peer whose stage it is; not where others of its stage go on."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        full = FullDisk(tmp_path / "peer-0", spec)
        lone = start(swarm, tmp_path, "peer-0", full, stage=0)
        whole = start(swarm, tmp_path, "peer-1", stage=1)
        spare = start(swarm, tmp_path, "peer-2", FullDisk(tmp_path / "peer-2", spec), stage=1)
        await swarm.until_round(2 * EVERY)
        await leave(swarm, "peer-2")
        await swarm.until_round(ROUNDS)
        await leave(swarm, "peer-0")
        await leave(swarm, "peer-1")
        assert "stage 0 ends unsaved in round" in lone.unsaved
        assert "No space left" in lone.unsaved
        assert "there is no checkpoint of it here" in lone.unsaved
        assert whole.unsaved == ""
        assert spare.unsaved == ""

    in_virtual_time(scenario, spec)


async def leave(swarm: Swarm, name: str) -> None:
    member = swarm.members.pop(name)
    member.peer.stop()
    await member.life


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """It looks whole and is not: found when it is loaded, and the round before is taken."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            start(swarm, folder, f"peer-{i}")
        await swarm.until_round(2 * EVERY + 1)
        await asyncio.sleep(0.1)
        kill_all(swarm)
        path = CheckpointStore(folder / "peer-1", spec).path(6) / "stage.safetensors"
        spoiled = bytearray(path.read_bytes())
        spoiled[-5] ^= 1
        path.write_bytes(spoiled)
        for i in range(2):
            start(swarm, folder, f"peer-{i}")
        assert (await first_rounds(swarm, 2))[0] == EVERY
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, counted(folder), ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < TOLERANCE

    in_virtual_time(scenario, spec)


def test_a_checkpoint_of_another_stage_is_not_loaded(tmp_path: Path) -> None:
    """Its peer serves another stage than before, as large, when all come back. Its id is the
    lowest, so that its parameters would hold."""
    spec = tiny_spec(tmp_path, num_stages=4, rounds=ROUNDS)
    folder = tmp_path / "state"
    folder.mkdir()
    stages = {"peer-0": 0, "peer-1": 1, "peer-2": 2, "peer-3": 3}

    async def scenario(swarm: Swarm) -> None:
        for name, stage in {**stages, "a-moved-one": 1}.items():
            start(swarm, folder, name, stage=stage)
        await swarm.until_round(EVERY + 1)
        await asyncio.sleep(0.1)
        kill_all(swarm)
        for name, stage in {**stages, "a-moved-one": 2}.items():
            start(swarm, folder, name, stage=stage)
        assert (await first_rounds(swarm, 5))[0] == EVERY
        await swarm.until_round(ROUNDS)
        trainer = replay(spec, counted(folder), ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < TOLERANCE

    in_virtual_time(scenario, spec)


class Altered(CheckpointStore):
    """What it loads is whole, and not what it offers."""

    def __init__(self, folder: Path, spec: RunSpec, change: Callable[[Snapshot], Snapshot]) -> None:
        super().__init__(folder, spec)
        self._change = change

    def load(self, round_index: int) -> Snapshot:
        return self._change(super().load(round_index))


def of_another_stage(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, stage=snapshot.stage + 1)


def with_moments_that_do_not_fit(snapshot: Snapshot) -> Snapshot:
    """Those of the last shard."""
    last = max(snapshot.optimizer)
    values, arrays = snapshot.optimizer[last]
    cut = tuple(Array(a.dtype, (1,), bytes(a.data)[:4]) for a in arrays)
    return replace(snapshot, optimizer={**snapshot.optimizer, last: (values, cut)})


@pytest.mark.parametrize("change", [of_another_stage, with_moments_that_do_not_fit])
def test_nothing_is_left_of_a_checkpoint_that_cannot_be_loaded(
    tmp_path: Path, change: Callable[[Snapshot], Snapshot]
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, tmp_path, "peer-0")
        await swarm.until_round(EVERY + 1)
        await asyncio.sleep(0.1)
        kill_all(swarm)
        peer = start(swarm, tmp_path, "peer-0", Altered(tmp_path / "peer-0", spec, change))
        await asyncio.sleep(2 * SETTLE_S)
        assert peer.gossip.own.state == JOINING
        assert peer.gossip.own.restorable == ()
        assert peer.replica is not None
        assert peer.replica.optimizer.owned() == []

    in_virtual_time(scenario, spec)


def test_a_peer_that_leaves_saves_where_it_is(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            start(swarm, tmp_path, f"peer-{i}")
        await swarm.until_round(EVERY + 2)
        member = swarm.members["peer-2"]
        member.peer.stop()
        await swarm.until(lambda: member.life.done(), limit_s=30)
        del swarm.members["peer-2"]
        newest = CheckpointStore(tmp_path / "peer-2", spec).available()[-1]
        assert newest.round >= EVERY + 2
        await swarm.until_round(ROUNDS)
        last = [s.round for s in CheckpointStore(tmp_path / "peer-0", spec).available()]
        assert last[-1] == ROUNDS, "the end of the run was not saved"

    in_virtual_time(scenario, spec)


def test_a_run_that_is_stopped_again_and_again_keeps_its_moments(tmp_path: Path) -> None:
    """In mode `delayed`, where a step is made on them most of a round before its parameters are in
    place; each time before another checkpoint is due."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync={"mode": "delayed"})
    folder = tmp_path / "state"
    folder.mkdir()

    async def scenario(swarm: Swarm) -> None:
        whole = 0
        for life in range(2):
            for i in range(4):
                start(swarm, folder, f"peer-{i}", stage=i % 2)
            assert (await first_rounds(swarm, 4))[0] == whole
            await swarm.until_round(2 * EVERY + life)
            await asyncio.sleep(0.1)
            assert set(swarm.rounds()) == {2 * EVERY + life}, "in the middle of a round"
            for member in swarm.members.values():
                member.peer.stop()
            await swarm.until(lambda: all(m.life.done() for m in swarm.members.values()))
            assert swarm.total("shard_reset") == 0
            swarm.members.clear()
            metas = [m for path in folder.glob("*/checkpoints/*") for m in read_metas(path)]
            assert life or all(m.steps for m in metas), "saved without moments"
            whole = newest_whole_round(folder, 2)
            assert whole == 2 * EVERY

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(
    ("mode", "codec", "kind"),
    [
        ("zero", "none", "adamw"),
        ("zero", "int8", "adamw"),
        ("zero", "int4", "adamw"),
        ("local", "topk", "adamw"),
        ("local", "topk-208", "adamw"),
        ("local", "none", "adamw"),
        ("zero", "int8", "muon"),
        ("zero", "bf16", "muon"),
        ("local", "int8", "muon"),
        ("local", "topk", "muon"),
        ("gossip", "none", "muon"),
        ("zero", "int8", "phi3"),
        ("local", "none", "qwen3_moe"),
        ("zero", "int8", "deepseek_v3"),
    ],
)
def test_a_run_that_was_killed_is_the_run_to_the_bit(
    tmp_path: Path, mode: str, codec: str, kind: str
) -> None:
    """What coding has lost of contributions, too, is in a checkpoint. A round is one microbatch, so
    that nothing is summed in another order. `kind`: of the optimizer, or of a model whose parts
    Muon steps."""
    sync: dict[str, Any] = {"mode": mode} | coded(codec)
    sync |= {"local_steps": 2} if mode != "zero" else {}
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync=sync, global_batch=4)
    if kind in ("adamw", "muon"):
        values = spec.model_dump()
        values["optimizer"]["kind"] = kind
        spec = RunSpec.model_validate(values)
    else:
        spec = stepped_by_parts(spec, kind)
    compare_with_a_killed_run(tmp_path, spec)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_that_was_killed_beside_an_exchange_lacks_that_update_alone(
    tmp_path: Path, kind: str
) -> None:
    """In mode `delayed`: by how much parameters are ahead is in a checkpoint. The gradient that is
    under way is not."""
    sync = {"mode": "delayed"}
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, sync=sync, global_batch=4)
    values = spec.model_dump()
    values["optimizer"]["kind"] = kind
    spec = RunSpec.model_validate(values)
    oracle = DelayedReference(spec)
    for r in range(ROUNDS):
        if r == 2 * EVERY:
            oracle.lose()
        oracle.step(r, [0])
    oracle.finish()

    async def scenario(swarm: Swarm) -> None:
        await kill_once(swarm, tmp_path)
        await swarm.until_round(ROUNDS)
        difference = relative_difference(swarm.parameters(), oracle.trainer.state_dict())
        assert difference < 1e-5

    in_virtual_time(scenario, spec)


async def kill_once(swarm: Swarm, folder: Path) -> None:
    """A replica of each of two stages, after the round that a checkpoint is of."""
    for i in range(2):
        start(swarm, folder, f"peer-{i}", stage=i)
    await swarm.until_round(2 * EVERY + 1)
    kill_all(swarm)
    for i in range(2):
        start(swarm, folder, f"peer-{i}", stage=i)
    assert (await first_rounds(swarm, 2))[0] == 2 * EVERY


def test_a_run_whose_batch_grows_goes_on_with_its_samples(tmp_path: Path) -> None:
    ramp = [[0, 4], [EVERY, 8]]  # a sum of two has one order only
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, global_batch=8, batch_ramp=ramp)
    compare_with_a_killed_run(tmp_path, spec)


def compare_with_a_killed_run(tmp_path: Path, spec: RunSpec) -> None:
    models = []

    async def scenario(swarm: Swarm, folder: Path, *, is_killed: bool) -> None:
        if is_killed:
            await kill_once(swarm, folder)
        else:
            for i in range(2):
                start(swarm, folder, f"peer-{i}", stage=i)
        await swarm.until_round(ROUNDS)
        models.append(swarm.parameters())

    for name, is_killed in (("whole", False), ("killed", True)):
        (tmp_path / name).mkdir()
        run = functools.partial(scenario, folder=tmp_path / name, is_killed=is_killed)
        in_virtual_time(run, spec)
    first, second = models
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_coding_had_lost_holds_only_in_a_run_that_goes_on_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    """One that lives has been sent some of it since."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, sync={"codec": "int8"})

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            start(swarm, tmp_path, f"peer-{i}")
        await swarm.until_round(EVERY + 1)
        peer = swarm.members["peer-1"].peer
        replica, exchanges, recovery = peer.replica, peer.exchanges, peer.recovery
        assert replica is not None
        assert exchanges is not None
        codec, history = replica.optimizer.codec, peer.gossip.own.history
        saved = CheckpointStore(tmp_path / "peer-1", spec).load(EVERY).errors
        assert sorted(saved) == list(range(replica.num_shards))
        for loaded, now, is_kept in (
            ((history, replica.digests), history + 1, True),
            ((history, replica.digests), history, False),
            ((history, b"others"), history + 1, False),
            (None, history, True),
        ):
            exchanges.work.load_errors(saved)
            recovery._loaded_errors = loaded  # noqa: SLF001  as after `_load`
            await recovery.settle_errors(replica, exchanges, now)
            assert bool(codec.errors()) is is_kept

    in_virtual_time(scenario, spec)
