"""The pages by their files, and the one for `man`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from peer.cli import app
from tests.reference.commands import commands, exit_codes
from tests.reference.limits import limits
from tests.reference.observed import events, metrics
from tests.reference.run_toml import run_toml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
MAN_PAGE = ROOT / "peer" / "shell" / "swarmnet.1"
"""A wheel installs it: what makes wheels has no libraries to make it with."""
PAGES: dict[str, Callable[[], str]] = {
    "run-toml.md": run_toml,
    "commands.md": commands,
    "metrics.md": metrics,
    "events.md": events,
    "exit-codes.md": exit_codes,
    "limits.md": limits,
}


def man_page() -> str:
    """What `swarmnet man` prints."""
    return CliRunner().invoke(app, ["man"]).stdout
