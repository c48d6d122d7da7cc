"""Throughput, bounds and traffic of a simulated swarm over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnet.protocol.membership.records import LEFT
from swarmnet.simulation.bound import (
    Capacity,
    CodingCosts,
    Integral,
    SampleCosts,
    best_flow,
    max_flow,
    replica_rate,
)
from swarmnet.simulation.breakdown import Breakdown
from swarmnet.simulation.invariants import InvariantMonitor
from swarmnet.simulation.network import SimulatedNetwork
from swarmnet.simulation.population import Host, Population, SentBytes
from swarmnet.simulation.scenario import Sample, Scenario

SAMPLES_KEPT = 200
"""Points of the curves over time."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Sums at one moment."""

    at_s: float = 0.0
    samples: int = 0
    """Committed."""
    bound: float = 0.0
    """Samples that could have been committed, see `Rates`."""
    best: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over the time since the warm-up."""

    samples_per_s: float
    """Committed."""
    bound_per_s: float
    """Max-flow of the live machines, each in the stage it served."""
    best_per_s: float
    """The same with the best assignment of machines to stages."""
    control_bytes_per_peer_s: float
    bytes_per_peer_s: float


class Accounts:
    """Looks at the peers of a run at every check."""

    def __init__(
        self,
        scenario: Scenario,
        population: Population,
        network: SimulatedNetwork,
        monitor: InvariantMonitor,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        """`on_sample` is called with every new point of the curve."""
        self.breakdown = Breakdown(network, scenario.num_slots)
        self.curve: list[Sample] = []
        self._scenario = scenario
        self._population = population
        self._monitor = monitor
        self._on_sample = on_sample
        self._bound = Integral()
        self._best = Integral()
        self._warm = self._last = _Mark()
        self._warm_sent = SentBytes(0, 0)
        self._peer_seconds = 0.0

    def look(self) -> None:
        """Takes down the bound from now on, and a point of the curve where it is time."""
        scenario, monitor, now = self._scenario, self._monitor, self._monitor.now()
        per_sample = _costs(scenario)
        alive, serving = [], []
        for name, m in monitor.members.items():
            capacity = self._capacity(self._population.hosts[name])
            rate = replica_rate(capacity, 1, 3, per_sample)
            self.breakdown.add(m.peer, m.frozen_until > now, rate, scenario.check_s, now)
            if m.frozen_until > now:
                continue
            alive.append(capacity)
            replica = m.peer.replica
            if replica is not None and replica.synced and m.peer.gossip.own.state != LEFT:
                serving.append((replica.index, capacity))
        self._peer_seconds += len(monitor.members) * scenario.check_s
        self._bound.set(max_flow(serving, scenario.stages, per_sample), now)
        self._best.set(best_flow(alive, scenario.stages, per_sample), now)
        if now - self._last.at_s >= scenario.until_s / SAMPLES_KEPT:
            self._add_sample()

    def end_warmup(self) -> None:
        """Rates and the breakdown are counted from now on: the traffic of the warm-up is that of
        all joins at once."""
        self._warm = self._mark()
        self._warm_sent = self._population.sent_bytes()
        self._peer_seconds = 0.0
        self.breakdown.clear()

    def rates(self) -> Rates:
        """Since the end of the warm-up."""
        warm, mark, sent = self._warm, self._mark(), self._population.sent_bytes()
        span_s = max(1e-9, mark.at_s - warm.at_s)
        peer_seconds = max(1e-9, self._peer_seconds)
        return Rates(
            (mark.samples - warm.samples) / span_s,
            (mark.bound - warm.bound) / span_s,
            (mark.best - warm.best) / span_s,
            (sent.control - self._warm_sent.control) / peer_seconds,
            (sent.total - self._warm_sent.total) / peer_seconds,
        )

    def _add_sample(self) -> None:
        last, mark, members = self._last, self._mark(), self._monitor.members
        span_s = mark.at_s - last.at_s
        sample = Sample(
            mark.at_s,
            (mark.samples - last.samples) / span_s,
            (mark.bound - last.bound) / span_s,
            (mark.best - last.best) / span_s,
            len(members),
            max((m.peer.gossip.own.round for m in members.values()), default=0),
        )
        self.curve.append(sample)
        self._on_sample(sample)
        self._last = mark

    def _mark(self) -> _Mark:
        samples = self._monitor.num_committed * self._scenario.samples_per_microbatch
        return _Mark(self._monitor.now(), samples, self._bound.total, self._best.total)

    def _capacity(self, host: Host) -> Capacity:
        scenario = self._scenario
        rate = host.speed * scenario.samples_per_microbatch / scenario.service_s
        return Capacity(rate, host.link.up_bytes_per_s, host.link.down_bytes_per_s)


def _costs(scenario: Scenario) -> SampleCosts:
    sizes, coding = scenario.sizes, scenario.coding
    samples, ways = scenario.samples_per_microbatch, scenario.sizes.boundary

    def costs(encoded: str, decoded: str) -> CodingCosts:
        return CodingCosts(
            coding.encode_s(encoded, sizes.activation_numbers) / samples,
            coding.decode_s(decoded, sizes.activation_numbers) / samples,
        )

    return SampleCosts(
        sizes.activation_bytes / samples,
        sizes.gradient_bytes / samples,
        before=costs(encoded=ways.gradients, decoded=ways.activations),
        after=costs(encoded=ways.activations, decoded=ways.gradients),
        is_beside=coding.is_beside,
    )
