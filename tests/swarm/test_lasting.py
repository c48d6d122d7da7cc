"""What a peer keeps that stays while others come and go: no table grows with the number of those
that have been there, whatever it is for. A new table is looked at here without being named."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.methods.records import RECORDS, Records, SignedRecord
from swarmnet.protocol.membership.peer_ids import seat_id
from swarmnet.protocol.membership.reconnect import MAX_ROWS
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEFT, OBSERVER_STAGE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.calls import call
from swarmnet.swarm.membership import records
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.libp2p.known_peers import KnownPeers
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message, pack
from tests.swarm.harness import OpenSigner, Swarm, in_virtual_time, tiny_spec
from tests.swarm.tables import table_sizes
from tests.transport.loopback import LoopbackCarrier, LoopbackHub
from tests.transport.streams import identity

FORGET_S = 20.0
LOOKED_FOR_S = 20 * LOOK_LESS_S
ROOM = 100
"""Entries by which a table may be larger: a few rounds, members that are looked for."""


def larger(before: Counter[str], after: Counter[str], by: int = ROOM) -> dict[str, tuple[int, int]]:
    """Tables with more entries than before; the sizes of both times."""
    return {n: (before[n], after[n]) for n in after if after[n] > before[n] + by}


async def visit(swarm: Swarm, number: int, lasting: Peer) -> None:
    """One more identity shows a lasting peer its record, and is gone: every second one says so.
    Before that it has fetched the parameters, and done work that an audit has found right."""
    host = lasting.transport.peer_id
    name = f"made-{number}"
    transport = swarm.hub.transport(name)
    transport.set_run(swarm.spec.run_id)
    leaves = number % 2 == 1
    record = Record(
        name,
        swarm.spec.run_id,
        1000 + number,
        0,
        state=LEFT if leaves else JOINING,
        stage=OBSERVER_STAGE if leaves else 0,
        addresses=(f"/ip4/10.0.0.1/tcp/{1 + number}/p2p/{name}",),
        totals={f"made-{number}": 1, "sent_bytes": number},
    )
    shown = [record]
    if leaves:
        own = lasting.gossip.own
        there = {"stage": 0, "round": own.round, "digests": own.digests}
        shown = [replace(record, state=JOINING, **there), replace(record, version=1)]
    for each in shown:
        message = Message(Records(records=(SignedRecord(pack(each), b""),)))
        await call(transport, host, RECORDS, message, timeout_s=5.0)
        if each.digests:
            assert lasting.view.agreement.shares(name)
            lasting.dispatcher.conclusions.computed(name, is_same=True)
    await asyncio.sleep(0.05)
    swarm.hub.kill(name)


@pytest.mark.parametrize("identities", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_table_of_a_peer_grows_with_those_that_have_been_there(
    identities: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FORGET_AFTER_S", FORGET_S)

    async def scenario(swarm: Swarm) -> None:
        lasting = swarm.start("a", speed=0.01)
        swarm.start("b", speed=0.01)
        await swarm.until_round(1)
        before = Counter[str]()
        for _ in range(100):  # a round and its exchange: of some tables there is more in the midst
            before |= table_sizes(lasting, (swarm.hub,))
            await asyncio.sleep(0.15)
        for number in range(identities):
            await visit(swarm, number, lasting)
        assert len(lasting.view) > 2, "nobody was seen"
        await asyncio.sleep(3 * FORGET_S)  # what is forgotten is remembered as such for a while
        await visit(swarm, identities, lasting)  # which is when full buckets are dropped
        await asyncio.sleep(3 * FORGET_S)
        assert len(lasting.view) == 2
        assert larger(before, table_sizes(lasting, (swarm.hub,))) == {}

    in_virtual_time(
        scenario, tiny_spec(tmp_path, num_stages=1, rounds=1_000_000), is_synthetic=True
    )


class Carrier(LoopbackCarrier):
    """Keeps addresses as the one over the daemon does, and dials nobody."""

    def __init__(self, hub: LoopbackHub, peer_id: str) -> None:
        super().__init__(hub, peer_id)
        self.known = KnownPeers()

    def learn(self, peer_id: str, addresses: list[str]) -> None:  # type: ignore[override]
        self.known.learn(peer_id, addresses)

    def forget(self, peer_id: str) -> None:
        self.known.forget(peer_id)


def test_no_table_of_a_transport_grows_with_those_that_have_been_there() -> None:
    """Some are only heard of, some call, and some are dialled."""

    async def main() -> None:
        hub = LoopbackHub()
        own = identity(1)
        carrier = Carrier(hub, own.peer_id)
        lasting = ChannelTransport(carrier, identity=own)
        await lasting.start()
        gone: asyncio.Queue[str] = asyncio.Queue()
        lasting.on_disconnected(gone.put_nowait)
        before = table_sizes(lasting, (hub,))
        try:
            for number in range(2, 400):
                other = identity(number)
                name = other.peer_id
                relay = f"/ip4/192.0.2.9/tcp/1/p2p/{own.peer_id}x/p2p-circuit/p2p/{name}"
                own_host = f"11.0.{number // 256}.{number % 256}"
                lasting.learn(name, [f"/ip4/{own_host}/tcp/4001/p2p/{name}", relay])
                if number % 4 == 0:
                    visitor = ChannelTransport(LoopbackCarrier(hub, name), identity=other)
                    await visitor.start()
                    side = visitor.dialer if number % 8 else lasting.dialer
                    await side.channel(own.peer_id if number % 8 else name)
                    lasting.forget(name)
                    assert carrier.known.addresses(name) or number % 8, "it is connected"
                    await visitor.close()
                    assert await gone.get() == name
                lasting.forget(name)
            await asyncio.sleep(0.05)
            after = table_sizes(lasting, (hub,))
            del after["RateLimiter._buckets"]  # until they are full, which takes a minute
            assert larger(before, after, by=8) == {}
        finally:
            await lasting.close()

    asyncio.run(main())


class Book:
    """A transport, with the addresses that it was told."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.known: dict[str, tuple[str, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        self.known[peer_id] = tuple(addresses)

    def forget(self, peer_id: str) -> None:
        self.known.pop(peer_id, None)


