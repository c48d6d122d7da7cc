"""Records that are too many, or too long, for one message."""

from __future__ import annotations

import asyncio

from swarmnet.methods.ranges import MAX_RECORDS
from swarmnet.methods.records import GOSSIP, RECORDS, GossipRequest, Records, SignedRecord
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING, Record
from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.anti_entropy import SENT_BYTES
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import MAX_BODY_BYTES, Message, convert, pack
from tests.swarm.membership.parts import Site, record

LARGE_BYTES = 48_900


def signed(of: Record) -> SignedRecord:
    return SignedRecord(pack(of), b"")


def large(n: int) -> SignedRecord:
    said = {f"{i}": n for i in range(10)}
    return signed(
        record(f"a-liar-{n}", 1, state=OBSERVING, digests=bytes(LARGE_BYTES // 8 * 8), totals=said)
    )


async def peers(hub: MemoryHub, num_large: int) -> tuple[Site, list[str]]:
    """A peer of a swarm of four that has heard of liars, and the names of the other three."""
    site, others = Site(hub, "peer"), ["x", "y", "z"]
    for name in others:
        await hub.transport(name).dial("/memory/p2p/peer")
        site.records.take(signed(record(name, 1, state=ACTIVE, stage=0)))
    for n in range(num_large):
        site.records.take(large(n))
    return site, others


def test_a_newcomer_hears_of_the_members_first_and_of_all_in_the_end() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        site, others = await peers(hub, 90)
        new = Site(hub, "new")
        assert await new.exchange.reconcile("peer")
        assert all(new.view.get(name) is not None for name in ("peer", *others))
        assert len(new.view) < 90
        for _ in range(2):
            assert await new.exchange.reconcile("peer")
        assert len(new.view) == len(site.view)

    run(scenario())


def test_what_a_partner_wants_is_sent_in_parts_too() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        site, _ = await peers(hub, 90)
        new = Site(hub, "new")
        for exchanges in (1, 2):
            assert await site.exchange.reconcile("new")
            await asyncio.sleep(1.0)
            assert site.sent(RECORDS.name) <= exchanges * MAX_BODY_BYTES
            assert (len(new.view) >= 90) == (exchanges == 2)

    run(scenario())


def test_the_longest_reply_can_travel() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        site = Site(hub, "peer")
        for n in range(MAX_RECORDS + 100):
            site.records.take(signed(record(f"{n:0>200}", 1)))
        caller = hub.transport("caller")
        caller.set_run(site.transport.run_id)
        stamps = {f"{n:x>200}": (1, 1) for n in range(MAX_RECORDS)}
        reply = await caller.call(
            "peer", GOSSIP.name, Message(GossipRequest(stamps)), timeout_s=5.0
        )
        body = convert(reply.body, Records)
        assert len(pack(body)) < MAX_BODY_BYTES
        assert 0 < len(body.records) <= MAX_RECORDS
        assert sum(len(e.payload) for e in body.records) <= SENT_BYTES
        assert body.wanted

    run(scenario())
