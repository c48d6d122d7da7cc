"""`topk`: of a chunk the largest numbers, in 2 bits each, after SparseLoCo (Sarfi et al. 2025,
arXiv 2508.15706). Of use only where what is lost is added to what is coded next."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import (
    CHUNK,
    KEPT,
    SCALE_BYTES,
    TOPK,
    num_blocks,
    row_bytes,
    sparse_codec,
)
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


class FewOfChunk(Codec):
    """`topk-K`: the same with fewer numbers, K a chunk, and with the bound of it for K in place of
    `KEPT`. Places are 12 bits each, ascending."""

    def __init__(self, kept: int) -> None:
        """`kept`: as `protocol.codecs.kept_by` gives it."""
        self.name = sparse_codec(kept)
        self._kept = kept
        self._place_bytes = kept * 3 // 2

    def encode(self, values: Tensor) -> Tensor:
        n = values.shape[1]
        return torch.cat([self._encode(piece) for piece in pieces_of(values, n)])

    def check(self, what: str, coded: Tensor, num_values: int) -> None:
        check_rows(what, coded, row_bytes(self.name, num_values))
        levels, packed = split_scales(coded, 2 * num_blocks(num_values, CHUNK))
        check_scales(what, levels, 0.0, 1.01 * LARGEST_VALUE)
        places = self._places(self._by_chunk(packed))
        if not bool((places.diff(dim=-1) > 0).all()):
            raise ProtocolViolation(f"{what}: places of a chunk that do not ascend")

    def decode(self, coded: Tensor, num_values: int) -> Tensor:
        pieces = pieces_of(coded, num_values)
        return torch.cat([self._decode(piece, num_values) for piece in pieces])

    def _encode(self, values: Tensor) -> Tensor:
        chunks = in_blocks(values, CHUNK)
        places = chunks.abs().topk(self._kept, dim=-1, sorted=False).indices
        places = places.sort(dim=-1).values
        levels, codes = _leveled(chunks.gather(-1, places))
        one, other = places.int().chunk(2, dim=-1)
        parts = one & 255, (one >> 8) | ((other & 15) << 4), other >> 4
        packed = torch.cat([*(part.to(torch.uint8) for part in parts), codes], dim=-1)
        return torch.cat([as_bytes(levels.flatten(1)), packed.flatten(1)], dim=1)

    def _decode(self, coded: Tensor, num_values: int) -> Tensor:
        levels, packed = split_scales(coded, 2 * num_blocks(num_values, CHUNK))
        packed = self._by_chunk(packed)
        numbers = _numbers(levels, packed[..., self._place_bytes :])
        chunks = torch.zeros(*packed.shape[:2], CHUNK, device=coded.device)
        chunks.scatter_(-1, self._places(packed), numbers)
        return chunks.flatten(1)[:, :num_values]

    def _by_chunk(self, packed: Tensor) -> Tensor:
        """Coded rows without their levels as [rows, chunks, bytes]."""
        size = self._place_bytes + self._kept // 4
        return packed.reshape(packed.shape[0], -1, size)

    def _places(self, packed: Tensor) -> Tensor:
        """int64 [rows, chunks, kept], of [rows, chunks, bytes]."""
        a, b, c = packed[..., : self._place_bytes].long().chunk(3, dim=-1)
        return torch.cat([a | ((b & 15) << 8), (b >> 4) | (c << 4)], dim=-1)


def _encode(values: Tensor) -> Tensor:
    chunks = in_blocks(values, CHUNK)
    # Which of equal numbers it takes is up to the device: what is coded is never coded twice.
    places = chunks.abs().topk(KEPT, dim=-1, sorted=False).indices
    is_kept = torch.zeros_like(chunks, dtype=torch.bool).scatter_(-1, places, True)
    levels, codes = _leveled(chunks[is_kept].view(*chunks.shape[:-1], KEPT))
    packed = torch.cat([_packed(is_kept), codes], dim=-1)
    return torch.cat([as_bytes(levels.flatten(1)), packed.flatten(1)], dim=1)


def _leveled(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Levels, bfloat16 [..., 2], and packed codes, uint8 [..., kept / 4], of numbers that are
    kept."""
    sizes = kept.abs()
    is_large = sizes > _mean(sizes, torch.ones_like(sizes, dtype=torch.bool))
    low, high = _mean(sizes, ~is_large), _mean(sizes, is_large)
    codes = is_large.to(torch.uint8) | ((kept < 0).to(torch.uint8) << 1)
    a, b, c, d = codes.chunk(4, dim=-1)
    levels = torch.cat([low, high], dim=-1).to(torch.bfloat16)
    return levels, a | (b << 2) | (c << 4) | (d << 6)


def _mean(sizes: Tensor, which: Tensor) -> Tensor:
    """[..., 1]; zero of none."""
    total = torch.where(which, sizes, 0.0).sum(dim=-1, keepdim=True)
    return total / which.sum(dim=-1, keepdim=True).clamp_min(1)


def _decode(coded: Tensor, num_values: int) -> Tensor:
    levels, packed = split_scales(coded, 2 * num_blocks(num_values, CHUNK))
    packed = _by_chunk(packed)
    chunks = torch.zeros(*packed.shape[:2], CHUNK, device=coded.device)
    chunks.masked_scatter_(_places(packed), _numbers(levels, packed[..., PLACE_BYTES:]))
    return chunks.flatten(1)[:, :num_values]


def _numbers(levels: Tensor, packed: Tensor) -> Tensor:
    """The reverse of `_leveled`. `levels`: of rows, [rows, 2 chunks]; `packed`: [rows, chunks,
    bytes]."""
    levels = levels.reshape(*packed.shape[:2], 2)
    codes = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    sizes = levels.gather(-1, (codes & 1).long())
    return torch.where(codes > 1, -sizes, sizes)


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
