"""Tokenizers and chat templates that are made to do harm: each ends in one line, and this process
goes on."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from swarmnet.errors import UserError
from swarmnet.parsing.frames import most_bytes
from swarmnet.runtime.text_codec import FileCodec
from swarmnet.runtime.writing import chat
from swarmnet.runtime.writing.chat import chat_prompt
from swarmnet.training import end_tokens
from swarmnet.training.data import encoding
from swarmnet.training.data.bad_records import BadRecord
from swarmnet.training.data.encoding import FileEncoder
from swarmnet.training.data.readers import Piece
from swarmnet.training.end_tokens import added_texts, file_ends
from tests.parsing.hostile import STRIPS, TEMPLATES, TOKENIZERS, growing, tokenizer
from tests.training.data.making import CHATML, tokenizer_text

SAID: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
]


def largest_mib() -> float:
    """Of the processes that this one has started and that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def one_line(run: Callable[[], object]) -> str:
    """What a person reads."""
    with pytest.raises(UserError) as raised:
        run()
    text = str(raised.value)
    assert text.isprintable()
    assert len(text) < 600
    return text


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take long is ended soon."""
    for module, name in (
        (chat, "PROMPT_S"),
        (encoding, "OPEN_S"),
        (encoding, "ENCODE_S"),
        (encoding, "DIALOGUES_S"),
        (end_tokens, "TEMPLATE_S"),
    ):
        monkeypatch.setattr(module, name, 0.25)


@pytest.fixture(autouse=True, scope="module")
def memory_is_bounded() -> Any:
    """By what is promised, whatever the file. Linux counts for a child what its parent had when it
    was started: where this process is large itself, after other tests, that is the least."""
    before = largest_mib()
    yield
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    most = most_bytes(2 << 20, 1 << 20, os.cpu_count() or 1) / (1 << 20)
    assert largest_mib() <= max(before, most, own)


@pytest.mark.parametrize("data", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_ends_in_a_line(data: bytes) -> None:
    def use() -> None:
        FileEncoder({"tokenizer.json": data}, "made.json").encode([b"ab a"])

    assert one_line(use).startswith("[data] tokenizer made.json ")


def test_what_decodes_badly_ends_in_a_line() -> None:
    encoder = FileEncoder({"tokenizer.json": STRIPS}, "made.json")
    assert encoder.encode([b"a"])[0].tolist() == [0]
    line = one_line(lambda: encoder.decode([0]))
    assert "made.json cannot be used (PanicException: " in line
    assert encoder.encode([b"a"])[0].tolist() == [0], "with another process"
    codec = FileCodec({"tokenizer.json": STRIPS})
    assert "the run's tokenizer cannot be used" in one_line(lambda: codec.decode([0]))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_ends_in_a_line(template: str) -> None:
    """Wherever one is used: for a prompt, and for dialogues to train on."""
    files = {"chat_template.jinja": template.encode(), "tokenizer.json": tokenizer()}
    line = one_line(lambda: chat_prompt(files, SAID))
    assert line.startswith("the model's chat template ")
    encoder = FileEncoder(files, "made.json")
    dialogues = [Piece(messages=SAID, where="d.jsonl, line 3")]

    def use() -> None:
        encoder.open_template()
        (found,) = encoder.encode_dialogues(dialogues, 100)
        assert isinstance(found, BadRecord)
        assert "d.jsonl, line 3: the chat template " in str(found)
        raise found

    assert "chat template" in one_line(use)
    with suppress(UserError):  # or without what the template does not say
        file_ends(files)


def test_a_line_says_where_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "DIALOGUES_S", 60.0)
    made = tokenizer(normalizer=growing(2, 100_000))
    files = {"tokenizer.json": made, "chat_template.jinja": CHATML.encode()}
    encoder = FileEncoder(files, "made.json")
    pieces = [Piece(messages=SAID, where=f"d.jsonl, line {k}") for k in (3, 4)]
    said = [{"role": "user", "content": "a" * 10}, SAID[1]]
    pieces.append(Piece(messages=said, where="d.jsonl, line 5"))
    line = one_line(lambda: encoder.encode_dialogues(pieces, 100))
    assert re.fullmatch(
        r"\[data\] tokenizer made\.json, or its chat template \(from d\.jsonl, line 3 to line 5\), "
        r"needs more than [\d,]+ MiB of memory to be read: it is broken, or made to do harm: take "
        r"another one, or leave a run with it alone",
        line,
    )


def test_ends_and_names_are_read_in_that_process() -> None:
    files = {"tokenizer.json": tokenizer_text().encode(), "chat_template.jinja": CHATML.encode()}
    assert added_texts(files["tokenizer.json"]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    ends = file_ends(files)
    assert (len(ends.of_turns), ends.named, ends.next_turn) == (1, (), "")
    assert file_ends({}).of_turns == ()
    lists = b'{"added_tokens": [' + b"[]," * (1 << 20) + b"[]]}"
    assert added_texts(lists) == []
