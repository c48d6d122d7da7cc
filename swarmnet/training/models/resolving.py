"""What the spec of a run leaves to the program, chosen by whoever starts the run: numbers, and all
that a model's folder has to say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnet.spec import BYTES_TOKENIZER, CODEC_KEY, RunSpec
from swarmnet.training.models.base import describe_parameters
from swarmnet.training.models.model_folder import (
    find_folder,
    has_weights,
    open_weights,
    read_bounded,
    read_folder,
)
from swarmnet.training.models.registry import (
    model_plan,
    shard_parameters,
    split_stages,
    stage_shards,
)

TOKENIZER_FILE, WEIGHTS_FILE = "tokenizer.json", "weights.sha256"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run as every peer of it will read it."""

    spec: RunSpec
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Of the run's files, by name; of those that this machine has."""


def resolve(spec: RunSpec, builder: str = "") -> RunSpec:
    """`resolve_run`, without the files."""
    return resolve_run(spec, builder).spec


def resolve_run(spec: RunSpec, builder: str = "") -> Resolved:
    """The spec with its open keys filled in (`RunSpec.open_keys`); one that has none comes back as
    it is. `builder`: where this machine has a custom model's code, in place of the spec's. Takes
    up to seconds for a large model, and as long as it takes to read its weights where it has some.

    Raises:
        SpecError: the model or its folder cannot be read, built or cut so.
    """
    spec, contents = _with_files(spec)
    if set(spec.open_keys) <= {CODEC_KEY}:  # it takes no model
        return Resolved(spec.resolved(layers=(), shard_parameters=0), contents)
    model = spec.with_builder(builder or spec.model.builder)
    plan = model_plan(model)
    stages = split_stages(plan, spec.pipeline.num_stages)
    size = shard_parameters(model, plan)
    if spec.model.source:
        folder = find_folder(spec.model.source)
        ranges = [describe_parameters(layers) for layers in stages]
        sizes = [stage_shards(plan, len(stages), k, size) for k in range(len(stages))]
        dtype, hashes = _weights(folder, spec.model.config, ranges, sizes)
        changes = {"source": "", "dtype": spec.model.dtype or dtype}
        spec = spec.model_copy(update={"model": spec.model.model_copy(update=changes)})
        if hashes:
            contents = {**contents, WEIGHTS_FILE: hashes}
            spec = _with_file_specs(spec, contents)
    layers = [len(stage) for stage in stages]
    return Resolved(spec.resolved(layers=layers, shard_parameters=size), contents)


def described(spec: RunSpec) -> RunSpec:
    """The spec with what its model's config.json says, which is enough to plan it; nothing is read
    but that. Raises `SpecError`."""
    if not spec.model.source or spec.model.config:
        return spec
    from swarmnet.training.models.model_config import read_config

    folder = find_folder(spec.model.source)
    read = read_config(folder)
    values: dict[str, Any] = {"config": read.values, "base": spec.model.source}
    return spec.model_copy(update={"model": spec.model.model_copy(update=values)})


def file_values(contents: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """What a spec says of files."""
    return {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        for name, data in sorted(contents.items())
    }


def _with_files(spec: RunSpec) -> tuple[RunSpec, dict[str, bytes]]:
    """What the model's folder says, and the files of the run."""
    contents: dict[str, bytes] = {}
    if spec.model.source:
        model, contents = read_folder(find_folder(spec.model.source), spec.model)
        spec = spec.model_copy(update={"model": model})
    tokenizer = Path(spec.data.tokenizer).expanduser()
    is_own = spec.data.tokenizer != BYTES_TOKENIZER and TOKENIZER_FILE not in spec.files
    if is_own and tokenizer.is_file():
        contents[TOKENIZER_FILE] = read_bounded(tokenizer)
    if not contents:
        return spec, contents
    return _with_file_specs(spec, contents), contents


def _with_file_specs(spec: RunSpec, contents: Mapping[str, bytes]) -> RunSpec:
    values = spec.model_dump()
    values["files"] = {**values["files"], **file_values(contents)}
    if WEIGHTS_FILE in contents:
        values["model"]["weights"] = hashlib.sha256(contents[WEIGHTS_FILE]).hexdigest()
    return spec.with_values(values)


def _weights(
    folder: Path, config: dict[str, Any], stages: list[Any], sizes: list[tuple[int, ...]]
) -> tuple[str, bytes]:
    """The dtype of a folder's weights and the list of the initial shards' hashes; empty where it
    has no weights."""
    from swarmnet.training.models.source_weights import shard_hashes

    if not has_weights(folder):
        return "", b""
    weights = open_weights(folder, config, stages)
    return weights.dtype, shard_hashes(weights, stages, sizes)
