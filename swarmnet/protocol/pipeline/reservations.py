"""Places that a replica keeps for microbatches whose activations are on their way. Pure.

A caller on a slow link asks before it sends (`admit`). Other callers must not take its place
meanwhile, and a caller that asks and never sends must not keep others out. So a place lasts for
`keep_s` seconds, asking again does not prolong it, and the number of places of one caller is
limited. A caller that let a place lapse gets no place for a while; it is only told whether there is
room.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from swarmnet.protocol.timing import UPKEEP_S

RESERVED_S = DISTRUST_S = UPKEEP_S
"""How long a place is kept, and how long a caller that let one lapse gets none."""
MAX_DISTRUSTED = 1024
"""Callers remembered as distrusted at most, the newest."""

Key = tuple[int, int]
"""(round, microbatch id)."""


@dataclass(slots=True)
class Reservations:
    """The places of one replica."""

    max_per_caller: int
    keep_s: float = RESERVED_S
    _places: dict[tuple[str, Key], float] = field(default_factory=dict)
    """End of each place, by caller and microbatch; in the order of these ends."""
    _distrusted: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Time until which a caller gets no place."""

    def count(self, now: float) -> int:
        """The number of places that are kept now."""
        while self._places:
            place, until = next(iter(self._places.items()))
            if until > now:
                break
            del self._places[place]
            self._distrust(place[0], now)
        return len(self._places)

    def has(self, caller: str, key: Key, now: float) -> bool:
        """Whether a place is kept for this microbatch of this caller."""
        self.count(now)
        return (caller, key) in self._places

    def keep(self, caller: str, key: Key, now: float) -> bool:
        """Keeps a place from now on; False where the caller may not have one more."""
        if self.has(caller, key, now):
            return True
        if self._distrusted.get(caller, now) > now:
            return False
        if sum(name == caller for name, _ in self._places) >= self.max_per_caller:
            return False
        self._places[caller, key] = now + self.keep_s
        return True

    def take(self, caller: str, key: Key, now: float) -> bool:
        """The microbatch has arrived. Returns True where its place was still kept. A late one shows
        that its caller had meant it, and ends the distrust."""
        kept = self.has(caller, key, now)
        self._places.pop((caller, key), None)
        self._distrusted.pop(caller, None)
        return kept

    def drop_round(self, round_index: int) -> None:
        """Microbatches of this round and of earlier ones will not arrive any more."""
        for place in [p for p in self._places if p[1][0] <= round_index]:
            del self._places[place]

    def _distrust(self, caller: str, now: float) -> None:
        self._distrusted[caller] = now + DISTRUST_S
        self._distrusted.move_to_end(caller)
        if len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)
