"""Files of this machine: what is written is whole, and what people have written is read as they
meant it."""

from __future__ import annotations

import codecs
import errno
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from swarmnet.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks of encodings that are not UTF-8, the longer ones first: one begins another."""


WITH_ROOM = "name a state_dir, or set TMPDIR to a folder, with room"
"""What a program can do where what it gives has no room."""
COMMENT = re.compile(r"(?:^|\s)#.*")


def is_full(error: BaseException) -> bool:
    """There is no room left on the disk, or the user may take no more of it. Also of errors that
    a library has made of the system's: these have its number in their text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return any(f"os error {number})" in str(error) for number in FULL)


def write_whole(path: Path, data: bytes | str) -> None:
    """In place of what is there, all of it or nothing. Raises `OSError`."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        beside.replace(path)
    except OSError:
        with suppress(OSError):  # else it takes the room that others want
            beside.unlink(missing_ok=True)
        raise


@contextmanager
def told_if_not_written(folder: Path, mend: str) -> Iterator[None]:
    """What fails to be written there becomes a `UserError`, which ends with `mend`."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {e.strerror or e}; {mend}") from None


class GivenFile:
    """A new file, of what a program gives piece by piece. That it cannot be written is a
    `UserError`; errors of the program's own stay what they are."""

    def __init__(self, path: Path, mend: str) -> None:
        """`mend`: what a person can do where there is no room."""
        self._folder, self._mend = path.parent, mend
        with self._told():
            self._file = path.open("wb")

    def write(self, data: bytes) -> None:
        with self._told():
            self._file.write(data)

    def __enter__(self) -> GivenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            with self._told():
                self._file.close()  # which writes the rest
            return
        with suppress(OSError):  # the first error is the one to tell
            self._file.close()

    def _told(self) -> AbstractContextManager[None]:
        return told_if_not_written(self._folder, self._mend)


def append_whole(descriptor: int, data: bytes) -> None:
    """To an open file, all of it or nothing: what comes later begins where this would have. Raises
    `OSError`."""
    before = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with suppress(OSError):  # a pipe cannot be cut
            os.ftruncate(descriptor, before)
        raise


def older(path: Path) -> Path:
    """Where a file of lines is that became too long."""
    return path.with_name(f"{path.name}.1")


class LinesFile:
    """A file that lines are added to for as long as a process lives, and that is bounded: one that
    would become longer than `max_bytes` is set aside (`older`) in place of the one before. What is
    gone, the file or its folder, is made anew."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._handle: int | None = None

    def open(self, *, anew: bool = False) -> None:
        """Opens it, or begins it `anew`. Raises `OSError`."""
        self.close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if anew else 0)
        self._handle = os.open(self.path, flags, 0o666)

    def append(self, data: bytes) -> None:
        """Whole lines, all of them or nothing. Raises `OSError`."""
        size = self._size()
        if size and size + len(data) > self.max_bytes:
            self.path.replace(older(self.path))
            self.open()
        assert self._handle is not None
        append_whole(self._handle, data)

    def close(self) -> None:
        """Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _size(self) -> int:
        """Of the file that is open; 0 for what has no size, such as a pipe, and what is never set
        aside: a link leads where a person wants the lines. Opens it where that is needed."""
        if self._handle is None:
            self.open()
        assert self._handle is not None
        here = os.fstat(self._handle)
        if self.path.is_symlink():
            return 0
        try:
            if os.path.samestat(here, self.path.stat()):
                return here.st_size
        except OSError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.open()
        return os.fstat(self._handle).st_size


def text_of(data: bytes, where: object, error: type[UserError] = UserError) -> str:
    """What a person has written, without the byte order mark that some editors begin it with.
    Raises `error`, one line, for other encodings than UTF-8. `where`: the file, for people."""
    for mark, encoding in WIDE_MARKS.items():
        if data.startswith(mark):
            raise error(f"{where} is {encoding} text; save it as UTF-8 (iconv -t UTF-8)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error(f"{where} is not UTF-8 text") from None


def lines_of(text: str) -> list[str]:
    """Lines of a list that a person has written: without comments, which begin with a `#` at the
    beginning of a line or after a space, and without the spaces around what is left."""
    lines = (COMMENT.sub("", line).strip() for line in text.splitlines())
    return [line for line in lines if line]
