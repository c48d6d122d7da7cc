"""Which tokens end a text, as a model's files say."""

from __future__ import annotations

from collections.abc import Mapping

from swarmnet.spec import RunSpec
from swarmnet.training.byte_tokenizer import END_OF_TEXT_ID
from swarmnet.training.data.chat import turns_of
from swarmnet.training.tokenizer_files import (
    GENERATION_FILE,
    TOKENIZER_FILE,
    eos_token,
    json_table,
    special_tokens,
    token_ids,
)


def end_tokens(spec: RunSpec, files: Mapping[str, bytes]) -> list[int]:
    """Tokens after which a text is over: what the model's files say, all of them, and what ends a
    turn in its chat template. That one comes last: a base model's files do not name it, though
    the template has it."""
    if spec.is_bytes:
        return [END_OF_TEXT_ID]
    special = special_tokens(files.get(TOKENIZER_FILE, b""))
    content, turns = eos_token(files), turns_of(files)
    found = token_ids(spec.model.config.get("eos_token_id"))
    found += token_ids(json_table(files.get(GENERATION_FILE, b"")).get("eos_token_id"))
    found += [i for i, text in special if text == content]
    found += [i for i, text in special if text == turns.end]
    return list(dict.fromkeys(found))
