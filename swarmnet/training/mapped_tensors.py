"""Tensors of safetensors files, read where they lie: a range of elements at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarmnet.errors import SpecError, one_line

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Of weights, by their names in the files."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file."""

    name: str
    path: Path
    dtype: str
    """One of `DTYPES`' values."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class MappedFiles:
    """safetensors files, memory-mapped: what is not read takes no memory."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def read(self, one: Stored, first: int, last: int) -> Tensor:
        """Elements [first, last) of a tensor, flat fp32; not to be written to. Raises
        `SpecError`."""
        with _one_line(one.path):
            if one.path not in self._files:
                self._files[one.path] = safe_open(one.path, "pt")
            whole: Tensor = self._files[one.path].get_tensor(one.name)
        return whole.view(-1)[first:last].float()


def stored_tensors(path: Path) -> Iterator[Stored]:
    """The tensors of a safetensors file. Raises `SpecError`."""
    with _one_line(path), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            about = file.get_slice(name)
            dtype = DTYPES.get(about.get_dtype())
            if dtype is None:
                raise SpecError(
                    f"{path}: {name} is {about.get_dtype()}; weights must be fp32, bf16 or fp16"
                )
            yield Stored(name, path, dtype, tuple(about.get_shape()))


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise SpecError(f"{path}: {one_line(error, 120)}") from None
