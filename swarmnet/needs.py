"""What swarmnet asks for from others, and the command that installs it."""

from __future__ import annotations

import shlex
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DISTRIBUTION = "swarmnet-train"
"""The package's name for pip; it is on no index. `swarmnet` is what is imported and typed, and on
PyPI a package of somebody else."""
PY_LIBP2P = "libp2p"
APART = {PY_LIBP2P: "libp2p==0.8.1"}
"""Installed without their own requirements, of which one is pinned to a release that has to be
compiled; what the parts that we use need is among ours
(docs/decisions/0016-py-libp2p-without-its-pins.md)."""


def install_command(*names: str, options: str = "") -> str:
    """What brings libraries, by their names for pip, in the versions that swarmnet asks for: `pip
    install 'transformers>=5.20' 'peft>=0.19'`. A name stands alone where no version is known:
    swarmnet asks for none, or runs from a folder and was never installed."""
    known = _requirements() | APART
    wanted = [known.get(canonicalize_name(name), name) for name in names]
    if APART.keys() & set(names):
        options = f"--no-deps {options}"
    return " ".join(["pip install", *options.split(), *map(shlex.quote, wanted)])


def _requirements() -> dict[str, str]:
    """Of this package, the extras included, by canonical name."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        wanted = Requirement(line)
        found.setdefault(canonicalize_name(wanted.name), f"{wanted.name}{wanted.specifier}")
    return found
