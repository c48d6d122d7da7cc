"""The machines of a simulated swarm, and the production peers that run on them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from swarmnet.errors import SwarmnetError
from swarmnet.household import household_of
from swarmnet.identity import Identity as Key
from swarmnet.methods.contact import PING, SPEC
from swarmnet.methods.microbatch import ADMIT, COMMIT, COMMITTED
from swarmnet.methods.records import GOSSIP, RECORDS, UNREACHED
from swarmnet.methods.update import NORM
from swarmnet.ports import BACKWARD, FORWARD, REST, Optimizer, Stage
from swarmnet.protocol.membership.records import OBSERVER_STAGE, Household
from swarmnet.protocol.planning.owed import most_owed
from swarmnet.simulation.coding import NO_CODING, CodingTime, PassCoding
from swarmnet.simulation.device import InlineWorker, SyntheticDevice
from swarmnet.simulation.event_log import EventLog
from swarmnet.simulation.invariants import InvariantMonitor, Member
from swarmnet.simulation.local_steps import SyntheticLocalSteps
from swarmnet.simulation.network import Link, SimulatedNetwork, home_link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import (
    REST_PARTS,
    SyntheticData,
    SyntheticOptimizer,
    SyntheticStage,
)
from swarmnet.swarm.peer import Identity, Machine, Peer
from swarmnet.swarm.settings import RunSettings
from swarmnet.transport.memory import MemoryHub

T = TypeVar("T")

BENCHMARK_SIGMA = 0.2
"""Of the logarithm: by how much machines misjudge their speed before they have served."""
FORWARD_PART = 1 / 3
"""Of a microbatch's device time."""
OTHER_S = 0.001
"""Device seconds of work that is neither a forward nor a backward pass."""
BOOTSTRAP_PEERS = 3
CONTROL_METHODS = frozenset(
    row.name for row in (GOSSIP, RECORDS, PING, UNREACHED, ADMIT, COMMIT, COMMITTED, NORM, SPEC)
)


class OpenSigner:
    """Signs nothing and accepts everything: all peers live in one process."""

    def sign(self, data: bytes) -> bytes:
        return b""

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        return True

    async def beside(self, work: Callable[[], T]) -> T:
        return work()


@dataclass
class Host:
    """A machine; it outlives the peers that run on it."""

    name: str
    speed: float
    """Over that of the middle machine."""
    link: Link
    benchmark_s: float
    """What its own benchmark finds, over the seconds of the middle machine."""
    house: str = ""
    """Of those that share a link."""
    incarnation: int = 0
    life: asyncio.Task[None] | None = None
    """The peer that runs on it."""
    frozen_until: float = 0.0


@dataclass(frozen=True, slots=True)
class SentBytes:
    """What peers sent."""

    control: int
    """By `CONTROL_METHODS`."""
    total: int


