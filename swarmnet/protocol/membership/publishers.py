"""Which peers publish the records of those that have no directory of their own. Pure.

A peer over py-libp2p has no node of the DHT (`swarm.membership.discovery`). Each such record has
`PUBLISHERS` peers that have one and publish it beside their own: by rendezvous hashing, so that all
agree without asking, the work is divided, and when one of them goes the next takes its place and
nobody else's changes. What they find there, gossip brings to those that cannot look themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import LEFT, OBSERVER_STAGE, Record

PUBLISHERS = 2
"""Of one record. One that says so and does nothing hides nobody alone."""
MAX_PUBLISHED = 64
"""Records of others that one peer publishes: as many as a reader takes of one key."""


def published_for(own_peer_id: str, records: Iterable[Record]) -> list[Record]:
    """The records that this peer publishes beside its own, in an order of its own. `records`: of
    the live peers that count, with its own."""
    known = list(records)
    able = [r.peer_id for r in known if r.publishes and r.peer_id == machine_of(r.peer_id)]
    if own_peer_id not in able:
        return []
    mine = [
        (_place(own_peer_id, r.peer_id), r)
        for r in known
        if not r.publishes
        and r.stage != OBSERVER_STAGE
        and r.state != LEFT
        and own_peer_id in _publishers(able, r.peer_id)
    ]
    return [record for _, record in sorted(mine, key=lambda pair: pair[0])[:MAX_PUBLISHED]]


def _publishers(able: Iterable[str], peer_id: str) -> list[str]:
    return sorted(able, key=lambda p: _place(p, peer_id))[:PUBLISHERS]


def _place(publisher: str, peer_id: str) -> bytes:
    return blake2b(f"{publisher}|{peer_id}".encode(), digest_size=8).digest()
