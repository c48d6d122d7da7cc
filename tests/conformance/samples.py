"""The samples of a source, out of its tokens, by the words of `docs/protocol.md`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

IGNORED = -100


def mix(x: int) -> int:
    """The finalizer of splitmix64."""
    x %= 1 << 64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


def permuted(seed: int, epoch: int, position: int, size: int) -> int:
    """What stands at a position of an epoch."""
    digest = blake2b(f"{seed}|{epoch}".encode(), digest_size=32).digest()
    keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]
    h = max(1, math.ceil((size - 1).bit_length() / 2))
    while True:
        left, right = position >> h, position % (1 << h)
        for key in keys:
            left, right = right, left ^ mix(right ^ key) % (1 << h)
        position = left << h | right
        if position < size:
            return position


def seed_of(*parts: object) -> int:
    """A seed for a purpose."""
    text = "|".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Source:
    """Of a run's data, as `data_part` gives them."""

    tokens: np.ndarray
    learned: np.ndarray
    """Empty for text."""
    ends: np.ndarray
    hashes: np.ndarray

    @property
    def is_dialogues(self) -> bool:
        return len(self.learned) > 0

    def bounds(self, document: int) -> tuple[int, int]:
        return int(self.ends[document - 1]) if document else 0, int(self.ends[document])


class Trained:
    """Which tokens of a source are trained on."""

    def __init__(self, source: Source, fraction: float, length: int, *, least: str) -> None:
        self._source = source
        wanted, whole = math.ceil(len(source.tokens) * fraction), length + 1
        is_near = wanted < whole and least == "document"
        if not is_near:
            wanted = max(wanted, whole)
        self.longest: float = whole if is_near else max(wanted // 2, 1)
        self.block = wanted if is_near else max(wanted // 8, whole)
        if fraction == 0:
            self.longest = math.inf
        sizes: dict[int, int] = {}
        for document in range(len(source.ends)):
            for start, stop, bin_ in self.blocks(document):
                sizes[bin_] = sizes.get(bin_, 0) + stop - start
        self.held: set[int] = set()
        if fraction:
            self._hold_out(sizes, wanted, is_near)

    def _hold_out(self, sizes: dict[int, int], wanted: int, is_near: bool) -> None:
        total = 0
        for bin_ in sorted(sizes):
            most = 2 * wanted - total if is_near else 1.5 * wanted
            if total + sizes[bin_] <= most:
                self.held.add(bin_)
                total += sizes[bin_]
            if total >= wanted:
                break
        if not total and len(sizes) > 1:
            self.held.add(min(sorted(sizes), key=lambda bin_: sizes[bin_]))

    def blocks(self, document: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, bin) of what is held out, or not, as a whole."""
        start, stop = self._source.bounds(document)
        of_document = int(self._source.hashes[document])
        if self._source.is_dialogues or stop - start <= self.longest:
            yield start, stop, of_document >> 48
            return
        for n, first in enumerate(range(start, stop, self.block), 1):
            yield (
                first,
                min(first + self.block, stop),
                mix(of_document + n * 0x9E3779B97F4A7C15) >> 48,
            )

    def pieces(self, document: int) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, whether the document ends there) of what is trained on."""
        kept: list[list[int]] = []
        for start, stop, bin_ in self.blocks(document):
            if bin_ in self.held:
                continue
            if kept and kept[-1][1] == start:
                kept[-1][1] = stop
            else:
                kept.append([start, stop])
        end = self._source.bounds(document)[1]
        for start, stop in kept:
            yield start, stop, stop == end


@dataclass(frozen=True)
class Sample:
    inputs: np.ndarray
    targets: np.ndarray
    documents: tuple[int, ...]


def of_text(
    source: Source, trained: Trained, seed: int, length: int, fill: int, *, masks: bool
) -> list[Sample]:
    """All samples of a source of text. `masks`: `[data] document_mask`."""
    number = len(source.ends)
    order = [permuted(seed, 0, i, number) for i in range(number)]
    pieces = [piece for document in order for piece in trained.pieces(document)]
    row = np.concatenate([source.tokens[a:b] for a, b, _ in pieces]).astype(np.int32)
    ends = np.cumsum([b - a for a, b, _ in pieces])
    # No loss where a text goes on elsewhere than here.
    cuts = [int(e) for e, (_, _, is_end) in zip(ends, pieces, strict=True) if masks or not is_end]
    samples = []
    for start in range(0, len(row) - 1, length):
        part = row[start : start + length + 1]
        inputs, targets = np.full(length, fill, np.int32), np.full(length, IGNORED, np.int32)
        inputs[: len(part) - 1], targets[: len(part) - 1] = part[:-1], part[1:]
        for cut in cuts:
            if start < cut < start + len(part):
                targets[cut - start - 1] = IGNORED
        within = [int(e) - start for e in ends if start < e < start + len(part)]
        edges = sorted({0, *within, len(part) - 1, length})
        documents = tuple(b - a for a, b in itertools.pairwise(edges))
        samples.append(Sample(inputs, targets, documents))
    return samples


def of_dialogues(
    source: Source, trained: Trained, seed: int, length: int, fill: int
) -> list[Sample]:
    """All samples of a source of dialogues."""
    number, groups, room = len(source.ends), [], 0
    for i in range(number):
        document = permuted(seed, 0, i, number)
        for start, stop, _ in trained.pieces(document):
            if stop - start > room:
                groups.append([])
                room = length
            room -= stop - start
            groups[-1].append((start, stop))
    return [_of_group(source, group, length, fill) for group in groups]


def _of_group(source: Source, group: Sequence[tuple[int, int]], length: int, fill: int) -> Sample:
    inputs, targets = np.full(length, fill, np.int32), np.full(length, IGNORED, np.int32)
    place, sizes = 0, []
    for start, stop in group:
        ids = source.tokens[start:stop].astype(np.int32)
        inputs[place : place + len(ids)] = ids
        is_learned = source.learned[start + 1 : stop] == 1
        targets[place : place + len(ids) - 1] = np.where(is_learned, ids[1:], IGNORED)
        place += len(ids)
        sizes.append(len(ids))
    if place < length:
        sizes.append(length - place)
    return Sample(inputs, targets, tuple(sizes))
