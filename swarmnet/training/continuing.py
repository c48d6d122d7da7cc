"""A run that begins with the parameters that another one ended with (`[model] continues`).

The other run is found in the checkpoints of this machine. Its parameters are taken by their names,
so that the new run may cut stages and shards in another way. Their hashes stand in the new run's
spec, as those of a model's folder would (docs/decisions/0010-continue-by-weights.md). The moments
of its optimizer go on where they fit (`ended_moments`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.plurals import counted
from swarmnet.spec import RunSpec
from swarmnet.training.checkpoint import (
    STAGE_FILE,
    CheckpointError,
    Meta,
    checksum,
    find_checkpoints,
)
from swarmnet.training.ended_moments import EndedMoments, Layout, misfit
from swarmnet.training.mapped_tensors import MappedFiles, stored_tensors
from swarmnet.training.models.base import ParameterRange, flat_of, initial_buffers, tied_names
from swarmnet.training.models.initial_weights import InitialLayout, InitialSources, read_base
from swarmnet.training.models.registry import model_plan, stage_moments
from swarmnet.training.models.source_weights import shard_hash

WANTED = re.compile(r"([0-9a-f]{8,32})(?:@(\d{1,18}))?")
"""RUN or RUN@ROUND, of the beginning of a run's id."""
FILES_FOLDER, WEIGHTS_FILE = "files", "weights.sha256"
"""In a state folder, and in a spec."""
SHOWN_CHARACTERS = 16
"""Of a run's id, as in the name of its folder."""
MAX_SHOWN = 4
SAME_MODEL = (
    "kind",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "subspace",
    "subspace_seed",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "config",
)
"""Keys of `[model]` that two runs of one model have in common; a custom model's is known by its
parameters."""
SAME_LORA = ("rank", "alpha", "target_modules", "use_rslora")
BEGINNINGS = {
    "model": ("source", "from", "continues", "weights", "moments", "dtype", "subspace_seed"),
    "lora": ("source", "from", "adapter"),
    "files": (WEIGHTS_FILE,),
}
"""Of a canonical spec, what says where the run began."""

Saved = tuple[Path, Meta]


def wanted_run(text: str) -> tuple[str, int | None] | None:
    """The beginning of a run's id, and the round where one is named; None for a folder."""
    matched = WANTED.fullmatch(text)
    if matched is None:
        return None
    return matched[1], None if matched[2] is None else int(matched[2])


