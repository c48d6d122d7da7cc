"""Microbatches are pure, held-out text is never trained on, and bad data says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from swarmnet.errors import DataError
from swarmnet.training.arrays import to_tensor
from swarmnet.training.data import Place, TextData, open_data
from swarmnet.wire import Array
from tests.training.flights import batch
from tests.training.specs import TEXT, small_spec, write_text


def open_text_data(path: str, **data: object) -> TextData:
    opened = open_data(small_spec(path, data=data))
    assert isinstance(opened, TextData)
    return opened


def as_bytes(pair: tuple[Array, Array]) -> tuple[bytes, ...]:
    return tuple(bytes(a.data) for a in pair)


def test_a_sample_is_a_pure_function_of_its_index(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    a, b = open_text_data(path), open_data(small_spec(path))
    assert a.num_samples == b.num_samples == -(-(a.num_train_tokens - 1) // 16)
    indices = range(a.num_samples)
    alone = [as_bytes(a.microbatch([i]).arrays) for i in indices]
    assert alone == [as_bytes(b.microbatch([i]).arrays) for i in reversed(indices)][::-1]
    assert as_bytes(a.microbatch([3, 0]).arrays) == tuple(x + y for x, y in zip(alone[3], alone[0]))


def test_targets_are_the_tokens_that_follow(tmp_path: Path) -> None:
    data = open_text_data(write_text(tmp_path), held_out_fraction=0.0)
    inputs, targets = batch(data, 5)
    assert inputs.dtype == targets.dtype == "int32"
    assert inputs.shape == targets.shape == (2, 16)
    x, y = to_tensor(inputs), to_tensor(targets)
    for row in range(2):
        window = bytes([*x[row].tolist(), y[row, -1].item()])
        assert window in TEXT.encode()
        assert x[row, 1:].tolist() == y[row, :-1].tolist()


def test_no_held_out_data_where_none_is_wanted(tmp_path: Path) -> None:
    data = open_text_data(write_text(tmp_path), held_out_fraction=0.0)
    assert (data.num_held_out, data.num_held_out_tokens) == (0, 0)
    assert data.num_train_tokens == len(TEXT.encode()) + 1


def test_a_peer_may_keep_the_text_elsewhere(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    elsewhere = open_data(small_spec("/not/here.txt"), Place((path,)))
    assert as_bytes(batch(elsewhere, 3)) == as_bytes(batch(open_text_data(path), 3))


def tokenizer_file(folder: Path) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    name = tokenizer_file(tmp_path)
    data = open_text_data(write_text(tmp_path), tokenizer=name)
    tokenizer = Tokenizer.from_file(name)
    expected = tokenizer.encode(TEXT).ids
    assert data.num_train_tokens + data.num_held_out_tokens == len(expected)
    assert data.bytes_per_token == pytest.approx(len(TEXT.encode()) / len(expected))
    assert data.bytes_per_token > 1.5
    window = to_tensor(batch(data, 0)[0])[0].tolist()
    assert any(expected[i : i + 16] == window for i in range(len(expected)))


def test_bytes_have_one_byte_a_token(tmp_path: Path) -> None:
    assert open_text_data(write_text(tmp_path)).bytes_per_token == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("missing.txt", None, "no such file"),
        ("folder", {}, r"no file in .* is named \*\.txt"),
        ("short.txt", "a few words", "too few"),
        ("empty.txt", "", "no text at all"),
    ],
)
def test_bad_data_is_one_clear_line(
    tmp_path: Path, name: str, content: str | dict | None, wanted: str
) -> None:
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(DataError, match=wanted) as raised:
        open_text_data(str(path))
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_this_machine_has_elsewhere(tmp_path: Path) -> None:
    path, name = write_text(tmp_path), tokenizer_file(tmp_path)
    theirs = small_spec(path, data={"tokenizer": "/not/here.json"})
    own = small_spec(path, data={"tokenizer": name})
    assert batch(open_data(theirs, Place((path,), name)), 3) == batch(open_data(own), 3)


def test_bad_tokenizers_are_one_clear_line(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        open_text_data(path, tokenizer=str(tmp_path / "none.json"))
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        open_text_data(path, tokenizer=path)
    small = small_spec(path, model={"vocab_size": 20}, data={"tokenizer": tokenizer_file(tmp_path)})
    with pytest.raises(DataError, match="make it at least"):
        open_data(small)
