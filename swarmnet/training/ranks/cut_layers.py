"""The parameters of one rank, where each holds a part of some of them, or all of them and a part of
their gradients.

The canonical vectors (parameters, gradients) lie in memory that all ranks map, in the same order
as in a stage of one rank: shards, digests and checkpoints do not know how many ranks there are.
On CPUs a rank's parameters and gradients are views into them, contiguous or not, so that the
stage exists once, however many ranks there are. On GPUs a rank has its part on its device, fills it
from the canonical parameters when a round begins, and copies its gradients back when the
round is drained.

A gradient that several ranks compute a part of (`Cut.sharing` "partial") grows in a slot of the
rank's own, and rank 0 adds the slots up once a round.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmnet.training.memory.parameter_copies import lower_buffers
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    ParameterRange,
    describe_base,
    describe_parameters,
    own_parameters,
)
from swarmnet.training.models.frozen import FrozenLinear, StageBase, write_whole
from swarmnet.training.processes.shared_memory import SharedFloats
from swarmnet.training.ranks.cut_plan import range_cuts
from swarmnet.training.ranks.cuts import Cut, Cutting
from swarmnet.training.ranks.packed_parts import packed_part
from swarmnet.training.ranks.part_dropout import Place, everything
from swarmnet.training.ranks.rank_stage import (
    RankLayers,
    move_buffers,
)
from swarmnet.training.ranks.tensor_parallel import Region

# Gradients of matrices that are cut by columns are views with gaps, as the parameters are.
warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout")


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in the shared memory of a stage: parameters, gradients, then the slots of
    ranks 1 and on."""

    ranges: tuple[ParameterRange, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    """By rank, then by parameter."""
    slot_starts: tuple[int, ...]
    num_elements: int

    @property
    def num_parameters(self) -> int:
        return self.ranges[-1].stop

    def slots(self, rank: int) -> list[tuple[ParameterRange, Cut, int]]:
        """Parameters with a slot of this rank, and where it begins."""
        found, start = [], self.slot_starts[rank]
        for r, cut in zip(self.ranges, self.cuts[rank], strict=True):
            if rank > 0 and cut.sharing == "partial":
                found.append((r, cut, start))
                start += cut.num_elements(r.shape)
        return found


def lay_out(
    layers: Sequence[LayerBuilder], plan: Cutting, num_ranks: int, sequence_parallel: bool
) -> Layout:
    """The same on every rank."""
    ranges = describe_parameters(layers)
    cuts = tuple(
        range_cuts(plan, ranges, rank, num_ranks, sequence_parallel=sequence_parallel)
        for rank in range(num_ranks)
    )
    end = 2 * (ranges[-1].stop if ranges else 0)
    starts = [end]
    for rank in range(num_ranks):
        starts.append(end)
        if rank > 0:
            end += sum(
                cut.num_elements(r.shape)
                for r, cut in zip(ranges, cuts[rank], strict=True)
                if cut.sharing == "partial"
            )
    return Layout(ranges, cuts, tuple(starts[1:]), end)


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A parameter of a rank."""

    parameter: nn.Parameter
    value: Tensor
    """Its part of the canonical parameters."""
    gradient: Tensor | None
    """Where its gradient goes once a round: its part of the canonical gradient, or its slot. None
    where another rank has the same."""
    total: Tensor | None
    """Where its gradient adds up."""
    is_here: bool
    """Passes compute with `value` itself and add to `gradient` itself, or to and from copies that
    are made in this memory."""


class CutLayers(RankLayers):
    """The layers of one rank, each parameter cut as a plan says. How a pass goes through them,
    subclasses say."""

    generates = True
    copies_parts = True

    @property
    def shares_copies(self) -> bool:
        return self.device.type == "cpu"

    def __init__(
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        *,
        region: Region,
        cut: Cutting,
        fd: int | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            plan: of the model, with the loss that this rank computes.
            builders: of the stage's layers, whole.
            region: the ranks, and which of them this is.
            cut: how the model is cut.
            fd: of the shared memory, at ranks other than 0.
            options: of `StageLayers`.
        """
        self._region = region
        self._cut = cut
        self.place: Place = everything
        """Of what layers draw for, in training."""
        self._layout = lay_out(builders, cut, region.num_ranks, region.sequence_parallel)
        shared = SharedFloats(self._layout.num_elements, fd)
        super().__init__(plan, builders, shared=shared, rank=region.rank, **options)

    @property
    def adds_in_shared_memory(self) -> bool:
        return all(held.is_here for held in self._held)

    def _flatten(self, shard_size: int | Sequence[int]) -> Vectors:
        total = self._layout.num_parameters
        values, gradients = self.shared.values[:total], self.shared.values[total : 2 * total]
        cuts = self._layout.cuts[self._region.rank]
        slots = {r.name: start for r, _, start in self._layout.slots(self._region.rank)}
        self._held: list[_Held] = []
        owned = own_parameters(self.builders, self.modules)
        places = _places(self.modules)
        for (name, parameter), r, cut in zip(owned, self.parameter_ranges, cuts, strict=True):
            assert name == r.name
            whole = r.part_of(values)
            if self._region.rank == 0:
                whole.copy_(parameter.detach())
            gradient: Tensor | None = cut.of(r.part_of(gradients))
            if r.name in slots:
                shape = cut.of(whole).shape
                start = slots[r.name]
                gradient = self.shared.values[start : start + shape.numel()].view(shape)
            elif cut.sharing == "same" and self._region.rank > 0:
                gradient = None
            held = None
            if cut.sharing != "absent":
                held = self._hold(cut.shape(r.shape), cut.of(whole), gradient)
                self._held.append(held)
            for module, attribute in places[id(parameter)]:
                setattr(module, attribute, None if held is None else held.parameter)
        for module in self.modules:
            move_buffers(module, self.device)
            lower_buffers(module, self.dtype, self.plan.exact_buffers)
        self.fetch_parameters()
        return Vectors(values, gradients, shard_size)

    def _build(self, builder: LayerBuilder) -> nn.Module:
        module = super()._build(builder)
        for name, p in list(module.named_parameters()):
            if p.requires_grad or not self.plan.has_base:
                continue
            cut = self._cut_of(f"{builder.name}.{name}", p.shape)
            within, _, own = name.rpartition(".")
            part = module.get_submodule(within)
            kept = part.kept if isinstance(part, FrozenLinear) else None
            place: dict[str, Any] = {"dtype": kept or self.dtype, "device": self.device}
            is_cut = own == "weight" and cut.shape(p.shape) != p.shape
            if isinstance(part, FrozenLinear) and part.packing and is_cut:
                # Untouched memory until it comes: by then others are packed.
                mine = torch.empty(p.shape, **place | {"device": "cpu"})
                part.part_of = functools.partial(packed_part, cut=cut, device=self.device)
            else:
                mine = torch.empty(cut.shape(p.shape), **place)
            is_here = cut.sharing != "absent"
            setattr(part, own, nn.Parameter(mine, requires_grad=False) if is_here else None)
        return module

    def _base(self) -> StageBase:
        def write(r: ParameterRange, place: Tensor, first: int, values: Tensor) -> None:
            if place.shape == r.shape:
                write_whole(r, place, first, values)
            else:
                self._cut_of(r.name, r.shape).put(place, r.shape, first, values)

        whole = describe_base(self.plan, self.builders)
        return StageBase(self.plan, self.builders, self.modules, whole, write)

    def _cut_of(self, name: str, shape: tuple[int, ...]) -> Cut:
        """Of a parameter that is not trained."""
        region = self._region
        return self._cut.cut(name, shape, region.rank, region.num_ranks)

    def _hold(self, shape: tuple[int, ...], value: Tensor, gradient: Tensor | None) -> _Held:
        """`shape`: of the parameter."""
        is_here = self.device.type == "cpu" and value.shape == shape
        parameter = nn.Parameter(value.new_empty(0))
        total = gradient
        if gradient is None:
            # It is made all the same: backward passes must be alike at all ranks, for each of them
            # goes through collectives.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        if gradient is not None and not is_here:
            total = torch.zeros(shape, device=self.device)
        if self.dtype != torch.float32:
            # Where the value is not here it is fetched: there is none to hold a copy of.
            of = value if is_here else value.new_zeros(1).expand(shape)
            self.parameter_copies.hold(parameter, of, total, self.dtype, self.device)
        else:  # so it counts its own changes, not those of the shared memory
            parameter.data = value if is_here else torch.empty(shape, device=self.device)
            parameter.grad = total
        return _Held(parameter, value, gradient, total, is_here)

    def fetch_parameters(self) -> None:
        self.parameter_copies.refresh()
        with torch.no_grad():
            for held in self._held:
                if not held.is_here:
                    held.parameter.view(held.value.shape).copy_(held.value)
                    if held.total is not None:
                        held.total.zero_()

    def store_gradients(self) -> None:
        for held in self._held:
            if not held.is_here and held.gradient is not None and held.total is not None:
                held.gradient.copy_(held.total.view(held.gradient.shape))

    def add_slots(self) -> None:
        for rank in range(1, self._region.num_ranks):
            for r, cut, start in self._layout.slots(rank):
                part = cut.of(r.part_of(self.shown.gradients))
                slot = self.shared.values[start : start + part.numel()]
                part += slot.view(part.shape)
                slot.zero_()

    def copy_of(self, flat: Tensor) -> list[Tensor]:
        cuts = self._layout.cuts[self._region.rank]
        return [
            cut.of(r.part_of(flat)).reshape(cut.shape(r.shape)).to(self.device)
            for r, cut in zip(self.parameter_ranges, cuts, strict=True)
            if cut.sharing != "absent"
        ]

    def agree(self, is_good: bool) -> bool:
        mine = torch.tensor([1.0 if is_good else 0.0], device=self.device)
        return bool(self._region.all_reduce(mine, dist.ReduceOp.MIN).item() > 0)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _places(modules: Sequence[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    """By a parameter's id, the modules that have it and as what: one that is tied is in several."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                found.setdefault(id(parameter), []).append((part, name))
    return found
