"""Folders for the sockets of a daemon, which are cleaned up after their process."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from swarmnet.errors import TransportError
from swarmnet.system import try_lock, wait_for_lock

MAX_SOCKET_PATH = 80
RUNTIME_PREFIX = "swarmnet-p2pd-"
RUNTIME_PATTERN = re.compile(RUNTIME_PREFIX + r"[0-9]+-[a-z0-9_]{8}")
"""Nothing else is ever removed: other folders of swarmnet, and of its users, lie beside them."""
MAX_UNLOCKED_S = 3600.0
"""A runtime folder without a lock file this old was never finished."""


class RuntimeDir:
    """A folder for sockets that says, by a lock of the kernel's, whether its process lives."""

    path: Path
    lock: int
    """Descriptor of the locked file; child processes do not inherit it."""

    def __init__(self, base: Path | None = None) -> None:
        """`base`: where to make it. Raises `TransportError`."""
        base = base or Path(tempfile.gettempdir())
        if len(str(base)) > MAX_SOCKET_PATH - 40:
            base = Path("/tmp")
        clean_up(base)
        try:
            self._make(base)
            while not (self.path / "lock").exists():  # another process cleaned it up half made
                os.close(self.lock)
                self._make(base)
        except OSError as e:
            raise TransportError(f"cannot make a folder for sockets in {base}: {e}") from None
        self._is_open = True

    def _make(self, base: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{RUNTIME_PREFIX}{os.getpid()}-", dir=base))
        self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        wait_for_lock(self.lock)

    def close(self) -> None:
        """Idempotent."""
        if self._is_open:
            self._is_open = False
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)


def clean_up(base: Path) -> list[Path]:
    """Removes the runtime folders of processes that are gone; returns them."""
    removed = []
    for path in sorted(base.glob(f"{RUNTIME_PREFIX}*")):
        if RUNTIME_PATTERN.fullmatch(path.name) and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    """Is its process gone? Its lock went with it, however it ended."""
    try:
        lock = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:  # being made, or its maker died
        with contextlib.suppress(OSError):
            return path.is_dir() and time.time() - path.stat().st_mtime > MAX_UNLOCKED_S
        return False
    except OSError:  # somebody else's
        return False
    try:
        return try_lock(lock)
    except OSError:
        return False
    finally:
        os.close(lock)
