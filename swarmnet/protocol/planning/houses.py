"""What the stages of a plan do to each other where machines share links.

Machines of a house share its link and reach each other by a fast one. A microbatch goes to a
replica of the next stage as often as that is fast, wherever it is: so of what a replica sends, that
part stays in the house which the house has of the next stage. What crosses loads the link for all
stages there together. A house whose stages are neighbours sends little, and one with every second
stage much: which machine takes which stage decides (DT-FM, Yuan et al. 2022, arXiv 2206.01288).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from swarmnet.protocol.planning.flow import link_bytes

Bytes: TypeAlias = tuple[float, float]
"""Of a sample at a boundary of two stages: of its activation, of the gradient that comes back."""

INSIDE_BYTES_PER_S = 125e6
"""Between two machines of a house, assumed: 1 Gbit/s. Without it what stays in a house is for
nothing (tests/protocol/planning/test_cost.py)."""
INSIDE_LATENCY_S = 0.001
"""Likewise, one way (tests/protocol/planning/test_cost.py)."""
LOOKS_AT_HOUSES = 3
"""What crosses a link depends on which replicas get how much, and that on what links carry."""


@dataclass(frozen=True, slots=True)
class AtHome:
    """The replicas of a stage in one house."""

    house: str
    replicas: int
    compute: float
    """Samples/s."""
    slowest: float
    """Of one of them."""
    up_bytes_per_s: float
    """Of the whole house."""
    down_bytes_per_s: float
    exchanged: Bytes = (0.0, 0.0)
    """Over the link in a round, up and down."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Of a stage, what depends on the other ones."""

    homes: tuple[AtHome, ...]
    flow: float
    """Of those that are in no house, samples/s."""
    slowest: float
    """Of one of these."""
    before: Bytes | None
    after: Bytes | None
    """None where there is no such stage."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Of a stage, what its links carry beside those of the others."""

    flow: float
    slowest: float
    crossing: dict[str, Bytes]
    """By house: bytes up and down for a sample there."""
    parts: dict[str, float]
    """Of the stage's samples, those of each house."""


def carried_together(stages: Sequence[Sharing]) -> list[Carried]:
    """All stages in order. The link of a house is divided so that its stages get on at one rate."""
    flows = [{h.house: h.compute for h in s.homes} for s in stages]
    crossing: list[dict[str, Bytes]] = []
    for _ in range(LOOKS_AT_HOUSES):
        totals = [s.flow + sum(f.values()) for s, f in zip(stages, flows, strict=True)]
        parts = _parts(flows, totals)
        swarm = min(totals)
        crossing = [_crossing(s, parts, k) for k, s in enumerate(stages)]
        up: dict[str, float] = defaultdict(float)
        down: dict[str, float] = defaultdict(float)
        for f, total, bytes_of in zip(flows, totals, crossing, strict=True):
            for house, (sent, received) in bytes_of.items():
                up[house] += f[house] * swarm / total * sent
                down[house] += f[house] * swarm / total * received
        flows = [
            {
                h.house: _limited(
                    h, f[h.house] * swarm / total, s, bytes_of[h.house], up[h.house], down[h.house]
                )
                for h in s.homes
            }
            for s, f, total, bytes_of in zip(stages, flows, totals, crossing, strict=True)
        ]
    totals = [s.flow + sum(f.values()) for s, f in zip(stages, flows, strict=True)]
    parts = _parts(flows, totals)
    return [
        Carried(
            total,
            min([s.slowest, *(h.slowest * f[h.house] / h.compute for h in s.homes)]),
            _crossing(s, parts, k),
            parts[k],
        )
        for k, (s, f, total) in enumerate(zip(stages, flows, totals, strict=True))
    ]


def ways_inside(stages: Sequence[Carried]) -> list[float]:
    """Between each two stages in order, the part of the ways that stay in a house."""
    return [
        sum(part * b.parts.get(house, 0.0) for house, part in a.parts.items())
        for a, b in pairwise(stages)
    ]


def exchange_s(stages: Sequence[Sharing]) -> float:
    """Until every house has exchanged what all its stages do over its link."""
    took: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for s in stages:
        for h in s.homes:
            took[h.house][0] += h.exchanged[0] / h.up_bytes_per_s
            took[h.house][1] += h.exchanged[1] / h.down_bytes_per_s
    return max((max(x) for x in took.values()), default=0.0)


def _parts(flows: Sequence[dict[str, float]], totals: Sequence[float]) -> list[dict[str, float]]:
    return [
        {house: rate / total for house, rate in f.items()}
        for f, total in zip(flows, totals, strict=True)
    ]


def _crossing(stage: Sharing, parts: Sequence[dict[str, float]], k: int) -> dict[str, Bytes]:
    found = {}
    for h in stage.homes:
        sent = received = 0.0
        if stage.after is not None:
            leaves = 1 - parts[k + 1].get(h.house, 0.0)
            sent += leaves * stage.after[0]
            received += leaves * stage.after[1]
        if stage.before is not None:
            comes = 1 - parts[k - 1].get(h.house, 0.0)
            sent += comes * stage.before[1]
            received += comes * stage.before[0]
        found[h.house] = sent, received
    return found


def _limited(
    home: AtHome,
    wanted: float,
    stage: Sharing,
    crossing: Bytes,
    up: float,
    down: float,
) -> float:
    """Samples/s there. `up`, `down`: bytes/s over the link, where each home of it does what it is
    `wanted` to do."""
    rate, (sent, received) = home.compute, crossing
    if sent:
        rate = min(rate, wanted * home.up_bytes_per_s / up)
    if received:
        rate = min(rate, wanted * home.down_bytes_per_s / down)
    all_sent, all_received = link_bytes(stage.before, stage.after)
    inside = max(all_sent - sent, all_received - received)
    return min(rate, home.replicas * INSIDE_BYTES_PER_S / inside) if inside > 0 else rate