@dataclass(frozen=True, slots=True)
class Ended:
    """A round of a run of which this machine has all stages."""

    run_id: str
    round: int
    spec: RunSpec
    """As it was written into the checkpoints."""
    stages: tuple[tuple[Saved, ...], ...]
    """Checkpoints of that round, of each stage in their order; those of a stage have the same
    parameters."""
    saved_unix_s: float

    @property
    def name(self) -> str:
        """RUN@ROUND."""
        return f"{self.run_id}@{self.round}"

    def weights(self, spec: RunSpec, layout: InitialLayout) -> CheckpointWeights:
        """Its last parameters, for a run of this spec and layout. Blocks for as long as the files'
        checksums take. Raises `SpecError` where they are not those of the layout."""
        for folder, meta in (saved[0] for saved in self.stages):
            path = folder / STAGE_FILE
            try:
                is_whole = checksum(path) == meta.checksums.get(STAGE_FILE)
            except OSError as e:
                raise SpecError(f"[model] continues: {path}: {e.strerror or e}") from None
            if not is_whole:
                raise SpecError(
                    f"[model] continues: {path} is damaged; name an earlier round: "
                    f'"{self.run_id}@ROUND"'
                )
        return self.unchecked(spec, layout)

    def unchecked(self, spec: RunSpec, layout: InitialLayout) -> CheckpointWeights:
        """As `weights`, for who checks the values himself."""
        paths = [saved[0][0] / STAGE_FILE for saved in self.stages]
        no_moments = misfit(self.spec, spec)
        tied = tied_names(model_plan(spec).layers)
        moments = None
        if not no_moments:
            cut = Layout.of(self.spec.with_builder(spec.model.builder))
            numbers = [stage_moments(spec, k) for k in range(spec.pipeline.num_stages)]
            here = Layout(layout.trained, layout.trained_sizes, numbers)
            moments = EndedMoments(self.stages, cut, here, self.spec.optimizer, tied)
            no_moments = moments.lacks
        stages: Sequence[Sequence[ParameterRange]] = layout.trained
        beside: dict[str, Tensor] = {}
        if spec.adapts_ended and self.spec.lora is not None:
            beside = self._base(spec)
        elif layout.buffers and (spec.lora is None or spec.adapts_ended):
            beside = self._buffers(spec)
        if spec.adapts_ended and self.spec.lora is None:
            stages = [[r for r in ranges if r.name not in beside] for ranges in layout.base]
        return CheckpointWeights(self.run_id, paths, stages, tied, moments, no_moments, beside)

    def _buffers(self, new: RunSpec) -> dict[str, Tensor]:
        """What its model has beside its parameters, by name. `new`: the run that continues this
        one, as this machine builds it. Raises `SpecError`."""
        spec = self.spec.with_builder(new.model.builder)
        if not InitialLayout.of(spec).buffers:
            return initial_buffers(model_plan(spec), spec.seed)
        return self._base(new)

    def _base(self, new: RunSpec) -> dict[str, Tensor]:
        """What it began with and did not train, by name. `new`: as in `_buffers`. Raises
        `SpecError`."""
        spec = self.spec.with_builder(new.model.builder)
        folders = {saved[0].parents[2] for of_stage in self.stages for saved in of_stage}
        try:
            return read_base(spec, self._hashes(), sorted(folders))
        except SpecError as e:
            raise SpecError(
                f"[model] continues: run {self.run_id[:SHOWN_CHARACTERS]}: {e}; bring the folder "
                "base of its state folders too"
            ) from None

    def check_base(self, layout: InitialLayout, hashes: bytes, folder: Path) -> None:
        """For a run of this layout that trains adapters. `hashes`: of its initial shards; `folder`:
        of the model that they come from. The lists of hashes are compared, also where this run had
        cut the model otherwise, for which the folder is read once more. Raises `SpecError` where
        its adapters are for other weights."""
        theirs = InitialLayout.of(self.spec)
        ours = layout.base_hashes(hashes)
        if (theirs.base, theirs.base_sizes) != (layout.base, layout.base_sizes):
            source = InitialSources(self.spec, theirs, folder, None)
            ours = [
                b"".join(_hash(source.read(stage, j)) for j in range(len(sizes)))
                for stage, sizes in enumerate(theirs.base_sizes)
            ]
        if theirs.base_hashes(self._hashes()) != ours:
            raise SpecError(
                f"[model] continues: run {self.run_id[:SHOWN_CHARACTERS]} trained adapters for "
                f"{self.spec.model.base[:80] or 'a model'}, and {folder} has other weights; name "
                "the folder that it began from"
            )

    def _hashes(self) -> bytes:
        """Of all its initial shards. Raises `SpecError`."""
        folders = {saved[0].parents[2] for of_stage in self.stages for saved in of_stage}
        for folder in sorted(folders):
            with suppress(OSError, KeyError):
                hashes = (folder / FILES_FOLDER / _file_of(self.spec)).read_bytes()
                if hashlib.sha256(hashes).hexdigest() == self.spec.model.weights:
                    return hashes
        raise SpecError(
            f"[model] continues: {min(folders)} has not the hashes of the base of run "
            f"{self.run_id[:SHOWN_CHARACTERS]}; bring its folder {FILES_FOLDER} too"
        )


