"""Shards that the first and the last stage both hold: of a matrix that is embedding and head.

The first stage decides. The primary of such a shard at the last stage sums the gradients of its own
stage, as for any other shard, and then pushes the sum to the shard's primary at the first stage,
which adds it to its own. What comes back, the shard of the next round, is the result at both: so
optimizer state, clip and number of tokens are those of the first stage alone, and the two copies
are the same bit for bit. One that has become different (a stage that was lost and begun anew) is
the same again after the next update: where the digests differ, the parameters come back and not
their change.

A push that fails is made again, to whoever is primary by then. One that comes after the step gets
the result: it holds, whatever it was made of.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from swarmnet.errors import (
    NotReady,
    ProtocolViolation,
    Redirect,
    Stale,
    SwarmnetError,
    TransportError,
)
from swarmnet.methods.update import REDUCE_TIED, ShardReply, TiedSum
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.update.exchange_turn import has_moved_on
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica, decides_tied
from swarmnet.swarm.timing import LOOK_AGAIN_S, RETRY_S
from swarmnet.swarm.update.exchange.coded import check_coded, check_result
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchange.shard_work import Total
from swarmnet.swarm.update.exchange.speakers import Speakers, first_heard
from swarmnet.swarm.update.ownership import Ownership
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.averaging")

DECIDING_STAGE = 0


@dataclass(frozen=True, slots=True, eq=False)
class OtherSum:
    """The sum of the other stage's gradients of a shard, and the tokens behind it."""

    term: int
    """Of the ballot by which its sender is the primary: of one sender's, the highest one counts."""
    num_tokens: int
    gradient: Array | None


