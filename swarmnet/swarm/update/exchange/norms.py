"""Sums of squares that primaries tell each other: of the gradient over all stages, and of each
contribution over all shards of a stage.

Of a shard's sum, the word of its primary counts, as the collector sees who that is (`speakers`).

The gradient is clipped by its norm over all stages, as one machine would (`Norms`). Each primary
sends the sums of squares of its shards to three *collectors*, whatever their stage: the roots of
the first stages (the first owners of their shards 0). A collector that has heard of all shards of
all stages answers with the total, summed in an order that is the same at each. The first total that
two of them give counts; a collector goes by its own. That makes one way there and one back, and
three small messages a primary and batch of its shards. Two collectors that all can call are enough,
and one that lies can do nothing alone. (Where a primary dies and its shard is summed again, they
may have heard other sums of it: shards are clipped by norms that differ a little then, and each
shard by the same at all replicas.)

Where collectors fail, or say nothing for a while, the next in order sum up too. These may never
hear the sums of primaries that have the total already: so each peer that has it tells all that ask,
of whatever stage. The total goes with every result, and to every backup, so that it outlives the
peers that summed it up; that word is taken only when no collector has answered. Nothing blocks on a
norm for ever: at the deadline the last round's norm stands in, and that is counted.

`median_clip` clips by the norm of a contribution over *all* shards of its stage, which no single
primary sees: a shard of rare words is all zero at most contributors, and one that knows such a word
would be taken for an attacker there. So the primaries tell the root of the stage the sums of
squares of their shards, contributor by contributor, and get the sums over all shards
(`ContributionNorms`)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmnet.errors import NotReady, ProtocolViolation, Stale, SwarmnetError
from swarmnet.methods.update import (
    CONTRIBUTIONS,
    NORM,
    ContributionsReply,
    ContributionsRequest,
    NormReply,
    NormRequest,
)
from swarmnet.methods.update_proof import SIGNED_AS, Proof, Squares, Summed
from swarmnet.protocol.moments import Deadline, Since
from swarmnet.protocol.update import robust
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S, RETRY_S, TOGETHER_S
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchange.speakers import Speakers, first_heard
from swarmnet.swarm.update.ownership import Ownership
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message, pack

log = logging.getLogger("swarmnet.norms")
aggregation_log = logging.getLogger("swarmnet.aggregation")

ATTEMPT_S = 5.0
MAX_ASKED = 8
"""Peers at a time that are asked whether they know the total."""
ROOTS_ASKED = 2
"""Of each stage: its root, and the one that would be root after it."""
COLLECTORS = 3
"""Peers that sum up at a time."""
AGREE = 2
"""So many of them have to say the same, where there are more than that."""
SAME = 0.01
"""Relative difference of totals that are the same: where a primary has died, and its shard was
summed again, collectors may have heard other sums of it."""
KEPT_ROUNDS = 3
CONTRIBUTIONS_WAIT_S = 6.0
"""Longest wait for the norms of contributions over all shards; then those of the own shards are
judged by."""


# ---- of the gradient -------------------------------------------------------------------------


@dataclass
class StageSums:
    """What a collector has heard of one stage in one round."""

    words: dict[int, dict[str, float]] = field(default_factory=dict)
    """By shard, then by who said it."""
    signed: dict[tuple[int, str], Proof] = field(default_factory=dict)
    """What it signed then."""
    total: float | None = None
    """None before it is known."""
    passed_over: tuple[str, ...] = ()
    """Who would have spoken before those that did, and had said nothing when it was known."""
    _whole: Since | None = None
    """Since when there is a word for every shard."""
    _most: Since | None = None
    """Since when there is one of most primaries."""

    def settle(
        self, orders: Sequence[Sequence[str]], now: float, usual_s: float, longest_s: float
    ) -> None:
        """Sums up, by ascending shard, where all is there. `orders`: by shard, who may speak for
        it; the first one's word holds at once. Another's holds where that says nothing for
        `usual_s` after most of those that are taken for primaries have spoken, or for `longest_s`
        where they have not: it may be too early for all of them."""
        said = [first_heard(order, self.words.get(j, ())) for j, order in enumerate(orders)]
        if self.total is not None or not all(said):
            return
        primaries = {order[0] for order in orders}
        late = primaries - {p for p, order in zip(said, orders, strict=True) if p == order[0]}
        self._whole = self._whole or Since(now)
        if 2 * len(late) < len(primaries):
            self._most = self._most or Since(now)
        is_due = self._most is not None and self._most.is_older(now, usual_s)
        if late and not (is_due or self._whole.is_older(now, longest_s)):
            return
        self.total = sum(self.words[j][p] for j, p in enumerate(said))
        spoken = {peer_id for by_peer in self.words.values() for peer_id in by_peer}
        before = {q for p, order in zip(said, orders, strict=True) for q in order[: order.index(p)]}
        self.passed_over = tuple(sorted(before - spoken))


@dataclass
class RoundSums:
    """What a collector has heard of one round."""

    stages: dict[int, StageSums] = field(default_factory=dict)

    def total(self, num_stages: int) -> float | None:
        """The sum over all stages, in their order; None before all are known."""
        totals = [self.stages[s].total if s in self.stages else None for s in range(num_stages)]
        found = [total for total in totals if total is not None]
        return sum(found) if len(found) == num_stages else None


@dataclass
class Batch:
    """Sums of shards that go to the collectors in one message."""

    round: int
    sums: dict[int, float]
    total: asyncio.Task[float]


@dataclass
class Norms:
    """Finds the sums of squares of the mean gradient, for the stage of one replica."""

    transport: Transport
    gossip: Gossip
    replica: Replica
    num_stages: int
    ownership: Ownership
    speakers: Speakers
    pace: ExchangePace

    def __post_init__(self) -> None:
        self._rounds: dict[int, RoundSums] = {}
        self._totals: dict[int, float] = {}
        """By round, the sum of squares that was taken here."""
        self._told: dict[int, float] = {}
        """The same, told with results: for when no collector answers."""
        self._changed = Condition()
        self._oldest = 0
        self._batch: Batch | None = None
        self._num_waiting = 0
        """Batches whose total is waited for."""
        self._adopted: dict[int, dict[int, Proof | None]] = {}
        """By round and shard, what came with results before the total was known here: what their
        primaries had signed of the sum."""
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
        self._num_waiting += 1
        try:
            return await self._total(round_index, sums)
        finally:
            self._num_waiting -= 1

    async def _total(self, round_index: int, sums: dict[int, float]) -> float:
        request = self._signed(round_index, sums)
        awake_s, turn = self.gossip.liveness.awake_s, 0
        end = Deadline.after(awake_s(), self.pace.waits().norm_s)
        while not end.is_over(awake_s()):
            if round_index in self._totals:
                return self._totals[round_index]
            left_s = end.left_s(awake_s())
            total = await self._first_answer(request, min(left_s, ATTEMPT_S))
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

    def _signed(
        self, round_index: int, sums: Mapping[int, float], summed: tuple[Proof, ...] = ()
    ) -> NormRequest:
        shards = tuple(sorted(sums))
        request = NormRequest(
            round_index, self.replica.index, shards, tuple(sums[j] for j in shards), b"", summed
        )
        statement = pack(self._said(request, self.gossip.own.peer_id))
        return replace(request, signature=self.gossip.signer.sign(SIGNED_AS + statement))

    def _said(self, norm: NormRequest, speaker: str) -> Squares:
        where = self.gossip.own.run_id, speaker, 0, norm.round, norm.stage
        return Squares(*where, norm.shards, norm.sums)

    # ---- for a primary that does not speak ----------------------------------------------------

    async def is_silent(self, round_index: int, *, at_once: bool) -> bool:
        """As backup that has the sum of a shard: whether its primary does not speak of it, since no
        total is known for a while; `at_once`: without the wait."""
        awake_s = self.gossip.liveness.awake_s
        end = Deadline.after(awake_s(), 0.0 if at_once else LOOK_LESS_S)
        while self._is_awaited(round_index):
            if end.is_over(awake_s()):
                return True
            await asyncio.sleep(RETRY_S)
        return False

    async def stand_in(self, round_index: int, shard: int, squares: float) -> None:
        """As backup whose primary `is_silent`: says the squares in its place, until the total is
        known or the round is over."""
        request = self._signed(round_index, {shard: squares})
        while self._is_awaited(round_index):
            total = await self._first_answer(request, ATTEMPT_S)
            if total is not None:
                self._take(round_index, total)
            await asyncio.sleep(RETRY_S)

    def _is_awaited(self, round_index: int) -> bool:
        """The total of a round."""
        return self.known(round_index) is None and self.replica.current_exchange <= round_index

    # ---- for primaries that have told a result ------------------------------------------------

    def adopted(self, round_index: int, shard: int, summed: Proof | None) -> None:
        """A result of another one has come for a shard. Where there is no total then, its primary
        has told nobody of its squares, or is late with it: they are handed on as it has signed them
        (`summed`). Of a sum of which nothing is shown there are none."""
        if round_index in self._totals or round_index < self._oldest:
            return
        if round_index not in self._adopted:
            self._adopted[round_index] = {}
            self._tasks.start(self._hand_on(round_index))
        self._adopted[round_index][shard] = summed

    async def _hand_on(self, round_index: int) -> None:
        """Until the total is known, or the round is over: what has come since the last look. At
        once where that keeps a step of this replica's own from being made."""
        awake_s, handed = self.gossip.liveness.awake_s, 0
        end = Deadline.after(awake_s(), LOOK_LESS_S)
        while round_index >= max(self._oldest, self.replica.current_exchange):
            await asyncio.sleep(RETRY_S)
            if round_index in self._totals:
                return
            adopted = self._adopted[round_index]
            if len(adopted) == handed or not (self._num_waiting or end.is_over(awake_s())):
                continue
            handed = len(adopted)
            nothing = {j: 0.0 for j, summed in adopted.items() if summed is None}
            shown = tuple(summed for summed in adopted.values() if summed is not None)
            request = self._signed(round_index, nothing, shown)
            total = await self._first_answer(request, ATTEMPT_S)
            if total is not None and self._num_waiting:
                self._take(round_index, total)

    async def _check(self, norm: NormRequest, sender: str) -> list[Summed]:
        """What others have signed of the shards that the caller hands on. Raises
        `ProtocolViolation` where it, or the caller's own word, bears no such signature."""
        statement = pack(self._said(norm, sender))
        signer, where = self.gossip.signer, (self.gossip.own.run_id, norm.round, norm.stage)
        summed = [(proof, proof.read(Summed)) for proof in norm.summed]
        if any((said.run_id, said.round, said.stage) != where for _, said in summed):
            raise ProtocolViolation("a sum of another round or stage")

        def are_signed() -> bool:
            return signer.verify(sender, SIGNED_AS + statement, norm.signature) and all(
                signer.verify(said.peer_id, proof.signed, proof.signature) for proof, said in summed
            )

        if not await signer.beside(are_signed):
            raise ProtocolViolation("sums of squares that are not signed by who says them")
        return [said for _, said in summed]

    def signed_by(self, peer_id: str, round_index: int, stage: int, shard: int) -> Proof | None:
        """What a peer has told this one, as collector, of a shard's squares."""
        sums = self._rounds.get(round_index, RoundSums()).stages.get(stage, StageSums())
        return sums.signed.get((shard, peer_id))

    def collectors(self) -> list[str]:
        """Whom a primary tells."""
        return self._collectors()[:COLLECTORS]

    def _collectors(self) -> list[str]:
        """Those that sum up, then those that would in their place."""
        most = 2 * COLLECTORS
        roots = [self.ownership.roots(stage) for stage in range(min(most, self.num_stages))]
        return [root[i] for i in range(most) for root in roots if i < len(root)][:most]

    async def _first_answer(self, request: NormRequest, timeout_s: float) -> float | None:
        """Of the collectors; of those after them too, where they fail or say nothing for a while.
        None where none holds."""

        async def ask(peer_id: str) -> float:
            if peer_id == self.gossip.own.peer_id:  # others may see other roots
                return await self._collect(request, peer_id, timeout_s)
            # Who collects says so after its wait, and that is another answer than none.
            return await self._ask(peer_id, request, timeout_s + RETRY_S)

        order, own = self._collectors(), self.gossip.own.peer_id
        wanted = AGREE if len(order) > AGREE else 1
        heard = dict[str, float]()

        async def hear(peer_id: str, is_late: bool) -> None:
            if is_late:
                await asyncio.wait(tasks[:COLLECTORS], timeout=LOOK_LESS_S)
                if agreed(heard, "", wanted) is not None:
                    return
            heard[peer_id] = await ask(peer_id)

        # They go on when the total is here: others may need to hear of the same collectors.
        tasks = [self._tasks.start(hear(p, i >= COLLECTORS)) for i, p in enumerate(order)]
        num_collecting = 0
        for answer in asyncio.as_completed(tasks):
            try:
                await answer
            except SwarmnetError as e:
                log.debug("norm of round %d: %s", request.round, e)
                num_collecting += isinstance(e, NotReady)
            total = agreed(heard, own, wanted)
            if total is not None:
                return total
        if not heard or num_collecting >= AGREE:
            return None  # what one says whom others cannot confirm yet
        return min(heard.values(), key=lambda total: abs(total - self.last_total))

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
        if self._oldest <= round_index <= self.replica.current_exchange + KEPT_ROUNDS:
            self._told.setdefault(round_index, total)

    async def ask_others(self, round_index: int, turn: int) -> float | None:
        """The total from peers that took it from a collector which is gone: of this stage, and the
        roots of the others. Some are asked in each `turn`. None where none of these knows it."""
        own = self.gossip.own.peer_id
        others = []
        for stage in range(self.num_stages):
            if stage != self.replica.index:
                others += self.ownership.roots(stage)[:ROOTS_ASKED]
        others += [p for p in self.ownership.roots(self.replica.index) if p != own]
        first = turn * MAX_ASKED % max(1, len(others))
        asked = (*others[first:], *others[:first])[:MAX_ASKED]
        request = NormRequest(round_index, self.replica.index, (), ())
        found = await asyncio.gather(
            *(self._ask(peer_id, request, ATTEMPT_S) for peer_id in asked),
            return_exceptions=True,
        )
        heard = dict[str, float]()
        for peer_id, answer in zip(asked, found, strict=True):
            if not isinstance(answer, BaseException):
                heard[peer_id] = answer
            elif not isinstance(answer, SwarmnetError):
                raise answer
        total = agreed(heard, own, AGREE if len(asked) > AGREE else 1)
        return None if total is None else self._take(round_index, total)

    async def _on_norm(self, request: Request[NormRequest]) -> Message[NormReply]:
        norm = request.message.body
        if norm.shards:
            self.speakers.spoke(request.remote)
        says = bool(norm.shards or norm.summed)
        known = self._totals.get(norm.round) if says else self.known(norm.round)
        if known is not None:
            return Message(NormReply(known))
        if not says:
            raise NotReady("the total is not known here")
        if norm.stage >= self.num_stages:
            raise ProtocolViolation("no such stage")
        summed = await self._check(norm, request.remote)
        return Message(NormReply(await self._collect(norm, request.remote, ATTEMPT_S, summed)))

    def _of(self, round_index: int) -> RoundSums:
        if round_index < self._oldest:
            raise Stale("the norm of that round is gone")
        is_far = round_index > self.replica.current_exchange + KEPT_ROUNDS
        if is_far or (round_index not in self._rounds and len(self._rounds) > 2 * KEPT_ROUNDS):
            raise NotReady("a round too far ahead")
        return self._rounds.setdefault(round_index, RoundSums())

    async def _collect(
        self, norm: NormRequest, sender: str, wait_s: float, summed: Sequence[Summed] = ()
    ) -> float:
        """Takes sums of shards; returns the total when every stage's are known. `summed`: what
        others have signed that is handed on."""
        sums, num_shards = self._of(norm.round), self.ownership.members.num_shards(norm.stage)
        if not num_shards:
            raise NotReady("no replica of that stage is known here")
        heard = sums.stages.setdefault(norm.stage, StageSums())
        words = [(j, sender, squares) for j, squares in zip(norm.shards, norm.sums, strict=True)]
        words += [(said.shard, said.peer_id, said.squares) for said in summed]
        signed = Proof(pack(self._said(norm, sender)), norm.signature)
        for i, (j, speaker, squares) in enumerate(words):
            if j < num_shards and speaker in self.speakers.order(norm.stage, norm.round, j):
                heard.words.setdefault(j, {}).setdefault(speaker, squares)
                if i < len(norm.shards):
                    heard.signed.setdefault((j, speaker), signed)
        self._settle(norm.round, sums)
        awake_s = self.gossip.liveness.awake_s
        end = Deadline.after(awake_s(), wait_s)
        while True:
            total = self._totals.get(norm.round, sums.total(self.num_stages))
            if total is not None:
                return total
            if end.is_over(awake_s()):
                raise NotReady("not every stage's norm is known yet")
            if not await self._changed.wait(min(end.left_s(awake_s()), LOOK_AGAIN_S)):
                self._settle(norm.round, sums)  # by the time that has passed

    def _settle(self, round_index: int, sums: RoundSums) -> None:
        waits, now = self.pace.waits(), self.gossip.liveness.awake_s()
        usual_s, longest_s = max(LOOK_LESS_S, waits.usual_s), waits.contributions_s
        for stage, heard in sums.stages.items():
            num_shards = self.ownership.members.num_shards(stage)
            if heard.total is not None or len(heard.words) < num_shards:
                continue
            orders = [self.speakers.order(stage, round_index, j) for j in range(num_shards)]
            heard.settle(orders, now, usual_s, longest_s)
            if heard.total is not None:
                self.speakers.passed_over(heard.passed_over)
                self._changed.notify_all()

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
        for r in [r for r in self._adopted if r < self._oldest]:
            del self._adopted[r]