class CheckpointWeights:
    """The parameters in the checkpoints of all stages, by name; implements `EndedWeights`."""

    def __init__(
        self,
        run_id: str,
        paths: Sequence[Path],
        stages: Sequence[Sequence[ParameterRange]],
        tied: Mapping[str, str],
        moments: EndedMoments | None,
        no_moments: str,
        beside: Mapping[str, Tensor],
    ) -> None:
        """`stages`: the parameters of each of the new run that the files have. `tied`: `tied_names`
        of its model; files have such a name where the owner was in another stage. `no_moments`: as
        in `EndedWeights`. `beside`: what else its base has, by name. Raises `SpecError` where the
        parameters are not exactly those of the files."""
        self._moments = moments
        self.no_moments = no_moments
        self._tied = tied
        self._beside = beside
        stored = {one.name: one for path in paths for one in stored_tensors(path)}
        owned = {name: one for name, one in stored.items() if name not in tied}
        self._stored = {tied.get(name, name): one for name, one in stored.items()} | owned
        self._files = MappedFiles()
        wanted = {tied.get(r.name, r.name): r.shape for ranges in stages for r in ranges}
        there = {name: one.shape for name, one in self._stored.items()}
        for name in sorted(wanted.keys() | there.keys()):
            if wanted.get(name) != there.get(name):
                raise SpecError(
                    f"[model] continues: run {run_id[:SHOWN_CHARACTERS]} is of another model: "
                    f"{name[:120]} is {there.get(name, 'missing')} there, "
                    f"{wanted.get(name, 'missing')} here"
                )

    def flat(self, ranges: Sequence[ParameterRange], start: int, stop: int) -> Tensor:
        """As `initial_weights.Weights`."""
        return flat_of(ranges, start, stop, self._read)

    def _read(self, r: ParameterRange, first: int, last: int) -> Tensor:
        if r.name in self._beside:
            return self._beside[r.name].flatten()[first:last]
        return self._files.read(self._stored[self._tied.get(r.name, r.name)], first, last)

    def moments(self, stage: int, shard: int) -> Tensor | None:
        """As `EndedWeights`."""
        return None if self._moments is None else self._moments.flat(stage, shard)


class SavedRuns:
    """What the state folders of this machine have of runs."""

    def __init__(self, folders: Iterable[Path], wanted: str = "") -> None:
        """`folders`: state folders. `wanted`: `[model] continues`. Raises `SpecError` where a
        folder cannot be read."""
        self._wanted = wanted
        self._run = wanted_run(wanted)
        self._saved: list[Saved] = []
        try:
            for folder in folders:
                self._saved += find_checkpoints(folder)
        except CheckpointError as e:
            raise SpecError(f"[model] continues: {e}") from None

    def begun(self, spec: RunSpec) -> tuple[RunSpec, bytes] | None:
        """The run of the spec, which is resolved up to what it begins from, if it has begun
        already, and its list of hashes: the same file, started again, is the same run, though what
        it continues may have gone on since."""
        bare = without_beginning(_values(spec))
        for folder, meta in sorted(self._saved, key=lambda s: s[1].saved_unix_s, reverse=True):
            if not _is_begun(meta, bare, self._run):
                continue
            with suppress(SpecError, OSError, KeyError):
                found = RunSpec.from_checkpoint(meta.spec, meta.run_id)
                digest = found.model.weights
                hashes = (folder.parents[2] / FILES_FOLDER / _file_of(found)).read_bytes()
                if hashlib.sha256(hashes).hexdigest() == digest:
                    return found, hashes
        return None

    def ended(self, spec: RunSpec) -> Ended:
        """The run that `[model] continues` of the spec means. Raises `SpecError`."""
        bare = without_beginning(_values(spec))
        saved = [s for s in self._saved if self._is_meant(s[1], bare)]
        if not saved:
            what = "of it" if self._run else "in it"
            raise SpecError(
                f"[model] continues: {self._wanted[:120]}: this machine has no checkpoint {what}; "
                "write the id of a run whose checkpoints are here, or its state folder"
            )
        found = whole_rounds(saved)
        if not found:
            raise SpecError(f"[model] continues: {self._wanted[:120]}: {_what_lacks(saved)}")
        differences = [(one, other_model(one.spec, spec)) for one in found]
        fitting = [one for one, difference in differences if not difference]
        # Of several in a folder, rather one whose adapters are for a model of this name.
        if fitting:
            alike = (one for one in fitting if one.spec.model.base == spec.model.base)
            return next(alike, fitting[0])
        one, difference = differences[0]
        raise SpecError(
            f"[model] continues: run {one.run_id[:SHOWN_CHARACTERS]} is of another model: "
            f"{difference}"
        )

    def similar(self, spec: RunSpec) -> Ended | None:
        """The newest whole round of another run of the same model, where there is one."""
        others = [s for s in self._saved if s[1].run_id != spec.run_id]
        return next((o for o in whole_rounds(others) if not other_model(o.spec, spec)), None)

    def _is_meant(self, meta: Meta, bare: Mapping[str, Any]) -> bool:
        if self._run is None:
            return not _is_begun(meta, bare, None)
        run_id, round_index = self._run
        return meta.run_id.startswith(run_id) and round_index in (None, meta.round)


