"""What each layer of a model costs on this machine, by the clock.

Stages are cut by the layers' estimated costs (FLOPs), which know nothing of memory bandwidth, of a
softmax over a large vocabulary or of a kernel that is slow on some device. All peers of a run must
cut alike, so whoever starts it may measure, and write the cut into the spec
(`[pipeline] layers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import swarmnet.training.accelerators as accelerators
from swarmnet.training.memory.roots import given
from swarmnet.training.models.base import (
    LayerBuilder,
    LayerContext,
    ModelPlan,
    TakesContext,
    TensorSpec,
    build_layer,
)

WARM_PASSES, TIMED_PASSES = 1, 5


def measure_layers(
    plan: ModelPlan,
    *,
    microbatch: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
    of: Callable[[Iterable[float]], float] = min,
) -> list[float]:
    """Seconds of forward and backward of one microbatch, of each layer; the last one's has the loss
    in it. `of`: which of a few passes counts, the shortest where nothing else is said. Layers that
    are alike are measured once. Blocks; holds one layer at a time.

    Raises:
        SpecError: a layer cannot be built.
    """
    known: dict[object, float] = {}
    seconds = []
    inputs = plan.inputs
    for i, layer in enumerate(plan.layers):
        is_last = i == len(plan.layers) - 1
        kind = (_kind(layer), inputs, is_last)
        if kind not in known:
            module = build_layer(plan, layer, seed).to(device, dtype)
            targets = _sample(plan.targets, microbatch, device) if is_last else None
            passes = [
                _pass_s(plan, module, _sample(inputs, microbatch, device), targets, dtype, clock)
                for _ in range(WARM_PASSES + TIMED_PASSES)
            ]
            known[kind] = of(passes[WARM_PASSES:])
        seconds.append(known[kind])
        inputs = TensorSpec("float32", layer.output_shape)
    return seconds


def _kind(layer: LayerBuilder) -> object:
    """Layers of one kind take the same time."""
    with torch.device("meta"):
        module = layer.build()
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return repr(module), shapes, layer.cost, layer.output_shape


def _sample(spec: TensorSpec, microbatch: int, device: torch.device | str) -> Tensor:
    shape = (microbatch, *spec.shape)
    generator = torch.Generator().manual_seed(0)
    if spec.dtype == "int32":
        values = torch.randint(spec.num_values, shape, generator=generator, dtype=torch.int32)
    else:
        values = torch.randn(shape, generator=generator)
    return values.to(device)


def _pass_s(
    plan: ModelPlan,
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor | None,
    dtype: torch.dtype,
    clock: Callable[[], float],
) -> float:
    if inputs.is_floating_point():
        inputs = inputs.to(dtype).requires_grad_()
    accelerators.wait_for(inputs.device)
    context = _context(plan, module, inputs, dtype)
    sums = _sums(module)
    started = clock()
    outputs = module(inputs, *context)
    if targets is None:
        if outputs.requires_grad:  # not an embedding that is not trained
            given(outputs, torch.ones_like(outputs)).backward()
    else:
        plan.loss(outputs.float(), targets).backward()
    for p, total in sums:
        if p.grad is not None and p.grad is not total:
            total.add_(p.grad)
    accelerators.wait_for(inputs.device)
    took_s = clock() - started
    module.zero_grad()
    return took_s


def _sums(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """What gradients are added to, in fp32, as a stage adds them: by the backward pass itself where
    parameters are of this kind."""
    sums = []
    for p in module.parameters():
        if p.requires_grad:
            total = torch.zeros_like(p, dtype=torch.float32)
            p.grad = total if p.dtype == torch.float32 else None
            sums.append((p, total))
    return sums


def _context(
    plan: ModelPlan, module: nn.Module, inputs: Tensor, dtype: torch.dtype
) -> tuple[LayerContext, ...]:
    """What the layer is called with beside its inputs. It is made once a pass for all layers, and
    not counted."""
    if plan.fixed is None or not isinstance(module, TakesContext):
        return ()
    tokens = torch.zeros(inputs.shape[:2], dtype=torch.int32, device=inputs.device)
    return (LayerContext(tokens=tokens, fixed=plan.fixed(tokens, dtype)),)
