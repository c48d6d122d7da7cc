"""What happens to the peers of a simulation: joins, leaves, crashes, stalls and cuts."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.simulation import churn
from swarmnet.simulation.churn import ChurnEvent
from swarmnet.simulation.event_log import EventLog
from swarmnet.simulation.invariants import InvariantMonitor, Member
from swarmnet.simulation.network import SimulatedNetwork
from swarmnet.simulation.population import Host, Population
from swarmnet.simulation.recovery_times import RecoveryTimes
from swarmnet.simulation.scenario import Scenario
from swarmnet.transport.memory import MemoryHub


class Faults:
    """Applies churn events. To be used inside a virtual loop."""

    def __init__(
        self,
        scenario: Scenario,
        population: Population,
        hub: MemoryHub,
        network: SimulatedNetwork,
        monitor: InvariantMonitor,
        recovery: RecoveryTimes,
        log: EventLog,
        rng: random.Random,
    ) -> None:
        self.counts: dict[str, int] = {}
        """Events that have happened, by kind; the ends of faults are kinds of their own."""
        self.num_open = 0
        """Stalls, cuts and absences that have not ended."""
        self._scenario = scenario
        self._population = population
        self._hub = hub
        self._network = network
        self._monitor = monitor
        self._recovery = recovery
        self._log = log
        self._rng = rng

    def apply(self, event: ChurnEvent) -> None:
        """Makes an event happen now. Nothing happens where its peer is gone, or where there is no
        peer that it may hit."""
        handler = {
            churn.JOIN: self._join,
            churn.LEAVE: self._leave,
            churn.CRASH: self._crash,
            churn.REJOIN: self._crash,
            churn.STALL: self._stall,
            churn.PARTITION: self._partition,
            churn.ONE_WAY: self._one_way,
        }[event.action]
        name = event.peer or self._victim(event.action)
        if event.action == churn.JOIN or name in self._monitor.members:
            handler(name, event)

    def _count(self, action: str, **facts: Any) -> None:
        self.counts[action] = self.counts.get(action, 0) + 1
        self._log.write(action, **facts)
        self._monitor.fault()

    def _victim(self, action: str) -> str:
        """A peer that the fault may hit; empty where each would leave a stage without replicas."""
        members, now = self._monitor.members, self._monitor.now()
        serving: dict[int, list[str]] = {}
        for name, m in sorted(members.items()):
            own = m.peer.gossip.own
            replica = m.peer.replica
            sound = m.frozen_until <= now and not m.leaving
            if own.state == ACTIVE and sound and replica is not None and replica.synced:
                serving.setdefault(own.stage, []).append(name)
        names = [n for n, m in sorted(members.items()) if not m.leaving]
        if self._scenario.keep_covered and action != churn.JOIN:
            last = {n for group in serving.values() if len(group) == 1 for n in group}
            names = [n for n in names if n not in last]
        if action in (churn.CRASH, churn.REJOIN, churn.LEAVE):
            lasting = self._population.lasting
            names = [n for n in names if n not in lasting]
        return self._rng.choice(names) if names else ""

    # ---- peers that come and go -------------------------------------------------------------

    def _join(self, name: str, event: ChurnEvent) -> None:
        if len(self._monitor.members) >= self._scenario.max_peers:
            return
        host = self._population.add_host()
        self._count(churn.JOIN, peer=host.name)
        self._population.start(host)

    def _leave(self, name: str, event: ChurnEvent) -> None:
        member = self._monitor.members[name]
        if member.leaving:
            return
        member.leaving = True
        self._count(churn.LEAVE, peer=name)
        member.peer.stop()

    def _crash(self, name: str, event: ChurnEvent) -> None:
        member = self._monitor.members[name]
        self._count(event.action, peer=name, stage=member.peer.gossip.own.stage)
        self._recovery.crashed(member.peer)
        self._population.crash(name)
        if event.action == churn.REJOIN:
            self.num_open += 1
            host = self._population.hosts[name]
            asyncio.get_running_loop().call_later(event.duration_s, self._rejoin, host)

    def _rejoin(self, host: Host) -> None:
        self.num_open -= 1
        if host.name not in self._monitor.members:
            self._count("back", peer=host.name)
            self._population.start(host)

    # ---- peers that are out of reach --------------------------------------------------------

    def _stall(self, name: str, event: ChurnEvent) -> None:
        member, host = self._monitor.members[name], self._population.hosts[name]
        now = self._monitor.now()
        if host.frozen_until > now:
            return
        member.frozen_until = host.frozen_until = now + event.duration_s
        self._count(churn.STALL, peer=name, duration=event.duration_s)
        self._hub.freeze(name)
        self.num_open += 1
        asyncio.get_running_loop().call_later(event.duration_s, self._thaw, name, member)

    def _thaw(self, name: str, member: Member) -> None:
        self.num_open -= 1
        if self._monitor.members.get(name) is member:
            self._hub.thaw(name)
            self._count("thaw", peer=name)

    def _partition(self, name: str, event: ChurnEvent) -> None:
        """Cuts off a random part of the swarm, the victim in it, from the rest."""
        others = sorted(n for n in self._monitor.members if n != name)
        side = {name, *self._rng.sample(others, self._rng.randint(0, len(others) // 2))}
        rest = [n for n in others if n not in side]
        pairs = [(a, b) for a in sorted(side) for b in rest]
        pairs += [(b, a) for a, b in pairs]
        self._cut(pairs, churn.PARTITION, sorted(side), event.duration_s)

    def _one_way(self, name: str, event: ChurnEvent) -> None:
        """Messages of the victim no longer reach one other peer."""
        others = sorted(n for n in self._monitor.members if n != name)
        if others:
            other = self._rng.choice(others)
            self._cut([(name, other)], churn.ONE_WAY, [name, other], event.duration_s)

    def _cut(
        self, pairs: list[tuple[str, str]], action: str, side: list[str], duration_s: float
    ) -> None:
        for a, b in pairs:
            self._network.block(a, b, self._monitor.now() + duration_s)
        self._count(action, side=side, duration=duration_s)
        self.num_open += 1
        asyncio.get_running_loop().call_later(duration_s, self._heal, side)

    def _heal(self, side: list[str]) -> None:
        self.num_open -= 1
        self._count("healed", side=side)
