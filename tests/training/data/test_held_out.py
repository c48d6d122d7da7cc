"""Held-out data are whole documents, or blocks of a long text, chosen by their hashes."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.training.arrays import to_tensor
from tests.training.data.making import documents_of, opened, row_of, write_records


def numbered(count: int, length: int = 30) -> list[bytes]:
    return [f"{n:05} {'x' * length}".encode() for n in range(count)]


@settings(max_examples=30)
@given(st.integers(40, 400), st.sampled_from([0.02, 0.1, 0.5]))
def test_whole_documents_are_held_out(
    tmp_path_factory: pytest.TempPathFactory, count: int, fraction: float
) -> None:
    texts = numbered(count)
    path = tmp_path_factory.mktemp("held") / "d.jsonl"
    write_records(path, [{"text": text.decode()} for text in texts])
    data = opened(str(path), held_out_fraction=fraction)
    total = sum(map(len, texts)) + count
    wanted = max(fraction * total, 17)
    assert wanted <= data.num_held_out_tokens <= 1.5 * wanted
    assert data.num_train_tokens + data.num_held_out_tokens == total
    trained = documents_of(data)
    if count * fraction >= 2:  # else a document is cut into blocks
        held = documents_of(data, held_out=True)
        assert sorted(trained + held) == texts


def test_the_choice_is_of_the_content(tmp_path: Path) -> None:
    texts = numbered(200)
    held = []
    for name, extra in (("a", []), ("b", [b"one more text that is new here"])):
        lines = [*texts, *extra]
        random.Random(name).shuffle(lines)
        path = write_records(tmp_path / f"{name}.jsonl", [{"text": t.decode()} for t in lines])
        held.append(set(documents_of(opened(path, held_out_fraction=0.1), held_out=True)))
    assert len(held[0] & held[1]) >= len(held[0]) - 1


def test_a_single_long_text_is_held_out_in_blocks(tmp_path: Path) -> None:
    words = [f"{n:04} " for n in range(8000)]
    (tmp_path / "a.txt").write_text("".join(words))
    data = opened(str(tmp_path / "a.txt"), held_out_fraction=0.02)
    assert 800 <= data.num_held_out_tokens < 1200
    held = row_of(data.sources[0].held_out).split()
    trained = set(row_of(data.sources[0].samples).split())
    numbers = [int(word) for word in held if len(word) == 4]
    gaps = sum(b - a > 1 for a, b in pairwise(numbers))
    assert gaps >= 3, "from all over the text, not its end"
    whole = {f"{n:04}".encode() for n in range(8000)}
    assert len(trained & set(held) & whole) <= 2 * (gaps + 2), "only words that were cut"


def test_two_texts_of_different_kind_are_both_held_out(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("abcdefgh" * 4000)
    (tmp_path / "numbers.txt").write_text("12345678" * 4000)
    data = opened(str(tmp_path), held_out_fraction=0.05)
    held = row_of(data.sources[0].held_out)
    numbers = sum(48 < byte < 58 for byte in held)
    assert 0.1 < numbers / len(held) < 0.9


def test_other_data_may_be_measured_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 500)
    (tmp_path / "z.txt").write_text("Z" * 500)
    data = opened(str(tmp_path / "a.txt"), held_out_paths=str(tmp_path / "z.txt"))
    assert data.num_train_tokens == 501
    assert data.num_held_out == 2
    for i in range(data.num_held_out):
        assert set(to_tensor(data.held_out(i).inputs).flatten().tolist()) <= {ord("Z"), 0}
    same = opened(str(tmp_path / "a.txt"), held_out_fraction=0.0)
    assert data.fingerprint == same.fingerprint, "of what is trained on"


def test_no_block_that_is_held_out_is_trained_on(tmp_path: Path) -> None:
    text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=6000))
    (tmp_path / "a.txt").write_text(text)
    data = opened(str(tmp_path / "a.txt"), length=32, held_out_fraction=0.1)
    trained, held = row_of(data.sources[0].samples), row_of(data.sources[0].held_out)
    assert sorted(trained + held) == sorted(text.encode() + b"\0")
    pieces = [held[i : i + 8] for i in range(len(held) - 8)]
    seams = 8 * len(held) // 75  # a piece across two blocks may be anywhere
    assert sum(piece in text.encode() for piece in pieces) > len(pieces) - seams
    assert not any(piece in trained for piece in pieces)


def test_many_equal_documents_are_not_held_out_together(tmp_path: Path) -> None:
    texts = (
        ["the same text " * 3] * 500 + ["another one " * 3] * 500 + [f"{n:030}" for n in range(90)]
    )
    path = write_records(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    data = opened(path, held_out_fraction=0.02)
    total = data.num_train_tokens + data.num_held_out_tokens
    assert 0.02 <= data.num_held_out_tokens / total <= 0.03
    path = write_records(tmp_path / "e.jsonl", [{"text": texts[0]}] * 50)
    assert opened(path).num_held_out == 0, "nothing is both trained on and measured on"
