"""Codecs on a GPU in one kernel each way, which checks too (`kernels`), where that is proven to be
exact.

Elsewhere, and where there is no Triton, the eager code of the codecs does the same in about ten
kernels. `fused_codec` chooses, once for each kind of row: it has the kernels code a sample of
numbers that are hard to round, and what must be refused, and compares bits with those of a CPU.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import BLOCK, num_blocks, row_bytes
from swarmnet.training.arrays import LARGEST_VALUE
from swarmnet.training.codecs.base import Codec, check_rows
from swarmnet.training.codecs.tiles import GRID, NUM_SHIFTS, REACH

log = logging.getLogger("swarmnet.codecs")

NATIVE = (torch.float32, torch.bfloat16)
"""What kernels read and write; others are fp32 on the way."""
SEED = 1
SMALL = 2.0**-126
"""Below it fp32 numbers have fewer digits."""


class Kernels(Protocol):
    """Of one codec, for rows of one length. All tensors are contiguous."""

    num_findings: int
    """Bytes of a row."""

    def encode(self, values: Tensor, coded: Tensor, findings: Tensor) -> None:
        """From values [rows, n], of a `NATIVE` dtype, to coded rows, and findings: flat, not 0
        where `Codec.check` refuses a row."""

    def decode(self, coded: Tensor, values: Tensor, findings: Tensor) -> None:
        """Likewise, the reverse."""


def _triton_kernels(name: str, num_values: int) -> Kernels | None:
    from swarmnet.training.codecs.kernels import kernels_of  # needs Triton

    return kernels_of(name, num_values)


KERNELS: dict[str, Callable[[str, int], Kernels | None]] = {
    "cuda": _triton_kernels,
    "xpu": _triton_kernels,
}
"""By type of device. They may be missing for a codec; errors mean that there are none here."""


class FusedCodec:
    """A codec for rows of `num_values` numbers on a device that has kernels for it."""

    def __init__(self, codec: Codec, num_values: int, kernels: Kernels) -> None:
        self.codec = codec
        self.num_values = num_values
        self._row_bytes = row_bytes(codec.name, num_values)
        self._kernels = kernels

    def encode(self, values: Tensor) -> Tensor:
        """[rows, num_values] of any float dtype as flat bytes: coded rows, and behind them
        findings. One tensor, so that one copy takes it to the host, for `checked`."""
        native = values if values.dtype in NATIVE else values.float()
        rows = values.shape[0]
        size = rows * (self._row_bytes + self._kernels.num_findings)
        made = torch.empty(size, dtype=torch.uint8, device=values.device)
        end = rows * self._row_bytes
        self._kernels.encode(native.contiguous(), made[:end], made[end:])
        return made

    def checked(self, what: str, made: Tensor) -> Tensor:
        """What `encode` made, on the host, as coded rows. Raises `ProtocolViolation` as
        `Codec.check`."""
        coded, findings = self.parts(made)
        self.check(what, coded, findings)
        return coded

    def parts(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """What `encode` made: coded rows, and findings."""
        rows = made.numel() // (self._row_bytes + self._kernels.num_findings)
        end = rows * self._row_bytes
        return made[:end].view(rows, self._row_bytes), made[end:]

    def decode(self, coded: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Coded rows as numbers, and findings, for `check` on the host. Numbers must not be used
        before."""
        check_rows("coded rows", coded, self._row_bytes)
        rows = coded.shape[0]
        native = dtype if dtype in NATIVE else torch.float32
        values = torch.empty(rows, self.num_values, dtype=native, device=coded.device)
        findings = torch.empty(
            rows * self._kernels.num_findings, dtype=torch.uint8, device=coded.device
        )
        self._kernels.decode(coded.contiguous(), values, findings)
        return values.to(dtype), findings

    def check(self, what: str, coded: Tensor, findings: Tensor) -> None:
        """Raises `ProtocolViolation` as `Codec.check`, which has the last word where kernels found
        something. Both tensors on the host."""
        if bool(findings.any()):
            self.codec.check(what, coded, self.num_values)


