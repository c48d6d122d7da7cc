"""Pairs of peers in mode `gossip`: a random partner of the same stage, by a hash of the round.

Peers with the same view compute the same pairs. Where views differ for a moment, a peer may ask one
that has another partner. That does no harm: each peer uses the answer that it gets and decides
alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def partner(own: str, peer_ids: Iterable[str], stage: int, round_index: int) -> str | None:
    """The partner of `own` among the peers of its stage in a round; None for the last one of an odd
    number of peers. If a is b's partner, then b is a's."""
    order = sorted({*peer_ids, own}, key=lambda p: (_draw(p, stage, round_index), p))
    other = order.index(own) ^ 1
    return order[other] if other < len(order) else None


def _draw(peer_id: str, stage: int, round_index: int) -> bytes:
    return blake2b(f"{stage}|{round_index}|{peer_id}".encode(), digest_size=8).digest()
