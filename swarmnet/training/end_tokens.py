"""Which tokens end a text, as a model's files say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swarmnet.spec import RunSpec
from swarmnet.training.byte_tokenizer import END_OF_TEXT_ID

GENERATION_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


END_TOKENS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]", "<|im_end|>")
"""Names that tokenizers have for the end of a text, where no file says which it is."""
TEXT_ENDS = ("<|end_of_text|>", "<|endoftext|>")
"""Of those, the ones that end a text and no turn."""


def end_tokens(spec: RunSpec, files: Mapping[str, bytes]) -> list[int]:
    """Tokens after which a text is over: what the model's files say, all of them."""
    if spec.is_bytes:
        return [END_OF_TEXT_ID]
    found = _ids(spec.model.config.get("eos_token_id"))
    found += _ids(json_table(files.get(GENERATION_FILE, b"")).get("eos_token_id"))
    end = json_table(files.get(TOKENIZER_CONFIG_FILE, b"")).get("eos_token")
    content = end.get("content") if isinstance(end, dict) else end
    found += [i for i, text in special_tokens(files.get(TOKENIZER_FILE, b"")) if text == content]
    return list(dict.fromkeys(found))


def text_end(files: Mapping[str, bytes], configured: Any = None) -> int | None:
    """The token between two documents: a token whose name says that a text ends, else what
    the model's config (`configured`: its `eos_token_id`) or the tokenizer's names; None where there
    is none. The first comes first, for a chat model's `eos_token` often ends a turn, not a text."""
    special = special_tokens(files.get(TOKENIZER_FILE, b""))
    by_name = {text: i for i, text in special}
    named = next((by_name[name] for name in TEXT_ENDS if name in by_name), None)
    if named is not None:
        return named
    end = json_table(files.get(TOKENIZER_CONFIG_FILE, b"")).get("eos_token")
    content = end.get("content") if isinstance(end, dict) else end
    found = _ids(configured) + [i for i, text in special if text == content]
    found += [by_name[name] for name in END_TOKENS if name in by_name]
    return next(iter(found), None)


def special_tokens(tokenizer: bytes) -> list[tuple[int, str]]:
    """Ids and texts of the tokens that a tokenizer.json adds to its vocabulary."""
    added = json_table(tokenizer).get("added_tokens") or []
    return [(t["id"], t["content"]) for t in added if isinstance(t, dict) and "content" in t]


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and v >= 0]  # some files have -1 for none


def json_table(data: bytes) -> dict[str, Any]:
    """The table of a JSON file; empty for anything else."""
    try:
        values = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
