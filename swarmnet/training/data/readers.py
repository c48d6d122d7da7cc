"""Documents out of files, in pieces, so that memory does not grow with a file's size."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from swarmnet.errors import DataError, one_line
from swarmnet.spec import SourceSpec
from swarmnet.training.data.bad_records import BadRecord, BadRecords, utf8_of
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
MAX_DIGITS = 19
"""Of a whole number in a record that is kept as such; a longer one becomes a float."""


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
    """Records without a document, by reason, and texts with a fault."""
    bad: BadRecords = field(default_factory=BadRecords)
    on_bytes: Callable[[int], None] = lambda num_bytes: None
    """Hears how many bytes of text have been read."""

    def read(self, path: Path) -> Iterator[Piece]:
        """The documents of a file.

        Raises:
            NotText: it is no text, or not of the format that its name says.
            DataError: it cannot be read, or many of its records cannot be used.
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
        rest, is_first, is_utf8 = b"", True, True
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
                is_utf8 = is_utf8 and _is_utf8(data[:end])
                yield Piece(data[:end], ends=False)
            rest = data[end:]
        if not (is_utf8 and _is_utf8(rest)):
            self.left_out["with bytes that are no UTF-8"] += 1
        yield Piece(rest)

    def _records(self, path: Path, records: Iterator[tuple[str, Any]]) -> Iterator[Piece]:
        self.bad.begin(path)
        for where, record in records:
            self.bad.count()
            try:
                yield from self._record(record, f"{path}, {where}")
            except BadRecord as error:
                self.bad.add(error)
        self.bad.end()

    def _record(self, record: Any, where: str) -> Iterator[Piece]:
        """Raises `BadRecord`."""
        if isinstance(record, BadRecord):
            raise record
        if not isinstance(record, dict):
            raise BadRecord(where, ": no table of fields", "no table of fields")
        if self._field not in record:
            names = ", ".join(list(map(str, record))[:SHOWN_FIELDS])
            reason = f": no field {self._field!r}; it has {names[:200]}"
            raise BadRecord(where, reason, "without the field")
        value = record[self._field]
        if value is None:
            self.left_out["null"] += 1
        elif self.source.messages_field:
            messages = _checked_messages(value, where)
            if not messages:
                self.left_out["empty"] += 1
                return
            length = sum(len(str(m.get("content"))) for m in messages)
            _check_length(length, where)
            yield Piece(messages=messages, where=where)
            self.on_bytes(length)
        elif isinstance(value, str):
            text = utf8_of(value.replace("\0", ""), where)
            _check_length(len(text), where)
            self.on_bytes(len(text))
            yield from pieces_of(text, where)
        else:
            reason = f": field {self._field!r} is {type(value).__name__}, not a text"
            raise BadRecord(where, reason, "no text")


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
        most = f"longer than {MAX_RECORD_BYTES >> 20} MiB"
        raise BadRecord(where, f": {most}", most)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _json_lines(path: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Values by line; a `BadRecord` in place of what is none."""
    decoder = msgspec.json.Decoder()
    number = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        where = f"line {number}"
        try:
            if len(line) > MAX_RECORD_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(PIECE_BYTES)
                _check_length(MAX_RECORD_BYTES + 1, f"{path}, {where}")
            line = line.removeprefix(UTF8_BYTE_ORDER_MARK)
            if line.strip():
                yield where, _json_value(decoder, line, f"{path}, {where}")
        except BadRecord as error:
            yield where, error


def _json_value(decoder: msgspec.json.Decoder[Any], line: bytes, where: str) -> Any:
    """What msgspec does not take, `json` may: NaN, numbers out of range, halves of characters. They
    are often in fields that nobody reads. Raises `BadRecord`."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(line.decode(), parse_int=_whole)
    except UnicodeDecodeError as error:
        reason = f" is no UTF-8: byte {line[error.start]:#04x} at {error.start + 1}"
        raise BadRecord(where, reason, "no UTF-8") from None
    except json.JSONDecodeError as error:
        reason = f" is no JSON: {error.msg} at character {error.pos + 1}"
        raise BadRecord(where, reason, "no JSON") from None
    except RecursionError:
        raise BadRecord(where, " is nested too deep", "nested too deep") from None


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    """Values by row; a `BadRecord` in place of what is none."""
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
                for cell in batch.column(0):
                    row += 1
                    where = f"row {row}"
                    value: Any
                    try:
                        value = {name: cell.as_py()}
                    except (ValueError, OverflowError) as error:
                        value = _bad_cell(error, f"{path}, {where}")
                    yield where, value
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the file
            raise cannot_read(path, error) from None
        text = one_line(error)
        raise NotText(f"[data] {path} cannot be read as parquet: {text}") from None


def _bad_cell(error: Exception, where: str) -> BadRecord:
    if isinstance(error, UnicodeDecodeError):
        return BadRecord(where, " is no UTF-8", "no UTF-8")
    text = one_line(error)
    return BadRecord(where, f" cannot be read: {text}", "no text")


def _checked_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Raises `BadRecord`."""
    kind = "no dialogue"
    if not isinstance(value, list):
        raise BadRecord(where, ": the messages are no list", kind)
    for message in value:
        is_one = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not is_one or not isinstance(message.get("content"), str | None):
            raise BadRecord(where, ": a message needs role and content, both text", kind)
    return [{key: _clean(v) for key, v in message.items() if v is not None} for message in value]


def _clean(value: Any) -> Any:
    return value.replace("\0", "") if isinstance(value, str) else value
