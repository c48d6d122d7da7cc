"""Peers that broke the protocol, and for how long no stream of theirs is taken. Sans I/O."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.protocol.backoff import LONGEST_PAUSE_S, next_pause_s

MAX_OFFENDERS = 4096
"""Peers that are remembered; beyond it the oldest offence is forgotten."""


@dataclass(frozen=True, slots=True)
class Ban:
    """The last ban of one peer."""

    since_s: float
    for_s: float

    @property
    def end_s(self) -> float:
        return self.since_s + self.for_s


class Bans:
    """Bans that double with each offence, and begin anew after `LONGEST_PAUSE_S` without one. Times
    are seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._by_peer: dict[str, Ban] = {}

    def __len__(self) -> int:
        """Peers that are remembered, banned now or not."""
        return len(self._by_peer)

    def is_banned(self, peer_id: str, now: float) -> bool:
        ban = self._by_peer.get(peer_id)
        return ban is not None and now < ban.end_s

    def add(self, peer_id: str, now: float) -> float:
        """Bans a peer from now on; returns for how many seconds."""
        before = self._by_peer.pop(peer_id, None)
        is_first = before is None or now > before.end_s + LONGEST_PAUSE_S
        last_s = None if before is None or is_first else before.for_s
        ban_s = next_pause_s(last_s)
        if len(self._by_peer) >= MAX_OFFENDERS:
            del self._by_peer[next(iter(self._by_peer))]
        self._by_peer[peer_id] = Ban(now, ban_s)
        return ban_s
