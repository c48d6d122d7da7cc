"""Text as a run's tokens, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import swarmnet.training.data.in_child as in_child
from swarmnet.parsing.frames import given
from swarmnet.parsing.process import parsing
from swarmnet.spec import NUM_BYTE_TOKENS, RunSpec
from swarmnet.training.data.encoding import open_seconds

TOKENIZER = "tokenizer.json"
ABOUT = "the run's tokenizer"
CALL_S = 20.0
"""For a text or some tokens; more where the file is read again."""


class TextCodec(Protocol):
    """A tokenizer."""

    num_tokens: int
    """Tokens from this one on mean nothing."""
    special: Mapping[int, str]
    """Tokens that are left out of a text, and how they are written."""

    def encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        """`adds_special`: also what the model expects around a text (a token that begins it)."""

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteCodec:
    """A token is a byte."""

    num_tokens = NUM_BYTE_TOKENS
    special: Mapping[int, str] = MappingProxyType({})

    def encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FileCodec:
    """The tokenizer of a tokenizer.json, which a process of its own reads: not to be called on an
    event loop, for a long text takes a while, and a bad file more."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: of a tokenizer, by name. Raises `UserError` where there is none."""
        self._files = given(files)
        self._seconds = CALL_S + open_seconds(files)
        highest, _ = parsing().call(
            in_child.open_tokenizer, ABOUT, self._seconds, self._files, None
        )
        self.num_tokens: int = highest + 1
        self.special: Mapping[int, str] = parsing().call(
            in_child.special_texts, ABOUT, self._seconds, self._files
        )

    def encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        return parsing().call(
            in_child.encode_one, ABOUT, self._seconds, self._files, text, adds_special
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return parsing().call(
            in_child.decode, ABOUT, self._seconds, self._files, list(tokens), True
        )


def text_codec_of(spec: RunSpec, files: Mapping[str, bytes]) -> TextCodec | None:
    """The tokenizer of a run; None where it is not known here. `files`: of the run, by name."""
    if spec.is_bytes:
        return ByteCodec()
    return FileCodec(files) if TOKENIZER in files else None
