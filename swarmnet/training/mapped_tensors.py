"""Tensors of safetensors files, read where they lie: a range of elements at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarmnet.errors import SpecError

MAX_HEADER_BYTES = 100 << 20
"""Of a safetensors file, as its own readers have it."""
ITEM_TYPES: dict[str, tuple[str, Any]] = {
    "F32": ("float32", np.dtype("<f4")),
    "BF16": ("bfloat16", np.dtype("<u2")),
    "F16": ("float16", np.dtype("<f2")),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file."""

    name: str
    path: Path
    kind: str
    """A key of `ITEM_TYPES`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the file's beginning."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class MappedFiles:
    """safetensors files, memory-mapped: what is not read takes no memory."""

    def __init__(self) -> None:
        self._maps: dict[Path, np.memmap] = {}

    def read(self, one: Stored, first: int, last: int) -> np.ndarray:
        """Elements [first, last) of a tensor, fp32; a copy. Raises `SpecError`."""
        item = ITEM_TYPES[one.kind][1]
        begin = one.offset + first * item.itemsize
        raw = self._map(one.path)[begin : begin + (last - first) * item.itemsize].view(item)
        if one.kind == "BF16":  # the upper half of an fp32 number
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def _map(self, path: Path) -> np.memmap:
        if path not in self._maps:
            try:
                self._maps[path] = np.memmap(path, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise SpecError(f"cannot read {path}: {error}") from None
        return self._maps[path]


def stored_tensors(path: Path) -> Iterator[Stored]:
    """The tensors of a safetensors file. Raises `SpecError`."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError("no safetensors header")
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            for name, about in table.items():
                begin, end = about["data_offsets"]
                kind, shape = about["dtype"], tuple(about["shape"])
                if kind not in ITEM_TYPES:
                    raise SpecError(f"{path}: {name} is {kind}; weights must be fp32, bf16 or fp16")
                if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
                    raise ValueError(f"{name} has an impossible shape")
                num_bytes = math.prod(shape) * ITEM_TYPES[kind][1].itemsize
                if end - begin != num_bytes or 8 + length + end > size:
                    raise ValueError(f"{name} does not fit into the file")
                yield Stored(name, path, kind, shape, 8 + length + begin)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(f"{path}: {' '.join(str(error).split())[:120]}") from None
