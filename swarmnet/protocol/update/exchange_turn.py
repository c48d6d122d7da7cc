"""What a call about an exchange means at a replica whose stage is in another one. Pure."""

from __future__ import annotations

from enum import Enum

from swarmnet.protocol.sync_modes import SyncPlan
from swarmnet.protocol.update.members import BEHIND_ROUNDS


class Turn(Enum):
    """Of the exchange that a call asks about."""

    NOW = "now"
    LAST = "last"
    """Its result is what the present parameters begin with: a straggler may have them."""
    OVER = "over"
    TO_COME = "to come"


def turn_of(plan: SyncPlan, shard_index: int, asked: int, current: int) -> Turn:
    """`current`: the exchange whose input the present parameters are."""
    if asked == current:
        return Turn.NOW
    if asked > current:
        return Turn.TO_COME
    return Turn.LAST if asked == plan.last_exchange(shard_index, current) else Turn.OVER


def may_be_asked(plan: SyncPlan, shard_index: int, exchange: int, ended: int) -> bool:
    """Whether a straggler may ask about an exchange of a shard, when exchange `ended` is over: as
    long as no later one has changed the shard."""
    last = plan.last_exchange(shard_index, ended + 1)
    return exchange >= min(last, ended - BEHIND_ROUNDS)


def has_not_begun(exchange: int, told: object) -> bool:
    """The stage is in exchange `told` by another replica's word, and comes to this one later."""
    return isinstance(told, int) and told < exchange


def has_moved_on(exchange: int, told: object) -> bool:
    """The stage, which is in exchange `told` by another replica's word, cannot give the result of
    this one any more."""
    return isinstance(told, int) and told > exchange + 1
