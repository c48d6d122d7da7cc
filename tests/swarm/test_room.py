"""`admit`: a caller on a slow uplink asks for room before it sends, and a place is kept for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.errors import Busy, NoRoute, SwarmnetError
from swarmnet.protocol.records import ACTIVE, Record
from swarmnet.protocol.reservations import RESERVED_S
from swarmnet.protocol.view import View
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.simulation.device import InlineWorker, SyntheticDevice
from swarmnet.simulation.network import FAST_LINK, Link, SimulatedNetwork
from swarmnet.simulation.stage import (
    Sizes,
    SyntheticData,
    SyntheticOptimizer,
    SyntheticStage,
    activation,
)
from swarmnet.swarm.gossip import Gossip
from swarmnet.swarm.messages import AdmitRequest, StepReply, StepRequest
from swarmnet.swarm.replica import Replica
from swarmnet.swarm.settings import Limits
from swarmnet.swarm.step import StepService
from swarmnet.swarm.wiring import Passed, Wiring
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Array, Message
from tests.swarm.harness import OpenSigner

RUN = "r" * 32
SLOW_BYTES_PER_S = 250_000.0
SIZES = Sizes(num_shards=1, activation_numbers=250_000)
"""A megabyte: four seconds of the slow uplink."""
WORK_S = 3.0
"""Of the replica's device, for a microbatch."""
CALLEE = "replica"


def ignore(event: object, **facts: Any) -> None:
    pass


class Caller:
    """A peer with a wiring and no stage."""

    def __init__(self, pair: Pair, name: str, upload_bytes_per_s: float) -> None:
        link = Link(upload_bytes_per_s, 1e9, 0.01)
        self.gossip = pair.join(name, link, upload_bytes_per_s=upload_bytes_per_s)
        self.transport = self.gossip.transport
        self.wiring = Wiring(
            self.transport, self.gossip, pair.limits, 1, SIZES.tokens_per_microbatch, pair.rng
        )

    async def step(self, microbatch_id: int) -> Passed:
        inputs = activation((0, microbatch_id), SIZES)
        _, targets = SyntheticData(4).microbatch(microbatch_id)
        request = StepRequest(0, microbatch_id, 0, self.transport.peer_id, 4)

        def accept(reply: StepReply, arrays: tuple[Array, ...]) -> Array | None:
            return arrays[0] if arrays else None

        return await self.wiring.step(request, (inputs, targets), accept=accept, on_path=ignore)

    async def ask(self, microbatch_id: int, round_index: int = 0) -> None:
        body = AdmitRequest(round_index, microbatch_id, 0)
        await self.transport.call(CALLEE, "admit", Message(body), timeout_s=5.0)

    def sent(self, method: str) -> int:
        return self.transport.traffic.sent_bytes.get(method, 0)


