"""Samples of text. Pure: the same index is the same window on every machine.

The text is one long row of tokens: documents in an order that depends on their names only, mixed
so that the held-out end is a sample of all folders and not the end of the alphabet. The last part
of the row is held out. The rest is cut into windows, one after the other; each is a sample, and
`protocol.pipeline.slots` says which samples a microbatch has.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from swarmnet.errors import DataError
from swarmnet.spec import BYTES_TOKENIZER, NUM_BYTE_TOKENS, PYTHON_STDLIB, DataSpec, RunSpec
from swarmnet.swarm.batch import Batch
from swarmnet.training.arrays import from_numpy
from swarmnet.training.custom_data import CustomData
from swarmnet.training.models.registry import model_plan

if TYPE_CHECKING:
    from swarmnet.swarm.ports import Data

MAX_TEXT_BYTES = 16 << 30
"""Text is held in memory; more is refused before it is read."""
TOKENIZE_BATCH = 256
"""Documents that are handed to the tokenizer at once."""
NOT_STDLIB = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


@dataclass(frozen=True, slots=True)
class Document:
    """A file of text. `name`: its path inside the entry of `[data] paths` that it comes from."""

    name: str
    path: Path


class TextData:
    """Windows of text; implements `swarm.ports.Data`.

    Inputs and targets are int32 (samples, sequence length); a target is the token that follows.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        samples_per_microbatch: int,
        sequence_length: int,
        num_train_tokens: int,
        held_out_microbatches: int,
        bytes_per_token: float,
    ) -> None:
        """`tokens`: one row, of any unsigned dtype; the first `num_train_tokens` are trained on."""
        self.samples_per_microbatch = samples_per_microbatch
        self.bytes_per_token = bytes_per_token
        self._train = tokens[:num_train_tokens]
        self._held_out = tokens[num_train_tokens:]
        self._window = np.arange(sequence_length + 1)
        self.num_samples = (num_train_tokens - 1) // sequence_length
        self.num_held_out = 0
        if len(self._held_out):
            fitting = len(self._held_out) // (len(self._window) * samples_per_microbatch)
            self.num_held_out = min(held_out_microbatches, max(fitting, 1))

    @property
    def num_train_tokens(self) -> int:
        return len(self._train)

    @property
    def num_held_out_tokens(self) -> int:
        return len(self._held_out)

    @property
    def fingerprint(self) -> str:
        """xxh3-64 of all tokens, hex: peers with the same one have the same text."""
        digest = xxhash.xxh3_64(np.ascontiguousarray(self._train).data)
        digest.update(np.ascontiguousarray(self._held_out).data)
        return digest.hexdigest()

    def microbatch(self, indices: Sequence[int]) -> Batch:
        length = len(self._window) - 1
        return self._cut(self._train, [i * length for i in indices])

    def held_out(self, index: int) -> Batch:
        """Windows spread evenly over the held-out text; they overlap only where it is short."""
        num_windows = self.num_held_out * self.samples_per_microbatch
        if not 0 <= index < self.num_held_out:
            raise IndexError(f"held-out microbatch {index} of {self.num_held_out}")
        last_start = len(self._held_out) - len(self._window)
        first = index * self.samples_per_microbatch
        starts = [
            (first + i) * last_start // max(num_windows - 1, 1)
            for i in range(self.samples_per_microbatch)
        ]
        return self._cut(self._held_out, starts)

    def _cut(self, tokens: np.ndarray, starts: Sequence[int]) -> Batch:
        windows = tokens[np.asarray(starts, dtype=np.int64)[:, None] + self._window]
        windows = windows.astype(np.int32)
        return Batch(from_numpy(windows[:, :-1]), from_numpy(windows[:, 1:]))


def open_data(
    spec: RunSpec, override_paths: Sequence[str] | None = None, override_tokenizer: str = ""
) -> Data:
    """The microbatches of a run. `override_paths`: where this machine keeps the text;
    `override_tokenizer`: likewise the tokenizer.json.

    Raises:
        DataError: the text cannot be read, is too short, or does not fit the vocabulary.
        SpecError: a custom model cannot be loaded.
    """
    plan = model_plan(spec)
    if plan.data is not None:
        return CustomData(plan.data(spec))
    if plan.inputs.dtype != "int32" or len(plan.inputs.shape) != 1:
        raise DataError("[model] builder: the model does not take text, so its plan must give data")
    tokenizer = override_tokenizer or spec.data.tokenizer
    return open_text(
        spec.data.model_copy(update={"tokenizer": tokenizer}),
        override_paths,
        samples_per_microbatch=spec.pipeline.microbatch,
        sequence_length=plan.inputs.shape[0],
        vocab_size=plan.inputs.num_values,
    )


