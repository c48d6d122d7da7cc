"""The folder in which a peer keeps what must survive it: its identity, to begin with.

Two peers with one identity would overrule each other's records for ever, so a folder is locked
while its peer lives. The lock is the kernel's (`flock`) and ends with the process, however it
ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnet.errors import UserError

MAX_PEERS_PER_USER = 256
"""Folders tried before giving up."""
LOCK_NAME = "lock"


def state_root() -> Path:
    """`$XDG_STATE_HOME/swarmnet`, by default ~/.local/state/swarmnet."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "swarmnet"


@contextmanager
def claimed_state_dir(wanted: Path | None, root: Path | None = None) -> Iterator[Path]:
    """A folder that is this process's own until the block ends: `wanted`, or the first free of
    `peer-1`, `peer-2`, ... in `root`, so that a machine's peers keep their identities.

    Raises:
        UserError: `wanted` is in use, or no folder can be made.
    """
    if wanted is not None:
        path, lock = wanted, _claim(wanted)
        if lock is None:
            raise UserError(f"{wanted} is in use by another peer; choose another --state-dir")
    else:
        path, lock = _first_free(root or state_root())
    try:
        yield path
    finally:
        os.close(lock)


def _first_free(root: Path) -> tuple[Path, int]:
    for number in range(1, MAX_PEERS_PER_USER + 1):
        path = root / f"peer-{number}"
        lock = _claim(path)
        if lock is not None:
            return path, lock
    raise UserError(f"{root} has {MAX_PEERS_PER_USER} peers at work; name a --state-dir")


def _claim(path: Path) -> int | None:
    """The descriptor that holds the lock, None where another process has it."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"cannot use the state folder {path}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
