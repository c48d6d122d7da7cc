"""The codecs by their names."""

from __future__ import annotations

from swarmnet.protocol.codecs import TILE_BITS
from swarmnet.training.codecs.base import Codec
from swarmnet.training.codecs.blocks import Int8
from swarmnet.training.codecs.floats import BFloat16, Plain
from swarmnet.training.codecs.tiles import Tiles
from swarmnet.training.codecs.topk import TopK

_ALL: tuple[Codec, ...] = (
    Plain(),
    BFloat16(),
    Int8(),
    *(Tiles(name) for name in TILE_BITS),
    TopK(),
)
CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}


def codec_of(name: str) -> Codec:
    """Raises `KeyError` for a name that is not in `protocol.codecs`."""
    return CODECS[name]
