"""The tokens of a run's data, as they come from other peers; implements `ports.ComingData`.

They lie in the cache, in a folder for the run's fingerprint: a store for each source, and
`sizes.json`. Nothing is believed of whoever gives them:

1. the sources' fingerprints are those of which the run's fingerprint is the hash;
2. a source's `ends` and `hashes` come first, and its fingerprint is their hash. They say how many
   tokens there are, and what the hash of each document is: until then only they are taken, by the
   word of those that give;
3. tokens come in their order, and each document is hashed as soon as it is whole.

So a giver of other tokens is known after one part, or one document. What several peers gave, or was
on the disk, may be anybody's fault: it is dropped, and from then on a document is of one peer.

The hashes (xxh3) find faults and liars that make no effort. Two documents of the same hash can be
made on purpose; whoever does so could as well feed what he likes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from swarmnet.errors import DataError, ProtocolViolation
from swarmnet.ports import DATA_PART_BYTES, SourceSize, WantedPart
from swarmnet.spec import RunSpec, SourceSpec
from swarmnet.system import try_lock
from swarmnet.training.data.cache import SIZES, usable_root
from swarmnet.training.data.encoding import Encoder
from swarmnet.training.data.opening import Place, encoder_of, text_of
from swarmnet.training.data.store import (
    ABOUT,
    CHUNK,
    ENDS,
    HASHES,
    LEARNED,
    TOKENS,
    WORD,
    About,
    Store,
)
from swarmnet.training.data.text_data import TextData, fingerprint_of
from swarmnet.training.models.registry import model_plan

UNASKED_BYTES = 2 << 30
"""More than this is fetched only with `--fetch-data`."""
UNASKED_INDEX_BYTES = 256 << 20
"""Of that, the lists of documents: until they are there, nothing shows that there is so much."""
SPARE_BYTES = 1 << 30
"""That stay free on the disk."""
MAX_BYTES_PER_TOKEN = 1024
"""Of text: what a giver may say."""
UNKNOWN = ""
"""Who gave what an earlier process has left."""


class ComingText:
    """Of one run."""

    def __init__(self, spec: RunSpec, place: Place, part_bytes: int = DATA_PART_BYTES) -> None:
        """`place`: with the run's tokenizer, where that is no `bytes`."""
        self._spec = spec
        self._place = place
        self._part_bytes = part_bytes
        self._stores: list[ComingStore] = []
        self._lock: IO[str] | None = None

    @cached_property
    def _encoder(self) -> Encoder:
        return encoder_of(self._spec, self._place)

    @cached_property
    def _folder(self) -> Path:
        return usable_root() / f"run-{self._spec.data.fingerprint}"

    def open_if_whole(self) -> TextData | None:
        """As the port says."""
        try:
            stores = [Store.load(self._folder / str(k)) for k in range(len(self._known_sizes()))]
        except (OSError, ValueError):
            return None
        prints = [store.about.fingerprint for store in stores]
        if fingerprint_of(prints) != self._spec.data.fingerprint:
            return None
        (self._folder / SIZES).touch()  # in use
        return self._opened(stores)

    def begin(self, sizes: Sequence[SourceSize], *, unasked: bool) -> bool:
        """As the port says."""
        sources = self._spec.data.sources
        if len(sizes) != len(sources):
            raise ProtocolViolation("data of another number of sources than the run's")
        if fingerprint_of([size.fingerprint for size in sizes]) != self._spec.data.fingerprint:
            raise ProtocolViolation("data of another fingerprint than the run's")
        if any(size.num_bytes > MAX_BYTES_PER_TOKEN * size.num_tokens for size in sizes):
            raise ProtocolViolation("more text than there can be behind the tokens")
        if self._stores and all(store.is_known for store in self._stores):
            if any(
                (store.size.num_documents, store.size.num_tokens)
                != (size.num_documents, size.num_tokens)
                for store, size in zip(self._stores, sizes, strict=True)
            ):
                raise ProtocolViolation("data of another size than the run's")
            return True
        whole = sum(
            sum(file_sizes(size, self._encoder, source).values())
            for size, source in zip(sizes, sources, strict=True)
        )
        index = sum(2 * WORD.itemsize * size.num_documents for size in sizes)
        if unasked and (whole > UNASKED_BYTES or index > UNASKED_INDEX_BYTES):
            raise DataError(
                f"the run's data are {whole / 1e9:.1f} GB as tokens; --fetch-data fetches them"
            )
        try:
            return self._begin(sizes, whole)
        except OSError as error:
            raise self._disk_error(error) from None

    def wanted(self, giver: str) -> WantedPart | None:
        """As the port says."""
        # The lists of documents first: they show how much there is.
        order = sorted(range(len(self._stores)), key=lambda k: (self._stores[k].is_known, k))
        for k in order:
            if (found := self._stores[k].wanted(giver)) is not None:
                name, offset, length = found
                length = min(length, self._part_bytes)
                return WantedPart(k, name.removesuffix(".bin"), offset, length)
        return None

    def take(self, giver: str, part: WantedPart, data: bytes) -> None:
        """As the port says."""
        if not 0 < len(data) <= part.length:
            raise ProtocolViolation("a part of data that is too long or empty")
        store = self._stores[part.source]
        was_known = store.is_known
        try:
            store.take(giver, f"{part.file}.bin", part.offset, data)
            if not was_known and all(store.is_known for store in self._stores):
                sizes = [asdict(store.size) for store in self._stores]
                (self._folder / SIZES).write_text(json.dumps(sizes))
        except OSError as error:
            raise self._disk_error(error) from None

    def finish(self) -> TextData:
        """As the port says."""
        try:
            stores = [store.finish() for store in self._stores]
        except OSError as error:
            raise self._disk_error(error) from None
        if self._lock is not None:
            self._lock.close()
        return self._opened(stores)

    def _known_sizes(self) -> list[SourceSize]:
        """Of the run's data, where the lists of all documents have come before; none else."""
        try:
            values = json.loads((self._folder / SIZES).read_text())
            sizes = [SourceSize(**value) for value in values]
        except (OSError, ValueError, TypeError):
            return []
        is_right = fingerprint_of([s.fingerprint for s in sizes]) == self._spec.data.fingerprint
        return sizes if is_right else []

    def _begin(self, sizes: Sequence[SourceSize], whole: int) -> bool:
        self._folder.mkdir(exist_ok=True)
        if self._lock is None:
            lock = self._folder.with_suffix(".lock").open("w")
            if not try_lock(lock.fileno()):
                lock.close()
                return False
            self._lock = lock
        sizes = self._known_sizes() or sizes
        self._stores = [
            ComingStore(self._folder / str(k), size, self._encoder, source)
            for k, (size, source) in enumerate(zip(sizes, self._spec.data.sources, strict=True))
        ]
        missing = whole - sum(store.num_here for store in self._stores)
        free = shutil.disk_usage(self._folder).free
        if missing > free - SPARE_BYTES:
            raise DataError(
                f"no room for the run's data: {missing / 1e9:.1f} GB are to come, and of the "
                f"{free / 1e9:.1f} GB free in {self._folder.parent} 1 GB stays free"
            )
        return True

    def _opened(self, stores: Sequence[Store]) -> TextData:
        plan, sources = model_plan(self._spec), self._spec.data.sources
        return text_of(
            self._spec,
            self._encoder,
            list(zip(sources, stores, strict=True)),
            len(sources),
            sequence_length=plan.inputs.shape[0],
            vocab_size=plan.inputs.num_values,
        )

    def _disk_error(self, error: OSError) -> DataError:
        return DataError(f"[data] cannot write into {self._folder}: {error.strerror or error}")


