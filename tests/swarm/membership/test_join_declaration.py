"""Before a peer joins a stage, the replicas of the stage know of it."""

from __future__ import annotations

import pytest

from swarmnet.protocol.membership.records import ACTIVE, JOINING
from swarmnet.simulation.clock import run
from swarmnet.transport.memory import MemoryHub
from tests.swarm.membership.parts import Site, acquainted, now

WAIT_S = 1.0


def test_the_told_know_of_it_and_the_newcomer_knows_what_they_knew() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b, c = acquainted(hub, "a", "b", "c")
        newcomer = Site(hub, "new", state=JOINING)
        newcomer.knows(a, b)
        await newcomer.exchange.declare_join(["a", "b"], WAIT_S, state=ACTIVE, round=4)
        for told in (a, b):
            known = told.view.get("new")
            assert known is not None
            assert (known.state, known.round) == (ACTIVE, 4)
        assert newcomer.own.record.state == JOINING, "it has not happened yet"
        assert newcomer.view.get("c") is not None
        assert c.view.get("new") is None

    run(scenario())


@pytest.mark.parametrize("silent", [1, 2])
def test_who_does_not_answer_is_not_waited_for(silent: int) -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        others = acquainted(hub, "a", "b")
        newcomer = Site(hub, "new", state=JOINING)
        newcomer.knows(*others)
        for name in ["a", "b"][:silent]:
            hub.freeze(name)
        began = now()
        await newcomer.exchange.declare_join(["a", "b"], WAIT_S, state=ACTIVE)
        assert now() - began <= 2 * WAIT_S

    run(scenario())


def test_an_observer_declares_nothing() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        (other,) = acquainted(hub, "a")
        quiet = Site(hub, "new", is_quiet=True)
        await quiet.exchange.declare_join(["a"], WAIT_S, state=ACTIVE)
        assert other.view.get("new") is None

    run(scenario())
