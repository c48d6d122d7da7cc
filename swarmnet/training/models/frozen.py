"""The base of a stage: what is not trained, frozen parameters and persistent buffers. It comes from
a model's folder, shard by shard, and stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnet.errors import ProtocolViolation
from swarmnet.training.arrays import check_finite, check_shape, to_tensor
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    ParameterRange,
    base_buffers,
    base_tensors,
    cut_shards,
    num_parameters,
    ranges_of,
)
from swarmnet.training.models.packing import Packed
from swarmnet.wire import Array

BASE_SHARD_PARAMETERS = 1 << 20
"""Of a shard of a stage's base, the last one may be shorter. Every run's list of hashes is cut so:
it never changes."""


class FewBits(Protocol):
    """A matrix that is kept in few bits."""

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """(outputs, inputs), as near as it is."""

    @property
    def num_bytes(self) -> int:
        """That it takes here."""


class FrozenLinear(nn.Linear):
    """A linear layer that is not trained. Its weight may be kept in another precision than passes
    have, and is brought to theirs for each use."""

    def __init__(self, inner: nn.Linear, kept: torch.dtype | None, packing: str = "") -> None:
        """`kept`: precision of the weight; None for that of the passes. `packing`: a key of
        `packing.BITS` where it is kept in few bits from `pack` on."""
        nn.Module.__init__(self)
        self.in_features = inner.in_features
        self.out_features = inner.out_features
        self.weight = inner.weight
        self.bias = inner.bias
        self.kept = kept
        self.packing = packing
        self.packed: FewBits | None = None
        self.part_of: Callable[[Packed], FewBits] | None = None
        """What is kept of a packed weight, where other ranks have the rest."""

    def pack(self) -> None:
        """Where it is to be kept in few bits: the weight has come."""
        if self.packing:
            packed = Packed(self.weight, self.packing)
            self.packed = packed if self.part_of is None else self.part_of(packed)
            self.weight.data = self.weight.data.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        if self.packed is None and self.weight.dtype == x.dtype:
            return super().forward(x)
        weight = self.weight if self.packed is None else self.packed
        y = cast(Tensor, _Linear.apply(x, weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Linear(torch.autograd.Function):
    """Keeps the weight as it is between forward and backward, not a copy in the passes'
    precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | FewBits) -> Tensor:
        if isinstance(weight, Tensor):
            ctx.packed = None
            ctx.save_for_backward(weight)
        else:
            ctx.packed = weight
        return functional.linear(x, _in(weight, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight = ctx.packed or ctx.saved_tensors[0]
        return grads[0] @ _in(weight, grads[0].dtype), None


def _in(weight: Tensor | FewBits, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.unpacked(dtype)


def settle(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Moves what is not trained of a layer to the device, in the precision in which it is kept
    there. `dtype`: of the passes."""
    for part in module.modules():
        kept = part.kept if isinstance(part, FrozenLinear) else None
        for p in part.parameters(recurse=False):
            if p.requires_grad:
                continue
            if isinstance(part, FrozenLinear) and part.packing and p is part.weight:
                # Not touched before its values come: by then others are packed.
                values = torch.empty(p.shape, dtype=kept or dtype, device=device)
            else:
                values = p.data.to(device, kept or dtype)
            if torch._has_compatible_shallow_copy_type(p, values):  # noqa: SLF001  as `Module.to`
                p.data = values
            else:  # a device that torch has as a plug-in
                torch.utils.swap_tensors(p, nn.Parameter(values, requires_grad=False))


Write = Callable[[ParameterRange, Tensor, int, Tensor], None]
"""`write(r, place, first, values)`: elements from `first` on of a parameter, to the part of it that
is held in `place`."""


class StageBase:
    """The base of some layers; of none where all is trained."""

    def __init__(
        self,
        plan: ModelPlan,
        layers: Sequence[LayerBuilder],
        modules: Sequence[nn.Module],
        ranges: tuple[ParameterRange, ...] | None = None,
        write: Write | None = None,
    ) -> None:
        """
        Args:
            plan: of the model.
            layers: of the stage.
            modules: these, built.
            ranges: of the whole base, where the modules have parts of it, or not all.
            write: puts values into the part of a parameter that a module has.
        """
        named = base_tensors(plan, layers, modules)
        self._ranges = ranges_of(named) if ranges is None else ranges
        by_name = dict(zip((layer.name for layer in layers), modules, strict=True))
        buffers = {name for name, _ in base_buffers(plan, layers, modules)}
        self._places = {
            name: _buffer_of(by_name, name) if name in buffers else _parameter(tensor)
            for name, tensor in named
        }
        self._buffers = buffers
        self._write = write or write_whole
        self._rounding = plan.base_dtype
        self.shard_sizes = base_shards(self._ranges)
        self._missing = set(range(len(self.shard_sizes)))
        linears = (m for module in modules for m in module.modules() if isinstance(m, FrozenLinear))
        # One that another rank has is without a weight.
        self._packing = {id(m.weight): m for m in linears if m.packing and m.weight is not None}
        self._lacking = [r.num_elements for r in self._ranges]
        """Of each, elements that have not come."""

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
        if shard_index not in self._missing:
            return
        start = sum(self.shard_sizes[:shard_index])
        stop = start + tensor.numel()
        with torch.no_grad():
            for k, r in enumerate(self._ranges):
                first, last = max(start, r.start), min(stop, r.stop)
                if first < last:
                    part = tensor[first - start : last - start]
                    there = self._places.get(r.name, _nothing)()
                    if there is not None and r.name in self._buffers:
                        write_whole(r, there, first - r.start, part)
                    elif there is not None:
                        part = part if self._rounding is None else part.to(self._rounding)
                        self._write(r, there.data, first - r.start, part)
                    self._lacking[k] -= last - first
                    if not self._lacking[k] and id(there) in self._packing:
                        self._packing[id(there)].pack()
        self._missing.discard(shard_index)


def write_whole(_: ParameterRange, place: Tensor, first: int, values: Tensor) -> None:
    """As `Write`, where all of the parameter is held."""
    place.data.view(-1)[first : first + values.numel()].copy_(values)


def _nothing() -> None:
    """In place of a parameter that another rank has."""


def _parameter(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _buffer_of(modules: Mapping[str, nn.Module], full_name: str) -> Callable[[], Tensor]:
    """It is looked for each time: when its layer goes to a device, another takes its place."""
    layer = next(name for name in modules if full_name.startswith(f"{name}."))
    return lambda: modules[layer].get_buffer(full_name.removeprefix(f"{layer}."))


def base_shards(ranges: Sequence[ParameterRange]) -> tuple[int, ...]:
    """Elements of each shard of a base."""
    return cut_shards(num_parameters(ranges), BASE_SHARD_PARAMETERS)