class Population:
    """Adds machines, starts peers on them, and keeps the counters of the peers that are gone. The
    running peers are `InvariantMonitor.members`. To be used inside a virtual loop."""

    def __init__(
        self,
        scenario: Scenario,
        settings: RunSettings,
        hub: MemoryHub,
        network: SimulatedNetwork,
        monitor: InvariantMonitor,
        log: EventLog,
        rng: random.Random,
    ) -> None:
        self.hosts: dict[str, Host] = {}
        """By name, in the order of their arrival."""
        self._scenario = scenario
        self._settings = settings
        self._hub = hub
        self._network = network
        self._monitor = monitor
        self._log = log
        self._rng = rng
        self._gone_totals: dict[str, int] = {}
        self._gone_control = self._gone_bytes = 0

    # ---- machines ---------------------------------------------------------------------------

    def add_host(self) -> Host:
        """A new machine, without a peer so far."""
        scenario, number = self._scenario, len(self.hosts)
        name = f"peer-{number:04d}"
        rng = scenario.rng(f"host {number}")
        half = scenario.speed_ratio**0.5
        speed = half ** rng.uniform(-1.0, 1.0)
        link = home_link(rng) if scenario.home_links else scenario.link
        if number < len(scenario.links):
            link = scenario.links[number]
        house = ""
        if scenario.house:
            first = number - number % scenario.house
            house = f"house-{first // scenario.house:04d}"
            link = link if number == first else self.hosts[f"peer-{first:04d}"].link
        benchmark_s = rng.lognormvariate(0.0, BENCHMARK_SIGMA) / speed
        host = self.hosts[name] = Host(name, speed, link, benchmark_s, house)
        self._network.add(name, link, house)
        return host

    @property
    def lasting(self) -> Sequence[str]:
        """Machines whose peers never die."""
        return list(self.hosts)[: self._scenario.lasting]

    # ---- peers ------------------------------------------------------------------------------

    def start(self, host: Host) -> None:
        """Starts a peer on a machine."""
        host.incarnation += 1
        host.frozen_until = 0.0
        name, scenario, monitor = host.name, self._scenario, self._monitor
        candidates = self._bootstrap_candidates()
        known = self._rng.sample(candidates, min(BOOTSTRAP_PEERS, len(candidates)))
        peer = Peer(
            transport=self._hub.transport(name),
            signer=OpenSigner(),
            identity=Identity(
                self._settings.run_id,
                b"",
                1000 + host.incarnation,
                household=self._household(host),
            ),
            settings=self._settings,
            machine=self._machine(host),
            rng=scenario.rng(f"peer {name} {host.incarnation}"),
            limits=scenario.limits,
            assigner=scenario.assigner(self._settings.replication),
            gossip_settings=scenario.gossip,
            remembered=lambda: {n: self._hub.addresses_of(n) for n in known},
            on_loss=partial(monitor.reported, name),
        )
        monitor.members[name] = Member(peer)
        host.life = asyncio.get_running_loop().create_task(peer.run(known))
        self._log.write("started", peer=name, known=known)

    def crash(self, name: str) -> None:
        """Ends the peer on a machine at once."""
        host = self.hosts[name]
        self._lose(self._monitor.members[name])
        self._hub.kill(name)
        if host.life is not None:
            host.life.cancel()

    def check_lives(self) -> None:
        """Takes out the peers that have ended. One that ended by an unexpected error is a broken
        invariant."""
        for name, host in self.hosts.items():
            life, member = host.life, self._monitor.members.get(name)
            if life is None or not life.done():
                continue
            host.life = None  # how it ended holds on to all that the peer was
            if member is None:
                continue
            error = None if life.cancelled() else life.exception()
            if error is not None and not isinstance(error, SwarmnetError):
                self._monitor.fail(f"{name} died of {type(error).__name__}: {error}")
            self._log.write("ended", peer=name, error=str(error or ""))
            self._lose(member)
            self._hub.kill(name)

    async def close(self) -> None:
        """Ends all peers, and waits for that."""
        lives = [h.life for h in self.hosts.values() if h.life is not None]
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)

    # ---- counters ---------------------------------------------------------------------------

    def total(self, name: str) -> int:
        """Sum of a counter of `Record.totals` over all peers that have run."""
        members = self._monitor.members.values()
        gone = self._gone_totals.get(name, 0)
        return gone + sum(m.peer.gossip.own.totals.get(name, 0) for m in members)

    def sent_bytes(self) -> SentBytes:
        """By all peers that have run."""
        sent = [_sent_bytes(m.peer) for m in self._monitor.members.values()]
        return SentBytes(
            self._gone_control + sum(s.control for s in sent),
            self._gone_bytes + sum(s.total for s in sent),
        )

    def _lose(self, member: Member) -> None:
        """Keeps the counters of a peer that ends now."""
        self._monitor.collect(member)
        own, sent = member.peer.gossip.own, _sent_bytes(member.peer)
        for name, amount in own.totals.items():
            self._gone_totals[name] = self._gone_totals.get(name, 0) + amount
        self._gone_control += sent.control
        self._gone_bytes += sent.total
        del self._monitor.members[own.peer_id]

    # ---- how a peer is made -----------------------------------------------------------------

    def _household(self, host: Host) -> Household | None:
        if not host.house or not self._scenario.has_households:
            return None
        return household_of(Key(sha256(host.house.encode()).digest()), host.name)

    def _machine(self, host: Host) -> Machine:
        scenario, monitor = self._scenario, self._monitor
        name, incarnation = host.name, host.incarnation
        coding = CodingTime(scenario.coding)

        def build(stage_index: int) -> tuple[Stage, Optimizer]:
            observer = monitor.observer(name, incarnation, stage_index)
            stage = SyntheticStage(
                stage_index,
                scenario.stages,
                scenario.sizes,
                observer,
                owes=scenario.owes_weights,
            )
            optimizer = SyntheticOptimizer(
                stage_index, scenario.sizes, observer, coding, scenario.sync_mode
            )
            return stage, optimizer

        def build_local(stage: Any, outer: Any) -> SyntheticLocalSteps | None:
            if not self._settings.plan.is_local:
                return None
            observer = monitor.observer(name, incarnation, stage.stage_index)
            tokens = scenario.sizes.tokens_per_microbatch
            return SyntheticLocalSteps(stage, outer, tokens, observer)

        return Machine(
            build,
            self._device(host),
            InlineWorker(taken=coding.take),
            SyntheticData(scenario.samples_per_microbatch),
            build_local=build_local,
            measure=lambda: host.benchmark_s * scenario.service_s,
        )

    def _device(self, host: Host) -> SyntheticDevice:
        scenario = self._scenario
        service_s = scenario.service_s / host.speed
        forward_s = FORWARD_PART * service_s
        last = scenario.stages - 1
        coding = [scenario.pass_coding(k) for k in range(scenario.stages)]
        backward_s = service_s - forward_s
        rng = scenario.rng(f"noise {host.name} {host.incarnation}")

        def stage() -> int:
            member = self._monitor.members.get(host.name)
            return max(0, member.peer.gossip.own.stage if member else OBSERVER_STAGE)

        def coding_of(kind: str) -> PassCoding:
            forward, backward = coding[stage()]
            return {FORWARD: forward, BACKWARD: backward}.get(kind, NO_CODING)

        def seconds(kind: str) -> float:
            rest_s = backward_s / 2 if scenario.owes_weights and stage() else 0.0
            by_device_s = {
                FORWARD: forward_s,
                BACKWARD: backward_s - rest_s,
                REST: rest_s / REST_PARTS,
            }
            cost_s = by_device_s.get(kind, OTHER_S)
            if kind == FORWARD and stage() == last:
                cost_s = service_s - rest_s
            if not scenario.coding.is_beside:
                cost_s += coding_of(kind).total_s
            if scenario.service_sigma:
                cost_s *= math.exp(rng.gauss(0.0, scenario.service_sigma))
            return cost_s

        return SyntheticDevice(
            seconds,
            coding_of if scenario.coding.is_beside else None,
            lambda: max(0.0, host.frozen_until - self._monitor.now()),
            most_owed=lambda: most_owed(stage()),
        )

    def _bootstrap_candidates(self) -> list[str]:
        """Peers that a newcomer may be told of: all, or, where some peers last, those that one of
        the others sees."""
        members, now = self._monitor.members, self._monitor.now()
        others = sorted(set(members) - set(self.lasting))
        serving = [
            name
            for name in others
            if members[name].frozen_until <= now and members[name].peer.gossip.own.is_replica
        ]
        if not self._scenario.lasting or not serving:
            return sorted(members)
        seen = members[self._rng.choice(serving)].peer.view.live(now)
        return sorted(r.peer_id for r in seen if r.is_replica)


def _sent_bytes(peer: Peer) -> SentBytes:
    sent = peer.transport.traffic.sent_bytes
    control = sum(b for m, b in sent.items() if m in CONTROL_METHODS)
    return SentBytes(control, sum(sent.values()))
