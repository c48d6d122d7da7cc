"""Which activation policy a stage can afford, from what it keeps and the memory that is free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnet.protocol.planning.flow import IN_FLIGHT_PER_REPLICA
from swarmnet.spec import RunSpec
from swarmnet.training.attention.dropped import attend_dropping
from swarmnet.training.computing import ActivationsName
from swarmnet.training.memory.pass_peaks import LayerPart, PassPeak, stage_peaks
from swarmnet.training.memory.pass_trace import fused_attention, memory_of, pass_peak
from swarmnet.training.memory.plan import (
    EXPERTS,
    FP16,
    SEQUENCES,
    Activations,
    Precision,
    is_of_formula,
    of_samples,
    positions_of_rank,
    samples_of_rank,
    stage_activations,
    with_rows,
)
from swarmnet.training.models.base import (
    LayerBuilder,
    LayerContext,
    ModelPlan,
    TakesContext,
    TensorSpec,
    described,
)
from swarmnet.training.models.registry import model_plan, split_stages

log = logging.getLogger("swarmnet.training")

FREE_PART = 0.8
"""Of the free memory that a peer plans with."""
MIN_IN_FLIGHT = 2
"""Fewer would leave the device waiting for the stages behind."""
MAX_IN_FLIGHT = 1 << 16

POLICIES: tuple[ActivationsName, ...] = ("keep", "blocks", "recompute", "offload")
"""The quickest first. `blocks` and `recompute` both compute forward twice; of many microbatches the
one keeps more, of the one in its backward pass the other."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy, and what it comes to."""

    activations: ActivationsName
    max_in_flight: int
    """Microbatches that memory has room for; at least `MIN_IN_FLIGHT`."""
    needed_bytes: float | None
    """With the expected number in flight; None where nobody knows."""


