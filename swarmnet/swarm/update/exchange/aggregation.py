"""Aggregating the contributions to one shard at its primary, by the rule of the run.

A contribution that is not finite, or beyond all bounds, does not count, under any rule, and its
sender is reported: a strike in the own record (`Record.strikes`), which every peer sees by gossip.

`median_clip` clips by the norm of a contribution over *all* shards of its stage, which no single
primary sees: a shard of rare words is all zero at most contributors, and one that knows such a word
would be taken for an attacker there. So the primaries tell the root of the stage the sums of
squares of their shards, contributor by contributor, and get the sums over all shards
(`ContributionNorms`). The other rules work on every shard for itself."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swarmnet.errors import NotReady, ProtocolViolation, Stale, SwarmnetError
from swarmnet.methods.update import CONTRIBUTIONS, ContributionsReply, ContributionsRequest
from swarmnet.ports import Optimizer, Worker
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.membership.records import MAX_STRIKES
from swarmnet.protocol.update import robust
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import RETRY_S, TOGETHER_S
from swarmnet.swarm.update.exchange.norms import ATTEMPT_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.aggregation")

WAIT_S = 6.0
"""Longest wait for the norms over all shards; then those of the own shards are judged by."""
KEPT_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Part:
    """One contribution to one shard."""

    peer_id: str
    num_tokens: int
    gradient: Array


T = TypeVar("T")
Finish = Callable[[Array, float, int], T]
"""What is made of an aggregate, its sum of squares and the tokens behind it, on the worker."""


@dataclass
class Aggregator:
    """Sums contributions for the primary of shards of one stage."""

    rule: str
    worker: Worker
    optimizer: Optimizer
    gossip: Gossip
    norms: ContributionNorms
    _clipped: tuple[str, ...] = ()
    """Senders of contributions that were clipped in the last round that had any."""

    async def __call__(
        self,
        round_index: int,
        shard_index: int,
        parts: list[Part],
        counted: int,
        finish: Finish[T],
    ) -> T | None:
        """`parts` by ascending peer id; `counted`: tokens of the round by the word of the feeders.
        None where there is nothing to sum. Raises `ProtocolViolation` where finite contributions
        overflow."""
        tells = self.rule == robust.MEDIAN_CLIP and self.norms.may_be_waited_for()
        if self._is_mean(parts) and not tells:
            return await self._sum(round_index, shard_index, parts, finish)
        parts = await self._decoded(round_index, shard_index, parts)
        if self._is_mean(parts):
            if tells:
                self.norms.tell(round_index, shard_index, await self._squares(parts))
            return await self._sum(round_index, shard_index, parts, finish, are_coded=False)
        squares = await self._squares(parts)
        parts = self._only_sound(round_index, shard_index, parts, squares)
        tokens = robust.fair_tokens({p.peer_id: p.num_tokens for p in parts}, counted)
        factors = dict.fromkeys(tokens, 1.0)
        if self.rule == robust.MEDIAN_CLIP:
            finite = {p: s for p, s in squares.items() if p in tokens}
            whole = await self.norms.whole(round_index, shard_index, finite)
            factors = robust.clip_factors({p: whole.get(p, s) for p, s in finite.items()}, tokens)
            if shard_index == 0:
                self._report_clipped(round_index, factors)
        if not parts:
            return None

        def work() -> T:
            total = self.optimizer.aggregate(
                self.rule,
                [p.gradient for p in parts],
                [tokens[p.peer_id] for p in parts],
                [factors[p.peer_id] for p in parts],
            )
            total_squares = self.optimizer.sum_of_squares(total)
            if not math.isfinite(total_squares):
                raise ProtocolViolation(f"the gradient of shard {shard_index} overflows")
            return finish(total, total_squares, sum(tokens.values()))

        return await self.worker.run(work)

    def _is_mean(self, parts: list[Part]) -> bool:
        return self.rule == robust.MEAN or len(parts) < robust.MIN_CONTRIBUTORS

    async def _decoded(self, round_index: int, shard_index: int, parts: list[Part]) -> list[Part]:
        """Without those that are not what the codec makes of finite numbers."""
        if self.optimizer.codec.names.contributions == NONE:
            return parts
        sound, others = await self.worker.run(lambda: self._decode(shard_index, parts))
        for part in others:
            self._report(round_index, shard_index, part.peer_id, "not finite")
        return sound

    def _decode(self, shard_index: int, parts: list[Part]) -> tuple[list[Part], list[Part]]:
        """On the worker: the parts decoded, and those that cannot be."""
        codec, sound, others = self.optimizer.codec, list[Part](), list[Part]()
        for part in parts:
            try:
                gradient = codec.decoded_contribution(shard_index, part.gradient)
            except ProtocolViolation:
                others.append(part)
            else:
                sound.append(replace(part, gradient=gradient))
        return sound, others

    async def _sum(
        self,
        round_index: int,
        shard_index: int,
        parts: list[Part],
        finish: Finish[T],
        *,
        are_coded: bool = True,
    ) -> T | None:
        """The mean: one pass over the sum tells whether all was finite. All in one turn of the
        worker, which costs about as much as the arithmetic on a small shard."""

        def work() -> tuple[list[Part], list[Part], float, T | None]:
            sound, others = self._decode(shard_index, parts) if are_coded else (parts, [])
            if not sound:
                return sound, others, 0.0, None
            total = self.optimizer.sum([p.gradient for p in sound])
            squares, num_tokens = self.optimizer.sum_of_squares(total), _tokens(sound)
            if not robust.is_sound(squares, num_tokens):
                return sound, others, squares, None
            return sound, others, squares, finish(total, squares, num_tokens)

        while parts:
            parts, others, squares, made = await self.worker.run(work)
            for part in others:
                self._report(round_index, shard_index, part.peer_id, "not finite")
            if made is not None or not parts:
                return made
            are_coded, summed = False, parts
            parts = self._only_sound(round_index, shard_index, parts, await self._squares(parts))
            if len(parts) == len(summed) and not math.isfinite(squares):
                raise ProtocolViolation(f"the gradient of shard {shard_index} overflows")
            if len(parts) == len(summed):
                return await self.worker.run(functools.partial(self._made, parts, squares, finish))
        return None

    def _made(self, parts: list[Part], squares: float, finish: Finish[T]) -> T:
        total = self.optimizer.sum([p.gradient for p in parts])
        return finish(total, squares, _tokens(parts))

    async def _squares(self, parts: list[Part]) -> dict[str, float]:
        """By peer; not finite where the gradient is not."""

        def work() -> dict[str, float]:
            return {p.peer_id: self.optimizer.sum_of_squares(p.gradient) for p in parts}

        return await self.worker.run(work)

    def _only_sound(
        self, round_index: int, shard_index: int, parts: list[Part], squares: Mapping[str, float]
    ) -> list[Part]:
        for p in parts:
            if not robust.is_sound(squares[p.peer_id], p.num_tokens):
                is_finite = math.isfinite(squares[p.peer_id])
                why = "beyond all bounds" if is_finite else "not finite"
                self._report(round_index, shard_index, p.peer_id, why)
        return [p for p in parts if robust.is_sound(squares[p.peer_id], p.num_tokens)]

    def _report(self, round_index: int, shard_index: int, peer_id: str, why: str) -> None:
        line = "round %d shard %d: the gradient of %s is %s and does not count"
        log.warning(line, round_index, shard_index, peer_id[-8:], why)
        strike(self.gossip, peer_id)

    def _report_clipped(self, round_index: int, factors: Mapping[str, float]) -> None:
        clipped = tuple(sorted(p for p, f in factors.items() if f < 1.0))
        if clipped:
            self.gossip.add_total("contributions_clipped", len(clipped))
        if set(clipped) - set(self._clipped):  # said once while it is always the same ones
            log.warning(
                "round %d: gradients far larger than the others', cut to the median norm: %s",
                round_index,
                ", ".join(f"{p[-8:]} x {factors[p]:.2g}" for p in clipped),
            )
        self._clipped = clipped or self._clipped


def _tokens(parts: list[Part]) -> int:
    return sum(p.num_tokens for p in parts)


def strike(gossip: Gossip, peer_id: str) -> None:
    """Reports a contribution that was not finite to all peers; of too many senders, the first
    `MAX_STRIKES` by name are kept."""
    gossip.add_total("contributions_dropped")
    strikes = {**gossip.own.strikes, peer_id: gossip.own.strikes.get(peer_id, 0) + 1}
    gossip.amend(strikes=dict(sorted(strikes.items())[:MAX_STRIKES]))


@dataclass
class RoundContributions:
    """What a root has heard of one round: by shard, by contributor, sums of squares."""

    shards: dict[int, dict[str, float]] = field(default_factory=dict)
    whole: dict[str, float] | None = None
    """By contributor, over all shards; once every shard is known."""


@dataclass
class Batch:
    """Shards that go to the root in one message."""

    round: int
    shards: dict[int, Mapping[str, float]]
    whole: asyncio.Task[dict[str, float]]


@dataclass
class ContributionNorms:
    """Sums of squares of contributions over all shards of one stage."""

    transport: Transport
    gossip: Gossip
    stage_index: int
    num_shards: int
    roots: Callable[[int], list[str]]
    """As in `norms.Norms`."""
    num_due: Callable[[int], int] | None = None
    """By round, how many shards are exchanged in it; all of them where it is left out."""

    def __post_init__(self) -> None:
        self._rounds: dict[int, RoundContributions] = {}
        self._batch: Batch | None = None
        self._oldest = 0
        self._changed = Condition()
        self._tasks = Tasks("contributions")
        serve(self.transport, CONTRIBUTIONS, self._on_contributions)

    async def close(self) -> None:
        await self._tasks.close()

    def may_be_waited_for(self) -> bool:
        """The stage is large enough for other primaries to have enough contributors."""
        now = asyncio.get_running_loop().time()
        return len(self.gossip.view.members(self.stage_index, now)) >= robust.MIN_CONTRIBUTORS

    def tell(self, round_index: int, shard_index: int, squares: Mapping[str, float]) -> None:
        """For the sake of other primaries; does not wait."""
        self._add(round_index, shard_index, squares)

    async def whole(
        self, round_index: int, shard_index: int, squares: Mapping[str, float]
    ) -> dict[str, float]:
        """By contributor, the sum of squares over all shards. Where they are not all known in time,
        over the shards that are known here."""
        batch = self._add(round_index, shard_index, squares)
        return await asyncio.shield(batch.whole)

    def _add(self, round_index: int, shard_index: int, squares: Mapping[str, float]) -> Batch:
        batch = self._batch
        if batch is None or batch.round != round_index:
            shards: dict[int, Mapping[str, float]] = {}
            task = self._tasks.start(self._send(round_index, shards))
            batch = self._batch = Batch(round_index, shards, task)
        batch.shards[shard_index] = {p: s for p, s in squares.items() if math.isfinite(s)}
        return batch

    async def _send(
        self, round_index: int, shards: dict[int, Mapping[str, float]]
    ) -> dict[str, float]:
        await asyncio.sleep(TOGETHER_S)
        if self._batch is not None and self._batch.shards is shards:
            self._batch = None
        peers = sorted({p for by_peer in shards.values() for p in by_peer})
        indices = sorted(shards)
        sums = tuple(shards[j].get(p, 0.0) for j in indices for p in peers)
        request = ContributionsRequest(
            round_index, self.stage_index, tuple(indices), tuple(peers), sums
        )
        loop = asyncio.get_running_loop()
        end = loop.time() + WAIT_S
        while (left := end - loop.time()) > 0:
            for peer_id in self.roots(self.stage_index)[:2]:
                try:
                    if peer_id == self.transport.peer_id:
                        return await self._collect(request, min(left, ATTEMPT_S))
                    reply = await call(
                        self.transport,
                        peer_id,
                        CONTRIBUTIONS,
                        Message(request),
                        timeout_s=ATTEMPT_S + RETRY_S,
                    )
                    body = reply.body
                    return dict(zip(body.peers, body.sums, strict=True))
                except SwarmnetError as e:
                    log.debug("norms of contributions from %s: %s", peer_id[-8:], e)
            await self.gossip.changed.wait(min(RETRY_S, left))
        log.info("round %d: clipping by the norms of the own shards only", round_index)
        return _summed(shards)

    async def _on_contributions(
        self, request: Request[ContributionsRequest]
    ) -> Message[ContributionsReply]:
        body = request.message.body
        if len(body.peers) > len(self.gossip.view):
            raise ProtocolViolation("more contributors than there are peers")
        whole = await self._collect(body, ATTEMPT_S)
        peers = tuple(sorted(whole))
        return Message(ContributionsReply(peers, tuple(whole[p] for p in peers)))

    async def _collect(self, body: ContributionsRequest, wait_s: float) -> dict[str, float]:
        """As root: takes the sums of shards; returns those over all shards when all are known."""
        if body.round < self._oldest:
            raise Stale("the norms of that round are gone")
        if body.round > self.gossip.own.round + KEPT_ROUNDS:  # none of them is kept
            raise NotReady("a round too far ahead")
        heard = self._rounds.setdefault(body.round, RoundContributions())
        width = len(body.peers)
        for i, j in enumerate(body.shards):
            row = body.sums[i * width : (i + 1) * width]
            heard.shards.setdefault(j, dict(zip(body.peers, row, strict=True)))
        due = self.num_shards if self.num_due is None else self.num_due(body.round)
        if heard.whole is None and len(heard.shards) >= due:
            heard.whole = _summed(heard.shards)
        self._changed.notify_all()
        if not await self._changed.until(lambda: heard.whole is not None, wait_s):
            raise NotReady("not every shard's norms are known yet")
        assert heard.whole is not None
        return heard.whole

    def finish_round(self, round_index: int) -> None:
        """Forgets rounds that no peer can ask about any more."""
        self._oldest = max(self._oldest, round_index - KEPT_ROUNDS)
        for r in [r for r in self._rounds if r < self._oldest]:
            del self._rounds[r]


def _summed(shards: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """By contributor, over shards in ascending order."""
    total: dict[str, float] = {}
    for j in sorted(shards):
        for peer_id, squares in shards[j].items():
            total[peer_id] = total.get(peer_id, 0.0) + squares
    return total
