"""The codecs by their names."""

from __future__ import annotations

import torch

from swarmnet.protocol.codecs import BF16, NONE, TILE_BITS
from swarmnet.training.codecs.base import Codec
from swarmnet.training.codecs.blocks import Int8
from swarmnet.training.codecs.floats import Floats
from swarmnet.training.codecs.tiles import Tiles
from swarmnet.training.codecs.topk import TopK

_ALL: tuple[Codec, ...] = (
    Floats(NONE, torch.float32),
    Floats(BF16, torch.bfloat16),
    Int8(),
    *(Tiles(name) for name in TILE_BITS),
    TopK(),
)
CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}


def codec_of(name: str) -> Codec:
    """Raises `KeyError` for a name that is not in `protocol.codecs`."""
    return CODECS[name]
