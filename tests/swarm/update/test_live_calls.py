"""Long calls: a callee that falls silent ends them, one that is slow does not."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.errors import Gone
from swarmnet.methods.contact import RELAY_RESERVE, RelayGrant
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.swarm.one_replica import CALLEE, OneReplica

NUM_CALLS = 20
LONG_S = 300.0


class Scene:
    """A callee that answers after `LONG_S`, and a caller with many calls to it."""

    def __init__(self, usual_s: float) -> None:
        self.pair = OneReplica()
        self.caller = self.pair.caller("caller", 1e6)
        self.gossip = self.caller.gossip
        self.usual_s = usual_s
        self.num_pings = 0
        self.gossip.liveness.start()
        self.pair.gossip.transport.handle(RELAY_RESERVE.name, self._answer)
        self.pair.gossip.transport.handle("ping", self._on_ping)

    async def _answer(self, request: Request) -> Message:
        await asyncio.sleep(LONG_S)
        return Message(RelayGrant((), 1.0))

    async def _on_ping(self, request: Request) -> Message:
        self.num_pings += 1
        return Message()

    def start(self) -> list[asyncio.Task[Message]]:
        loop = asyncio.get_running_loop()
        return [
            loop.create_task(
                self.gossip.liveness.call_while_live(
                    CALLEE, RELAY_RESERVE, Message(), timeout_s=10 * LONG_S, usual_s=self.usual_s
                )
            )
            for _ in range(NUM_CALLS)
        ]

    async def close(self) -> None:
        self.gossip.liveness.stop()
        await self.pair.close()


@pytest.mark.parametrize(("usual_s", "within_s"), [(0.0, 5.0), (100.0, 30.0)])
def test_a_callee_that_falls_silent_ends_all_calls_to_it(usual_s: float, within_s: float) -> None:
    async def scenario() -> None:
        scene = Scene(usual_s)
        calls = scene.start()
        await asyncio.sleep(1.0)
        scene.pair.hub.freeze(CALLEE)
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(a) for a in answers] == [Gone] * NUM_CALLS
        assert asyncio.get_running_loop().time() - began <= within_s
        await scene.close()

    run_virtual(scenario(), limit_s=10 * LONG_S)


@pytest.mark.parametrize(("usual_s", "most"), [(0.0, 40), (LONG_S, 6)])
def test_a_callee_that_is_slow_is_asked_now_and_then_and_not_given_up(
    usual_s: float, most: int
) -> None:
    """However many calls there are; and seldom where such calls take long anyway."""

    async def scenario() -> None:
        scene = Scene(usual_s)
        await asyncio.gather(*scene.start())
        assert 1 <= scene.num_pings <= most
        await scene.close()

    run_virtual(scenario(), limit_s=10 * LONG_S)
