"""The tokens of a run's data, taken from peers that need not be honest."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnet.errors import DataError, ProtocolViolation
from swarmnet.ports import SourceSize, WantedPart
from swarmnet.spec import RunSpec
from swarmnet.training.data import Place, TextData, coming, open_data
from swarmnet.training.data.coming import ComingText
from swarmnet.training.data.encoding import tokenizer_files
from swarmnet.training.data.resolving import with_data
from tests.training.data.making import CHATML, tokenizer_folder, write_records
from tests.training.specs import TEXT, small_spec, write_text

PART = 1000


@pytest.fixture
def other_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the peer which fetches."""
    return use_disk(tmp_path / "other", monkeypatch)


def use_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARMNET_CACHE", str(root))
    return root


def text_run(folder: Path, **data: Any) -> tuple[RunSpec, TextData]:
    """A run, and the data of the peer that began it."""
    spec = with_data(small_spec(write_text(folder), data=data), Place())
    return spec, opened(spec)


def opened(spec: RunSpec) -> TextData:
    data = open_data(spec)
    assert isinstance(data, TextData)
    return data


def lines_run(folder: Path) -> tuple[RunSpec, TextData]:
    """Many documents, in two sources."""
    lines = TEXT.splitlines()
    one = write_records(folder / "one.jsonl", [{"text": line} for line in lines])
    two = write_records(folder / "two.jsonl", [{"text": line[::-1]} for line in lines])
    values = small_spec().model_dump()
    del values["data"]["paths"]
    values["data"]["source"] = [
        {"name": "one", "paths": [one], "weight": 2.0},
        {"name": "two", "paths": [two], "weight": 1.0},
    ]
    spec = with_data(RunSpec.model_validate(values), Place())
    return spec, opened(spec)


def fetch(into: ComingText, data: TextData, giver: str = "a", most: int = 10**9) -> bool:
    """Up to `most` parts. Whether all is here."""
    assert into.begin(data.sizes(), unasked=True)
    for _ in range(most):
        part = into.wanted(giver)
        if part is None:
            return True
        into.take(giver, part, given(data, part))
    return False


def given(data: TextData, part: WantedPart) -> bytes:
    found = data.part(part.source, part.file, part.offset, part.length)
    assert found is not None
    return found


def other_byte(data: bytes, at: int = -1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def lie(into: ComingText, data: TextData) -> str:
    """One part of other data; returns what is said of it."""
    part = into.wanted("liar")
    assert part is not None
    try:
        into.take("liar", part, other_byte(given(data, part), 0))
    except ProtocolViolation as error:
        return str(error)
    return ""


def assert_same(a: TextData, b: TextData) -> None:
    assert a.fingerprint == b.fingerprint
    abouts = [  # what is left out is told to people, by whoever has the files
        [replace(s.about, left_out={}, lines=(), lengths=()) for s in data.sources]
        for data in (a, b)
    ]
    assert abouts[0] == abouts[1]
    assert (a.num_samples, a.num_held_out) == (b.num_samples, b.num_held_out)
    for index in (0, 3, 20):
        one, two = a.microbatch([index]), b.microbatch([index])
        assert one.arrays == two.arrays
    if a.num_held_out:
        assert a.held_out(0).arrays == b.held_out(0).arrays


@pytest.mark.parametrize("make", [text_run, lines_run])
def test_they_are_the_same_and_found_at_the_next_start(
    tmp_path: Path, other_disk: Path, make: Callable[[Path], tuple[RunSpec, TextData]]
) -> None:
    spec, data = make(tmp_path)
    into = ComingText(spec, Place(), PART)
    assert into.open_if_whole() is None
    assert fetch(into, data)
    assert_same(into.finish(), data)
    again = ComingText(spec, Place()).open_if_whole()
    assert again is not None
    assert_same(again, data)


def test_dialogues_with_what_is_learned(tmp_path: Path, other_disk: Path) -> None:
    records = [
        {
            "m": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "b" * (n % 7 + 1)},
            ]
        }
        for n in range(60)
    ]
    name = tokenizer_folder(tmp_path / "t", CHATML)
    changes = {
        "data": {
            "paths": write_records(tmp_path / "d.jsonl", records),
            "tokenizer": name,
            "messages_field": "m",
        },
        "model": {"vocab_size": 400, "max_position_embeddings": 64},
    }
    spec = with_data(small_spec(**changes), Place())
    data = opened(spec)
    into = ComingText(spec, Place(files=tokenizer_files(name)), 100)
    assert fetch(into, data)
    assert_same(into.finish(), data)


