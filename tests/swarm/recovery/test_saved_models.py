"""A model is fetched from checkpoints, whatever the pace of the run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from swarmnet.errors import UserError
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING, HeldOut, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.held_out import turn
from swarmnet.runtime.exporting.models import DiskParts, Wanted, fetch_trained
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery import checkpointing, model_fetch, saved_models
from swarmnet.swarm.recovery.model_fetch import fetch_model
from swarmnet.swarm.recovery.restart import Disk
from swarmnet.swarm.settings import WaitLimits
from swarmnet.training.checkpoint import CheckpointStore, Meta, load_parameters
from swarmnet.training.models.registry import stage_shard_sizes
from swarmnet.transport.memory import MemoryHub
from tests.swarm.harness import OpenSigner, Swarm, in_virtual_time, tiny_spec
from tests.swarm.tables import table_sizes

ROUNDS = 60


def observer(swarm: Swarm) -> Gossip:
    transport = swarm.hub.transport("observer")
    transport.set_run(swarm.spec.run_id)
    own = Record("observer", swarm.spec.run_id, 1, 0, state=OBSERVING)
    return Gossip(transport, View("observer"), OpenSigner(), own, random.Random(0), quiet=True)


def parts_of(folder: Path) -> list[Path]:
    """Shards that have come."""
    return list((folder / ".model.part").glob("*/[0-9]*"))


def started(swarm: Swarm, folder: Path) -> None:
    for i in range(4):
        store = CheckpointStore(folder / f"peer-{i}", swarm.spec, every=2)
        swarm.start(f"peer-{i}", disk=Disk(store, InlineWorker(), 2))


def test_a_round_stays_while_it_is_fetched_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on for many rounds while the parts come; the second try asks for the rest."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    parts = DiskParts(tmp_path / ".model.part", spec.run_id)
    asked: list[tuple[int, int]] = []
    real = saved_models.SavedModelFetch._shard  # noqa: SLF001  to slow it down

    async def slow(self: object, offer: object, k: int, j: int, at_once: object) -> object:
        asked.append((k, j))
        if len(asked) == 4:
            await asyncio.sleep(1000.0)
        return await real(self, offer, k, j, at_once)  # type: ignore[arg-type]

    monkeypatch.setattr(saved_models.SavedModelFetch, "_shard", slow)

    async def scenario(swarm: Swarm) -> None:
        started(swarm, tmp_path)
        await swarm.until_round(5)
        gossip = observer(swarm)
        await gossip.reconcile("peer-0")
        fetching = asyncio.ensure_future(
            fetch_trained(spec, gossip.transport, gossip, parts, InlineWorker())
        )
        await swarm.until_round(30)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        assert parts_of(tmp_path)
        trained = await fetch_trained(spec, gossip.transport, gossip, parts, InlineWorker())
        assert trained.round < 10
        for i in range(4):
            path = CheckpointStore(tmp_path / f"peer-{i}", spec).path(trained.round)
            saved = load_parameters(path, Meta.read(path))
            assert all(torch.equal(trained.named[name], saved[name]) for name in saved)

    in_virtual_time(scenario, spec)


def test_the_best_round_is_kept_and_chosen(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=20)
    folders = [tmp_path / f"peer-{i}" for i in range(4)]

    async def scenario(swarm: Swarm) -> None:
        started(swarm, tmp_path)
        await swarm.until_round(6)
        for path in folders:
            CheckpointStore(path, spec).note_held_out({0: 9.0, 4: 0.5, 10: 3.0})
        await swarm.until_round(20)
        for path in folders:
            assert 4 in [saved.round for saved in CheckpointStore(path, spec).available()]
        gossip = observer(swarm)
        await gossip.reconcile("peer-0")
        parts = DiskParts(tmp_path / ".best.part", spec.run_id)
        trained = await fetch_trained(
            spec, gossip.transport, gossip, parts, InlineWorker(), Wanted(best=True)
        )
        assert trained.round == 4
        with pytest.raises(UserError, match="no peer has round 7 saved"):
            await fetch_trained(
                spec, gossip.transport, gossip, parts, InlineWorker(), Wanted(round=7)
            )

    in_virtual_time(scenario, spec)


def test_every_measured_loss_is_on_the_disk(tmp_path: Path) -> None:
    """Also those of rounds between two checkpoints, whose records later ones have replaced."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=9, evaluate_every=2)

    async def scenario(swarm: Swarm) -> None:
        stores = [CheckpointStore(tmp_path / f"peer-{i}", spec) for i in range(2)]
        for i, store in enumerate(stores):
            swarm.start(f"peer-{i}", stage=i, disk=Disk(store, InlineWorker(), 7))
        await swarm.until(lambda: all(spec.optimizer.rounds in x.held_out() for x in stores))
        for store in stores:
            assert set(store.held_out()) == {0, 2, 4, 6, 8, 9}

    in_virtual_time(scenario, spec)


