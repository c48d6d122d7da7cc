"""The tokenizer of a tokenizer.json: texts and dialogues as tokens, and back.

The library that reads the file is not made for files of strangers: some make it panic or abort, and
some make it take gigabytes. So this is used in a process of its own (`in_child`)."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.parsing.frames import Refusal
from swarmnet.training.data.chat import Rendered
from swarmnet.training.tokenizer_files import TOKENIZER_FILE, text_end

TOO_LONG, NOTHING_SAID = "longer than a sample", "without an answer of the assistant"
IDS = "I"
"""Of `array`: uint32."""


@dataclass(frozen=True, slots=True)
class DialogueTokens:
    """A dialogue as tokens."""

    ids: bytes
    """uint32."""
    learned: bytes
    """1 for the tokens that the assistant says, else 0."""
    num_bytes: int
    """Of what the assistant says."""
    length: int
    """Tokens of the whole dialogue."""
    is_cut: bool = False
    left_out: str = ""
    """Why it is no document; it has no tokens then."""


class FileTokenizer:
    """Used without truncation or padding."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Raises `Refusal`."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(files[TOKENIZER_FILE].decode())
        except Exception as error:  # the library raises bare Exception
            raise Refusal(f"is no tokenizer.json: {one_line(error)}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.highest: int = max(vocabulary.values(), default=-1)
        """Of its ids."""
        self._files = files

    def special(self) -> dict[int, str]:
        """Tokens that are left out of a text, and how they are written."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    def end(self, configured: Any) -> int | None:
        """The token between two documents. `configured`: `eos_token_id` of the model's config."""
        return text_end(self._files, configured)

    def encode(self, texts: Sequence[bytes]) -> list[bytes]:
        """Ids, uint32, of UTF-8 texts. Raises `Refusal`."""
        decoded = [text.decode(errors="replace") for text in texts]
        try:
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        except Exception as error:
            raise Refusal(f"does not take a text: {one_line(error)}") from None
        return [array(IDS, encoding.ids).tobytes() for encoding in encodings]

    def encode_one(self, text: str, *, adds_special: bool) -> list[int]:
        """The ids of a text. Raises `Refusal`."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=adds_special).ids
        except Exception as error:
            raise Refusal(f"does not take a text: {one_line(error)}") from None
        return ids

    def decode(self, ids: Sequence[int], *, skips_special: bool) -> str:
        """The text of tokens. Raises `Refusal`."""
        try:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skips_special)
        except Exception as error:
            raise Refusal(f"does not take tokens back: {one_line(error)}") from None
        return text

    def encode_dialogues(
        self, dialogues: Sequence[Rendered], longest: int, end: int | None
    ) -> list[DialogueTokens]:
        """Dialogues of at most `longest` tokens, the end-of-text token included: a longer one is
        cut after the last of the assistant's turns that fits, and left out where none does. Raises
        `Refusal`."""
        texts = [dialogue.text for dialogue in dialogues]
        try:
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as error:
            raise Refusal(f"does not take a dialogue: {one_line(error)}") from None
        return [
            _dialogue(rendered, encoding, longest, end)
            for rendered, encoding in zip(dialogues, encodings, strict=True)
        ]


def _dialogue(
    rendered: Rendered, encoding: Any, longest: int, end_of_text: int | None
) -> DialogueTokens:
    ids = array(IDS, encoding.ids)
    starts = [start for start, _ in encoding.offsets]
    learned = bytearray(len(ids))
    has_end = end_of_text is None or (len(ids) > 0 and ids[-1] == end_of_text)
    length = len(ids) + (not has_end)
    fits = longest - (end_of_text is not None)
    end = 0 if length > longest else len(ids)
    for first, last in rendered.spans:
        begin, stop = bisect_left(starts, first), bisect_left(starts, last)
        learned[begin:stop] = bytes([1]) * (stop - begin)
        if stop <= fits and length > longest:
            end = stop
    if not any(learned[:end]):
        why = TOO_LONG if any(learned) else NOTHING_SAID
        return DialogueTokens(b"", b"", 0, length, left_out=why)
    said = "".join(rendered.text[a:b] for a, b in rendered.spans)
    num_bytes = len(said.encode()) * sum(learned[:end]) // sum(learned)
    is_cut = end < len(ids)
    ids, learned = ids[:end], learned[:end]
    if end_of_text is not None and ids[-1] != end_of_text:
        is_said = is_cut or not rendered.text[rendered.spans[-1][1] :].strip()
        ids.append(end_of_text)
        learned.append(rendered.needs_end and is_said)
    return DialogueTokens(ids.tobytes(), bytes(learned), num_bytes, length, is_cut)


def one_line(error: Exception) -> str:
    """What a library says."""
    return " ".join(str(error).split())[:200]
