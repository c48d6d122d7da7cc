"""A stage on the ranks of one peer, of which each has a part of every sequence: whether it can be,
and how each of them builds it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from swarmnet.errors import SpecError
from swarmnet.plurals import counted
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.computing import Computing
from swarmnet.training.ranks.context_parallel_layers import ContextParallelLayers
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.rank_stage import LeadStage, follow_lead, lead
from swarmnet.training.ranks.tensor_parallel import Region
from swarmnet.training.ranks.zigzag import is_long_enough, most_ranks


def check_sequences(spec: RunSpec, num_ranks: int) -> None:
    """Raises `SpecError` unless the run's sequences can be cut over so many ranks."""
    if num_ranks == 1:
        return
    begin, instead = f"--cp {num_ranks}: ", "leave it out, or start a peer for each device"
    if spec.model.kind == "custom":
        raise SpecError(
            f"{begin}it is for the built-in Llama and models of transformers; {instead}"
        )
    if spec.model.num_experts or any(spec.model.router_losses):
        raise SpecError(
            f"{begin}experts of the built-in Llama, and routers that have a loss, take whole "
            f"microbatches; {instead}"
        )
    if not is_long_enough(spec.sequence_length, num_ranks):
        raise SpecError(
            f"{begin}sequences of {counted(spec.sequence_length, 'token')} are too short, each "
            f"rank has two of them at least; take --cp {most_ranks(spec.sequence_length)}, or less"
        )
    if spec.model.kind == "transformers":
        from swarmnet.training.ranks.cut_trial import check_shared

        try:
            check_shared(spec.model.config, spec.sequence_length)
        except SpecError as error:
            raise SpecError(f"{begin}{error}; {instead}") from None


def build_context_parallel_stage(
    spec: RunSpec, stage_index: int, group: LocalGroup, computing: Computing | None = None
) -> LeadStage:
    """A stage on all ranks of `group`; replaces the one that they had.

    Raises:
        SpecError: the run's sequences cannot be cut so.
        RankLost: a rank is gone.
    """
    check_sequences(spec, group.num_ranks)
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
) -> functools.partial[ContextParallelLayers]:
    """Of ranks whose gradients are each a part."""
    region = Region(group, rank, num_ranks, sequence_parallel=True)
    longest = longest_text(spec.model)
    return functools.partial(ContextParallelLayers, region=region, longest_text=longest)


def longest_text(model: ModelSpec) -> int:
    """Tokens that a text may have which ranks share; 0 where nothing but its context limits it."""
    if model.kind != "transformers":
        return 0
    from swarmnet.training.ranks.cut_trial import most_shared

    most = most_shared(model.config)
    return 0 if math.isinf(most) else int(most)
