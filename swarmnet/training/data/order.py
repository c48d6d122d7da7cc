"""The order that a seed gives to documents."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from swarmnet.protocol.slots import round_keys


def seed_of(seed: int, *purpose: object) -> int:
    """A seed of its own for a purpose, below 2^63."""
    text = "|".join(map(str, (seed, *purpose)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Permutation:
    """`protocol.slots.permuted` of many positions at once."""

    def __init__(self, seed: int, size: int, epoch: int = 0) -> None:
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._keys = [np.uint64(key) for key in round_keys(seed, epoch)]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """What stands at positions below `size`; int64."""
        values = self._once(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self.size)):
            values[outside] = self._once(values[outside])
        return values.astype(np.int64)

    def _once(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mixed(right ^ key) & self._mask)
        return left << self._half_bits | right


def mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64, see `protocol.slots`; uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
