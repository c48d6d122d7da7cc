"""The package that PyPI calls `swarmnet`, which is somebody else's, where it is installed here."""

from __future__ import annotations

import base64
import hashlib
from importlib import metadata

OTHER = "swarmnet"
OURS = "peer.cli:main"
"""What the command of this package runs, which had that name for pip once."""
MEND = (
    "pip uninstall swarmnet; then, in the clone of this one, pip install --force-reinstall "
    "--no-deps . (after make install that is not needed)"
)


def other_package() -> tuple[str, bool] | None:
    """What it is, with its version, and whether its files lie where this one's should; None where
    it is not installed. Imports nothing of either package."""
    for found in metadata.distributions(name=OTHER):
        if any(entry.value == OURS for entry in found.entry_points):
            continue
        first = [f for f in found.files or () if f.parts == (OTHER, "__init__.py")]
        text = f"another package, PyPI's {OTHER} {found.version}"
        return text, any(_is_as_installed(file) for file in first)
    return None


def _is_as_installed(file: metadata.PackagePath) -> bool:
    """Whether what is there is the file that was installed, and none that another package put in
    its place."""
    if file.hash is None:
        return False
    try:
        digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
    except (OSError, ValueError):  # gone, or hashed in a way that is unknown here
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value
