"""ZeRO-3 inside a peer (Rajbhandari et al., 2020), by PyTorch's `fully_shard`.

Every rank has a part of each parameter and of its gradient on its device, and the whole of one
layer at a time; a microbatch is split over the ranks by samples. Passes are recomputed in backward:
between the two a rank keeps its part of the input only.

The canonical vectors lie in memory that all ranks map, as with tensor parallelism; a rank fills its
parts from it when a round begins and stores its gradients into it when the round is drained.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmnet.errors import SpecError
from swarmnet.spec import RunSpec
from swarmnet.swarm.ports import LossResult
from swarmnet.training.computing import Computing
from swarmnet.training.models.base import LayerBuilder, describe_parameters
from swarmnet.training.ranks.leading import Leading, following
from swarmnet.training.ranks.local_group import LocalGroup, SharedFloats
from swarmnet.training.ranks.tensor_parallel import part_of
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array

FP16 = "--local fsdp computes in bf16 or fp32, not in fp16; add --precision bf16"


def check_split(spec: RunSpec, num_ranks: int) -> None:
    """Raises `SpecError` unless a microbatch can be split evenly."""
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

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
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


class _Whole(torch.autograd.Function):
    """The samples of all ranks from those of each. Backward: this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.num_samples = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        start = dist.get_rank() * ctx.num_samples
        return grads[0][start : start + ctx.num_samples].contiguous()


class _Part(torch.autograd.Function):
    """This rank's samples. Backward: the gradients of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        start, stop = part_of(x.shape[0], dist.get_rank(), dist.get_world_size())
        return x[start:stop].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = [torch.empty_like(grads[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grads[0].contiguous())
        return torch.cat(parts)


class _Sum(torch.autograd.Function):
    """The sum over ranks. Backward: nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class FsdpStage(TorchStage):
    """What one rank has of a stage; the same calls at all ranks."""

    overlaps_rounds = False

    def __init__(
        self,
        *arguments: Any,
        mesh: Any,
        rank: int,
        num_ranks: int,
        fd: int | None = None,
        **options: Any,
    ) -> None:
        plan, layers = arguments[:2]
        if plan.is_random:
            raise SpecError("--local fsdp: the model draws random numbers, for whole microbatches")
        self._rank, self._num_ranks, self._mesh = rank, num_ranks, mesh
        self._gathers = False
        self._total = describe_parameters(layers)[-1].stop
        self._shared = SharedFloats(2 * self._total, fd)
        inner = plan.loss

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            if outputs.shape[0] == targets.shape[0]:  # a batch that is not split
                return cast(Tensor, inner(outputs, targets))
            start, stop = part_of(targets.shape[0], rank, num_ranks)
            return _apply(_Sum, inner(outputs, targets[start:stop]))

        plan = dataclasses.replace(plan, loss=loss)
        computing: Computing = options.pop("computing")
        if computing.precision == "fp16":
            raise SpecError(FP16)
        computing = dataclasses.replace(computing, activations="recompute", compile=False)
        super().__init__(plan, *arguments[1:], **options, computing=computing)

    def _build(self, layer: LayerBuilder) -> nn.Module:
        if self._rank == 0:
            return super()._build(layer)
        with torch.device("meta"):
            return layer.build()

    def _flatten(self) -> tuple[Tensor, Tensor]:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        total = self._total
        values, gradients = self._shared.values[:total], self._shared.values[total:]
        parameters = [p for module in self._modules for p in module.parameters()]
        if self._rank == 0:
            for r, p in zip(self.parameter_ranges, parameters, strict=True):
                values[r.start : r.stop].view(r.shape).copy_(p.detach())
        self._held: list[tuple[Any, Tensor, Tensor]] = []
        # Parts are fp32; whole layers, while they compute, in the precision of the passes.
        policy = MixedPrecisionPolicy()
        if self._dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        for module in self._modules:
            module.to("meta")
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
            module.to_empty(device=self._device)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        parameters = [p for module in self._modules for p in module.parameters()]
        for r, p in zip(self.parameter_ranges, parameters, strict=True):
            whole = values[r.start : r.stop].view(r.shape)
            gradient = gradients[r.start : r.stop].view(r.shape)
            size = -(-r.shape[0] // self._num_ranks)  # as `torch.chunk` cuts
            start = min(self._rank * size, r.shape[0])
            stop = min(start + size, r.shape[0])
            self._held.append((p, whole[start:stop], gradient[start:stop]))
        self.fetch_parameters()
        return values, gradients

    def _parameter_storages(self) -> frozenset[int]:
        """Nothing is offloaded here; parts of a distributed tensor have no one storage."""
        return frozenset()

    @property
    def on_cpu(self) -> bool:
        """Whether the canonical gradient is always whole."""
        return False

    @property
    def num_held_elements(self) -> int:
        """Of parameters and gradients, in the storage of this rank's tensors, between passes."""
        tensors = [p.to_local() for p, _, _ in self._held]
        tensors += [p.grad.to_local() for p, _, _ in self._held if p.grad is not None]
        storages = [t.untyped_storage() for t in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) // 4

    def fetch_parameters(self) -> None:
        """From the canonical vector; gradients become zero."""
        with torch.no_grad():
            for parameter, value, _ in self._held:
                parameter.to_local().copy_(value)
                parameter.grad = None

    def store_gradients(self) -> None:
        """Into the canonical vector."""
        for parameter, _, gradient in self._held:
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad.to_local())

    def finish_round(self) -> None:
        self._kept.clear()
        self.fetch_parameters()

    def _run(self, key: Any, x: Tensor) -> Tensor:
        is_split = x.shape[0] % self._num_ranks == 0
        if is_split:
            x = _apply(_Part, x)
        x = super()._run(key, x)
        is_whole = not self.is_last or self._gathers
        return _apply(_Whole, x) if is_split and is_whole else x

    def evaluate(self, inputs: Array, targets: Array | None) -> Array | LossResult:
        self._gathers = targets is None
        try:
            return super().evaluate(inputs, targets)
        finally:
            self._gathers = False


class LeadFsdpStage(Leading, FsdpStage):
    """Rank 0's."""


def _apply(function: Any, x: Tensor) -> Tensor:
    return cast(Tensor, function.apply(x))


def build_fsdp_stage(
    spec: RunSpec, stage_index: int, group: LocalGroup, computing: Computing | None = None
) -> LeadFsdpStage:
    """A stage on all ranks of `group`; replaces the one that they had.

    Raises:
        SpecError: its microbatches cannot be split so.
        RankLost: a rank is gone.
    """
    check_split(spec, group.num_ranks)
    make = functools.partial(
        LeadFsdpStage, group=group, mesh=group.group, rank=0, num_ranks=group.num_ranks
    )
    stage = build_stage(spec, stage_index, device=group.devices[0], computing=computing, make=make)
    assert isinstance(stage, LeadFsdpStage)
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
        make = functools.partial(FsdpStage, mesh=mesh, rank=rank, num_ranks=num_ranks, fd=fd)
        return build_stage(spec, stage_index, device=device, computing=computing, make=make)

    return following(build)
