"""The gradient norm over all stages, for clipping as one machine would.

Each primary sends the sums of squares of its shards to the root of its stage (the first owner of
shard 0). The roots swap the sums of their stages, and each gets the same total, summed in the same
order. That makes two hops, and O(owners + stages^2) small messages a round.

A root that fails is replaced by the next owner of shard 0. That one may never hear the sums of
primaries that have the total already: so each peer that has it tells all that ask, of whatever
stage. The total goes with every result, and to every backup, so that it outlives the peers that
summed it up; that word is taken only when no root has answered. Nothing blocks on a norm for ever:
at the deadline the last round's norm stands in, and that is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnet.errors import NotReady, ProtocolViolation, Stale, SwarmnetError
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import NormReply, NormRequest, StageNormRequest
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import RETRY_S, TOGETHER_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message, convert

log = logging.getLogger("swarmnet.norms")

ATTEMPT_S = 5.0
MAX_ASKED = 8
"""Peers at a time that are asked whether they know the total."""
ROOTS_ASKED = 2
"""Of each stage: its root, and the one that would be root after it."""
KEPT_ROUNDS = 3


@dataclass
class RoundNorms:
    """What a root has heard of one round."""

    shards: dict[int, float] = field(default_factory=dict)
    stages: dict[int, float] = field(default_factory=dict)
    asking: asyncio.Task[None] | None = None


@dataclass
class Batch:
    """Sums of shards that go to the root in one message."""

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
    num_shards: int
    roots: Callable[[int], list[str]]
    """Live peers of a stage in the order in which they would be its root."""
    wait_s: Callable[[], float]
    """Longest wait for the sums of all stages, now."""
    current: Callable[[], int]
    """The round of this replica's next update: no replica is far ahead of it."""

    def __post_init__(self) -> None:
        self._rounds: dict[int, RoundNorms] = {}
        self._totals: dict[int, float] = {}
        """By round, the sum of squares that was taken here."""
        self._told: dict[int, float] = {}
        """The same, told with results: for when no root answers."""
        self._changed = Condition()
        self._oldest = 0
        self._batch: Batch | None = None
        self._tasks = Tasks("norms")
        self.last_total = 0.0
        """The newest sum of squares that was taken here; 0 before the first."""
        self.transport.handle("norm", self._on_norm)
        self.transport.handle("stage_norm", self._on_stage_norm)

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
        request = NormRequest(round_index, self.stage_index, shards, tuple(sums[j] for j in shards))
        awake_s = self.gossip.awake_s
        end, turn = awake_s() + self.wait_s(), 0
        while (left := end - awake_s()) > 0:
            for peer_id in self.roots(self.stage_index)[:ROOTS_ASKED]:
                try:
                    if round_index in self._totals:
                        return self._totals[round_index]
                    if peer_id == self.gossip.own.peer_id:  # others may see another root
                        return self._take(
                            round_index, await self._collect(request, min(left, ATTEMPT_S))
                        )
                    return await self._ask_total(peer_id, request, min(left, ATTEMPT_S))
                except SwarmnetError as e:
                    log.debug("norm of round %d from %s: %s", round_index, peer_id[-8:], e)
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

    async def _ask_total(self, peer_id: str, request: NormRequest, timeout_s: float) -> float:
        message = Message(request)
        reply = await self.transport.call(peer_id, "norm", message, timeout_s=timeout_s)
        return self._take(request.round, convert(reply.body, NormReply).sum)

    def _take(self, round_index: int, total: float) -> float:
        self.last_total = self._totals.setdefault(round_index, total)
        return self.last_total

    def known(self, round_index: int) -> float | None:
        """The sum of squares of a round, where it was taken or told here."""
        return self._totals.get(round_index, self._told.get(round_index))

    def heard(self, round_index: int, total: float) -> None:
        """A peer told the sum of squares of a round with a result. The first word counts."""
        if self._oldest <= round_index <= self.current() + KEPT_ROUNDS:
            self._told.setdefault(round_index, total)

    async def ask_others(self, round_index: int, turn: int) -> float | None:
        """The total from peers that took it from a root which is gone: of this stage, and the roots
        of the others. Some are asked in each `turn`. None where none of these knows it."""
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
            *(self._ask_total(peer_id, request, ATTEMPT_S) for peer_id in asked),
            return_exceptions=True,
        )
        for answer in found:
            if not isinstance(answer, BaseException):
                return answer
            if not isinstance(answer, SwarmnetError):
                raise answer
        return None

    async def _on_norm(self, request: Request) -> Message:
        norm = convert(request.message.body, NormRequest)
        known = self._totals.get(norm.round) if norm.shards else self.known(norm.round)
        if known is not None:
            return Message(NormReply(known))
        if not norm.shards:
            raise NotReady("the total is not known here")
        if norm.stage != self.stage_index:
            raise NotReady(f"stage {norm.stage} is not served here")
        return Message(NormReply(await self._collect(norm, ATTEMPT_S)))

    async def _on_stage_norm(self, request: Request) -> Message:
        theirs = convert(request.message.body, StageNormRequest)
        if theirs.stage >= self.num_stages:
            raise ProtocolViolation("no such stage")
        norms = self._of(theirs.round)
        norms.stages.setdefault(theirs.stage, theirs.sum)
        self._changed.notify_all()
        if not await self._changed.until(lambda: self.stage_index in norms.stages, ATTEMPT_S):
            raise NotReady("the norm of this stage is not known yet")
        return Message(NormReply(norms.stages[self.stage_index]))

    def _of(self, round_index: int) -> RoundNorms:
        if round_index < self._oldest:
            raise Stale("the norm of that round is gone")
        is_far = round_index > self.current() + KEPT_ROUNDS
        if is_far or (round_index not in self._rounds and len(self._rounds) > 2 * KEPT_ROUNDS):
            raise NotReady("a round too far ahead")
        return self._rounds.setdefault(round_index, RoundNorms())

    async def _collect(self, norm: NormRequest, wait_s: float) -> float:
        """As root: takes sums of shards; returns the total when every stage's is known."""
        norms = self._of(norm.round)
        for j, s in zip(norm.shards, norm.sums, strict=True):
            if j < self.num_shards:
                norms.shards.setdefault(j, s)
        if len(norms.shards) == self.num_shards and self.stage_index not in norms.stages:
            norms.stages[self.stage_index] = sum(norms.shards[j] for j in range(self.num_shards))
        self._changed.notify_all()
        if self.stage_index in norms.stages and norms.asking is None:
            norms.asking = self._tasks.start(self._ask_all(norm.round, norms))
        r, n = norm.round, self.num_stages
        await self._changed.until(lambda: len(norms.stages) == n or r in self._totals, wait_s)
        if r in self._totals:
            return self._totals[r]
        if len(norms.stages) < n:
            raise NotReady("not every stage's norm is known yet")
        return sum(norms.stages[s] for s in range(n))

    async def _ask_all(self, round_index: int, norms: RoundNorms) -> None:
        """Swaps sums with the roots of the stages before this one; the later ones ask us."""
        others = [s for s in range(self.num_stages) if s != self.stage_index]
        await asyncio.gather(*(self._ask(round_index, norms, s) for s in others))

    async def _ask(self, round_index: int, norms: RoundNorms, stage: int) -> None:
        request = StageNormRequest(round_index, self.stage_index, norms.stages[self.stage_index])
        loop = asyncio.get_running_loop()
        end = loop.time() + self.wait_s()
        while stage not in norms.stages and round_index not in self._totals and loop.time() < end:
            for peer_id in self.roots(stage)[:ROOTS_ASKED]:
                try:
                    reply = await self.transport.call(
                        peer_id, "stage_norm", Message(request), timeout_s=ATTEMPT_S
                    )
                    norms.stages.setdefault(stage, convert(reply.body, NormReply).sum)
                    self._changed.notify_all()
                    return
                except SwarmnetError as e:
                    log.debug("norm of stage %d from %s: %s", stage, peer_id[-8:], e)
            await self.gossip.changed.wait(RETRY_S)

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
            asking = self._rounds.pop(r).asking
            if asking is not None:
                asking.cancel()
