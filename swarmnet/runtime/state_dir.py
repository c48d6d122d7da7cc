"""The folder in which a peer keeps what must survive it: its identity, to begin with.

Two peers with one identity would overrule each other's records for ever, so a folder is locked
while its peer lives. The lock is the kernel's (`flock`) and ends with the process, however it
ends. Where the folder is removed, or a disk goes and comes back, the peer makes lock and key anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnet.errors import UsageError, UserError
from swarmnet.files import write_whole
from swarmnet.identity import Identity
from swarmnet.system import is_locked, try_lock

log = logging.getLogger("swarmnet.peer")

MAX_INCARNATION = 1 << 60
MAX_PEERS_PER_USER = 256
"""Folders tried before giving up."""
LOCK_NAME = "lock"
KEY_FILE = "identity.key"
"""In the state folder."""
LOOK_S = 10.0
TAKEN_LOOKS = 3
"""So often in a row another process has the lock of a folder that was made anew: a peer, and nobody
who only looks."""
SEAT_FOLDER = "seat-"
"""In a state folder: what a further seat of the machine keeps; its number follows."""
INCARNATION_FILE = "incarnation"


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


class Claim:
    """Of a folder that this process has claimed."""

    def __init__(
        self, folder: Path, key: Identity, tell: Callable[[], object] = lambda: None
    ) -> None:
        """`tell`: writes what the peer is part of."""
        self.folder = folder
        self._key = key
        self._tell = tell
        self._own = set(filter(None, [lock_stamp(folder)]))
        """Locks that this process has: a disk that comes back brings an older one."""
        self._handles: list[int] = []
        self._num_taken = 0

    def renew(self) -> bool:
        """Makes the lock and the key anew where somebody removed them, and says whether the folder
        is this process's own, as far as that is known. Blocks."""
        if lock_stamp(self.folder) not in self._own:
            try:
                handle = _claim(self.folder)
            except UserError:  # a disk that is gone
                return True
            if handle is None:
                self._num_taken += 1
                return self._num_taken < TAKEN_LOOKS
            self._handles.append(handle)
            found = os.fstat(handle)
            if self._own:
                log.warning("the state folder %s was removed; it is made anew", self.folder)
                self._tell()
            self._own.add((found.st_dev, found.st_ino))
        self._num_taken = 0
        try:
            if not (self.folder / KEY_FILE).exists():
                self._key.save(self.folder / KEY_FILE)
        except OSError as e:
            log.warning("the key of this peer cannot be written again: %s", e.strerror)
        return True

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.pop())


async def until_taken(claim: Claim) -> None:
    """Keeps the lock and the key of a folder there, and closes the claim. Raises `UsageError` when
    it was removed, and another process has the one in its place."""
    try:
        while True:
            if not await asyncio.to_thread(claim.renew):
                raise UsageError(
                    f"the state folder {claim.folder} was removed, and another peer uses the one "
                    "in its place: this peer ends. Start it again with another --state-dir"
                )
            await asyncio.sleep(LOOK_S)
    finally:
        claim.close()


def lock_stamp(folder: Path) -> tuple[int, int] | None:
    """Which lock is there; None for none. While its peer lives no other file is the same."""
    try:
        found = (folder / LOCK_NAME).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def next_incarnation(state_dir: Path, now_unix_s: float) -> int:
    """Of a peer that starts: milliseconds since 1970, and more than it had the last time, though
    the clock may have been set back since. Others keep the record with the highest one."""
    path, now_ms = state_dir / INCARNATION_FILE, int(now_unix_s * 1000)
    try:
        last = int(path.read_text())
    except (OSError, ValueError):
        last = 0
    incarnation = max(now_ms, last + 1) if 0 <= last < MAX_INCARNATION else now_ms
    try:
        write_whole(path, f"{incarnation}\n")
    except OSError as e:
        log.warning("the start cannot be noted in %s: %s", path, e.strerror)
    return incarnation


def is_claimed(state_dir: Path) -> bool:
    """Whether a peer is at work in a state folder."""
    try:
        lock = os.open(state_dir / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        return is_locked(lock)
    finally:
        os.close(lock)


def first_free_dir(root: Path | None = None) -> Path:
    """The folder that `claimed_state_dir` takes where nobody names one, and nobody is quicker."""
    root = root or state_root()
    paths = [root / f"peer-{number}" for number in range(1, MAX_PEERS_PER_USER + 1)]
    return next((path for path in paths if not is_claimed(path)), paths[-1])


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
        if try_lock(lock):
            return lock
    except OSError as error:  # not every network file system has locks
        os.close(lock)
        raise UserError(
            f"cannot lock the state folder {path}: {error.strerror}; name a --state-dir on a "
            "local disk"
        ) from None
    os.close(lock)
    return None
