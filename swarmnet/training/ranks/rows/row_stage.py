"""A stage on the ranks of one peer that are in rows: whether it can be, and how each of them builds
it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.models.registry import num_experts
from swarmnet.training.ranks.context_parallel_stage import check_sequences, longest_text
from swarmnet.training.ranks.cut_check import check_cut
from swarmnet.training.ranks.cut_plan import cut_plan
from swarmnet.training.ranks.expert_stage import check_experts
from swarmnet.training.ranks.local_group import Groups, LocalGroup
from swarmnet.training.ranks.rank_stage import LeadStage, follow_lead, lead
from swarmnet.training.ranks.rows.row_layers import CutExperts, CutSequences, Rows


def check_rows(spec: RunSpec, mode: str, num_rows: int, row_size: int) -> None:
    """Raises `SpecError` unless rows can share what `mode` says ("context", "experts"), and the
    ranks of each cut the model's matrices."""
    (check_sequences if mode == "context" else check_experts)(spec, num_rows)
    check_cut(spec, row_size, is_row=True)


def build_row_stage(
    spec: RunSpec, stage_index: int, group: LocalGroup, computing: Computing | None = None
) -> LeadStage:
    """A stage on all ranks of `group`; replaces the one that they had.

    Raises:
        SpecError: the run's model cannot be cut so.
        RankLost: a rank is gone.
    """
    mode, row_size = group.options["mode"], group.options["row_size"]
    check_rows(spec, mode, group.num_ranks // row_size, row_size)
    layers = _layers(spec, group.group, 0, group.num_ranks, group.options)
    return lead(spec, stage_index, group, computing, layers)


def follow(
    group: Groups, rank: int, num_ranks: int, device: torch.device, options: dict[str, Any]
) -> dict[str, Callable[..., None]]:
    """The calls of a rank other than 0."""
    spec = RunSpec.from_canonical(options["spec"].encode())
    return follow_lead(spec, device, _layers(spec, group, rank, num_ranks, options))


def _layers(
    spec: RunSpec, groups: Groups, rank: int, num_ranks: int, options: dict[str, Any]
) -> functools.partial[Any]:
    region = Rows(groups, rank, num_ranks, options["row_size"])
    cut = cut_plan(spec.model)
    if options["mode"] == "context":
        longest = longest_text(spec.model)
        return functools.partial(CutSequences, region=region, cut=cut, longest_text=longest)
    return functools.partial(
        CutExperts,
        region=region,
        cut=cut,
        num_experts=num_experts(spec.model),
        microbatch=spec.pipeline.microbatch,
    )
