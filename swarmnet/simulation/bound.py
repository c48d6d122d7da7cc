"""The bound of a simulated swarm's throughput, from its compute and its links: the max-flow of
`protocol.planning.flow`, where a replica's capacity has coding in it too.

Where coding is done beside the device, a machine has two workers: one of them computes, the other
one encodes, and either decodes. Averaging is not charged: the bound is above what any schedule can
reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarmnet.protocol.planning import flow


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one machine."""

    samples_per_s: float
    """That its device computes, forward and backward."""
    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CodingCosts:
    """Seconds of coding for one sample at one boundary, both ways."""

    encode_s: float = 0.0
    decode_s: float = 0.0


NO_COSTS = CodingCosts()


@dataclass(frozen=True, slots=True)
class SampleCosts:
    """Of one sample at a boundary between two stages."""

    activation: float
    """Bytes."""
    gradient: float
    """Bytes, on the way back."""
    before: CodingCosts = NO_COSTS
    """Where the boundary is before a stage."""
    after: CodingCosts = NO_COSTS
    """Where it is after one."""
    is_beside: bool = False
    """Coding is done beside the device."""


def replica_rate(
    machine: Capacity, stage_index: int, num_stages: int, per_sample: SampleCosts
) -> float:
    """Samples/s through one replica. The first stage has its data locally."""
    has_before, has_after = stage_index > 0, stage_index < num_stages - 1
    boundary = per_sample.activation, per_sample.gradient
    carries = flow.link_bytes(boundary if has_before else None, boundary if has_after else None)
    before, after = per_sample.before, per_sample.after
    encode_s = has_before * before.encode_s + has_after * after.encode_s
    decode_s = has_before * before.decode_s + has_after * after.decode_s
    rate = machine.samples_per_s
    if encode_s or decode_s:
        compute_s = 1.0 / rate
        all_s = compute_s + encode_s + decode_s
        rate = 1.0 / (max(compute_s, encode_s, all_s / 2) if per_sample.is_beside else all_s)
    return flow.carried(rate, carries, (machine.up_bytes_per_s, machine.down_bytes_per_s))


def max_flow(
    machines: Iterable[tuple[int, Capacity]], num_stages: int, per_sample: SampleCosts
) -> float:
    """Samples/s of a swarm of pairs (stage, machine that serves it)."""
    rates: list[list[float]] = [[] for _ in range(num_stages)]
    for stage_index, machine in machines:
        rates[stage_index].append(replica_rate(machine, stage_index, num_stages, per_sample))
    return flow.max_flow([flow.flow_of(of_stage) for of_stage in rates])


def best_flow(machines: Sequence[Capacity], num_stages: int, per_sample: SampleCosts) -> float:
    """Samples/s that no assignment of the machines to stages exceeds: as if each could divide its
    time among the stages, at its rate in the easiest one."""
    if len(machines) < num_stages:
        return 0.0
    edge = (
        max(
            replica_rate(m, s, num_stages, per_sample) for s in (0, num_stages // 2, num_stages - 1)
        )
        for m in machines
    )
    return sum(edge) / num_stages


@dataclass
class Integral:
    """A rate that changes at instants, summed over time."""

    total: float = 0.0
    _rate: float = 0.0
    _since: float = field(default=0.0)

    def set(self, rate: float, now: float) -> None:
        """The rate from now on."""
        self.total += self._rate * (now - self._since)
        self._rate = rate
        self._since = now
