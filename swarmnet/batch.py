"""A microbatch as its data give it: tokens, targets, and the documents that share a sample.

*Tokens* of a microbatch are its targets that have a loss, wherever tokens are counted: in receipts,
in records, as the weight of a gradient sum. Slots say how far a round is, and never tokens: those
may be 0, of a microbatch without any target that has a loss."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from swarmnet.errors import ProtocolViolation
from swarmnet.wire import Array

IGNORED = -100
"""A target without a loss."""
MAX_DOCUMENTS = 1 << 16
"""Of a microbatch."""

Documents = tuple[tuple[int, ...], ...]
"""For each sample the lengths of the documents in it, or of pieces of them, in their order."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Training samples or held-out ones."""

    inputs: Array
    """(samples, *shape of one sample); of a language model int32 (samples, length)."""
    targets: Array
    """Likewise; int32 ones may be `IGNORED`, where the model takes that."""
    documents: Documents | None = None
    """Where attention and positions stay inside a document: lengths that add up to that of each
    sample. None where a sample is one piece."""

    @property
    def arrays(self) -> tuple[Array, Array]:
        """Inputs and targets, as they travel."""
        return self.inputs, self.targets


def check_lengths(documents: Documents) -> None:
    """Raises `ValueError` unless these can be the documents of samples of some length."""
    if sum(map(len, documents)) > MAX_DOCUMENTS:
        raise ValueError(f"more than {MAX_DOCUMENTS} documents in a microbatch")
    if any(n <= 0 for sample in documents for n in sample):
        raise ValueError("a document without tokens")
    if len({sum(sample) for sample in documents}) > 1:
        raise ValueError("samples of different lengths")


def check_documents(documents: Documents, num_samples: int, length: int) -> None:
    """Raises `ProtocolViolation` unless documents fill so many samples of this length."""
    if len(documents) != num_samples:
        raise ProtocolViolation(f"documents of {len(documents)} samples instead of {num_samples}")
    try:
        check_lengths(documents)
    except ValueError as error:
        raise ProtocolViolation(str(error)) from None
    if sum(documents[0]) != length:
        raise ProtocolViolation(f"documents of {sum(documents[0])} tokens instead of {length}")


def num_wanted(targets: Array) -> int:
    """Targets that are not `IGNORED`."""
    total = math.prod(targets.shape)
    if targets.dtype != "int32":
        return total
    numbers = array("i")
    numbers.frombytes(memoryview(targets.data).cast("B"))
    return total - numbers.count(IGNORED)
