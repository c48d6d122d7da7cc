"""A stage on the ranks of one peer, joined by tensor parallelism: how each of them builds it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.ranks.cut_check import check_cut
from swarmnet.training.ranks.cut_plan import cut_plan
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.parallel_layers import ParallelLayers
from swarmnet.training.ranks.rank_stage import LeadStage, follow_lead, lead
from swarmnet.training.ranks.tensor_parallel import Region


def build_parallel_stage(
    spec: RunSpec, stage_index: int, group: LocalGroup, computing: Computing | None = None
) -> LeadStage:
    """A stage on all ranks of `group`; replaces the one that they had.

    Raises:
        SpecError: the model cannot be cut so.
        RankLost: a rank is gone.
    """
    is_split = group.options.get("sequence_parallel", False)
    check_cut(spec, group.num_ranks, sequence_parallel=is_split)
    layers = _layers(spec, group.group, 0, group.num_ranks, is_split)
    return lead(spec, stage_index, group, computing, layers)


def rank_options(
    spec: RunSpec, *, sequence_parallel: bool = False, mode: str = "tensor", row_size: int = 1
) -> dict[str, Any]:
    """What `LocalGroup` is told, so that its ranks can build stages of the run. `mode`: "tensor",
    "fsdp", "context" or "experts". `row_size`: with the last two, ranks that cut each matrix."""
    return {
        "spec": spec.canonical().decode(),
        "sequence_parallel": sequence_parallel,
        "mode": mode,
        "row_size": row_size,
    }


def follow(
    group: Any, rank: int, num_ranks: int, device: torch.device, options: dict[str, Any]
) -> dict[str, Callable[..., None]]:
    """The calls of a rank other than 0."""
    spec = RunSpec.from_canonical(options["spec"].encode())
    layers = _layers(spec, group, rank, num_ranks, options["sequence_parallel"])
    return follow_lead(spec, device, layers)


def _layers(
    spec: RunSpec, group: Any, rank: int, num_ranks: int, is_split: bool
) -> functools.partial[ParallelLayers]:
    region = Region(group, rank, num_ranks, sequence_parallel=is_split)
    return functools.partial(ParallelLayers, region=region, cut=cut_plan(spec.model))
