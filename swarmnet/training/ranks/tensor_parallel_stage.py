"""A stage on the ranks of one peer, joined by tensor parallelism.

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

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmnet.ports import StepKey
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import (
    LayerBuilder,
    LayerContext,
    ModelPlan,
    ParameterRange,
    describe_parameters,
)
from swarmnet.training.ranks.local_group import LocalGroup, SharedFloats
from swarmnet.training.ranks.rank_stage import LeadStage, RankLayers, RankStage, following
from swarmnet.training.ranks.tensor_parallel import (
    Cut,
    Region,
    check_cut,
    cut_parameter,
    gather_logits,
    join,
    parallelize,
    split,
    vocabulary_parallel_loss,
)
from swarmnet.training.stage import TorchStage, build_stage

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
    layers: Sequence[LayerBuilder], model: ModelSpec, num_ranks: int, sequence_parallel: bool
) -> Layout:
    """The same on every rank."""
    ranges = describe_parameters(layers)
    cuts = tuple(
        tuple(
            cut_parameter(
                r.name, r.shape, model, rank, num_ranks, sequence_parallel=sequence_parallel
            )
            for r in ranges
        )
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


class ParallelLayers(RankLayers):
    """The layers of one rank under tensor parallelism: a part of most matrices."""

    def __init__(
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        *,
        region: Region,
        model: ModelSpec,
        fd: int | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            plan: of the model.
            builders: of the stage's layers, whole.
            region: the ranks, and which of them this is.
            model: the run's, for the sizes that are cut.
            fd: of the shared memory, at ranks other than 0.
            options: of `StageLayers`.
        """
        self._region = region
        self._vocab_size = model.vocab_size
        self._layout = lay_out(builders, model, region.num_ranks, region.sequence_parallel)
        self._has_head = builders[-1].name == "lm_head"
        if self._has_head:
            loss = functools.partial(vocabulary_parallel_loss, region, model.vocab_size)
            plan = dataclasses.replace(plan, loss=loss)
        shared = SharedFloats(self._layout.num_elements, fd)
        super().__init__(plan, builders, shared=shared, rank=region.rank, **options)
        parallelize(builders, self.modules, region)

    # ---- parameters -------------------------------------------------------------------------

    @property
    def adds_in_shared_memory(self) -> bool:
        return self.device.type == "cpu"

    def _flatten(self, shard_size: int | Sequence[int]) -> Vectors:
        total = self._layout.num_parameters
        values, gradients = self.shared.values[:total], self.shared.values[total : 2 * total]
        cuts = self._layout.cuts[self._region.rank]
        slots = {r.name: start for r, _, start in self._layout.slots(self._region.rank)}
        self._held: list[tuple[nn.Parameter, Tensor, Tensor | None, Tensor | None]] = []
        for (module, name), r, cut in zip(
            _named(self.modules), self.parameter_ranges, cuts, strict=True
        ):
            whole = r.part_of(values)
            if self._region.rank == 0:
                whole.copy_(getattr(module, name).detach())
            gradient: Tensor | None = cut.of(r.part_of(gradients))
            if r.name in slots:
                shape = cut.of(whole).shape
                start = slots[r.name]
                gradient = self.shared.values[start : start + shape.numel()].view(shape)
            elif cut.sharing == "same" and self._region.rank > 0:
                gradient = None
            self._held.append(self._hold(module, name, cut.of(whole), gradient))
        return Vectors(values, gradients, shard_size)

    def _hold(
        self, module: nn.Module, name: str, value: Tensor, gradient: Tensor | None
    ) -> tuple[nn.Parameter, Tensor, Tensor | None, Tensor | None]:
        """The parameter, its canonical value and gradient, and the sum of gradients on the
        device."""
        is_here = self.adds_in_shared_memory
        mine = value if is_here else value.to(self.device).contiguous()
        parameter = nn.Parameter(mine.new_empty(0), requires_grad=gradient is not None)
        total = gradient
        if gradient is not None and not is_here:
            total = torch.zeros_like(mine)
        if self.dtype == torch.float32:
            parameter.data = mine  # so it counts its own changes, not those of the shared memory
            parameter.grad = total
        else:
            self.parameter_copies.hold(parameter, value, total, self.dtype, self.device)
        setattr(module, name, parameter)
        return parameter, value, gradient, total

    def fetch_parameters(self) -> None:
        if self.adds_in_shared_memory:
            self.parameter_copies.refresh()
            return
        with torch.no_grad():
            for parameter, value, _, total in self._held:
                parameter.copy_(value)
                if total is not None:
                    total.zero_()

    def store_gradients(self) -> None:
        if self.adds_in_shared_memory:
            return
        for _, _, gradient, total in self._held:
            if gradient is not None and total is not None:
                gradient.copy_(total)

    def add_slots(self) -> None:
        for rank in range(1, self._region.num_ranks):
            for r, cut, start in self._layout.slots(rank):
                part = cut.of(r.part_of(self.shown.gradients))
                slot = self.shared.values[start : start + part.numel()]
                part += slot.view(part.shape)
                slot.zero_()

    # ---- passes -----------------------------------------------------------------------------

    def agree(self, is_good: bool) -> bool:
        mine = torch.tensor([1.0 if is_good else 0.0], device=self.device)
        return bool(self._region.all_reduce(mine, dist.ReduceOp.MIN).item() > 0)

    def run(self, key: StepKey | None, x: Tensor, context: LayerContext | None = None) -> Tensor:
        region = self._region
        region.begin(x.shape[1])
        if self.stage_index > 0:
            x = split(region, x)
        x = super().run(key, x, context)
        return x if self._has_head else join(region, x)

    def _of_pass(self, context: LayerContext) -> LayerContext:
        context = super()._of_pass(context)
        if context.fixed is None or not self._region.is_split:
            return context
        return dataclasses.replace(context, fixed=self._region.slice(context.fixed))

    @contextlib.contextmanager
    def evaluating(self, *, is_whole_batch: bool, wants_outputs: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._has_head and wants_outputs:
                hook = self.modules[-1].register_forward_hook(
                    lambda _, __, logits: gather_logits(self._region, self._vocab_size, logits)
                )
                stack.callback(hook.remove)
            stack.enter_context(
                super().evaluating(is_whole_batch=is_whole_batch, wants_outputs=wants_outputs)
            )
            yield


def build_parallel_stage(
    spec: RunSpec, stage_index: int, group: LocalGroup, computing: Computing | None = None
) -> LeadStage:
    """A stage on all ranks of `group`; replaces the one that they had.

    Raises:
        SpecError: the model cannot be cut so.
        RankLost: a rank is gone.
    """
    check_cut(spec, group.num_ranks)
    region = Region(
        group.group,
        0,
        group.num_ranks,
        sequence_parallel=group.options.get("sequence_parallel", False),
    )
    layers = functools.partial(ParallelLayers, region=region, model=spec.model)
    make = functools.partial(LeadStage, group=group, make_layers=layers)
    stage = build_stage(spec, stage_index, device=group.devices[0], computing=computing, make=make)
    assert isinstance(stage, LeadStage)
    return stage


def rank_options(
    spec: RunSpec, *, sequence_parallel: bool = False, mode: str = "tensor"
) -> dict[str, Any]:
    """What `LocalGroup` is told, so that its ranks can build stages of the run. `mode`: "tensor" or
    "fsdp"."""
    return {
        "spec": spec.canonical().decode(),
        "sequence_parallel": sequence_parallel,
        "mode": mode,
    }


def follow(
    group: Any, rank: int, num_ranks: int, device: torch.device, options: dict[str, Any]
) -> dict[str, Callable[..., None]]:
    """The calls of a rank other than 0."""
    spec = RunSpec.from_canonical(options["spec"].encode())
    region = Region(group, rank, num_ranks, sequence_parallel=options["sequence_parallel"])

    def build(stage_index: int, computing: Computing, fd: int | None) -> TorchStage:
        layers = functools.partial(ParallelLayers, region=region, model=spec.model, fd=fd)
        make = functools.partial(RankStage, make_layers=layers)
        return build_stage(spec, stage_index, device=device, computing=computing, make=make)

    return following(build)


def _named(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The module and attribute of each parameter, in canonical order."""
    found = []
    for module in modules:
        for name, _ in module.named_parameters():
            path, _, attribute = name.rpartition(".")
            found.append((module.get_submodule(path), attribute))
    return found
