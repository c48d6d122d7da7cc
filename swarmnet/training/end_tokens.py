"""Which tokens end a text, as a model's files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import swarmnet.training.data.in_child as in_child
from swarmnet.parsing.frames import given
from swarmnet.parsing.process import parsing
from swarmnet.spec import RunSpec
from swarmnet.training.byte_tokenizer import END_OF_TEXT_ID
from swarmnet.training.data.encoding import open_seconds
from swarmnet.training.tokenizer_files import (
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    json_table,
    token_ids,
)

ABOUT = "the run's tokenizer, or its chat template,"
TEMPLATE_S = 60.0
"""To find out how a template writes turns."""
FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE)


@dataclass(frozen=True, slots=True)
class FileEnds:
    """What a tokenizer's files say of the end of a text."""

    named: tuple[int, ...] = ()
    """Tokens of the name that tokenizer_config.json has for it."""
    of_turns: tuple[int, ...] = ()
    """Tokens that end a turn of the chat template."""
    next_turn: str = ""
    """What a text goes on with after an answer that no token ends."""


def file_ends(files: Mapping[str, bytes]) -> FileEnds:
    """By a process of its own, for it runs the template. `files`: by name. Raises `DataError`
    where that takes too much."""
    if not any(name in files for name in FILES):
        return FileEnds()
    seconds = TEMPLATE_S + open_seconds(files)
    named, of_turns, next_turn = parsing().call(in_child.ends, ABOUT, seconds, given(files))
    return FileEnds(tuple(named), tuple(of_turns), next_turn)


def end_tokens(
    spec: RunSpec, files: Mapping[str, bytes], ends: FileEnds | None = None
) -> list[int]:
    """Tokens after which a text is over: what the model's files say, all of them, and what ends a
    turn in its chat template. That one comes last: a base model's files do not name it, though
    the template has it. `ends`: of the files, where they are known. Raises `DataError`."""
    if spec.is_bytes:
        return [END_OF_TEXT_ID]
    ends = ends or file_ends(files)
    found = token_ids(spec.model.config.get("eos_token_id"))
    found += token_ids(json_table(files.get(GENERATION_FILE, b"")).get("eos_token_id"))
    return list(dict.fromkeys((*found, *ends.named, *ends.of_turns)))


def added_texts(tokenizer: bytes) -> list[str]:
    """Of the tokens that a tokenizer.json adds to its vocabulary. Raises `DataError`."""
    files = given({TOKENIZER_FILE: tokenizer})
    added = parsing().call(in_child.added_tokens, ABOUT, open_seconds(files), files)
    return [text for _, text in added]
