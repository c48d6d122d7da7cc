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
from swarmnet.ports import StepKey
from swarmnet.spec import RunSpec
from swarmnet.system import LOOPBACK_INTERFACE
from swarmnet.training.computing import Computing, computing_of
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import (
    LayerBuilder,
    LayerContext,
    ModelPlan,
    describe_base,
    describe_parameters,
)
from swarmnet.training.models.registry import model_plan
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.ranks.local_group import LocalGroup, SharedFloats
from swarmnet.training.ranks.rank_stage import LeadStage, RankLayers, RankStage, following
from swarmnet.training.ranks.tensor_parallel import both_ways, part_of, unchanged
from swarmnet.training.stage import TorchStage, build_stage

FP16 = "--local fsdp computes in bf16 or fp32, not in fp16; add --precision bf16"
TIED = (
    "--local fsdp: embedding and head are one matrix, and this stage has both; use more stages, or "
    "--tp 1"
)


def check_split(spec: RunSpec, num_ranks: int) -> None:
    """Raises `SpecError` unless the model can be sharded and a microbatch split evenly."""
    if spec.lora is not None and num_ranks > 1:
        raise SpecError(
            f"--tp {num_ranks} --local fsdp does not go with [lora]; take --tp 1, or a peer for "
            "each device"
        )
    plan = model_plan(spec)
    if num_ranks > 1 and (buffers := describe_base(plan, plan.layers)):
        raise SpecError(
            f"--tp {num_ranks} --local fsdp: ranks do not get {buffers[0].name}, which comes with "
            "this model's weights; take --tp 1, or a peer for each device"
        )
    if num_ranks > 1 and (spec.model.num_experts or plan.routers_learn):
        raise SpecError(
            f"--tp {num_ranks} --local fsdp: routers learn from whole microbatches; "
            "take --tp 1, or a peer for each device"
        )
    if spec.pipeline.microbatch % num_ranks:
        raise SpecError(
            f"--tp {num_ranks} --local fsdp: microbatches of {spec.pipeline.microbatch} samples "
            "cannot be split evenly over the ranks; choose a divisor"
        )


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


class FsdpLayers(RankLayers):
    """The layers of one rank, fully sharded: a part of each parameter."""

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
            computing: in bf16 or fp32, with activations "recompute".
            options: of `StageLayers`.

        Raises:
            SpecError: the model or the precision is not for this.
        """
        if plan.is_random:
            raise SpecError("--local fsdp: the model draws random numbers, for whole microbatches")
        if computing.precision == "fp16":
            raise SpecError(FP16)
        names = {builder.name for builder in builders}
        owners = (owner for builder in builders for owner in builder.tied.values())
        if any(owner.rpartition(".")[0] in names for owner in owners):
            raise SpecError(TIED)
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

    def _flatten(self, shard_size: int | Sequence[int]) -> Vectors:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        total = self.num_parameters
        values, gradients = self.shared.values[:total], self.shared.values[total:]
        if self._rank == 0:
            for r, p in zip(self.parameter_ranges, self.parameters(), strict=True):
                r.part_of(values).copy_(p.detach())
        self._held: list[tuple[Any, Tensor, Tensor]] = []
        # Parts are fp32; whole layers, while they compute, in the precision of the passes.
        policy = MixedPrecisionPolicy()
        if self.dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for builder, module in zip(self.builders, self.modules, strict=True):
            buffers = self._buffers_of(builder, module)
            module.to("meta")
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
            module.to_empty(device=self.device)
            for name, buffer in buffers.items():
                module.get_buffer(name).copy_(buffer)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        for r, p in zip(self.parameter_ranges, self.parameters(), strict=True):
            whole, gradient = r.part_of(values), r.part_of(gradients)
            size = -(-r.shape[0] // self._num_ranks)  # as `torch.chunk` cuts
            start = min(self._rank * size, r.shape[0])
            stop = min(start + size, r.shape[0])
            self._held.append((p, whole[start:stop], gradient[start:stop]))
        self.fetch_parameters()
        return Vectors(values, gradients, shard_size)

    def _buffers_of(self, builder: LayerBuilder, module: nn.Module) -> dict[str, Tensor]:
        """What a layer has beside its parameters. The shared memory does not have it: a rank that
        has built the layer without memory builds it again, and keeps that only."""
        if any(buffer.is_meta for buffer in module.buffers()):
            module = StageLayers._build(self, builder)  # noqa: SLF001  of a base class
        return {name: buffer.clone() for name, buffer in module.named_buffers()}

    @property
    def num_held_elements(self) -> int:
        """Elements of parameters and gradients in the storage of this rank's tensors, between
        passes."""
        tensors = [p.to_local() for p, _, _ in self._held]
        tensors += [p.grad.to_local() for p, _, _ in self._held if p.grad is not None]
        storages = [t.untyped_storage() for t in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) // 4

    def fetch_parameters(self) -> None:
        with torch.no_grad():
            for parameter, value, _ in self._held:
                parameter.to_local().copy_(value)
                parameter.grad = None

    def store_gradients(self) -> None:
        for parameter, _, gradient in self._held:
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad.to_local())

    def run(self, key: StepKey | None, x: Tensor, context: LayerContext | None = None) -> Tensor:
        is_split = x.shape[0] % self._num_ranks == 0
        if is_split:
            x = both_ways(x, _part, _whole)
            if context is not None and context.positions is not None:
                context = LayerContext(_part(context.positions))
        x = super().run(key, x, context)
        is_whole = not self.is_last or self._gathers
        return both_ways(x, _whole, _part) if is_split and is_whole else x

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
        computing or computing_of(spec, device), activations="recompute", compile=False
    )
    layers = functools.partial(FsdpLayers, mesh=group.group, rank=0, num_ranks=group.num_ranks)
    make = functools.partial(LeadStage, group=group, make_layers=layers)
    stage = build_stage(spec, stage_index, device=device, computing=computing, make=make)
    assert isinstance(stage, LeadStage)
    return stage


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

    def build(stage_index: int, computing: Computing, fd: int | None) -> TorchStage:
        layers = functools.partial(FsdpLayers, mesh=mesh, rank=rank, num_ranks=num_ranks, fd=fd)
        make = functools.partial(RankStage, make_layers=layers)
        return build_stage(spec, stage_index, device=device, computing=computing, make=make)

    return following(build)
