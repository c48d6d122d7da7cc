"""The gradient norm over all stages, for clipping as one machine would.

Each primary sends the sums of squares of its shards to two *collectors*, whatever their stage: the
roots of the first stages (the first owners of their shards 0). A collector that has heard of all
shards of all stages answers with the total, summed in an order that is the same at each. The first
answer counts. That makes one way there and one back, and two small messages a primary and batch of
its shards. One collector that all can call is enough. (Where a primary dies and its shard is summed
again, they may have heard other sums of it: shards are clipped by norms that differ a little then,
and each shard by the same at all replicas.)

Collectors that fail are replaced by the next in order. These may never hear the sums of primaries
that have the total already: so each peer that has it tells all that ask, of whatever stage. The
total goes with every result, and to every backup, so that it outlives the peers that summed it up;
that word is taken only when no collector has answered. Nothing blocks on a norm for ever: at the
deadline the last round's norm stands in, and that is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnet.errors import NotReady, ProtocolViolation, Stale, SwarmnetError
from swarmnet.methods.update import NORM, NormReply, NormRequest
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import RETRY_S, TOGETHER_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.norms")

ATTEMPT_S = 5.0
MAX_ASKED = 8
"""Peers at a time that are asked whether they know the total."""
ROOTS_ASKED = 2
"""Of each stage: its root, and the one that would be root after it."""
COLLECTORS = 2
"""Peers that sum up at a time."""
KEPT_ROUNDS = 3


@dataclass
class RoundSums:
    """What a collector has heard of one round."""

    shards: dict[int, dict[int, float]] = field(default_factory=dict)
    """By stage, until all of its shards are known."""
    stages: dict[int, float] = field(default_factory=dict)
    total: float | None = None
    """None before all stages are known."""

    def hear(self, norm: NormRequest, num_shards: int, num_stages: int) -> None:
        """The first word for a shard holds. Sums are taken by ascending shard, then stage."""
        if norm.stage in self.stages:
            return
        sums = self.shards.setdefault(norm.stage, {})
        for j, squares in zip(norm.shards, norm.sums, strict=True):
            if j < num_shards:
                sums.setdefault(j, squares)
        if len(sums) == num_shards:
            self.stages[norm.stage] = sum(sums[j] for j in range(num_shards))
            del self.shards[norm.stage]
        if len(self.stages) == num_stages:
            self.total = sum(self.stages[s] for s in range(num_stages))


@dataclass
class Batch:
    """Sums of shards that go to the collectors in one message."""

    round: int
    sums: dict[int, float]
    total: asyncio.Task[float]


@dataclass
class Norms:
    """Sums of squares of the mean gradient, for the stage of one replica."""

    transport: Transport
    gossip: Gossip
    stage_index: int
    num_stages: int
    shards_of: Callable[[int], int]
    """How many shards a stage has; 0 where that is not known yet."""
    roots: Callable[[int], list[str]]
    """Live peers of a stage in the order in which they would be its root."""
    wait_s: Callable[[], float]
    """Longest wait for the sums of all stages, now."""
    current: Callable[[], int]
    """The round of this replica's next update: no replica is far ahead of it."""

    def __post_init__(self) -> None:
        self._rounds: dict[int, RoundSums] = {}
        self._totals: dict[int, float] = {}
        """By round, the sum of squares that was taken here."""
        self._told: dict[int, float] = {}
        """The same, told with results: for when no collector answers."""
        self._changed = Condition()
        self._oldest = 0
        self._batch: Batch | None = None
        self._tasks = Tasks("norms")
        self.last_total = 0.0
        """The newest sum of squares that was taken here; 0 before the first."""
        serve(self.transport, NORM, self._on_norm)

    async def close(self) -> None:
        await self._tasks.close()

    async def add(self, round_index: int, shard_index: int, squares: float) -> float:
        """The total over all stages, given one more of the own shards; several travel together."""
        batch = self._batch
        if batch is None or batch.round != round_index:
            sums: dict[int, float] = {}
            task = self._tasks.start(self._send(round_index, sums))
            batch = self._batch = Batch(round_index, sums, task)
        batch.sums[shard_index] = squares
        return await asyncio.shield(batch.total)

    async def _send(self, round_index: int, sums: dict[int, float]) -> float:
        await asyncio.sleep(TOGETHER_S)  # sums that are ready meanwhile travel along
        self._batch = None
        return await self.total(round_index, sums)

    async def total(self, round_index: int, sums: dict[int, float]) -> float:
        """The sum of squares over all shards of all stages, given those of the own shards."""
        shards = tuple(sorted(sums))
        values = tuple(sums[j] for j in shards)
        request = NormRequest(round_index, self.stage_index, shards, values)
        awake_s = self.gossip.awake_s
        end, turn = awake_s() + self.wait_s(), 0
        while awake_s() < end:
            order = self._collectors()
            for asked in (order[:COLLECTORS], order):
                if round_index in self._totals:
                    return self._totals[round_index]
                left_s = max(0.0, end - awake_s())
                total = await self._first_of(asked, request, min(left_s, ATTEMPT_S))
                if total is not None:
                    return self._take(round_index, total)
            if round_index in self._told:
                return self._take(round_index, self._told[round_index])
            told = await self.ask_others(round_index, turn)
            if told is not None:
                return told
            turn += 1
            await self.gossip.changed.wait(RETRY_S)
        self.gossip.add_total("norm_missed")
        log.warning("round %d: the gradient norm of all stages did not arrive", round_index)
        return max(self.last_total, sum(sums.values()))

    def _collectors(self) -> list[str]:
        """Those that sum up, then those that would in their place."""
        most = 2 * COLLECTORS
        roots = [self.roots(stage) for stage in range(min(most, self.num_stages))]
        return [root[i] for i in range(most) for root in roots if i < len(root)][:most]

    async def _first_of(
        self, asked: Sequence[str], request: NormRequest, timeout_s: float
    ) -> float | None:
        """The first answer of these; None where none of them gives one."""

        async def ask(peer_id: str) -> float:
            if peer_id == self.gossip.own.peer_id:  # others may see other roots
                return await self._collect(request, timeout_s)
            return await self._ask(peer_id, request, timeout_s)

        tasks = [self._tasks.start(ask(peer_id)) for peer_id in asked]
        try:
            for answer in asyncio.as_completed(tasks):
                try:
                    return await answer
                except SwarmnetError as e:
                    log.debug("norm of round %d: %s", request.round, e)
        finally:
            for task in tasks:
                task.cancel()
        return None

    async def _ask(self, peer_id: str, request: NormRequest, timeout_s: float) -> float:
        message = Message(request)
        reply = await call(self.transport, peer_id, NORM, message, timeout_s=timeout_s)
        return reply.body.sum

    def _take(self, round_index: int, total: float) -> float:
        self.last_total = self._totals.setdefault(round_index, total)
        self._changed.notify_all()
        return self.last_total

    def known(self, round_index: int) -> float | None:
        """The sum of squares of a round, where it was taken or told here."""
        return self._totals.get(round_index, self._told.get(round_index))

    def heard(self, round_index: int, total: float) -> None:
        """A peer told the sum of squares of a round with a result. The first word counts."""
        if self._oldest <= round_index <= self.current() + KEPT_ROUNDS:
            self._told.setdefault(round_index, total)

    async def ask_others(self, round_index: int, turn: int) -> float | None:
        """The total from peers that took it from a collector which is gone: of this stage, and the
        roots of the others. Some are asked in each `turn`. None where none of these knows it."""
        own = self.gossip.own.peer_id
        others = []
        for stage in range(self.num_stages):
            if stage != self.stage_index:
                others += self.roots(stage)[:ROOTS_ASKED]
        others += [p for p in self.roots(self.stage_index) if p != own]
        first = turn * MAX_ASKED % max(1, len(others))
        asked = (*others[first:], *others[:first])[:MAX_ASKED]
        request = NormRequest(round_index, self.stage_index, (), ())
        found = await asyncio.gather(
            *(self._ask(peer_id, request, ATTEMPT_S) for peer_id in asked),
            return_exceptions=True,
        )
        for answer in found:
            if not isinstance(answer, BaseException):
                return self._take(round_index, answer)
            if not isinstance(answer, SwarmnetError):
                raise answer
        return None

    async def _on_norm(self, request: Request[NormRequest]) -> Message[NormReply]:
        norm = request.message.body
        known = self._totals.get(norm.round) if norm.shards else self.known(norm.round)
        if known is not None:
            return Message(NormReply(known))
        if not norm.shards:
            raise NotReady("the total is not known here")
        if norm.stage >= self.num_stages:
            raise ProtocolViolation("no such stage")
        return Message(NormReply(await self._collect(norm, ATTEMPT_S)))

    def _of(self, round_index: int) -> RoundSums:
        if round_index < self._oldest:
            raise Stale("the norm of that round is gone")
        is_far = round_index > self.current() + KEPT_ROUNDS
        if is_far or (round_index not in self._rounds and len(self._rounds) > 2 * KEPT_ROUNDS):
            raise NotReady("a round too far ahead")
        return self._rounds.setdefault(round_index, RoundSums())

    async def _collect(self, norm: NormRequest, wait_s: float) -> float:
        """Takes sums of shards; returns the total when every stage's are known."""
        sums, num_shards = self._of(norm.round), self.shards_of(norm.stage)
        if not num_shards:
            raise NotReady("no replica of that stage is known here")
        sums.hear(norm, num_shards, self.num_stages)
        if sums.total is not None:
            self._changed.notify_all()
        await self._changed.until(
            lambda: sums.total is not None or norm.round in self._totals, wait_s
        )
        total = self._totals.get(norm.round, sums.total)
        if total is None:
            raise NotReady("not every stage's norm is known yet")
        return total

    def forget(self) -> None:
        """What was taken here is of an update that does not hold."""
        self._totals.clear()
        self._told.clear()

    def finish_round(self, round_index: int) -> None:
        """Forgets rounds that no peer can ask about any more."""
        self._oldest = max(self._oldest, round_index - KEPT_ROUNDS)
        for known in (self._totals, self._told):
            for r in [r for r in known if r < self._oldest]:
                del known[r]
        for r in [r for r in self._rounds if r < self._oldest]:
            del self._rounds[r]
