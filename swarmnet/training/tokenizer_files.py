"""What the files of a tokenizer say: its tokens, and which of them ends a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

GENERATION_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


END_TOKENS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]", "<|im_end|>")
"""Names that tokenizers have for the end of a text, where no file says which it is."""
TEXT_ENDS = ("<|end_of_text|>", "<|endoftext|>")
"""Of those, the ones that end a text and no turn."""


def text_end(files: Mapping[str, bytes], configured: Any = None) -> int | None:
    """The token between two documents: a token whose name says that a text ends, else what
    the model's config (`configured`: its `eos_token_id`) or the tokenizer's names; None where there
    is none. The first comes first, for a chat model's `eos_token` often ends a turn, not a text."""
    special = special_tokens(files.get(TOKENIZER_FILE, b""))
    by_name = {text: i for i, text in special}
    named = next((by_name[name] for name in TEXT_ENDS if name in by_name), None)
    if named is not None:
        return named
    content = eos_token(files)
    found = token_ids(configured) + [i for i, text in special if text == content]
    found += [by_name[name] for name in END_TOKENS if name in by_name]
    return next(iter(found), None)


def eos_token(files: Mapping[str, bytes]) -> Any:
    """`eos_token` of a tokenizer_config.json, as text; None where there is none."""
    end = json_table(files.get(TOKENIZER_CONFIG_FILE, b"")).get("eos_token")
    return end.get("content") if isinstance(end, dict) else end


def special_tokens(tokenizer: bytes) -> list[tuple[int, str]]:
    """Ids and texts of the tokens that a tokenizer.json adds to its vocabulary."""
    added = json_table(tokenizer).get("added_tokens") or []
    return [
        (t["id"], t["content"])
        for t in added
        if isinstance(t, dict) and type(t.get("id")) is int and isinstance(t.get("content"), str)
    ]


def token_ids(value: Any) -> list[int]:
    """Of an entry such as `eos_token_id`: one, several or none."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and v >= 0]  # some files have -1 for none


def json_table(data: bytes) -> dict[str, Any]:
    """The table of a JSON file; empty for anything else."""
    try:
        values = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
