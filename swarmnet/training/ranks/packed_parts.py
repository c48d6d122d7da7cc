"""Weights in few bits that ranks share. Their scales are of whole rows, and of nf4 of blocks of the
whole matrix: so a matrix comes whole to the host, is packed as one rank would, and a rank keeps its
part of that."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.training.models.base import ModelPlan, described
from swarmnet.training.models.frozen import FrozenLinear
from swarmnet.training.models.packing import NF4, NF4_BLOCK, Packed, PackedPart
from swarmnet.training.ranks.cuts import Cut


def packed_part(packed: Packed, cut: Cut, device: torch.device) -> PackedPart:
    """What a rank holds of a packed matrix, on its device."""

    def of(tensor: Tensor, num_columns: int) -> Tensor:
        if cut.dim == 0:
            return cut.of(tensor).reshape(-1, tensor.shape[1])
        if not num_columns:
            return tensor
        return tensor[:, cut.start // num_columns : cut.stop // num_columns]

    return packed.by_row().with_parts(of).to(device)


class GatheredRows:
    """A packed matrix of which each rank keeps some rows, and has all of them for each use."""

    def __init__(self, packed: Packed, cut: Cut, num_rows: int, device: torch.device) -> None:
        """`cut`: this rank's rows of `num_rows`, as `torch.chunk` cuts."""
        _leave_uncompiled()
        self._part = packed_part(packed, cut, device)
        self._num_rows = num_rows

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """(num_rows, columns). A collective."""
        return self._part.with_parts(lambda tensor, _: self._whole(tensor)).unpacked(dtype)

    @property
    def num_bytes(self) -> int:
        """That it takes between two uses."""
        return self._part.num_bytes

    def _whole(self, rows: Tensor) -> Tensor:
        num_ranks = dist.get_world_size()
        padded = rows.new_zeros((-(-self._num_rows // num_ranks), rows.shape[1]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(num_ranks)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)[: self._num_rows]


@functools.cache
def _leave_uncompiled() -> None:
    """As `Packed`: all ranks make the same collectives in the order of the code."""
    GatheredRows.unpacked = torch.compiler.disable(GatheredRows.unpacked)  # type: ignore[method-assign]


def check_packed(plan: ModelPlan, columns: Callable[[str, tuple[int, int]], list[int]]) -> None:
    """Raises `SpecError` where a block of nf4 would be of two ranks. `columns`: from the name and
    shape of a weight, where ranks begin to have some of its columns."""
    for layer, module in zip(plan.layers, described(plan.layers), strict=True):
        for name, part in module.named_modules():
            if not isinstance(part, FrozenLinear) or part.packing != NF4:
                continue
            shape = part.out_features, part.in_features
            ends = [part.in_features, *columns(f"{layer.name}.{name}.weight", shape)]
            if any(end % NF4_BLOCK for end in ends):
                raise SpecError(
                    f"[lora] base_dtype nf4 has a scale for {NF4_BLOCK} inputs, and those of "
                    f"{layer.name}.{name} ({part.in_features}) cannot be shared out so"
                )
