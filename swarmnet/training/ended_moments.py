"""The optimizer's moments with which a run ended, for one that continues it.

A checkpoint has the moments of the shards that its peer owned, so those of a stage are gathered
from the checkpoints of all its peers. They go on shard by shard, hence only where both runs have
the same shards, and owners with AdamW's moments of them
(docs/decisions/0010-continue-by-weights.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.spec import RunSpec
from swarmnet.training.checkpoint import OPTIMIZER_FILE, Meta, checksum
from swarmnet.training.mapped_tensors import MappedFiles, Stored, stored_tensors
from swarmnet.training.models.initial_weights import InitialLayout
from swarmnet.training.models.registry import stage_parameter_ranges, stage_shard_sizes
from swarmnet.training.optimizer.shards import MAX_STEPS

OWNED = ("zero", "delayed", "auto")
"""Modes of `[sync]` in which the owners of a shard have AdamW's moments of it."""
SAME_OPTIMIZER = ("kind", "beta1", "beta2")
"""What the running means depend on."""
NAMES = ("mean", "square")

Saved = tuple[Path, Meta]


@dataclass(frozen=True, slots=True)
class Held:
    """The moments of a shard in one checkpoint."""

    mean: Stored
    square: Stored
    steps: int


class EndedMoments:
    """Those of every shard of a run, as its checkpoints have them."""

    def __init__(self, stages: Sequence[Sequence[Saved]], sizes: Sequence[Sequence[int]]) -> None:
        """`stages`: the checkpoints of each, of one round. `sizes`: elements of each shard. Blocks
        for as long as the files' checksums take."""
        self._sizes = sizes
        self._held = [_held(saved, of) for saved, of in zip(stages, sizes, strict=True)]
        self._files = MappedFiles()

    @property
    def lacks(self) -> str:
        """What is not there, in words; empty where all is."""
        for stage, (held, sizes) in enumerate(zip(self._held, self._sizes, strict=True)):
            missing = sorted(set(range(len(sizes))) - held.keys())
            if missing:
                return f"no checkpoint here has those of stage {stage}, shard {missing[0]}"
        return ""

    def flat(self, stage: int, shard: int) -> Tensor | None:
        """A shard's mean, square and number of steps, fp32 [2 x size + 1]; None where they are not
        there. Raises `SpecError`."""
        held = self._held[stage].get(shard)
        if held is None:
            return None
        size = self._sizes[stage][shard]
        parts = [self._files.read(one, 0, size) for one in (held.mean, held.square)]
        steps = torch.tensor([float(held.steps)])
        return torch.cat([*parts, steps])


def misfit(old: RunSpec, new: RunSpec, layout: InitialLayout) -> str:
    """Why the moments of a run are none for another of the same model, in words; empty where they
    fit. `new`: as this machine builds it; `layout` is its own."""
    for spec, where in ((old, "there"), (new, "here")):
        if spec.sync.mode not in OWNED:
            return f"[sync] mode is {spec.sync.mode} {where}, where each replica has its own"
    for key in SAME_OPTIMIZER:
        before, now = getattr(old.optimizer, key), getattr(new.optimizer, key)
        if before != now:
            return f"[optimizer] {key} is {before} there, {now} here"
    if old.pipeline.num_stages != new.pipeline.num_stages:
        before, now = old.pipeline.num_stages, new.pipeline.num_stages
        return f"[pipeline] num_stages is {before} there, {now} here"
    built = old.with_builder(new.model.builder)
    for stage, sizes in enumerate(layout.trained_sizes):
        if stage_parameter_ranges(built, stage) != layout.trained[stage]:
            return f"stage {stage} has other layers there"
        if stage_shard_sizes(built, stage) != sizes:
            return f"stage {stage} has other shards there ([sync] shard_parameters)"
    return ""


def _held(stages: Sequence[Saved], sizes: Sequence[int]) -> Mapping[int, Held]:
    """By shard, its moments in the first of some checkpoints of a stage that has them."""
    found: dict[int, Held] = {}
    for folder, meta in stages:
        if meta.steps.keys() <= found.keys():
            continue
        path = folder / OPTIMIZER_FILE
        try:
            if checksum(path) != meta.checksums.get(OPTIMIZER_FILE):
                continue
            stored = {one.name: one for one in stored_tensors(path)}
        except (OSError, SpecError):
            continue
        for j, steps in sorted(meta.steps.items()):
            of_shard = [stored.get(f"shards.{j}.{name}") for name in NAMES]
            mean, square = of_shard
            if j in found or mean is None or square is None or not 0 <= steps < MAX_STEPS:
                continue
            if 0 <= j < len(sizes) and mean.shape == square.shape == (sizes[j],):
                found[j] = Held(mean, square, steps)
    return found
