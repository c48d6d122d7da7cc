"""Backward passes of a stage, and what their gradients do to the round's sum.

In bf16 a parameter's gradient is added to the fp32 sum as soon as it is there. In fp16 it waits
until the whole pass is known to be finite; else the pass is made again with a smaller scale
(`fp16`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from swarmnet.training.memory.roots import given
from swarmnet.training.models.routing import Routing
from swarmnet.training.passes.fp16 import Fp16Refusals, LossScale
from swarmnet.training.passes.layers import StageLayers

log = logging.getLogger("swarmnet.training")


class BackwardPasses:
    """Adds the gradients of microbatches to the sum that the layers show, and takes them out."""

    def __init__(
        self, layers: StageLayers, loss_scale: LossScale | None, refusals: Fp16Refusals | None
    ) -> None:
        """`loss_scale`, `refusals`: in fp16; None in other precisions."""
        self._layers = layers
        self._loss_scale = loss_scale
        self._refusals = refusals

    def add(
        self,
        root: Tensor | None,
        again: Callable[[], Tensor],
        grad: Tensor,
        inputs: Tensor,
        routing: Routing | None = None,
    ) -> float:
        """Adds the gradient of a pass.

        Args:
            root: the end of the forward pass, with its graph; None where that was not kept.
            again: makes the forward pass again, as often as fp16 needs it.
            grad: of the root, of the same shape.
            inputs: the start of the forward pass.
            routing: of the pass, where layers have routers.

        Returns:
            The scale of the pass: the gradient of `inputs` is this number times too large.

        Raises:
            RemoteError: fp16 cannot hold the gradient. Nothing was added.
        """
        self._layers.shown.mark_changed()
        scaling = self._loss_scale
        if scaling is None or self._refusals is None:
            self._run(again() if root is None else root, grad)
            return 1.0
        waiting = self._layers.parameter_copies
        largest = float(grad.abs().max())
        while True:
            scale = scaling.scale(largest)
            if routing is not None:
                routing.scale = scale
            root = again() if root is None else root
            self._run(root, (grad * scale).to(root.dtype))
            root = None
            if self._layers.agree(waiting.is_finite() and _is_gradient_finite(inputs)):
                break
            waiting.drop()
            inputs.grad = None
            if not scaling.overflowed():
                raise self._refusals.refuse("a gradient at")
        scaling.worked()
        waiting.add(1.0 / scale)
        return scale

    def subtract(
        self,
        again: Callable[[], Tensor],
        grad: Tensor | None,
        scale: float,
        routing: Routing | None = None,
    ) -> None:
        """Takes the gradient of a pass out of the sum: the same pass with the negated gradient.

        Args:
            again: makes the forward pass again.
            grad: of its end; None for a loss, whose gradient is 1.
            scale: as `add` returned it.
            routing: as for `add`.
        """
        if routing is not None:
            routing.scale = -scale
        try:
            root = again()
            grad = torch.ones_like(root) if grad is None else grad
            given(root, (grad * -scale).to(root.dtype)).backward()
        except BaseException:
            self._spoil(is_added=True)  # what must not count is in the sum
            raise
        self._layers.parameter_copies.add(1.0 / scale)
        self._layers.shown.mark_changed()

    def _run(self, root: Tensor, grad: Tensor) -> None:
        """A pass that fails half way, for want of memory say, has added a part of its gradient."""
        try:
            given(root, grad).backward()
        except BaseException:
            self._spoil(is_added=False)
            raise

    def _spoil(self, *, is_added: bool) -> None:
        """Makes the round's sum useless, since nobody knows what a failed pass has added: primaries
        leave out what is not finite. In fp16 the gradient of a pass is still apart from the sum,
        which stays good unless a gradient that must not count `is_added` already."""
        self._layers.drop_leaving()
        if self._loss_scale is not None:
            self._layers.parameter_copies.drop()
            if not is_added:
                return
        self._layers.shown.spoil_gradient()
        log.warning(
            "a backward pass failed half way: what this peer has added up in the round is lost"
        )


def _is_gradient_finite(tensor: Tensor) -> bool:
    return tensor.grad is None or bool(torch.isfinite(tensor.grad).all())
