"""The samples of a run's sources, trained on and held out; implements `ports.Data`."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmnet.batch import Batch
from swarmnet.ports import SourceSize
from swarmnet.protocol.pipeline.mixing import Mixture
from swarmnet.protocol.slots import permuted
from swarmnet.spec import SourceSpec
from swarmnet.training.arrays import from_numpy
from swarmnet.training.data.encoding import Encoder
from swarmnet.training.data.order import seed_of
from swarmnet.training.data.packing import Sample, Samples
from swarmnet.training.data.store import About, Store


@dataclass(frozen=True, slots=True)
class SourceData:
    """One source."""

    source: SourceSpec
    store: Store
    samples: Samples
    held_out: Samples

    @property
    def about(self) -> About:
        """What its store has."""
        return self.store.about


class TextData:
    """Samples of text. Pure: the same index is the same sample on every machine.

    One source has as many samples as it has; `protocol.slots` puts them into the order of
    an epoch. Of several, the samples are one endless row (`protocol.pipeline.mixing`), and each
    source has its own epochs, in the order of its own seed.
    """

    def __init__(
        self,
        sources: Sequence[SourceData],
        mixture: Mixture,
        encoder: Encoder,
        *,
        seed: int,
        sequence_length: int,
        samples_per_microbatch: int,
        held_out_microbatches: int,
        document_mask: bool = False,
    ) -> None:
        """`mixture`: of those of the sources that are trained on: the first ones."""
        self.sources = tuple(sources)
        self.sequence_length = sequence_length
        self.samples_per_microbatch = samples_per_microbatch
        self.encoder = encoder
        self.num_trained = len(mixture.counts)
        self._mixture = mixture
        self._document_mask = document_mask
        self._trained = self.sources[: self.num_trained]
        self._seeds = [seed_of(seed, "samples", k) for k in range(self.num_trained)]
        if self.num_trained == 1:
            self._seeds = [seed]  # of the whole run's order
        num_bytes = sum(s.about.num_bytes for s in self._trained)
        num_learned = sum(s.about.num_learned for s in self._trained)
        self.bytes_per_token = num_bytes / max(num_learned, 1)
        self._num_held_out = sum(s.held_out.num_samples for s in self.sources)
        fitting = max(self._num_held_out // samples_per_microbatch, 1)
        self.num_held_out = min(held_out_microbatches, fitting) if self._num_held_out else 0

    @property
    def num_samples(self) -> int | None:
        return self._trained[0].samples.num_samples if self.num_trained == 1 else None

    @property
    def num_train_tokens(self) -> int:
        return sum(s.samples.num_tokens for s in self.sources)

    @property
    def num_held_out_tokens(self) -> int:
        return sum(s.held_out.num_tokens for s in self.sources)

    @property
    def fingerprint(self) -> str:
        """32 hex digits of all documents that are trained on, as tokens: who has the same one reads
        the same."""
        return fingerprint_of([s.about.fingerprint for s in self._trained])

    @property
    def held_out_fingerprint(self) -> str:
        """Likewise of data that are only measured on; empty where there are none of their own."""
        own = self.sources[self.num_trained :]
        return fingerprint_of([s.about.fingerprint for s in own]) if own else ""

    def without_held_out(self) -> TextData:
        """These, with nothing to measure on."""
        found = copy.copy(self)
        found.sources, found.num_held_out = self._trained, 0
        return found

    def sizes(self) -> tuple[SourceSize, ...]:
        """As `ports.GivenData`."""
        abouts = [s.about for s in self._trained]
        return tuple(
            SourceSize(a.fingerprint, a.num_documents, a.num_tokens, a.num_bytes) for a in abouts
        )

    def part(self, source: int, file: str, offset: int, length: int) -> bytes | None:
        """As `ports.GivenData`."""
        if not 0 <= source < self.num_trained:
            return None
        return self._trained[source].store.file(f"{file}.bin")[offset : offset + length].tobytes()

    def samples_of(self, epochs: float, source: int) -> int:
        """How many samples of the run hold so many epochs of a source."""
        wanted = math.ceil(epochs * self._trained[source].samples.num_samples)
        return wanted if self.num_samples else self._mixture.length_with(source, wanted)

    def microbatch(self, indices: Sequence[int]) -> Batch:
        return self._batch([self._sample(index) for index in indices])

    def held_out(self, index: int) -> Batch:
        """Samples spread evenly over the held-out ones; they repeat only where those are few."""
        if not 0 <= index < self.num_held_out:
            raise IndexError(f"held-out microbatch {index} of {self.num_held_out}")
        size = self.samples_per_microbatch
        places = range(index * size, (index + 1) * size)
        numbers = [p * self._num_held_out // (self.num_held_out * size) for p in places]
        return self._batch([self._held_out_sample(number) for number in numbers])

    def source_sample(self, source: int, position: int) -> Sample:
        """The sample of a source that comes after `position` others of it."""
        samples = self._trained[source].samples
        epoch, place = divmod(position, samples.num_samples)
        return samples.sample(permuted(self._seeds[source], epoch, place, samples.num_samples))

    def _sample(self, index: int) -> Sample:
        if self.num_samples:
            return self._trained[0].samples.sample(index)
        return self.source_sample(*self._mixture.at(index))

    def _held_out_sample(self, number: int) -> Sample:
        for source in self.sources:
            if number < source.held_out.num_samples:
                return source.held_out.sample(number)
            number -= source.held_out.num_samples
        raise IndexError("a held-out sample that is not there")

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        return Batch(
            from_numpy(np.stack([s.inputs for s in samples])),
            from_numpy(np.stack([s.targets for s in samples])),
            tuple(s.documents for s in samples) if self._document_mask else None,
        )


def fingerprint_of(sources: Sequence[str]) -> str:
    """32 hex digits, of the fingerprints of the sources' stores."""
    return hashlib.blake2b("|".join(sources).encode(), digest_size=16).hexdigest()
