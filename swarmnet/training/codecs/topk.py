"""`topk`: of a chunk the largest numbers, in 2 bits each, after SparseLoCo (Sarfi et al. 2025,
arXiv 2508.15706). Of use only where what is lost is added to what is coded next."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import CHUNK, KEPT, SCALE_BYTES, TOPK, num_blocks, row_bytes
from swarmnet.training.arrays import LARGEST_VALUE
from swarmnet.training.codecs.base import (
    Codec,
    as_bytes,
    check_rows,
    check_scales,
    in_blocks,
    pieces_of,
    split_scales,
)

PLACE_BYTES = CHUNK // 8


class TopK(Codec):
    """The `KEPT` numbers of a chunk that have the largest magnitudes; all others become zero.

    A number that is kept has one of four values, + or - one of two levels: the mean magnitude of
    those above the mean of all kept, and of the others. Let x be a chunk, k the numbers of it that
    are kept, and v the part of |k|^2 that the two means do not explain. A level is within 2^-8 of
    its mean, which adds at most 2^-16 (1 - v) |k|^2 to the squared error. So the error e of the
    whole chunk has |e|^2 <= |x|^2 - c |k|^2 <= |x|^2 (1 - c KEPT / CHUNK), with
    c = (1 - 2^-16) (1 - v), but for what fp32 rounds in the means (and levels below 2^-126, which
    are within 2^-134). As v < 1, that is a contraction, as error feedback wants. Where there are
    fewer than `KEPT` numbers in a chunk, zeros are kept too.

    Places are a bit for each number of the chunk. With every other number kept that is a sixth of
    what places of 12 bits would take.

    Which of equal magnitudes are kept may differ from device to device.
    """

    name = TOPK

    def encode(self, values: Tensor) -> Tensor:
        n = values.shape[1]
        return torch.cat([_encode(piece) for piece in pieces_of(values, n)])

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        check_rows(what, coded, row_bytes(TOPK, num_values))
        levels, packed = split_scales(coded, 2 * num_blocks(num_values, CHUNK))
        check_scales(what, levels, 0.0, 1.01 * LARGEST_VALUE)
        is_kept = _places(_by_chunk(packed))
        if bool((is_kept.sum(dim=-1) != KEPT).any()):
            raise ProtocolViolation(f"{what}: a chunk that does not keep {KEPT} numbers")

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        pieces = pieces_of(coded, num_values)
        return torch.cat([_decode(piece, num_values) for piece in pieces])


def _encode(values: Tensor) -> Tensor:
    chunks = in_blocks(values, CHUNK)
    # Which of equal numbers it takes is up to the device: what is coded is never coded twice.
    places = chunks.abs().topk(KEPT, dim=-1, sorted=False).indices
    is_kept = torch.zeros_like(chunks, dtype=torch.bool).scatter_(-1, places, True)
    kept = chunks[is_kept].view(*chunks.shape[:-1], KEPT)
    sizes = kept.abs()
    is_large = sizes > _mean(sizes, torch.ones_like(sizes, dtype=torch.bool))
    low, high = _mean(sizes, ~is_large), _mean(sizes, is_large)
    levels = torch.cat([low, high], dim=-1).to(torch.bfloat16)
    codes = is_large.to(torch.uint8) | ((kept < 0).to(torch.uint8) << 1)
    a, b, c, d = codes.chunk(4, dim=-1)
    packed = torch.cat([_packed(is_kept), a | (b << 2) | (c << 4) | (d << 6)], dim=-1)
    return torch.cat([as_bytes(levels.flatten(1)), packed.flatten(1)], dim=1)


def _mean(sizes: Tensor, which: Tensor) -> Tensor:
    """[..., 1]; zero of none."""
    total = torch.where(which, sizes, 0.0).sum(dim=-1, keepdim=True)
    return total / which.sum(dim=-1, keepdim=True).clamp_min(1)


def _decode(coded: Tensor, num_values: int) -> Tensor:
    levels, packed = split_scales(coded, 2 * num_blocks(num_values, CHUNK))
    packed = _by_chunk(packed)
    levels = levels.reshape(*packed.shape[:2], 2)
    parts = packed[..., PLACE_BYTES:]
    codes = torch.cat([(parts >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    sizes = levels.gather(-1, (codes & 1).long())
    numbers = torch.where(codes > 1, -sizes, sizes)
    chunks = torch.zeros(*packed.shape[:2], CHUNK, device=coded.device)
    chunks.masked_scatter_(_places(packed), numbers)
    return chunks.flatten(1)[:, :num_values]


def _by_chunk(packed: Tensor) -> Tensor:
    """Coded rows without their levels as [rows, chunks, bytes]."""
    return packed.reshape(packed.shape[0], -1, row_bytes(TOPK, CHUNK) - 2 * SCALE_BYTES)


def _packed(is_kept: Tensor) -> Tensor:
    """Bits of a chunk, eight neighbours in a byte, the first one the lowest."""
    bits = is_kept.to(torch.uint8).unflatten(-1, (-1, 8))
    return (bits << _SHIFTS.to(bits.device)).sum(dim=-1, dtype=torch.uint8)


def _places(packed: Tensor) -> Tensor:
    """The reverse, bool [rows, chunks, CHUNK], of [rows, chunks, bytes]."""
    bits = packed[..., :PLACE_BYTES, None] >> _SHIFTS.to(packed.device)
    return (bits & 1).bool().flatten(-2)


_SHIFTS = torch.arange(8, dtype=torch.uint8)
