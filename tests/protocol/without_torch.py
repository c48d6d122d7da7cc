"""For a Python for which torch is not at hand: `pytest -p tests.protocol.without_torch`.

What needs torch is skipped, a whole module where it imports it. The rest is what decides, talks and
simulates, which by its own rules never imports torch. Run as a module it prints what is to be
installed for it."""

from __future__ import annotations

import sys
import tomllib
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

NEEDING_TORCH = ("torch", "hivemind")
TOOLS = ("pytest", "pytest-xdist", "hypothesis")
"""Of those for developers."""


class _Skipping(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torch":
            pytest.skip("torch is left out", allow_module_level=True)
        return None


def wanted() -> list[str]:
    """Lines for pip."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lines = [x for x in project["dependencies"] if Requirement(x).name not in NEEDING_TORCH]
    tools = project["optional-dependencies"]["dev"]
    return [*lines, *(x for x in tools if Requirement(x).name in TOOLS)]


if __name__ == "__main__":
    print("\n".join(wanted()))
else:
    sys.meta_path.insert(0, _Skipping())
