"""How numbers are coded on their way between peers: names, forms and sizes, without torch.

A codec codes *rows* of fp32 numbers, each row for itself. `swarmnet.training.codecs` has the
mathematics and the error bounds. What is said here of sizes is what the wire carries, and what the
simulator charges.

| name | a row of n numbers |
|---|---|
| `none` | fp32 |
| `bf16` | bfloat16 |
| `int8` | for each block of `BLOCK` numbers a scale, then n bytes |
| `int7`, `int6`, `int4` | for each tile of `TILE` numbers a scale, then 28, 24 or 16 bytes each |
| `topk` | for each chunk of `CHUNK` numbers two levels, a bit a number, and 2 bits a number kept |
| `topk-K` | for each chunk two levels, and 12 bits and 2 bits for each of the K numbers kept |

Scales and levels are bfloat16. The last block of a row may be shorter; the last tile, and the last
chunk, are filled up with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NONE, BF16, INT8, INT7, INT6, INT4 = "none", "bf16", "int8", "int7", "int6", "int4"
TOPK = "topk"
BLOCK = 64
"""Numbers that share a scale in `int8`."""
TILE = 32
"""Numbers that share a scale in `int7`, `int6` and `int4`; a power of two, for the rotation."""
CHUNK, KEPT = 4096, 2048
"""Numbers among which `topk` keeps so many. With fewer, a run needs more exchanges to make up for
it than a short one has, see docs/convergence.md."""
TOPK_DENSITY = KEPT / CHUNK
TOPK_DENSITIES = 0.01, 0.08
"""The least and the largest part of the numbers that `topk-K` may keep."""
ERROR_DECAY = {TOPK: 0.8}
"""What is left of an error when it is added to the next contribution; 1 in other codecs. A change
that `topk` has left out is proposed again, for the replicas' parameters lack it. With all of the
errors, more would come than is missing. `topk-K` has that of `topk`."""
SPARSE = "topk-"
"""Before the number of a codec that keeps so many numbers of a chunk."""
PLACE_BITS = 12
"""Of a place in a chunk."""
KEPT_STEP = 16
"""What a codec keeps of a chunk is a multiple of that: its places are whole bytes, in pairs."""
MOST_KEPT = CHUNK // PLACE_BITS // KEPT_STEP * KEPT_STEP
"""With more, a bit for each number of the chunk says it in fewer bytes."""
RESULT_ERROR_DECAY = 0.5
"""What is left of what a result in `topk-K` has left out, when the next one is made: likewise, and
the momentum, which has it already, brings more of it
(docs/decisions/0040-few-numbers-of-a-result.md)."""
SCALE_BYTES = 2
TILE_BITS = {INT7: 7, INT6: 6, INT4: 4}
"""Of one number, in the codecs that code tiles."""
REPEATABLE = (NONE, BF16, INT8)
"""Codecs that make of numbers which they have decoded the same codes again."""
DTYPES = {NONE: "float32", BF16: "bfloat16"}
"""Of coded arrays that have the shape of what was coded; all others are rows of bytes."""

TOKEN_BYTES = 4
"""Of a token that goes beside a row, a whole number of 32 bits, the low byte first."""

AUTO = "auto"
AUTO_BOUNDARY_CODEC = INT8
"""What `[pipeline] codec = "auto"` means for a run of a language model that is started now. It may
be what docs/convergence.md has shown to be harmless. Nobody knows what crosses the boundaries of a
custom model: it is not coded."""


@dataclass(frozen=True, slots=True)
class BoundaryCodec:
    """How what crosses a boundary between two stages is coded."""

    activations: str
    """Of the codecs above, on the way up."""
    gradients: str
    """Likewise, on the way back."""


BOUNDARY_CODECS = {
    NONE: BoundaryCodec(NONE, NONE),
    BF16: BoundaryCodec(BF16, BF16),
    INT8: BoundaryCodec(INT8, INT8),
    INT6: BoundaryCodec(INT7, INT6),
    INT4: BoundaryCodec(INT7, INT4),
}
"""By name in the spec. `int6` and `int4` are the bits of gradients, and activations have 7.
TAH-Quant (He et al., 2025, arXiv 2506.01352) has fewer for activations than for gradients. But what
is lost of an activation changes the function of the model, in all layers above.
docs/decisions/0011-activations-get-the-bits.md has the figures."""


def boundary_codec(name: str) -> BoundaryCodec:
    """By `[pipeline] codec`. With `auto`, which no run has that was started, nothing is coded."""
    return BOUNDARY_CODECS[NONE if name == AUTO else name]


@dataclass(frozen=True, slots=True)
class UpdateCodec:
    """How what an update sends is coded: shards, each a row."""

    contributions: str
    """Of gradients (or changes) on their way to a primary. What coding loses of one is added to the
    next (error feedback, Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847)."""
    sums: str
    """Of their sums, which the backups get. Every owner steps on the decoded sum."""
    results: str
    """Of the change of the parameters that comes back. Everyone applies it decoded. What coding
    loses of one is added to the next. With `none`, the parameters themselves come back."""
    plain_results: str = ""
    """In place of `results`, of a step that takes over a whole change, where those leave numbers
    out of it. Empty where they do not."""

    @property
    def tells_results(self) -> bool:
        """Backups get the primary's result in place of the sum: it has far fewer numbers. What it
        leaves out, and the momentum of the sums, are known to the primary alone."""
        return bool(self.plain_results)

    @property
    def for_backups(self) -> str:
        """Of what backups get of most steps."""
        return self.results if self.tells_results else self.sums

    def of_result(self, *, is_plain: bool) -> str:
        """The codec of one. `is_plain`: of a step that takes over a whole change."""
        return self.plain_results or self.results if is_plain else self.results

    def of_contribution(self, *, is_short: bool) -> str:
        """The codec of one. `is_short`: it is a change over a single step, or the last one; what
        `topk` leaves out of these would be missed."""
        return self.sums if is_short and leaves_out(self.contributions) else self.contributions

    @property
    def is_repeatable(self) -> bool:
        """Codes of all that is sent can be made when they are asked for, of what they stand for; a
        sum of one contribution has the codes of that."""
        return self.contributions == self.sums and self.contributions in REPEATABLE

    def form(self, codec: str, size: int) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of a coded shard of so many numbers."""
        return coded_form(codec, (size,), 0)


