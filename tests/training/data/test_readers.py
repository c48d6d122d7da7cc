"""Every format gives the same documents, and what cannot be read is one clear line."""

from __future__ import annotations

import errno
import gzip
import io
import json
import logging
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from swarmnet.errors import DataError
from swarmnet.spec import SourceSpec
from swarmnet.training.data import readers
from swarmnet.training.data.readers import PIECE_BYTES, Reader, end_of_piece, pieces_of
from tests.training.data.making import (
    CHATML,
    documents_of,
    opened,
    tokenizer_folder,
    write_records,
)
from tests.training.specs import TEXT

DOCUMENTS = [f"document {n}: " + "x" * (n % 7) + " ünï\ncode" for n in range(60)]


def write_parquet(path: Path, documents: list[Any], name: str = "text") -> None:
    parquet.write_table(pyarrow.table({name: documents}), path, row_group_size=7)


def write_lines(path: Path, documents: list[Any], name: str = "text") -> None:
    lines = b"".join(json.dumps({name: d, "id": 1}).encode() + b"\n" for d in documents)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        half = len(lines) // 2  # two frames, as `cat a.zst b.zst` makes them
        path.write_bytes(zstandard.compress(lines[:half]) + zstandard.compress(lines[half:]))
    else:
        path.write_bytes(lines)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "d.parquet"])
@pytest.mark.parametrize("field", ["text", "body"])
def test_records_of_every_format(tmp_path: Path, name: str, field: str) -> None:
    write = write_parquet if name.endswith("parquet") else write_lines
    write(tmp_path / name, DOCUMENTS, field)
    data = opened(str(tmp_path / name), text_field=field, held_out_fraction=0.0)
    assert sorted(documents_of(data)) == sorted(d.encode() for d in DOCUMENTS)


def test_all_formats_of_a_folder_are_read_each_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "one.txt").write_text("of text, one")
    (folder / "two.md.gz").write_bytes(gzip.compress(b"of text, two"))
    (folder / "three.py.zst").write_bytes(zstandard.compress(b"of text, three"))
    write_lines(folder / "four.jsonl", ["of records, four"])
    write_parquet(folder / "five.parquet", ["of records, five"])
    (folder / "not.html").write_text("not this")
    (folder / "loop").symlink_to(folder)
    (folder / "link.txt").symlink_to(folder / "one.txt")
    (tmp_path / "other.txt").symlink_to(folder / "one.txt")
    paths = [str(folder), str(folder / "one.txt"), str(tmp_path / "other.txt"), str(folder)]
    data = opened(paths, held_out_fraction=0.0)
    assert len(documents_of(data)) == 5
    one = opened(str(folder), held_out_fraction=0.0)
    assert one.fingerprint == data.fingerprint


