"""Text and dialogues as tokens. A tokenizer's own threads make it parallel; nothing forks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarmnet.errors import DataError, SpecError, one_line
from swarmnet.spec import BYTES_TOKENIZER, NUM_BYTE_TOKENS
from swarmnet.training.byte_tokenizer import END_OF_TEXT_ID
from swarmnet.training.data.chat import Rendered
from swarmnet.training.models.model_folder import BESIDE_TOKENIZER, read_bounded, small_files
from swarmnet.training.tokenizer_files import TOKENIZER_FILE, text_end

TOO_LONG, NOTHING_SAID = "longer than a sample", "without an answer of the assistant"


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
    """The tokenizer of a tokenizer.json, used without truncation or padding."""

    def __init__(self, files: Mapping[str, bytes], name: str, configured: Any = None) -> None:
        """`files`: of the tokenizer. `configured`: `eos_token_id` of the model's config, where it
        has one. Raises `DataError`."""
        from tokenizers import Tokenizer  # slow to import, and not needed for bytes

        try:
            self._tokenizer = Tokenizer.from_str(files[TOKENIZER_FILE].decode())
        except Exception as error:  # the library raises bare Exception
            message = one_line(error)
            raise DataError(f"[data] tokenizer {name} is no tokenizer.json: {message}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.dtype = np.dtype(np.uint16 if highest < 1 << 16 else np.uint32)
        self.end = text_end(files, configured)
        if self.end is not None and self.end > highest:
            raise DataError(f"[data] tokenizer {name} has no token {self.end}, which ends a text")
        digest = hashlib.sha256(files[TOKENIZER_FILE]).hexdigest()
        self.identity = f"{digest} {self.end}"

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray(encoding.ids, self.dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def encode_dialogues(self, dialogues: Sequence[Rendered], longest: int) -> list[Dialogue]:
        """Dialogues of at most `longest` tokens, the end-of-text token included: a longer one is
        cut after the last of the assistant's turns that fits, and left out where none does."""
        texts = [dialogue.text for dialogue in dialogues]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [self._dialogue(r, e, longest) for r, e in zip(dialogues, encodings, strict=True)]

    def _dialogue(self, rendered: Rendered, encoding: Any, longest: int) -> Dialogue:
        ids = np.asarray(encoding.ids, self.dtype)
        starts = np.asarray([start for start, _ in encoding.offsets], np.int64)
        learned = np.zeros(len(ids), np.uint8)
        has_end = self.end is None or (len(ids) > 0 and ids[-1] == self.end)
        length = len(ids) + (not has_end)
        fits = longest - (self.end is not None)
        end = 0 if length > longest else len(ids)
        for first, last in rendered.spans:
            begin, stop = np.searchsorted(starts, [first, last])
            learned[begin:stop] = 1
            if stop <= fits and length > longest:
                end = int(stop)
        if not learned[:end].any():
            why = TOO_LONG if learned.any() else NOTHING_SAID
            return Dialogue(ids[:0], learned[:0], 0, length, left_out=why)
        said = "".join(rendered.text[a:b] for a, b in rendered.spans)
        num_bytes = len(said.encode()) * int(learned[:end].sum()) // int(learned.sum())
        is_cut = end < len(ids)
        ids, learned = ids[:end], learned[:end]
        if self.end is not None and ids[-1] != self.end:
            is_said = is_cut or not rendered.text[rendered.spans[-1][1] :].strip()
            ids = np.append(ids, self.dtype.type(self.end))
            learned = np.append(learned, np.uint8(rendered.needs_end and is_said))
        return Dialogue(ids, learned, num_bytes, length, is_cut)


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
