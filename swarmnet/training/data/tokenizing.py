"""From the files of a source to a store of tokens, as a stream."""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnet.errors import DataError
from swarmnet.plurals import counted
from swarmnet.spec import SourceSpec
from swarmnet.training.data.bad_records import BadRecord, BadRecords
from swarmnet.training.data.encoding import Dialogue, Encoder, FileEncoder
from swarmnet.training.data.files import FoundFile
from swarmnet.training.data.formats import NotText
from swarmnet.training.data.readers import Piece, Reader
from swarmnet.training.data.store import StoreWriter
from swarmnet.training.data.tokenizer import NOTHING_SAID, TOO_LONG

log = logging.getLogger("swarmnet.data")

BATCH_BYTES, BATCH_PIECES = 1 << 20, 1024
"""That the tokenizer gets at once: its threads share them."""
DIALOGUES = 128
"""Likewise."""
CUT = "cut at a turn"
PERCENTILES = (50, 95, 100)
SHOWN_NAMES = 5
TELL_EVERY_S = 5.0


@dataclass
class Progress:
    """Says how far it is, where it takes long."""

    name: str
    num_files: int
    file: int = 0
    num_bytes: int = 0
    started: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def add(self, num_bytes: int) -> None:
        """More text was read."""
        self.num_bytes += num_bytes
        now = time.monotonic()
        if now - self.told < TELL_EVERY_S:
            return
        self.told = now
        mb, seconds = self.num_bytes / 1e6, now - self.started
        log.warning(
            "tokenizing %s: file %d of %d, %.0f MB of text, %.1f MB/s",
            self.name,
            self.file,
            self.num_files,
            mb,
            mb / seconds,
        )


