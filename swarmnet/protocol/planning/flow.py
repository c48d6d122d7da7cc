"""What passes a replica, a stage and a swarm, in samples a second.

A microbatch passes one replica of every stage. A replica is a node with a capacity: the rate at
which it computes, limited by the rate at which its link carries activations and their gradients in
and out. Any replica can send to any replica of the next stage and the core of the network is
unlimited. So the graph between two stages is complete, every minimum cut lies in the nodes of a
single stage, and the maximum flow is the least over the stages of the sum of their capacities (Ford
and Fulkerson 1956; the criterion of SWARM, Ryabinin et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

IN_FLIGHT_PER_REPLICA = 2.5
"""Microbatches in flight for each replica of a small swarm: one that it works on, one on its way,
and a reserve because they arrive at random times."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one machine at one stage, samples a second."""

    compute: float
    flow: float
    """Limited by its link."""


def link_bytes(
    before: tuple[float, float] | None, after: tuple[float, float] | None
) -> tuple[float, float]:
    """(sent, received) of a stage for one sample. `before`, `after`: bytes of an activation and of
    its gradient at the boundaries of the stage; None where there is no neighbour. A middle stage
    receives an activation and a gradient for each sample and sends as much."""
    sent = received = 0.0
    if after is not None:
        sent += after[0]
        received += after[1]
    if before is not None:
        sent += before[1]
        received += before[0]
    return sent, received


def carried(
    samples_per_s: float,
    carries: tuple[float, float],
    link: tuple[float, float],
) -> float:
    """Samples/s through a replica that computes `samples_per_s`. `carries`: bytes (sent, received)
    for a sample; `link`: bytes/s (up, down)."""
    for num_bytes, bytes_per_s in zip(carries, link, strict=True):
        if num_bytes:
            samples_per_s = min(samples_per_s, bytes_per_s / num_bytes)
    return samples_per_s


def flow_of(rates: Iterable[float]) -> float:
    """Of a stage, whose replicas have these."""
    return sum(rates)


def max_flow(stages: Sequence[float]) -> float:
    """Of a swarm, whose stages have these."""
    return min(stages)
