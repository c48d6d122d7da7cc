"""The base of a stage: parameters that are not trained. They come from a model's folder, shard by
shard, and stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnet.errors import ProtocolViolation
from swarmnet.training.arrays import check_finite, check_shape, to_tensor
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    base_parameters,
    cut_shards,
    describe_base,
    num_parameters,
    ranges_of,
)
from swarmnet.wire import Array

BASE_SHARD_PARAMETERS = 1 << 20
"""Of a shard of a stage's base, the last one may be shorter. Every run's list of hashes is cut so:
it never changes."""


class FrozenLinear(nn.Linear):
    """A linear layer that is not trained. Its weight may be kept in another precision than passes
    have, and is brought to theirs for each use."""

    def __init__(self, inner: nn.Linear, kept: torch.dtype | None) -> None:
        """`kept`: precision of the weight; None for that of the passes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.weight, self.bias = inner.weight, inner.bias
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        if self.weight.dtype == x.dtype:
            return super().forward(x)
        y = cast(Tensor, _Linear.apply(x, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Linear(torch.autograd.Function):
    """Keeps the weight as it is between forward and backward, not a copy in the passes'
    precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] @ weight.to(grads[0].dtype), None


def settle(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Moves what is not trained of a layer to the device, in the precision in which it is kept
    there. `dtype`: of the passes."""
    for part in module.modules():
        kept = part.kept if isinstance(part, FrozenLinear) else None
        for p in part.parameters(recurse=False):
            if not p.requires_grad:
                p.data = p.data.to(device, kept or dtype)


class StageBase:
    """The base of some layers; of none where all their parameters are trained."""

    def __init__(
        self, plan: ModelPlan, layers: Sequence[LayerBuilder], modules: Sequence[nn.Module]
    ) -> None:
        named = base_parameters(layers, modules) if plan.has_base else []
        self._ranges = ranges_of(named)
        self._parameters = [p for _, p in named]
        self._rounding = plan.base_dtype
        self.shard_sizes = base_shards(layers) if plan.has_base else ()
        self._missing = set(range(len(self.shard_sizes)))

    @property
    def missing(self) -> list[int]:
        """Shards that have not come yet, ascending."""
        return sorted(self._missing)

    def put(self, shard_index: int, values: Array) -> None:
        """Takes a shard in. Raises `ProtocolViolation` where dtype or length is wrong, or a value
        is not finite."""
        if not 0 <= shard_index < len(self.shard_sizes):
            raise ProtocolViolation(f"this stage's base has no shard {str(shard_index)[:32]}")
        check_shape("the base", values, "float32", (self.shard_sizes[shard_index],))
        tensor = to_tensor(values)
        check_finite("the base", tensor)
        if self._rounding is not None:
            tensor = tensor.to(self._rounding)
        start = sum(self.shard_sizes[:shard_index])
        stop = start + tensor.numel()
        with torch.no_grad():
            for r, p in zip(self._ranges, self._parameters, strict=True):
                first, last = max(start, r.start), min(stop, r.stop)
                if first < last:
                    place = p.data.view(-1)[first - r.start : last - r.start]
                    place.copy_(tensor[first - start : last - start])
        self._missing.discard(shard_index)


def base_shards(layers: Sequence[LayerBuilder]) -> tuple[int, ...]:
    """Elements of each shard of the base of a stage's layers; none where all is trained."""
    return cut_shards(num_parameters(describe_base(layers)), BASE_SHARD_PARAMETERS)
