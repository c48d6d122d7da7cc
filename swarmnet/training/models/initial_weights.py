"""The weights that a run began from, on one machine; implements `ports.InitialWeights`.

Where a model is trained whole, these are the first parameters of its stages: those of a model's
folder, or those that another run ended with (`swarmnet.training.continuing`). Every replica of a
stage needs its base too: where adapters are trained all other parameters, and the persistent
buffers of its layers. What has come of it is kept in the state folder, so that nobody has to have
the model's folder when a run goes on.

Where the moments of another run go on, they are initial shards too: for each shard of the trained
parameters one with its mean, its square and its number of steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarmnet.errors import ProtocolViolation, SpecError, UserError, one_line
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.models.base import (
    ParameterRange,
    describe_base,
    describe_frozen,
    describe_parameters,
)
from swarmnet.training.models.frozen import base_shards
from swarmnet.training.models.lora_folder import AdapterWeights
from swarmnet.training.models.model_folder import open_weights
from swarmnet.training.models.registry import (
    model_plan,
    split_stages,
    stage_shards,
)
from swarmnet.training.models.source_weights import SourceWeights, shard_hash
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.models")

HASH_BYTES = 32
FOLDER = "base"
"""In the state folder."""
NAME_CHARACTERS = 16
"""Of the hash of the list of hashes, in the name of a base's folder."""
VALUES = "values"
MAX_KNOWN = 4


