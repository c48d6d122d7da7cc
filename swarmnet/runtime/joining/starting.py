"""The run that a person starts from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.runtime.options import with_overrides
from swarmnet.spec import RunSpec, load_spec
from swarmnet.spec_0_1 import run_id_of_0_1


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run of one's own."""

    spec: RunSpec
    """Resolved: what its peers agree on."""
    former_ids: tuple[str, ...] = ()
    """Ids that earlier versions of swarmnet gave the same run."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Of the run's files, by name."""
    model: str = ""
    """`[model] from`."""
    adapter: str = ""
    """`[lora] from`."""


def start_run(
    path: Path, *, rounds: int | None = None, seed: int | None = None, builder: str = ""
) -> StartedRun:
    """The run of a `run.toml` after `--rounds` and `--seed`, its open keys resolved. `builder`: see
    `swarmnet.training.models.resolving.resolve`. Blocks for seconds. Raises `SpecError`."""
    written = with_overrides(load_spec(path), rounds=rounds, seed=seed)
    from swarmnet.training.models.resolving import resolve_run  # torch: after the cheap errors

    former = run_id_of_0_1(written)
    resolved = resolve_run(written, builder)
    return StartedRun(
        resolved.spec,
        () if former is None else (former,),
        resolved.contents,
        written.model.source,
        "" if written.lora is None else written.lora.source,
    )
