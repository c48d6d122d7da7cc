"""Dropout where a rank has a part of a tensor: what one rank would leave out of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class PartDropout(nn.Module):
    """All ranks draw for the whole tensor, by the same seed."""

    def __init__(self, p: float, dim: int, place: Callable[[int], tuple[int, int]]) -> None:
        """
        Args:
            p: probability of an element to be left out.
            dim: of which a rank has a part.
            place: from the size of the part to that of the whole, and where the part begins.
        """
        super().__init__()
        self._p = p
        self._dim = dim
        self._place = place

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        if not self.training:
            return x
        size = x.shape[self._dim]
        whole, start = self._place(size)
        shape = list(x.shape)
        shape[self._dim] = whole
        factors = torch.nn.functional.dropout(x.new_ones(shape), self._p)
        return x * factors.narrow(self._dim, start, size)
