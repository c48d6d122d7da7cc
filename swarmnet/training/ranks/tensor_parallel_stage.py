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
from swarmnet.training.ranks.rank_stage import LeadStage, RankStage, following
from swarmnet.training.ranks.tensor_parallel import Region
from swarmnet.training.stage import TorchStage, build_stage


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
    region = Region(group.group, 0, group.num_ranks, sequence_parallel=is_split)
    layers = functools.partial(ParallelLayers, region=region, cut=cut_plan(spec.model))
    make = functools.partial(LeadStage, group=group, make_layers=layers)
    stage = build_stage(spec, stage_index, device=group.devices[0], computing=computing, make=make)
    assert isinstance(stage, LeadStage)
    return stage


def rank_options(
    spec: RunSpec, *, sequence_parallel: bool = False, mode: str = "tensor"
) -> dict[str, Any]:
    """What `LocalGroup` is told, so that its ranks can build stages of the run. `mode`: "tensor",
    "fsdp", "context" or "experts"."""
    return {
        "spec": spec.canonical().decode(),
        "sequence_parallel": sequence_parallel,
        "mode": mode,
    }


def follow(
    group: Any, rank: int, num_ranks: int, device: torch.device, options: dict[str, Any]
) -> dict[str, Callable[..., None]]:
    """The calls of a rank other than 0."""
    spec = RunSpec.from_canonical(options["spec"].encode())
    region = Region(group, rank, num_ranks, sequence_parallel=options["sequence_parallel"])
    cut = cut_plan(spec.model)

    def build(stage_index: int, computing: Computing, fd: int | None) -> TorchStage:
        layers = functools.partial(ParallelLayers, region=region, cut=cut, fd=fd)
        make = functools.partial(RankStage, make_layers=layers)
        return build_stage(spec, stage_index, device=device, computing=computing, make=make)

    return following(build)
