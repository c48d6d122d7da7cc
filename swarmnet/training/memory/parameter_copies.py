"""Copies of parameters that layers compute with, beside the fp32 ones that are trained: in lower
precision, or in another memory, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class _Copy:
    parameter: nn.Parameter
    value: Tensor | None
    """fp32, of the same shape. None where the parameter is no copy (`watch`)."""
    gradient: Tensor | None
    """Where its gradients add up: fp32, on the parameter's device. None where another rank does
    that, or autograd does it by itself, since the copy is fp32 too."""
    is_sharded: bool = False
    """The parameter is a DTensor."""


class ParameterCopies:
    """The copies of a stage's parameters, and how their gradients come into fp32.

    Empty where layers compute with the trained parameters themselves.
    """

    def __init__(self, *, at_once: bool) -> None:
        """`at_once`: a gradient is added as soon as autograd has it, so that no more than one lies
        about. Else all of a pass wait for `add` or `drop`."""
        self._at_once = at_once
        self._copies: list[_Copy] = []

    def hold(
        self,
        parameter: nn.Parameter,
        value: Tensor,
        gradient: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Makes `parameter` a copy of `value`; its gradients are added to `gradient`."""
        parameter.grad = None
        parameter.data = value.to(device, dtype, copy=True).contiguous()
        if dtype == torch.float32:
            parameter.grad = gradient
            self._copies.append(_Copy(parameter, value, None))
            return
        copy = _Copy(parameter, value, gradient)
        self._copies.append(copy)
        if self._at_once and gradient is not None:
            parameter.register_post_accumulate_grad_hook(_adder(copy))

    def watch(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Gradients of a parameter that is sharded over ranks, and no copy, wait too: this rank's
        part of them is added to `gradient`."""
        self._copies.append(_Copy(parameter, None, gradient, is_sharded=True))

    def show(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Makes the copies those of other values, and adds gradients to other vectors; what
        `parameter.data` is, the caller sees to."""
        if not self._copies:
            return
        for copy, value, gradient in zip(self._copies, values, gradients, strict=True):
            copy.value = value
            if copy.gradient is not None:
                copy.gradient = gradient

    def refresh(self) -> None:
        """The copies take the values of the trained parameters."""
        with torch.no_grad():
            for copy in self._copies:
                if copy.value is not None:
                    copy.parameter.copy_(copy.value, non_blocking=True)

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
        for copy in self._copies:
            if copy.gradient is not None:
                copy.parameter.grad = None

    def _waiting(self) -> list[tuple[Tensor, Tensor]]:
        """The fp32 gradient, and what is to be added."""
        found = []
        for copy in self._copies:
            if copy.gradient is not None and copy.parameter.grad is not None:
                waiting: Any = copy.parameter.grad
                found.append((copy.gradient, waiting.to_local() if copy.is_sharded else waiting))
        return found


def lower_buffers(module: nn.Module, dtype: torch.dtype, exact: Sequence[str] = ()) -> None:
    """What a layer has of floats besides its parameters, in the precision of the passes. `exact`:
    as `ModelPlan.exact_buffers`."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point() and not any(one in name for one in exact):
                setattr(part, name, buffer.to(dtype))


def _adder(copy: _Copy) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None and copy.gradient is not None:
            copy.gradient.add_(parameter.grad)
            parameter.grad = None

    return add