def test_order_and_fingerprint_are_of_the_content_alone(tmp_path: Path) -> None:
    for root, names in (("one", "abcdef"), ("two", "fedcba")):
        (tmp_path / root).mkdir()
        for name, text in zip(names, ("1", "2", "3", "4", "5", "6"), strict=True):
            (tmp_path / root / f"{name}.txt").write_text(text * 30)
    one, two = (opened(str(tmp_path / root)) for root in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    assert one.microbatch([3]) == two.microbatch([3])
    (tmp_path / "two" / "a.txt").write_bytes(b"6" * 29 + b"\r\n")
    assert opened(str(tmp_path / "two")).fingerprint != one.fingerprint


UTF16 = TEXT.encode("utf-16")
NUL_LATER = TEXT.encode() * 60 + b"\0" + TEXT.encode()
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20
COMPRESSED = zstandard.compress(random.Random(0).randbytes(5000)).replace(b"\0", b"\1")
FRAME = zstandard.compress(TEXT.encode() * 400)
CUT_FRAMES = [FRAME[:-5], FRAME + FRAME[:-5], FRAME + FRAME[:2]]
DAMAGED = "is damaged, or not compressed"


def damaged_parquet() -> bytes:
    """Whole at its ends, and not between."""
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), file, compression="zstd")
    content = bytearray(file.getvalue())
    content[4:40] = bytes(36)
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("wide.txt", UTF16, "is UTF-16 text; convert it"),
        ("wide.jsonl", UTF16, "is UTF-16 text; convert it"),
        ("nul.txt", NUL_LATER, "has a NUL byte"),
        ("image.txt", PNG, "NUL byte"),
        ("packed.txt", COMPRESSED, "is no "),
        ("bad.txt.gz", b"no gzip" * 9, DAMAGED),
        ("cut.txt.gz", gzip.compress(TEXT.encode(), mtime=0)[:-20], DAMAGED),
        ("bad.txt.zst", b"no zstd" * 9, DAMAGED),
        *(("cut.txt.zst", content, DAMAGED) for content in CUT_FRAMES),
        ("bad.parquet", b"PAR1" + b"x" * 99, "cannot be read as parquet"),
        ("damaged.parquet", damaged_parquet(), "cannot be read as parquet"),
        ("p.parquet.gz", gzip.compress(b"PAR1", mtime=0), "unpack the file"),
    ],
)
def test_what_is_no_text_is_refused_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes, wanted: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=wanted) as raised:
        opened(str(tmp_path / name))
    assert "\n" not in str(raised.value)
    (tmp_path / "good.txt").write_text(TEXT)
    with caplog.at_level(logging.WARNING, "swarmnet.data"):
        data = opened(str(tmp_path), held_out_fraction=0.0)
    lines = [r.message for r in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith(f"[data] 1 file left out: {name} (")
    assert documents_of(data) == [TEXT.encode()], "nothing of the other file stays"


def test_many_files_that_are_left_out_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.txt").write_text(TEXT)
    for n in range(9):
        (tmp_path / f"bad-{n}.txt").write_bytes(b"\0" + bytes([n]) * 9)
    with caplog.at_level(logging.WARNING, "swarmnet.data"):
        opened(str(tmp_path))
        opened(str(tmp_path))  # of the cache: the line comes too
    assert len(caplog.records) == 2
    assert caplog.records[0].message == caplog.records[1].message
    assert "9 files left out" in caplog.records[0].message


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"text": "a"', "line 3 is no JSON"),
        ("[1]", "line 3: no table of fields"),
        ('{"other": "a", "more": 1}', "line 3: no field 'text'; it has other, more"),
        ('{"text": 5}', "line 3: field 'text' is int, not a text"),
    ],
)
def test_a_wrong_record_is_left_out_and_named(
    tmp_path: Path, line: str, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = json.dumps({"text": TEXT})
    (tmp_path / "d.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    for path in (tmp_path / "d.jsonl", tmp_path):
        caplog.clear()
        data = opened(str(path), held_out_fraction=0.0)
        assert documents_of(data) == [TEXT.encode()] * 2
        assert sum(data.sources[0].about.left_out.values()) == 1
        (record,) = caplog.records
        assert record.message.startswith("[data] 1 of 3 records left out, for they cannot be used")
        assert wanted in record.message
        assert "\n" not in record.message


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b'{"text": "a\\ud800b"}', "line 2 has a lone surrogate ('\\ud800')"),
        (b'{"text": "a\xffb"}', "line 2 is no UTF-8: byte 0xff at 12"),
        (b'{"text": "a"', "line 2 is no JSON: Expecting ',' delimiter at character 14"),
        (b"[" * 99_999, "line 2 is nested too deep"),
        (b'{"text": NaN}', "line 2: field 'text' is float, not a text"),
    ],
)
def test_the_reason_is_the_real_one(tmp_path: Path, line: bytes, wanted: str) -> None:
    good = json.dumps({"text": TEXT}).encode()
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b"\n".join([good, line, good])))
    (said,) = opened(str(tmp_path)).sources[0].about.lines
    assert wanted in said


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "9" * 5000, r'"\ud800"'])
def test_what_nobody_reads_stops_nothing(tmp_path: Path, value: str) -> None:
    text = json.dumps(TEXT)
    path = tmp_path / "d.jsonl"
    path.write_text(f'{{"a": {value}, "text": {text}}}\n{{"text": {text}, "z": [{value}]}}\n')
    data = opened(str(path), held_out_fraction=0.0)
    assert documents_of(data) == [TEXT.encode()] * 2
    assert data.sources[0].about.left_out == {}
    tokenizer = tokenizer_folder(tmp_path / "t", CHATML)
    user, assistant = '"role": "user", "content": "hi"', '"role": "assistant", "content": "yo"'
    messages = f'[{{{user}}}, {{{assistant}, "x": {value}}}]'
    path.write_text(f'{{"score": {value}, "messages": {messages}}}\n')
    found = opened(
        str(path), 64, messages_field="messages", tokenizer=tokenizer, held_out_fraction=0.0
    )
    assert found.sources[0].about.num_documents == 1


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.zst", "d.parquet"])
def test_many_bad_records_are_an_error(tmp_path: Path, name: str) -> None:
    """Of a file, with the first one's reason: as where the field is another one."""
    write = write_parquet if name.endswith("parquet") else write_lines
    for number, is_refused in ((1, False), (6, False), (7, True)):
        texts: list[Any] = [TEXT] * 60
        bad = b"\xff" if name.endswith("parquet") else 5
        for n in range(number):
            texts[3 * n + 1] = bad
        if name.endswith("parquet"):
            coded = [t.encode() if isinstance(t, str) else t for t in texts]
            array = pyarrow.array(coded, pyarrow.binary())
            table = pyarrow.table({"text": array.cast(pyarrow.string(), safe=False)})
            parquet.write_table(table, tmp_path / name)
        else:
            write(tmp_path / name, texts)
        if is_refused:
            with pytest.raises(
                DataError, match=r"7 of 60 records cannot be used, the first: .*\b2\b"
            ):
                opened(str(tmp_path))
            return
        about = opened(str(tmp_path), held_out_fraction=0.0).sources[0].about
        assert about.num_documents == 60 - number
        assert sum(about.left_out.values()) == number
        assert f"{number} of 60 records left out" in about.lines[0]


