"""Tokens are made once for the same content, wherever it lies, and damage is noticed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnet.errors import DataError
from swarmnet.spec import SourceSpec
from swarmnet.training.data import cache, tokenizing
from swarmnet.training.data.cache import UNUSED_DAYS, cache_root
from swarmnet.training.data.encoding import ByteEncoder
from swarmnet.training.data.files import find_files
from swarmnet.training.data.store import ABOUT, TOKENS, StoreWriter
from swarmnet.training.data.tokenizing import Tokenizing
from tests.training.data.making import CHATML, opened, tokenizer_folder, write_records
from tests.training.specs import TEXT


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARMNET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that a source is tokenized."""
    found: list[int] = []
    run = Tokenizing.run

    def counted(self: Tokenizing, files: Any) -> None:
        found.append(len(files))
        run(self, files)

    monkeypatch.setattr(Tokenizing, "run", counted)
    return found


def test_the_same_content_is_tokenized_once(tmp_path: Path, made: list[int]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(TEXT)
    a, b = (opened(str(tmp_path / f"{name}.txt")) for name in "ab")
    assert made == [1]
    assert a.fingerprint == b.fingerprint
    assert isinstance(b.sources[0].samples.sample(0).inputs, np.ndarray)
    opened(str(tmp_path / "a.txt"), held_out_fraction=0.3, length=32)
    assert made == [1], "neither depends on how samples are cut"
    (tmp_path / "a.txt").write_text(TEXT + "x")
    opened(str(tmp_path / "a.txt"))
    assert made == [1, 1]


def test_an_entry_is_of_tokenizer_field_and_template(tmp_path: Path, made: list[int]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"text": TEXT, "other": TEXT, "m": messages}]
    path = write_records(tmp_path / "d.jsonl", records)
    one, two, three = (tokenizer_folder(tmp_path / f"t{k}", CHATML) for k in range(3))
    text = Path(two).read_text()
    Path(two).write_text(text.replace("<|im_start|>", "<|im_begin|>"))
    config = Path(three).with_name("tokenizer_config.json")
    config.write_text(config.read_text().replace("<|im_end|>", "<|endoftext|>", 1))
    changes: list[dict[str, Any]] = [
        {},
        {"text_field": "other"},
        {"tokenizer": one},
        {"tokenizer": two},
        {"tokenizer": one, "messages_field": "m", "length": 64},
        {"tokenizer": one, "messages_field": "m", "length": 65},
        {"tokenizer": three, "messages_field": "m", "length": 64},
    ]
    for change in changes * 2:
        opened(path, **{"held_out_fraction": 0.0, **change})
    assert len(made) == len(changes)


@pytest.mark.parametrize("damage", ["cut", "gone", "about"])
def test_a_damaged_entry_is_made_again(
    tmp_path: Path, root: Path, made: list[int], damage: str
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    before = opened(str(tmp_path / "a.txt")).fingerprint
    (tokens,) = root.glob(f"*/{TOKENS}")
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif damage == "gone":
        tokens.unlink()
    else:
        tokens.with_name(ABOUT).write_text('{"dtype": 5')
    assert opened(str(tmp_path / "a.txt")).fingerprint == before
    assert len(made) == 2


def _open(path: str, folder: str, out: Any) -> None:
    os.environ["SWARMNET_CACHE"] = folder
    before = StoreWriter.finish

    def slow(self: StoreWriter, *args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        out.put("made")
        return before(self, *args, **options)

    StoreWriter.finish = slow  # type: ignore[method-assign]
    out.put(opened(path).fingerprint)


def test_processes_wait_for_one_another(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    context = multiprocessing.get_context("spawn")
    out: Any = context.Queue()
    arguments = (str(tmp_path / "a.txt"), str(tmp_path / "cache"), out)
    processes = [context.Process(target=_open, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [out.get(timeout=120) for _ in range(3)]
    for process in processes:
        process.join(60)
    assert found.count("made") == 1
    assert len(set(found)) == 2


def test_what_fails_leaves_nothing(tmp_path: Path, root: Path) -> None:
    path = write_records(tmp_path / "d.jsonl", [{"text": TEXT}, {"other": 1}, {"other": 2}])
    with pytest.raises(DataError):
        opened(path)
    assert [p.name for p in root.iterdir() if p.suffix != ".lock"] == []


def test_entries_that_nobody_used_go(tmp_path: Path, root: Path, made: list[int]) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(TEXT + name)
    opened(str(tmp_path / "a.txt"))
    opened(str(tmp_path / "b.txt"))
    old = time.time() - (UNUSED_DAYS + 1) * 86_400
    for about in root.glob(f"*/{ABOUT}"):
        os.utime(about, (old, old))
    opened(str(tmp_path / "a.txt"))  # used again
    opened(str(tmp_path / "c.txt"))
    assert len(list(root.glob(f"*/{ABOUT}"))) == 2
    opened(str(tmp_path / "a.txt"))
    assert len(made) == 3


def test_what_another_process_is_at_work_on_stays(tmp_path: Path, root: Path) -> None:
    """It may go under its hands at any moment: nobody else looks at it."""
    at_work = root / ".key.abc"
    at_work.mkdir(parents=True)
    (at_work / ABOUT).write_text("{}")
    old = time.time() - (UNUSED_DAYS + 1) * 86_400
    os.utime(at_work / ABOUT, (old, old))
    (tmp_path / "a.txt").write_text(TEXT)
    opened(str(tmp_path / "a.txt"))
    assert (at_work / ABOUT).is_file()


def test_large_files_are_hashed_once(
    tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "REMEMBERED_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    os.utime(path, (1e9, 1e9))
    before = opened(str(path)).fingerprint
    (remembered,) = (cache_root() / "data" / "hashes").iterdir()
    content = remembered.read_text()
    remembered.write_text("0" * 32)
    opened(str(path))
    assert len(made) == 2, "the remembered hash is used"
    remembered.write_text(content)
    path.write_text(TEXT + "!")
    assert opened(str(path)).fingerprint != before, "another time, another size"


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setenv("SWARMNET_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, "swarmnet.data"):
        assert opened(str(tmp_path / "a.txt")).num_samples
    assert "tokens are kept in" in caplog.text


def test_long_tokenizing_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokenizing, "TELL_EVERY_S", 0.0)
    (tmp_path / "a.txt").write_text(TEXT)
    writer = StoreWriter(tmp_path, np.dtype(np.uint8), 0, False)
    source = SourceSpec(name="notes", paths=(str(tmp_path / "a.txt"),))
    with caplog.at_level(logging.WARNING, "swarmnet.data"):
        Tokenizing(source, ByteEncoder(), writer).run(find_files(source.paths, ()))
    writer.close()
    assert "tokenizing notes: file 1 of 1, 0 MB of text" in caplog.text


def test_what_an_ended_process_had_begun_is_removed(
    tmp_path: Path, root: Path, made: list[int]
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    opened(str(tmp_path / "a.txt"))
    (entry,) = (about.parent for about in root.glob(f"*/{ABOUT}"))
    left, old, young = (root / f".{key}.x1" for key in (entry.name, "1" * 32, "2" * 32))
    for folder in (left, old, young):
        folder.mkdir()
        (folder / TOKENS).write_text("half")
    long_ago = time.time() - (UNUSED_DAYS + 1) * 86_400
    os.utime(old, (long_ago, long_ago))
    (entry / ABOUT).unlink()
    opened(str(tmp_path / "a.txt"))
    assert made == [1, 1]
    assert sorted(p for p in root.iterdir() if p.is_dir()) == sorted([young, entry])
