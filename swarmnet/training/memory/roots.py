"""The beginning of a backward pass with a gradient that somebody gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Given(torch.autograd.Function):
    """A number whose derivative by `root` is `grad`."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return root.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override,unused-ignore]
        (grad,) = ctx.saved_tensors
        return grad, None


def given(root: Tensor, grad: Tensor) -> Tensor:
    """A number from which a backward pass gives what one from `root` with `grad` gives, bit for
    bit. torch is not told of a gradient then: where it is, it imports sympy to compare two shapes,
    which takes 50 MB and half a second of every peer."""
    assert root.shape == grad.shape
    number: Tensor = _Given.apply(root, grad)
    return number
