"""Memory that several processes map. It has no name and ends with them."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from swarmnet.system import anonymous_file
from swarmnet.wire import Array

ALIGNED = 64
"""Arrays begin at multiples of so many bytes."""


class SharedFloats:
    """fp32 zeros that several processes see."""

    def __init__(self, num_elements: int, fd: int | None = None) -> None:
        """`fd`: of the same memory in another process; it is closed here. Where it is made here it
        stays open as long as this, for others."""
        num_bytes = max(4 * num_elements, mmap.PAGESIZE)
        self.fd = anonymous_file("swarmnet") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, num_bytes)
            weakref.finalize(self, os.close, self.fd)
        self._map = mmap.mmap(self.fd, num_bytes)
        self.values = torch.frombuffer(self._map, dtype=torch.float32, count=num_elements)
        if fd is not None:  # the memory stays as long as it is mapped anywhere
            os.close(fd)


class Tray:
    """Arrays from one process to another, one load at a time, either way. Grows with them."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: of the same tray in another process, which is this one's from now on."""
        self.fd = anonymous_file("swarmnet") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, mmap.PAGESIZE)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)

    def put(self, arrays: Sequence[Array]) -> list[list[Any]]:
        """Lays arrays down, in place of others; returns what `take` needs."""
        places = list[list[Any]]()
        end = 0
        for array in arrays:
            places.append([array.dtype, list(array.shape), end])
            end += -(-array.num_bytes // ALIGNED) * ALIGNED
        if end > len(self._map):
            os.ftruncate(self.fd, end)
            self._fit()
        for array, (_, _, start) in zip(arrays, places, strict=True):
            self._map[start : start + array.num_bytes] = memoryview(array.data).cast("B")
        return places

    def take(self, places: Sequence[Sequence[Any]]) -> list[Array]:
        """The arrays that were laid down; copies."""
        found = []
        for dtype, shape, start in places:
            array = Array(dtype, tuple(shape), b"")
            end = start + array.num_bytes
            if end > len(self._map):
                self._fit()
            found.append(Array(dtype, array.shape, bytearray(memoryview(self._map)[start:end])))
        return found

    def close(self) -> None:
        """At this process's end. Idempotent."""
        self._map.close()
        self._close()

    def _fit(self) -> None:
        """Maps all that there is by now."""
        self._map.close()
        self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
