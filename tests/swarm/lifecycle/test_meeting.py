"""A newcomer hears of the run before it chooses a stage."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmnet.errors import NotNow, UserError
from swarmnet.protocol.membership.records import ACTIVE, JOINING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run
from swarmnet.swarm.lifecycle.arrival import MEET_S, meet
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.transport.memory import MemoryHub
from tests.swarm.harness import OpenSigner

RUN, OTHER_RUN = "a" * 32, "b" * 32


def member(hub: MemoryHub, name: str, run_id: str = RUN) -> Gossip:
    transport = hub.transport(name)
    transport.set_run(run_id)
    place = (JOINING, -1) if name == "new" else (ACTIVE, 0)
    own = Record(name, run_id, 1, 0, state=place[0], stage=place[1])
    return Gossip(transport, View(name), OpenSigner(), own, random.Random(name))


def test_the_first_peer_of_a_run_meets_nobody() -> None:
    async def scenario() -> None:
        await meet(member(MemoryHub(), "first"), [])

    run(scenario())


def test_one_neighbour_that_answers_is_enough() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        newcomer, _ = member(hub, "new"), member(hub, "there")
        member(hub, "stranger", OTHER_RUN)
        await meet(newcomer, ["gone", "stranger", "there"])
        assert newcomer.view.get("there") is not None

    run(scenario())


def test_a_newcomer_that_is_cut_off_does_not_begin_alone() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(NotNow, match=r"peer \.\.\.gone: not reached"):
            await meet(member(MemoryHub(), "new"), ["gone"])
        assert loop.time() - began >= MEET_S

    run(scenario())


def test_the_only_neighbour_of_another_run_is_an_error_at_once() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        newcomer, _ = member(hub, "new"), member(hub, "stranger", OTHER_RUN)
        with pytest.raises(UserError, match=r"peer \.\.\.stranger: in another run"):
            await meet(newcomer, ["stranger"])

    run(scenario())
