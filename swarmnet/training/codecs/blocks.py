"""`int8`: blocks of numbers that share a scale, as in Dettmers et al. (2022, arXiv 2110.02861), but
with evenly spaced codes."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import BLOCK, INT8, num_blocks, row_bytes
from swarmnet.training.codecs.base import (
    LARGEST_SCALED,
    SMALLEST,
    as_bytes,
    check_rows,
    check_scales,
    divided,
    in_blocks,
    largest_of,
    pieces_of,
    split_scales,
)

LARGEST_CODE = 127


class Int8:
    """A number is code x scale, with a code from -127 to 127 and the scale of its block.

    The scale is m / 127, rounded to bfloat16, where m is the largest magnitude of the block; codes
    are rounded to the nearest, ties to even. The error of a number is at most half a scale, that is
    0.00396 m. (Where all numbers of a block are below 2^-100, m is 2^-100.)
    """

    name = INT8

    def encode(self, values: Tensor) -> Tensor:
        n = values.shape[1]
        return torch.cat([_encode(piece) for piece in pieces_of(values, n)])

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        check_rows(what, coded, row_bytes(INT8, num_values))
        scales, codes = split_scales(coded, num_blocks(num_values, BLOCK))
        check_scales(what, scales, 0.0, LARGEST_SCALED / LARGEST_CODE)
        if codes.numel() and int(codes.view(torch.int8).amin()) < -LARGEST_CODE:
            raise ProtocolViolation(f"{what}: a code outside [-{LARGEST_CODE}, {LARGEST_CODE}]")

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        pieces = pieces_of(coded, num_values)
        return torch.cat([_decode(piece, num_values) for piece in pieces])


def _encode(values: Tensor) -> Tensor:
    n = values.shape[1]
    blocks = in_blocks(values, BLOCK)
    largest = largest_of(blocks).clamp_min(SMALLEST)
    # The nearest bfloat16 is at most 2^-8 too small: the largest code is then below 127.5.
    scales = divided(largest, LARGEST_CODE).to(torch.bfloat16)
    codes = (blocks / scales.float()).round_().to(torch.int8)
    coded = codes.flatten(1).view(torch.uint8)[:, :n]
    return torch.cat([as_bytes(scales.squeeze(-1)), coded], dim=1)


def _decode(coded: Tensor, num_values: int) -> Tensor:
    scales, codes = split_scales(coded, num_blocks(num_values, BLOCK))
    blocks = in_blocks(codes.view(torch.int8), BLOCK).float()
    return blocks.mul_(scales.unsqueeze(-1)).flatten(1)[:, :num_values]