def test_a_file_of_bad_records_is_known_before_its_end(tmp_path: Path) -> None:
    """Which records are kept depends on their own file, and not on what lies beside it."""
    write_lines(tmp_path / "a.jsonl", [5] * 3000)
    write_lines(tmp_path / "b.jsonl", [TEXT] * 90)
    with pytest.raises(DataError, match="1,000 of 1,000 records cannot be used"):
        opened(str(tmp_path))
    write_lines(tmp_path / "a.jsonl", [5])
    about = opened(str(tmp_path), held_out_fraction=0.0).sources[0].about
    assert (about.num_documents, about.left_out) == (90, {"no text": 1})
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(DataError, match=r"no text at all; 1 no text; .*1: field 'text' is int"):
        opened(str(tmp_path))


def test_a_text_with_bytes_of_another_encoding_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode() + "Größe".encode("latin-1"))
    (tmp_path / "b.txt").write_text(TEXT)
    data = opened(str(tmp_path), held_out_fraction=0.0)
    assert data.sources[0].about.left_out == {"with bytes that are no UTF-8": 1}
    assert data.sources[0].about.num_documents == 2


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
@pytest.mark.parametrize("field", ["text_field", "messages_field"])
def test_a_record_that_is_too_long_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 1 << 20)
    texts = ["short", "x" * (1 << 20) + "y", "short"]
    records = texts if field == "text_field" else [[{"role": "a", "content": t}] for t in texts]
    write = write_parquet if name.endswith("parquet") else write_lines
    write(tmp_path / name, records, "body")
    source = SourceSpec(paths=("x",), **{field: "body"})
    reader = Reader(source)
    assert len(list(reader.read(tmp_path / name))) == 2
    assert reader.bad.kinds == {"longer than 1 MiB": 1}
    assert re.search(r"(line|row) 2: longer than 1 MiB", reader.bad.lines[0])


class CountedBytes(bytes):
    """Knows how many bytes of it, and of its parts, have been copied."""

    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(part, int):
            return part
        CountedBytes.num_copied += len(part)
        return CountedBytes(part)


def test_a_long_record_is_copied_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedBytes, "num_copied", 0)
    text = CountedBytes(b"word " * (PIECE_BYTES * 6))
    pieces = list(pieces_of(text, "line 1"))
    assert len(pieces) > 25
    assert b"".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert CountedBytes.num_copied < 3 * len(text)


