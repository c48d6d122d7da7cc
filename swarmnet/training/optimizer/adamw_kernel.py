"""AdamW's step as one Triton kernel, which reads and writes memory once; the bits are those of
`adamw.written`.

A module of its own, since Triton comes with torch for CUDA alone: `adamw` imports it when there is
a device for it. `div_rn` and `sqrt_rn` round exactly, products and sums are not fused
(`enable_fp_fusion`), and the two fused multiply-adds of the step are made by doubles, as in
`adamw.fused_multiply_add`. What the kernel is compiled for is in capitals, as is usual.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import swarmnet.training.accelerators as accelerators

NUMBERS = 1024
"""Of one program."""


def step(vectors: tuple[Tensor, Tensor, Tensor, Tensor], about: Any, weight_decay: float) -> None:
    """As `adamw.step`, `about` an `adamw.Step`; contiguous vectors on one device."""
    parameters, gradient, mean, square = vectors
    weight = _fp32(1 - about.beta1)
    bias, root = 1 - about.beta1**about.number, math.sqrt(1 - about.beta2**about.number)
    size = parameters.numel()
    with accelerators.present(parameters.device):
        _step[(triton.cdiv(size, NUMBERS),)](
            parameters,
            gradient,
            mean,
            square,
            size,
            1 - about.rate * weight_decay,
            weight if weight < 0.5 else _fp32(weight - 1),
            1 - about.beta2,
            about.beta2,
            -(about.rate / bias),
            root,
            about.eps,
            HAS_DECAY=bool(weight_decay),
            IS_NEAR=weight < 0.5,
            NUMBERS=NUMBERS,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@triton.jit
def _fused_multiply_add(a, b, c):  # type: ignore[no-untyped-def]
    """a b + c, rounded once: the sum of doubles is rounded to odd, then to fp32."""
    product = a.to(tl.float64) * b.to(tl.float64)
    more = c.to(tl.float64)
    total = product + more
    part = total - product
    lost = (product - (total - part)) + (more - part)
    bits = total.to(tl.int64, bitcast=True)
    beside = tl.where((lost > 0) == (total > 0), bits + 1, bits - 1)
    is_rounded = ((bits & 1) == 0) & (lost != 0) & (tl.abs(total) < float("inf"))
    return tl.where(is_rounded, beside, bits).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    parameters,
    gradients,
    means,
    squares,
    size,
    kept,
    weight,
    new_part,
    old_part,
    factor,
    root,
    eps,
    HAS_DECAY: tl.constexpr,
    IS_NEAR: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < size
    p = tl.load(parameters + at, mask=inside, other=0.0)
    g = tl.load(gradients + at, mask=inside, other=0.0)
    mean = tl.load(means + at, mask=inside, other=0.0)
    square = tl.load(squares + at, mask=inside, other=0.0)
    zeros = tl.zeros([NUMBERS], dtype=tl.float32)
    if HAS_DECAY:
        p = p * kept
    if IS_NEAR:
        mean = _fused_multiply_add(g - mean, zeros + weight, mean)
    else:
        mean = _fused_multiply_add(g - mean, zeros + weight, g)
    square = _fused_multiply_add(g * new_part, g, square * old_part)
    divisor = tl.div_rn(tl.sqrt_rn(square), zeros + root) + eps
    p = p + tl.div_rn(mean * factor, divisor)
    tl.store(parameters + at, p, mask=inside)
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)
