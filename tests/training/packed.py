"""Text with documents and targets without a loss, for tests: as packed dialogues would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from swarmnet.batch import IGNORED, Batch, Documents
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.wire import Array


@dataclass
class PackedData:
    """The samples of other data. `masked(index)`: the part of a sample's targets that are taken
    out. `has_documents`: each sample is cut into some, whose last targets have no loss."""

    inner: Any
    masked: Callable[[int], float]
    has_documents: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def microbatch(self, indices: Sequence[int]) -> Batch:
        return self._packed(self.inner.microbatch(indices), indices)

    def held_out(self, index: int) -> Batch:
        size = self.inner.samples_per_microbatch
        indices = range(10_000 + index * size, 10_000 + (index + 1) * size)
        return self._packed(self.inner.held_out(index), indices)

    def _packed(self, batch: Batch, indices: Sequence[int]) -> Batch:
        targets, documents = to_tensor(batch.targets).clone(), []
        for row, index in zip(targets, indices, strict=True):
            generator = torch.Generator().manual_seed(index)
            row[torch.rand(len(row), generator=generator) < self.masked(index)] = IGNORED
            lengths = lengths_of(len(row), index)
            documents.append(lengths)
            if self.has_documents:
                row[torch.tensor(lengths).cumsum(0) - 1] = IGNORED
        told = tuple(documents) if self.has_documents else None
        return Batch(batch.inputs, from_tensor(targets), told)


def lengths_of(total: int, seed: int) -> tuple[int, ...]:
    """Documents that fill a sample: one to four of any length."""
    rng = Random(seed)
    ends = sorted({total, *(rng.randint(1, total) for _ in range(rng.randrange(4)))})
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


def tokens(shape: tuple[int, ...], vocabulary: int, seed: int) -> Array:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return from_tensor(torch.randint(vocabulary, shape, generator=generator, dtype=torch.int32))


def document(array: Array, documents: Documents, sample: int, k: int) -> Array:
    """The k-th document of a sample of inputs or targets, as a batch of its own."""
    start = sum(documents[sample][:k])
    stop = start + documents[sample][k]
    return from_tensor(to_tensor(array)[sample : sample + 1, start:stop])
