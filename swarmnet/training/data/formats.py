"""What a file holds, by its name: text, or records with fields; compressed or not."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from swarmnet.errors import DataError, one_line
from swarmnet.needs import install_command
from swarmnet.spec import DEFAULT_INCLUDE, SourceSpec

RECORD_INCLUDE = ("*.jsonl", "*.parquet", "*.jsonl.gz", "*.jsonl.zst")
INCLUDE = (*DEFAULT_INCLUDE, "*.jsonl", "*.parquet", "*.gz", "*.zst")
"""Names that the readers know, and of those the ones with fields."""
TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
PLAIN, GZIP, ZSTD = "", ".gz", ".zst"
MAX_ZSTD_WINDOW_BYTES = 1 << 27
"""What one frame may ask the reader to hold."""
ZSTD_READ_BYTES = 1 << 12
"""That are decompressed at once: four bytes may become 128 KiB, so these at most 128 MiB."""


def included(source: SourceSpec) -> tuple[str, ...]:
    """Globs on the names of files in folders."""
    if source.include != DEFAULT_INCLUDE:
        return source.include
    return RECORD_INCLUDE if source.messages_field else INCLUDE


class NotText(DataError):
    """A file that is no text: an error where it is named, left out of a folder."""


def format_of(path: Path) -> tuple[str, str]:
    """(format, compression)."""
    name = path.name.lower()
    compression = next((c for c in (GZIP, ZSTD) if name.endswith(c)), PLAIN)
    name = name.removesuffix(compression)
    if name.endswith((".jsonl", ".ndjson")):
        return JSONL, compression
    if name.endswith(".parquet"):
        return PARQUET, compression
    return TEXT, compression


def reader_of(path: Path) -> str:
    """Which module of the extra `data` reads a file, and whether it is here; empty where
    none is needed."""
    form, compression = format_of(path)
    module = "pyarrow" if form == PARQUET else "zstandard" if compression == ZSTD else ""
    return module if not module or _is_here(module) else f"no {module}"


class ZstdFrames(io.RawIOBase):
    """What the frames of a zstd file hold, one after the other. The readers of `zstandard` take a
    file that ends within a frame for whole."""

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        """`decompressor`: a `ZstdDecompressor`."""
        self._raw = raw
        self._decompressor = decompressor
        self._frame: Any = None
        self._coded = b""
        """Read, and not decompressed."""
        self._held = memoryview(b"")
        """Decompressed, and not given out."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Raises `EOFError` where the file ends within a frame."""
        while not self._held and self._decompress():
            pass
        part = self._held[: len(buffer)]
        buffer[: len(part)] = part
        self._held = self._held[len(part) :]
        return len(part)

    def _decompress(self) -> bool:
        """False at the end of the file."""
        coded = self._coded or self._raw.read(ZSTD_READ_BYTES)
        if not coded:
            if self._frame is not None:
                raise EOFError("it ends within a frame")
            return False
        frame = self._frame or self._decompressor.decompressobj()
        self._held = memoryview(frame.decompress(coded))
        self._coded = frame.unused_data if frame.eof else b""
        self._frame = None if frame.eof else frame
        return True


@contextmanager
def opened(path: Path, compression: str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed as they are read. Raises `DataError`."""
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        with path.open("rb") as raw:
            if compression == PLAIN:
                yield raw
            elif compression == GZIP:
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield cast(BinaryIO, stream)
            else:
                zstandard = needed("zstandard", path)
                damage = (*damage, zstandard.ZstdError)
                reader = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
                with ZstdFrames(raw, reader) as frames:
                    yield cast(BinaryIO, frames)
    except damage as error:
        raise NotText(
            f"[data] {path} is damaged, or not compressed as its name says: {error}"
        ) from None
    except OSError as error:
        raise cannot_read(path, error) from None


def needed(module: str, path: Path) -> Any:
    """A module of the extra `data`. Raises `NotText` where it is missing, `DataError`
    where it is broken."""
    if not _is_here(module):
        raise NotText(f"[data] {path} needs {module}; bring it with: {install_command(module)}")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        line = one_line(error)
        raise DataError(
            f"[data] {path} needs {module}, which cannot be imported: {line}; install it anew: "
            + install_command(module, options="--force-reinstall")
        ) from None


def cannot_read(path: Path, error: OSError) -> DataError:
    """The line for a failure of the disk."""
    return DataError(f"[data] cannot read {path}: {error.strerror or error}")


def _is_here(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None
