"""Which part of a parameter a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Sharing = Literal["own", "same", "partial", "absent"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that a rank holds: [start, stop) of dimension `dim`."""

    dim: int
    start: int
    stop: int
    sharing: Sharing
    """Of its gradient. "own": no other rank holds this part. "same": all ranks compute the whole
    gradient, so that one of them may keep it. "partial": the gradient is the sum over ranks.
    "absent": another rank holds it, and this one computes without."""
    packs: int = 1
    """The dimension is so many equal parts one behind the other, such as a gate and what it gates,
    and [start, stop) is of each of them."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part, a view: (..., stop - start, ...), or (..., packs, stop - start, ...)."""
        if self.packs == 1:
            return tensor.narrow(self.dim, self.start, self.stop - self.start)
        parts = tensor.unflatten(self.dim, (self.packs, -1))
        return parts.narrow(self.dim + 1, self.start, self.stop - self.start)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of what the rank computes with."""
        size = self.packs * (self.stop - self.start)
        return tuple(size if dim == self.dim else n for dim, n in enumerate(whole))

    def num_elements(self, whole: Sequence[int]) -> int:
        return math.prod(self.shape(whole))

    def put(self, part: Tensor, whole: Sequence[int], first: int, values: Tensor) -> None:
        """Writes what this rank holds of some elements of the parameter.

        Args:
            part: what the rank holds, of `shape(whole)`.
            whole: shape of the parameter.
            first: of the elements, in row-major order.
            values: the elements, one after the other.
        """
        size, inner = whole[self.dim], math.prod(whole[self.dim + 1 :])
        place = torch.full((self.packs, size // self.packs), -1)
        place[:, self.start : self.stop] = torch.arange(self.packs * (self.stop - self.start)).view(
            self.packs, -1
        )
        index = torch.arange(first, first + values.numel())
        at = place.view(-1)[index // inner % size]
        is_here = at >= 0
        outer = index // (inner * size)
        held = self.packs * (self.stop - self.start)
        target = ((outer * held + at) * inner + index % inner)[is_here].to(part.device)
        part.view(-1)[target] = values[is_here].to(part.device, part.dtype)


class Cutting(Protocol):
    """How a model is cut."""

    def cut(
        self,
        name: str,
        shape: Sequence[int],
        rank: int,
        num_ranks: int,
        *,
        sequence_parallel: bool = False,
    ) -> Cut:
        """What rank `rank` holds of the parameter with this (Hugging Face) name and shape."""
        ...


def part_of(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """[start, stop) of a rank; sizes differ by one at most."""
    return size * rank // num_ranks, size * (rank + 1) // num_ranks
