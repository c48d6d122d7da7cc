"""`int6` and `int4`: small tiles, rotated where that makes the largest number smaller, after
TAH-Quant (He et al., 2025, arXiv 2506.01352).

A few large numbers (outliers) in a tile make its scale large, and the error of all others with it.
The Hadamard matrix H, of +1 and -1, spreads each number over the whole tile. H H = `TILE` x 1, so
the same matrix takes it back.

Both ways all sums are of whole numbers that fp32 (and TF32) has exactly, in any order. So every
machine gets the same bits from a matrix product.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import TILE, TILE_BITS, num_blocks, row_bytes
from swarmnet.training.codecs.base import (
    LARGEST_SCALED,
    SMALLEST,
    Codec,
    as_bytes,
    check_rows,
    check_scales,
    divided,
    in_blocks,
    largest_of,
    pieces_of,
    split_scales,
)

GRID = 2047
"""A tile is first rounded to so many steps of its largest magnitude: the most that TF32 has."""


class Tiles(Codec):
    """A number is code x scale, or the rotated codes' x scale, where the scale is negative.

    Let m be the largest magnitude of a tile and q the largest code (31 or 7). The root mean square
    error of the numbers of a tile is at most e m with e = 1.004 / (2 q) + 1 / (2 GRID), that is
    0.0165 or 0.0720. The error of one number is at most e m in a tile that is not rotated, and
    sqrt(TILE) e m in one that is. (Where all numbers of a tile are below 2^-100, m is 2^-100.)
    """

    def __init__(self, name: str) -> None:
        """`name`: of `protocol.codecs.TILE_BITS`."""
        self.name = name
        self.bits = TILE_BITS[name]
        self.largest_code = (1 << (self.bits - 1)) - 1

    def encode(self, values: Tensor) -> Tensor:
        n = values.shape[1]
        return torch.cat([self._encode(piece) for piece in pieces_of(values, n)])

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        check_rows(what, coded, row_bytes(self.name, num_values))
        scales, packed = split_scales(coded, num_blocks(num_values, TILE))
        most = LARGEST_SCALED / self.largest_code
        check_scales(what, scales, -most / TILE, most)
        if packed.numel() and int(self._unpacked(packed).amin()) == 0:
            raise ProtocolViolation(
                f"{what}: a code outside [-{self.largest_code}, {self.largest_code}]"
            )

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        pieces = pieces_of(coded, num_values)
        return torch.cat([self._decode(piece, num_values) for piece in pieces])

    def _encode(self, values: Tensor) -> Tensor:
        tiles = in_blocks(values, TILE)
        step = divided(largest_of(tiles).clamp_min(SMALLEST), GRID)
        whole = (tiles / step).round_()
        rotated = whole @ hadamard(values.device)
        largest = largest_of(rotated)
        is_rotated = largest < math.sqrt(TILE) * GRID
        # Numbers of a tile of zeros are rotated to zeros.
        steps = torch.where(is_rotated, largest.clamp_min(1.0) / TILE, float(GRID))
        scales = divided(step * steps, self.largest_code).to(torch.bfloat16)
        factors = torch.where(is_rotated, step / TILE, step) / scales.float()
        codes = torch.where(is_rotated, rotated, whole).mul_(factors).round_()
        signed = torch.where(is_rotated, -scales, scales)
        packed = self._packed(codes.add_(self.largest_code + 1).to(torch.uint8))
        return torch.cat([as_bytes(signed.squeeze(-1)), packed.flatten(1)], 1)

    def _decode(self, coded: Tensor, num_values: int) -> Tensor:
        scales, packed = split_scales(coded, num_blocks(num_values, TILE))
        scales = scales.unsqueeze(-1)
        codes = self._unpacked(packed).float().sub_(self.largest_code + 1)
        tiles = torch.where(scales < 0, codes @ hadamard(coded.device), codes)
        return tiles.mul_(scales.abs()).flatten(1)[:, :num_values]

    def _packed(self, codes: Tensor) -> Tensor:
        """uint8 [rows, tiles, TILE] from 1 to 2^bits - 1 as [rows, tiles, bytes]."""
        if self.bits == 4:
            low, high = codes.chunk(2, dim=-1)
            return low | (high << 4)
        a, b, c, d = codes.chunk(4, dim=-1)
        return torch.cat([a | (d << 6), b | (d >> 2 << 6), c | (d >> 4 << 6)], dim=-1)

    def _unpacked(self, packed: Tensor) -> Tensor:
        """The reverse, of [rows, bytes]."""
        parts = in_blocks(packed, TILE * self.bits // 8)
        if self.bits == 4:
            return torch.cat([parts & 15, parts >> 4], dim=-1)
        a, b, c = parts.chunk(3, dim=-1)
        d = (a >> 6) | (b >> 6 << 2) | (c >> 6 << 4)
        return torch.cat([a & 63, b & 63, c & 63, d], dim=-1)


@functools.cache
def hadamard(device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix of +1 and -1, fp32 [TILE, TILE]."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < TILE:
        above = torch.cat([matrix, matrix], dim=1)
        matrix = torch.cat([above, torch.cat([matrix, -matrix], dim=1)])
    return matrix.to(device)
