"""Documents as tokens on the disk: written once, as a stream, and mapped into memory afterwards.

A store is a folder:

- `tokens.bin`: all documents' ids, one after the other, each with its end-of-text token;
- `learned.bin`: for dialogues, a byte for each token: 1 where it is learned;
- `ends.bin`: uint64, where each document ends in `tokens.bin`;
- `hashes.bin`: uint64, of each document's tokens (xxh3-64);
- `about.json`: `About`.

Numbers are little endian, and so must the machine be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from swarmnet.system import share_lock

TOKENS, LEARNED, ENDS, HASHES, ABOUT = (
    "tokens.bin",
    "learned.bin",
    "ends.bin",
    "hashes.bin",
    "about.json",
)
WORD = np.dtype("<u8")
CHUNK = 1 << 16
"""Documents that are looked at together."""


@dataclass(frozen=True, slots=True)
class About:
    """What a store has."""

    dtype: str
    """Of its tokens."""
    num_documents: int = 0
    num_tokens: int = 0
    """End-of-text tokens included."""
    num_learned: int = 0
    num_bytes: int = 0
    """Of the text behind the learned tokens."""
    highest: int = 0
    """Of all ids."""
    is_dialogues: bool = False
    fingerprint: str = ""
    """xxh3-128 of all documents' lengths and hashes, hex."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Files and records that gave no document, or a shorter one, by reason."""
    lines: tuple[str, ...] = ()
    """For people: what was left out."""
    lengths: tuple[int, ...] = ()
    """Tokens of the dialogues, before any was cut: the median, the 95th percentile and the
    longest."""


class Store:
    """A store, mapped into memory."""

    def __init__(self, folder: Path, about: About) -> None:
        """Raises `OSError` or `ValueError` where its files are not there whole."""
        self.about = about
        self._in_use = (folder / ABOUT).open("rb")
        share_lock(self._in_use.fileno())  # so that nobody removes it
        n = about.num_tokens
        self.tokens = _mapped(folder / TOKENS, np.dtype(about.dtype), n)
        self.learned = _mapped(folder / LEARNED, np.dtype(np.uint8), n * about.is_dialogues)
        self._ends = _mapped(folder / ENDS, WORD, about.num_documents)
        self._hashes = _mapped(folder / HASHES, WORD, about.num_documents)

    @classmethod
    def load(cls, folder: Path) -> Store:
        """Raises `OSError` or `ValueError`, likewise."""
        try:
            values = json.loads((folder / ABOUT).read_text())
            values["lines"] = tuple(values["lines"])
            values["lengths"] = tuple(values.get("lengths", ()))
            return cls(folder, About(**values))
        except (TypeError, KeyError) as error:
            raise ValueError(str(error)) from None

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin in `tokens`; int64."""
        before = self._ends[np.maximum(documents - 1, 0)].astype(np.int64)
        return np.where(documents == 0, 0, before)

    def end(self, document: int) -> int:
        """Where a document ends in `tokens`."""
        return int(self._ends[document])

    def lengths(self, documents: np.ndarray) -> np.ndarray:
        """Tokens of documents; int64."""
        return self._ends[documents].astype(np.int64) - self.starts(documents)

    def hashes(self, documents: np.ndarray) -> np.ndarray:
        """uint64."""
        return np.asarray(self._hashes[documents])

    def file(self, name: str) -> np.ndarray:
        """The bytes of one of its files; uint8."""
        arrays = {TOKENS: self.tokens, LEARNED: self.learned, ENDS: self._ends}
        return arrays.get(name, self._hashes).view(np.uint8)

    def chunks(self) -> Iterator[np.ndarray]:
        """The numbers of all documents, some at a time."""
        return numbers_to(self.about.num_documents)


def numbers_to(n: int) -> Iterator[np.ndarray]:
    """0 to n - 1, `CHUNK` at a time."""
    for first in range(0, n, CHUNK):
        yield np.arange(first, min(first + CHUNK, n), dtype=np.int64)


class StoreWriter:
    """Writes a store. Files that turn out to be no text are taken back."""

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], end: int | None, dialogues: bool
    ) -> None:
        """`end`: the token after each document of text."""
        self.about = About(str(dtype), is_dialogues=dialogues)
        self._folder = folder
        self._dtype = dtype
        self._end = end
        self._stack = ExitStack()
        names = (TOKENS, LEARNED, ENDS, HASHES)
        self._files: dict[str, BinaryIO] = {
            name: self._stack.enter_context((folder / name).open("w+b")) for name in names
        }
        self.num_documents = self.num_tokens = self.num_learned = self.num_bytes = 0
        self.highest = 0
        self._document = xxhash.xxh3_64()
        self._begun_at = 0
        self._mark = (0, 0, 0, 0)

    def mark(self) -> None:
        """What follows may be taken back, up to here."""
        self._mark = (self.num_documents, self.num_tokens, self.num_learned, self.num_bytes)

    def take_back(self) -> None:
        """Forgets what was written since the mark."""
        self.num_documents, self.num_tokens, self.num_learned, self.num_bytes = self._mark
        for name, size in self._sizes().items():
            self._files[name].seek(size)
            self._files[name].truncate()
        self._document.reset()
        self._begun_at = self.num_tokens

    def write(self, ids: np.ndarray, num_bytes: int, learned: np.ndarray | None = None) -> None:
        """More of a document."""
        if not len(ids):
            return
        self._files[TOKENS].write(np.ascontiguousarray(ids).data)
        self._document.update(np.ascontiguousarray(ids).data)
        if learned is not None:
            self._files[LEARNED].write(learned.data)
            self._document.update(learned.data)
        self.num_tokens += len(ids)
        self.num_learned += len(ids) if learned is None else int(learned.sum())
        self.num_bytes += num_bytes
        self.highest = max(self.highest, int(ids.max()))

    def end_document(self) -> bool:
        """Returns whether there was anything in it."""
        if self.num_tokens == self._begun_at:
            return False
        if self._end is not None and not self.about.is_dialogues:
            self.write(np.asarray([self._end], self._dtype), 0)
        self._files[ENDS].write(np.asarray([self.num_tokens], WORD).data)
        self._files[HASHES].write(np.asarray([self._document.intdigest()], WORD).data)
        self._document.reset()
        self._begun_at = self.num_tokens
        self.num_documents += 1
        return True

    def finish(
        self, left_out: dict[str, int], lines: tuple[str, ...], lengths: tuple[int, ...] = ()
    ) -> About:
        """Completes the store."""
        for file in self._files.values():
            file.flush()
        about = About(
            str(self._dtype),
            self.num_documents,
            self.num_tokens,
            self.num_learned,
            self.num_bytes,
            self.highest,
            self.about.is_dialogues,
            self._fingerprint(),
            left_out,
            lines,
            lengths,
        )
        (self._folder / ABOUT).write_text(json.dumps(asdict(about)))
        return about

    def close(self) -> None:
        self._stack.close()

    def _sizes(self) -> dict[str, int]:
        return {
            TOKENS: self.num_tokens * self._dtype.itemsize,
            LEARNED: self.num_tokens * self.about.is_dialogues,
            ENDS: self.num_documents * WORD.itemsize,
            HASHES: self.num_documents * WORD.itemsize,
        }

    def _fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for name in (ENDS, HASHES):
            self._files[name].seek(0)
            while data := self._files[name].read(CHUNK):
                digest.update(data)
        return digest.hexdigest()


def _mapped(path: Path, dtype: np.dtype[Any], length: int) -> np.ndarray:
    if path.stat().st_size != length * dtype.itemsize:
        raise ValueError(f"{path} is damaged")
    if not length:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(length,))
