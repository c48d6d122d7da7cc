"""A stage on the ranks of one peer, of which each has some of the experts: whether it can be, and
how each of them builds it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from swarmnet.errors import SpecError
from swarmnet.spec import RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.models.registry import draws_itself, model_plan, num_experts
from swarmnet.training.models.routing import ROUTED_FAMILIES
from swarmnet.training.ranks.expert_layers import ExpertLayers
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.rank_stage import LeadStage, follow_lead, lead
from swarmnet.training.ranks.tensor_parallel import Region


def check_experts(spec: RunSpec, num_ranks: int) -> None:
    """Raises `SpecError` unless the experts of the run's model can be divided among so many ranks,
    and the samples of a microbatch."""
    if num_ranks == 1:
        return
    begin, instead = f"--ep {num_ranks}: ", "leave it out, or start a peer for each device"
    experts = num_experts(spec.model)
    if not (experts and model_plan(spec).routes):
        families = ", ".join(ROUTED_FAMILIES)
        raise SpecError(
            f"{begin}models with experts go with it, the built-in Llama's and those of {families}; "
            f"{instead}"
        )
    if draws_itself(spec):
        from swarmnet.training.ranks.cut_trial import check_samples

        try:
            check_samples(spec.model.config)
        except SpecError as error:
            raise SpecError(f"{begin}{error}; {instead}") from None
    most = min(experts, spec.pipeline.microbatch)
    if num_ranks > most:
        what = "experts" if most == experts else "samples in a microbatch"
        raise SpecError(
            f"{begin}each rank has one at least of the {most} {what}; "
            + (f"take --ep {most}, or less" if most > 1 else instead)
        )


def build_expert_stage(
    spec: RunSpec, stage_index: int, group: LocalGroup, computing: Computing | None = None
) -> LeadStage:
    """A stage on all ranks of `group`; replaces the one that they had.

    Raises:
        SpecError: the model's experts cannot be divided so.
        RankLost: a rank is gone.
    """
    check_experts(spec, group.num_ranks)
    layers = _layers(spec, group.group, 0, group.num_ranks)
    return lead(spec, stage_index, group, computing, layers)


def follow(
    group: Any, rank: int, num_ranks: int, device: torch.device, options: dict[str, Any]
) -> dict[str, Callable[..., None]]:
    """The calls of a rank other than 0."""
    spec = RunSpec.from_canonical(options["spec"].encode())
    return follow_lead(spec, device, _layers(spec, group, rank, num_ranks))


def _layers(
    spec: RunSpec, group: Any, rank: int, num_ranks: int
) -> functools.partial[ExpertLayers]:
    """Of ranks whose gradients are each a part, but for experts'."""
    region = Region(group, rank, num_ranks, sequence_parallel=True)
    return functools.partial(
        ExpertLayers,
        region=region,
        num_experts=num_experts(spec.model),
        microbatch=spec.pipeline.microbatch,
    )