class Weights(Protocol):
    """Parameters by their names, on this machine."""

    def flat(self, ranges: Sequence[ParameterRange], start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a stage's flat vector, fp32. Raises `SpecError`."""


class EndedWeights(Weights, Protocol):
    """The parameters with which a run ended, what its model has beside them, and the moments of its
    optimizer."""

    no_moments: str
    """Why these do not go on, in words; empty where they do."""

    def moments(self, stage: int, shard: int) -> torch.Tensor | None:
        """Of a shard: its moments and their number of steps, fp32 [n x size + 1]; None where they
        are not here. Raises `SpecError`."""


@dataclass(frozen=True, slots=True)
class InitialLayout:
    """Which shards a run began from."""

    base: list[tuple[ParameterRange, ...]]
    """By stage."""
    base_sizes: list[tuple[int, ...]]
    """By stage, the elements of each shard."""
    trained: list[tuple[ParameterRange, ...]]
    trained_sizes: list[tuple[int, ...]]
    """By stage; none where trained parameters begin at random."""
    has_moments: bool = False
    """Each trained shard has one with its moments."""
    has_adapters: bool = False
    """The trained parameters are adapters."""
    buffers: frozenset[str] = frozenset()
    """Names of those in the base."""

    @classmethod
    def of(cls, spec: RunSpec) -> InitialLayout:
        """`spec`: what its model's folder and adapter say is in it. Raises `SpecError`."""
        if spec.model.kind == "custom":  # its code may be another one by now
            return cls._of(spec)
        key = spec.canonical()
        known = _known.get(key)
        if known is None:
            if len(_known) >= MAX_KNOWN:
                _known.clear()
            known = _known[key] = cls._of(spec)
        return known

    @classmethod
    def _of(cls, spec: RunSpec) -> InitialLayout:
        plan = model_plan(spec)
        num_stages = spec.pipeline.num_stages
        stages = split_stages(plan, num_stages)
        sizes = [stage_shards(spec, plan, k) for k in range(num_stages)]
        goes_on = bool(spec.model.continues) and not spec.adapts_ended
        is_random = spec.lora is not None and not (spec.lora.adapter or goes_on)
        base = [describe_base(plan, layers) for layers in stages]
        frozen = {r.name for r in describe_frozen(plan.layers)}
        return cls(
            base,
            [base_shards(ranges) for ranges in base],
            [describe_parameters(layers) for layers in stages],
            [()] * num_stages if is_random else sizes,
            spec.model.moments,
            spec.lora is not None,
            frozenset(r.name for ranges in base for r in ranges) - frozen,
        )

    @property
    def num_shards(self) -> list[int]:
        """Of each stage: its base, its trained parameters, their moments."""
        times = 1 + self.has_moments
        both = zip(self.base_sizes, self.trained_sizes, strict=True)
        return [len(base) + times * len(trained) for base, trained in both]

    def base_hashes(self, hashes: bytes) -> list[bytes]:
        """Of a list of initial shards' hashes, for each stage those of its base."""
        numbers = self.num_shards
        starts = [HASH_BYTES * first for first in accumulate(numbers, initial=0)]
        both = zip(starts, self.base_sizes, strict=False)
        return [hashes[at : at + HASH_BYTES * len(sizes)] for at, sizes in both]

    def of_model(self) -> list[tuple[ParameterRange, ...]]:
        """By stage, what the model's folder has."""
        if self.has_adapters:
            return self.base
        both = zip(self.base, self.trained, strict=True)
        return [(*base, *trained) for base, trained in both]

    def named(
        self, shards: Sequence[Sequence[Array]], rounding: torch.dtype | None
    ) -> dict[str, torch.Tensor]:
        """The base by name, from its shards by stage. `rounding`: of parameters, as in
        `ModelPlan.base_dtype`."""
        found: dict[str, torch.Tensor] = {}
        for ranges, of_stage in zip(self.base, shards, strict=True):
            if ranges:
                flat = torch.cat([to_tensor(shard) for shard in of_stage])
                found |= {r.name: r.part_of(flat) for r in ranges}
        if rounding is None:
            return found
        return {
            name: tensor if name in self.buffers else tensor.to(rounding).float()
            for name, tensor in found.items()
        }


_known: dict[bytes, InitialLayout] = {}
"""By a spec's canonical form: large models take a second to be described."""


class InitialSources:
    """Initial shards, from the folders of a model and an adapter, or from another run's end."""

    def __init__(
        self,
        spec: RunSpec,
        layout: InitialLayout,
        folder: Path | None,
        adapter: Path | None,
        ended: EndedWeights | None = None,
    ) -> None:
        """`ended`: of the run that this one continues. Raises `SpecError` where a folder is not of
        the run's model."""
        self._layout = layout
        self._ended = ended
        self.model: SourceWeights | None = None
        if folder is not None and (layout.has_adapters or not spec.model.continues):
            self.model = open_weights(folder, spec.model.config, layout.of_model())
        self._base: Weights | None = self.model
        self._trained: Weights | None = self.model
        if spec.model.continues:
            self._trained = ended
            has_folder = layout.has_adapters and not spec.adapts_ended
            self._base = self.model if has_folder else ended
        elif layout.has_adapters:
            self._trained = None if adapter is None else AdapterWeights(adapter, layout.trained)

    def read(self, stage: int, shard: int) -> torch.Tensor | None:
        """A shard, flat fp32; None where its folder is not here. Raises `SpecError`."""
        layout = self._layout
        num_base = len(layout.base_sizes[stage])
        if shard < num_base:
            return _part(self._base, layout.base[stage], layout.base_sizes[stage], shard)
        trained, sizes = layout.trained[stage], layout.trained_sizes[stage]
        if shard < num_base + len(sizes):
            return _part(self._trained, trained, sizes, shard - num_base)
        if self._ended is None:
            return None
        return self._ended.moments(stage, shard - num_base - len(sizes))


def _part(
    source: Weights | None,
    ranges: Sequence[ParameterRange],
    sizes: Sequence[int],
    shard: int,
) -> torch.Tensor | None:
    start = sum(sizes[:shard])
    return None if source is None else source.flat(ranges, start, start + sizes[shard])


def read_base(
    spec: RunSpec, hashes: bytes, state_dirs: Sequence[Path], folder: Path | None = None
) -> dict[str, torch.Tensor]:
    """The base of a run by name, as parameters are rounded to in it, from what peers have kept of
    it in their state folders, and from the model's folder. Raises `SpecError`."""
    sources = [ModelWeights(spec, hashes, None, state_dir=path) for path in state_dirs]
    if folder is not None:
        sources.append(ModelWeights(spec, hashes, folder))
    layout = InitialLayout.of(spec)
    shards: list[list[Array]] = []
    for stage, sizes in enumerate(layout.base_sizes):
        shards.append([])
        for j in range(len(sizes)):
            found = (source.shard(stage, j) for source in sources)
            shard = next((values for values in found if values is not None), None)
            if shard is None:
                raise SpecError(f"the base of stage {stage} is not all here")
            shards[-1].append(shard)
    return layout.named(shards, model_plan(spec).base_dtype)


class ModelWeights:
    """Initial shards by their hashes: from the folders of a model and an adapter where this machine
    has them, and of a base also from the state folder."""

    def __init__(
        self,
        spec: RunSpec,
        hashes: bytes,
        folder: Path | None,
        *,
        adapter: Path | None = None,
        ended: EndedWeights | None = None,
        state_dir: Path | None = None,
    ) -> None:
        """`hashes`: the run's file of them. `folder`: of the model; None where it is not here.
        `adapter`: likewise, of the adapter that the run began from. `ended`: likewise, of the run
        that this one continues. `state_dir`: where a base is kept.

        Raises:
            SpecError: the hashes are not those of the run's shards, or a folder is not of its
                model.
        """
        self._layout = layout = InitialLayout.of(spec)
        self._first = [0, *accumulate(layout.num_shards)]
        self._hashes = hashes
        if len(hashes) != HASH_BYTES * self._first[-1]:
            raise SpecError("the list of the run's initial shards has another length than the run")
        self._folder = folder
        self._sources: InitialSources | None = InitialSources(spec, layout, folder, adapter, ended)
        self._kept: Path | None = None
        if state_dir is not None and any(layout.base):
            self._kept = state_dir / FOLDER / spec.model.weights[:NAME_CHARACTERS]
        is_kept = self._kept is not None and self._kept.is_dir()
        self.is_here = folder is not None or ended is not None or is_kept
        self.has_trained = any(layout.trained_sizes)
        self.has_moments = layout.has_moments
        self.adapts_ended = spec.adapts_ended
        self._shard = lru_cache(maxsize=1)(self._read)

    def shard(self, stage_index: int, shard_index: int) -> Array | None:
        if not self._has(stage_index, shard_index):
            return None
        return self._shard(stage_index, shard_index)

    def is_right(self, stage_index: int, shard_index: int, values: Array) -> bool:
        if not self._has(stage_index, shard_index):
            return False
        try:
            return shard_hash(to_tensor(values)) == self._hash(stage_index, shard_index)
        except ProtocolViolation:
            return False

    def keep(self, stage_index: int, shard_index: int, values: Array) -> None:
        if self._kept is None or shard_index >= len(self._layout.base_sizes[stage_index]):
            return
        path = self._path(stage_index, shard_index)
        if path.is_file():
            return
        tensor = to_tensor(values)
        low = tensor.bfloat16()
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._kept.mkdir(parents=True, exist_ok=True)
            # Most models are in bf16: half of the bytes are enough then.
            exact = low if torch.equal(low.float(), tensor) else tensor
            save_file({VALUES: exact}, beside)
            beside.replace(path)
        except (OSError, SafetensorError) as e:
            raise UserError(f"cannot write {path}: {one_line(e, 120)}") from None
        self._shard.cache_clear()
        self.is_here = True

    def _has(self, stage_index: int, shard_index: int) -> bool:
        numbers = self._layout.num_shards
        return 0 <= stage_index < len(numbers) and 0 <= shard_index < numbers[stage_index]

    def _hash(self, stage_index: int, shard_index: int) -> bytes:
        at = HASH_BYTES * (self._first[stage_index] + shard_index)
        return self._hashes[at : at + HASH_BYTES]

    def _read(self, stage_index: int, shard_index: int) -> Array | None:
        """From the state folder, else from the model's."""
        kept = self._read_kept(stage_index, shard_index)
        if kept is not None or self._sources is None:
            return kept
        try:
            values = self._sources.read(stage_index, shard_index)
        except SpecError as error:
            log.warning("%s", error)
            self._give_up_sources()
            return None
        if values is None:
            return None
        if shard_hash(values) != self._hash(stage_index, shard_index):
            log.warning(
                "%s: its weights are not those that this run began from; they are not used",
                self._folder or "the run that this one continues",
            )
            self._give_up_sources()
            return None
        return from_tensor(values)

    def _give_up_sources(self) -> None:
        self._sources = None
        self.is_here = self._kept is not None and self._kept.is_dir()

    def _read_kept(self, stage_index: int, shard_index: int) -> Array | None:
        if self._kept is None:
            return None
        path = self._path(stage_index, shard_index)
        try:
            values = load_file(path)[VALUES].float()
        except (OSError, SafetensorError, KeyError):
            return None
        if shard_hash(values) != self._hash(stage_index, shard_index):
            log.warning("%s is damaged: it is fetched again", path)
            path.unlink(missing_ok=True)
            return None
        return from_tensor(values)

    def _path(self, stage_index: int, shard_index: int) -> Path:
        assert self._kept is not None
        return self._kept / f"{stage_index}-{shard_index}.safetensors"
