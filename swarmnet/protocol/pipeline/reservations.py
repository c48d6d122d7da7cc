"""Places that a replica keeps for microbatches whose activations are on their way. Pure.

A caller on a slow link asks before it sends (`admit`). What it is granted must not be taken by
others meanwhile, and whoever asks and never comes must not keep others out: a place lasts for
`keep_s`, asking again does not prolong it, one caller has at most so many places at a time, and
one that let a place lapse is only told whether there is room, for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

RESERVED_S = 60.0
"""How long a place is kept."""
DISTRUST_S = 60.0
"""How long nothing is kept for a caller that let a place lapse."""
MAX_DISTRUSTED = 1024
"""Callers that are remembered as such, the newest."""

Key = tuple[int, int]
"""(round, microbatch id)."""


@dataclass(slots=True)
class Reservations:
    """Of one replica."""

    max_per_caller: int
    keep_s: float = RESERVED_S
    _places: dict[tuple[str, Key], float] = field(default_factory=dict)
    """Until when, by caller and microbatch; in the order of their ends."""
    _distrusted: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Until when."""

    def count(self, now: float) -> int:
        """Places that are kept."""
        while self._places:
            place, until = next(iter(self._places.items()))
            if until > now:
                break
            del self._places[place]
            self._distrust(place[0], now)
        return len(self._places)

    def has(self, caller: str, key: Key, now: float) -> bool:
        """Is a place kept for this microbatch of this caller?"""
        self.count(now)
        return (caller, key) in self._places

    def keep(self, caller: str, key: Key, now: float) -> bool:
        """Keeps a place from now on, where the caller may have one more."""
        if self.has(caller, key, now):
            return True
        if self._distrusted.get(caller, now) > now:
            return False
        if sum(name == caller for name, _ in self._places) >= self.max_per_caller:
            return False
        self._places[caller, key] = now + self.keep_s
        return True

    def take(self, caller: str, key: Key, now: float) -> bool:
        """The microbatch is here: True where its place was still kept. One that comes late shows
        that its caller had meant it."""
        kept = self.has(caller, key, now)
        self._places.pop((caller, key), None)
        self._distrusted.pop(caller, None)
        return kept

    def drop_round(self, round_index: int) -> None:
        """Microbatches of this round and of those before it do not come any more."""
        for place in [p for p in self._places if p[1][0] <= round_index]:
            del self._places[place]

    def _distrust(self, caller: str, now: float) -> None:
        self._distrusted[caller] = now + DISTRUST_S
        self._distrusted.move_to_end(caller)
        if len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)
