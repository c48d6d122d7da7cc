"""Who urgent news goes to, and who may ask for it."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmnet.protocol.membership.pace import PUSH_FANOUT
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.transport.memory import MemoryHub
from tests.swarm.harness import OpenSigner

RUN = "0123456789abcdef" * 2


def member(hub: MemoryHub, name: str, stage: int) -> Gossip:
    transport = hub.transport(name)
    transport.set_run(RUN)
    own = Record(name, RUN, 1, 0, state=ACTIVE, stage=stage, has_data=stage == 0)
    return Gossip(transport, View(name), OpenSigner(), own, random.Random(name))


@pytest.mark.parametrize("size", [PUSH_FANOUT - 2, 3 * PUSH_FANOUT])
def test_in_a_large_swarm_the_newest_news_is_asked_for(size: int) -> None:
    """In a small one everybody is told."""

    async def scenario() -> None:
        hub = MemoryHub()
        members = [member(hub, f"peer-{i:02}", stage=0 if i < 4 else 1) for i in range(size)]
        now = asyncio.get_running_loop().time()
        newcomer = member(hub, "newcomer", stage=-1)
        for gossip in members:
            for other in (*members, newcomer):
                gossip.view.merge(other.own, now)
            newcomer.view.merge(gossip.own, now)
        mover = members[-1]
        mover.update(stage=0)
        signed = mover.own_record.seal()
        for feeder in members[:4]:
            assert feeder.records.take(signed)
        await newcomer.catch_up()
        known = newcomer.view.get(mover.own.peer_id)
        assert known is not None
        assert known.stage == (0 if size > PUSH_FANOUT else 1)

    run(scenario())


def test_nobody_to_ask_is_no_error() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        newcomer = member(hub, "newcomer", stage=-1)
        for i in range(3 * PUSH_FANOUT):
            record = Record(f"gone-{i}", RUN, 1, 0, state=ACTIVE, stage=0, has_data=True)
            newcomer.view.merge(record, asyncio.get_running_loop().time())
        await newcomer.catch_up()

    run(scenario())