UPDATE_CODECS = {
    NONE: UpdateCodec(NONE, NONE, NONE),
    BF16: UpdateCodec(BF16, BF16, BF16),
    INT8: UpdateCodec(INT8, INT8, INT8),
    INT4: UpdateCodec(INT4, INT6, INT4),
    TOPK: UpdateCodec(TOPK, INT6, INT4),
}
"""By name in the spec (`[sync] codec`). `topk` is for changes over many steps, as in SparseLoCo
(Sarfi et al. 2025, arXiv 2508.15706). Nothing makes up for what is lost of a sum, so sums have more
bits."""
AUTO_UPDATE_CODEC = INT8
"""What `[sync] codec = "auto"` means for a run that is started now, but in mode `gossip`. It may be
what docs/convergence.md has shown to be harmless."""


def update_codec(name: str) -> UpdateCodec:
    """By `[sync] codec`, likewise; or by the name of a codec that keeps few numbers, in which
    contributions and results are coded. Raises `KeyError` for an unknown one."""
    if kept_of(name):
        return UpdateCodec(name, INT6, name, plain_results=INT4)
    return UPDATE_CODECS[NONE if name == AUTO else name]


# ---- few numbers of a chunk -------------------------------------------------------------------


def kept_by(density: float) -> int:
    """Numbers of a chunk that are kept where it is to be this part of it, in `TOPK_DENSITIES`:
    rounded up to a multiple of `KEPT_STEP`, and to the next one where a chunk would have as many
    bytes as some tiles of the codecs that stand in (`update_codec`): which it is shows in the
    size."""
    kept = max(1, math.ceil(density * CHUNK / KEPT_STEP)) * KEPT_STEP
    while any(_chunk_bytes(kept) % row_bytes(tiles, TILE) == 0 for tiles in (INT6, INT4)):
        kept += KEPT_STEP
    return kept


def sparse_codec(kept: int) -> str:
    """The name of the codec that keeps so many numbers of a chunk."""
    return f"{SPARSE}{kept}"


def kept_of(name: str) -> int:
    """Numbers of a chunk that the codec of this name keeps; 0 where it is no `topk-K`."""
    number = name.removeprefix(SPARSE)
    if number == name or not (number.isascii() and number.isdigit() and len(number) <= 4):
        return 0
    kept = int(number)
    is_one = sparse_codec(kept) == name and 0 < kept <= MOST_KEPT and kept % KEPT_STEP == 0
    return kept if is_one else 0


def leaves_out(name: str) -> bool:
    """The codec keeps some of the numbers only."""
    return name == TOPK or kept_of(name) > 0


def error_decay(name: str) -> float:
    """As `ERROR_DECAY`."""
    return ERROR_DECAY[TOPK] if leaves_out(name) else 1.0


def _chunk_bytes(kept: int) -> int:
    return 2 * SCALE_BYTES + kept * (PLACE_BITS + 2) // 8


def row_bytes(codec: str, num_values: int) -> int:
    """Bytes of a coded row of so many numbers. Raises `KeyError` for an unknown codec."""
    if codec == NONE:
        return 4 * num_values
    if codec == BF16:
        return 2 * num_values
    if codec == INT8:
        return SCALE_BYTES * num_blocks(num_values, BLOCK) + num_values
    if codec == TOPK:
        return num_blocks(num_values, CHUNK) * (2 * SCALE_BYTES + CHUNK // 8 + KEPT // 4)
    if kept := kept_of(codec):
        return num_blocks(num_values, CHUNK) * _chunk_bytes(kept)
    return num_blocks(num_values, TILE) * (SCALE_BYTES + TILE * TILE_BITS[codec] // 8)


def num_blocks(num_values: int, size: int) -> int:
    """Blocks of a row, the last one perhaps shorter."""
    return -(-num_values // size)


def coded_form(codec: str, shape: tuple[int, ...], num_free: int) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a coded fp32 tensor. The first `num_free` dimensions stay as they are
    (samples, and tokens of a sequence); the others together are a row."""
    if codec in DTYPES:
        return DTYPES[codec], shape
    row = row_bytes(codec, math.prod(shape[num_free:]))
    return "uint8", (*shape[:num_free], row)
