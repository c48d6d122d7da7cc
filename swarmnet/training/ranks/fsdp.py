"""ZeRO-3 inside a peer (Rajbhandari et al., 2020), by PyTorch's `fully_shard`.

Every rank has a part of each parameter and of its gradient on its device, and the whole of one
layer at a time; a microbatch is split over the ranks by samples. Passes are recomputed in backward:
between the two a rank keeps its part of the input only.

The canonical vectors lie in memory that all ranks map, as with tensor parallelism; a rank fills its
parts from it when a round begins and stores its gradients into it when the round is drained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmnet.errors import SpecError
from swarmnet.plurals import counted
from swarmnet.ports import StepKey
from swarmnet.spec import RunSpec
from swarmnet.system import LOOPBACK_INTERFACE
from swarmnet.training.computing import Computing, computing_of
from swarmnet.training.memory.parameter_copies import lower_buffers
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import (
    LayerBuilder,
    LayerContext,
    ModelPlan,
    ParameterRange,
    describe_base,
    describe_parameters,
)
from swarmnet.training.models.frozen import FrozenLinear, StageBase, write_whole
from swarmnet.training.models.registry import draws_itself, model_plan
from swarmnet.training.processes.shared_memory import SharedFloats
from swarmnet.training.ranks.cuts import Cut, part_of
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.packed_parts import GatheredRows, check_packed
from swarmnet.training.ranks.part_dropout import drawn_in_part, samples_of
from swarmnet.training.ranks.rank_stage import LeadStage, RankLayers, follow_lead, lead
from swarmnet.training.ranks.tensor_parallel import both_ways, unchanged


def check_split(spec: RunSpec, num_ranks: int) -> None:
    """Raises `SpecError` unless the model can be sharded and a microbatch split evenly."""
    if num_ranks == 1:
        return
    begin = f"--tp {num_ranks} --local fsdp"
    try:
        check_packed(model_plan(spec), lambda *_: [])
    except SpecError as error:
        raise SpecError(f"{begin}: {error}; take --tp 1, or a peer for each device") from None
    if draws_itself(spec):
        _check_draws(spec, begin)
    if spec.model.num_experts or model_plan(spec).routers_learn:
        raise SpecError(
            f"{begin}: routers learn from whole microbatches; leave --local fsdp out, or take "
            "--tp 1"
        )
    if spec.pipeline.microbatch % num_ranks:
        raise SpecError(
            f"{begin}: microbatches of {counted(spec.pipeline.microbatch, 'sample')} cannot be "
            "split evenly over the ranks; choose a divisor"
        )


def _check_draws(spec: RunSpec, begin: str) -> None:
    """Raises `SpecError` unless what the model draws for some samples is that for these."""
    if spec.model.kind != "transformers":
        raise SpecError(
            f"{begin}: a model of one's own that draws random numbers does so for whole "
            "microbatches; take --tp 1, or a peer for each device"
        )
    from swarmnet.training.ranks.cut_trial import check_samples

    try:
        check_samples(spec.model.config)
    except SpecError as error:
        raise SpecError(f"{begin}: {error}; take --tp 1, or a peer for each device") from None


def open_default_group(
    device: torch.device, store: str, rank: int, num_ranks: int, timeout_s: float
) -> Any:
    """`fully_shard` takes a mesh, and that the default group of the process."""
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return init_device_mesh(device.type, (num_ranks,))


def _whole(x: Tensor) -> Tensor:
    """The samples of all ranks from those of each."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def _part(x: Tensor) -> Tensor:
    """This rank's samples."""
    start, stop = part_of(x.shape[0], dist.get_rank(), dist.get_world_size())
    return x[start:stop].clone()


def _sum(x: Tensor) -> Tensor:
    """Over all ranks."""
    total = x.clone()
    dist.all_reduce(total)
    return total


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A parameter of the stage, as a rank has its part of it."""

    parameters: list[Any]
    """DTensors. One; several, with the same values, where it is in several layers."""
    value: Tensor
    """Its part of the canonical parameters."""
    gradient: Tensor
    """Of the canonical gradient."""
    sums: Tensor | None
    """In fp16, where gradients add up that were finite; else they do in the parameters'."""


