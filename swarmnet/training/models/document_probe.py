"""Whether a family of `transformers` keeps the documents of a sample apart: tried, not believed.

A small model of the family, with every kind of layer that the config names, must give each document
the same outputs in a packed sample as alone. Layers with a state that runs along the sequence
(linear attention, convolutions) do not.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.spec import ModelSpec
from swarmnet.training.models.adapter import adapter_plan
from swarmnet.training.models.base import LayerContext, TakesContext, seeded, with_mask
from swarmnet.training.models.shrunk import shrunk_configs

LENGTHS = ((10, 14), (1, 20, 3))
"""Documents of two samples."""
TOLERANCE = 1e-3
"""Relative to the largest output; rounding makes less than 1e-5 of it."""
STRETCHED = ("dynamic", "longrope")
"""Kinds of positions that depend on how long the longest document is."""


def check_documents_apart(config: Mapping[str, Any], sequence_length: int) -> None:
    """Raises `SpecError` unless a model of this canonical config keeps documents apart in samples
    of so many tokens."""
    kind, limit = config["model_type"], _plain_length(config)
    if sequence_length > limit:
        raise SpecError(
            f"[data] document_mask: beyond {limit} tokens positions of this {kind} depend on the "
            "length of the whole sample; shorten sequence_length, or take document_mask out"
        )
    if not _is_apart(json.dumps(dict(config), sort_keys=True)):
        raise SpecError(
            f"[data] document_mask: as far as can be told here, a model of type {kind} does not "
            "keep documents apart; take document_mask out"
        )


def _plain_length(config: Mapping[str, Any]) -> float:
    """Up to here the position of a token depends on nothing else."""
    key = "original_max_position_embeddings"
    limits = [
        table.get(key) or config.get(key) or config["max_position_embeddings"]
        for table in _rope_tables(config)
        if table.get("rope_type", table.get("type")) in STRETCHED
    ]
    return min(limits, default=math.inf)


def _rope_tables(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    whole = config.get("rope_parameters") or {}
    return [t for t in (whole, *whole.values()) if isinstance(t, Mapping)]


@functools.lru_cache(maxsize=16)
def _is_apart(key: str) -> bool:
    for small in shrunk_configs(json.loads(key)):
        try:
            return _largest_difference(small) < TOLERANCE
        except Exception:
            continue
    return False


def _largest_difference(config: dict[str, Any]) -> float:
    """Of a document in a packed sample and alone, relative to the largest output. Raises whatever
    the family's code raises."""
    length = sum(LENGTHS[0])
    plan = adapter_plan(ModelSpec(kind="transformers", config=config), length)
    with seeded(0):
        modules = [layer.build().eval() for layer in plan.layers]
        tokens = torch.randint(config["vocab_size"], (len(LENGTHS), length), dtype=torch.int32)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])
    context = with_mask(LayerContext(positions), torch.float32)

    def outputs(x: Tensor, context: LayerContext | None) -> Tensor:
        for module in modules:
            takes = (context,) if context and isinstance(module, TakesContext) else ()
            x = module(x, *takes)
        return x

    with torch.no_grad():
        packed = outputs(tokens, context)
        alone = [
            torch.cat([outputs(part, None) for part in row[None].split(lengths, dim=1)], dim=1)
            for row, lengths in zip(tokens, LENGTHS, strict=True)
        ]
    difference = (packed - torch.cat(alone)).abs().max() / packed.abs().max()
    return float(difference.nan_to_num(torch.inf))
