"""Recomputes what `run_ids.json` has. To be run in the project's root: builders are relative."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarmnet.spec import load_spec
from swarmnet.training.resolving import resolve

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("run_ids.json")
WHERE = ("examples/*.toml", "swarmnet/runtime/*.toml", "tests/golden/specs/*.toml")


def kept() -> dict[str, Any]:
    """By path of a spec."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def computed() -> dict[str, Any]:
    """Likewise, by the code as it is."""
    paths = sorted(path for glob in WHERE for path in ROOT.glob(glob))
    return {path.relative_to(ROOT).as_posix(): _entry(path) for path in paths}


def _entry(path: Path) -> dict[str, Any]:
    spec = resolve(load_spec(path))
    return {
        "canonical": spec.canonical().decode(),
        "run_id": spec.run_id,
    }


def add_missing() -> None:
    """Writes entries for new specs."""
    entries = computed() | kept()
    text = json.dumps(entries, indent=1, sort_keys=True, ensure_ascii=False)
    FILE.write_text(f"{text}\n")
