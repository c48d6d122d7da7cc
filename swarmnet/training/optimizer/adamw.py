"""AdamW's step (Loshchilov and Hutter, 2019), so that every machine makes the same bits.

`written` is the step in the order of docs/protocol.md ("A step"): each operation is one that IEEE
754 defines, two of them fused multiply-adds. It works on any device, and is slow.

torch's fused kernel does the same to whole vectors of a processor, and something else to what is
left at the end of a tensor. `step` gives it whole vectors only, so that the bits of a number do not
depend on where it lies, and on which machine. On a GPU there is a kernel of Triton
(`adamw_kernel`). This is looked at once, with numbers that are hard to round: where a kernel makes
other bits than `written` on a CPU (a processor that cannot fuse, another torch, no Triton),
`written` takes its place.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger("swarmnet.optimizer")

WHOLE = 16
"""Numbers; the kernel works on so many at a time, and its vectors have not more."""
SAMPLE = 1 << 12
SEED = 1


@dataclass(frozen=True, slots=True)
class Step:
    """What all numbers of a step have in common."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    number: int
    """From 1."""


def step(
    parameters: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    about: Step,
    weight_decay: float,
) -> None:
    """Makes one step in place: all but `gradient` are changed, fp32 vectors of one length on one
    device."""
    vectors = (parameters, gradient, mean, square)
    if not parameters.is_cpu:
        made = kernel_of(parameters.device) or written_at_once
        made(vectors, about, weight_decay)
        return
    if not fuses_as_written():
        written(*vectors, about, weight_decay)
        return
    end = parameters.numel() // WHOLE * WHOLE
    if end == parameters.numel():
        _fused(vectors, about, weight_decay)
        return
    if end:
        _fused([v[:end] for v in vectors], about, weight_decay)
    if end < parameters.numel():
        rest = [v[end:] for v in vectors]
        padded = [torch.zeros(WHOLE) for _ in rest]
        for value, whole in zip(rest, padded, strict=True):
            whole[: value.numel()] = value
        _fused(padded, about, weight_decay)
        for value, whole in zip(rest, padded, strict=True):
            value.copy_(whole[: value.numel()])


Vectors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Parameters, gradient, mean and square."""
Kernel = Callable[[Vectors, Step, float], None]
"""Makes one step, as `step`."""


def _fused(vectors: Sequence[Tensor], about: Step, weight_decay: float) -> None:
    parameters, gradient, mean, square = ([vector] for vector in vectors)
    torch._fused_adamw_(
        parameters,
        gradient,
        mean,
        square,
        [],
        [torch.tensor(float(about.number))],
        lr=about.rate,
        beta1=about.beta1,
        beta2=about.beta2,
        weight_decay=weight_decay,
        eps=about.eps,
        amsgrad=False,
        maximize=False,
    )


# ---- the order of docs/protocol.md --------------------------------------------------------------


def written(
    parameters: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    about: Step,
    weight_decay: float,
) -> None:
    """As `step`, on any device."""
    if weight_decay:
        parameters.mul_(1 - about.rate * weight_decay)
    weight = _fp32(1 - about.beta1)
    apart = gradient - mean
    if weight < 0.5:
        mean.copy_(fused_multiply_add(apart, weight, mean))
    else:
        mean.copy_(fused_multiply_add(apart, _fp32(weight - 1), gradient))
    scaled = gradient * (1 - about.beta2)
    square.copy_(fused_multiply_add(scaled, gradient, square * about.beta2))
    bias, root = 1 - about.beta1**about.number, math.sqrt(1 - about.beta2**about.number)
    # torch's root in fp32 is not always the nearest one; that of doubles, rounded, is (Figueroa,
    # 1995). A quotient of tensors is on all devices, unlike that by a plain number.
    divisor = (square.double().sqrt().float() / torch.full_like(square, root)).add_(about.eps)
    parameters.add_((mean * -(about.rate / bias)).div_(divisor))


def written_at_once(vectors: Vectors, about: Step, weight_decay: float) -> None:
    """`written`, as a `Kernel`."""
    written(*vectors, about, weight_decay)


def fused_multiply_add(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """a b + c of fp32 numbers, rounded once; by doubles that are rounded to odd (Boldo and
    Melquiond, 2008, "Emulation of FMA and correctly rounded sums")."""
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)  # exact
    more = c.double()
    total = product + more
    part = total - product
    lost = (product - (total - part)) + (more - part)
    is_even = total.view(torch.int64) & 1 == 0
    beside = torch.nextafter(total, torch.copysign(torch.full_like(total, math.inf), lost))
    is_rounded = is_even & (lost != 0) & total.isfinite()
    return torch.where(is_rounded, beside, total).float()


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


# ---- what the kernel is measured by -------------------------------------------------------------


@functools.cache
def fuses_as_written() -> bool:
    """torch's kernel makes the bits of `written` here."""
    fault = _fault_of(_fused, torch.device("cpu"))
    if fault is not None:
        log.warning("AdamW's steps are slower here, without torch's kernel: %s", fault)
    return fault is None


