"""A tokenizer of bytes as files that transformers loads.

A token is a byte, and its id the byte's value. Byte 0, which no text has, is the end of text: it is
a special token, written as the character NUL.
"""

from __future__ import annotations

import json
from typing import Any

END_OF_TEXT = "\0"
END_OF_TEXT_ID = 0


def byte_tokenizer_files(longest: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json. `longest`: tokens of the model's context."""
    vocabulary = {char: byte for byte, char in enumerate(_byte_characters())}
    del vocabulary[_byte_characters()[END_OF_TEXT_ID]]
    vocabulary[END_OF_TEXT] = END_OF_TEXT_ID
    special: dict[str, Any] = {
        "id": END_OF_TEXT_ID,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None},
    }
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
    }
    return {
        "tokenizer.json": _json(tokenizer),
        "tokenizer_config.json": _json(about),
    }


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown}
    table |= {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=True) + "\n").encode()
