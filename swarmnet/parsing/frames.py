"""What a process and its parsing child say to each other, and the files that both know."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import msgpack

from swarmnet.errors import DataError

T = TypeVar("T")

LENGTH_BYTES = 8
"""Of a frame, before it; little-endian."""
KEPT_SETS = 4
"""Of files, that a child keeps with what it made of them."""
BASE_BYTES = 768 << 20
"""What the child may take, whatever it parses: most is never used."""
BYTES_PER_FILE_BYTE, BYTES_PER_INPUT_BYTE = 16, 256
"""And for each byte of the files, and of what a call brings: a tokenizer.json of 26 MB with 262,000
tokens and 300,000 merges takes 530 MB, and its encodings 150 bytes a token."""
THREAD_BYTES = 8 << 20
"""And for each core: the tokenizer has a thread on it, with its stack."""


class Refusal(DataError):
    """What is parsed is at fault: a text that goes on from its name, which the parent knows."""


class GivenFiles(dict[str, bytes]):
    """Files by name, which are not changed any more; `made` keeps what came of them."""

    @cached_property
    def key(self) -> str:
        """Of names and contents."""
        digest = hashlib.sha256()
        for name, data in sorted(self.items()):
            for part in (name.encode(), data):
                digest.update(len(part).to_bytes(LENGTH_BYTES, "little"))
                digest.update(part)
        return digest.hexdigest()

    @cached_property
    def num_bytes(self) -> int:
        """Of all contents."""
        return sum(map(len, self.values()))

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def made(self, make: Callable[[GivenFiles], T]) -> T:
        """What a function makes of them, once."""
        if make not in self._made:
            self._made[make] = make(self)
        found: T = self._made[make]
        return found


def given(files: Mapping[str, bytes]) -> GivenFiles:
    """The files themselves where they are such already."""
    return files if isinstance(files, GivenFiles) else GivenFiles(files)


class Kept:
    """The sets of files that a child has: both sides count alike, so one knows what the other
    has."""

    def __init__(self) -> None:
        self._sets: OrderedDict[str, GivenFiles] = OrderedDict()

    def use(self, files: GivenFiles | None, key: str = "") -> GivenFiles | None:
        """A set that is used now, given or known by its key; None where it is not known."""
        found = files if files is not None else self._sets.get(key)
        if found is None:
            return None
        self._sets.pop(found.key, None)
        self._sets[found.key] = found
        while len(self._sets) > KEPT_SETS:
            self._sets.popitem(last=False)
        return found

    def __contains__(self, key: str) -> bool:
        return key in self._sets

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(files.num_bytes for files in self._sets.values())


def most_bytes(kept: int, given_bytes: int, cores: int) -> int:
    """What a child may take. `kept`: bytes of its files; `given_bytes`: of a call."""
    files = BYTES_PER_FILE_BYTE * kept
    return BASE_BYTES + files + BYTES_PER_INPUT_BYTE * given_bytes + THREAD_BYTES * cores


def packed(values: Any) -> bytes:
    """A frame's contents. Halves of characters, which JSON can say, go through."""
    found: bytes = msgpack.packb(values, unicode_errors="surrogatepass")
    return found


def unpacked(data: bytes | bytearray) -> Any:
    """Raises `ValueError`."""
    return msgpack.unpackb(
        data, unicode_errors="surrogatepass", strict_map_key=False, use_list=True
    )
