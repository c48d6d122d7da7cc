"""The files behind `[data] paths`."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from swarmnet.errors import DataError
from swarmnet.spec import PYTHON_STDLIB
from swarmnet.training.data.formats import cannot_read

NOT_STDLIB = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file with data."""

    path: Path
    is_named: bool
    """Named itself, not found in a folder: it must be readable."""


def find_files(paths: Sequence[str], include: Sequence[str]) -> list[FoundFile]:
    """The files, each once, however often and by whatever links it is named. Raises `DataError`
    where a path cannot be read or there is no file."""
    if not paths:
        raise DataError("[data] paths is missing; name text files or folders")
    found: dict[tuple[int, int], FoundFile] = {}
    for path_text in paths:
        for file in _files_of(path_text, include):
            stat = _stat(file.path)
            key = (stat.st_dev, stat.st_ino)
            if key not in found or file.is_named:
                found[key] = file
    if not found:
        where, names = ", ".join(paths)[:200], " or ".join(include)
        raise DataError(f"[data] no file in {where} is named {names}")
    return list(found.values())


def _files_of(path_text: str, include: Sequence[str]) -> Iterator[FoundFile]:
    if path_text == PYTHON_STDLIB:
        return _walk(Path(sysconfig.get_path("stdlib")), include, skipped=NOT_STDLIB)
    try:
        path = Path(path_text).expanduser()
    except RuntimeError:
        raise DataError(f"[data] cannot read {path_text}: no such user") from None
    if path.is_file():
        return iter([FoundFile(path, is_named=True)])
    if path.is_dir():
        return _walk(path, include)
    if path.is_symlink():
        raise DataError(f"[data] cannot read {path}: a link that leads nowhere")
    raise DataError(f"[data] cannot read {path}: no such file or folder")


def _walk(root: Path, include: Sequence[str], skipped: Sequence[str] = ()) -> Iterator[FoundFile]:
    """Folders that are links are followed, each real folder once."""

    def fail(error: OSError) -> None:
        raise cannot_read(Path(error.filename), error)

    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        stat = _stat(Path(folder))
        if (stat.st_dev, stat.st_ino) in seen:
            folders[:] = []
            continue
        seen.add((stat.st_dev, stat.st_ino))
        folders[:] = sorted(f for f in folders if f not in skipped)
        for name in sorted(names):
            path = Path(folder, name)
            if any(fnmatch(name, glob) for glob in include) and path.is_file():
                yield FoundFile(path, is_named=False)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise cannot_read(path, error) from None
