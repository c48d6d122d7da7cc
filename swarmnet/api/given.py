"""A run as a program gives it (a path, tables, a spec, data of its own) as the files of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarmnet.errors import DataError, SpecError, UsageError
from swarmnet.files import WITH_ROOM, GivenFile, told_if_not_written
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import (
    DEFAULT_TEXT_FIELD,
    RunSpec,
    read_values,
    spec_of_values,
    values_of_spec,
)

if TYPE_CHECKING:
    from torch import nn

    from swarmnet.training.models.given_layers import Loss

SpecLike = str | os.PathLike[str] | Mapping[str, Any] | RunSpec
"""A `run.toml` (or `.json`), its tables, or what `swarmnet.load_spec` returns."""


class Numbered(Protocol):
    """Samples by their numbers, as a torch `Dataset` has them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Given:
    """What a program gives of a run, beside its spec."""

    data: DataLike | None = None
    layers: Iterable[nn.Module] | None = None
    """In place of `[model]`."""
    loss: Loss | None = None
    """Of layers: of their outputs and the targets, summed."""


NOTHING = Given()


DataLike = Iterable[Mapping[str, Any]] | Iterable[tuple[Any, Any]] | Numbered
"""Samples: texts or dialogues, in the fields that `[data]` names; or for layers of a program pairs
of an input and a target."""
OF_PAIRS = ("epochs", "held_out_fraction", "held_out_microbatches")
"""Keys of `[data]` that mean something where samples are no text."""
SPEC_FILE, DATA_FILE = "run.json", "data.jsonl"
SOURCE = "the spec"
"""In errors about one that is no file."""


def spec_file(spec: SpecLike | None, given: Given, folder: Path) -> Path:
    """The file of a run that peers begin from: the given one, or one that is written into `folder`.
    None: the default run. Reads the data once, and blocks for as long as that takes. Raises
    `SpecError` or `DataError`, and `UserError` where the folder cannot be written."""
    if given.loss is not None and given.layers is None:
        raise UsageError("loss goes with model: the layers of a run")
    if spec is None:
        spec = default_spec_path()
    if isinstance(spec, (str, os.PathLike)):
        path = Path(os.fspath(spec))
        if given.data is None and given.layers is None:
            return path
        values, source = read_values(path), path.name
    else:
        values, source = _values(spec), SOURCE
    pairs = None
    if given.data is not None:
        samples = _samples(given.data)
        first = next(samples, None)
        samples = chain(() if first is None else (first,), samples)
        if given.layers is not None and isinstance(first, (tuple, list)):
            pairs = samples
        else:
            values = _with_data(values, samples, folder / DATA_FILE, source)
    if given.layers is not None:
        values = _with_layers(values, given, pairs, folder, source)
    spec_of_values(values, source)  # what is wrong is known here, by its own name
    written = folder / SPEC_FILE
    try:
        text = json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{source}: plain values only, as in a run.toml ({error})") from None
    with told_if_not_written(folder, WITH_ROOM):
        written.write_text(text)
    return written


def _values(spec: Mapping[str, Any] | RunSpec) -> dict[str, Any]:
    if isinstance(spec, RunSpec):
        return values_of_spec(spec)
    if not isinstance(spec, Mapping):
        kind = type(spec).__name__
        raise SpecError(f"{SOURCE}: a path, tables or a RunSpec, and not a {kind}")
    return dict(spec)


def _with_layers(
    values: dict[str, Any], given: Given, pairs: Iterator[Any] | None, folder: Path, source: str
) -> dict[str, Any]:
    """With the layers of a program as its model; with `pairs` as its only data."""
    from swarmnet.api.layers import model_table  # torch, which a spec alone does not need

    data, model = values.get("data", {}), values.get("model", {})
    if not isinstance(data, dict) or not isinstance(model, dict):
        raise SpecError(f"{source}: [data] and [model] are tables")
    if pairs is not None:
        data = {key: data[key] for key in OF_PAIRS if key in data}
    else:
        length = data.get("sequence_length") or model.get("max_position_embeddings")
        if type(length) is not int or length < 1:
            raise SpecError(
                f"{source}: [data] sequence_length is missing; a model of text that is given as "
                "layers needs it, as a number of tokens"
            )
        data = {**data, "sequence_length": length}
    table = model_table(
        given.layers or (),
        given.loss,
        folder,
        pairs=pairs,
        length=data.get("sequence_length", 0),
    )
    return {**values, "model": table, "data": data}


def _with_data(
    values: dict[str, Any], data: Iterator[Any], path: Path, source: str
) -> dict[str, Any]:
    """With `data`, written to `path`, as the only paths of the run."""
    table = values.get("data", {})
    if not isinstance(table, dict) or table.get("source"):
        raise SpecError(
            f"{source}: samples of a program take the place of [data] paths; leave "
            "[[data.source]] out"
        )
    messages_field = table.get("messages_field", "")
    field = messages_field or table.get("text_field", DEFAULT_TEXT_FIELD)
    num = 0
    with GivenFile(path, WITH_ROOM) as file:
        for num, sample in enumerate(data, 1):
            file.write(_line(sample, num, str(field), is_dialogue=bool(messages_field)))
    if not num:
        raise DataError("data: there is no sample")
    return {**values, "data": {**table, "paths": [str(path)]}}


def _samples(data: DataLike) -> Iterator[Any]:
    if isinstance(data, Iterable):
        return iter(data)
    return (data[k] for k in range(len(data)))


def _line(sample: Any, num: int, field: str, *, is_dialogue: bool) -> bytes:
    """Of JSON. `num`: of the sample, from 1."""
    if not isinstance(sample, Mapping):
        kind = type(sample).__name__
        raise DataError(f'data: sample {num} is a {kind}; give tables such as {{"{field}": ...}}')
    wanted: type = list if is_dialogue else str
    value = sample.get(field)
    if is_dialogue and isinstance(value, tuple):
        value = list(value)
    if not isinstance(value, wanted):
        what = "list of messages" if is_dialogue else "text"
        raise DataError(f"data: sample {num} has no {what} in {field!r}")
    try:
        return f"{json.dumps({field: value}, ensure_ascii=False)}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"data: sample {num}: {error}") from None