class Pair:
    """One replica of a pipeline of one stage, and callers."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.limits = Limits(route_wait_s=1.0)
        self.network = SimulatedNetwork(random.Random(0))
        self.hub = MemoryHub(network=self.network, copy=False)
        gossip = self.join(CALLEE, FAST_LINK, state=ACTIVE, stage=0)
        self.gossip = gossip
        wiring = Wiring(gossip.transport, gossip, self.limits, 1, 4, self.rng)
        stage = SyntheticStage(0, 1, SIZES, ignore)
        self.replica = Replica(
            stage,
            SyntheticOptimizer(0, SIZES, ignore),
            SyntheticDevice(lambda kind: WORK_S),
            InlineWorker(),
            round=0,
            synced=True,
        )
        self.steps = StepService(gossip.transport, gossip, wiring, self.limits, self.replica)

    def join(self, name: str, link: Link, **own: Any) -> Gossip:
        self.network.add(name, link)
        transport = self.hub.transport(name)
        transport.set_run(RUN)
        record = Record(name, RUN, incarnation=1, version=1, **own)
        return Gossip(
            transport, View(name, silence_s=1e9), OpenSigner(), record, random.Random(name)
        )

    def caller(self, name: str, upload_bytes_per_s: float = SLOW_BYTES_PER_S) -> Caller:
        """One that the replica knows, and that knows the replica."""
        caller = Caller(self, name, upload_bytes_per_s)
        now = asyncio.get_running_loop().time()
        caller.gossip.view.merge(replace(self.gossip.own, stage=0, state=ACTIVE), now)
        self.gossip.view.merge(caller.gossip.own, now)
        return caller

    def fill(self) -> list[asyncio.Task[Passed]]:
        """As many microbatches as the replica takes, from somebody near it."""
        near = self.caller("near", 1e9)
        loop = asyncio.get_running_loop()
        return [
            loop.create_task(near.step(1000 + i)) for i in range(self.limits.max_waiting_forwards)
        ]


def scenario(play: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair()
        try:
            await play(pair)
        finally:
            await pair.steps.close()

    run_virtual(main())


async def refused_as_busy(asked: Awaitable[None]) -> None:
    with pytest.raises(Busy):
        await asked


def test_a_full_replica_costs_a_slow_uplink_no_activation() -> None:
    async def play(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        work = pair.fill()
        await asyncio.sleep(0.5)
        slow = pair.caller("slow")
        began = loop.time()
        with pytest.raises(NoRoute, match="full"):
            await slow.step(1)
        assert loop.time() - began < 2 * pair.limits.route_wait_s
        assert slow.sent("step") == 0
        assert 0 < slow.sent("admit") < 2_000
        await asyncio.gather(*work)
        assert (await slow.step(1)).peer_id == CALLEE
        assert slow.sent("step") > SIZES.activation_bytes

    scenario(play)


def test_a_fast_uplink_does_not_ask() -> None:
    async def play(pair: Pair) -> None:
        fast = pair.caller("fast", 1e9)
        await fast.step(1)
        assert fast.sent("admit") == 0

    scenario(play)


def test_the_place_of_a_microbatch_on_its_way_is_not_given_to_others() -> None:
    """The activation takes two seconds; who calls meanwhile is told `Busy`, and it finds its place
    when it arrives."""

    async def play(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        slow = pair.caller("slow", SIZES.activation_bytes / 2.0)
        coming = loop.create_task(slow.step(1))
        await asyncio.sleep(0.5)
        work = pair.fill()  # for one of these there is no room
        await asyncio.sleep(0.5)
        assert pair.steps.num_flying == pair.limits.max_waiting_forwards - 1
        other = pair.caller("other")
        await refused_as_busy(other.ask(2))
        await slow.ask(1)  # who has the place may ask again, full as it is
        await coming
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        assert sum(isinstance(o, NoRoute) for o in outcomes) == 1
        assert slow.sent("step") < 1.1 * SIZES.activation_bytes, "sent once"

    scenario(play)


def test_a_place_that_nobody_comes_for_lapses() -> None:
    async def play(pair: Pair) -> None:
        first, second, third = (pair.caller(name) for name in ("first", "second", "third"))
        await first.ask(1)
        await first.ask(2)
        await second.ask(3)
        await refused_as_busy(third.ask(4))
        await asyncio.sleep(RESERVED_S)
        await third.ask(4)

    scenario(play)


def test_places_of_a_round_that_is_over_are_free() -> None:
    async def play(pair: Pair) -> None:
        first, second, third = (pair.caller(name) for name in ("first", "second", "third"))
        for n, caller in enumerate((first, first, second)):
            await caller.ask(n)
        await refused_as_busy(third.ask(4))
        pair.steps.drop_round(0)
        pair.replica.round = 1
        await third.ask(4, 1)

    scenario(play)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_flood_of_questions_does_not_keep_others_out(is_known: bool) -> None:
    """Whoever asks for room without end and never comes, in whatever round, takes it from nobody:
    unknown to the replica not for a moment, else never the last place, and that only once."""

    async def play(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        honest = pair.caller("honest")
        flood = pair.caller("flood") if is_known else Caller(pair, "flood", 1e9)
        refused = 0

        async def ask(n: int) -> None:
            nonlocal refused
            try:
                await flood.ask(n, n % 50)
            except SwarmnetError:
                refused += 1

        async def flooding() -> None:
            for n in range(0, 100_000, 50):
                await asyncio.gather(*(ask(n + i) for i in range(50)))
                await asyncio.sleep(0.02)

        attack = loop.create_task(flooding())
        await asyncio.sleep(1.0)
        began = loop.time()
        for n in range(3):
            await honest.step(n)
        took_s = loop.time() - began
        alone_s = 3 * (WORK_S + SIZES.activation_bytes / SLOW_BYTES_PER_S)
        assert took_s < 1.2 * alone_s + RESERVED_S
        now = loop.time()
        assert pair.steps._places.count(now) == 0, "and in the end it is not believed"
        assert len(pair.steps._places._distrusted) <= 1
        attack.cancel()

    scenario(play)