@functools.cache
def fused_codec(
    codec: Codec, num_values: int, device: torch.device, dtype: torch.dtype
) -> FusedCodec | None:
    """For rows of so many numbers, of fp32 or `dtype`. None where the codec has to do without."""
    make = KERNELS.get(device.type)
    if make is None:
        return None
    try:
        kernels = make(codec.name, num_values)
        if kernels is None:
            return None
        fused = FusedCodec(codec, num_values, kernels)
        faults = [_fault(fused, device, each) for each in NATIVE if each in (torch.float32, dtype)]
        fault = next(filter(None, faults), None)
    except ImportError as error:
        fault = f"no Triton ({error})"
    except Exception as error:  # compilers fail in many ways, and the eager code is there
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return fused
    line = fault.strip().splitlines()[0][:200]
    log.warning("%s on %s is slower, with no kernels of its own: %s", codec.name, device, line)
    return None


@functools.cache
def is_right_on(codec: Codec, num_values: int, device: torch.device) -> bool:
    """The codec's own code makes the bits of a CPU on the device, which may lack some numbers or
    round in another way. Else the host codes."""
    if device.type == "cpu":
        return True
    try:
        values = hard_numbers(num_values)
        coded = codec.encode(values)
        wanted, there = codec.decode(coded, num_values), coded.to(device, copy=True)
        is_right = torch.equal(codec.encode(values.to(device, copy=True)).cpu(), coded)
        is_right = is_right and _bits_equal(codec.decode(there, num_values).cpu(), wanted)
        fault = None if is_right else "other bits than a CPU's"
    except Exception as error:  # devices lack operations in many ways
        fault = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
    if fault is not None:
        log.warning("%s is coded by the host, not on %s: %s", codec.name, device, fault)
    return fault is None


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- what kernels are measured by ---------------------------------------------------------------