def test_what_came_is_kept_for_later(tmp_path: Path, other_disk: Path) -> None:
    spec, data = lines_run(tmp_path)
    assert not fetch(ComingText(spec, Place(), PART), data, most=7)
    later = ComingText(spec, Place(), PART)
    assert later.begin(data.sizes(), unasked=True)
    first = later.wanted("b")
    assert first is not None
    assert first.file == "tokens"
    assert first.offset > 0
    assert fetch(later, data, "b")
    assert_same(later.finish(), data)


def test_other_tokens_are_noticed_and_what_was_right_stays(
    tmp_path: Path, other_disk: Path
) -> None:
    spec, data = lines_run(tmp_path)
    into = ComingText(spec, Place(), PART)
    assert not fetch(into, data, "honest", most=6)
    before = into.wanted("liar")
    assert before is not None
    assert before.file == "tokens"
    assert before.offset > 0
    # The rest of a document that the other began, then documents of its own.
    assert lie(into, data) == ""
    assert lie(into, data).startswith("its document")
    after = into.wanted("honest")
    assert after is not None
    assert 0 < after.offset <= before.offset
    assert fetch(into, data, "honest")
    assert_same(into.finish(), data)


def test_other_lists_of_documents_are_noticed(tmp_path: Path, other_disk: Path) -> None:
    spec, data = lines_run(tmp_path)
    into = ComingText(spec, Place())
    assert into.begin(data.sizes(), unasked=True)
    assert lie(into, data) == ""
    assert lie(into, data).startswith("its list of documents")
    assert fetch(into, data, "honest")
    assert_same(into.finish(), data)


