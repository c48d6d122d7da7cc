"""Which source each sample of a mixture comes from.

The endless row of samples repeats a pattern of `PATTERN` places. In the pattern every source has
its share, rounded to whole samples. So any `PATTERN` consecutive samples hold the same number of
each source, and its share is exact to one sample. Within the pattern, sources take turns as evenly
as they can: each place goes, among the sources that are not ahead of their share, to the one whose
next sample is due first (Tijdeman, "The chairman assignment problem", 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PATTERN = 1000


def check_weights(weights: Sequence[float]) -> None:
    """Raises `ValueError` where a source would get no sample."""
    if min(counts_of(weights)) < 1:
        raise ValueError(f"weight: a source must have at least 1 of {PATTERN} samples")


def counts_of(weights: Sequence[float]) -> list[int]:
    """Samples of each source among `PATTERN`, by largest remainders."""
    total = sum(weights)
    exact = [PATTERN * weight / total for weight in weights]
    counts = [int(x) for x in exact]
    by_rest = sorted(range(len(weights)), key=lambda k: (counts[k] - exact[k], k))
    for k in by_rest[: PATTERN - sum(counts)]:
        counts[k] += 1
    return counts


@dataclass(frozen=True, slots=True)
class Mixture:
    """Of sources with some number of samples each among `PATTERN`."""

    counts: tuple[int, ...]
    sources: tuple[int, ...]
    """The source of each place of the pattern."""
    ranks: tuple[int, ...]
    """How many of the same source come before it in the pattern."""

    @classmethod
    def of(cls, weights: Sequence[float]) -> Mixture:
        """Raises `ValueError` where a source would get no sample."""
        check_weights(weights)
        counts = counts_of(weights)
        taken = [0] * len(counts)
        sources, ranks = [], []
        for place in range(PATTERN):
            # The next sample of a source may not come before it is due, and comes before the one
            # after it is: in places of the pattern, from taken/share to (taken + 1)/share.
            due = [k for k, count in enumerate(counts) if taken[k] * PATTERN < (place + 1) * count]
            k = min(due, key=lambda k: ((taken[k] + 1) / counts[k], k))
            sources.append(k)
            ranks.append(taken[k])
            taken[k] += 1
        return cls(tuple(counts), tuple(sources), tuple(ranks))

    def at(self, position: int) -> tuple[int, int]:
        """The source of a sample of the row, and how many of that source came before it."""
        period, place = divmod(position, PATTERN)
        source = self.sources[place]
        return source, period * self.counts[source] + self.ranks[place]

    def length_with(self, source: int, num_samples: int) -> int:
        """The shortest beginning of the row that has so many samples of a source."""
        if num_samples <= 0:
            return 0
        period, rest = divmod(num_samples - 1, self.counts[source])
        places = [place for place, k in enumerate(self.sources) if k == source]
        return period * PATTERN + places[rest] + 1
