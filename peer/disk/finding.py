"""Looks for what peers have left on this machine: in their state folders, in the cache of tokens,
and of runs on this machine alone in the temporary folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from peer.disk.items import CHECKPOINTS, COUNTED, FILES, LOCAL, TOKENS, WEIGHTS, Item
from swarmnet.errors import UserError
from swarmnet.files import older
from swarmnet.runtime.counted import COUNTED_FILE
from swarmnet.runtime.joining.beside import needs_of, run_in
from swarmnet.runtime.local.processes import is_of_living
from swarmnet.runtime.run_files import FOLDER as FILES_FOLDER
from swarmnet.runtime.state_dir import (
    INCARNATION_FILE,
    KEY_FILE,
    LOCK_NAME,
    SEAT_FOLDER,
    is_claimed,
)
from swarmnet.system import is_locked, try_lock
from swarmnet.training.data.store import ABOUT

MAX_META_BYTES = 16 << 20
RUN_CHARACTERS = 16
"""Of a run's id, in the name of the folder of its checkpoints."""
CHECKPOINTS_FOLDER, WEIGHTS_FOLDER = "checkpoints", "base"
META_FILE = "meta.json"
LOCAL_PATTERNS = ("swarmnet-local-*", "swarmnet-kept-*")
TOKENS_NAME = re.compile(r"[0-9a-f]{32}")
"""Of a folder of tokens; what else is in a cache that `SWARMNET_CACHE` names may be of others."""
STARTING = "a peer starts there"


@dataclass(frozen=True, slots=True)
class Found:
    """An item, and where it is."""

    item: Item
    paths: tuple[Path, ...]
    lock: Path | None = None
    """That of the peer whose folder it is in."""


def find(peers: Sequence[Path], cache: Path, temporary: Path | None = None) -> list[Found]:
    """All that is there. `peers`: state folders; `cache`: that of tokens. Blocks."""
    found = [one for folder in peers for one in _in_peer(folder)]
    found += _tokens(cache)
    found += _local_runs(temporary or Path(tempfile.gettempdir()))
    alive = _at_work(peers)
    return [_held_by_run(one, alive) for one in found]


def folders_of(root: Path) -> list[Path]:
    """The state folders in a folder, or that folder where it is one itself. Raises `UserError`
    where it cannot be read."""
    try:
        if _is_peers(root):
            return [root]
        return sorted(folder for folder in root.iterdir() if _is_peers(folder))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"cannot read {e.filename or root}: {e.strerror or e}") from None


def remove(found: Found, peers: Sequence[Path]) -> None:
    """`peers`: as in `find`. Raises `UserError` where that is not possible, or somebody has begun
    to use it meanwhile."""
    lock, kind = None, found.item.kind
    try:
        if found.lock is not None:
            lock = os.open(found.lock, os.O_RDWR)
            is_free = try_lock(lock) or (kind == CHECKPOINTS and run_in(found.lock.parent))
            if not is_free or _held_by_run(found, _at_work(peers)).item.held_by:
                raise UserError(f"{found.item.name} stays: a peer has begun to work with it")
        if kind == TOKENS and _are_open(found.paths[0]):
            raise UserError(f"{found.item.name} stays: a process has opened it")
        for path in found.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as e:
        raise UserError(f"cannot remove {found.item.name}: {e.strerror or e}") from None
    finally:
        if lock is not None:
            os.close(lock)


# ---- a peer's folder ------------------------------------------------------------------------


def _is_peers(folder: Path) -> bool:
    """What is in folders of other programs is not for a peer to remove, though they may have a lock
    and checkpoints too."""
    own = (KEY_FILE, INCARNATION_FILE)
    return (folder / LOCK_NAME).is_file() and any((folder / name).is_file() for name in own)


