"""Late contributions: those that came when the exchange had gone on with a quorum.

The primary that has made a result is the one that knows who is not in it. So it takes what is late
(`take`), and brings it with its own contribution into the shard's next exchange (`contribution`),
as an heir does (`swarm.update.handover`): an exchange has one contribution a member, whoever is its
primary. An upload may be under way while later exchanges are made: it counts in the first that
begins when it is whole, up to `MOST_LATE` later. What was taken dies with who took it, like any
contribution.

It vouches for what it brings. What is not finite does not count; under a robust rule, neither does
what is far larger than its own, token by token, or of more tokens than the feeders counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.sync_modes import MOST_LATE
from swarmnet.protocol.update import robust
from swarmnet.protocol.update.late_tokens import by_age
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.calls import NOTHING, Contribution
from swarmnet.swarm.update.exchange.shard_work import strike
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.averaging")


class _Found(Enum):
    """Of a late contribution."""

    COUNTS = "it counts"
    TOO_LATE = "no exchange is left that it may be in"
    UNSOUND = "it is not finite"
    UNFAIR = "it is far too large"


@dataclass(slots=True)
class _Decided:
    """A result that was made here, of a shard."""

    senders: frozenset[str]
    """Whose contributions are in it."""
    taken: dict[str, int] = field(default_factory=dict)
    """Tokens of late contributions, by sender."""


@dataclass(frozen=True, slots=True)
class _Own:
    """The own contribution to an exchange, under a robust rule."""

    squares: float
    num_tokens: int


Coming = tuple[int, Array]
"""Of late contributions: their tokens, and their sum, fp32."""


@dataclass
class LateContributions:
    """Of the shards of one replica."""

    gossip: Gossip
    replica: Replica
    books: Books
    rule: str
    """By which contributions are summed."""

    def __post_init__(self) -> None:
        self._decided: dict[int, dict[int, _Decided]] = {}
        """By shard and exchange, the newest."""
        self._own: dict[int, dict[int, _Own]] = {}
        """Likewise."""
        self._coming: dict[int, dict[int, Coming]] = {}
        """By shard and exchange, what was taken and is in no contribution yet."""
        self._given: dict[int, int] = {}
        """By shard, the exchange for which the newest own contribution was made."""

    @property
    def has_any(self) -> bool:
        """Something that was taken is in no exchange yet."""
        return any(self._coming.values())

    def forget(self) -> None:
        """What is here belongs to parameters that do not hold."""
        self._decided, self._coming = {}, {}

    def decided(self, exchange: int, shard: int, senders: frozenset[str]) -> None:
        """A result has been made here."""
        _keep(self._decided, shard, exchange, _Decided(senders))

    async def take(
        self, exchange: int, shard: int, sender: str, num_tokens: int, gradient: Array
    ) -> bool:
        """A contribution that is not in the result, as it came. Returns whether it counts; said
        again, the same. One that has late ones in it does not: these were late twice. A replica
        that is about to leave takes none."""
        own, known = self.gossip.own, self._decided.get(shard, {}).get(exchange)
        if known is None or sender in known.senders or self.books.brought(exchange, shard, sender):
            return False
        if own.state != ACTIVE or own.is_moving:
            return sender in known.taken

        counted = self.books.counted_behind(exchange, shard)
        room = robust.room_for(counted) - self.books.tokens_behind(exchange, shard)

        def work() -> _Found:
            """Nothing is decided but here, one after the other."""
            if sender in known.taken:
                return _Found.COUNTS
            if not self._may_count(exchange, shard):
                return _Found.TOO_LATE
            optimizer = self.replica.optimizer
            try:
                values = optimizer.codec.decoded_contribution(shard, gradient)
            except ProtocolViolation:
                return _Found.UNSOUND
            squares = optimizer.sum_of_squares(values)
            if not robust.is_sound(squares, num_tokens):
                return _Found.UNSOUND
            is_in_room = not counted or sum(known.taken.values()) + num_tokens <= room
            if not self._is_alike(exchange, shard, squares, num_tokens) or not (
                is_in_room or self.rule == robust.MEAN
            ):
                return _Found.UNFAIR
            coming = self._coming.setdefault(shard, {})
            tokens, *parts = coming.get(exchange, (0,))
            coming[exchange] = tokens + num_tokens, optimizer.sum([*parts, values])
            known.taken[sender] = num_tokens
            return _Found.COUNTS

        found = await self.replica.worker.run(work)
        if found is _Found.UNSOUND:
            strike(self.gossip, sender)
        elif found is _Found.UNFAIR:
            self.gossip.add_total("contributions_dropped")
        if found is not _Found.COUNTS:
            why = "%s has nothing more of round %d shard %d counted: %s"
            log.info(why, sender[-8:], exchange, shard, found.value)
        return found is _Found.COUNTS

    def _may_count(self, exchange: int, shard: int) -> bool:
        """There will be an own contribution that may bring what was late in an exchange."""
        plan, given = self.replica.plan, self._given.get(shard, exchange)
        before = plan.exchanges_before(shard, given + 1, MOST_LATE)
        return exchange in before and given < plan.rounds - 1

    def _is_alike(self, exchange: int, shard: int, squares: float, num_tokens: int) -> bool:
        """It does not make the own contribution look like an attack."""
        own = self._own.get(shard, {}).get(exchange)
        if self.rule == robust.MEAN or own is None:
            return True
        return robust.is_alike(own.squares, own.num_tokens, squares, num_tokens)

    async def contribution(
        self, exchange: int, shard: int, num_tokens: int, change: Array | None
    ) -> Contribution:
        """The own contribution to an exchange (`change` is None for no tokens), with what was late
        in those before. To be asked once."""
        before = self.replica.plan.exchanges_before(shard, exchange, MOST_LATE)

        def work() -> tuple[Array | None, dict[int, Coming]]:
            optimizer = self.replica.optimizer
            if self.rule != robust.MEAN and change is not None:
                own = _Own(optimizer.sum_of_squares(change), num_tokens)
                _keep(self._own, shard, exchange, own)
            self._given[shard] = exchange
            known = self._coming.pop(shard, {})
            coming = {e: known[e] for e in before if e in known}  # all else is too old
            parts = [] if change is None else [change]
            parts += [total for _, total in coming.values()]
            return optimizer.sum(parts) if coming else change, coming

        given, coming = await self.replica.worker.run(work)
        late = by_age({e: n for e, (n, _) in coming.items()}, before)
        self.books.brings(exchange, shard, self.gossip.own.peer_id, late)
        tokens = num_tokens + sum(late)
        return (tokens, given) if tokens else NOTHING


T = TypeVar("T")


def _keep(known: dict[int, dict[int, T]], shard: int, exchange: int, found: T) -> None:
    """Of each shard, no more than may count yet."""
    newest = sorted({*known.get(shard, ()), exchange})[-MOST_LATE:]
    of = known.get(shard, {}) | {exchange: found}
    known[shard] = {e: of[e] for e in newest}
