"""Which documents are held out: those whose hashes come first.

Hashes are those of a document's tokens, so the choice is the same wherever the document lies, and
the same text is never on both sides. As many documents are taken as it needs for `[data]
held_out_fraction` of all tokens; many that are equal, and would be far more than that, are passed
over. A text that is longer than half of that is cut into blocks, each with a hash of its own: else
one long text would be held out whole or not at all. Dialogues are never cut.

Where that is less than a sample, a document is held out at least, and texts that fit into a sample
are not cut. Runs that were begun before that rule hold out as much as a sample: of few dialogues
that may be half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from swarmnet.training.data.order import mixed
from swarmnet.training.data.store import Store

BINS = 1 << 16
BIN_SHIFT = np.uint64(48)
GOLDEN = 0x9E3779B97F4A7C15
MOST_TIMES = 1.5
"""What is to be held out, at most so many times."""
BLOCKS = 8
"""Of a long text, that together are what is to be held out."""


@dataclass(frozen=True, slots=True)
class Division:
    """Of a store's tokens into those that are trained on and those held out."""

    store: Store
    held: np.ndarray
    """bool, whether hashes in each of `BINS` bins are held out."""
    longest: int = 0
    """Documents of more tokens are cut into blocks; 0: none is."""
    block: int = 0
    """Tokens of a block."""

    def lengths(self, documents: np.ndarray, *, held_out: bool) -> np.ndarray:
        """Tokens of documents that are held out, or that are not; int64."""
        lengths = self.store.lengths(documents)
        is_held = self.held[_bins(self.store.hashes(documents))]
        found = np.where(is_held == held_out, lengths, 0)
        for i in np.flatnonzero(lengths > self.longest) if self.longest else ():
            starts, stops = self._runs(int(documents[i]), int(lengths[i]), held_out=held_out)
            found[i] = (stops - starts).sum()
        return found

    def parts(
        self, document: int, *, held_out: bool, skipped: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Where in the store's tokens these are, from and to, without the first `skipped`."""
        index = np.asarray([document], np.int64)
        start, length = int(self.store.starts(index)[0]), int(self.store.lengths(index)[0])
        if not self.longest or length <= self.longest:
            if skipped < length and self.held[_bins(self.store.hashes(index))[0]] == held_out:
                yield start + skipped, start + length
            return
        starts, stops = self._runs(document, length, held_out=held_out)
        ends = np.cumsum(stops - starts)
        for k in range(int(np.searchsorted(ends, skipped, side="right")), len(ends)):
            first, stop = int(starts[k]), int(stops[k])
            yield start + max(first, stop - (int(ends[k]) - skipped)), start + stop

    def _runs(self, document: int, length: int, *, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        """Where in a long document these are, from and to; int64."""
        hashes = self.store.hashes(np.asarray([document], np.int64))
        bins = _bins(_block_hashes(hashes, -(-length // self.block)))
        is_in = np.pad(self.held[bins] == held_out, 1)
        edges = np.minimum(np.flatnonzero(is_in[1:] != is_in[:-1]) * self.block, length)
        return edges[::2], edges[1::2]


def is_less_than_sample(store: Store, fraction: float, sequence_length: int) -> bool:
    """Whether a part of the store's tokens is fewer than a sample takes."""
    return 0 < math.ceil(store.about.num_tokens * fraction) < sequence_length + 1


def divide(store: Store, fraction: float, sequence_length: int, *, holds_samples: bool) -> Division:
    """Holds out a part of the store's tokens; none where `fraction` is 0. `holds_samples`: as much
    as a sample at least."""
    total, sample = store.about.num_tokens, sequence_length + 1
    if fraction == 0:
        return Division(store, np.zeros(BINS, bool))
    wanted = math.ceil(total * fraction)
    is_nearest = wanted < sample and not holds_samples
    if is_nearest:
        longest, block = sample, wanted
    else:
        wanted = max(wanted, sample)
        longest, block = max(wanted // 2, 1), max(wanted // BLOCKS, sample)
    longest = 0 if store.about.is_dialogues else longest
    tokens_of_bin = np.zeros(BINS, np.int64)
    for documents in store.chunks():
        lengths, hashes = store.lengths(documents), store.hashes(documents)
        is_long = lengths > longest if longest else np.zeros(len(lengths), bool)
        _add(tokens_of_bin, hashes[~is_long], lengths[~is_long])
        for i in np.flatnonzero(is_long):
            num_blocks = -(-int(lengths[i]) // block)
            sizes = np.full(num_blocks, block, np.int64)
            sizes[-1] = int(lengths[i]) - block * (num_blocks - 1)
            _add(tokens_of_bin, _block_hashes(hashes[i : i + 1], num_blocks), sizes)
    chosen = _chosen(tokens_of_bin, wanted, is_nearest=is_nearest)
    return Division(store, chosen, longest, block)


def _chosen(tokens_of_bin: np.ndarray, wanted: int, *, is_nearest: bool) -> np.ndarray:
    """The first bins that have as many tokens together as wanted, and not far more; or as near to
    it as whole bins come. Bool."""
    held = np.zeros(BINS, bool)
    filled = np.flatnonzero(tokens_of_bin)
    total = 0
    for k in filled.tolist():
        size = int(tokens_of_bin[k])
        most = 2 * wanted - total if is_nearest else MOST_TIMES * wanted
        if total + size <= most:
            held[k] = True
            total += size
        if total >= wanted:
            break
    if not total and len(filled) > 1:
        held[filled[np.argmin(tokens_of_bin[filled])]] = True
    return held


def _add(tokens_of_bin: np.ndarray, hashes: np.ndarray, lengths: np.ndarray) -> None:
    np.add.at(tokens_of_bin, _bins(hashes), lengths)


def _bins(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> BIN_SHIFT).astype(np.int64)


def _block_hashes(document: np.ndarray, num_blocks: int) -> np.ndarray:
    """Hashes of the blocks of a document, of its own (one uint64) and their numbers."""
    numbers = np.arange(1, num_blocks + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return mixed(document + numbers)
