"""When another giver is asked for a piece of a download. Pure.

Nobody can be made to give, and what is slow for one link is fast for another. So a giver is
measured by the others: a piece has as long as several of its size took from the fastest. When that
is over, another giver is asked for it too, and the first to be done counts (Dean and Barroso, "The
Tail at Scale", 2013). What has come stays. A few givers are tried, then those that give fast enough
are asked first, and a giver that was left, or that gave nothing, last, until it gives again.

The first giver of a piece goes on in any case, and those beside it have longer each time: where the
link is slow and all givers are honest, some bytes come twice, and the piece comes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnet.protocol.timing import CONNECT_S, LEAST_S, PATIENCE_S

PARTS_OF_FASTEST = 8
"""Where a giver has given less than one in so many of what the fastest gives in that time, another
one is asked as well. Honest ones that give several pieces at a time, to several, differ by less
(tests/protocol/test_least_rate.py)."""
SMOOTHING_RATE = 0.5
"""Weight of a giver's newest piece in its rate."""
ENOUGH_KNOWN = 3
"""Givers of which each gives a piece before those that are fast are asked for all others. A first
one alone would be the measure of itself."""
MAX_TRIED = 16
"""Givers that are asked in vain before it is left at those that gave."""
MAX_KNOWN = 256
"""Givers that are remembered; of more, those of which was heard longest ago are forgotten."""


@dataclass
class LeastRate:
    """What is known of the givers of one download, or of several of a kind."""

    _rates: dict[str, float] = field(default_factory=dict)
    """Bytes a second, of pieces that came; the newest givers last."""
    _vain: dict[str, int] = field(default_factory=dict)
    """How often each was asked in vain since it gave last."""

    def came(self, giver: str, num_bytes: int, seconds: float) -> None:
        """A piece came, and it was right."""
        rate = num_bytes / max(LEAST_S, seconds)
        before = self._rates.pop(giver, rate)
        self._rates[giver] = before + SMOOTHING_RATE * (rate - before)
        self._vain.pop(giver, None)
        if len(self._rates) > MAX_KNOWN:
            del self._rates[next(iter(self._rates))]

    def in_vain(self, giver: str, *, is_busy: bool = False) -> None:
        """A giver was left for another one that was done before it, or gave nothing of use.
        `is_busy`: it says that others ask for more than it can give, which one that has given may
        say."""
        if is_busy and giver in self._rates:
            return
        self._vain[giver] = self._vain.pop(giver, 0) + 1
        if len(self._vain) > MAX_KNOWN:
            del self._vain[next(iter(self._vain))]

    def in_order(self, givers: Sequence[str]) -> list[str]:
        """These, as they are ordered, but who was asked in vain comes last, by how often."""
        return sorted(givers, key=lambda g: self._vain.get(g, 0))

    def is_left(
        self, giver: str, others: Sequence[str], num_bytes: int = 0, took_s: float = 0.0
    ) -> bool:
        """A piece is asked of one giver at a time, of `giver` for `took_s` seconds now: whether one
        of the others is asked in its place. One that was not asked in vain is, where this one was,
        or takes too long by the measure of those that gave; while nobody has, it is waited for."""
        if all(self._vain.get(g) for g in others):
            return False
        is_measured = self.bytes_per_s > 0
        is_late = is_measured and took_s > self.may_take_s(num_bytes, 1)
        return is_late or bool(self._vain.get(giver))

    def forget(self, giver: str) -> None:
        """It was not right what came of it: how fast that was is no measure of others."""
        self._rates.pop(giver, None)

    def next_of(
        self, givers: Sequence[str], rng: random.Random, *, is_first: bool, prefer: str = ""
    ) -> str:
        """Whom of some givers to ask for a piece now. At first any that were not asked yet, until
        several have shown how fast it comes; then any that give fast enough, or `prefer` of these;
        else those that were asked in vain least often. `is_first`: nobody is asked for that piece
        yet."""
        fast = [g for g in givers if not self._vain.get(g) and self._is_fast(g)]
        new = [g for g in givers if not self._vain.get(g) and g not in self._rates]
        is_known = len(self._rates) >= ENOUGH_KNOWN or len(self._vain) >= MAX_TRIED
        if new and (not fast or (is_first and not is_known)):
            return rng.choice(new)
        if fast:
            return prefer if prefer in fast else rng.choice(fast)
        least = min(self._vain.get(g, 0) for g in givers)
        return rng.choice([g for g in givers if self._vain.get(g, 0) == least])

    def _is_fast(self, giver: str) -> bool:
        return giver in self._rates and self._rates[giver] >= self.bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """The least rate of a giver; 0 where nothing is known yet."""
        return max(self._rates.values(), default=0.0) / PARTS_OF_FASTEST

    def may_take_s(self, num_bytes: int, num_asked: int) -> float:
        """Seconds that the newest of `num_asked` givers may take for a piece before another one is
        asked: each further one has as long again."""
        rate = self.bytes_per_s
        return num_asked * max(CONNECT_S, num_bytes / rate if rate else PATIENCE_S)
