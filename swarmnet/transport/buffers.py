"""Memory for what arrives, used again once nobody looks at it.

Fresh memory costs a page fault for every 4 KiB, which for large messages is most of the time spent
receiving. An array handed out may be kept, sliced or wrapped (`numpy.frombuffer`,
`torch.frombuffer`) for as long as anyone likes: each of these holds a reference to it, directly or
through the buffer protocol. So an array to which only the pool refers can have no user, and it
alone is used again. Nothing is to be released by hand (a `memoryview.release()` would break this).
"""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
from numpy.typing import NDArray

POOLED_BYTES = 64 << 10
"""Smaller arrays are not worth the search."""
MAX_POOL_BYTES = 256 << 20
"""Of all arrays that the pool knows, in use or not."""
MAX_TRIES = 8
"""Arrays of the wanted size that are looked at before a fresh one is made."""


class BufferPool:
    """Arrays of bytes by size. For one thread: the event loop's."""

    def __init__(self, max_bytes: int = MAX_POOL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._arrays: dict[int, deque[NDArray[np.uint8]]] = {}
        self.num_bytes = 0
        """Of the arrays that the pool knows."""

    def take(self, num_bytes: int) -> memoryview:
        """Memory of this size, with anything in it."""
        if num_bytes < POOLED_BYTES or num_bytes > self._max_bytes:
            return np.empty(num_bytes, dtype=np.uint8).data
        arrays = self._arrays.setdefault(num_bytes, deque())
        for _ in range(min(MAX_TRIES, len(arrays))):
            arrays.rotate(-1)
            if _is_idle(arrays):
                return arrays[-1].data
        fresh = np.empty(num_bytes, dtype=np.uint8)
        self._make_room(num_bytes)
        arrays.append(fresh)
        self.num_bytes += num_bytes
        return fresh.data

    def _make_room(self, num_bytes: int) -> None:
        """Forgets arrays (the sizes seen first, the oldest first) until there is room for one
        more. Those in use live on without the pool."""
        for size in list(self._arrays):
            arrays = self._arrays[size]
            while arrays and self.num_bytes + num_bytes > self._max_bytes:
                arrays.popleft()
                self.num_bytes -= size
            if not arrays and size != num_bytes:
                del self._arrays[size]


def _is_idle(arrays: deque[NDArray[np.uint8]]) -> bool:
    """Does nobody but the pool refer to the last array?"""
    return sys.getrefcount(arrays[-1]) <= _IDLE_REFERENCES


def _idle_references() -> int:
    """What `getrefcount` says of an array in a deque and nowhere else, on this Python."""
    arrays = deque([np.empty(1, dtype=np.uint8)])
    return sys.getrefcount(arrays[-1])


_IDLE_REFERENCES = _idle_references()