def agreed(heard: Mapping[str, float], own: str, wanted: int) -> float | None:
    """The total that holds of what peers have given; None where too few say the same. `own`: who
    asks, which believes itself."""
    if own in heard:
        return heard[own]
    for total in heard.values():
        same = [t for t in heard.values() if math.isclose(t, total, rel_tol=SAME)]
        if len(same) >= wanted:
            return total
    return None


# ---- of contributions ------------------------------------------------------------------------


@dataclass
class RoundContributions:
    """What a root has heard of one round: by shard, by contributor, sums of squares."""

    shards: dict[int, dict[str, float]] = field(default_factory=dict)
    whole: dict[str, float] | None = None
    """By contributor, over all shards; once every shard is known."""

    def complete(self, num_shards: int) -> None:
        """Sums up where every shard is known."""
        if self.whole is None and len(self.shards) >= num_shards:
            self.whole = _summed(self.shards)


@dataclass
class ContributionBatch:
    """Shards that go to the root in one message."""

    round: int
    shards: dict[int, Mapping[str, float]]
    whole: asyncio.Task[dict[str, float]]


@dataclass
class ContributionNorms:
    """Finds the sums of squares of contributions over all shards of one stage."""

    transport: Transport
    gossip: Gossip
    replica: Replica
    ownership: Ownership
    speakers: Speakers

    def __post_init__(self) -> None:
        self._rounds: dict[int, RoundContributions] = {}
        self._batch: ContributionBatch | None = None
        self._oldest = 0
        self._changed = Condition()
        self._tasks = Tasks("contributions")
        serve(self.transport, CONTRIBUTIONS, self._on_contributions)

    async def close(self) -> None:
        await self._tasks.close()

    def may_be_waited_for(self) -> bool:
        """The stage is large enough for other primaries to have enough contributors."""
        now = asyncio.get_running_loop().time()
        return len(self.gossip.view.members(self.replica.index, now)) >= robust.MIN_CONTRIBUTORS

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

    def _add(
        self, round_index: int, shard_index: int, squares: Mapping[str, float]
    ) -> ContributionBatch:
        batch = self._batch
        if batch is None or batch.round != round_index:
            shards: dict[int, Mapping[str, float]] = {}
            task = self._tasks.start(self._send(round_index, shards))
            batch = self._batch = ContributionBatch(round_index, shards, task)
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
            round_index, self.replica.index, tuple(indices), tuple(peers), sums
        )
        loop = asyncio.get_running_loop()
        end = Deadline.after(loop.time(), CONTRIBUTIONS_WAIT_S)
        while left_s := end.left_s(loop.time()):
            for peer_id in self.ownership.roots(self.replica.index)[:2]:
                try:
                    if peer_id == self.transport.peer_id:
                        return await self._collect(request, peer_id, min(left_s, ATTEMPT_S))
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
                    aggregation_log.debug("norms of contributions from %s: %s", peer_id[-8:], e)
            await self.gossip.changed.wait(min(RETRY_S, left_s))
        aggregation_log.info("round %d: clipping by the norms of the own shards only", round_index)
        return _summed(shards)

    async def _on_contributions(
        self, request: Request[ContributionsRequest]
    ) -> Message[ContributionsReply]:
        body = request.message.body
        if len(body.peers) > len(self.gossip.view):
            raise ProtocolViolation("more contributors than there are peers")
        whole = await self._collect(body, request.remote, ATTEMPT_S)
        peers = tuple(sorted(whole))
        return Message(ContributionsReply(peers, tuple(whole[p] for p in peers)))

    async def _collect(
        self, body: ContributionsRequest, sender: str, wait_s: float
    ) -> dict[str, float]:
        """As root: takes the sums of shards of which the sender is the primary; returns those over
        all shards when all are known."""
        if body.round < self._oldest:
            raise Stale("the norms of that round are gone")
        if body.round > self.gossip.own.round + KEPT_ROUNDS:  # none of them is kept
            raise NotReady("a round too far ahead")
        heard = self._rounds.setdefault(body.round, RoundContributions())
        width = len(body.peers)
        for i, j in enumerate(body.shards):
            if self.speakers.order(body.stage, body.round, j)[:1] != [sender]:
                continue  # where it takes over, it says so again
            row = body.sums[i * width : (i + 1) * width]
            heard.shards.setdefault(j, dict(zip(body.peers, row, strict=True)))
        heard.complete(self.replica.num_shards)
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
