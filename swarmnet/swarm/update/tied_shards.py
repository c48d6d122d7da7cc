"""Shards that the first and the last stage both hold: of a matrix that is embedding and head.

The first stage decides. The primary of such a shard at the last stage sums the gradients of its own
stage, as for any other shard, and then pushes the sum to the shard's primary at the first stage,
which adds it to its own. What comes back, the shard of the next round, is the result at both: so
optimizer state, clip and number of tokens are those of the first stage alone, and the two copies
are the same bit for bit. One that has become different (a stage that was lost and begun anew) is
the same again after the next update.

A push that fails is made again, to whoever is primary by then. One that comes after the step gets
the result: it holds, whatever it was made of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmnet.errors import NotReady, ProtocolViolation, Redirect, SwarmnetError, TransportError
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import ReduceReply, ReduceRequest, ShardReply
from swarmnet.swarm.update.replica import Replica
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message, convert

log = logging.getLogger("swarmnet.averaging")

METHOD = "reduce_tied"
DECIDING_STAGE = 0
RETRY_S = 0.1

Call = Callable[[str, str, Message], Awaitable[Message]]
"""(peer, method, message): given up as soon as the peer is not live any more."""


@dataclass(frozen=True, slots=True)
class OtherSum:
    """The sum of the other stage's gradients of a shard, and the tokens behind it."""

    num_tokens: int
    gradient: Array | None


@dataclass
class TiedShards:
    """What is special about the tied shards of one replica's stage."""

    replica: Replica
    gossip: Gossip
    num_stages: int
    roots: Callable[[int], list[str]]
    """Live peers of a stage."""
    call: Call

    def decides(self, shard: int) -> bool:
        """The other stage's sum is to be added here, before the step."""
        return shard < self._number and self.replica.index == DECIDING_STAGE

    def follows(self, shard: int) -> bool:
        """The step is the other stage's."""
        return shard < self._number and self.replica.index != DECIDING_STAGE

    @property
    def _number(self) -> int:
        return self.replica.stage.tied_shards

    def read(self, request: Request) -> tuple[ReduceRequest, OtherSum]:
        """A push of the other stage. Raises `NotReady` or `ProtocolViolation`."""
        push = convert(request.message.body, ReduceRequest)
        if len(push.shards) != 1 or not self.decides(push.shards[0]):
            raise NotReady("that shard is not decided on here")
        record = self.gossip.view.get(request.remote)
        is_last = push.stage == self.num_stages - 1
        if not is_last or record is None or record.stage != push.stage:
            raise NotReady("the caller is not known here as a replica of the last stage")
        j, num_tokens, arrays = push.shards[0], push.num_tokens[0], request.message.arrays
        if len(arrays) != bool(num_tokens):
            raise ProtocolViolation("one gradient, or none for no tokens")
        for array in arrays:
            self._check(j, array)
        return push, OtherSum(num_tokens, arrays[0] if arrays else None)

    async def add(
        self, total: Array | None, num_tokens: int, other: OtherSum | None
    ) -> tuple[Array | None, float, int]:
        """The sum over both stages, its sum of squares, and the tokens behind the mean. Where the
        stages have counted different samples, each gives its own mean."""
        worker, optimizer = self.replica.worker, self.replica.optimizer
        theirs = None if other is None else other.gradient
        if other is None or theirs is None or other.num_tokens == 0:
            if total is None:
                return None, 0.0, 0
            kept = total
            return kept, await worker.run(lambda: optimizer.sum_of_squares(kept)), num_tokens
        parts = [theirs] if total is None else [total, theirs]
        tokens = [other.num_tokens] if total is None else [num_tokens, other.num_tokens]
        factors = [tokens[0] / n for n in tokens]

        def work() -> tuple[Array, float]:
            if factors[-1] == 1.0:
                summed = optimizer.sum(parts)
            else:
                summed = optimizer.aggregate("mean", parts, tokens, factors)
            return summed, optimizer.sum_of_squares(summed)

        summed, squares = await worker.run(work)
        return summed, squares, tokens[0]

    async def push(
        self,
        r: int,
        j: int,
        total: Array | None,
        num_tokens: int,
        is_over: Callable[[], bool],
    ) -> tuple[ShardReply, Array]:
        """The result of a shard from the first stage, to which this stage's sum goes. Raises
        `NotReady` where the round turns out to be over in this stage."""
        sent = num_tokens if total is not None else 0
        request = ReduceRequest(r, self.replica.index, (j,), (sent,))
        message = Message(request, (total,) if total is not None and sent else ())
        elsewhere: str | None = None
        turn = j
        while not is_over():
            roots = self.roots(DECIDING_STAGE)
            peer_id = elsewhere or (roots[turn % len(roots)] if roots else None)
            elsewhere = None
            if peer_id is not None:
                try:
                    reply = await self.call(peer_id, METHOD, message)
                    return await self._result(reply, j)
                except Redirect as e:
                    target = e.details.get("peer_id")
                    elsewhere = target if isinstance(target, str) else None
                    continue
                except SwarmnetError as e:
                    log.debug("round %d tied shard %d at %s: %s", r, j, peer_id[-8:], e)
                    if isinstance(e, TransportError):
                        self.gossip.probe(peer_id)
            turn += 1
            await asyncio.sleep(RETRY_S)
        raise NotReady("the round was finished without this replica", round=r)

    async def _result(self, reply: Message, j: int) -> tuple[ShardReply, Array]:
        told = convert(reply.body, ReduceReply).shards
        if len(told) != 1 or len(reply.arrays) != 1:
            raise ProtocolViolation("an answer of one shard is wanted")
        parameters = reply.arrays[0]
        self._check(j, parameters)
        return told[0], parameters

    def _check(self, j: int, array: Array) -> None:
        size = self.replica.stage.shard_sizes[j]
        if array.dtype != "float32" or array.shape != (size,):
            raise ProtocolViolation(f"shard {j} has {size} fp32 numbers")
