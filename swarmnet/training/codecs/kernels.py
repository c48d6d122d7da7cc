"""Triton kernels of `int8`, `int6` and `int4`: one that encodes, one that decodes, and both check.

A module of its own, since Triton comes with torch for CUDA alone: `fused` imports it when there is
a device for it. The bits are those of `blocks` and `tiles`, because each step is one that IEEE 754
defines, in the same order: `div_rn` is the exactly rounded quotient, products and sums are not
fused (`enable_fp_fusion`), rounding to integers is the addition of `1.5 * 2^23`, which is to the
nearest, ties to even, below 2^22, and what rounds to bfloat16 is whole-number arithmetic. Largest
magnitudes are found among the bits of the numbers, whose order is that of the magnitudes, with NaN
above all.

One program codes a group of blocks of one row. It writes one byte of findings: not 0 where a scale
or a code is none that `check` takes. What a kernel is compiled for is in capitals, as is usual.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import swarmnet.training.accelerators as accelerators
from swarmnet.protocol.codecs import BLOCK, INT8, TILE, TILE_BITS, num_blocks, row_bytes
from swarmnet.training.codecs.base import LARGEST_SCALED, SMALLEST
from swarmnet.training.codecs.blocks import LARGEST_CODE
from swarmnet.training.codecs.tiles import GRID, NUM_SHIFTS, REACH

NUMBERS = 2048
"""That one program codes at most."""
LEAST_TILES = 16
"""Of a program: the fewest rows of a matrix product."""
NUM_WARPS = 4
EXACT = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}


def kernels_of(name: str, num_values: int) -> TritonKernels | None:
    """For rows of so many numbers. None for a codec that has no kernels."""
    if name == INT8:
        return _int8_kernels(num_values)
    return _tile_kernels(name, num_values) if name in TILE_BITS else None


class TritonKernels:
    """Implements `fused.Kernels`."""

    def __init__(
        self,
        encode: Any,
        decode: Any,
        num_findings: int,
        options: dict[str, Any],
        encodes: dict[str, Any],
    ) -> None:
        """`options`: of both kernels; `encodes`: of the one that encodes besides."""
        self.num_findings = num_findings
        self._encode = encode
        self._decode = decode
        self._options = options | EXACT
        self._encodes = encodes

    def encode(self, values: Tensor, coded: Tensor, findings: Tensor) -> None:
        with accelerators.present(values.device):
            self._encode[values.shape[0], self.num_findings](
                *_numbers(values), coded, findings, **self._encodes, **self._options
            )

    def decode(self, coded: Tensor, values: Tensor, findings: Tensor) -> None:
        with accelerators.present(values.device):
            self._decode[values.shape[0], self.num_findings](
                coded, *_numbers(values), findings, **self._options
            )


def _int8_kernels(num_values: int) -> TritonKernels:
    """For `blocks.Int8`."""
    blocks = num_blocks(num_values, BLOCK)
    group = min(triton.next_power_of_2(blocks), NUMBERS // BLOCK)
    options = {
        "N": num_values,
        "BLOCKS": blocks,
        "ROW": row_bytes(INT8, num_values),
        "BLOCK": BLOCK,
        "GROUP": group,
        "LARGEST_CODE": LARGEST_CODE,
        "LARGEST_SCALE": bfloat16_bits(LARGEST_SCALED / LARGEST_CODE),
    }
    encodes = {"SMALLEST": float_bits(SMALLEST)}
    return TritonKernels(_encode_int8, _decode_int8, triton.cdiv(blocks, group), options, encodes)


def _tile_kernels(name: str, num_values: int) -> TritonKernels:
    """For `tiles.Tiles`."""
    tiles, most = num_blocks(num_values, TILE), LARGEST_SCALED / REACH[name]
    group = max(LEAST_TILES, min(triton.next_power_of_2(tiles), NUMBERS // TILE))
    options = {
        "N": num_values,
        "TILES": tiles,
        "ROW": row_bytes(name, num_values),
        "TILE": TILE,
        "BITS": TILE_BITS[name],
        "GROUP": group,
        "NUM_SHIFTS": NUM_SHIFTS,
        "LARGEST_SCALE": bfloat16_bits(most),
        "LARGEST_ROTATED": bfloat16_bits(most / TILE),
    }
    encodes = {
        "GRID": GRID,
        "REACH": REACH[name],
        "MOST_ROTATED": math.floor(math.sqrt(TILE) * GRID),  # rotated numbers are whole ones
        "SMALLEST": float_bits(SMALLEST),
    }
    return TritonKernels(_encode_tiles, _decode_tiles, triton.cdiv(tiles, group), options, encodes)


def float_bits(value: float) -> int:
    """Of the fp32 number."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def bfloat16_bits(value: float) -> int:
    """Of the largest bfloat16 number that is not above a positive one."""
    bits = float_bits(value) >> 16
    (number,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return bits if number <= value else bits - 1


def _numbers(values: Tensor) -> tuple[Tensor, bool]:
    """A tensor of fp32 as it is, one of bfloat16 as its bits, and which it is."""
    is_bf16 = values.dtype is torch.bfloat16
    return (values.view(torch.int16) if is_bf16 else values), is_bf16


# ---- numbers --------------------------------------------------------------------------------


@triton.jit
def _load_numbers(pointers: tl.tensor, mask: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """As fp32."""
    numbers = tl.load(pointers, mask=mask, other=0)
    if IS_BF16:
        numbers = _widened(numbers.to(tl.int32))
    return numbers


@triton.jit
def _store_numbers(
    pointers: tl.tensor, values: tl.tensor, mask: tl.tensor, IS_BF16: tl.constexpr
) -> None:
    if IS_BF16:
        bits = values.to(tl.int32, bitcast=True)
        sign = (bits >> 16) & 0x8000
        tl.store(pointers, (_bfloat16(bits) | sign).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _bfloat16(bits: tl.tensor) -> tl.tensor:
    """fp32 numbers' bits to those of their magnitudes in bfloat16."""
    bits = bits & 0x7FFFFFFF
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(bits > 0x7F800000, 0x7FC0, nearest)


@triton.jit
def _widened(bits: tl.tensor) -> tl.tensor:
    """bfloat16 numbers' bits as fp32 numbers."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(values: tl.tensor) -> tl.tensor:
    """fp32 numbers below 2^22 as int32."""
    return (values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _largest(blocks: tl.tensor, SMALLEST: tl.constexpr) -> tl.tensor:
    """The largest magnitude of each line, at least `SMALLEST` (bits), fp32 [lines, 1]."""
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.maximum(tl.max(bits, axis=1), SMALLEST)
    return tl.expand_dims(largest, 1).to(tl.float32, bitcast=True)


@triton.jit
def _load_scales(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Their bits. Scales need not be aligned, so byte by byte."""
    low = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    return low | (tl.load(pointers + 1, mask=mask, other=0).to(tl.int32) << 8)


@triton.jit
def _store_scales(pointers: tl.tensor, bits: tl.tensor, mask: tl.tensor) -> None:
    tl.store(pointers, (bits & 255).to(tl.uint8), mask=mask)
    tl.store(pointers + 1, (bits >> 8).to(tl.uint8), mask=mask)


@triton.jit
def _store_finding(findings: tl.tensor, is_wrong: tl.tensor) -> None:
    """Of this program. `is_wrong`: of a block each, int32."""
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(findings + program, tl.max(is_wrong, axis=0).to(tl.uint8))


# ---- int8 -----------------------------------------------------------------------------------


@triton.jit
def _encode_int8(
    values: tl.tensor,
    IS_BF16: tl.constexpr,
    coded: tl.tensor,
    findings: tl.tensor,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    numbers = _load_numbers(values + row * N + places, places < N, IS_BF16)
    largest = _largest(numbers, SMALLEST)
    scales = _bfloat16(tl.div_rn(largest, LARGEST_CODE * 1.0).to(tl.int32, bitcast=True))
    codes = _nearest(tl.div_rn(numbers, _widened(scales)))
    start = coded + row * ROW
    bits = tl.reshape(scales, [GROUP])
    _store_scales(start + 2 * blocks, bits, blocks < BLOCKS)
    tl.store(start + 2 * BLOCKS + places, codes.to(tl.uint8), mask=places < N)
    _store_finding(findings, (bits > LARGEST_SCALE).to(tl.int32))


@triton.jit
def _decode_int8(
    coded: tl.tensor,
    values: tl.tensor,
    IS_BF16: tl.constexpr,
    findings: tl.tensor,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = coded + row * ROW
    scales = _load_scales(start + 2 * blocks, blocks < BLOCKS)
    codes = tl.load(start + 2 * BLOCKS + places, mask=places < N, other=0).to(tl.int32)
    codes = ((codes & 255) ^ 128) - 128
    numbers = codes.to(tl.float32) * tl.expand_dims(_widened(scales), 1)
    _store_numbers(values + row * N + places, numbers, places < N, IS_BF16)
    # -0.0 is a scale that `check` takes, as it is not below 0.
    is_wrong = ((scales > LARGEST_SCALE) & (scales != 0x8000)).to(tl.int32)
    is_outside = (codes < -LARGEST_CODE).to(tl.int32)
    _store_finding(findings, tl.maximum(is_wrong, tl.max(is_outside, axis=1)))


# ---- int6 and int4 --------------------------------------------------------------------------


@triton.jit
def _rotated(tiles: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """fp32 numbers of at most 11 bits, each line times Sylvester's matrix, exactly: they are fp16
    numbers, and their sums are fp32 numbers."""
    lines = tl.arange(0, TILE)
    parity = lines[:, None] & lines[None, :]
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return tl.dot(tiles.to(tl.float16), (1 - 2 * parity).to(tl.float16))


@triton.jit
def _shifts(scales: tl.tensor, TILE: tl.constexpr, NUM_SHIFTS: tl.constexpr) -> tl.tensor:
    """`tiles.shifts` of tiles with these scales (bits, int32 [tiles, 1]), fp32 [tiles, TILE]."""
    mixed = ((scales & 255) * TILE + tl.arange(0, TILE)[None, :]).to(tl.uint32)
    mixed *= 0x7FEB352D
    mixed ^= mixed >> 15
    mixed *= 0x2C1B3C6D
    hashed = (mixed >> 16).to(tl.int32) // (65536 // NUM_SHIFTS)
    return (2 * hashed + 1).to(tl.float32) * (0.5 / NUM_SHIFTS) - 0.5


@triton.jit
def _encode_tiles(
    values: tl.tensor,
    IS_BF16: tl.constexpr,
    coded: tl.tensor,
    findings: tl.tensor,
    N: tl.constexpr,
    TILES: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SHIFTS: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    LARGEST_ROTATED: tl.constexpr,
    GRID: tl.constexpr,
    REACH: tl.constexpr,
    MOST_ROTATED: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    places = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    numbers = _load_numbers(values + row * N + places, places < N, IS_BF16)
    largest_number = _largest(numbers, 0)
    step = tl.div_rn(_largest(numbers, SMALLEST), GRID * 1.0)
    whole = _nearest(tl.div_rn(numbers, step)).to(tl.float32)
    rotated = _rotated(whole, TILE)
    largest = tl.expand_dims(tl.max(tl.abs(rotated), axis=1), 1)
    is_rotated = largest <= MOST_ROTATED * 1.0
    steps = tl.where(is_rotated, tl.maximum(largest, 1.0) * (1.0 / TILE), GRID * 1.0)
    quotient = tl.div_rn(step * steps, REACH)
    scales = _bfloat16(quotient.to(tl.int32, bitcast=True))
    factors = tl.div_rn(tl.where(is_rotated, step * (1.0 / TILE), step), _widened(scales))
    quotients = tl.where(is_rotated, rotated, whole) * factors
    quotients += _shifts(scales, TILE, NUM_SHIFTS)
    codes = tl.floor(quotients).to(tl.int32) + (1 << (BITS - 1))
    start = coded + row * ROW
    most = tl.where(is_rotated, LARGEST_ROTATED, LARGEST_SCALE)
    is_wrong = tl.reshape((scales > most).to(tl.int32), [GROUP])
    signed = tl.where(is_rotated, scales | 0x8000, scales)
    signed = tl.reshape(tl.where(largest_number == 0.0, 0, signed), [GROUP])
    _store_scales(start + 2 * tiles, signed, tiles < TILES)
    _store_packed(start + 2 * TILES, tiles, codes, TILES, BITS, GROUP)
    _store_finding(findings, is_wrong)


@triton.jit
def _store_packed(
    start: tl.tensor,
    tiles: tl.tensor,
    codes: tl.tensor,
    TILES: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    # A byte of each of the first parts has bits of the last one's code in its spare bits.
    SPARE: tl.constexpr = 8 - BITS
    PARTS: tl.constexpr = 8 // SPARE
    WIDTH: tl.constexpr = codes.shape[1] // PARTS
    parts = tl.reshape(codes, [GROUP, PARTS, WIDTH])
    index = tl.arange(0, PARTS)[None, :, None]
    last = tl.sum(tl.where(index == PARTS - 1, parts, 0), axis=1)
    spread = (tl.expand_dims(last, 1) >> (SPARE * index)) & ((1 << SPARE) - 1)
    offsets = tiles[:, None, None] * (WIDTH * (PARTS - 1)) + index * WIDTH
    pointers = start + offsets + tl.arange(0, WIDTH)[None, None, :]
    is_stored = (tiles[:, None, None] < TILES) & (index < PARTS - 1)
    tl.store(pointers, (parts | (spread << BITS)).to(tl.uint8), mask=is_stored)


@triton.jit
def _load_packed(
    start: tl.tensor,
    tiles: tl.tensor,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """int32 [tiles, TILE]; zeros beyond the last tile."""
    SPARE: tl.constexpr = 8 - BITS
    WIDTH: tl.constexpr = TILE * SPARE // 8
    first = start + tiles[:, None] * (TILE - WIDTH)
    is_tile = tiles[:, None] < TILES
    places = tl.arange(0, TILE)[None, :]
    is_last = places >= TILE - WIDTH
    byte = tl.load(first + places, mask=is_tile & (places < TILE - WIDTH), other=0).to(tl.int32)
    last = tl.zeros_like(byte)
    for i in tl.static_range(8 // SPARE - 1):
        pointers = first + i * WIDTH + places % WIDTH
        other = tl.load(pointers, mask=is_tile & is_last, other=0).to(tl.int32)
        last |= other >> BITS << (SPARE * i)
    return tl.where(is_last, last, byte & ((1 << BITS) - 1))


@triton.jit
def _decode_tiles(
    coded: tl.tensor,
    values: tl.tensor,
    IS_BF16: tl.constexpr,
    findings: tl.tensor,
    N: tl.constexpr,
    TILES: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SHIFTS: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    LARGEST_ROTATED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    start = coded + row * ROW
    bits = _load_scales(start + 2 * tiles, tiles < TILES)
    raw = _load_packed(start + 2 * TILES, tiles, TILES, TILE, BITS)
    scales = bits & 0x7FFF
    shifts = _shifts(tl.expand_dims(scales, 1), TILE, NUM_SHIFTS)
    codes = raw.to(tl.float32) - ((1 << (BITS - 1)) - 0.5) - shifts
    is_rotated = bits > 0x8000  # -0.0 is not below 0
    chosen = tl.where(tl.expand_dims(is_rotated, 1), _rotated(codes, TILE), codes)
    numbers = chosen * tl.expand_dims(_widened(scales), 1)
    places = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    _store_numbers(values + row * N + places, numbers, places < N, IS_BF16)
    most = tl.where(is_rotated, LARGEST_ROTATED, LARGEST_SCALE)
    _store_finding(findings, (scales > most).to(tl.int32))