def remembered_from(first: int) -> dict[str, Sequence[str]]:
    """As many members as are looked for."""
    names = [f"m{i}" for i in range(first, first + MAX_ROWS)]
    return {name: (f"/ip4/10.0.0.1/tcp/4001/p2p/{name}",) for name in names}


def test_where_a_member_was_is_forgotten_when_nobody_looks_for_it() -> None:
    """Its addresses are learned with each try. A peer that lasts has looked for thousands."""
    generations = [remembered_from(MAX_ROWS * i) for i in range(4)]

    async def main() -> None:
        book: Any = Book(MemoryHub().transport("a"))
        book.set_run("r")
        own = Record("a", "r", 1, 0, state=ACTIVE)
        gossip = Gossip(book, View("a"), OpenSigner(), own, random.Random(0))
        now: list[dict[str, Sequence[str]]] = [{}]
        looking = Reconnecting(gossip, random.Random(1), lambda: now[0])
        life = asyncio.ensure_future(looking.run())
        for generation in generations:
            now[0] = generation
            await asyncio.sleep(LOOKED_FOR_S)
            assert book.known.keys() <= generation.keys()
            assert len(book.known) > MAX_ROWS // 2, "they were looked for"
        kept = next(iter(generations[-1]))
        record = Record(seat_id(kept, 1), "r", 1, 0, state=ACTIVE)
        gossip.view.merge(record, asyncio.get_running_loop().time())
        now[0] = {}
        await asyncio.sleep(LOOKED_FOR_S)
        assert list(book.known) == [kept], "there is a record of one of its seats"
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)

    run_virtual(main())