@functools.cache
def kernel_of(device: torch.device) -> Kernel | None:
    """Makes the bits of `written` on a CPU; None where there is none for the device."""
    fault: str | None = "there is none for it"
    try:
        if device.type in KERNELS:
            make = KERNELS[device.type]()
            fault = _fault_of(make, device)
    except Exception as e:  # no Triton, no compiler, or a device that it does not know
        fault = f"{type(e).__name__}: {e}".splitlines()[0][:200]
    if fault is None:
        return make
    log.warning("AdamW's steps are slower on %s, without a kernel: %s", device, fault)
    return None


@functools.cache
def is_right_on(device: torch.device) -> bool:
    """Steps on a device have the bits of a CPU's. Where not, the host makes them: a result would be
    replaced by that of another owner."""
    if device.type == "cpu" or kernel_of(device) is not None:
        return True
    fault = _fault_of(written_at_once, device)
    if fault is not None:
        log.warning("AdamW's steps are made by the host, not on %s: %s", device, fault)
    return fault is None


def _triton_kernel() -> Kernel:
    from swarmnet.training.optimizer.adamw_kernel import step  # needs Triton

    return step


KERNELS: dict[str, Callable[[], Kernel]] = {"cuda": _triton_kernel, "xpu": _triton_kernel}
"""By type of device."""


def _fault_of(make: Kernel, device: torch.device) -> str | None:
    """Why its steps are not those of `written` on a CPU; None where they are."""
    for about, decay in (
        (Step(1e-3, 0.9, 0.95, 1e-8, 1), 0.1),
        (Step(3e-4, 0.9, 0.999, 1e-8, 1000), 0.0),
        (Step(0.1, 0.3, 0.5, 1e-3, 7), 0.3),
    ):
        ours = hard_vectors(SAMPLE)
        try:
            parameters, gradient, mean, square = (v.to(device, copy=True) for v in ours)
            theirs = parameters, gradient, mean, square
            make(theirs, about, decay)
        except Exception as e:  # none for this processor, and devices lack much: doubles, say
            return f"{type(e).__name__}: {e}".splitlines()[0][:200]
        written(*ours, about, decay)
        if not all(torch.equal(a, b.cpu()) for a, b in zip(ours, theirs, strict=True)):
            return "other bits"
    return None


def hard_vectors(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameters, gradient, mean and square, of all sizes that occur."""
    rng = torch.Generator().manual_seed(SEED)
    parameters, gradient, mean = (torch.randn(size, generator=rng) for _ in range(3))
    sizes = 10.0 ** torch.randint(-12, 5, (size,), generator=rng)
    gradient, mean = gradient * sizes, mean * sizes
    square = mean.square() * (1 + torch.rand(size, generator=rng))
    gradient[::7] = mean[::11] = square[::11] = 0.0
    return parameters, gradient, mean, square