def test_a_null_field_is_left_out_and_counted(tmp_path: Path) -> None:
    path = write_records(tmp_path / "d.jsonl", [{"text": t} for t in (TEXT, None, "", "a\0b" * 9)])
    data = opened(path, held_out_fraction=0.0)
    assert data.sources[0].about.left_out == {"null": 1, "empty": 1}
    assert sorted(documents_of(data)) == [TEXT.encode(), b"ab" * 9]


def test_a_parquet_file_without_the_field_says_what_it_has(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d.parquet", DOCUMENTS, "content")
    with pytest.raises(DataError, match="no field 'text'; it has content"):
        opened(str(tmp_path / "d.parquet"))


@pytest.mark.parametrize(
    ("module", "name", "write"),
    [("pyarrow", "d.parquet", write_parquet), ("zstandard", "d.jsonl.zst", write_lines)],
)
def test_a_missing_reader_says_how_to_get_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: str,
    name: str,
    write: Callable[[Path, list[str]], None],
) -> None:
    write(tmp_path / name, [TEXT])
    with monkeypatch.context() as missing:
        for loaded in [m for m in sys.modules if m.split(".")[0] == module]:
            missing.delitem(sys.modules, loaded)
        missing.setitem(sys.modules, module, None)
        with pytest.raises(DataError, match=rf"pip install .*{module}"):
            opened(str(tmp_path / name))
        (tmp_path / "good.txt").write_text(TEXT)
        with caplog.at_level(logging.WARNING, "swarmnet.data"):
            opened(str(tmp_path))
        assert "1 file left out" in caplog.text
    caplog.clear()
    assert len(documents_of(opened(str(tmp_path), held_out_fraction=0.0))) == 2, "after the install"
    assert not caplog.records


def test_a_disk_that_fails_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "d.parquet", ["of records"])
    (tmp_path / "good.txt").write_text(TEXT)

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(parquet.ParquetFile, "iter_batches", fails)
        with pytest.raises(DataError, match=r"cannot read .*d\.parquet: Input/output error"):
            opened(str(tmp_path))
    assert len(documents_of(opened(str(tmp_path), held_out_fraction=0.0))) == 2


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x.txt", "dangling.txt"])
def test_paths_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"no such user|a link that leads nowhere"):
        opened(path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    (tmp_path / "b.txt").write_text(TEXT)
    a, b = (opened(str(tmp_path / f"{x}.txt")).fingerprint for x in "ab")
    assert a == b


@given(st.text(st.sampled_from("ab \n\tüß€\U0001f600"), min_size=1), st.integers(1, 40))
def test_pieces_of_text_are_cut_between_characters(text: str, size: int) -> None:
    data = text.encode()
    parts = []
    while len(data) > size + 4:
        end = end_of_piece(data[: size + 4])
        assert 0 < end <= size + 4
        parts.append(data[:end])
        data = data[end:]
    parts.append(data)
    assert "".join(part.decode() for part in parts) == text


@pytest.mark.parametrize("line_end", ["\n", ""])
def test_a_long_text_comes_in_pieces_and_whole(tmp_path: Path, line_end: str) -> None:
    text = f"word ünï {line_end}".encode() * (PIECE_BYTES // 2)
    (tmp_path / "a.txt").write_bytes(text)
    pieces = list(Reader(SourceSpec(paths=("x",))).read(tmp_path / "a.txt"))
    assert len(pieces) > 5
    assert all(len(piece.text) <= PIECE_BYTES for piece in pieces)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert b"".join(piece.text for piece in pieces) == text
    data = opened(str(tmp_path / "a.txt"), length=4096, held_out_fraction=0.0)
    assert documents_of(data) == [text]


def test_a_tokenizer_with_truncation_and_padding_is_used_without(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    name = tokenizer_folder(tmp_path / "t")
    (tmp_path / "a.txt").write_text(TEXT)
    expected = opened(str(tmp_path / "a.txt"), tokenizer=name).num_train_tokens
    tokenizer = Tokenizer.from_file(name)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=9)
    tokenizer.save(name)
    assert opened(str(tmp_path / "a.txt"), tokenizer=name).num_train_tokens == expected