def _in_peer(folder: Path) -> Iterator[Found]:
    lock = folder / LOCK_NAME
    held = ""
    if is_claimed(folder):
        run = run_in(folder)
        held = f"the peer in {folder.name} is at work" if run else STARTING
    for place in (folder, *sorted(folder.glob(f"{SEAT_FOLDER}*"))):
        name = str(place.relative_to(folder.parent))
        for saved in _folders(place / CHECKPOINTS_FOLDER):
            item = Item(
                f"{name}/{CHECKPOINTS_FOLDER}/{saved.name}",
                CHECKPOINTS,
                *_measured([saved]),
                saved.name[:RUN_CHARACTERS],
                _run_name(saved),
                held_by=held if held == STARTING else "",
            )
            yield Found(item, (saved,), lock)
        for base in _folders(place / WEIGHTS_FOLDER):
            item = Item(f"{name}/{WEIGHTS_FOLDER}/{base.name}", WEIGHTS, *_measured([base]))
            yield Found(replace(item, held_by=held), (base,), lock)
        for kind, paths in (
            (FILES, [place / FILES_FOLDER]),
            (COUNTED, [place / COUNTED_FILE, older(place / COUNTED_FILE)]),
        ):
            there = tuple(path for path in paths if path.exists())
            if there:
                item = Item(f"{name}/{paths[0].name}", kind, *_measured(there), held_by=held)
                yield Found(item, there, lock)


def _at_work(peers: Sequence[Path]) -> set[str]:
    """Beginnings of the ids of the runs that peers at work need."""
    at_work = [folder for folder in peers if is_claimed(folder)]
    return {run[:RUN_CHARACTERS] for folder in at_work for run in needs_of(folder)}


def _held_by_run(found: Found, alive: set[str]) -> Found:
    """The checkpoints of a run of which a peer is at work on this machine, in whatever folder: it
    takes over what lies in others."""
    item = found.item
    is_needed = any(item.run_id.startswith(run) for run in alive)
    if item.held_by or item.kind != CHECKPOINTS or not is_needed:
        return found
    return replace(found, item=replace(item, held_by="a peer of its run is at work here"))


def _run_name(saved: Path) -> str:
    """What the newest of a run's checkpoints says."""
    for path in sorted(saved.glob(f"round-*/{META_FILE}"), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
            return str(json.loads(file.read(MAX_META_BYTES))["spec"]["name"])
    return ""


# ---- elsewhere ------------------------------------------------------------------------------


def _tokens(cache: Path) -> Iterator[Found]:
    for folder in (f for f in _folders(cache) if TOKENS_NAME.fullmatch(f.name)):
        size, used = _measured([folder])
        held = "a process has opened it" if _are_open(folder) else ""
        item = Item(f"tokens/{folder.name}", TOKENS, size, used, held_by=held)
        yield Found(item, (folder, folder.with_suffix(".lock")))


def _are_open(tokens: Path) -> bool:
    """Some process reads or writes them."""
    return any(map(_is_in_use, [tokens.with_suffix(".lock"), *tokens.rglob(ABOUT)]))


def _local_runs(temporary: Path) -> Iterator[Found]:
    for folder in (f for pattern in LOCAL_PATTERNS for f in sorted(temporary.glob(pattern))):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink() or not folder.is_dir():
                continue
            held = "it goes on" if is_of_living(folder) else ""
            yield Found(Item(folder.name, LOCAL, *_measured([folder]), held_by=held), (folder,))


def _is_in_use(path: Path) -> bool:
    """Some process has it locked, alone or with others."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(handle)
    except OSError:  # a file system without locks
        return is_locked(handle)
    finally:
        os.close(handle)


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(p for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []


def _measured(paths: Sequence[Path]) -> tuple[int, float]:
    """Bytes of files, and when the newest was written; what goes meanwhile is nothing, and so is
    what a link leads to, which stays when the link goes."""
    size, newest = 0, 0.0
    for path in paths:
        for file in (
            (path, *path.rglob("*")) if path.is_dir() and not path.is_symlink() else (path,)
        ):
            with suppress(OSError):
                about = file.lstat()
                size += 0 if file.is_dir() else about.st_size
                newest = max(newest, about.st_mtime)
    return size, newest