class TiedShards:
    """Brings the two copies of the tied shards together, at one replica of either stage."""

    def __init__(
        self,
        gossip: Gossip,
        replica: Replica,
        num_stages: int,
        ownership: Ownership,
        speakers: Speakers,
        pace: ExchangePace,
    ) -> None:
        self._gossip = gossip
        self._replica = replica
        self._last_stage = num_stages - 1
        self._ownership = ownership
        self._speakers = speakers
        self._pace = pace
        self._sums: dict[tuple[int, int], dict[str, OtherSum]] = {}
        """By exchange and shard, then by who has sent it."""
        self._heard = Condition()

    # ---- the first stage --------------------------------------------------------------------

    def check(self, push: TiedSum, arrays: tuple[Array, ...]) -> None:
        """Raises `NotReady` or `ProtocolViolation` where another stage's sum is not for here."""
        replica, j = self._replica, push.shard
        replica.check_shard(DECIDING_STAGE, j)
        if push.stage != self._last_stage or not decides_tied(replica, j):
            raise NotReady("that shard is not decided on here")
        if len(arrays) != bool(push.num_tokens):
            raise ProtocolViolation("one gradient, or none for no tokens")
        for array in arrays:
            check_coded(replica, "sum", replica.optimizer.codec.names.sums, j, array)

    def heard(self, push: TiedSum, sender: str, arrays: tuple[Array, ...]) -> None:
        """The other stage's sum, of the exchange that is under way here. Raises `NotReady` where
        the sender cannot be its primary, as this peer sees that stage."""
        r, j = push.round, push.shard
        if sender not in self._speakers.order(self._last_stage, r, j):
            raise NotReady("you are not known here as one that may lead that shard")
        self._speakers.spoke(sender)
        said = self._sums.setdefault((r, j), {})
        if sender not in said or push.term >= said[sender].term:
            said[sender] = OtherSum(push.term, push.num_tokens, arrays[0] if arrays else None)
            self._heard.notify_all()

    async def add(self, exchange: int, shard: int, total: Total | None) -> Total | None:
        """The sum over both stages, when the other one's is here; without it, where it does not
        come in time. Where the stages have counted different samples, each gives its own mean."""
        other = await self._other(exchange, shard)
        if other is None or other.gradient is None:
            return total
        optimizer, coded = self._replica.optimizer, other.gradient
        tokens = [other.num_tokens] if total is None else [total.num_tokens, other.num_tokens]
        factors = [tokens[0] / n for n in tokens]

        def work() -> tuple[Array, float]:
            theirs = optimizer.codec.decoded_sum(shard, coded)
            parts = [theirs] if total is None else [total.gradient, theirs]
            if factors[-1] == 1.0:
                summed = optimizer.sum(parts)
            else:
                summed = optimizer.aggregate("mean", parts, tokens, factors)
            return summed, optimizer.sum_of_squares(summed)

        try:
            summed, squares = await self._replica.worker.run(work)
        except ProtocolViolation:
            squares = math.inf
        if not math.isfinite(squares):
            log.warning("round %d: the last stage's part of shard %d is no use", exchange, shard)
            return total
        return Total(summed, squares, tokens[0])

    async def is_alike(self, shard: int, digest: bytes) -> bool:
        """The present parameters here have this digest: their change is of use to the other
        stage."""
        return await self._digest(shard) == digest

    async def _digest(self, shard: int) -> bytes:
        return await self._replica.worker.run(lambda: self._replica.stage.digest(shard))

    async def _other(self, exchange: int, shard: int) -> OtherSum | None:
        """Of whom this peer takes for the primary; where that says nothing for as long as it may
        wait for contributions, of the next in order that has spoken."""
        awake_s, waits = self._gossip.liveness.awake_s, self._pace.waits()
        others = Deadline.after(awake_s(), waits.contributions_s)
        end = Deadline.after(awake_s(), waits.norm_s)
        while True:
            order = self._speakers.order(self._last_stage, exchange, shard)
            said = self._sums.get((exchange, shard), {})
            found = first_heard(order, said)
            if found and (found == order[0] or others.is_over(awake_s())):
                self._speakers.passed_over(order[: order.index(found)])
                return said[found]
            if end.is_over(awake_s()):
                self._gossip.add_total("tied_missed")
                log.warning(
                    "round %d: the last stage's part of shard %d did not arrive", exchange, shard
                )
                return None
            await self._heard.wait(LOOK_AGAIN_S)

    # ---- the last stage ---------------------------------------------------------------------

    async def result(
        self, exchange: int, shard: int, term: int, total: Total | None
    ) -> tuple[ShardReply, Array]:
        """The result of the first stage, to which this stage's sum goes. `term`: of the ballot by
        which this replica is the primary. Raises `Stale` where the first stage is further on, and
        `NotReady` where others of this stage have the result already."""
        num_tokens = 0 if total is None else total.num_tokens
        digest = await self._digest(shard)
        request = TiedSum(exchange, self._replica.index, shard, num_tokens, term, digest)
        message = Message(request, () if total is None else (total.gradient,))
        if total is not None:
            await self._pace.turn(total.gradient.num_bytes)
        turn, named = shard, ""
        while not self._ownership.members.past(exchange):
            roots = self._ownership.roots(DECIDING_STAGE)
            peer_id = named or (roots[turn % len(roots)] if roots else "")
            was_named, named = bool(named), ""
            try:
                if peer_id:
                    return await self._ask(peer_id, message, shard)
            except Redirect as e:
                target = e.details.get("peer_id")
                named = target if isinstance(target, str) and target != peer_id else ""
                if named and not was_named:
                    continue
            except SwarmnetError as e:
                log.debug("round %d tied shard %d: %s", exchange, shard, e)
                if isinstance(e, TransportError):
                    self._gossip.liveness.probe(peer_id)
                if isinstance(e, Stale) and has_moved_on(exchange, e.details.get("round")):
                    raise
            turn += 1
            await asyncio.sleep(RETRY_S)
        raise NotReady("the round was finished without this replica", round=exchange)

    async def _ask(
        self, peer_id: str, message: Message[TiedSum], shard: int
    ) -> tuple[ShardReply, Array]:
        waits = self._pace.waits()
        reply = await self._gossip.liveness.call_while_live(
            peer_id, REDUCE_TIED, message, timeout_s=waits.call_s, usual_s=waits.usual_s
        )
        told = reply.body.shards
        if not len(told) == len(reply.arrays) == 1:
            raise ProtocolViolation("an answer of one shard is wanted")
        check_result(self._replica, shard, reply.arrays[0])
        return told[0], reply.arrays[0]

    # ---- what is over -----------------------------------------------------------------------

    def finish_round(self, exchange: int) -> None:
        """Forgets what belongs to exchanges up to this one."""
        self._sums = {key: other for key, other in self._sums.items() if key[0] > exchange}