def test_nobody_is_blamed_for_what_several_gave(tmp_path: Path, other_disk: Path) -> None:
    """One long document, of which a liar gave the first part: then it comes from one peer only."""
    spec, data = text_run(tmp_path)
    into = ComingText(spec, Place(), PART)
    assert not fetch(into, data, "honest", most=2)
    part = into.wanted("liar")
    assert part is not None
    assert part.file == "tokens"
    into.take("liar", part, other_byte(given(data, part)))
    fetch(into, data, "honest", most=len(TEXT) // PART)
    rest = into.wanted("honest")
    assert rest is not None
    assert (rest.file, rest.offset) == ("tokens", 0)
    into.take("liar", rest, other_byte(given(data, rest)))
    begun = into.wanted("honest")
    assert begun is not None
    assert begun.offset == 0, "what the other gave is dropped at once"
    assert fetch(into, data, "honest")
    assert_same(into.finish(), data)


@pytest.mark.parametrize("seed", range(8))
def test_among_liars_the_data_come_from_the_honest_one(
    tmp_path: Path, other_disk: Path, seed: int
) -> None:
    rng = random.Random(seed)
    spec, data = lines_run(tmp_path)
    into = ComingText(spec, Place(), rng.choice([100, 500, 2000]))
    assert into.begin(data.sizes(), unasked=True)
    caught: set[str] = set()
    giver = ""
    for _ in range(20_000):
        if giver in caught or not giver or rng.random() < 0.02:
            giver = rng.choice([g for g in ("honest", "liar-1", "liar-2") if g not in caught])
        part = into.wanted(giver)
        if part is None:
            break
        right = given(data, part)
        lies = giver != "honest" and rng.random() < 0.5
        try:
            into.take(giver, part, other_byte(right, rng.randrange(len(right))) if lies else right)
        except ProtocolViolation:
            assert giver != "honest"
            caught.add(giver)
    assert_same(into.finish(), data)


def test_what_is_said_of_their_size_is_bounded(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, data = text_run(tmp_path)
    (size,) = data.sizes()
    into = ComingText(spec, Place())
    for wrong, text in (
        ([replace(size, fingerprint="0" * 32)], "another fingerprint"),
        ([size, size], "another number of sources"),
        ([replace(size, num_bytes=size.num_tokens * 2000)], "more text"),
    ):
        with pytest.raises(ProtocolViolation, match=text):
            into.begin(wrong, unasked=False)
    huge = [replace(size, num_tokens=3 << 30)]
    with pytest.raises(DataError, match=r"are 3.2 GB as tokens; --fetch-data fetches them"):
        into.begin(huge, unasked=True)
    with pytest.raises(DataError, match="no room for the run's data"):
        into.begin([replace(size, num_tokens=1 << 47)], unasked=False)
    assert fetch(into, data)
    with pytest.raises(ProtocolViolation, match="another size"):
        into.begin(huge, unasked=False)
    assert_same(into.finish(), data)


def test_two_processes_do_not_fetch_the_same(tmp_path: Path, other_disk: Path) -> None:
    spec, data = text_run(tmp_path)
    one, two = ComingText(spec, Place(), PART), ComingText(spec, Place(), PART)
    assert not fetch(one, data, most=2)
    assert not two.begin(data.sizes(), unasked=True)
    assert fetch(one, data)
    one.finish()
    found = two.open_if_whole()
    assert found is not None
    assert_same(found, data)


def test_a_disk_that_fails_is_one_line(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, data = text_run(tmp_path)
    into = ComingText(spec, Place(), PART)
    assert not fetch(into, data, most=1)

    def full(self: Any, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(coming.ComingStore, "take", full)
    part = into.wanted("a")
    assert part is not None
    with pytest.raises(DataError, match=r"cannot write into .*: No space left"):
        into.take("a", part, given(data, part))


def test_nothing_beyond_the_trained_sources_is_given(tmp_path: Path) -> None:
    _, data = text_run(tmp_path)
    assert data.part(1, "tokens", 0, 100) is None
    assert data.part(0, "tokens", 1 << 40, 100) == b""
    whole = data.part(0, "tokens", 0, 1 << 20)
    assert whole is not None
    assert np.frombuffer(whole, np.uint8)[-1] == 0, "its end-of-text token"
    assert len(data.sizes()) == 1
    assert isinstance(data.sizes()[0], SourceSize)


def test_no_long_list_of_documents_is_taken_unasked(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, data = lines_run(tmp_path)
    monkeypatch.setattr(coming, "UNASKED_INDEX_BYTES", 100)
    with pytest.raises(DataError, match="--fetch-data"):
        ComingText(spec, Place(), PART).begin(data.sizes(), unasked=True)
    assert list(other_disk.rglob("run-*")) == []
    assert ComingText(spec, Place(), PART).begin(data.sizes(), unasked=False)


def test_before_the_list_of_documents_is_right_no_token_is_taken(
    tmp_path: Path, other_disk: Path
) -> None:
    spec, data = lines_run(tmp_path)
    sizes = [replace(s, num_documents=s.num_documents + 3) for s in data.sizes()]
    into = ComingText(spec, Place(), PART)
    assert into.begin(sizes, unasked=True)
    part = into.wanted("a")
    while part is not None and part.file == "ends":
        into.take("a", part, bytes(part.length))
        part = into.wanted("a")
    while part is not None and part.file == "hashes" and part.length == PART:
        into.take("a", part, bytes(part.length))
        part = into.wanted("a")
    assert part is not None
    assert part.file == "hashes", "the last piece of the list"
    with pytest.raises(ProtocolViolation, match="list of documents"):
        into.take("a", part, bytes(part.length))
