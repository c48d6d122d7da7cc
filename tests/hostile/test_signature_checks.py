"""Signatures are checked beside the event loop, and who sends a false one is banned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from swarmnet.errors import Busy
from swarmnet.methods.records import RECORDS, Records, SignedRecord
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.membership.intake import (
    AT_ONCE_BURST,
    AT_ONCE_PER_S,
    SENDER_BYTES,
    STRANGERS_BURST,
    STRANGERS_PER_S,
)
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.simulation.clock import run
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message, pack
from tests.swarm.harness import OpenSigner
from tests.swarm.membership.parts import Site, record

T = TypeVar("T")
CHECK_S = 1e-4


class Slow(OpenSigner):
    """Checks of which beside the loop take virtual time; counts those on the loop."""

    def __init__(self) -> None:
        self.on_loop = 0
        self.beside_loop = 0
        self._is_beside = False

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        if self._is_beside:
            self.beside_loop += 1
        else:
            self.on_loop += 1
        return signature == b"right"

    async def beside(self, work: Callable[[], T]) -> T:
        before = self.beside_loop
        self._is_beside = True
        found = work()
        self._is_beside = False
        await asyncio.sleep(CHECK_S * (self.beside_loop - before))
        return found


def signed(of: Record, signature: bytes = b"right") -> SignedRecord:
    return SignedRecord(pack(of), signature)


def serving(name: str, version: int = 1) -> Record:
    return record(name, version, state=ACTIVE, stage=0)


async def member(site: Site, hub: MemoryHub, name: str) -> None:
    """A peer that serves, and has a channel to this one."""
    await hub.transport(name).dial(f"/memory/p2p/{site.transport.peer_id}")
    assert await site.records.take_all(name, [signed(serving(name))])


def names(num: int) -> list[str]:
    return [f"fresh-{i}" for i in range(num)]


def test_only_little_of_members_is_checked_on_the_loop() -> None:
    async def scenario() -> None:
        hub, signer = MemoryHub(), Slow()
        site = Site(hub, "a", signer=signer)
        await member(site, hub, "b")
        assert signer.on_loop == 0, "of a newcomer"
        for version in range(2, 1002):
            assert await site.records.take_all("b", [signed(serving("b", version))])
        most = AT_ONCE_BURST + AT_ONCE_PER_S * asyncio.get_running_loop().time()
        assert 0 < signer.on_loop <= most + 1
        assert signer.on_loop + signer.beside_loop == 1001
        before = signer.on_loop
        assert await site.records.take_all("b", [signed(record(n)) for n in names(100)])
        assert signer.on_loop == before
        assert len(site.view) == 101

    run(scenario())


def test_who_brings_a_false_signature_is_banned_and_the_rest_is_not_looked_at() -> None:
    async def scenario() -> None:
        hub, signer = MemoryHub(), Slow()
        site, liar = Site(hub, "a", signer=signer), hub.transport("liar")
        liar.set_run(site.transport.run_id)
        flood = tuple(signed(serving(n), b"false") for n in names(1000))
        liar.notify("a", RECORDS.name, Message(Records(records=flood)))
        await asyncio.sleep(0.5)
        assert site.transport.has_banned("liar")
        assert signer.on_loop + signer.beside_loop == 1
        liar.notify("a", RECORDS.name, Message(Records(records=flood)))
        await asyncio.sleep(0.5 * FIRST_PAUSE_S)
        assert signer.on_loop + signer.beside_loop <= 2
        assert len(site.view) == 0

    run(scenario())


@pytest.mark.parametrize("is_member", [True, False])
def test_so_is_who_passes_one_on(is_member: bool) -> None:
    async def scenario() -> None:
        hub, signer = MemoryHub(), Slow()
        site = Site(hub, "a", signer=signer)
        await member(site, hub, "b")
        if is_member:
            await member(site, hub, "liar")
        right, false = signed(serving("c")), signed(serving("b", 9), b"false")
        await site.records.take_all("liar", [right, false])
        await asyncio.sleep(0.1)
        assert site.transport.has_banned("liar")
        assert not site.transport.has_banned("b"), "of whom the record is"
        assert site.view.get("c") is not None, "what was right is taken"

    run(scenario())


def test_a_member_and_a_newcomer_do_not_wait_for_a_flood_of_strangers() -> None:
    async def scenario() -> None:
        hub, loop = MemoryHub(), asyncio.get_running_loop()
        site = Site(hub, "a", signer=Slow())
        await member(site, hub, "b")
        for i in range(20):
            flood = [signed(record(f"{n}-{i}")) for n in names(1000)]
            await site.records.take_all(f"flood-{i}", flood)
        await asyncio.sleep(1.0)
        began = loop.time()
        assert await site.records.take_all("b", [signed(serving("b", 2))])
        assert loop.time() - began < 0.01
        assert await site.records.take_all("new", [signed(serving("new"))])
        assert loop.time() - began < 0.2
        known, since = len(site.view), loop.time()
        await asyncio.sleep(2.0)
        assert len(site.view) - known <= STRANGERS_PER_S * (loop.time() - since) + 64
        assert len(site.view) <= STRANGERS_BURST + STRANGERS_PER_S * loop.time() + 64
        await site.tasks.close()

    run(scenario())


def test_what_has_no_room_is_not_confirmed() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a", signer=Slow())
        large = [signed(record(n, digests=bytes(500_000))) for n in names(20)]
        assert sum(len(e.payload) for e in large) > SENDER_BYTES
        with pytest.raises(Busy):
            await site.records.take_all("b", large, is_asked=True)
        assert await site.records.take_all("b", large[:1], is_asked=True)

    run(scenario())


def test_what_comes_twice_is_checked_once() -> None:
    async def scenario() -> None:
        signer = Slow()
        site = Site(MemoryHub(), "a", signer=signer)
        same = signed(serving("c"))
        await site.records.take_all("b", [same] * 100, is_asked=True)
        await asyncio.gather(
            *(site.records.take_all(n, [signed(serving("d"))], is_asked=True) for n in names(50))
        )
        assert signer.beside_loop == 2

    run(scenario())
