"""Documents out of files, in pieces, so that memory does not grow with a file's size."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from swarmnet.errors import DataError
from swarmnet.spec import SourceSpec
from swarmnet.training.data.formats import (
    JSONL,
    PARQUET,
    PLAIN,
    NotText,
    cannot_read,
    format_of,
    needed,
    opened,
)

PIECE_BYTES = 1 << 18
"""Of text that is handed on at once."""
HEAD_BYTES = 1 << 16
"""By which text is told from other things."""
MAX_RECORD_BYTES = 1 << 28
PARQUET_ROWS = 128
"""That are read at once."""
WIDE_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
UTF8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TEXT_BYTES = bytes([7, 8, 9, 10, 11, 12, 13, 27, *range(32, 256)])
MOST_STRANGE = 0.1
"""Part of a text that may be control characters, or no UTF-8."""
SHOWN_FIELDS = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Of a document: text as UTF-8, or a dialogue."""

    text: bytes = b""
    messages: list[dict[str, Any]] | None = None
    ends: bool = True
    """The document's last piece."""
    where: str = ""
    """The record, for people."""


@dataclass
class Reader:
    """Reads the files of one source."""

    source: SourceSpec
    left_out: Counter[str] = field(default_factory=Counter)
    """Records that give no document, by reason."""
    on_bytes: Callable[[int], None] = lambda num_bytes: None
    """Hears how many bytes of text have been read."""

    def read(self, path: Path) -> Iterator[Piece]:
        """The documents of a file.

        Raises:
            NotText: it is no text, or not of the format that its name says.
            DataError: it cannot be read, or a record is broken or without the field.
        """
        form, compression = format_of(path)
        if form == PARQUET:
            if compression != PLAIN:
                raise NotText(f"[data] {path}: parquet is compressed inside; unpack the file")
            yield from self._records(path, _parquet_rows(path, self._field))
            return
        if form != JSONL and self.source.messages_field:
            raise NotText(f"[data] {path} has no messages; give .jsonl or .parquet files")
        with opened(path, compression) as raw:
            stream: Any = io.BufferedReader(raw, PIECE_BYTES)
            if form == JSONL:
                check_text(stream.peek(HEAD_BYTES)[:HEAD_BYTES], path)
                yield from self._records(path, _json_lines(path, stream))
            else:
                yield from self._text(path, stream)
            stream.detach()

    @property
    def _field(self) -> str:
        return self.source.messages_field or self.source.text_field

    def _text(self, path: Path, stream: io.BufferedReader) -> Iterator[Piece]:
        rest, is_first = b"", True
        while data := stream.read(PIECE_BYTES - len(rest)):
            self.on_bytes(len(data))
            if is_first:
                check_text(data[:HEAD_BYTES], path)
                data, is_first = data.removeprefix(UTF8_BYTE_ORDER_MARK), False
            if 0 in data:
                raise NotText(f"[data] {path} has a NUL byte; it is no text")
            data = rest + data
            end = end_of_piece(data) if len(data) >= PIECE_BYTES // 2 else 0
            if end:
                yield Piece(data[:end], ends=False)
            rest = data[end:]
        yield Piece(rest)

    def _records(self, path: Path, records: Iterator[tuple[str, Any]]) -> Iterator[Piece]:
        for where, record in records:
            if not isinstance(record, dict):
                raise DataError(f"[data] {path}, {where}: no table of fields")
            if self._field not in record:
                names = ", ".join(list(map(str, record))[:SHOWN_FIELDS])
                raise DataError(
                    f"[data] {path}, {where}: no field {self._field!r}; it has {names[:200]}"
                )
            value, place = record[self._field], f"{path}, {where}"
            if value is None:
                self.left_out["null"] += 1
            elif self.source.messages_field:
                messages = _checked_messages(value, place)
                length = sum(len(str(m.get("content"))) for m in messages)
                _check_length(length, place)
                yield Piece(messages=messages, where=place)
                self.on_bytes(length)
            elif isinstance(value, str):
                text = value.replace("\0", "").encode(errors="replace")
                _check_length(len(text), place)
                self.on_bytes(len(text))
                yield from pieces_of(text, place)
            else:
                kind = type(value).__name__
                raise DataError(f"[data] {place}: field {self._field!r} is {kind}, not a text")


def pieces_of(text: bytes, where: str) -> Iterator[Piece]:
    """A document, in pieces. `where`: the record, for people."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        end = start + end_of_piece(text[start : start + PIECE_BYTES])
        yield Piece(text[start:end], ends=False, where=where)
        start = end
    yield Piece(text[start:], where=where)


def check_text(head: bytes, path: Path) -> None:
    """Raises `NotText` unless this may be the beginning of a UTF-8 text."""
    if head.startswith(WIDE_BYTE_ORDER_MARKS):
        raise NotText(f"[data] {path} is UTF-16 text; convert it to UTF-8 (iconv -t UTF-8)")
    if 0 in head:
        raise NotText(f"[data] {path} has a NUL byte; it is no text")
    most = MOST_STRANGE * len(head)
    if len(head.translate(None, TEXT_BYTES)) > most:
        raise NotText(f"[data] {path} is no text")
    if head.decode(errors="replace").count("\ufffd") > most:
        raise NotText(f"[data] {path} is no UTF-8 text")


def end_of_piece(text: bytes) -> int:
    """Where UTF-8 text is cut, at its end if nowhere else: before a line that does not begin with
    a space, else before a word, else between two characters."""
    middle = len(text) // 2
    at = len(text)
    while (at := text.rfind(b"\n", middle, at - 1)) > 0:
        if text[at + 1 : at + 2].strip():
            return at + 1
    space = text.rfind(b" ", middle)
    if space > 0:
        return space
    end = len(text)
    while end > middle and text[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if end > middle and text[end - 1] >= 0xC0 else len(text)


def _check_length(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_RECORD_BYTES:
        raise DataError(f"[data] {where}: longer than {MAX_RECORD_BYTES >> 20} MiB")


def _json_lines(path: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    decoder = msgspec.json.Decoder()
    number = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        where = f"line {number}"
        _check_length(len(line), f"{path}, {where}")
        if number == 1:
            line = line.removeprefix(UTF8_BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            yield where, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"[data] {path}, {where} is no JSON: {str(error)[:200]}") from None


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    parquet = needed("pyarrow.parquet", path)
    arrow = needed("pyarrow", path)
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if name not in names:
                names = ", ".join(names[:SHOWN_FIELDS])
                raise DataError(f"[data] {path}: no field {name!r}; it has {names[:200]}")
            row = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=[name], use_threads=False):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield f"row {row}", {name: value}
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the file
            raise cannot_read(path, error) from None
        text = " ".join(str(error).split())[:200]
        raise NotText(f"[data] {path} cannot be read as parquet: {text}") from None


def _checked_messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise DataError(f"[data] {where}: the messages are no list")
    for message in value:
        is_one = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not is_one or not isinstance(message.get("content"), str | None):
            raise DataError(f"[data] {where}: a message needs role and content, both text")
    return [{key: _clean(v) for key, v in message.items() if v is not None} for message in value]


def _clean(value: Any) -> Any:
    return value.replace("\0", "") if isinstance(value, str) else value
