"""Which peers are silent or suspected, by the times at which their stamps advanced here.

The suspicion of a stamp, and its refutation by a higher one, are those of SWIM (Das, Gupta and
Motivala 2002)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from swarmnet.protocol.membership.records import NO_STAMP, Stamp

SILENCE_S = 10.0
"""A peer whose stamp has not advanced for this long is silent."""
MAX_SUSPICIONS = 256
"""Suspicions told to others at once, the newest."""


class FailureDetector:
    """Of all peers in one view. Times are seconds of the caller's clock. The own peer never finds
    itself silent. A caller that remembers answers has to forget them after each change here."""

    def __init__(self, own_peer_id: str, silence_s: float = SILENCE_S) -> None:
        self._own_peer_id = own_peer_id
        self.silence_s = silence_s
        """A peer whose stamp has not advanced for this long is silent."""
        self._heard_at: dict[str, float] = {}
        self._suspected: dict[str, Stamp] = {}
        """The oldest suspicion first."""
        self._suspected_at: dict[str, float] = {}

    def heard(self, peer_id: str, stamp: Stamp, now: float) -> None:
        """The stamp of a peer has advanced. A suspicion of a lower stamp is refuted."""
        self._heard_at[peer_id] = now
        if self._suspected and self._suspected.get(peer_id, stamp) < stamp:
            del self._suspected[peer_id], self._suspected_at[peer_id]

    def suspect(self, peer_id: str, stamp: Stamp, now: float) -> bool:
        """Takes in a suspicion. Returns False where one of this stamp, or of a higher one, is in
        force already."""
        if stamp <= self._suspected.get(peer_id, NO_STAMP):
            return False
        self._suspected.pop(peer_id, None)  # so that the newest suspicion is the last
        self._suspected[peer_id] = stamp
        self._suspected_at.setdefault(peer_id, now)
        return True

    def forget(self, peer_id: str) -> None:
        """The peer is no longer in the view."""
        self._heard_at.pop(peer_id, None)
        self._suspected.pop(peer_id, None)
        self._suspected_at.pop(peer_id, None)

    def stood_still(self, seconds: float, now: float) -> None:
        """The own process did not run for so long, and could not hear of any peer meanwhile."""
        for peer_id, at in self._heard_at.items():
            self._heard_at[peer_id] = min(now, at + seconds)
        for peer_id, at in self._suspected_at.items():
            self._suspected_at[peer_id] = min(now, at + seconds)

    # -- answers ---------------------------------------------------------------------------

    def suspicions(self) -> list[tuple[str, Stamp]]:
        """The suspicions in force (the newest `MAX_SUSPICIONS`), by peer id."""
        newest = list(self._suspected.items())[-MAX_SUSPICIONS:]
        return sorted(newest)

    def is_suspected(self, peer_id: str) -> bool:
        """True while a suspicion of this peer is in force."""
        return peer_id in self._suspected

    def is_sound(self, peer_id: str, now: float) -> bool:
        """Neither suspected nor silent, or the own peer; False for an unknown one."""
        if peer_id == self._own_peer_id:
            return True
        return peer_id not in self._suspected and self.heard_at(peer_id) >= now - self.silence_s

    def sound(self, peer_ids: Iterable[str], now: float) -> list[str]:
        """The peers among these for which `is_sound` holds, in the same order. All are known."""
        heard_at, suspected, own = self._heard_at, self._suspected, self._own_peer_id
        since = now - self.silence_s
        return [  # without a call for each: the hot path of a swarm
            p for p in peer_ids if (heard_at[p] >= since and p not in suspected) or p == own
        ]

    def heard_at(self, peer_id: str) -> float:
        """When the stamp of a peer advanced; minus infinity for an unknown peer."""
        return self._heard_at.get(peer_id, -math.inf)

    def silent_s(self, peer_id: str, now: float) -> float:
        """Seconds since the stamp of a peer advanced; infinity for an unknown peer."""
        return now - self.heard_at(peer_id)

    def gone_s(self, peer_id: str, now: float) -> float:
        """Seconds since a peer fell silent or was suspected; 0 for a sound peer, infinity for an
        unknown one."""
        if self.is_sound(peer_id, now):
            return 0.0
        silent_from = self.heard_at(peer_id) + self.silence_s
        return now - min(silent_from, self._suspected_at.get(peer_id, silent_from))

    def next_silence_at(self, peer_ids: Iterable[str], now: float) -> float:
        """No peer of these that is not silent now becomes silent before this time."""
        heard_at, since = self._heard_at, now - self.silence_s
        heard = [at for p in peer_ids if (at := heard_at[p]) >= since]
        return min(heard, default=now) + self.silence_s