class FsdpLayers(RankLayers):
    """The layers of one rank, fully sharded: a part of each parameter."""

    generates = True
    copies_parts = True

    def __init__(
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        *,
        mesh: Any,
        rank: int,
        num_ranks: int,
        fd: int | None = None,
        computing: Computing,
        **options: Any,
    ) -> None:
        """
        Args:
            plan: of the model.
            builders: of the stage's layers, whole.
            mesh: of the ranks, as `fully_shard` takes it.
            rank: of this process.
            num_ranks: of this peer.
            fd: of the shared memory, at ranks other than 0.
            computing: with activations "recompute".
            options: of `StageLayers`.
        """
        self._num_ranks = num_ranks
        self._mesh = mesh
        self._gathers = False
        inner = plan.loss

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            if outputs.shape[0] == targets.shape[0]:  # a batch that is not split
                return inner(outputs, targets)
            start, stop = part_of(targets.shape[0], rank, num_ranks)
            return both_ways(inner(outputs, targets[start:stop]), _sum, unchanged)

        plan = dataclasses.replace(plan, loss=loss)
        shared = SharedFloats(2 * describe_parameters(builders)[-1].stop, fd)
        super().__init__(plan, builders, shared=shared, rank=rank, computing=computing, **options)
        self.base = self._base_of_parts()  # its parameters are others by now
        place = functools.partial(samples_of, rank, num_ranks)
        self.drawing = functools.partial(drawn_in_part, place)

    def _flatten(self, shard_size: int | Sequence[int]) -> Vectors:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        total = self.num_parameters
        values, gradients = self.shared.values[:total], self.shared.values[total:]
        if self._rank == 0:
            for r, p in zip(self.parameter_ranges, self.parameters(), strict=True):
                r.part_of(values).copy_(p.detach())
        self._held: list[_Held] = []
        self._again = self._untie()
        # Parts are fp32; whole layers, while they compute, in the precision of the passes.
        policy = MixedPrecisionPolicy()
        if self.dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for module in self.modules:
            packed = [m for m in module.modules() if isinstance(m, FrozenLinear) and m.packing]
            for linear in packed:  # torch shards no weights in few bits
                del linear.weight
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            module.to("meta")
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
            module.to_empty(device=self.device)
            for name, buffer in buffers.items():
                module.get_buffer(name).copy_(buffer)
            lower_buffers(module, self.dtype, self.plan.exact_buffers)
            for linear in packed:
                self._keep_rows(linear)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        for r, p in zip(self.parameter_ranges, self.parameters(), strict=True):
            cut = self._cut(r.shape)
            again = (getattr(*place) for place in self._again.get(r.name, ()))
            sums = None
            if self._computing.precision == "fp16":
                sums = torch.zeros(cut.shape(r.shape), device=self.device)
            value, gradient = cut.of(r.part_of(values)), cut.of(r.part_of(gradients))
            held = _Held([p, *again], value, gradient, sums)
            self._held.append(held)
            if sums is not None:
                for parameter in held.parameters:
                    self.parameter_copies.watch(parameter, sums)
        self.fetch_parameters()
        return Vectors(values, gradients, shard_size)

    def _build(self, builder: LayerBuilder) -> nn.Module:
        module = super()._build(builder)
        for part in module.modules():
            for name, p in list(part.named_parameters(recurse=False)):
                if self.plan.has_base and not p.requires_grad:  # alike at all ranks
                    kept = part.kept if isinstance(part, FrozenLinear) else None
                    meta = torch.empty(p.shape, dtype=kept or torch.float32, device="meta")
                    setattr(part, name, nn.Parameter(meta, requires_grad=False))
        return module

    def _keep_rows(self, linear: FrozenLinear) -> None:
        """Its weight comes whole to the host, as untouched memory until then."""
        num_rows = linear.out_features
        shape = (num_rows, linear.in_features)
        whole = torch.empty(shape, dtype=linear.kept, device="cpu")
        linear.weight = nn.Parameter(whole, requires_grad=False)
        linear.part_of = functools.partial(
            GatheredRows, cut=self._cut(shape), num_rows=num_rows, device=self.device
        )

    def _untie(self) -> dict[str, list[tuple[nn.Module, str]]]:
        """Where parameters are that were one with another of this stage, by its name: layers are
        sharded one by one, so that each has its own."""
        found: dict[str, list[tuple[nn.Module, str]]] = {}
        here = set()
        for builder, module in zip(self.builders, self.modules, strict=True):
            for name, p in list(module.named_parameters()):
                here.add(f"{builder.name}.{name}")
                owner = builder.tied.get(name)
                if owner in here:
                    within, _, own = name.rpartition(".")
                    part = module.get_submodule(within)
                    another = torch.empty_like(p, device="meta")
                    setattr(part, own, nn.Parameter(another, requires_grad=p.requires_grad))
                    found.setdefault(owner, []).append((part, own))
        return found

    def _cut(self, shape: Sequence[int]) -> Cut:
        """What this rank has of a parameter: some of its rows, as `torch.chunk` cuts."""
        size = -(-shape[0] // self._num_ranks)
        start = min(self._rank * size, shape[0])
        return Cut(0, start, min(start + size, shape[0]), "own")

    def _base_of_parts(self) -> StageBase:
        from torch.distributed.tensor import DTensor

        def write(r: ParameterRange, place: Any, first: int, values: Tensor) -> None:
            if not isinstance(place, DTensor):  # in few bits, later
                write_whole(r, place, first, values)
                return
            for part in (place, *(getattr(*one) for one in self._again.get(r.name, ()))):
                self._cut(r.shape).put(part.to_local(), r.shape, first, values)

        whole = describe_base(self.plan, self.builders)
        return StageBase(self.plan, self.builders, self.modules, whole, write)

    @property
    def num_held_elements(self) -> int:
        """Elements of parameters and gradients in the storage of this rank's tensors, between
        passes."""
        parameters = [p for held in self._held for p in held.parameters]
        tensors = [p.to_local() for p in parameters]
        tensors += [p.grad.to_local() for p in parameters if p.grad is not None]
        storages = [t.untyped_storage() for t in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) // 4

    def fetch_parameters(self) -> None:
        with torch.no_grad():
            for held in self._held:
                if held.sums is not None:
                    held.sums.zero_()
                for parameter in held.parameters:
                    parameter.to_local().copy_(held.value)
                    parameter.grad = None

    def store_gradients(self) -> None:
        for held in self._held:
            if held.sums is not None:
                held.gradient.copy_(held.sums)
                continue
            held.gradient.zero_()
            for parameter in held.parameters:
                if parameter.grad is not None:
                    held.gradient.add_(parameter.grad.to_local().to(held.gradient.device))

    def copy_of(self, flat: Tensor) -> list[Tensor]:
        parts = (self._cut(r.shape).of(r.part_of(flat)) for r in self.parameter_ranges)
        return [part.clone().to(self.device) for part in parts]

    @contextlib.contextmanager
    def showing(self, values: Sequence[Tensor]) -> Iterator[None]:
        kept = [held.parameters[0].to_local().clone() for held in self._held]
        try:
            self._show(values)
            yield
        finally:
            self._show(kept)

    def _show(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for held, value in zip(self._held, values, strict=True):
                for parameter in held.parameters:
                    parameter.to_local().copy_(value)

    def agree(self, is_good: bool) -> bool:
        mine = torch.tensor([1.0 if is_good else 0.0], device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MIN)
        return bool(mine.item() > 0)

    def run(self, key: StepKey | None, x: Tensor, context: LayerContext | None = None) -> Tensor:
        is_split = x.shape[0] % self._num_ranks == 0
        if is_split:
            x = both_ways(x, _part, _whole)
            if context is not None:
                context = self._context_of_part(context)
        x = super().run(key, x, context)
        is_whole = not self.is_last or self._gathers
        return both_ways(x, _whole, _part) if is_split and is_whole else x

    def _context_of_part(self, context: LayerContext) -> LayerContext:
        positions, tokens = context.positions, context.tokens
        return dataclasses.replace(
            context,
            positions=None if positions is None else _part(positions),
            tokens=None if tokens is None else _part(tokens),
        )

    @contextlib.contextmanager
    def evaluating(self, *, is_whole_batch: bool, wants_outputs: bool) -> Iterator[None]:
        self._gathers = wants_outputs
        try:
            with super().evaluating(is_whole_batch=is_whole_batch, wants_outputs=wants_outputs):
                yield
        finally:
            self._gathers = False


def build_fsdp_stage(
    spec: RunSpec, stage_index: int, group: LocalGroup, computing: Computing | None = None
) -> LeadStage:
    """A stage on all ranks of `group`; replaces the one that they had.

    Raises:
        SpecError: its microbatches cannot be split so, or its model or precision is not for this.
        RankLost: a rank is gone.
    """
    check_split(spec, group.num_ranks)
    device = group.devices[0]
    computing = dataclasses.replace(
        computing or computing_of(spec, device), activations="recompute"
    )
    layers = functools.partial(FsdpLayers, mesh=group.group, rank=0, num_ranks=group.num_ranks)
    return lead(spec, stage_index, group, computing, layers)


def follow(
    rank: int,
    num_ranks: int,
    device: torch.device,
    store: str,
    timeout_s: float,
    options: dict[str, Any],
) -> dict[str, Callable[..., None]]:
    """The calls of a rank other than 0."""
    mesh = open_default_group(device, store, rank, num_ranks, timeout_s)
    spec = RunSpec.from_canonical(options["spec"].encode())
    layers = functools.partial(FsdpLayers, mesh=mesh, rank=rank, num_ranks=num_ranks)
    return follow_lead(spec, device, layers)
