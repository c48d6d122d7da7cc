"""A holder of optimizer state that does not give it to whoever comes to own a shard."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from swarmnet.methods.state import FETCH_OPTIMIZER
from swarmnet.swarm.peer import Peer
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

SILENT = "peer-0"
"""First of those that are asked for some shards."""
SOON_S = 15.0

Asked = list[tuple[str, int]]


def give_nothing(swarm: Swarm) -> Asked:
    """The silent one answers nobody. Returns who is asked for which shard from now on."""
    asked: Asked = []
    for name in list(swarm.members):
        transport = swarm.hub.transports[name]
        give = handler_of(transport, FETCH_OPTIMIZER.name)

        async def answer(request: Request[Any], name: str = name, give: Any = give) -> Message[Any]:
            asked.append((name, request.message.body.shard))
            if name == SILENT:
                await asyncio.get_running_loop().create_future()
            reply: Message[Any] = await give(request)
            return reply

        transport.handle(FETCH_OPTIMIZER.name, answer)
    return asked


async def newcomer_of(swarm: Swarm) -> Peer:
    """Who joins a stage of three, and soon has the state of all that it owns."""
    peer = swarm.start("newcomer")

    def has_all() -> bool:
        if peer.replica is None:
            return False
        mine = peer.exchanges.ownership.placement(peer.exchanges.current).owned_by("newcomer")
        return bool(mine) and all(map(peer.gossip.own.holds_shard, mine))

    await swarm.until(has_all, SOON_S)
    return peer


def test_a_holder_that_is_silent_is_waited_for_once(tmp_path: Path) -> None:
    """As long as by the measure of another one that gives; then it is asked last."""

    async def scenario(swarm: Swarm) -> None:
        for i in range(3):
            swarm.start(f"peer-{i}")
        await swarm.until_round(3)
        asked = give_nothing(swarm)
        newcomer = await newcomer_of(swarm)
        print(asked)
        assert [name for name, _ in asked].count(SILENT) == 1
        # It fetches all of it again.
        first = next(j for name, j in asked if name == SILENT)
        assert SILENT in newcomer.exchanges.ownership.holders(newcomer.exchanges.current, first)
        asked.clear()
        await newcomer.exchanges.forget_state()
        async with asyncio.timeout(SOON_S):
            await newcomer.exchanges.follow_owners()
        assert first in [j for _, j in asked]
        assert SILENT not in [name for name, _ in asked]

    in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=1, rounds=10_000), is_synthetic=True)
