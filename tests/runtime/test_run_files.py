"""The files of a run, served in parts: each version on the disk is hashed once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from swarmnet.runtime.run_files import RunFiles
from swarmnet.spec import FileSpec

DATA = bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    made = RunFiles(tmp_path, {"tokenizer.json": FileSpec(sha256=SHA256, size=len(DATA))})
    made.save({"tokenizer.json": DATA})
    return made


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each file that was hashed as a whole."""
    found: list[int] = []
    digest = hashlib.file_digest

    def counting(file: object, name: str) -> object:
        found.append(1)
        return digest(file, name)  # type: ignore[call-overload]

    monkeypatch.setattr(hashlib, "file_digest", counting)
    return found


def test_parts_make_up_the_file_and_it_is_hashed_once(files: RunFiles, hashed: list[int]) -> None:
    parts = [files.read_part(SHA256, n, 1000) for n in range(0, len(DATA), 1000)]
    assert b"".join(p or b"" for p in parts) == DATA == files.read(SHA256)
    assert files.read_part(SHA256, len(DATA), 1000) == b""
    assert files.read_part(SHA256, 2**62, 1000) == b""
    assert len(hashed) == 1


def test_a_file_that_is_damaged_later_is_not_served(
    files: RunFiles, hashed: list[int], tmp_path: Path
) -> None:
    assert files.read_part(SHA256, 0, 10) == DATA[:10]
    path = tmp_path / "files" / SHA256
    path.write_bytes(DATA[:-1] + b"x")
    os.utime(path, ns=(1, 1))
    for _ in range(3):
        assert files.read_part(SHA256, 0, 10) is None
    assert len(hashed) == 2, "that it is damaged is remembered too"
    files.save({"tokenizer.json": DATA})
    assert files.read_part(SHA256, 5, 10) == DATA[5:15]


def test_what_is_no_file_of_the_run_is_not_looked_for(files: RunFiles, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    assert files.read_part("../secret", 0, 10) is None
    os.unlink(tmp_path / "files" / SHA256)
    assert files.read_part(SHA256, 0, 10) is None