def whole_rounds(saved: Sequence[Saved]) -> list[Ended]:
    """Of each run its newest round of which all stages are there; the run that was saved last comes
    first."""
    rounds: dict[tuple[str, int, int], dict[int, list[Saved]]] = {}
    for one in saved:
        meta = one[1]
        stages = rounds.setdefault((meta.run_id, meta.history, meta.round), {})
        alike = stages.setdefault(meta.stage, [])
        if not alike or alike[0][1].digests == meta.digests:
            alike.append(one)
    newest: dict[str, Ended] = {}
    for (run_id, _, round_index), stages in sorted(rounds.items()):
        metas = [meta for of_stage in stages.values() for _, meta in of_stage]
        if stages.keys() != set(range(metas[0].num_stages)):
            continue
        with suppress(SpecError):
            newest[run_id] = Ended(
                run_id,
                round_index,
                RunSpec.from_checkpoint(metas[0].spec, run_id),
                tuple(tuple(stages[k]) for k in sorted(stages)),
                max(meta.saved_unix_s for meta in metas),
            )
    return sorted(newest.values(), key=lambda one: one.saved_unix_s, reverse=True)


def other_model(old: RunSpec, new: RunSpec) -> str:
    """What tells that the parameters of a run are none for another, in words; empty where nothing
    does."""
    for key in SAME_MODEL:
        there, here = getattr(old.model, key), getattr(new.model, key)
        if key == "subspace_seed" and not here:  # it is filled in with the old one's
            continue
        if there != here and isinstance(here, dict):
            names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
            key, there, here = f"config {names[0]}", there.get(names[0]), here.get(names[0])
        if there != here:
            return f"[model] {key} is {str(there)[:40]} there, {str(here)[:40]} here"
    if (old.lora is None) != (new.lora is None) and not new.adapts_ended:
        return "only one of the two trains adapters ([lora])"
    if old.lora is not None and new.lora is not None:
        for key in SAME_LORA:
            there, here = getattr(old.lora, key), getattr(new.lora, key)
            if there != here:
                return f"[lora] {key} is {str(there)[:80]} there, {str(here)[:80]} here"
    if _tokenizer(old) != _tokenizer(new):
        return "it has another tokenizer"
    return ""


def differences(old: RunSpec, new: RunSpec) -> str:
    """The keys in which two specs differ, the first few."""
    there, here = (_keys(without_beginning(_values(spec))) for spec in (old, new))
    names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def without_beginning(values: Mapping[str, Any]) -> dict[str, Any]:
    """A canonical spec without what says where the run began."""
    left = dict(values)
    for table, keys in BEGINNINGS.items():
        if isinstance(left.get(table), dict):
            left[table] = {k: v for k, v in left[table].items() if k not in keys}
    return {key: value for key, value in left.items() if value != {}}


def _is_begun(meta: Meta, bare: Mapping[str, Any], run: tuple[str, int | None] | None) -> bool:
    """Whether a checkpoint is of the run whose spec is `bare`, begun from another one. `run`: the
    one that it must continue; None for any."""
    model = meta.spec.get("model")
    continues = wanted_run(str(model.get("continues", ""))) if isinstance(model, dict) else None
    if continues is None or without_beginning(meta.spec) != bare:
        return False
    if run is None:
        return True
    return continues[0].startswith(run[0]) and run[1] in (None, continues[1])


def _what_lacks(saved: Sequence[Saved]) -> str:
    newest = max((meta for _, meta in saved), key=lambda m: (m.saved_unix_s, m.round))
    stages = {m.stage for _, m in saved if (m.run_id, m.round) == (newest.run_id, newest.round)}
    lacking = sorted(set(range(newest.num_stages)) - stages)
    return (
        f"no round is here with all {counted(newest.num_stages, 'stage')} (of round "
        f"{newest.round}, stage {lacking[0] if lacking else 0} is missing); bring the state "
        "folders of its other peers into one folder, and name that"
    )


def _values(spec: RunSpec) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(spec.canonical())
    return values


def _keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of a spec by the name that a person writes."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "files":
            found |= {f"[{key}] {within}": each for within, each in value.items()}
        else:
            found[key] = value
    return found


def _hash(values: Tensor | None) -> bytes:
    assert values is not None
    return shard_hash(values)


def _file_of(spec: RunSpec) -> str:
    return spec.files[WEIGHTS_FILE].sha256


def _tokenizer(spec: RunSpec) -> str:
    file = spec.files.get("tokenizer.json")
    return spec.data.tokenizer if file is None else file.sha256
