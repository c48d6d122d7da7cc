"""Which positions of a sequence are whose, where several ranks share it.

In a causal model late positions look at many others and early ones at few. So the sequence is cut
into twice as many pieces as there are ranks, and a rank has one from the beginning and the one that
lies as far from the end: all of them have the same work (the zigzag order).
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.training.ranks.cuts import part_of

PIECES = 2
"""Of a sequence that a rank has."""


@dataclass(frozen=True, slots=True)
class Zigzag:
    """A sequence of `length` positions over ranks. Each has two positions at least; sizes of pieces
    differ by one at most."""

    length: int
    num_ranks: int

    def pieces(self, rank: int) -> tuple[slice, slice]:
        """The positions of a rank, an early piece and a late one."""
        num_pieces = PIECES * self.num_ranks
        first, last = (
            slice(*part_of(self.length, i, num_pieces)) for i in (rank, num_pieces - 1 - rank)
        )
        return first, last

    def early(self, rank: int) -> int:
        """Positions in the early piece of a rank."""
        piece, _ = self.pieces(rank)
        return int(piece.stop - piece.start)

    def size(self, rank: int) -> int:
        """Positions of a rank."""
        return sum(piece.stop - piece.start for piece in self.pieces(rank))

    @property
    def largest(self) -> int:
        """Positions of the rank that has most."""
        return max(self.size(rank) for rank in range(self.num_ranks))

    def seen(self, rank: int, other: int) -> tuple[slice, slice]:
        """Which of the queries of `rank` see which of the keys of `other`, counted within what each
        of them has. Every one of these sees every one; for `other == rank`, those not after it."""
        if other < rank:
            return slice(0, self.size(rank)), slice(0, self.early(other))
        if other > rank:
            return slice(self.early(rank), self.size(rank)), slice(0, self.size(other))
        return slice(0, self.size(rank)), slice(0, self.size(rank))

    def positions(self, rank: int) -> list[int]:
        """Of a rank, in order."""
        return [p for piece in self.pieces(rank) for p in range(piece.start, piece.stop)]

    def seen_in_window(self, rank: int, other: int, window: int) -> tuple[slice, slice]:
        """As `seen`, where a position looks back on so many, its own included: the least slices in
        which all that is seen lies. Not all of these see all of those."""
        found = []
        for a, start in self._placed(rank):
            for b, begin in self._placed(other):
                rows = max(a.start, b.start), min(a.stop, b.stop + window - 1)
                columns = max(b.start, a.start - window + 1), min(b.stop, a.stop)
                if rows[0] < rows[1] and columns[0] < columns[1]:
                    found.append(
                        [*(n - a.start + start for n in rows)]
                        + [n - b.start + begin for n in columns]
                    )
        if not found:
            return slice(0, 0), slice(0, 0)
        top, bottom, left, right = zip(*found, strict=True)
        return slice(min(top), max(bottom)), slice(min(left), max(right))

    def _placed(self, rank: int) -> tuple[tuple[slice, int], tuple[slice, int]]:
        """The pieces of a rank, and where they begin within what it has."""
        first, last = self.pieces(rank)
        return (first, 0), (last, self.early(rank))


def most_ranks(length: int) -> int:
    """That a sequence can be cut over."""
    return length // PIECES


def is_long_enough(length: int, num_ranks: int) -> bool:
    """A sequence can be cut over so many ranks."""
    return num_ranks <= most_ranks(length)
