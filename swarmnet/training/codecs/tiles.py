"""`int7`, `int6` and `int4`: small tiles, rotated where that makes the largest number smaller,
after TAH-Quant (He et al., 2025, arXiv 2506.01352).

A few large numbers (outliers) in a tile make its scale large, and the error of all others with it.
The Hadamard matrix H, of +1 and -1, spreads each number over the whole tile. H H = `TILE` x 1, so
the same matrix takes it back.

The grid of a tile is shifted by a part of a step that differs from number to number, and the
decoded number is shifted back (subtractive dither, Roberts 1962; Schuchman 1964). The shifts follow
from the scale's first byte, which both sides know, and the place: equal numbers have equal bytes.
So where number, scale and place are the same, the error is too. Over the scales of many tiles its
mean is about zero, whatever is coded. And the grid is mostly another one at the next boundary,
where the same one would swallow what a layer in between adds
(docs/decisions/0011-activations-get-the-bits.md).

Both ways all sums are of multiples of one number that fp32 (and TF32) has exactly, in any order. So
every machine gets the same bits from a matrix product.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from swarmnet.protocol.codecs import INT4, INT6, INT7, TILE, TILE_BITS, num_blocks, row_bytes
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
REACH = {INT7: 63.25, INT6: 31.375, INT4: 7.46875}
"""Steps from 0 to the largest magnitude of a tile: with its shift, and the rounding of its scale to
bfloat16, it still has a code."""
NUM_SHIFTS = 16
"""The middles of so many equal parts of a step. With a code of 7 bits they have the 11 bits of
TF32."""


class Tiles(Codec):
    """A number is (code + 1/2 - shift) x scale, or where the scale is negative, H times these.

    Let m be the largest magnitude of a tile and q its `REACH`. The root mean square error of the
    numbers of a tile is at most e m with e = 1.004 / (2 q) + 1 / (2 GRID), that is 0.0082, 0.0163
    or 0.0675. The error of one number is at most e m in a tile that is not rotated, and
    sqrt(TILE) e m in one that is. (Where all numbers of a tile are below 2^-100, m is 2^-100.) A
    tile of zeros comes back as zeros.
    """

    def __init__(self, name: str) -> None:
        """`name`: of `protocol.codecs.TILE_BITS`."""
        self.name = name
        self.bits = TILE_BITS[name]
        self.reach = REACH[name]
        self._middle = 1 << (self.bits - 1)
        """Of the codes as they are stored, from 0."""
        self._spare = 8 - self.bits
        """Of a byte beside a code. A tile is cut into parts, and the codes of the last one are
        spread over those bits of the others."""
        self._num_parts = 8 // self._spare

    def encode(self, values: Tensor) -> Tensor:
        n = values.shape[1]
        return torch.cat([self._encode(piece) for piece in pieces_of(values, n)])

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        check_rows(what, coded, row_bytes(self.name, num_values))
        scales, _ = split_scales(coded, num_blocks(num_values, TILE))
        most = LARGEST_SCALED / self.reach
        check_scales(what, scales, -most / TILE, most)

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        pieces = pieces_of(coded, num_values)
        return torch.cat([self._decode(piece, num_values) for piece in pieces])

    def _encode(self, values: Tensor) -> Tensor:
        tiles = in_blocks(values, TILE)
        largest = largest_of(tiles)
        step = divided(largest.clamp_min(SMALLEST), GRID)
        whole = (tiles / step).round_()
        rotated = whole @ hadamard(values.device)
        largest_rotated = largest_of(rotated)
        is_rotated = largest_rotated < math.sqrt(TILE) * GRID
        # Numbers of a tile of zeros are rotated to zeros.
        steps = torch.where(is_rotated, largest_rotated.clamp_min(1.0) / TILE, float(GRID))
        scales = divided(step * steps, self.reach).to(torch.bfloat16)
        factors = torch.where(is_rotated, step / TILE, step) / scales.float()
        codes = torch.where(is_rotated, rotated, whole).mul_(factors)
        codes.add_(_shifts_of(scales)).floor_()
        signed = torch.where(is_rotated, -scales, scales).masked_fill_(largest == 0, 0.0)
        packed = self._packed(codes.add_(self._middle).to(torch.uint8))
        return torch.cat([as_bytes(signed.squeeze(-1)), packed.flatten(1)], 1)

    def _decode(self, coded: Tensor, num_values: int) -> Tensor:
        scales, packed = split_scales(coded, num_blocks(num_values, TILE))
        scales = scales.unsqueeze(-1)
        codes = self._unpacked(packed).float().sub_(self._middle - 0.5)
        codes.sub_(_shifts_of(scales.to(torch.bfloat16)))
        tiles = torch.where(scales < 0, codes @ hadamard(coded.device), codes)
        return tiles.mul_(scales.abs()).flatten(1)[:, :num_values]

    def _packed(self, codes: Tensor) -> Tensor:
        """uint8 [rows, tiles, TILE] below 2^bits as [rows, tiles, bytes]."""
        parts = codes.view(torch.int32).unflatten(-1, (self._num_parts, -1))
        places = self._places(codes.device)
        spread = (parts[..., -1:, :] >> places) & _in_each_byte((1 << self._spare) - 1)
        packed = parts[..., :-1, :] | (spread << self.bits)
        return packed.flatten(-2).view(torch.uint8)

    def _unpacked(self, packed: Tensor) -> Tensor:
        """The reverse, of [rows, bytes]."""
        tiles = in_blocks(packed, TILE * self.bits // 8)
        tiles = tiles.clone(memory_format=torch.contiguous_format)  # aligned
        parts = tiles.view(torch.int32).unflatten(-1, (self._num_parts - 1, -1))
        spread = (parts >> self.bits) & _in_each_byte((1 << self._spare) - 1)
        places = self._places(packed.device)
        last = (spread << places).sum(-2, keepdim=True, dtype=torch.int32)
        parts = parts & _in_each_byte((1 << self.bits) - 1)
        return torch.cat([parts, last], dim=-2).flatten(-2).view(torch.uint8)

    def _places(self, device: torch.device) -> Tensor:
        """Where the bits begin of a code of the last part that each other part has."""
        return _multiples(self._spare, self._num_parts - 1, device)


def _in_each_byte(bits: int) -> int:
    """Of an int32 number with these bits in each byte."""
    number = bits * 0x01010101
    return number - (1 << 32) if number >> 31 else number


@functools.cache
def _multiples(of: int, count: int, device: torch.device) -> Tensor:
    """int32 [count, 1], from 0."""
    return (torch.arange(count, dtype=torch.int32) * of).unsqueeze(-1).to(device)


@functools.cache
def hadamard(device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix of +1 and -1, fp32 [TILE, TILE]."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < TILE:
        above = torch.cat([matrix, matrix], dim=1)
        matrix = torch.cat([above, torch.cat([matrix, -matrix], dim=1)])
    return matrix.to(device)


def _shifts_of(scales: Tensor) -> Tensor:
    """In steps, fp32 [rows, tiles, TILE], of tiles with these scales, bfloat16 [rows, tiles, 1]."""
    rows, tiles, _ = scales.shape
    first_bytes = scales.contiguous().view(torch.uint8)[..., 0].flatten()
    return shifts(scales.device).index_select(0, first_bytes.int()).view(rows, tiles, TILE)


@functools.cache
def shifts(device: torch.device) -> Tensor:
    """In steps, fp32 [256, TILE]: by the first byte of a tile's scale (its seven digits, and the
    last one of its exponent) and the place of a number, pseudo-random."""
    table = [[(2 * _hashed(TILE * byte + i) + 1) for i in range(TILE)] for byte in range(256)]
    return (torch.tensor(table, dtype=torch.float32) / (2 * NUM_SHIFTS) - 0.5).to(device)


def _hashed(number: int) -> int:
    """Below `NUM_SHIFTS`, of a small number."""
    mixed = number * 0x7FEB352D & 0xFFFFFFFF
    mixed ^= mixed >> 15
    return (mixed * 0x2C1B3C6D & 0xFFFFFFFF) * NUM_SHIFTS >> 32
