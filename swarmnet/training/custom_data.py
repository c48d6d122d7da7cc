"""The data of a custom model, as the swarm takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from swarmnet.batch import Batch
from swarmnet.errors import DataError
from swarmnet.wire import Array


class CustomSamples(Protocol):
    """What a model's builder makes: `ports.Data`, but for a microbatch that may be a pair of
    inputs and targets."""

    samples_per_microbatch: int
    bytes_per_token: float
    num_held_out: int

    @property
    def num_samples(self) -> int | None: ...

    def microbatch(self, indices: Sequence[int]) -> Batch | tuple[Array, Array]: ...

    def held_out(self, index: int) -> Batch | tuple[Array, Array]: ...


class CustomData:
    """Implements `ports.Data`: what a builder's data give becomes a `Batch` here."""

    def __init__(self, samples: CustomSamples) -> None:
        self.samples = samples
        self.samples_per_microbatch = samples.samples_per_microbatch
        self.bytes_per_token = samples.bytes_per_token
        self.num_held_out = samples.num_held_out

    @property
    def num_samples(self) -> int | None:
        return self.samples.num_samples

    def microbatch(self, indices: Sequence[int]) -> Batch:
        """As the port says. Raises `DataError` where the samples are neither of both."""
        return _as_batch(self.samples.microbatch(indices))

    def held_out(self, index: int) -> Batch:
        """As `microbatch`."""
        return _as_batch(self.samples.held_out(index))


def _as_batch(given: Any) -> Batch:
    if isinstance(given, Batch):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        return Batch(*given)
    raise DataError("[model] builder: its data must give inputs and targets, or a Batch")
