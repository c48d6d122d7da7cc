"""One replica of a pipeline of one stage, and callers with links of their own, in virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

from swarmnet.methods.microbatch import AdmitRequest, StepReply, StepRequest
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.update.replica_phase import Phase, State
from swarmnet.simulation.device import InlineWorker, SyntheticDevice
from swarmnet.simulation.network import FAST_LINK, Link, SimulatedNetwork
from swarmnet.simulation.stage import (
    Sizes,
    SyntheticData,
    SyntheticOptimizer,
    SyntheticStage,
    activation,
)
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.dispatcher import Dispatcher, Passed
from swarmnet.swarm.pipeline.flights import Track
from swarmnet.swarm.pipeline.step import StepService
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.replica.serving import Serving
from swarmnet.swarm.settings import WaitLimits
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Array, Message
from tests.swarm.harness import OpenSigner

RUN = "r" * 32
SLOW_BYTES_PER_S = 250_000.0
SIZES = Sizes(num_shards=1, activation_numbers=250_000, width=250)
"""A megabyte: four seconds of the slow uplink."""
WORK_S = 3.0
"""Of the replica's device, for a microbatch."""
CALLEE = "replica"
NEWEST = 1 << 40
"""Version of what replicas know of a caller, which says something else itself."""


def ignore(event: object, **facts: Any) -> None:
    pass


def accept_all(reply: StepReply, arrays: tuple[Array, ...]) -> Array | None:
    return arrays[0] if arrays else None


def learn(replica: Replica, work_s: float) -> None:
    """It knows how long its device takes."""
    for _ in range(5):
        replica.measured.service.add(work_s, 1.0)


class Caller:
    """A peer with a dispatcher, which serves another stage, and knows its uplink."""

    def __init__(self, pair: OneReplica, name: str, upload_bytes_per_s: float) -> None:
        link = Link(upload_bytes_per_s, 1e9, 0.01)
        self.gossip = pair.join(name, link, state=ACTIVE, stage=1)
        self.transport = self.gossip.transport
        self.transport.traffic.upload.total.add(int(upload_bytes_per_s), 1.0)
        self.dispatcher = Dispatcher(
            self.gossip, pair.limits, 1, SIZES.tokens_per_microbatch, pair.rng
        )

    async def step(self, microbatch_id: int, hint: tuple[str, ...] = ()) -> Passed:
        """Its own microbatch; `hint`: who may have it."""
        inputs = activation((0, microbatch_id), SIZES)
        targets = SyntheticData(4).microbatch([microbatch_id]).targets
        request = StepRequest(0, microbatch_id, 0, self.transport.peer_id, 4)
        request = replace(request, hint=hint)
        return await self.dispatcher.step(
            request, (inputs, targets), accept=accept_all, track=Track()
        )

    def knows(self, record: Record) -> None:
        self.gossip.view.merge(record, asyncio.get_running_loop().time())

    async def ask(self, microbatch_id: int, round_index: int = 0) -> None:
        """Keeps a place."""
        body = AdmitRequest(round_index, microbatch_id, 0, comes=True)
        await self.transport.call(CALLEE, "admit", Message(body), timeout_s=5.0)

    def sent(self, method: str) -> int:
        return self.transport.traffic.sent_bytes.get(method, 0)


class OneReplica:
    """One replica of a pipeline of one stage, and callers."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.limits = WaitLimits(route_wait_s=1.0, max_waiting_announced=3)
        self.network = SimulatedNetwork(random.Random(0))
        self.hub = MemoryHub(network=self.network, copy=False)
        self.work_s = WORK_S
        self._feeders: list[Record] = []
        """The callers, as replicas know them: they feed."""
        self.others: list[StepService] = []
        self.gossip, self.steps = self._serving(CALLEE)
        self.replica = self.steps.serving.of(0)

    async def close(self) -> None:
        for steps in (self.steps, *self.others):
            await steps.close()

    def _serving(self, name: str, slower: float = 1.0) -> tuple[Gossip, StepService]:
        gossip = self.join(name, FAST_LINK, state=ACTIVE, stage=0, has_data=True)
        now = asyncio.get_running_loop().time()
        for record in self._feeders:
            gossip.view.merge(record, now)
        dispatcher = Dispatcher(gossip, self.limits, 1, 4, self.rng)
        replica = Replica(
            SyntheticStage(0, 1, SIZES, ignore),
            SyntheticOptimizer(0, SIZES, ignore),
            SyntheticDevice(lambda kind: slower * self.work_s),
            InlineWorker(),
            Phase(State.OPEN, 0),
        )
        serving = Serving()
        serving.begin(replica)
        return gossip, StepService(gossip, dispatcher, self.limits, serving)

    async def feed(self, microbatch_id: int) -> Passed:
        """A microbatch of the replica's own data."""
        inputs = activation((0, microbatch_id), SIZES)
        targets = SyntheticData(4).microbatch([microbatch_id]).targets
        request = StepRequest(0, microbatch_id, 0, CALLEE, 4)
        return await self.steps.dispatcher.step(
            request, (inputs, targets), accept=accept_all, track=Track(), prefer_self=True
        )

    @property
    def announced(self) -> Record:
        """The replica's record."""
        return replace(self.gossip.own, stage=0, state=ACTIVE)

    def second(self, name: str, slower: float = 1.0) -> Record:
        """Another replica, so many times as slow; its record."""
        gossip, steps = self._serving(name, slower)
        gossip.view.merge(self.announced, asyncio.get_running_loop().time())
        self.others.append(steps)
        learn(steps.serving.of(0), slower * self.work_s)
        return replace(gossip.own, stage=0, state=ACTIVE)

    def join(self, name: str, link: Link, **own: Any) -> Gossip:
        self.network.add(name, link)
        transport = self.hub.transport(name)
        transport.set_run(RUN)
        record = Record(name, RUN, incarnation=1, version=1, **own)
        return Gossip(
            transport, View(name, silence_s=1e9), OpenSigner(), record, random.Random(name)
        )

    def caller(
        self, name: str, upload_bytes_per_s: float = SLOW_BYTES_PER_S, *, feeds: bool = True
    ) -> Caller:
        """One that knows the replica, and that the replica knows as a feeder, whatever else it
        says; or not yet."""
        caller = Caller(self, name, upload_bytes_per_s)
        now = asyncio.get_running_loop().time()
        caller.gossip.view.merge(self.announced, now)
        if not feeds:
            return caller
        feeder = replace(caller.gossip.own, stage=0, has_data=True, version=NEWEST)
        self._feeders.append(feeder)
        for steps in (self.steps, *self.others):
            steps.gossip.view.merge(self._feeders[-1], now)
        return caller

    def fill(self) -> list[asyncio.Task[Passed]]:
        """As many microbatches as the replica takes, from somebody near it."""
        near = self.caller("near", 1e9)
        loop = asyncio.get_running_loop()
        return [
            loop.create_task(near.step(1000 + i)) for i in range(self.limits.max_waiting_forwards)
        ]
