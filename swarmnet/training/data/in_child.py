"""What a parsing process does with a tokenizer's files (`swarmnet.parsing`).

The functions take plain values and give such back: numbers, texts, bytes, lists. Dialogues come as
JSON, for a record may have whatever JSON can say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from swarmnet.parsing.frames import GivenFiles
from swarmnet.training.data.bad_records import BadRecord
from swarmnet.training.data.chat import ChatTemplate, Rendered, turns_of
from swarmnet.training.data.tokenizer import FileTokenizer
from swarmnet.training.tokenizer_files import TOKENIZER_FILE, eos_token, special_tokens


def open_tokenizer(files: GivenFiles, configured: Any) -> list[Any]:
    """[highest id, the token between two documents]. Raises `DataError`."""
    tokenizer = files.made(FileTokenizer)
    return [tokenizer.highest, tokenizer.end(configured)]


def special_texts(files: GivenFiles) -> dict[int, str]:
    """As `FileTokenizer.special`. Raises `DataError`."""
    return files.made(FileTokenizer).special()


def added_tokens(files: GivenFiles) -> list[list[Any]]:
    """As `tokenizer_files.special_tokens`."""
    return [list(pair) for pair in special_tokens(files.get(TOKENIZER_FILE, b""))]


def encode(files: GivenFiles, texts: Sequence[bytes]) -> list[bytes]:
    """As `FileTokenizer.encode`."""
    return files.made(FileTokenizer).encode(texts)


def encode_one(files: GivenFiles, text: str, adds_special: bool) -> list[int]:
    """As `FileTokenizer.encode_one`."""
    return files.made(FileTokenizer).encode_one(text, adds_special=adds_special)


def decode(files: GivenFiles, ids: Sequence[int], skips_special: bool) -> str:
    """As `FileTokenizer.decode`."""
    return files.made(FileTokenizer).decode(ids, skips_special=skips_special)


def open_template(files: GivenFiles) -> str:
    """The identity of the chat template. Raises `DataError` where there is none that can be
    used."""
    return files.made(ChatTemplate).identity


def encode_dialogues(
    files: GivenFiles, dialogues: bytes, longest: int, end: int | None
) -> list[list[Any]]:
    """Dialogues (JSON, pairs of messages and where they come from) by the chat template, as tokens:
    for each the fields of `DialogueTokens`, or those of a `BadRecord`: its reason, and its kind.
    Raises `DataError`."""
    template, found = files.made(ChatTemplate), dict[int, list[Any]]()
    rendered = dict[int, Rendered]()
    pairs = json.loads(dialogues)
    for k, (messages, where) in enumerate(pairs):
        try:
            rendered[k] = template.render(messages, where)
        except BadRecord as error:
            found[k] = [str(error).removeprefix("[data] ").removeprefix(where), error.kind]
    tokens = files.made(FileTokenizer).encode_dialogues(list(rendered.values()), longest, end)
    for k, one in zip(rendered, tokens, strict=True):
        found[k] = [one.ids, one.learned, one.num_bytes, one.length, one.is_cut, one.left_out]
    return [found[k] for k in range(len(pairs))]


def ends(files: GivenFiles) -> list[Any]:
    """[tokens of the name that a tokenizer_config.json has for the end of a text, tokens that end a
    turn of the chat template, what a text goes on with after an answer that no token ends]."""
    special = special_tokens(files.get(TOKENIZER_FILE, b""))
    content, turns = eos_token(files), turns_of(files)
    named = [i for i, text in special if text == content]
    return [named, [i for i, text in special if text == turns.end], turns.next_turn]