class Tokenizing:
    """Of one source. `longest`: tokens of a sample, where the source has dialogues; else 0."""

    def __init__(
        self,
        source: SourceSpec,
        encoder: Encoder,
        writer: StoreWriter,
        longest: int = 0,
    ) -> None:
        self._source = source
        self._encoder = encoder
        self._writer = writer
        self._longest = longest
        self._left_out: Counter[str] = Counter()
        self._bad = BadRecords(settle=self._render)
        self._lengths = array("Q")
        """Tokens of each dialogue, before it was cut."""
        self._batch: list[Piece | Dialogue] = []
        self._batch_bytes = 0
        self._asked: list[Piece] = []
        """Dialogues of the present file that the chat template is yet to write."""
        self._asked_bytes = 0
        self._file_begins: int | None = 0
        """Where in the batch the pieces of the present file begin; None where some are written."""

    def run(self, files: Sequence[FoundFile]) -> None:
        """Writes the store. Raises `DataError`."""
        progress = Progress(self._source.name, len(files))
        reader = Reader(self._source, self._left_out, self._bad, progress.add)
        refused: list[tuple[Path, str]] = []
        for progress.file, file in enumerate(files, 1):
            self._file_begins = len(self._batch)
            try:
                for piece in reader.read(file.path):
                    self._add(piece)
            except NotText as error:
                if file.is_named:
                    raise
                self._take_back()
                refused.append((file.path, str(error)))
        self._flush()
        lines = (
            *((_refused_line(refused),) if refused else ()),
            *self._bad.lines,
            *self._lines_of_dialogues(),
        )
        left_out = {
            **(self._left_out + self._bad.kinds),
            **({"files": len(refused)} if refused else {}),
        }
        if not self._writer.num_documents:
            reasons = ", ".join(f"{n} {why}" for why, n in left_out.items() if why != "files")
            raise DataError("; ".join(filter(None, ("[data] has no text at all", reasons, *lines))))
        self._writer.finish(left_out, lines, percentiles(self._lengths))

    def _lines_of_dialogues(self) -> tuple[str, ...]:
        """What was lost of those that are longer than a sample."""
        cut, dropped = self._left_out[CUT], self._left_out[TOO_LONG]
        if not cut + dropped:
            return ()
        _, most, longest = percentiles(self._lengths)
        return (
            f"[data] of {counted(len(self._lengths), 'dialogue', ',')} {cut + dropped:,} "
            f"{'is' if cut + dropped == 1 else 'are'} longer than a sample of "
            f"{counted(self._longest, 'token', ',')} ([data] sequence_length): {cut:,} cut after a "
            f"turn, {dropped:,} left out; 95 % have at most {counted(most, 'token', ',')}, the "
            f"longest {longest:,}",
        )

    def _add(self, piece: Piece) -> None:
        if piece.messages is not None:
            self._asked.append(piece)
            self._asked_bytes += size_of(piece.messages)
            if self._asked_bytes >= BATCH_BYTES or len(self._asked) >= DIALOGUES:
                self._render()
            return
        self._batch.append(piece)
        self._batch_bytes += len(piece.text)
        if self._batch_bytes >= BATCH_BYTES or len(self._batch) >= BATCH_PIECES:
            self._flush()

    def _render(self) -> None:
        """Dialogues as tokens, many at once: another process makes them."""
        asked, self._asked, self._asked_bytes = self._asked, [], 0
        if not asked:
            return
        assert isinstance(self._encoder, FileEncoder)
        for found in self._encoder.encode_dialogues(asked, self._longest):
            if isinstance(found, BadRecord):
                self._bad.add(found)
            else:
                self._batch.append(found)
        if len(self._batch) >= DIALOGUES:
            self._flush()

    def _take_back(self) -> None:
        """Nothing of the present file stays."""
        self._asked, self._asked_bytes = [], 0
        if self._file_begins is None:
            self._batch.clear()
            self._writer.take_back()
        else:
            del self._batch[self._file_begins :]
        self._batch_bytes = sum(len(p.text) for p in self._batch if isinstance(p, Piece))

    def _flush(self) -> None:
        begins = self._file_begins
        if begins == 0:
            self._writer.mark()
        write = self._write_dialogues if self._longest else self._write_texts
        write(self._batch[:begins] if begins else self._batch)
        if begins:
            self._writer.mark()
            write(self._batch[begins:])
        self._file_begins = None
        self._batch.clear()
        self._batch_bytes = 0

    def _write_texts(self, batch: Sequence[Any]) -> None:
        """`batch`: of `Piece`."""
        encoded = self._encoder.encode([piece.text for piece in batch])
        for piece, ids in zip(batch, encoded, strict=True):
            self._writer.write(ids, len(piece.text))
            if piece.ends and not self._writer.end_document():
                self._left_out["empty"] += 1

    def _write_dialogues(self, batch: Sequence[Any]) -> None:
        """`batch`: of `Dialogue`."""
        for found in batch:
            if found.left_out != NOTHING_SAID:
                self._lengths.append(found.length)
            if found.left_out:
                self._left_out[found.left_out] += 1
                continue
            if found.is_cut:
                self._left_out[CUT] += 1
            self._writer.write(found.ids, found.num_bytes, found.learned)
            self._writer.end_document()


def size_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """About the characters of a dialogue."""
    return sum(len(str(value)) for message in messages for value in message.values())


def percentiles(lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths that `PERCENTILES` of all are no longer than; none where there are no lengths."""
    ordered = sorted(lengths)
    return tuple(ordered[math.ceil(len(ordered) * p / 100) - 1] for p in PERCENTILES if ordered)


def _refused_line(refused: Sequence[tuple[Path, str]]) -> str:
    """Which files of folders were left out, and why the first was."""
    names = ", ".join(path.name for path, _ in refused[:SHOWN_NAMES])
    more = ", ..." if len(refused) > SHOWN_NAMES else ""
    files = counted(len(refused), "file")
    return f"[data] {files} left out: {names}{more} (the first: {refused[0][1][:300]})"
