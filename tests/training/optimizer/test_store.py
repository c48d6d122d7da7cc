"""Moments in memory-mapped files: the same numbers, and nothing left behind."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.errors import UserError
from swarmnet.training.data import open_data
from swarmnet.training.optimizer.local_steps import build_optimizer
from swarmnet.training.optimizer.store import DiskStore, MemoryStore, open_store
from swarmnet.training.stage import build_stage
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.training.flights import batch, fly, parameters, stages_of, update
from tests.training.specs import small_spec, write_text


def mapped(folder: Path) -> list[str]:
    """Memory maps of this process of files that lie (or lay) in the folder."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if str(folder) in line]


def test_on_disk_and_in_memory_train_to_the_same_bits(tmp_path: Path) -> None:
    spec = small_spec(write_text(tmp_path), pipeline={"num_stages": 2})
    data = open_data(spec)
    ends = []
    for store in (MemoryStore(), DiskStore(tmp_path / "optimizer")):
        stages = stages_of(spec)
        optimizers = [build_optimizer(spec, stage, store) for stage in stages]
        for stage, optimizer in zip(stages, optimizers, strict=True):
            for j in range(len(stage.shard_sizes)):
                optimizer.create(j)
        for r in range(5):
            num_tokens = fly(stages, (r, r), *batch(data, r)).num_tokens
            update(stages, optimizers, num_tokens, 1.0, r)
        moments = [o.export(j) for o in optimizers for j in o.owned()]
        ends.append(
            (
                [parameters(stage) for stage in stages],
                [(v, [bytes(a.data) for a in arrays]) for v, arrays in moments],
            )
        )
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
    assert ends[0][1] == ends[1][1]


def test_state_that_came_from_elsewhere_is_on_disk_too_and_goes_with_the_shard(
    tmp_path: Path,
) -> None:
    spec = small_spec(write_text(tmp_path))
    stage = build_stage(spec, 0)
    folder = tmp_path / "optimizer"
    donor = build_optimizer(spec, stage)
    donor.create(0)
    before = len(mapped(folder))
    optimizer = build_optimizer(spec, stage, DiskStore(folder))
    optimizer.load(0, *donor.export(0))
    assert len(mapped(folder)) == before + 2
    assert list(folder.iterdir()) == [], "a file that has a name outlives a killed process"
    optimizer.drop(0)
    assert len(mapped(folder)) == before


def test_a_swarm_on_disk_makes_the_updates_of_one_in_memory(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4)
    found = []
    for kind in ("memory", "disk"):

        async def scenario(swarm: Swarm, kind: str = kind) -> None:
            def build(stage_index: int) -> tuple[Any, Any]:
                stage = build_stage(spec, stage_index)
                store = open_store(kind, tmp_path / "optimizer")
                return stage, build_optimizer(spec, stage, store)

            swarm.start("a", stage=0, build=build)
            swarm.start("b", stage=1, build=build)
            await swarm.until_round(4)
            found.append(swarm.parameters())

        in_virtual_time(scenario, spec)
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])


def test_a_folder_that_cannot_be_written_to_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot keep .* in .*--optimizer-memory") as e:
        DiskStore(tmp_path / "file" / "optimizer")
    assert "\n" not in str(e.value)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_ends_the_peer_with_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to own shards in the middle of the run, and there is no room for them."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=30)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None, raising=False)
    store = DiskStore(tmp_path / "optimizer")
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)

    async def scenario(swarm: Swarm) -> None:
        def build(stage_index: int) -> tuple[Any, Any]:
            stage = build_stage(spec, stage_index)
            return stage, build_optimizer(spec, stage, store)

        swarm.start("roomy")
        await swarm.until_round(2)
        swarm.start("full", build=build)
        life = swarm.members.pop("full").life
        await swarm.until(life.done)
        with pytest.raises(UserError, match="No space left on device"):
            life.result()
        await swarm.until_round(30)
        assert list((tmp_path / "optimizer").iterdir()) == []

    in_virtual_time(scenario, spec)


def test_a_folder_that_is_removed_is_made_anew(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "optimizer")
    shutil.rmtree(tmp_path / "optimizer")
    assert torch.equal(store.zeros(3), torch.zeros(3))
