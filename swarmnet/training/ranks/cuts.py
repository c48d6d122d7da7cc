"""Which part of a parameter a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    within: Cut | None = None
    """All this is of that part of the parameter, which is cut in another dimension."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part, a view: (..., stop - start, ...), or (..., packs, stop - start, ...)."""
        dim = self.dim
        if self.within is not None:
            tensor = self.within.of(tensor)
            dim += self.within.packs > 1 and self.within.dim < dim
        if self.packs == 1:
            return tensor.narrow(dim, self.start, self.stop - self.start)
        parts = tensor.unflatten(dim, (self.packs, -1))
        return parts.narrow(dim + 1, self.start, self.stop - self.start)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of what the rank computes with."""
        if self.within is not None:
            whole = self.within.shape(whole)
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
        target = self._places(torch.arange(first, first + values.numel()), whole)
        is_here = target >= 0
        part.view(-1)[target[is_here].to(part.device)] = values[is_here].to(part.device, part.dtype)

    def _places(self, index: Tensor, whole: Sequence[int]) -> Tensor:
        """Where in the part the elements of these numbers lie; -1 for those that do not."""
        is_here = torch.ones_like(index, dtype=torch.bool)
        if self.within is not None:
            index = self.within._places(index, whole)  # noqa: SLF001  of another one of these
            whole, is_here = self.within.shape(whole), index >= 0
        size, inner = whole[self.dim], math.prod(whole[self.dim + 1 :])
        held = self.packs * (self.stop - self.start)
        place = torch.full((self.packs, size // self.packs), -1)
        place[:, self.start : self.stop] = torch.arange(held).view(self.packs, -1)
        at = place.view(-1)[index // inner % size]
        target = (index // (inner * size) * held + at) * inner + index % inner
        return torch.where(is_here & (at >= 0), target, -1)


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


@dataclass(frozen=True, slots=True)
class RowsCut:
    """Of ranks in rows: what rows have of a parameter, and of that what the ranks of a row have.
    Ranks are counted row by row."""

    of_rows: Cutting
    in_row: Cutting
    row_size: int

    def cut(
        self,
        name: str,
        shape: Sequence[int],
        rank: int,
        num_ranks: int,
        *,
        sequence_parallel: bool = False,
    ) -> Cut:
        """As `Cutting.cut`; `sequence_parallel`: of what rows share."""
        row, column = divmod(rank, self.row_size)
        outer = self.of_rows.cut(
            name, shape, row, num_ranks // self.row_size, sequence_parallel=sequence_parallel
        )
        inner = self.in_row.cut(name, outer.shape(shape), column, self.row_size)
        sharing = _together(outer.sharing, inner.sharing, row, column)
        is_whole = outer.shape(shape) == tuple(shape)
        assert outer.packs == 1 or inner.dim != outer.dim, f"{name} is cut twice in a dimension"
        return replace(inner, sharing=sharing, within=None if is_whole else outer)


def _together(of_rows: Sharing, in_row: Sharing, row: int, column: int) -> Sharing:
    """Of a gradient: over all ranks, by what it is over rows, and within one."""
    if "absent" in (of_rows, in_row):
        return "absent"
    if in_row == "same":
        # One rank of a row keeps it.
        if column:
            return "same"
        in_row = "own"
    return "partial" if of_rows == "partial" and row else in_row


def in_rows(of_rows: Cutting, in_row: Cutting, row_size: int, num_ranks: int) -> Cutting:
    """Of ranks in rows of so many; of what rows have alone, where there is one row."""
    return of_rows if row_size == num_ranks else RowsCut(of_rows, in_row, row_size)


def part_of(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """[start, stop) of a rank; sizes differ by one at most."""
    return size * rank // num_ranks, size * (rank + 1) // num_ranks
