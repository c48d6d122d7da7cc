"""The flat vectors of one round at a stage: parameters, gradient, and how layers meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class Vectors:
    """Two of them where a stage works on two rounds at a time."""

    parameters: Tensor
    """fp32, all of the stage, in the host's memory."""
    gradients: Tensor
    """Likewise."""
    shard_size: int
    values: Sequence[Tensor] = ()
    """By parameter of the layers: its part of `parameters`."""
    shown: Sequence[Tensor] = ()
    """What the layers compute with: `values`, or copies in another precision or memory."""
    added: Sequence[Tensor] = ()
    """Where its gradients add up, fp32: a part of `gradients`, or of `sums`."""
    sums: Tensor | None = None
    """The gradient on the device, where that has memory of its own."""
    is_collected: bool = True
    """`gradients` is what `sums` is."""

    def __post_init__(self) -> None:
        self.parameter_shards = self.parameters.split(self.shard_size)
        self.gradient_shards = self.gradients.split(self.shard_size)

    def clear_gradient(self) -> None:
        self.gradients.zero_()
        if self.sums is not None:
            self.sums.zero_()
        self.is_collected = True
