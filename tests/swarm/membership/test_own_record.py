"""The own record: when it changes, when it is published, and what a declared join shows."""

from __future__ import annotations

import asyncio

from swarmnet.methods.records import SignedRecord
from swarmnet.protocol.membership.pace import PUSH_FANOUT
from swarmnet.protocol.membership.records import JOINING, LEAVING, NO_STAMP, Record
from swarmnet.simulation.clock import run
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import unpack
from tests.protocol.making import counted
from tests.swarm.membership.parts import Site, now, record


def published(envelope: SignedRecord) -> Record:
    return unpack(envelope.payload, Record)


def test_the_own_view_sees_a_change_at_once_and_others_with_the_next_seal() -> None:
    async def scenario() -> None:
        own = Site(MemoryHub(), "a").own
        first = own.seal()
        assert own.seal() is first, "nothing has changed"
        own.change(stage=2)
        assert published(first).stage == -1
        assert own.sealed is first
        second = published(own.seal())
        assert second.stage == 2
        assert second.stamp == own.published > published(first).stamp

    run(scenario())


def test_a_change_wakes_the_tasks_that_wait_for_news() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        waiting = asyncio.ensure_future(site.news.changed.wait(5.0))
        await asyncio.sleep(0)
        site.own.change_count(counted(3, launched=4))
        assert await waiting
        known = site.view.get("a")
        assert known is not None
        assert len(known.count(3).launched) == 4

    run(scenario())


def test_an_amendment_has_no_version_of_its_own() -> None:
    async def scenario() -> None:
        own = Site(MemoryHub(), "a").own
        first = own.seal()
        own.amend(upload_bytes_per_s=7.0)
        assert own.seal() is first
        own.add_total("moved", 2)
        assert published(own.seal()).totals["moved"] == 2

    run(scenario())


def test_only_a_new_state_counts_as_its_beginning() -> None:
    async def scenario() -> None:
        own = Site(MemoryHub(), "a").own
        await asyncio.sleep(3.0)
        own.change(state=LEAVING)
        began = now()
        await asyncio.sleep(3.0)
        own.change(state=LEAVING, stage=1)
        assert own.state_since == began

    run(scenario())


def test_in_a_large_swarm_changes_are_collected() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        for i in range(2 * PUSH_FANOUT):
            site.view.merge(record(f"other-{i}"), now())
        site.own.seal_if_due()
        first = site.own.published
        site.own.change(stage=1)
        site.own.seal_if_due()
        assert site.own.published == first
        await asyncio.sleep(site.pace.publish_every_s)
        site.own.seal_if_due()
        assert site.own.published > first

    run(scenario())


def test_a_heartbeat_is_due_without_any_change() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        first = site.own.seal()
        site.own.beat()
        assert site.own.seal() is first, "too early"
        await asyncio.sleep(site.pace.heartbeat_s)
        site.own.beat()
        assert published(site.own.seal()).stamp > published(first).stamp

    run(scenario())


def test_an_observer_publishes_nothing_of_itself() -> None:
    async def scenario() -> None:
        own = Site(MemoryHub(), "a", is_quiet=True).own
        own.change(stage=1)
        own.seal_if_due()
        assert own.published == NO_STAMP
        assert own.sealed is None

    run(scenario())


def test_while_a_join_is_declared_others_see_it_and_the_own_view_does_not() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a", state=JOINING)
        with site.own.declared(state="active", round=5):
            site.own.change(stage=3)
            shown = published(site.own.seal())
            assert (shown.state, shown.round, shown.stage) == ("active", 5, -1)
            known = site.view.get("a")
            assert known is not None
            assert (known.state, known.stage) == (JOINING, 3)
        after = published(site.own.seal())
        assert (after.state, after.stage) == (JOINING, 3)
        assert after.stamp > shown.stamp

    run(scenario())


def test_a_copy_of_the_identity_elsewhere_is_followed_and_a_suspicion_outdone() -> None:
    async def scenario() -> None:
        own = Site(MemoryHub(), "a").own
        own.seal()
        own.follow(50)
        assert own.seal().payload == own.sealed.payload  # type: ignore[union-attr]
        assert own.published == (1, 51)
        own.outdo(80)
        assert own.record.version == 81
        own.outdo(3)
        assert own.record.version == 82

    run(scenario())
