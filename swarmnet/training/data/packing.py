"""Samples out of documents.

Text: documents follow each other in one row, and the row is cut into samples, so that no place is
left empty but the end of the last one. Dialogues: each stays whole, and a sample has as many as
follow each other and fit into it; the rest of it is empty. What is empty has no loss.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np

from swarmnet.batch import IGNORED
from swarmnet.training.data.held_out import Division
from swarmnet.training.data.order import Permutation
from swarmnet.training.data.store import numbers_to

STRIDE = 64
"""Documents between two whose place in a row is remembered."""
KEPT_STRIDES = 1024
"""Whose documents are remembered once they were asked for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample."""

    inputs: np.ndarray
    """int32 (sequence length)."""
    targets: np.ndarray
    """Likewise; `IGNORED` where no loss is."""
    documents: tuple[int, ...]
    """Lengths of the documents in it, or parts of them; what is empty counts as one."""


class Samples(Protocol):
    """The samples of one source."""

    num_samples: int
    num_tokens: int
    """That its documents have."""

    def sample(self, index: int) -> Sample: ...


class Documents:
    """The training documents of a store, or the held-out ones, in the order of a seed. Documents of
    the other kind have length 0 here."""

    def __init__(self, division: Division, seed: int, *, held_out: bool) -> None:
        self.division = division
        self.held_out = held_out
        self.size = division.store.about.num_documents
        self._order = Permutation(seed, self.size) if self.size else None

        self.stride = lru_cache(KEPT_STRIDES)(self._stride)
        """(numbers, lengths) of the documents of a stride, by its number."""

    def between(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(numbers, lengths) of those at positions `first` to `last` - 1."""
        return self._at(np.arange(first, min(last, self.size), dtype=np.int64))

    def _stride(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return self.between(number * STRIDE, (number + 1) * STRIDE)

    def all(self) -> Iterator[np.ndarray]:
        """Lengths of all, in order, some at a time."""
        for positions in numbers_to(self.size):
            yield self._at(positions)[1]

    def parts(self, document: int, skipped: int = 0) -> Iterator[tuple[int, int]]:
        """As `Division.parts`."""
        return self.division.parts(document, held_out=self.held_out, skipped=skipped)

    def end(self, document: int) -> int:
        """Where in the store's tokens a document ends."""
        return self.division.store.end(document)

    def _at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = self._order.at(positions) if self._order is not None else positions
        return numbers, self.division.lengths(numbers, held_out=self.held_out)


class TextSamples:
    """Of documents of text, in one row. The last sample may be filled up."""

    def __init__(self, documents: Documents, length: int, fill: int, *, masks: bool) -> None:
        """`length`: of a sample. `fill`: the token in empty places. `masks`: no target is in
        another document than its input."""
        self._documents = documents
        self._length = length
        self._fill = fill
        self._masks = masks
        marks = [np.zeros(1, np.int64)]
        total = 0
        for lengths in documents.all():
            ends = total + np.cumsum(lengths)
            marks.append(ends[STRIDE - 1 :: STRIDE])
            total = int(ends[-1])
        self._marks = np.concatenate(marks)
        """Place in the row of every `STRIDE`th document."""
        self.num_tokens = total
        self.num_samples = max(-(-(total - 1) // length), 0)

    def sample(self, index: int) -> Sample:
        length = self._length
        parts = list(self._parts(index * length, length + 1))
        tokens = self._documents.division.store.tokens
        row = np.concatenate([tokens[start:stop] for start, stop, _ in parts]).astype(np.int32)
        inputs = np.full(length, self._fill, np.int32)
        targets = np.full(length, IGNORED, np.int32)
        inputs[: len(row) - 1], targets[: len(row) - 1] = row[:-1], row[1:]
        ends = np.cumsum([stop - start for start, stop, _ in parts])[:-1]
        is_last = np.asarray([is_last for _, _, is_last in parts[:-1]], bool)
        targets[(ends if self._masks else ends[~is_last]) - 1] = IGNORED
        edges = sorted({0, *ends.tolist(), len(row) - 1, length})
        return Sample(inputs, targets, tuple(b - a for a, b in pairwise(edges)))

    def _parts(self, start: int, wanted: int) -> Iterator[tuple[int, int, bool]]:
        """Where in the store the tokens from a place of the row on are, from and to, and whether
        the document ends there. Where it goes on elsewhere, what follows here is another text."""
        mark = int(np.searchsorted(self._marks, start, side="right")) - 1
        place = int(self._marks[mark])
        while wanted and mark * STRIDE < self._documents.size:
            numbers, lengths = self._documents.stride(mark)
            ends = place + np.cumsum(lengths)
            for i in range(int(np.searchsorted(ends, start, side="right")), len(ends)):
                if not lengths[i]:
                    continue
                number = int(numbers[i])
                end = self._documents.end(number)
                skipped = max(start - int(ends[i] - lengths[i]), 0)
                for first, last in self._documents.parts(number, skipped):
                    stop = min(last, first + wanted)
                    yield first, stop, stop == end
                    wanted -= stop - first
                    if not wanted:
                        return
            place = int(ends[-1])
            mark += 1


class DialogueSamples:
    """Of dialogues, none of which is longer than a sample."""

    def __init__(self, documents: Documents, length: int, fill: int) -> None:
        self._documents = documents
        self._length = length
        self._fill = fill
        first, room, position = array("q"), 0, 0
        self.num_tokens = 0
        for lengths in documents.all():
            self.num_tokens += int(lengths.sum())
            for size in lengths.tolist():
                if size > room:
                    first.append(position)
                    room = length
                room -= size
                position += 1
        self._first = np.frombuffer(first, np.int64) if first else np.empty(0, np.int64)
        self.num_samples = len(first)

    def sample(self, index: int) -> Sample:
        first = int(self._first[index])
        last = self._documents.size
        if index + 1 < self.num_samples:
            last = int(self._first[index + 1])
        numbers, lengths = self._documents.between(first, last)
        store = self._documents.division.store
        inputs = np.full(self._length, self._fill, np.int32)
        targets = np.full(self._length, IGNORED, np.int32)
        place, sizes = 0, []
        for number in numbers[lengths > 0].tolist():
            ((start, stop),) = self._documents.parts(number)
            size = stop - start
            ids = store.tokens[start:stop].astype(np.int32)
            inputs[place : place + size] = ids
            learned = np.where(store.learned[start + 1 : stop], ids[1:], IGNORED)
            targets[place : place + size - 1] = learned
            place += size
            sizes.append(size)
        if place < self._length:
            sizes.append(self._length - place)
        return Sample(inputs, targets, tuple(sizes))
