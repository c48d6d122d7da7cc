"""What a codec is."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import SCALE_BYTES
from swarmnet.training.arrays import LARGEST_VALUE

SMALLEST = 2.0**-100
"""What is smaller than this everywhere in a block becomes zero."""
LARGEST_SCALED = 1.01 * LARGEST_VALUE
"""Of a scale times the largest code, since the scale was rounded."""
PIECE = 1 << 17
"""Numbers that are coded at a time: what is between the steps then stays in a processor's cache."""
PIECE_APART = 1 << 23
"""Likewise on a GPU, where each step costs time to start."""


class Codec(Protocol):
    """All of it works on any device, and is exact to the bit on all of them alike."""

    name: str

    def encode(self, values: Tensor) -> Tensor:
        """fp32 [rows, n], at least 1 x 1, as coded rows. What is not finite is found by `check`."""

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        """Raises `ProtocolViolation` unless these are coded rows of `num_values` numbers that are
        finite and within `arrays.LARGEST_VALUE`. `what`: their name in the error's text. Meant for
        the host, since it waits for the device."""

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        """fp32 [rows, num_values] of coded rows that were checked."""

    def read(self, what: str, coded: Tensor, num_values: int) -> Tensor:
        """`check` and `decode`, on the host. A codec that can do it with less work does so."""
        self.check(what, coded, num_values)
        return self.decode(coded, num_values)

    def round_trip(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """What `encode` makes of them, and `decode` of that; likewise."""
        coded = self.encode(values)
        return coded, self.decode(coded, values.shape[1])

    def rounded(self, values: Tensor, what: str | None = None) -> Tensor:
        """The second of `round_trip`, without the first where a codec can do that. `what`: checked
        as by `check`."""
        coded = self.encode(values)
        if what is not None:
            self.check(what, coded, values.shape[1])
        return self.decode(coded, values.shape[1])


def pieces_of(rows: Tensor, num_values: int) -> tuple[Tensor, ...]:
    """Rows, cut so that each piece has about `PIECE` numbers."""
    size = PIECE if rows.is_cpu else PIECE_APART
    at_once = max(1, size // max(num_values, 1))
    return (rows,) if rows.shape[0] <= at_once else rows.split(at_once)


def divided(values: Tensor, by: float) -> Tensor:
    """The nearest quotients. Of a plain number as the divisor, torch on a GPU multiplies by the
    reciprocal, and that may be another number."""
    return values / torch.full((), float(by), device=values.device)


def in_blocks(values: Tensor, size: int) -> Tensor:
    """[rows, n] as [rows, blocks, size], filled up with zeros."""
    missing = -values.shape[1] % size
    if missing:
        values = functional.pad(values, (0, missing))
    return values.reshape(values.shape[0], values.shape[1] // size, size)


def largest_of(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, [..., 1]; NaN where there is one."""
    # Two quick passes: on a CPU `aminmax` along a short dimension takes five times as long.
    return blocks.abs().amax(dim=-1, keepdim=True)


def as_bytes(scales: Tensor) -> Tensor:
    """bfloat16 [rows, k] as bytes [rows, 2 k]."""
    return scales.contiguous().view(torch.uint8)


def split_scales(coded: Tensor, num_scales: int) -> tuple[Tensor, Tensor]:
    """The scales of coded rows as fp32 [rows, num_scales], and their codes, uint8."""
    end = SCALE_BYTES * num_scales
    # A copy: where rows have an odd number of bytes, the scales of most are not aligned.
    scales = coded[:, :end].clone(memory_format=torch.contiguous_format)
    return scales.view(torch.bfloat16).float(), coded[:, end:]


def check_rows(what: str, coded: Tensor, num_bytes: int) -> None:
    """Raises `ProtocolViolation` unless these are rows of so many bytes."""
    if coded.dtype != torch.uint8 or coded.ndim != 2 or coded.shape[1] != num_bytes:
        raise ProtocolViolation(
            f"{what}: {coded.dtype} of shape {tuple(coded.shape)} instead of rows of "
            f"{num_bytes} bytes"
        )


def check_scales(what: str, scales: Tensor, lowest: float, highest: float) -> None:
    """Raises `ProtocolViolation` unless all scales are finite and within [lowest, highest]."""
    if scales.numel() == 0:
        return
    low, high = torch.aminmax(scales)  # hands a NaN on, and no comparison with it is true
    if not (low.item() >= lowest and high.item() <= highest):
        raise ProtocolViolation(
            f"{what}: a scale that is not finite (or of numbers beyond {LARGEST_VALUE:g})"
        )
