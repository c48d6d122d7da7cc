"""`int8`: blocks of numbers that share a scale, as in Dettmers et al. (2022, arXiv 2110.02861), but
with evenly spaced codes."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import BLOCK, INT8, SCALE_BYTES, num_blocks, row_bytes
from swarmnet.training.codecs.base import (
    LARGEST_SCALED,
    SMALLEST,
    Codec,
    as_bytes,
    check_rows,
    check_scales,
    divided,
    in_blocks,
    pieces_of,
    split_scales,
)

LARGEST_CODE = 127


class Int8(Codec):
    """A number is code x scale, with a code from -127 to 127 and the scale of its block.

    The scale is m / 127, rounded to bfloat16, where m is the largest magnitude of the block; codes
    are rounded to the nearest, ties to even. The error of a number is at most half a scale, that is
    0.00396 m. (Where all numbers of a block are below 2^-100, m is 2^-100.)
    """

    name = INT8

    def encode(self, values: Tensor) -> Tensor:
        coded, scratch = _empty_rows(values), _scratch(values)
        n = values.shape[1]
        for piece, out in zip(pieces_of(values, n), pieces_of(coded, n), strict=True):
            _encode(piece, out, scratch[: piece.shape[0]])
        return coded

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        check_rows(what, coded, row_bytes(INT8, num_values))
        _check(what, *split_scales(coded, num_blocks(num_values, BLOCK)))

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        values = coded.new_empty((coded.shape[0], num_values), dtype=torch.float32)
        pieces = pieces_of(coded, num_values), pieces_of(values, num_values)
        for piece, out in zip(*pieces, strict=True):
            _decode(*split_scales(piece, num_blocks(num_values, BLOCK)), out)
        return values

    def read(self, what: str, coded: Tensor, num_values: int) -> Tensor:
        check_rows(what, coded, row_bytes(INT8, num_values))
        values = coded.new_empty((coded.shape[0], num_values), dtype=torch.float32)
        pieces = pieces_of(coded, num_values), pieces_of(values, num_values)
        for piece, out in zip(*pieces, strict=True):
            scales, codes = split_scales(piece, num_blocks(num_values, BLOCK))
            _check(what, scales, codes)
            _decode(scales, codes, out)
        return values

    def round_trip(self, values: Tensor) -> tuple[Tensor, Tensor]:
        n = values.shape[1]
        coded, decoded = _empty_rows(values), torch.empty_like(values)
        pieces = (pieces_of(rows, n) for rows in (values, coded, decoded))
        for piece, out, back in zip(*pieces, strict=True):
            _round(piece, out, back)
        return coded, decoded

    def rounded(self, values: Tensor, what: str | None = None) -> Tensor:
        n, decoded = values.shape[1], torch.empty_like(values)
        for piece, back in zip(pieces_of(values, n), pieces_of(decoded, n), strict=True):
            scales = _round(piece, None, back)
            if what is not None:
                check_scales(what, scales, 0.0, LARGEST_SCALED / LARGEST_CODE)
        return decoded


def _empty_rows(values: Tensor) -> Tensor:
    rows, n = values.shape
    return values.new_empty((rows, row_bytes(INT8, n)), dtype=torch.uint8)


def _scratch(values: Tensor) -> Tensor:
    """fp32 [rows, blocks, BLOCK], for a piece of these rows."""
    rows, n = pieces_of(values, values.shape[1])[0].shape
    return values.new_empty((rows, num_blocks(n, BLOCK), BLOCK))


def _round(values: Tensor, out: Tensor | None, back: Tensor) -> Tensor:
    """Coded rows, into `out` where they are wanted, and decoded again, into `back`. Returns the
    scales."""
    n = values.shape[1]
    blocks = back.view(-1, n // BLOCK, BLOCK) if n % BLOCK == 0 else _scratch(values)
    scales = _encode(values, out, blocks)
    # Of -0.0, the code of a small negative number, decoding makes 0.0.
    blocks.add_(0.0).mul_(scales)
    if n % BLOCK:
        back.copy_(blocks.flatten(1)[:, :n])
    return scales


def _encode(values: Tensor, out: Tensor | None, scratch: Tensor) -> Tensor:
    """Coded rows, into `out` where they are wanted, and their codes as fp32 [rows, blocks, BLOCK],
    into `scratch`. Returns the scales, fp32 [rows, blocks, 1]."""
    blocks = in_blocks(values, BLOCK)
    # Two quick passes: on a CPU `aminmax` along a short dimension takes five times as long.
    largest = torch.abs(blocks, out=scratch).amax(dim=-1, keepdim=True).clamp_min_(SMALLEST)
    # The nearest bfloat16 is at most 2^-8 too small: the largest code is then below 127.5.
    rounded = divided(largest, LARGEST_CODE).bfloat16()
    scales = rounded.float()
    codes = torch.div(blocks, scales, out=scratch).round_().flatten(1)
    if out is None:
        return scales
    end = SCALE_BYTES * scales.shape[1]
    out[:, :end] = as_bytes(rounded.squeeze(-1))
    out[:, end:].view(torch.int8).copy_(codes[:, : values.shape[1]])
    return scales


def _check(what: str, scales: Tensor, codes: Tensor) -> None:
    check_scales(what, scales, 0.0, LARGEST_SCALED / LARGEST_CODE)
    if codes.numel() and codes.view(torch.int8).amin().item() < -LARGEST_CODE:
        raise ProtocolViolation(f"{what}: a code outside [-{LARGEST_CODE}, {LARGEST_CODE}]")


def _decode(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    """Into fp32 [rows, n]."""
    n = out.shape[1]
    out.copy_(codes.view(torch.int8))
    num_whole = n // BLOCK
    if n % BLOCK:
        out[:, num_whole * BLOCK :].mul_(scales[:, num_whole:])
        scales, out = scales[:, :num_whole], out[:, : num_whole * BLOCK]
    out.view(out.shape[0], num_whole, BLOCK).mul_(scales.unsqueeze(-1))
