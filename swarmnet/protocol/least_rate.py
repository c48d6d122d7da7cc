"""When another giver is asked for a piece of a download. Pure.

Nobody can be made to give, and what is slow for one link is fast for another. So a giver is
measured by the others: a piece has as long as several of its size took from the fastest. When that
is over, another giver is asked for it too, and the first to be done counts (Dean and Barroso, "The
Tail at Scale", 2013). What has come stays. Those that have given are asked first, and a giver that
was left, or that gave nothing, last, until it gives again.

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

    def in_vain(self, giver: str) -> None:
        """A giver was left for another one that was done before it, or gave nothing of use."""
        self._vain[giver] = self._vain.pop(giver, 0) + 1
        if len(self._vain) > MAX_KNOWN:
            del self._vain[next(iter(self._vain))]

    def next_of(self, givers: Sequence[str], rng: random.Random, prefer: str = "") -> str:
        """Whom of some givers to ask for a piece now: any of those that have given, then of those
        that were not asked, or in vain since they gave, and so on. `prefer`: this one, unless it
        was asked in vain."""
        if prefer in givers and not self._vain.get(prefer):
            return prefer
        ranks = [self._vain.get(g, 0) - (g in self._rates) for g in givers]
        least = min(ranks)
        return rng.choice([g for g, rank in zip(givers, ranks, strict=True) if rank == least])

    @property
    def bytes_per_s(self) -> float:
        """The least rate of a giver; 0 where nothing is known yet."""
        return max(self._rates.values(), default=0.0) / PARTS_OF_FASTEST

    def may_take_s(self, num_bytes: int, num_asked: int) -> float:
        """Seconds that the newest of `num_asked` givers may take for a piece before another one is
        asked: each further one has as long again."""
        rate = self.bytes_per_s
        return num_asked * max(CONNECT_S, num_bytes / rate if rate else PATIENCE_S)
