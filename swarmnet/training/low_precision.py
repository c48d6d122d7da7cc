"""Parameters that layers compute with in bf16 or fp16, beside the fp32 ones that are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Held:
    parameter: nn.Parameter
    value: Tensor
    """fp32, of the same shape."""
    gradient: Tensor | None
    """fp32; None where another rank adds it up."""


class LowPrecision:
    """The copies of a stage's parameters, and how their gradients come into fp32.

    Empty where the stage computes in fp32.
    """

    def __init__(self, *, at_once: bool) -> None:
        """`at_once`: a gradient is added as soon as autograd has it, so that no more than one lies
        about. Else all of a pass wait for `add` or `drop`."""
        self._at_once = at_once
        self._held: list[_Held] = []

    @property
    def is_used(self) -> bool:
        return bool(self._held)

    def hold(
        self, parameter: nn.Parameter, value: Tensor, gradient: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Makes `parameter` a copy of `value` in `dtype`; its gradients are added to `gradient`."""
        parameter.grad = None
        parameter.data = value.to(dtype, copy=True).contiguous()
        self._held.append(_Held(parameter, value, gradient))
        if self._at_once and gradient is not None:
            parameter.register_post_accumulate_grad_hook(_adder(gradient))

    def refresh(self) -> None:
        """The copies take the values of the fp32 parameters."""
        with torch.no_grad():
            for held in self._held:
                held.parameter.copy_(held.value)

    def is_finite(self) -> bool:
        """Of the gradients that wait."""
        found = [torch.isfinite(waiting).all() for _, waiting in self._waiting()]
        return not found or bool(torch.stack(found).all())

    def add(self, factor: float) -> None:
        """Adds the gradients that wait, multiplied by `factor` in fp32."""
        for gradient, waiting in self._waiting():
            gradient.add_(waiting.float(), alpha=factor)
        self.drop()

    def drop(self) -> None:
        """Forgets the gradients that wait."""
        for held in self._held:
            held.parameter.grad = None

    def _waiting(self) -> list[tuple[Tensor, Tensor]]:
        """The fp32 gradient, and what is to be added."""
        found = []
        for held in self._held:
            if held.gradient is not None and held.parameter.grad is not None:
                found.append((held.gradient, held.parameter.grad))
        return found


def lower_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """What a layer has of floats besides its parameters, in the precision of the passes."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))


def _adder(gradient: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    return add
