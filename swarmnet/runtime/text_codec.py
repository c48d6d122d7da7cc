"""Text as a run's tokens, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from swarmnet.errors import UserError
from swarmnet.spec import NUM_BYTE_TOKENS, RunSpec

TOKENIZER = "tokenizer.json"


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
    """The tokenizer of a tokenizer.json."""

    def __init__(self, data: bytes) -> None:
        """Raises `UserError` where it is none."""
        from tokenizers import Tokenizer  # slow to import

        try:
            self._tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception
            text = " ".join(str(error).split())[:200]
            raise UserError(f"the run's {TOKENIZER} cannot be used: {text}") from None
        self.num_tokens = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special: Mapping[int, str] = {i: t.content for i, t in added.items() if t.special}

    def encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=adds_special).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def text_codec_of(spec: RunSpec, files: Mapping[str, bytes]) -> TextCodec | None:
    """The tokenizer of a run; None where it is not known here. `files`: of the run, by name."""
    if spec.is_bytes:
        return ByteCodec()
    return FileCodec(files[TOKENIZER]) if TOKENIZER in files else None