def file_sizes(size: SourceSize, encoder: Encoder, source: SourceSpec) -> dict[str, int]:
    """Bytes of a store's files, in the order in which they come."""
    return {
        ENDS: size.num_documents * WORD.itemsize,
        HASHES: size.num_documents * WORD.itemsize,
        TOKENS: size.num_tokens * encoder.dtype.itemsize,
        LEARNED: size.num_tokens * bool(source.messages_field),
    }


class ComingStore:
    """A store that comes in parts. What is on the disk is taken up again."""

    def __init__(
        self, folder: Path, size: SourceSize, encoder: Encoder, source: SourceSpec
    ) -> None:
        """Raises `OSError`."""
        self.size = size
        self._folder = folder
        self._encoder = encoder
        self._is_dialogues = bool(source.messages_field)
        self._sizes = file_sizes(size, encoder, source)
        self._givers: set[str] = set()
        """Of what is not checked yet."""
        self._alone = False
        """What is checked together must be of one peer."""
        self._ends: np.ndarray | None = None
        self._hashes = np.empty(0, WORD)
        self._num_checked = 0
        """Documents."""
        folder.mkdir(exist_ok=True)
        for name, most in self._sizes.items():
            path = folder / name
            path.touch()
            if path.stat().st_size > most:
                path.write_bytes(b"")
        if self.num_here:
            self._givers.add(UNKNOWN)
            self._check(UNKNOWN)

    @property
    def is_known(self) -> bool:
        """What documents there are: the list of them is the run's."""
        return self._ends is not None

    @property
    def num_here(self) -> int:
        """Bytes."""
        return sum(self._have(name) for name in self._sizes)

    def wanted(self, giver: str) -> tuple[str, int, int] | None:
        """File, offset and length of what is to come next; None where all is here."""
        if self._alone and self._givers - {giver}:
            self._drop()
        for name in (ENDS, HASHES):
            if left := self._sizes[name] - self._have(name):
                return name, self._have(name), left
        tokens, learned = self._have(TOKENS), self._have(LEARNED)
        if self._is_dialogues and (left := tokens // self._encoder.dtype.itemsize - learned) > 0:
            return LEARNED, learned, left
        if left := self._sizes[TOKENS] - tokens:
            return TOKENS, tokens, left
        return None

    def take(self, giver: str, name: str, offset: int, data: bytes) -> None:
        """Keeps a piece, and checks what is whole. Raises `OSError` or `ProtocolViolation`."""
        if offset != self._have(name) or offset + len(data) > self._sizes[name]:
            return  # dropped meanwhile
        self._givers.add(giver)
        with (self._folder / name).open("ab") as file:
            file.write(data)
        self._check(giver)

    def finish(self) -> Store:
        """Completes the store. Raises `OSError`."""
        tokens = np.memmap(self._folder / TOKENS, self._encoder.dtype, mode="r")
        highest = max(int(tokens[i : i + CHUNK].max()) for i in range(0, len(tokens), CHUNK))
        num_learned = self.size.num_tokens
        if self._is_dialogues:
            learned = np.memmap(self._folder / LEARNED, np.uint8, mode="r")
            num_learned = int(learned.sum(dtype=np.int64))
        about = About(
            str(self._encoder.dtype),
            self.size.num_documents,
            self.size.num_tokens,
            num_learned,
            self.size.num_bytes,
            highest,
            self._is_dialogues,
            self.size.fingerprint,
        )
        (self._folder / ABOUT).write_text(json.dumps(asdict(about)))
        return Store.load(self._folder)

    # ---- checks -----------------------------------------------------------------------------

    def _have(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def _check(self, giver: str) -> None:
        """Everything that is whole and was not checked. `giver`: of the last piece."""
        if self._ends is None:
            if any(self._have(name) < self._sizes[name] for name in (ENDS, HASHES)):
                return
            if not self._take_index():
                self._fault("its list of documents is not that of the run's data")
                return
            self._givers.discard(giver)
            if self._givers:  # what follows, where an earlier process has left it
                self._givers = {UNKNOWN}
        self._check_documents(giver)

    def _take_index(self) -> bool:
        """Whether the list of documents is right."""
        ends, hashes = (
            np.asarray(np.memmap(self._folder / name, WORD, mode="r")) for name in (ENDS, HASHES)
        )
        digest = xxhash.xxh3_128()
        for words in (ends, hashes):
            for start in range(0, len(words), CHUNK):
                digest.update(words[start : start + CHUNK].data)
        if digest.hexdigest() != self.size.fingerprint or int(ends[-1]) != self.size.num_tokens:
            return False
        for start in range(0, len(ends), CHUNK):
            some = ends[start : start + CHUNK + 1]
            if (some[1:] <= some[:-1]).any():
                return False
        self._ends = ends
        self._hashes = hashes
        return True

    def _check_documents(self, giver: str) -> None:
        """Those that are whole."""
        assert self._ends is not None
        here = self._have(TOKENS) // self._encoder.dtype.itemsize
        if self._is_dialogues:
            here = min(here, self._have(LEARNED))
        num_whole = int(np.searchsorted(self._ends, here, side="right"))
        if num_whole == self._num_checked:
            return
        tokens = np.memmap(self._folder / TOKENS, self._encoder.dtype, mode="r")
        learned = None
        if self._is_dialogues:
            learned = np.memmap(self._folder / LEARNED, np.uint8, mode="r")
        start = self._checked_tokens
        for document in range(self._num_checked, num_whole):
            end = int(self._ends[document])
            digest = xxhash.xxh3_64(tokens[start:end].data)
            if learned is not None:
                digest.update(learned[start:end].data)
            if digest.intdigest() != int(self._hashes[document]):
                self._fault(f"its document {document} is not that of the run's data")
                return
            self._num_checked, start = document + 1, end
        if not self._is_dialogues:  # all that is left came with the last piece
            self._givers = {giver}

    @property
    def _checked_tokens(self) -> int:
        if self._ends is None or not self._num_checked:
            return 0
        return int(self._ends[self._num_checked - 1])

    def _fault(self, what: str) -> None:
        """Drops what was not checked. Raises `ProtocolViolation` where it is of one peer."""
        is_known = len(self._givers) == 1 and UNKNOWN not in self._givers
        self._alone = True
        self._drop()
        if is_known:
            raise ProtocolViolation(what)

    def _drop(self) -> None:
        """What was not checked."""
        self._givers.clear()
        kept = self._checked_tokens
        lengths = {TOKENS: kept * self._encoder.dtype.itemsize, LEARNED: kept}
        if self._ends is None:
            lengths = dict.fromkeys(self._sizes, 0)
        for name, length in lengths.items():
            if self._have(name) > length:
                with (self._folder / name).open("r+b") as file:
                    file.truncate(length)
