"""To which peers urgent news is pushed, and when."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.simulation.clock import run
from swarmnet.transport.memory import MemoryHub
from tests.swarm.membership.parts import Site, acquainted


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
