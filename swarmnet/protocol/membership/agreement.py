"""Which peers have begun rounds with the same parameters, by the digests that they published.

What a peer says of its own parameters proves nothing of their worth. That others say the same of
theirs does, and who has said the same as this peer was once in one swarm with it. So the digests of
the last rounds are remembered, as they were heard."""

from __future__ import annotations

import hashlib

from swarmnet.protocol.membership.records import LEFT, Record

KEPT_ROUNDS = 4
"""Of each peer: more than those in which the replicas of one swarm are at a time."""
MAX_SHARED = 16_384
"""Peers that are known to have been one with this one."""

Place = tuple[int, int]
"""(stage, round)."""


class Agreement:
    """Of the peers of one view."""

    def __init__(self, own_peer_id: str) -> None:
        self._own_peer_id = own_peer_id
        self._published: dict[str, dict[Place, bytes]] = {}
        """By peer, a hash of its digests, the newest at the end."""
        self._shared: dict[str, None] = {}
        """Peers that have published the same as this one, those of late at the end."""

    def heard(self, record: Record) -> None:
        """What a peer has published; the own one's too. One that says goodbye is on no other side
        of a cut: who is still there counts."""
        if record.state == LEFT:
            self._shared.pop(record.peer_id, None)
        if not record.digests or record.stage < 0:
            return
        peer_id, place = record.peer_id, (record.stage, record.round)
        name = hashlib.blake2b(record.digests, digest_size=16).digest()
        published = self._published.setdefault(peer_id, {})
        published.pop(place, None)
        published[place] = name
        while len(published) > KEPT_ROUNDS:
            del published[next(iter(published))]
        if peer_id == self._own_peer_id:
            same = [p for p, theirs in self._published.items() if theirs.get(place) == name]
            self._share(same)
        elif self._published.get(self._own_peer_id, {}).get(place) == name:
            self._share([peer_id])

    def forget(self, peer_id: str) -> None:
        """A peer has been gone for long. That it was one with this one stays: a cut may last."""
        self._published.pop(peer_id, None)

    def shares(self, peer_id: str) -> bool:
        """A peer has begun some round with the same parameters as this one."""
        return peer_id in self._shared

    def agree(self, one: str, other: str) -> bool:
        """Two peers published the same of the newest place of which both have published anything;
        False where there is none."""
        if one == other:
            return True
        theirs = self._published.get(other, {})
        mine = self._published.get(one, {})
        common = [(place, name) for place, name in mine.items() if place in theirs]
        if not common:
            return False
        place, name = max(common, key=lambda item: item[0][1])
        return theirs[place] == name

    def _share(self, peer_ids: list[str]) -> None:
        for peer_id in peer_ids:
            self._shared.pop(peer_id, None)
            self._shared[peer_id] = None
        while len(self._shared) > MAX_SHARED:
            del self._shared[next(iter(self._shared))]
