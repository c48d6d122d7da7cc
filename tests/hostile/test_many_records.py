"""Valid records of many identities, of which nobody needs any."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from swarmnet.methods.records import SignedRecord
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.stranger_room import ROOM_BYTES, SENDER_BYTES
from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.records import KnownRecords
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import pack
from tests.swarm.membership.parts import Site, record

LARGE_BYTES = 96_000


def signed(of: Record) -> SignedRecord:
    return SignedRecord(pack(of), b"")


def serving(name: str, version: int = 1) -> SignedRecord:
    return signed(record(name, version, state=ACTIVE, stage=0))


async def flood(records: KnownRecords, num: int, num_senders: int, size: int) -> None:
    """Records that say that they serve."""
    for n in range(num):
        lie = record(f"liar-{n}", 1, state=ACTIVE, stage=0, digests=bytes(size))
        await records.take_all(f"flood-{n % num_senders}", [signed(lie)], is_asked=True)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("num_senders", "most"), [(1, SENDER_BYTES), (100, ROOM_BYTES)])
def test_what_is_kept_of_a_flood_is_bounded(num_senders: int, most: int) -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        gc.collect()
        tracemalloc.start()
        await flood(site.records, 800, num_senders, LARGE_BYTES)
        site.records.forget_old()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0.5 * most < kept < 1.1 * most
        assert len(site.records.envelopes(f"liar-{n}" for n in range(800))) == len(site.view)

    run(scenario())


def test_members_and_newcomers_stay_known_in_a_flood() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        site = Site(hub, "a")
        for name in ("b", "c"):
            await hub.transport(name).dial("/memory/p2p/a")
            await site.records.take_all(name, [serving(name)])
        await flood(site.records, 800, 100, LARGE_BYTES)
        await hub.transport("new").dial("/memory/p2p/a")
        assert await site.records.take_all("new", [signed(record("new"))])
        await flood(site.records, 400, 100, LARGE_BYTES)
        assert all(site.view.get(name) is not None for name in ("b", "c", "new"))

    run(scenario())


def test_who_leaves_is_counted_as_a_stranger_again() -> None:
    """Otherwise identities that come with a channel, one after the other, would take memory without
    end."""

    async def scenario() -> None:
        hub = MemoryHub()
        site = Site(hub, "a")
        names = [f"liar-{n}" for n in range(800)]
        for name in names:
            transport = hub.transport(name)
            await transport.dial("/memory/p2p/a")
            lie = record(name, 1, state=ACTIVE, stage=0, digests=bytes(LARGE_BYTES))
            await site.records.take_all(name, [signed(lie)])
            hub.kill(name)
            await asyncio.sleep(0.01)
            site.records.forget_old()
        left = site.records.envelopes(names)
        assert sum(len(e.payload) for e in left) < ROOM_BYTES / 2
        await site.tasks.close()

    run(scenario())
