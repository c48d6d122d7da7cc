"""The flat vectors of one round at a stage: parameters and gradients, and each layer's part."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.training.models.base import ParameterRange


class Vectors:
    """All parameters and gradients of a stage in one round.

    A stage that works on two rounds at a time has two of these.
    """

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        shard_size: int | Sequence[int],
        ranges: Sequence[ParameterRange] = (),
        *,
        sums: Tensor | None = None,
        copies: Sequence[Tensor] | None = None,
    ) -> None:
        """
        Args:
            parameters: fp32, shape (num_parameters,), in the host's memory, or in that of the
                device where the update is made there.
            gradients: of the same kind and shape.
            shard_size: elements of each shard, where the last one may be shorter; or of every one.
            ranges: where each parameter of the layers lies in the vectors. Empty where the layers
                do not compute with parts of these vectors (several ranks).
            sums: fp32, shape (num_parameters,): where gradients add up on a device that has memory
                of its own. None: they add up in `gradients`.
            copies: by parameter, what the layers compute with, in another precision or memory.
                None: the layers compute with parts of `parameters`.
        """
        self.parameters = parameters
        self.gradients = gradients
        self.shard_size = shard_size
        self.parameter_shards = parameters.split(_sizes(shard_size))
        self.gradient_shards = gradients.split(_sizes(shard_size))
        self.values = tuple(r.part_of(parameters) for r in ranges)
        """By parameter of the layers: its part of `parameters`."""
        self.reading = threading.Lock()
        """Held by a pass that adds to no gradient and reads the parameters, such as a measurement:
        the round may end beside it, and then they may be overwritten."""
        self.adding = gradients if sums is None else sums
        """Where passes add the gradient."""
        self.added = tuple(r.part_of(self.adding) for r in ranges)
        """By parameter of the layers: its part of `adding`."""
        self.shown = self.values if copies is None else tuple(copies)
        """By parameter: what the layers compute with."""
        self._ranges = tuple(ranges)
        self._sums = sums
        self._copies = copies
        self._collecting = threading.Lock()
        self._is_collected = True
        """`gradients` equals `sums`."""

    def mark_changed(self) -> None:
        """A pass adds to the gradient: what was collected before is out of date."""
        self._is_collected = False

    def collect(self) -> None:
        """Copies the gradient that has added up on the device to `gradients`. From any thread."""
        if self._sums is None:
            return
        with self._collecting:
            if not self._is_collected:
                self.gradients.copy_(self._sums)
                self._is_collected = True

    def clear_gradient(self) -> None:
        """Sets the gradient to zero."""
        self.gradients.zero_()
        if self._sums is not None:
            self._sums.zero_()
        self._is_collected = True

    def spoil_gradient(self) -> None:
        """Sets the gradient to NaN: primaries leave it out of the update."""
        self.adding.fill_(math.nan)
        self._is_collected = False

    def refresh_copies(self) -> None:
        """Brings the parameters into the copies that the layers compute with."""
        for value, shown in zip(self.values, self.shown, strict=True):
            if shown.data_ptr() != value.data_ptr():
                shown.copy_(value, non_blocking=value.is_pinned())

    def swapped(self) -> Vectors:
        """The same memory with parameters and gradients exchanged. Where the gradient was
        overwritten with all coming parameters, it becomes the parameters without a copy."""
        return Vectors(
            self.gradients,
            self.parameters,
            self.shard_size,
            self._ranges,
            sums=self._sums,
            copies=self._copies,
        )

    def another(self) -> Vectors:
        """Vectors of the same kind in memory of their own, not initialized."""
        parameters, gradients = (
            torch.empty_like(t, pin_memory=t.is_pinned()) for t in (self.parameters, self.gradients)
        )
        return Vectors(
            parameters,
            gradients,
            self.shard_size,
            self._ranges,
            sums=None if self._sums is None else torch.empty_like(self._sums),
            copies=None
            if self._copies is None
            else [torch.empty_like(c, pin_memory=c.is_pinned()) for c in self._copies],
        )


def _sizes(shard_size: int | Sequence[int]) -> int | list[int]:
    return shard_size if isinstance(shard_size, int) else list(shard_size)
