"""What is saved is fetched from holders that fall silent, forget or mislead, in virtual time. The
holders have no model and no run: a clock saves a round of numbers every second, and drops those
that nobody keeps."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash

from swarmnet.errors import Busy, UserError
from swarmnet.ports import Saved, Snapshot
from swarmnet.protocol.membership.records import ACTIVE, LEFT, OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.saved_rounds import MAX_KEPT, OVERDUE_S, Key
from swarmnet.runtime.exporting.models import DiskParts
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery.saved_models import SavedModelFetch, SavedModels, told
from swarmnet.transport.base import Request
from swarmnet.transport.memory import LOCAL_DELAY_S, MemoryHub
from swarmnet.wire import Array, Message
from tests.swarm.harness import OpenSigner

RUN, SHARDS, SIZE = "run", 6, 1000
KEPT = 2


def numbers(round_index: int, stage: int, shard: int) -> Array:
    values = np.full(SIZE, round_index + stage / 10 + shard / 100, dtype=np.float32)
    return Array("float32", (SIZE,), values.tobytes())


@dataclass
class Rounds:
    """Checkpoints of one stage; the newest ones stay, and those that are kept."""

    stage: int
    rounds: list[int] = field(default_factory=list)
    spoiled: set[int] = field(default_factory=set)
    """Rounds of which the disk gives other numbers than it says."""
    wanted: frozenset[int] = frozenset()

    def add(self, round_index: int) -> None:
        stay = [r for r in self.rounds if r in self.wanted]
        self.rounds = sorted({*stay, *self.rounds[1 - KEPT :], round_index})

    def available(self) -> Sequence[Saved]:
        return [Saved(r, 1, self.stage, SHARDS, ()) for r in self.rounds]

    def keep(self, rounds: Collection[int]) -> None:
        self.wanted = frozenset(rounds)

    def digests(self, round_index: int) -> bytes:
        shards = [numbers(round_index, self.stage, j) for j in range(SHARDS)]
        return b"".join(xxhash.xxh3_64_digest(shard.data) for shard in shards)

    def shard(self, round_index: int, stage_index: int, shard_index: int) -> Array | None:
        if round_index not in self.rounds:
            return None
        told = -1 if round_index in self.spoiled else round_index
        return numbers(told, self.stage, shard_index)

    def held_out(self) -> Mapping[int, float]:
        return {}

    def save(self, snapshot: Snapshot) -> None:
        raise NotImplementedError

    def load(self, round_index: int) -> Snapshot:
        raise NotImplementedError

    def note_held_out(self, losses: Mapping[int, float]) -> None:
        raise NotImplementedError


class SlowReplies:
    """A shard takes seconds; everything else is quick."""

    def __init__(self) -> None:
        self.shard_s = 0.0

    def delivery_s(self, source: str, target: str, num_bytes: int, now: float) -> float | None:
        return self.shard_s if num_bytes > 3 * SIZE else LOCAL_DELAY_S


class Run:
    """Holders of two stages, one each, and whoever fetches."""

    def __init__(self, folder: Path) -> None:
        self.network = SlowReplies()
        self.hub = MemoryHub(network=self.network)
        self.folder = folder
        self.stores = [Rounds(k) for k in range(2)]
        self.holders = [self._gossip(f"holder-{k}", ACTIVE, k) for k in range(2)]
        self.saved = [
            SavedModels(g.transport, g, store, InlineWorker())
            for g, store in zip(self.holders, self.stores, strict=True)
        ]
        self._tasks = [asyncio.ensure_future(g.run()) for g in self.holders]
        self._tasks.append(asyncio.ensure_future(self._save()))
        self._num_fetches = 0

    def _gossip(self, name: str, state: str, stage: int) -> Gossip:
        transport = self.hub.transport(name)
        transport.set_run(RUN)
        record = Record(name, RUN, 1, 0, state=state, stage=stage)
        is_quiet = state == OBSERVING
        rng = random.Random(name)
        return Gossip(transport, View(name), OpenSigner(), record, rng, quiet=is_quiet)

    async def _save(self) -> None:
        """Holders do not save at the same instant."""
        await self.holders[0].reconcile("holder-1")
        for round_index in range(1000):
            for store, saved in zip(self.stores, self.saved, strict=True):
                store.keep(saved.kept.at(asyncio.get_running_loop().time()))
                store.add(round_index)
                await asyncio.sleep(0.5)

    async def fetch(self, out: str = ".out.part", wanted: int | None = None) -> int:
        """The round whose numbers came, all of them right."""
        self._num_fetches += 1
        gossip = self._gossip(f"observer-{self._num_fetches}", OBSERVING, -1)
        gossiping = asyncio.ensure_future(gossip.run())
        parts = DiskParts(self.folder / out, RUN)
        sizes = [[SIZE] * SHARDS] * 2
        fetch = SavedModelFetch(gossip.transport, gossip, sizes, parts, InlineWorker())

        def choose(keys: Sequence[Key], losses: Mapping[int, float]) -> Key | None:
            fitting = [key for key in keys if wanted in (None, key[1])]
            return next(iter(fitting), None)

        try:
            await gossip.reconcile("holder-0")
            found = await fetch.fetch(choose)
            assert found is not None
            (_, round_index), shards, _ = found
            for k, of_stage in enumerate(shards):
                for j, shard in enumerate(of_stage):
                    assert bytes(shard.data) == numbers(round_index, k, j).data
            return round_index
        finally:
            gossiping.cancel()
            await asyncio.gather(gossiping, return_exceptions=True)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def in_run(folder: Path, scenario: Callable[[Run], Awaitable[None]]) -> None:
    async def main() -> None:
        run = Run(folder)
        await asyncio.sleep(10.0)
        try:
            await scenario(run)
        finally:
            await run.close()

    run_virtual(main())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines for the person who fetches."""
    return [r.message for r in caplog.records if r.name == told.name]


