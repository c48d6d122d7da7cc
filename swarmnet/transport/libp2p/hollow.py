"""Packages of which we use parts, without what their own file imports."""

from __future__ import annotations

import importlib.util
import sys


def hollow(name: str) -> None:
    """An empty package stands in for a package that is not loaded: its own file is not run, and the
    modules in it are found as ever. It stays, for some of them import others when they are first
    used. A program that uses all of the package imports it first; then nothing stands in for it.
    Raises `ModuleNotFoundError` where the package is not installed."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    above, _, own = name.rpartition(".")
    if above:
        setattr(sys.modules[above], own, package)