def test_a_run_of_many_rounds_notes_each_loss_once_and_remembers_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a record of long ago comes again, as after a cut."""
    monkeypatch.setattr(checkpointing, "MAX_NOTED", 8)
    written: list[int] = []
    store: Any = SimpleNamespace(note_held_out=lambda losses: written.extend(losses))
    replica: Any = SimpleNamespace(index=0, round=1000)
    exchanges: Any = None

    async def main() -> None:
        loop, view = asyncio.get_running_loop(), View("a")
        transport = MemoryHub().transport("a")
        gossip = Gossip(transport, view, OpenSigner(), Record("a", "r", 1, 0), random.Random(0))
        noting = checkpointing.Checkpointing(gossip, Disk(store, InlineWorker()), 1000, True)
        noting.restored(replica)
        said = Record("b", "r", 1, 0, state=ACTIVE, stage=0, has_data=True)
        for version, r in enumerate([*range(50), 0, 41, 49]):
            told = replace(said, version=version, round=r, held_out=HeldOut(r, 2.0, 3.0))
            view.merge(told, loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):  # it waits for the last one
                    await noting.opened(replica, exchanges)
        assert table_sizes(noting)["Checkpointing._noted"] == 8

    run_virtual(main())
    assert written == [*range(50)]


def test_a_loss_that_another_says_to_have_measured_is_not_noted(tmp_path: Path) -> None:
    """Nor does it stop those who do measure."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=9, evaluate_every=2)
    due = (0, 2, 4, 6, 8, 9)
    names = ["peer-0", "peer-1"]
    liar = next(
        name
        for name in map("liar-{}".format, itertools.count())
        if all(turn([*names, name], r) != name for r in due)
    )

    async def scenario(swarm: Swarm) -> None:
        stores = [CheckpointStore(tmp_path / name, spec) for name in names]
        for i, store in enumerate(stores):
            swarm.start(names[i], stage=i, disk=Disk(store, InlineWorker(), 7))
        version = itertools.count()

        def is_done() -> bool:
            for member in swarm.members.values():
                for r in due:
                    said = Record(
                        liar,
                        spec.run_id,
                        1,
                        next(version),
                        round=r,
                        has_data=True,
                        held_out=HeldOut(r, 0.01, 0.01),
                    )
                    member.peer.view.merge(said, asyncio.get_running_loop().time())
            return all(spec.optimizer.rounds in x.held_out() for x in stores)

        await swarm.until(is_done)
        for store in stores:
            assert set(store.held_out()) == set(due)
            assert min(store.held_out().values()) > 1.0

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(("round_index", "loss"), [(0, -0.5), (0, 1e16), (2**63, 0.5), (61, 0.5)])
def test_a_loss_that_cannot_be_spoils_no_answer(
    tmp_path: Path, round_index: int, loss: float
) -> None:
    """A record says it that is known here; a peer has such losses on its disk from earlier."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, evaluate_every=0)

    async def scenario(swarm: Swarm) -> None:
        stores = [CheckpointStore(tmp_path / f"peer-{i}", spec) for i in range(2)]
        stores[1].note_held_out({2: -0.5, 3: 1e16, 2**63: 0.5, 4: 0.25})
        for i, store in enumerate(stores):
            swarm.start(f"peer-{i}", stage=i, disk=Disk(store, InlineWorker(), 2))
        odd = Record(
            "odd", spec.run_id, 1, 0, has_data=True, held_out=HeldOut(round_index, loss, 0.0)
        )
        for member in swarm.members.values():
            member.peer.view.merge(odd, asyncio.get_running_loop().time())
        await swarm.until_round(6)
        gossip = observer(swarm)
        await gossip.reconcile("peer-0")
        parts = DiskParts(tmp_path / ".model.part", spec.run_id)
        trained = await fetch_trained(spec, gossip.transport, gossip, parts, InlineWorker())
        assert trained.round >= 2
        assert [store.held_out() for store in stores] == [{}, {4: 0.25}]

    in_virtual_time(scenario, spec)


def test_each_stage_of_a_live_model_is_that_of_one_replica(tmp_path: Path) -> None:
    """In mode `gossip` replicas differ."""
    spec = tiny_spec(
        tmp_path, num_stages=2, rounds=ROUNDS, sync={"mode": "gossip", "local_steps": 1}
    )
    sizes = [stage_shard_sizes(spec, k) for k in range(2)]

    async def scenario(swarm: Swarm) -> None:
        for i in range(6):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(4)
        gossip = observer(swarm)
        await gossip.reconcile("peer-0")
        _, shards = await fetch_model(
            gossip.transport, gossip, sizes, WaitLimits(), random.Random(0)
        )
        records = gossip.view.records()
        assert len({r.digests for r in records if r.stage >= 0}) > 2
        for of_stage in shards:
            assert len(of_stage) > 1
            digests = b"".join(xxhash.xxh3_64_digest(shard.data) for shard in of_stage)
            assert digests in {r.digests for r in records}

    in_virtual_time(scenario, spec)


class SlowReplies:
    """A shard takes seconds to the one that fetches it; everything else is quick."""

    def delivery_s(self, source: str, target: str, num_bytes: int, now: float) -> float | None:
        return 5.0 if target == "observer" and num_bytes > 8_000 else 0.0005


def test_where_the_run_is_faster_than_the_link_its_first_checkpoint_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=400, global_batch=4)
    monkeypatch.setattr(model_fetch, "MAX_TRIES", 3)

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            store = CheckpointStore(tmp_path / f"peer-{i}", spec, every=8)
            swarm.start(f"peer-{i}", stage=i, disk=Disk(store, InlineWorker(), 8), speed=0.1)
        await swarm.until_round(1)
        swarm.hub.network = SlowReplies()
        gossip = observer(swarm)
        gossiping = asyncio.ensure_future(gossip.run())
        try:
            await gossip.reconcile("peer-0")
            parts = DiskParts(tmp_path / ".model.part", spec.run_id)
            trained = await fetch_trained(spec, gossip.transport, gossip, parts, InlineWorker())
            assert trained.round >= 8
        finally:
            gossiping.cancel()
            await asyncio.gather(gossiping, return_exceptions=True)

    in_virtual_time(scenario, spec)
