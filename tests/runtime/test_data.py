"""A peer feeds what the run trains on, or says in one line why it does not feed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import DataError, UserError
from swarmnet.runtime.machine import open_data_of, open_shared
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.run_files import RunFiles
from swarmnet.spec import RunSpec
from swarmnet.swarm.initial.data import SharedData
from swarmnet.training.data import Place
from swarmnet.training.resolving import Resolved, resolve_run
from tests.training.data.making import CHATML, tokenizer_folder, write_records
from tests.training.specs import TEXT, small_spec, write_text


def joiner(folder: Path, **options: Any) -> PeerOptions:
    return PeerOptions(state_dir=folder, join=("x",), **options)


def run_on(text: str, **changes: Any) -> Resolved:
    return resolve_run(small_spec(text, **changes), "", Place())


def files_in(folder: Path, resolved: Resolved) -> RunFiles:
    files = RunFiles(folder, resolved.spec.files)
    files.save(resolved.contents)
    return files


def opened(spec: RunSpec, options: PeerOptions, files: RunFiles) -> Any:
    return open_data_of(spec, options, files)


def test_a_joiner_with_the_same_data_feeds(tmp_path: Path) -> None:
    resolved = run_on(write_text(tmp_path))
    (tmp_path / "mine.md").write_text(TEXT)
    options = joiner(tmp_path, data=(str(tmp_path / "mine.md"),))
    data = opened(resolved.spec, options, files_in(tmp_path, resolved))
    assert data.fingerprint == resolved.spec.data.fingerprint


def test_a_joiner_with_other_data_is_told_and_does_not_feed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = run_on(write_text(tmp_path))
    (tmp_path / "mine.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    options = joiner(tmp_path, data=(str(tmp_path / "mine.txt"),))
    with caplog.at_level(logging.WARNING, "swarmnet.peer"):
        assert opened(resolved.spec, options, files_in(tmp_path, resolved)) is None
    (record,) = caplog.records
    assert record.message.startswith("this machine's data are not the run's")
    assert "it serves but does not feed" in record.message


def test_a_joiner_without_data_knows_rounds_and_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = run_on(write_text(tmp_path)).spec
    received = RunSpec.from_canonical(spec.canonical())
    assert received.data.fingerprint == spec.data.fingerprint != ""
    with caplog.at_level(logging.WARNING, "swarmnet.peer"):
        assert opened(received, joiner(tmp_path), RunFiles(tmp_path, {})) is None
    assert "this machine's data was not named" in caplog.text


def test_template_and_tokenizer_come_with_the_run(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_records(tmp_path / "d.jsonl", [{"m": messages}] * 5)
    name = tokenizer_folder(tmp_path / "t", CHATML)
    data = {"tokenizer": name, "messages_field": "m", "held_out_fraction": 0.0}
    model = {"vocab_size": 400, "max_position_embeddings": 64}
    resolved = run_on(path, data=data, model=model)
    files = files_in(tmp_path, resolved)
    for file in (tmp_path / "t").iterdir():
        file.unlink()
    found = opened(resolved.spec, joiner(tmp_path, data=(path,)), files)
    assert found.fingerprint == resolved.spec.data.fingerprint


def test_a_joiner_reads_no_held_out_files_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text(TEXT)
    text = write_text(tmp_path)
    resolved = run_on(text, data={"held_out_paths": str(tmp_path / "secret.txt")})
    files = files_in(tmp_path, resolved)
    found = opened(resolved.spec, joiner(tmp_path, data=(text,)), files)
    assert found.num_held_out == 0
    named = (text, f"held-out={tmp_path / 'secret.txt'}")
    assert opened(resolved.spec, joiner(tmp_path, data=named), files).num_held_out == 2


@pytest.mark.parametrize("several", [False, True])
def test_a_joiner_with_other_held_out_files_feeds_and_measures_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, several: bool
) -> None:
    text = write_text(tmp_path)
    (tmp_path / "right.txt").write_text(TEXT)
    (tmp_path / "noise.txt").write_text(TEXT[::-1])
    data: dict[str, Any] = {"held_out_paths": str(tmp_path / "right.txt")}
    if several:
        data |= {"paths": (), "source": [{"name": name, "paths": text} for name in "ab"]}
    resolved = run_on(text, data=data)
    files = files_in(tmp_path, resolved)
    paths = (f"a={text}", f"b={text}") if several else (text,)
    with caplog.at_level(logging.WARNING, "swarmnet.peer"):
        named = joiner(tmp_path, data=(*paths, f"held-out={tmp_path}/right.txt"))
        assert opened(resolved.spec, named, files).num_held_out == 2
        assert not caplog.records
        named = joiner(tmp_path, data=(*paths, f"held-out={tmp_path}/noise.txt"))
        found = opened(resolved.spec, named, files)
    assert found.num_held_out == 0
    assert found.fingerprint == resolved.spec.data.fingerprint
    assert len(found.sizes()) == len(paths), "it can give on what is trained on"
    (record,) = caplog.records
    assert "held-out data are not the run's" in record.message
    assert "it feeds, and measures nothing" in record.message


def test_data_that_a_person_named_must_be_there(tmp_path: Path) -> None:
    resolved = run_on(write_text(tmp_path))
    with pytest.raises(DataError, match="no such file"):
        opened(resolved.spec, joiner(tmp_path, data=("/not/here",)), RunFiles(tmp_path, {}))


def shared(spec: RunSpec, options: PeerOptions, files: RunFiles) -> SharedData | None:
    return open_shared(spec, options, files, opened(spec, options, files))


def test_data_are_given_only_where_the_owner_says_so(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    resolved = run_on(text)
    files = files_in(tmp_path, resolved)
    assert shared(resolved.spec, joiner(tmp_path, data=(text,)), files) is None
    found = shared(resolved.spec, joiner(tmp_path, data=(text,), serve_data=True), files)
    assert found is not None
    assert found.given is not None
    assert found.coming is None
    with pytest.raises(UserError, match="--serve-data: this machine has not the run's data"):
        shared(resolved.spec, joiner(tmp_path, serve_data=True), files)
    with pytest.raises(UserError, match="leave out --no-feed"):
        shared(resolved.spec, joiner(tmp_path, serve_data=True, feed=False), files)


def test_a_joiner_without_data_may_fetch_them(tmp_path: Path) -> None:
    resolved = run_on(write_text(tmp_path))
    files = files_in(tmp_path, resolved)
    for fetch, at_once in ((None, False), (True, True)):
        found = shared(resolved.spec, joiner(tmp_path, fetch_data=fetch), files)
        assert found is not None
        assert found.coming is not None
        assert (found.given, found.at_once) == (None, at_once)
    assert shared(resolved.spec, joiner(tmp_path, fetch_data=False), files) is None
    assert shared(resolved.spec, joiner(tmp_path, feed=False), files) is None


@pytest.mark.parametrize("option", ["serve_data", "fetch_data"])
def test_data_without_a_fingerprint_are_not_given(tmp_path: Path, option: str) -> None:
    spec = small_spec(write_text(tmp_path))
    assert open_shared(spec, joiner(tmp_path), RunFiles(tmp_path, {}), None) is None
    asked = joiner(tmp_path, **{option: True})
    with pytest.raises(UserError, match="leave it out; this run's data have no fingerprint"):
        open_shared(spec, asked, RunFiles(tmp_path, {}), None)
