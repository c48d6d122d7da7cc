"""Late contributions: those that came when the exchange had gone on with a quorum.

The primary that has made a result is the one that knows who is not in it. So it takes what is late
(`take`), and brings it into the shard's next exchange with its own contribution (`contribution`),
as an heir does (`swarm.update.handover`): an exchange has one contribution a member, whoever is its
primary. What was taken dies with who took it, like any contribution.

It vouches for what it brings. What is not finite does not count; under a robust rule, neither does
what is far larger than its own, token by token, or of more tokens than the feeders counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.update import robust
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
    TOO_LATE = "the next exchange has begun"
    UNSOUND = "it is not finite"
    UNFAIR = "it is far too large"


@dataclass(slots=True)
class _Decided:
    """A result that was made here, of a shard."""

    exchange: int
    senders: frozenset[str]
    """Whose contributions are in it."""
    is_closed: bool = False
    """The own contribution to the next exchange has been made."""
    taken: dict[str, int] = field(default_factory=dict)
    """Tokens of late contributions, by sender."""
    total: Array | None = None
    """Their sum, fp32."""


@dataclass
class LateContributions:
    """Of the shards of one replica."""

    gossip: Gossip
    replica: Replica
    books: Books
    rule: str
    """By which contributions are summed."""

    def __post_init__(self) -> None:
        self._decided: dict[int, _Decided] = {}
        """By shard, the newest."""
        self._own: dict[int, tuple[int, float, int]] = {}
        """By shard, of the newest own contribution under a robust rule: exchange, sum of squares,
        tokens."""

    @property
    def has_any(self) -> bool:
        """Something that was taken is in no exchange yet."""
        return any(known.total is not None for known in self._decided.values())

    def forget(self) -> None:
        """What is here belongs to parameters that do not hold."""
        self._decided = {}

    def decided(self, exchange: int, shard: int, senders: frozenset[str]) -> None:
        """A result has been made here."""
        self._decided[shard] = _Decided(exchange, senders)

    async def take(
        self, exchange: int, shard: int, sender: str, num_tokens: int, gradient: Array
    ) -> bool:
        """A contribution that is not in the result, as it came. Returns whether it counts; said
        again, the same. One that has late ones in it does not: these were late twice, and the books
        of their exchange are closed. A replica that is about to leave takes none."""
        own, known = self.gossip.own, self._decided.get(shard)
        if self.books.brought(exchange, shard, sender):
            return False
        if known is None or known.exchange != exchange or sender in known.senders:
            return False
        if own.state != ACTIVE or own.is_moving:
            return sender in known.taken

        counted = self.books.counted_behind(exchange, shard)
        room = robust.room_for(counted) - self.books.tokens_behind(exchange, shard)

        def work() -> _Found:
            """Nothing is decided but here, one after the other."""
            if sender in known.taken:
                return _Found.COUNTS
            if known.is_closed:
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
            known.total = optimizer.sum([values] if known.total is None else [known.total, values])
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

    def _is_alike(self, exchange: int, shard: int, squares: float, num_tokens: int) -> bool:
        """It does not make the own contribution look like an attack."""
        of, own_squares, own_tokens = self._own.get(shard, (-1, 0.0, 0))
        if self.rule == robust.MEAN or of != exchange:
            return True
        return robust.is_alike(own_squares, own_tokens, squares, num_tokens)

    async def contribution(
        self, exchange: int, shard: int, num_tokens: int, change: Array | None
    ) -> Contribution:
        """The own contribution to an exchange (`change` is None for no tokens), with what was late
        in the one before. To be asked once."""
        known, own = self._decided.get(shard), self.gossip.own.peer_id
        before = self.replica.plan.last_exchange(shard, exchange)

        def work() -> tuple[Contribution, int]:
            optimizer = self.replica.optimizer
            if self.rule != robust.MEAN and change is not None:
                self._own[shard] = exchange, optimizer.sum_of_squares(change), num_tokens
            if known is None or known.exchange >= exchange:
                return (num_tokens, change), 0
            known.is_closed = True
            late, total, known.total = sum(known.taken.values()), known.total, None
            if total is None or known.exchange != before:  # it is too old
                return (num_tokens, change), 0
            parts = [total] if change is None else [change, total]
            return (num_tokens + late, optimizer.sum(parts)), late

        (tokens, given), late = await self.replica.worker.run(work)
        self.books.brings(exchange, shard, own, late)
        return (tokens, given) if tokens else NOTHING
