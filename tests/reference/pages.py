"""The pages by their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.reference.commands import commands, exit_codes
from tests.reference.limits import limits
from tests.reference.observed import events, metrics
from tests.reference.run_toml import run_toml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "run-toml.md": run_toml,
    "commands.md": commands,
    "metrics.md": metrics,
    "events.md": events,
    "exit-codes.md": exit_codes,
    "limits.md": limits,
}
