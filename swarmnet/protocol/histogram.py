"""Durations in few numbers: the counts of a Prometheus histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the ranges, seconds."""


@dataclass(slots=True)
class Histogram:
    """Counts of values by range; the last range has no end."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value; one that equals a bound is within it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(upper end, number of values not above it), the infinite end last."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield bound, total
