"""How long a microbatch takes: on the device, estimated from pieces of work of unequal length, and
from its coming to its reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.protocol.timing import SMOOTHING

FORWARD_PART = 1 / 3
BACKWARD_PART = 1 - FORWARD_PART
"""Parts of a microbatch's work. A backward pass is twice a forward pass (2 and 4 FLOP a parameter
and token: Kaplan et al. 2020). Where a stage differs, only estimates from more forward than
backward passes are wrong: in the long run there are as many of both."""
MIN_PIECES = 3
"""Pieces of work before there is an estimate. The first is left out: it warms caches and
compiles."""


@dataclass(slots=True)
class ServiceTime:
    """Device seconds of a microbatch, forward and backward together.

    At the beginning of a round a replica makes many forward passes before the first gradient comes
    back, so what the device has worked between two finished microbatches says little. Each piece
    counts as the part of a microbatch that it is."""

    seconds: float = 0.0
    """The estimate; 0 while unknown."""
    _pieces: int = 0
    _done: float = 0.0
    """Work in the estimate, in microbatches."""
    _mean: float = 0.0
    """A microbatch weighs `SMOOTHING` in it, after the first 1 / `SMOOTHING` ones."""

    def add(self, seconds: float, part: float) -> None:
        """The device worked `seconds` for this part of a microbatch."""
        self._pieces += 1
        if self._pieces == 1 or seconds < 0:
            return
        self._done += part
        weight = max(part / self._done, 1 - (1 - SMOOTHING) ** part)
        self._mean += weight * (seconds / part - self._mean)
        if self._pieces >= MIN_PIECES:
            self.seconds = self._mean


@dataclass(slots=True)
class PassageTime:
    """Seconds that a microbatch is inside a replica, with its way through the stages after it."""

    usual_s: float = 0.0
    """Moving average; 0 while unknown."""

    def add(self, began_at: float, now: float) -> None:
        """One that came then has returned now."""
        took_s = now - began_at
        usual_s = self.usual_s or took_s
        self.usual_s = usual_s + SMOOTHING * (took_s - usual_s)

    def longest_s(self, inside: Iterable[float], now: float) -> float:
        """The usual one, or so far that of the oldest which is inside where that is more; `inside`:
        when those came."""
        return max(self.usual_s, now - min(inside, default=now))
