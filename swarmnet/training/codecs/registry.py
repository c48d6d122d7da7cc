"""The codecs by their names."""

from __future__ import annotations

import functools

from swarmnet.protocol.codecs import TILE_BITS, kept_of
from swarmnet.training.codecs.base import Codec
from swarmnet.training.codecs.blocks import Int8
from swarmnet.training.codecs.floats import BFloat16, Plain
from swarmnet.training.codecs.tiles import Tiles
from swarmnet.training.codecs.topk import FewOfChunk, TopK

_ALL: tuple[Codec, ...] = (
    Plain(),
    BFloat16(),
    Int8(),
    *(Tiles(name) for name in TILE_BITS),
    TopK(),
)
CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}
"""But those that keep few numbers of a chunk: there is one for each number."""


def codec_of(name: str) -> Codec:
    """Raises `KeyError` for a name that is not in `protocol.codecs`."""
    kept = kept_of(name)
    return few_of_chunk(kept) if kept else CODECS[name]


@functools.cache
def few_of_chunk(kept: int) -> FewOfChunk:
    """The one that keeps so many numbers; others ask whether a codec is the same."""
    return FewOfChunk(kept)