def open_text(
    spec: DataSpec,
    override_paths: Sequence[str] | None = None,
    *,
    samples_per_microbatch: int,
    sequence_length: int,
    vocab_size: int,
) -> TextData:
    """Reads and tokenizes text. Raises `DataError`."""
    documents = find_documents(override_paths or spec.paths, spec.include)
    texts = [_read(d.path) for d in documents]
    num_bytes = sum(len(text) for text in texts)
    tokens = _tokenize(texts, spec.tokenizer)
    highest = int(tokens.max()) if len(tokens) else 0
    needed = NUM_BYTE_TOKENS if spec.tokenizer == BYTES_TOKENIZER else highest + 1
    if needed > vocab_size:
        raise DataError(
            f"[model] vocab_size ({vocab_size}) is too small for the tokenizer; "
            f"make it at least {needed}"
        )
    num_held_out = _held_out_tokens(len(tokens), spec, sequence_length)
    if len(tokens) - num_held_out < sequence_length + 1:
        raise DataError(
            f"[data] has {len(tokens)} tokens, too few for sequences of {sequence_length}; "
            "add text or shorten max_position_embeddings"
        )
    return TextData(
        tokens,
        samples_per_microbatch=samples_per_microbatch,
        sequence_length=sequence_length,
        num_train_tokens=len(tokens) - num_held_out,
        held_out_microbatches=spec.held_out_microbatches,
        bytes_per_token=num_bytes / max(len(tokens), 1),
    )


def find_documents(paths: Sequence[str], include: Sequence[str]) -> list[Document]:
    """The files behind `[data] paths`, in an order that depends on their names only. Raises
    `DataError` where a path cannot be read or there is no file."""
    if not paths:
        raise DataError("[data] paths is missing; name text files or folders")
    found = [d for path in paths for d in _documents_of(path, include)]
    if not found:
        where, names = ", ".join(paths)[:200], " or ".join(include)
        raise DataError(f"[data] no file in {where} is named {names}")
    size = sum(_size(d.path) for d in found)
    if size > MAX_TEXT_BYTES:
        raise DataError(f"[data] {size >> 30} GiB of text; at most {MAX_TEXT_BYTES >> 30} fit")
    return sorted(found, key=lambda d: (_name_hash(d.name), d.name))


def _documents_of(path_text: str, include: Sequence[str]) -> Iterator[Document]:
    if path_text == PYTHON_STDLIB:
        return _walk(Path(sysconfig.get_path("stdlib")), include, skipped=NOT_STDLIB)
    path = Path(path_text).expanduser()
    if path.is_file():
        return iter([Document(path.name, path)])
    if path.is_dir():
        return _walk(path, include)
    raise DataError(f"[data] cannot read {path}: no such file or folder")


def _walk(root: Path, include: Sequence[str], skipped: Sequence[str] = ()) -> Iterator[Document]:
    def fail(error: OSError) -> None:
        raise _cannot_read(Path(error.filename), error)

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(f for f in folders if f not in skipped)
        for name in sorted(names):
            path = Path(folder, name)
            if any(fnmatch(name, glob) for glob in include) and path.is_file():
                yield Document(path.relative_to(root).as_posix(), path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _cannot_read(path, error) from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _cannot_read(path, error) from None


def _cannot_read(path: Path, error: OSError) -> DataError:
    return DataError(f"[data] cannot read {path}: {error.strerror or error}")


def _tokenize(texts: list[bytes], tokenizer: str) -> np.ndarray:
    """All documents as one row of tokens, in the smallest dtype that holds them."""
    if tokenizer == BYTES_TOKENIZER:
        return np.frombuffer(b"".join(texts), dtype=np.uint8)
    from tokenizers import Tokenizer  # slow to import, and not needed for bytes

    if not Path(tokenizer).is_file():
        raise DataError(f"[data] tokenizer: cannot read {tokenizer}: no such file")
    try:
        encoder = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the library raises bare Exception
        message = " ".join(str(error).split())[:200]
        raise DataError(f"[data] tokenizer {tokenizer} is no tokenizer.json: {message}") from None
    dtype = np.uint16 if encoder.get_vocab_size() <= 1 << 16 else np.uint32
    rows = [np.empty(0, dtype)]
    for first in range(0, len(texts), TOKENIZE_BATCH):
        batch = [t.decode(errors="replace") for t in texts[first : first + TOKENIZE_BATCH]]
        for encoding in encoder.encode_batch(batch, add_special_tokens=False):
            rows.append(np.asarray(encoding.ids, dtype=dtype))
    return np.concatenate(rows)


def _held_out_tokens(num_tokens: int, spec: DataSpec, sequence_length: int) -> int:
    """The held-out part of the row; at least one window where anything is held out at all."""
    if spec.held_out_fraction == 0 or spec.held_out_microbatches == 0:
        return 0
    return max(math.ceil(num_tokens * spec.held_out_fraction), sequence_length + 1)


def _name_hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
