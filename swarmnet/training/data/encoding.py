"""Text and dialogues as tokens. A tokenizer.json and a chat template are files of others: a process
of its own reads them (`swarmnet.parsing`), with a tokenizer's own threads, and gets all texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import swarmnet.training.data.in_child as in_child
from swarmnet.errors import DataError, SpecError
from swarmnet.parsing.frames import given
from swarmnet.parsing.process import parsing
from swarmnet.spec import BYTES_TOKENIZER, NUM_BYTE_TOKENS
from swarmnet.training.byte_tokenizer import END_OF_TEXT_ID
from swarmnet.training.data.bad_records import BadRecord
from swarmnet.training.data.readers import Piece
from swarmnet.training.models.model_folder import BESIDE_TOKENIZER, read_bounded, small_files
from swarmnet.training.tokenizer_files import TOKENIZER_FILE

OPEN_S, OPEN_BYTES_PER_S = 20.0, 1e6
"""To read a tokenizer.json: so long, and more for a large one."""
ENCODE_S, DIALOGUES_S, DECODE_S = 60.0, 300.0, 20.0
"""A megabyte of text takes about a second, and so do as many dialogues."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A dialogue as tokens."""

    ids: np.ndarray
    learned: np.ndarray
    """uint8, 1 for the tokens that the assistant says."""
    num_bytes: int
    """Of what the assistant says."""
    length: int
    """Tokens of the whole dialogue."""
    is_cut: bool = False
    left_out: str = ""
    """Why it is no document; it has no tokens then."""


class Encoder(Protocol):
    """A tokenizer."""

    dtype: np.dtype[Any]
    """Unsigned, the smallest that holds all ids."""
    end: int | None
    """The token between two documents; None where the tokenizer has none."""
    identity: str
    """Of all that its tokens depend on."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """UTF-8 texts as ids, without special tokens around them."""

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteEncoder:
    """A token is a byte; byte 0 ends a text."""

    dtype = np.dtype(np.uint8)
    end: int | None = END_OF_TEXT_ID
    identity = BYTES_TOKENIZER

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileEncoder:
    """The tokenizer of a tokenizer.json, used without truncation or padding, and the chat template
    beside it."""

    def __init__(self, files: Mapping[str, bytes], name: str, configured: Any = None) -> None:
        """`files`: of the tokenizer. `configured`: `eos_token_id` of the model's config, where it
        has one. Raises `DataError`."""
        self._files = given(files)
        self._about = f"[data] tokenizer {name}"
        seconds = open_seconds(files)
        highest, self.end = parsing().call(
            in_child.open_tokenizer, self._about, seconds, self._files, configured
        )
        self.dtype = np.dtype(np.uint16 if highest < 1 << 16 else np.uint32)
        if self.end is not None and self.end > highest:
            raise DataError(f"[data] tokenizer {name} has no token {self.end}, which ends a text")
        digest = hashlib.sha256(files[TOKENIZER_FILE]).hexdigest()
        self.identity = f"{digest} {self.end}"
        self._again_s = seconds
        """More for each call: a process that ended reads the files again."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        found = parsing().call(
            in_child.encode, self._about, ENCODE_S + self._again_s, self._files, list(texts)
        )
        return [np.frombuffer(ids, np.uint32).astype(self.dtype) for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        whole = [int(i) for i in ids]
        return parsing().call(
            in_child.decode, self._about, DECODE_S + self._again_s, self._files, whole, False
        )

    def open_template(self) -> str:
        """What the texts of the chat template depend on, but for the tokenizer. Raises `DataError`
        where there is no template, or it is broken."""
        about = f"{self._about}: its chat template"
        return parsing().call(in_child.open_template, about, self._again_s, self._files)

    def encode_dialogues(
        self, dialogues: Sequence[Piece], longest: int
    ) -> list[Dialogue | BadRecord]:
        """Dialogues by the chat template, of at most `longest` tokens, the end-of-text token
        included: a longer one is cut after the last of the assistant's turns that fits, and left
        out where none does. Raises `DataError`."""
        pairs = [(piece.messages or [], piece.where) for piece in dialogues]
        about = f"{self._about}, or its chat template ({_places(dialogues)}),"
        found = parsing().call(
            in_child.encode_dialogues,
            about,
            DIALOGUES_S + self._again_s,
            self._files,
            json.dumps(pairs, default=str).encode(),
            longest,
            self.end,
        )
        return [self._dialogue(one, made) for one, made in zip(dialogues, found, strict=True)]

    def _dialogue(self, piece: Piece, found: Sequence[Any]) -> Dialogue | BadRecord:
        """`found`: as `in_child.encode_dialogues` gives it."""
        if len(found) == len(("reason", "kind")):
            return BadRecord(piece.where, *found)
        ids, learned, num_bytes, length, is_cut, left_out = found
        tokens = np.frombuffer(ids, np.uint32).astype(self.dtype)
        mask = np.frombuffer(learned, np.uint8)
        return Dialogue(tokens, mask, num_bytes, length, is_cut, left_out)


def open_seconds(files: Mapping[str, bytes]) -> float:
    """That a process may take to read a tokenizer.json."""
    return OPEN_S + len(files.get(TOKENIZER_FILE, b"")) / OPEN_BYTES_PER_S


def _places(pieces: Sequence[Piece]) -> str:
    """Of dialogues, for people."""
    first, last = pieces[0].where, pieces[-1].where
    return f"at {first}" if first == last else f"from {first} to {last.rpartition(', ')[2]}"


def open_encoder(tokenizer: str, files: Mapping[str, bytes], configured: Any = None) -> Encoder:
    """`tokenizer`: what people call it. `files`: of it, by name; none for bytes. `configured`:
    `eos_token_id` of the model's config. Raises `DataError`."""
    if TOKENIZER_FILE not in files:
        return ByteEncoder()
    return FileEncoder(files, tokenizer, configured)


def tokenizer_files(tokenizer: str) -> dict[str, bytes]:
    """A tokenizer.json and what lies beside it, by name; nothing for `bytes`. Raises
    `DataError`."""
    if tokenizer == BYTES_TOKENIZER:
        return {}
    try:
        path = Path(tokenizer).expanduser()
    except RuntimeError:
        raise DataError(f"[data] tokenizer: cannot read {tokenizer}: no such user") from None
    if not path.is_file():
        raise DataError(f"[data] tokenizer: cannot read {tokenizer}: no such file")
    try:
        beside = small_files(path.parent, BESIDE_TOKENIZER)
        return {**beside, TOKENIZER_FILE: read_bounded(path)}
    except SpecError as error:
        raise DataError(f"[data] tokenizer: {error}") from None


def check_vocabulary(encoder: Encoder, highest: int, vocab_size: int) -> None:
    """Raises `DataError` where ids do not fit. `highest`: of the ids in the data."""
    is_bytes = isinstance(encoder, ByteEncoder)
    needed = NUM_BYTE_TOKENS if is_bytes else max(highest, encoder.end or 0) + 1
    if needed > vocab_size:
        raise DataError(
            f"[model] vocab_size ({vocab_size}) is too small for the tokenizer; "
            f"make it at least {needed}"
        )
