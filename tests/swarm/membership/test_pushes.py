"""To which peers urgent news is pushed, and when."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.protocol.membership.pace import PUSH_FANOUT
from swarmnet.simulation.clock import run
from swarmnet.transport.memory import MemoryHub
from tests.swarm.membership.parts import Site, acquainted, now, record


def test_changes_of_one_moment_are_pushed_together() -> None:
    async def scenario() -> None:
        a, b = acquainted(MemoryHub(), "a", "b")
        before = a.sent("records")
        for stage in (1, 2, 3):
            a.own.change(stage=stage)
            a.pushes.soon()
        await asyncio.sleep(1.0)
        known = b.view.get("a")
        assert known is not None
        assert known.stage == 3
        once = a.sent("records") - before
        a.pushes.now()
        assert a.sent("records") - before == pytest.approx(2 * once, rel=0.1)
        await asyncio.sleep(1.0)

    run(scenario())


def test_in_a_small_swarm_every_peer_is_told() -> None:
    async def scenario() -> None:
        sites = acquainted(MemoryHub(), "a", "b", "c")
        assert sites[0].pushes.targets(1) == ["b", "c"]

    run(scenario())


def test_in_a_large_one_half_of_the_told_are_the_first_feeders() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        for i in range(3 * PUSH_FANOUT):
            feeds = i % 2 == 0
            other = record(f"p-{i:02}", stage=0 if feeds else 1, has_data=feeds)
            site.view.merge(other, now())
        first = site.pushes.first_targets()
        assert first == [f"p-{i:02}" for i in range(0, PUSH_FANOUT, 2)]
        told = site.pushes.targets(PUSH_FANOUT)
        assert told[: len(first)] == first
        assert len(told) == len(set(told)) == PUSH_FANOUT
        assert "a" not in told

    run(scenario())


def test_an_observer_pushes_and_introduces_nothing() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        (other,) = acquainted(hub, "b")
        quiet = Site(hub, "a", is_quiet=True)
        quiet.knows(other)
        quiet.pushes.now()
        quiet.pushes.introduce("b")
        await asyncio.sleep(1.0)
        assert other.view.get("a") is None

    run(scenario())
