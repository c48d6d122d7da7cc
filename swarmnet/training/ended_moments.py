"""The optimizer's moments with which a run ended, for one that continues it.

A checkpoint has the moments of the shards that its peer owned, so those of a stage are gathered
from the checkpoints of all its peers. They are found by the names of parameters, so that the new
run may cut stages and shards in another way; they go on only where owners have moments of the same
optimizer in both runs (docs/decisions/0010-continue-by-weights.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.spec import OptimizerSpec, RunSpec
from swarmnet.training.checkpoint import MOMENTS, OPTIMIZER_FILE, Meta, checksum
from swarmnet.training.mapped_tensors import MappedFiles, Stored, stored_tensors
from swarmnet.training.models.base import ParameterRange, overlaps
from swarmnet.training.models.registry import (
    stage_moments,
    stage_parameter_ranges,
    stage_shard_sizes,
)
from swarmnet.training.optimizer.shards import MAX_STEPS

OWNED = ("zero", "delayed", "auto")
"""Modes of `[sync]` in which the owners of a shard have the moments of `[optimizer]`."""
SAME_OPTIMIZER = ("kind", "beta1", "beta2", "momentum", "parts")
"""What the running means depend on."""

Saved = tuple[Path, Meta]


@dataclass(frozen=True, slots=True)
class Held:
    """The moments of a shard in one checkpoint."""

    moments: tuple[Stored, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run cuts its trained parameters, by stage."""

    ranges: Sequence[Sequence[ParameterRange]]
    sizes: Sequence[Sequence[int]]
    """Elements of each shard."""
    numbers: Sequence[Sequence[int]]
    """Of the moments of each shard."""

    @classmethod
    def of(cls, spec: RunSpec) -> Layout:
        """`spec`: as this machine builds it. Raises `SpecError`."""
        stages = range(spec.pipeline.num_stages)
        return cls(
            [stage_parameter_ranges(spec, k) for k in stages],
            [stage_shard_sizes(spec, k) for k in stages],
            [stage_moments(spec, k) for k in stages],
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of a shard of the run that ended."""

    held: Held
    first: int
    last: int
    place: slice
    """Among those of the new shard."""


class EndedMoments:
    """Those of every shard of a run, as the checkpoints of another have them."""

    def __init__(
        self,
        stages: Sequence[Sequence[Saved]],
        old: Layout,
        new: Layout,
        optimizer: OptimizerSpec,
        tied: Mapping[str, str],
    ) -> None:
        """`stages`: the checkpoints of each of the old run's, of one round. `tied`: names of
        parameters that are another's, and that one's. Blocks for as long as the files' checksums
        take."""
        self._old = old
        self._new = new
        self._decays = optimizer.beta1, optimizer.beta2
        """Of AdamW's moments. Muon corrects nothing by the number of steps."""
        self._held = [
            _held(*of_stage) for of_stage in zip(stages, old.sizes, old.numbers, strict=True)
        ]
        self._files = MappedFiles()
        self._places: dict[str, tuple[int, int]] = {}
        """Stage and first element of each parameter in the old run, by its own name and its
        owner's."""
        for stage, ranges in enumerate(old.ranges):
            for r in ranges:
                self._places[r.name] = stage, r.start
        for name, owner in tied.items():
            there = self._places.get(owner, self._places.get(name))
            if there is not None:
                self._places.setdefault(name, there)
                self._places.setdefault(owner, there)

    @property
    def lacks(self) -> str:
        """What is not there, in words; empty where all is."""
        for stage, (held, sizes) in enumerate(zip(self._held, self._old.sizes, strict=True)):
            missing = sorted(set(range(len(sizes))) - held.keys())
            if missing:
                return f"no checkpoint here has those of stage {stage}, shard {missing[0]}"
        return ""

    def flat(self, stage: int, shard: int) -> Tensor | None:
        """A shard's moments, one after the other, and their number of steps, fp32 [n x size + 1];
        None where they are not there. Raises `SpecError`.

        Shards of the old run may have made unlike numbers of steps. Then what AdamW takes from the
        means, which it corrects by that number, stays the same."""
        sizes = self._new.sizes[stage]
        size, start = sizes[shard], sum(sizes[:shard])
        pieces: list[Piece] = []
        for r, first, last, place in overlaps(self._new.ranges[stage], start, start + size):
            of_range = self._pieces(r.name, first, last, place.start)
            if of_range is None:
                return None
            pieces += of_range
        steps = max((piece.held.steps for piece in pieces), default=0)
        number = self._new.numbers[stage][shard]
        flat = torch.empty(number * size + 1)
        flat[-1] = steps
        for piece in pieces:
            moments = piece.held.moments
            for i, there in enumerate(flat[:-1].view(number, size)):
                values = self._files.read(moments[i], piece.first, piece.last)
                if number == len(self._decays) and 0 < piece.held.steps < steps:
                    decay = self._decays[i]
                    values = values * ((1 - decay**steps) / (1 - decay**piece.held.steps))
                there[piece.place] = values
        return flat

    def _pieces(self, name: str, first: int, last: int, at: int) -> list[Piece] | None:
        """Where elements [first, last) of a parameter are, which go to `at`; None where some are
        nowhere."""
        there = self._places.get(name)
        if there is None:
            return None
        stage, offset = there
        first, last, found = offset + first, offset + last, []
        start = 0
        for shard, size in enumerate(self._old.sizes[stage]):
            here, end = max(first, start), min(last, start + size)
            if here < end:
                held = self._held[stage].get(shard)
                if held is None:
                    return None
                place = slice(at + here - first, at + end - first)
                found.append(Piece(held, here - start, end - start, place))
            start += size
        return found


def misfit(old: RunSpec, new: RunSpec) -> str:
    """Why the moments of a run are none for another of the same model, in words; empty where they
    fit."""
    if (old.lora is None) != (new.lora is None):
        return "the whole model was trained there, adapters beside it are here"
    for spec, where in ((old, "there"), (new, "here")):
        if spec.sync.mode not in OWNED:
            return f"[sync] mode is {spec.sync.mode} {where}, where each replica has its own"
    for key in SAME_OPTIMIZER:
        before, now = getattr(old.optimizer, key), getattr(new.optimizer, key)
        if before != now:
            return f"[optimizer] {key} is {before} there, {now} here"
    return ""


def _held(
    stages: Sequence[Saved], sizes: Sequence[int], numbers: Sequence[int]
) -> Mapping[int, Held]:
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
            if j in found or not 0 <= j < len(sizes) or not 0 <= steps < MAX_STEPS:
                continue
            names = [f"shards.{j}.{name}" for name in MOMENTS[numbers[j]]]
            moments = tuple(stored[name] for name in names if name in stored)
            if len(moments) == len(names) and all(m.shape == (sizes[j],) for m in moments):
                found[j] = Held(moments, steps)
    return found