def expected_in_flight(spec: RunSpec) -> int:
    """Microbatches between their passes at a replica of the first stage, which has the most: as
    many as keep all stages of a small swarm at work. Those of large swarms have more where there is
    room for them; a slower policy would cost more than fewer do."""
    pipeline = spec.pipeline
    most = -(-pipeline.global_batch // pipeline.microbatch)
    wanted = int(IN_FLIGHT_PER_REPLICA * pipeline.num_stages) + 1  # a feeder's window
    if pipeline.max_in_flight:
        wanted = pipeline.max_in_flight * pipeline.num_stages
    return max(MIN_IN_FLIGHT, min(most, wanted))


def choose_activations(
    one: Activations | None,
    *,
    free_bytes: float,
    in_flight: int,
    policies: Sequence[ActivationsName] = POLICIES,
) -> Choice:
    """The quickest of `policies` whose activations fit into `free_bytes` with `in_flight`
    microbatches; where none does, the one that has room for most of them."""
    if one is None:
        return Choice(policies[0], MAX_IN_FLIGHT, None)
    for policy in policies:
        if one.held(policy, in_flight)[0] <= free_bytes:
            break
    else:
        policy = max(policies, key=lambda p: (_room(one, p, free_bytes), -one.held(p, 1)[0]))
    room = max(MIN_IN_FLIGHT, _room(one, policy, free_bytes))
    return Choice(policy, room, float(one.held(policy, in_flight)[0]))


def least_bytes(one: Activations | None, policies: Sequence[ActivationsName]) -> int:
    """With as few microbatches in flight as there may be, by the policy that keeps least."""
    return 0 if one is None else min(one.held(p, MIN_IN_FLIGHT)[0] for p in policies)


def _room(one: Activations, policy: str, free_bytes: float) -> int:
    """Microbatches in flight that fit."""
    first, second = one.held(policy, 1)[0], one.held(policy, 2)[0]
    if first > free_bytes:
        return 0
    if second <= first:
        return MAX_IN_FLIGHT
    return min(MAX_IN_FLIGHT, 1 + int((free_bytes - first) / (second - first)))


def known_activations(
    spec: RunSpec,
    stage: int,
    precision: Precision,
    num_ranks: int = 1,
    shared: str = SEQUENCES,
    *,
    masked: bool = False,
) -> Activations | None:
    """By the formula, or, for another model and for adapters, by a pass over shapes without
    numbers; None where its layers cannot do that. `num_ranks`, `shared`: as for `plan_memory`.
    `masked`: as `stage_activations`."""
    if is_of_formula(spec):
        return stage_activations(spec, stage, precision, num_ranks, shared, masked=masked)
    try:
        whole = traced_activations(spec, stage, precision)
        if num_ranks == 1:
            return whole
        divided = samples_of_rank if shared == EXPERTS else positions_of_rank
        alone = divided(spec, num_ranks)
        sharing = 0 if shared == EXPERTS else num_ranks
        part = traced_activations(alone, stage, precision, num_sharing=sharing)
        if shared == EXPERTS:
            layers = split_stages(model_plan(spec), spec.pipeline.num_stages)[stage]
            num_layers = sum(layer.is_block for layer in layers)
            part = with_rows(part, alone, num_layers, precision)
        return of_samples(whole, part)
    except Exception as error:  # whatever the author's code does there
        log.debug("a custom layer cannot be traced: %s", error)
        return None


def traced_activations(
    spec: RunSpec, stage: int, precision: Precision, *, num_sharing: int = 0
) -> Activations:
    """What autograd keeps of each layer, from a pass on torch's `meta` device, which takes no
    memory. `num_sharing`: each attends as where so many ranks share sequences, of which the run's
    are a part: no scores are kept, but with dropout. Raises what the layers raise there."""
    plan = model_plan(spec)
    stages = split_stages(plan, spec.pipeline.num_stages)
    is_first, is_last = stage == 0, stage == len(stages) - 1
    is_low = precision.name in ("bf16", "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision.name, torch.float32)
    came = plan.inputs if is_first else TensorSpec("float32", stages[stage - 1][-1].output_shape)
    batch = spec.pipeline.microbatch
    with torch.device("meta"):
        modules = [layer.build().to(dtype) for layer in stages[stage]]
        x = torch.empty((batch, *came.shape), dtype=getattr(torch, came.dtype))
        targets = torch.empty(
            (batch, *plan.targets.shape), dtype=getattr(torch, plan.targets.dtype)
        )
    if x.is_floating_point():
        x = x.to(dtype).requires_grad_(not is_first)
    inputs = x
    parameters = {memory_of(p) for module in modules for p in module.parameters()}
    parts: list[LayerPart] = []
    borders = 0
    known: dict[object, PassPeak] = {}
    kinds = layer_kinds(stages[stage])
    seen: dict[int, Tensor] = {}
    context = LayerContext(sequence=_SharedShapes(spec.sequence_length, num_sharing))
    for module, kind in zip(modules, kinds, strict=True):
        call: Callable[[Tensor], Tensor] = module
        if num_sharing and isinstance(module, TakesContext):
            call = partial(module, context=context)
        is_end = is_last and module is modules[-1]
        came_in, is_needed = x, x.requires_grad
        x, kept = _kept_by(call, x, parameters)
        if is_end:
            _, of_loss = _kept_by(partial(_loss, plan, targets), x, parameters)
            kept |= of_loss
        about = kind, came_in.shape, is_needed, is_end
        if about not in known:
            known[about] = _peak_of(module, call, came_in, plan, targets if is_end else None)
        own = came_in.nbytes if memory_of(came_in) in kept else 0
        held = sum(t.untyped_storage().nbytes() for t in kept.values())
        parts.append(LayerPart(held, own, came_in.nbytes, known[about]))
        seen |= kept
        borders += came_in.nbytes
    is_float = came.dtype == "float32"
    sent = 0 if is_last else 4 * x.numel()
    peaks = stage_peaks(parts, x.nbytes, is_last=is_last, adds_at_once=precision.name != FP16.name)
    return Activations(
        graph=sum(t.untyped_storage().nbytes() for t in seen.values()),
        came=4 * inputs.numel() if is_low and is_float else 0,
        inputs=inputs.nbytes,
        outputs=x.nbytes if is_low and not is_last else 0,
        sent=sent,
        borders=borders,
        largest_layer=peaks.layer,
        largest_streamed=peaks.streamed,
        largest_offloaded=peaks.offloaded,
        passing=peaks.passing,
        grad_came=sent if is_low else 0,
        is_input_in_graph=memory_of(inputs) in seen,
        is_last=is_last,
    )


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Of one layer and one microbatch, in bytes."""

    kept: int
    """What autograd keeps of it."""
    loss: int
    """Likewise of the loss, of the last layer."""
    inputs: int
    outputs: int
    num_inputs: int
    """Numbers that it gets; 0 where they are no floats."""
    num_outputs: int
    is_input_kept: bool
    peak: PassPeak

    @property
    def part(self) -> LayerPart:
        own = self.inputs if self.is_input_kept else 0
        return LayerPart(self.kept + self.loss, own, self.inputs, self.peak)


def layer_kinds(layers: Sequence[LayerBuilder]) -> tuple[object, ...]:
    """What layers that are alike have in common, of each."""
    kinds = []
    for layer, module in zip(layers, described(layers), strict=True):
        parameters = tuple(
            (n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()
        )
        kinds.append((repr(module), parameters, layer.output_shape, tuple(layer.tied)))
    return tuple(kinds)


def traced_layers(
    spec: RunSpec,
    plan: ModelPlan,
    precision: Precision,
    kinds: Sequence[object],
    *,
    begins: bool,
) -> tuple[LayerActivations, ...]:
    """Every layer of a model, as `traced_activations` traces a stage; those of one of the `kinds`
    (`layer_kinds`) once. `begins`: in a stage that has all layers before it too, where less is kept
    if these are not trained; else each may be the first of its stage. Raises what the layers raise
    there."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision.name, torch.float32)
    batch, came = spec.pipeline.microbatch, plan.inputs
    known: dict[object, tuple[LayerActivations, bool]] = {}
    found, wants_gradient = [], not begins
    for i, layer in enumerate(plan.layers):
        is_last = i == len(plan.layers) - 1
        kind = kinds[i], came, is_last, wants_gradient
        if kind not in known:
            known[kind] = _traced_layer(layer, plan, batch, came, dtype, is_last, wants_gradient)
        one, trains = known[kind]
        found.append(one)
        came = TensorSpec("float32", layer.output_shape)
        wants_gradient = wants_gradient or trains
    return tuple(found)


def _traced_layer(
    layer: LayerBuilder,
    plan: ModelPlan,
    batch: int,
    came: TensorSpec,
    dtype: torch.dtype,
    is_last: bool,
    wants_gradient: bool,
) -> tuple[LayerActivations, bool]:
    """(the layer, its output has a gradient)."""
    with torch.device("meta"):
        module = layer.build().to(dtype)
        x = torch.empty((batch, *came.shape), dtype=getattr(torch, came.dtype))
        targets = torch.empty(
            (batch, *plan.targets.shape), dtype=getattr(torch, plan.targets.dtype)
        )
    if is_float := x.is_floating_point():
        x = x.to(dtype).requires_grad_(wants_gradient)
    parameters = {memory_of(p) for p in module.parameters()}
    y, kept = _kept_by(module, x, parameters)
    loss: dict[int, Tensor] = {}
    if is_last:
        _, loss = _kept_by(partial(_loss, plan, targets), y, parameters)
    one = LayerActivations(
        kept=sum(t.untyped_storage().nbytes() for t in kept.values()),
        loss=sum(t.untyped_storage().nbytes() for at, t in loss.items() if at not in kept),
        inputs=x.nbytes,
        outputs=y.nbytes,
        num_inputs=x.numel() if is_float else 0,
        num_outputs=y.numel(),
        is_input_kept=memory_of(x) in kept,
        peak=_peak_of(module, module, x, plan, targets if is_last else None),
    )
    return one, y.requires_grad


def _peak_of(
    module: nn.Module,
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    plan: ModelPlan,
    targets: Tensor | None,
) -> PassPeak:
    """`targets`: of the model's last layer."""
    if targets is None:
        return pass_peak(module, x, call)
    return pass_peak(module, x, lambda x: _loss(plan, targets, call(x)), is_loss=True)


def _loss(plan: ModelPlan, targets: Tensor, out: Tensor) -> Tensor:
    return plan.loss(out.float(), targets)


def joined(
    layers: Sequence[LayerActivations], precision: Precision, *, is_last: bool
) -> Activations:
    """Of a stage that has these layers."""
    is_low = precision.name in ("bf16", "fp16")
    begin, end = layers[0], layers[-1]
    loss = end.loss if is_last else 0
    peaks = stage_peaks(
        [x.part for x in layers],
        end.outputs,
        is_last=is_last,
        adds_at_once=precision.name != FP16.name,
    )
    return Activations(
        graph=sum(x.kept for x in layers) + loss,
        came=4 * begin.num_inputs if is_low else 0,
        inputs=begin.inputs,
        outputs=end.outputs if is_low and not is_last else 0,
        sent=0 if is_last else 4 * end.num_outputs,
        borders=sum(x.inputs for x in layers),
        largest_layer=peaks.layer,
        largest_streamed=peaks.streamed,
        largest_offloaded=peaks.offloaded,
        passing=peaks.passing,
        grad_came=4 * end.num_outputs if is_low and not is_last else 0,
        is_input_in_graph=begin.is_input_kept,
        is_last=is_last,
    )


class _SharedShapes:
    """Implements `models.base.SharedSequence`, of shapes alone."""

    takes_windows = True

    def __init__(self, length: int, num_ranks: int) -> None:
        """`length`: at one of so many."""
        self.length = length
        self._num_ranks = num_ranks

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int = 0,
        cap: float = 0.0,
        dropout: float = 0.0,
    ) -> Tensor:
        """As torch's attention, which keeps what blocks of a ring do, or as it is with dropout."""
        if dropout:
            k, v = (x.repeat(1, self._num_ranks, 1, 1) for x in (k, v))
            sees = torch.empty((1, q.shape[1], k.shape[1]), dtype=torch.bool, device=q.device)
            return attend_dropping(q, k, v, sees, dropout, cap)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def _kept_by(
    module: Callable[[Tensor], Tensor], x: Tensor, parameters: set[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        at = memory_of(t)
        if at not in parameters:
            kept[at] = t
        return t

    with fused_attention(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return module(x), kept
