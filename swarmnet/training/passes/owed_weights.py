"""Gradients of weights that a backward pass leaves for later.

The stage before waits for the gradient of the inputs, and nobody for those of the weights (Qi et
al., 2024: zero-bubble schedules). So a pass gives the first, and keeps for each matrix W of a
linear layer y = x W^T what the other is made of: x, and the gradient g of y. The gradient g^T x is
made when the device has nothing more urgent to do, or when somebody is about to read the sum. What
is owed longest is made first, matrix by matrix as the pass came by them: so every number of the sum
is, bit for bit, what whole passes in the same order make of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.torch_calls import TorchCalls

log = logging.getLogger("swarmnet.training")


@dataclass(slots=True)
class _Factors:
    """What the gradient of one matrix is made of, which a pass may meet more than once."""

    target: Tensor
    """Where it is added: fp32, shape (outputs, inputs)."""
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Gradient of the outputs, (n, outputs), and inputs, (n, inputs)."""

    def add(self) -> None:
        """Makes it, as autograd does, and adds it."""
        total: Tensor | None = None
        for grad_nO, x_nI in self.pairs:
            made = grad_nO.t().mm(x_nI)
            total = made if total is None else total + made
        assert total is not None
        self.target.add_(total)


class OwedWeights:
    """Of one stage on one device. A pass that is `watched` can leave gradients of weights, and one
    in `leaving` does. `leaving` and `watched` are for the device thread, the rest for any."""

    def __init__(self, layers: StageLayers) -> None:
        self._layers = layers
        self._calls = TorchCalls({functional.linear: self._linear})
        self._lock = threading.RLock()
        self._owed: deque[dict[int, _Factors]] = deque()
        """By microbatch, then by matrix."""
        self._pass: dict[int, _Factors] | None = None
        """Of the backward pass that runs."""
        self._of: Vectors | None = None
        self._targets: dict[int, Tensor] = {}
        """Of the matrices that are trained, by identity, in these vectors."""

    def __len__(self) -> int:
        """Microbatches of which something is owed."""
        return len(self._owed)

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        """In this context a forward pass is made from which gradients can be left."""
        return self._calls

    @contextlib.contextmanager
    def leaving(self, room: int) -> Iterator[None]:
        """In this context a backward pass leaves gradients of weights. `room`: microbatches of
        which something may be owed then; what is more is made first, and with none the pass is
        whole."""
        self.keep(room - 1)
        if room < 1:
            yield
            return
        self._find_targets()
        self._pass = {}
        try:
            yield
            if self._pass:
                with self._lock:
                    self._owed.append(self._pass)
        finally:
            self._pass = None

    def keep(self, most: int) -> None:
        """Makes what is owed longest, until it is of no more than so many microbatches."""
        while self._owed and len(self._owed) > most:
            self.make_next()

    def make_next(self) -> bool:
        """Makes one gradient. Says whether others are owed. Where it cannot, say for want of
        memory, the round's sum is of no use, since it is not whole."""
        with self._lock:
            if not self._owed:
                return False
            oldest = self._owed[0]
            factors = oldest.pop(next(iter(oldest)))
            if not oldest:
                self._owed.popleft()
            try:
                with torch.no_grad():
                    factors.add()
                self._layers.shown.mark_changed()
            except RuntimeError as error:
                self.give_up()
                self._layers.shown.spoil_gradient()
                log.warning(
                    "a gradient could not be made, so what this peer has added up in the round is "
                    "lost: %s",
                    error,
                )
            return bool(self._owed)

    def settle(self) -> None:
        """Makes all that is owed."""
        while self.make_next():
            pass

    def give_up(self) -> None:
        """Forgets all that is owed: nobody reads the sum any more."""
        with self._lock:
            self._owed.clear()

    # ---- inside -----------------------------------------------------------------------------

    def leave(self, weight: Tensor, grad_nO: Tensor, x_nI: Tensor) -> bool:
        """The backward pass has come by a matrix. False where its gradient is wanted at once."""
        target = self._targets.get(id(weight))
        if self._pass is None or target is None:
            return False
        self._pass.setdefault(id(weight), _Factors(target)).pairs.append((grad_nO, x_nI))
        return True

    def _find_targets(self) -> None:
        shown = self._layers.shown
        if shown is not self._of:
            pairs = zip(self._layers.parameters(), shown.added, strict=True)
            self._of, self._targets = shown, {id(p): target for p, target in pairs}

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In place of torch's. Only what takes a gradient from further on can be left: with it the
        stage before is waiting."""
        if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
            return functional.linear(x, weight, bias)
        y: Tensor = _Linear.apply(x, weight, bias, self)
        return y


class _Linear(torch.autograd.Function):
    """x W^T + b, whose gradient by W may be left."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owed: OwedWeights
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owed, ctx.weight = owed, weight
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override,unused-ignore]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_nO, x_nI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_nO.mm(weight).view(x.shape)
        grad_bias = grad_nO.sum(0) if ctx.needs_input_grad[2] else None
        is_left = ctx.owed.leave(ctx.weight, grad_nO, x_nI)
        return grad_x, None if is_left else grad_nO.t().mm(x_nI), grad_bias, None