def rounds_of_parts(folder: Path) -> set[str]:
    """Of the shards that have come."""
    return {path.parent.name for path in folder.glob(".out.part/*/[0-9]*")}


@pytest.mark.parametrize("stall_s", [3.0, 34.0, 100.0])
def test_one_that_is_silent_at_first_is_asked_again(
    tmp_path: Path, stall_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(run: Run) -> None:
        run.hub.freeze("holder-1")
        fetching = asyncio.ensure_future(run.fetch())
        await asyncio.sleep(stall_s)
        assert not fetching.done()
        run.hub.thaw("holder-1")
        async with asyncio.timeout(45.0):
            await fetching
        assert len(said(caplog)) <= 1 + stall_s / 30.0

    in_run(tmp_path, scenario)


def test_one_that_was_silent_before_the_fetch_is_waited_for(tmp_path: Path) -> None:
    """The run has given it up by then, and knows of it still."""

    async def scenario(run: Run) -> None:
        run.hub.freeze("holder-1")
        await asyncio.sleep(60.0)
        fetching = asyncio.ensure_future(run.fetch())
        await asyncio.sleep(20.0)
        run.hub.thaw("holder-1")
        async with asyncio.timeout(45.0):
            await fetching

    in_run(tmp_path, scenario)


@pytest.mark.parametrize("how", ["freeze", "partition"])
def test_one_out_of_reach_in_between_costs_no_part(tmp_path: Path, how: str) -> None:
    """The run has many other rounds by then; the one that has begun to come is gone on with."""

    async def scenario(run: Run) -> None:
        run.network.shard_s = 5.0
        fetching = asyncio.ensure_future(run.fetch())
        await asyncio.sleep(8.0)
        begun = rounds_of_parts(tmp_path)
        assert len(begun) == 1
        if how == "freeze":
            run.hub.freeze("holder-1")
        else:
            run.hub.partition("observer-1", "holder-1")
        await asyncio.sleep(70.0)
        run.hub.thaw("holder-1")
        run.hub.heal("observer-1", "holder-1")
        async with asyncio.timeout(60.0):
            round_index = await fetching
        assert begun == {f"run-1-{round_index}"}

    in_run(tmp_path, scenario)


def test_a_fetch_is_resumed_though_a_holder_is_silent_then(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        run.network.shard_s = 5.0
        fetching = asyncio.ensure_future(run.fetch())
        await asyncio.sleep(8.0)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        begun = rounds_of_parts(tmp_path)
        run.hub.freeze("holder-1")
        fetching = asyncio.ensure_future(run.fetch())
        await asyncio.sleep(20.0)
        run.hub.thaw("holder-1")
        async with asyncio.timeout(60.0):
            assert begun == {f"run-1-{await fetching}"}

    in_run(tmp_path, scenario)


def test_fetches_that_have_ended_take_no_place_from_others(tmp_path: Path) -> None:
    """Each fetches another round, more of them than peers keep; the last ones are slow."""

    async def scenario(run: Run) -> None:
        rounds = set()
        for i in range(MAX_KEPT):
            rounds.add(await run.fetch(f".{i}.part"))
            await asyncio.sleep(2.5)
        assert len(rounds) == MAX_KEPT
        run.network.shard_s = 5.0
        async with asyncio.timeout(60.0):
            assert await run.fetch() in rounds  # no place is free: one that is kept already
        await asyncio.sleep(OVERDUE_S)
        async with asyncio.timeout(40.0):
            assert await run.fetch(".last.part") > max(rounds)

    in_run(tmp_path, scenario)


def test_a_word_to_keep_a_round_that_is_lost_is_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first ones, of a fetch that takes many times what rounds stay by themselves."""

    async def scenario(run: Run) -> None:
        run.network.shard_s = 3.0
        real, heard = SavedModels._on_saved, []  # noqa: SLF001  to lose a word

        async def deaf(self: SavedModels, request: Request) -> Message:
            heard.append(request.message.body)
            if len(heard) in (3, 4):
                raise Busy("at work")
            return await real(self, request)

        for saved, holder in zip(run.saved, run.holders, strict=True):
            holder.transport.handle("saved", functools.partial(deaf, saved))
        async with asyncio.timeout(60.0):
            await run.fetch()
        assert len(heard) > 4
        assert said(caplog) == []

    in_run(tmp_path, scenario)


def test_a_holder_whose_disk_is_spoiled_is_given_up(tmp_path: Path) -> None:
    """What it says of that round is right, and what it gives is not: another round is taken, and
    the fetch ends."""

    async def scenario(run: Run) -> None:
        bad = run.stores[0].rounds[-1]
        run.stores[1].spoiled.add(bad)
        async with asyncio.timeout(30.0):
            assert await run.fetch() != bad

    in_run(tmp_path, scenario)


def test_a_run_that_ends_is_told(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        run.hub.freeze("holder-1")
        fetching = asyncio.ensure_future(run.fetch())
        await asyncio.sleep(5.0)
        run.hub.thaw("holder-1")
        for holder in run.holders:
            holder.transport.handle("saved", _never)
        for holder in run.holders:
            holder.update(state=LEFT, urgent=True)
        with pytest.raises(UserError, match="the run has ended"):
            await asyncio.wait_for(fetching, 60.0)

    in_run(tmp_path, scenario)


def test_peers_that_rest_give_what_they_have_saved(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        for holder in run.holders:
            holder.update(state=OBSERVING, paused="the machine runs on battery", urgent=True)
        await asyncio.sleep(5.0)
        async with asyncio.timeout(60.0):
            assert await run.fetch() in run.stores[0].rounds

    in_run(tmp_path, scenario)


async def _never(request: Request) -> Message:
    await asyncio.sleep(1e6)
    return Message(None)
