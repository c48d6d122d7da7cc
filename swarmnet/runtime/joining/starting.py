"""The run that a person starts from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.runtime.joining.past import open_past
from swarmnet.runtime.options import with_overrides
from swarmnet.spec import RunSpec, load_spec


@dataclass(frozen=True, slots=True)
class Run:
    """A run, and what it begins from: known where this peer starts it."""

    spec: RunSpec
    """Resolved: what its peers agree on."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Of the run's files, by name."""
    model: str = ""
    """`[model] from`."""
    adapter: str = ""
    """`[lora] from`."""
    continues: str = ""
    """`[model] continues`, as it is written."""


def start_run(
    path: Path,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    builder: str = "",
    data: Sequence[str] = (),
    tokenizer: str = "",
    reads_data: bool = True,
    state_dir: Path | None = None,
) -> Run:
    """The run of a `run.toml` after `--rounds` and `--seed`, its open keys resolved. `builder`: see
    `swarmnet.training.resolving.resolve`. `data` and `tokenizer`: where this machine has
    them; it has none of the data where it `reads_data` not. `state_dir`: of the peer that starts
    it. Blocks for as long as it takes to read model and data. Raises `DataError` or `SpecError`."""
    written = with_overrides(load_spec(path), rounds=rounds, seed=seed)
    from swarmnet.training.data import Place
    from swarmnet.training.resolving import resolve_run  # torch: after the cheap errors

    place = Place(tuple(data), tokenizer) if reads_data else None
    continues = written.model.continues
    past = open_past(state_dir, continues) if continues else None
    resolved = resolve_run(written, builder, place, past)
    return Run(
        resolved.spec,
        resolved.contents,
        written.model.source,
        "" if written.lora is None else written.lora.source,
        continues,
    )


def files_of_run(path: Path, tokenizer: str = "") -> tuple[RunSpec, Mapping[str, bytes]]:
    """The run of a `run.toml` with what its model's folder says, as far as its data need it, and
    the contents of its files. `tokenizer`: where this machine has it. Raises `SpecError`."""
    from swarmnet.training.resolving import with_files

    return with_files(load_spec(path), tokenizer)
