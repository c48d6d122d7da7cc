"""The disk's cache of tokenized sources: `$SWARMNET_CACHE`, by default `~/.cache/swarmnet`.

An entry is a store under a key, the hash of all that its tokens depend on: the contents of the
files (not their names or places), the tokenizer, the reader's options and the version of the
format. Entries are written beside their place and renamed, so one is there whole or not at all. One
process at a time writes an entry; others wait for it. An entry that nobody used for `UNUSED_DAYS`
is removed when a new one is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from swarmnet.errors import DataError
from swarmnet.files import write_whole
from swarmnet.system import try_lock, wait_for_lock
from swarmnet.training.data.files import FoundFile
from swarmnet.training.data.formats import cannot_read
from swarmnet.training.data.store import ABOUT, Store

log = logging.getLogger("swarmnet.data")

FORMAT = 1
"""To be raised whenever the same files give other tokens or another store."""
UNUSED_DAYS = 30
SIZES = "sizes.json"
"""In the folder of what comes from other peers (see `coming`)."""
REMEMBERED_BYTES = 1 << 24
"""The hash of a file of this size and more is remembered, by path, size and time."""
SETTLED_S = 2.0
"""A file that changed less than so long ago may change again without another time."""


def cache_root() -> Path:
    """Where entries are."""
    own = os.environ.get("SWARMNET_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) if own else Path(base) / "swarmnet"


def ordered(files: Iterable[FoundFile]) -> list[tuple[str, FoundFile]]:
    """Files with the hashes of their contents, in the order of these: the same on every machine,
    whatever their names. Raises `DataError`."""
    hashed = [(_content_hash(file.path), file) for file in files]
    return sorted(hashed, key=lambda pair: (pair[0], str(pair[1].path)))


def key_of(hashes: Iterable[str], *options: object) -> str:
    """Of an entry."""
    text = json.dumps([FORMAT, list(hashes), *map(str, options)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cached(key: str, write: Callable[[Path], None]) -> Store:
    """The store of a key; `write` makes it in an empty folder where it is not there. Raises
    `DataError` of one line, and what `write` raises."""
    root = usable_root()
    folder = root / key
    try:
        if (found := _load(folder)) is not None:
            return found
        with _alone(root / f"{key}.lock"):
            if (found := _load(folder)) is not None:
                return found
            _remove_unused(root)
            for left in root.glob(f".{key}.*"):  # by a process that was ended while it wrote
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{key}.", dir=root) as name:
                write(Path(name))
                shutil.rmtree(folder, ignore_errors=True)
                made = Path(name).rename(folder)
                Path(name).mkdir()  # for the context to remove
            return Store.load(made)
    except OSError as error:
        raise DataError(
            f"[data] cannot write tokens into {root}: {error.strerror or error}"
        ) from None


def _load(folder: Path) -> Store | None:
    try:
        store = Store.load(folder)
        os.utime(folder / ABOUT)
    except (OSError, ValueError):
        return None
    return store


def usable_root() -> Path:
    """Where entries can be written. Raises `DataError`."""
    root = cache_root() / "data"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError:
        other = Path(tempfile.gettempdir()) / f"swarmnet-{os.getuid()}"
        other.mkdir(mode=0o700, exist_ok=True)
        if other.stat().st_uid != os.getuid():
            raise DataError(f"[data] {other} is another user's; set SWARMNET_CACHE") from None
        log.warning("[data] cannot write into %s: tokens are kept in %s", root, other)
        return other


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("w") as file:
        if not try_lock(file.fileno()):
            log.warning("[data] waiting for another process that tokenizes the same files")
            wait_for_lock(file.fileno())
        yield


def _remove_unused(root: Path) -> None:
    """Nor what processes that were ended had begun. What others are at work on is younger."""
    oldest = time.time() - UNUSED_DAYS * 86_400
    for begun in root.glob(".*/"):
        with suppress(OSError):
            if begun.stat().st_mtime < oldest:
                shutil.rmtree(begun, ignore_errors=True)
    for about in (*root.glob(f"[!.]*/{ABOUT}"), *root.glob(f"[!.]*/{SIZES}")):
        try:
            is_old = about.stat().st_mtime < oldest
        except OSError:  # another process has just removed it
            continue
        if is_old:
            shutil.rmtree(about.parent, ignore_errors=True)
            about.parent.with_suffix(".lock").unlink(missing_ok=True)


def _content_hash(path: Path) -> str:
    """xxh3-128, hex."""
    try:
        stat = path.stat()
        if stat.st_size < REMEMBERED_BYTES:
            return xxhash.xxh3_128_hexdigest(path.read_bytes())
        text = f"{path.resolve()}|{stat.st_dev}|{stat.st_ino}|{stat.st_size}|{stat.st_mtime_ns}"
        name = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        remembered = usable_root() / "hashes" / name
        if remembered.is_file() and len(found := remembered.read_text()) == 32:
            return found
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        if time.time() - stat.st_mtime > SETTLED_S:
            remembered.parent.mkdir(exist_ok=True)
            write_whole(remembered, digest)
        return digest
    except OSError as error:
        raise cannot_read(path, error) from None