def _fault(fused: FusedCodec, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernels; None for nothing."""
    codec, n = fused.codec, fused.num_values
    values = hard_numbers(n).to(dtype)
    expected = codec.encode(values.float())
    coded, findings = fused.parts(fused.encode(values.to(device)).cpu())
    if not torch.equal(coded, expected):
        return f"other codes of {dtype} than a CPU's"
    if bool(findings.any()):
        return "good numbers are found wrong"
    decoded, findings = fused.decode(expected.to(device), dtype)
    wanted = codec.decode(expected, n).to(dtype)
    if not torch.equal(decoded.cpu().view(torch.uint8), wanted.view(torch.uint8)):
        return f"other numbers in {dtype} than a CPU's"
    if bool(findings.any()):
        return "good codes are found wrong"
    bad = _not_finite(n).to(dtype)
    _, findings = fused.parts(fused.encode(bad.to(device)).cpu())
    if not bool(findings.view(len(bad), -1).any(1).all()):
        return "numbers that are not finite are not found"
    bad = _spoilt(expected[:1])
    _, findings = fused.decode(bad.to(device), dtype)
    refused = [not _is_taken(codec, row[None], n) for row in bad]
    if findings.cpu().view(len(bad), -1).any(1).tolist() != refused:
        return "codes that are refused are not found, or others are"
    return None


def _is_taken(codec: Codec, coded: Tensor, num_values: int) -> bool:
    try:
        codec.check("a sample", coded, num_values)
    except ProtocolViolation:
        return False
    return True


def hard_numbers(num_values: int) -> Tensor:
    """fp32 rows: numbers of all sizes, such as leave quotients near the middle between two codes or
    scales, whole numbers, small ones, zeros. A CPU makes them, so they are the same everywhere."""
    rng = torch.Generator().manual_seed(SEED)
    powers = 2.0 ** torch.arange(-146, 48, 2).float()
    sizes = torch.randn(len(powers), BLOCK, generator=rng) * powers[:, None]
    sizes = sizes.clamp(-LARGEST_VALUE, LARGEST_VALUE)
    whole = torch.arange(-2047, 2048).float()
    whole = torch.cat([whole, whole.new_zeros(-len(whole) % (BLOCK // 2))]).view(-1, BLOCK // 2)
    whole[:, 0] = 2047.0  # a step is 1
    codes = torch.arange(-127, 127).float() + 0.5
    codes = torch.cat([codes, codes.new_zeros(-len(codes) % BLOCK)]).view(-1, BLOCK)
    codes[:, 0] = 127.0
    small = torch.randn(4, BLOCK, generator=rng) * SMALL
    parts = [sizes, whole.reshape(-1, BLOCK), codes, small, torch.zeros(1, BLOCK)]
    parts += [_near_ties(divisor, rng) for divisor in (127.0, *REACH.values())]
    parts += [_near_shifted_ties(reach) for reach in REACH.values()]
    blocks = torch.cat([*parts, -sizes.bfloat16().float()])
    a_row = num_blocks(num_values, BLOCK)
    missing = -len(blocks) % a_row
    blocks = blocks.repeat(1 + math.ceil(missing / len(blocks)), 1)[: len(blocks) + missing]
    return blocks.view(-1, a_row * BLOCK)[:, :num_values].contiguous()


def _near_ties(divisor: float, rng: torch.Generator) -> Tensor:
    """Blocks whose largest number over the divisor lies at the middle of two bfloat16 numbers, or
    one fp32 number beside it; and so do the others over that."""
    scales = (torch.arange(128, 256, 4) + 0.5) / 128
    ties = scales * divisor
    beside = torch.nextafter(ties, ties * torch.tensor([0.0, 2.0])[:, None])
    largest = torch.cat([ties, *beside])
    most = int(divisor)
    codes = torch.randint(-most, most, (len(largest), BLOCK), generator=rng) + 0.5
    scale = (largest / divisor).bfloat16().float()
    numbers = codes * scale[:, None]
    numbers[:, 1::3] = torch.nextafter(numbers[:, 1::3], torch.zeros(()))
    numbers = numbers.clamp(-largest[:, None], largest[:, None])
    numbers[:, 0] = numbers[:, BLOCK // 2] = largest
    return numbers


def _near_shifted_ties(reach: float) -> Tensor:
    """Blocks that `Tiles` does not rotate, most of whose numbers are, in steps and with their
    shift, next to whole ones: so that it matters if a product is rounded before the shift is
    added."""
    parts = 2 * NUM_SHIFTS
    odd = torch.arange(int(reach) * parts // 2 + 1, int(reach) * parts, 2).double()
    whole = (GRID * odd / (parts * reach)).round()
    # The scale is what it is thought to be where the largest number is near enough.
    is_near = (GRID * odd / (parts * reach) / whole - 1).abs() < 2.0**-10
    odd, whole = odd[is_near, None], whole[is_near, None]
    scales = 1 + torch.arange(len(odd), dtype=torch.float64)[:, None] * 7 % 128 / 128
    step = odd * scales / (parts * whole)
    blocks = (whole * step).float().expand(-1, BLOCK).clone()
    blocks[:, :: BLOCK // 2] = (GRID * step).float()
    return torch.cat([blocks, -blocks])


def _not_finite(num_values: int) -> Tensor:
    """Rows, each with one number that `Codec.check` refuses."""
    values = (math.nan, -math.nan, math.inf, -math.inf, 2e15, -2e15)
    bad = torch.ones(2, len(values), num_values)
    bad[0, :, 0] = bad[1, :, -1] = torch.tensor(values)
    return bad.flatten(0, 1)


def _spoilt(coded: Tensor) -> Tensor:
    """One coded row again and again, most of which must be refused. The first bytes are a scale,
    the last a code."""
    scales = (0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x6000, 0xE000, 0xBF80, 0x3F80, 0x8000, 0x8001, 1)
    codes = (0x00, 0x80, 0x81, 0x0F, 0xF0, 0x3F, 0xC0)
    bad = coded.repeat(len(scales) + len(codes), 1)
    for row, scale in zip(bad, scales):
        row[:2] = torch.tensor([scale & 255, scale >> 8])
    bad[len(scales) :, -1] = torch.tensor(codes)
    return bad
