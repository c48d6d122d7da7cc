"""Pairs of peers in mode `gossip`: a random partner of the same stage, by a hash of the round.

Peers with the same view compute the same pairs. Where views differ for a moment, a peer may ask one
that has another partner. That does no harm: each peer uses the answer that it gets and decides
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b

from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record
from swarmnet.protocol.sync_modes import SyncPlan
from swarmnet.protocol.update.members import BEHIND_ROUNDS

OFFER_WAIT_S = 10.0
"""Longest wait of a replica that has all for its partner to ask, with nothing on its way there."""


def partner(own: str, peer_ids: Iterable[str], stage: int, round_index: int) -> str | None:
    """The partner of `own` among the peers of its stage in a round; None for the last one of an odd
    number of peers. If a is b's partner, then b is a's."""
    order = sorted({*peer_ids, own}, key=lambda p: (_draw(p, stage, round_index), p))
    other = order.index(own) ^ 1
    return order[other] if other < len(order) else None


def _draw(peer_id: str, stage: int, round_index: int) -> bytes:
    return blake2b(f"{stage}|{round_index}|{peer_id}".encode(), digest_size=8).digest()


def partner_of(own: str, members: Iterable[Record], stage: int, round_index: int) -> str | None:
    """The partner of `own` among the live members of its stage that are not past the round; None
    where it makes its step alone."""
    others = [m.peer_id for m in members if m.state in (ACTIVE, LEAVING) and m.round <= round_index]
    return partner(own, others, stage, round_index)


def newest_round(members: Iterable[Record], own_round: int) -> int:
    """The newest round in which a replica of the stage is at work; `own_round` where none is."""
    return max((m.round for m in members if m.state == ACTIVE), default=own_round)


def is_out_of_touch(plan: SyncPlan, round_index: int, newest: int) -> bool:
    """Others have had a whole meeting more than a replica, or a copy, of `round_index`: alone it
    would run through their rounds with old parameters, and pull back the replicas that it meets
    then."""
    return newest - round_index > max(BEHIND_ROUNDS, plan.steps_until_due(newest))


class OfferWait:
    """The wait of a replica that has all for its partner to ask. On a slow link what was asked
    for takes longer than the next question may."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: so long the partner may ask, at most."""
        self._longest_s = longest_s
        self._quiet_since = self._asked_at = -math.inf
        self._longest_at = math.inf

    def begin(self, now: float) -> None:
        """All is here: from now on the partner is waited for."""
        self._quiet_since = now
        self._longest_at = now + self._longest_s

    def asked(self, now: float) -> None:
        """The partner has been given an offer."""
        self._asked_at = now

    def look(self, now: float, *, is_sending: bool) -> None:
        """`is_sending`: something large is on its way from here."""
        self._quiet_since = now if is_sending else max(self._quiet_since, self._asked_at)

    def is_over(self, now: float) -> bool:
        """It is not waited for any more."""
        return now >= min(self._quiet_since + OFFER_WAIT_S, self._longest_at)
