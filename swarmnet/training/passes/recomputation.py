"""A pass of a microbatch that leaves nothing behind: what another replica gives is computed again.

Outputs and input gradient are those of the real passes, bit for bit on the same machine in the
same precision. No gradient of a parameter is computed, which is a third of a pass; buffers, kept
microbatches, the scale of fp16 and random generators stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import swarmnet.training.accelerators as accelerators
from swarmnet.batch import Documents
from swarmnet.errors import ProtocolViolation, RemoteError
from swarmnet.ports import Passage, StageResult, StepKey
from swarmnet.training.memory.roots import given
from swarmnet.training.models.base import LayerContext, routing_of
from swarmnet.training.models.routing import Routing
from swarmnet.training.passes.boundary import Boundary, finite_loss
from swarmnet.training.passes.fp16 import FALL, MIN_TARGET, LossScale
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.passes.round_vectors import RoundVectors
from swarmnet.wire import Array


class Recomputation:
    """Of one stage."""

    def __init__(
        self,
        layers: StageLayers,
        boundary: Boundary,
        vectors: RoundVectors,
        loss_scale: LossScale | None,
    ) -> None:
        """`loss_scale`: in fp16; None in other precisions."""
        self._layers = layers
        self._boundary = boundary
        self._vectors = vectors
        self._loss_scale = loss_scale

    def passage(
        self,
        key: StepKey,
        inputs: Array,
        targets: Array,
        grad_outputs: Array | None,
        documents: Documents | None,
    ) -> Passage[StageResult]:
        """As `Stage.recompute_pass`."""

        def arrive() -> tuple[Any, ...]:
            boundary = self._boundary
            boundary.check_inputs(inputs)
            boundary.check_targets(targets)
            boundary.check_documents(inputs, documents)
            wanted = boundary.receive_targets(targets) if self._layers.is_last else None
            grad = None
            if wanted is None:
                if grad_outputs is None:
                    raise ProtocolViolation("a recomputation without the gradient of the outputs")
                grad = boundary.receive_gradient(grad_outputs)
            routing = boundary.routing(inputs, targets)
            context = boundary.receive_context(inputs, documents, routing)
            return boundary.receive_inputs(inputs), wanted, grad, context

        def compute(came: tuple[Any, ...]) -> tuple[Any, ...]:
            with self._vectors.showing(key[0]):
                return self._compute(key, *came)

        def depart(done: tuple[Any, ...]) -> StageResult:
            outputs, gradient, loss_sum, num_tokens = done
            return StageResult(
                None if outputs is None else outputs(),
                None if gradient is None else gradient(),
                loss_sum,
                num_tokens,
            )

        return Passage(arrive, compute, depart, self._layers.copies.is_apart)

    def _compute(
        self,
        key: StepKey,
        x: Tensor,
        wanted: Tensor | None,
        grad: Tensor | None,
        context: LayerContext | None,
    ) -> tuple[Any, ...]:
        wants_gradient = x.is_floating_point() and self._layers.stage_index > 0
        x.requires_grad_(wants_gradient)

        def run() -> Tensor:
            with torch.set_grad_enabled(wants_gradient):
                if wanted is not None:
                    return self._layers.loss(key, x, wanted, context)
                return self._layers.run(key, x, context)

        root, gradient = run(), None
        sending = None if wanted is not None else self._boundary.send_outputs(root, context)
        loss_sum = 0.0 if wanted is None else finite_loss(root)
        if wants_gradient:
            grad = torch.ones_like(root) if grad is None else grad
            found = self._input_gradient(root, run, grad, x, routing_of(context))
            gradient = self._boundary.send_input_gradient(found)
        num_tokens = 0 if wanted is None else self._layers.plan.count(wanted)
        return sending, gradient, loss_sum, num_tokens

    def _input_gradient(
        self,
        root: Tensor,
        again: Callable[[], Tensor],
        grad: Tensor,
        x: Tensor,
        routing: Routing | None,
    ) -> Tensor:
        if self._loss_scale is None:
            return _gradient(root, x, grad).float()
        scale, target = self._loss_scale.scale(float(grad.abs().max())), self._loss_scale.target
        while True:
            if routing is not None:
                routing.scale = scale
            found = _gradient(root, x, (grad * scale).to(root.dtype))
            if bool(torch.isfinite(found).all()):
                return found.float() / scale
            scale, target = scale * FALL, target * FALL
            if target < MIN_TARGET:
                raise RemoteError("a gradient does not fit into fp16")
            root = again()


def difference(boundary: Boundary, ours: StageResult, theirs: StageResult) -> float:
    """As `Stage.difference`."""
    if ours.num_tokens != theirs.num_tokens:
        return math.inf
    found = [_relative(abs(ours.loss_sum - theirs.loss_sum), abs(ours.loss_sum))]
    both = (
        (boundary.decoded_outputs, ours.outputs, theirs.outputs),
        (boundary.decoded_input_gradient, ours.grad_inputs, theirs.grad_inputs),
    )
    for decoded, one, other in both:
        if one is None or other is None:
            found.append(0.0 if one is other else math.inf)
            continue
        a, b = decoded(one), decoded(other)
        found.append(_relative(_norm(b - a), _norm(a)))
    if found[1] < math.inf and _beside(boundary, ours) != _beside(boundary, theirs):
        return math.inf
    return max(found)


def _beside(boundary: Boundary, result: StageResult) -> bytes:
    return b"" if result.outputs is None else boundary.tokens_beside(result.outputs)


def _gradient(root: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    found = torch.autograd.grad(given(root, grad), x, allow_unused=True)[0]
    return torch.zeros_like(x) if found is None else found


def _norm(values: Tensor) -> float:
    if not accelerators.computes_in(values.device, torch.float64):
        values = values.cpu()
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _relative(difference: float, size: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / size if size else math.inf
