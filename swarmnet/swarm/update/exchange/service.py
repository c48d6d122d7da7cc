"""Answers other replicas of the stage about its exchange: contributions, ballots, mirrors, sums."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import NotReady, ProtocolViolation, Redirect, Stale
from swarmnet.methods.state import FetchRequest
from swarmnet.methods.update import (
    BALLOT,
    FOLLOWS,
    GATHER,
    MIRROR,
    REDUCE,
    REDUCE_TIED,
    SUMS,
    BallotReply,
    BallotRequest,
    GatherReply,
    GatherRequest,
    MirrorReply,
    MirrorRequest,
    ReduceProgress,
    ReduceReply,
    ReduceRequest,
    ShardReply,
    SumsReply,
    SumsRequest,
    TiedSum,
)
from swarmnet.protocol.codecs import NONE, UpdateCodec, row_bytes
from swarmnet.protocol.membership.records import JOINING, LEAVING, Record
from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.exchange_turn import Turn, turn_of
from swarmnet.protocol.update.late_tokens import joined
from swarmnet.protocol.update.members import may_contribute, shows_round
from swarmnet.protocol.update.roster import Ballot
from swarmnet.protocol.update.round_end import Contributed, Newcomers
from swarmnet.swarm.calls import notify, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.swarm.update.exchange.auditing import UpdateAudits
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.calls import MAX_SHARED_CALL_BYTES, Told
from swarmnet.swarm.update.exchange.coded import check_contribution, check_for_backup, coded_bytes
from swarmnet.swarm.update.exchange.exchange import PresentExchange
from swarmnet.swarm.update.exchange.late import LateContributions
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchange.proofs import Proofs
from swarmnet.swarm.update.exchange.shard_work import ShardWork
from swarmnet.swarm.update.exchange.tied_shards import TiedShards
from swarmnet.swarm.update.optimizer_states import OptimizerStates
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message


@dataclass
class ExchangeService:
    """Answers the calls of the stage's update at one replica."""

    transport: Transport
    gossip: Gossip
    limits: WaitLimits
    replica: Replica
    states: OptimizerStates
    work: ShardWork
    books: Books
    pace: ExchangePace
    tied: TiedShards
    proofs: Proofs
    audits: UpdateAudits
    late: LateContributions
    newcomers: Newcomers
    exchange: PresentExchange
    tasks: Tasks

    def __post_init__(self) -> None:
        self._has_state: dict[tuple[str, int], int] = {}
        """By replica and shard: it has the state for the step of this exchange, though that may not
        have begun here."""
        self._contributed = Contributed()
        serve(self.transport, REDUCE, self._on_reduce)
        serve(self.transport, GATHER, self._on_gather)
        serve(self.transport, BALLOT, self._on_ballot)
        serve(self.transport, MIRROR, self._on_mirror)
        serve(self.transport, SUMS, self._on_sums)
        serve(self.transport, REDUCE_TIED, self._on_reduce_tied)
        serve(self.transport, FOLLOWS, self._on_follows)
        self.tasks.start(self._tell_primaries())

    @property
    def _names(self) -> UpdateCodec:
        return self.replica.optimizer.codec.names

    # ---- contributions ----------------------------------------------------------------------

    async def _on_reduce(self, request: Request[ReduceRequest]) -> Message[ReduceReply]:
        push = request.message.body
        num_bytes = sum(coded_bytes(self.replica, j) for j in push.shards)
        if len(push.shards) > 1 and num_bytes > MAX_SHARED_CALL_BYTES:
            raise ProtocolViolation(f"shards of {num_bytes} bytes do not share a call")
        record = self.gossip.view.get(request.remote)
        for members in push.members:
            if not all(self._are_neighbours(request.remote, p) for p in members):
                raise ProtocolViolation("contributions of another household")
        if any(push.num_tokens) and not may_contribute(record, push.stage):
            raise NotReady("a peer that joins has no gradient")
        gradients = self._gradients_of(push.shards, push.num_tokens, request.message.arrays)
        tokens = {j: n for j, n in zip(push.shards, push.num_tokens, strict=True) if n}
        given = {j: (tokens[j], gradient) for j, gradient in gradients.items()}
        await self.proofs.check(push.round, request.remote, given, push.signatures)
        self._note_contribution(push.round, record)
        await self._take_old(push, request.remote, given)
        primary = push.primary or self.gossip.own.peer_id
        work = [
            self._reduce(push, request, j, n, gradients.get(j), Ballot(term, primary))
            for j, n, term in zip(push.shards, push.num_tokens, push.terms, strict=True)
        ]
        telling = self.tasks.start(self._tell_sums(request, push))
        try:
            results = await self._all_of(work) if len(work) > 1 else [await work[0]]
        finally:
            telling.cancel()
        reply, arrays = ReduceReply(tuple(told for told, _ in results)), _values_in(results)
        await self.pace.turn(sum(values.num_bytes for values in arrays))
        return Message(reply, arrays)

    def _are_neighbours(self, one: str, other: str) -> bool:
        """Whether two peers are of one household, as their records show."""
        view = self.gossip.view
        records = [
            self.gossip.own if p == self.gossip.own.peer_id else view.get(p) for p in (one, other)
        ]
        houses = {record.house for record in records if record is not None}
        return len(houses) == 1 and "" not in houses

    async def _on_gather(self, request: Request[GatherRequest]) -> Message[GatherReply]:
        """As head of the household: a neighbour's contributions, to be in the own ones."""
        given, remote = request.message.body, request.remote
        if not self._are_neighbours(self.gossip.own.peer_id, remote):
            raise ProtocolViolation("this peer is of another household")
        gradients = self._gradients_of(given.shards, given.num_tokens, request.message.arrays)
        taken = list[int]()
        for j, num_tokens in zip(given.shards, given.num_tokens, strict=True):
            await self._until_now(given.round, j)
            if await self.exchange.now().take(j, remote, num_tokens, gradients[j]):
                taken.append(j)
        return Message(GatherReply(tuple(taken)))

    def _gradients_of(
        self, pushed: Sequence[int], num_tokens: Sequence[int], arrays: tuple[Array, ...]
    ) -> dict[int, Array]:
        shards = [j for j, n in zip(pushed, num_tokens, strict=True) if n]
        if len(arrays) != len(shards):
            raise ProtocolViolation(f"{len(arrays)} gradients of {len(shards)} shards")
        for j, array in zip(shards, arrays, strict=True):
            check_contribution(self.replica, j, array)
        return dict(zip(shards, arrays, strict=True))

    def _note_contribution(self, asked: int, record: Record | None) -> None:
        """Contributions to the round that is open here show that it is over elsewhere."""
        replica = self.replica
        is_of_round = asked == replica.current_exchange == replica.round
        if not is_of_round or record is None or replica.plan.is_delayed(asked):
            return
        if not shows_round(record, replica.index, asked):
            return
        known = self.gossip.view.known(replica.index, asyncio.get_running_loop().time())
        others = [r.peer_id for r in known if r.peer_id != self.gossip.own.peer_id]
        is_over = self._contributed.is_over(record.peer_id, asked, others)
        if is_over and replica.transitions.heard_over(asked):
            self.gossip.changed.notify_all()

    async def _all_of(self, work: Sequence[Coroutine[Any, Any, Told]]) -> list[Told]:
        """Raises as soon as one fails: the primary that it ought to go to may wait for it."""
        tasks = [self.tasks.start(one) for one in work]
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
            raise NotReady("the stage is not served here any more") from None
        finally:
            for task in tasks:
                task.cancel()

    async def _reduce(
        self,
        push: ReduceRequest,
        request: Request,
        j: int,
        num_tokens: int,
        gradient: Array | None,
        ballot: Ballot,
    ) -> Told:
        """One shard for one contributor."""
        remote, asked = request.remote, push.round
        turn = await self._turn(asked, j)
        self._note_late(push, j, remote)
        self._note_newcomer(j, remote)
        if turn is Turn.LAST:
            return await self._straggler(asked, j, remote, num_tokens, gradient)
        exchange = self.exchange.now()
        if not may_contribute(self.gossip.view.get(remote), self.replica.index):
            ballot = exchange.ballot(j)  # a newcomer waits for the result, and raises no ballot
        if push.follows:
            is_here = (
                push.follows[push.shards.index(j)] or self._has_state.get((remote, j)) == asked
            )
            exchange.progress.told_of_state(remote, j, is_here=is_here)
        members = push.members[push.shards.index(j)] if push.members else ()
        answer = await exchange.answer(
            j, lambda call: on.Pushed(call, remote, ballot, num_tokens, gradient, members)
        )
        if not isinstance(answer, do.Give):
            raise _redirect(j, answer)
        is_late = answer.is_late and await self._is_taken(asked, j, remote, num_tokens, gradient)
        if self._is_leaving(remote):
            request.progress(Message(ReduceProgress(j)))
        await self.work.complete(asked, j, answer.result)
        digest = b"" if push.is_whole else answer.result.digest
        proof = self.proofs.stepped(asked, j, exchange.ballot(j).term, answer.result.hash)
        if self.books.takes_copy(asked, j, remote, digest):
            told = self.books.told(asked, j, remote, is_copy=True, proof=proof, is_late=is_late)
            return told, None
        values = await self.work.copy_of(asked, j, answer.result, is_whole=push.is_whole)
        summed = self.proofs.sum_behind(asked, j)
        told = self.books.told(asked, j, remote, proof=proof, summed=summed, is_late=is_late)
        return told, values

    def _note_newcomer(self, j: int, remote: str) -> None:
        """A newcomer gets the shard whole, and is waited for. Not in a flood of names, which costs
        the rounds nothing; nor where newcomers follow several rounds, shard by shard."""
        view, now = self.gossip.view, asyncio.get_running_loop().time()
        record = view.get(remote)
        if record is None or record.state != JOINING or self.replica.plan.is_local:
            return
        if not view.is_flooded(now):
            num_bytes = row_bytes(NONE, self.replica.stage.shard_sizes[j])
            self.newcomers.gets(remote, j, num_bytes, now)

    def _note_late(self, push: ReduceRequest, j: int, remote: str) -> None:
        if push.late:
            i = push.shards.index(j)
            older = push.older[i] if push.older else ()
            self.books.brings(push.round, j, remote, joined(push.late[i], older))

    async def _take_old(
        self, push: ReduceRequest, remote: str, given: Mapping[int, tuple[int, Array]]
    ) -> None:
        """What was on its way while a later exchange was made. Raises `Stale`: its sender has to
        fetch the parameters of the stage."""
        current, plan = self.replica.current_exchange, self.replica.plan
        if not any(turn_of(plan, j, push.round, current) is Turn.OVER for j in given):
            return
        for j, (num_tokens, gradient) in given.items():
            self._note_late(push, j, remote)
            await self._is_taken(push.round, j, remote, num_tokens, gradient)
        raise Stale(f"round {push.round} is over here", round=self.replica.current_exchange)

    async def _is_taken(
        self, exchange: int, j: int, sender: str, num_tokens: int, gradient: Array | None
    ) -> bool:
        """What has come late counts in the shard's next exchange."""
        if gradient is None:
            return False
        return await self.late.take(exchange, j, sender, num_tokens, gradient)

    async def _tell_sums(self, request: Request, push: ReduceRequest) -> None:
        """Who has waited long hears which sums are made here: the rest is up to other stages."""
        await asyncio.sleep(self.pace.waits().contributions_s)
        untold = set(push.shards)
        while untold and push.round == self.replica.current_exchange:
            exchange = self.exchange.now()
            for j in sorted(untold):
                if exchange.progress.is_summed(j, exchange.ballot(j).primary):
                    request.progress(Message(ReduceProgress(j, has_step=False)))
                    untold.discard(j)
            await asyncio.sleep(LOOK_LESS_S)

    async def _straggler(
        self,
        asked: int,
        j: int,
        remote: str,
        num_tokens: int = 0,
        gradient: Array | None = None,
    ) -> tuple[ShardReply, Array]:
        """The parameters of this round are what it lacks."""
        self.pace.durations.straggled(remote)
        if gradient is not None:
            self.exchange.ownership.members.contributed(remote, asked)
        is_late = await self._is_taken(asked, j, remote, num_tokens, gradient)
        replica = self.replica
        current, changes = replica.current_exchange, replica.transitions.changes
        values = await self.work.present(j)
        if replica.current_exchange != current:
            raise Stale(f"round {current} is over here", round=replica.current_exchange)
        if changes % 2 or changes != replica.transitions.changes:
            raise NotReady("a new round is being opened here")
        proof, summed = self.proofs.stepped_of(asked, j), self.proofs.sum_behind(asked, j)
        told = self.books.told(
            asked, j, remote, coming=current, proof=proof, summed=summed, is_late=is_late
        )
        return told, values

    def _is_leaving(self, peer_id: str) -> bool:
        record = self.gossip.view.get(peer_id)
        return record is not None and record.state == LEAVING

    # ---- the other stage's sum of a tied shard ----------------------------------------------

    async def _on_reduce_tied(self, request: Request[TiedSum]) -> Message[ReduceReply]:
        """What the caller gets is this stage's result."""
        push, arrays = request.message.body, request.message.arrays
        r, j, remote = push.round, push.shard, request.remote
        self.tied.check(push, arrays)
        if await self._turn(r, j) is Turn.LAST:
            told, values = await self._straggler(r, j, remote)
            return Message(ReduceReply((told,)), (values,))
        exchange = self.exchange.now()
        ballot = exchange.ballot(j)
        if ballot.primary != self.gossip.own.peer_id and j not in exchange.results:
            raise _redirect(j, do.Deny(0, ballot))
        self.tied.heard(push, remote, arrays)
        answer = await exchange.answer(j, lambda call: on.Pushed(call, remote, ballot, 0, None))
        if not isinstance(answer, do.Give):
            raise _redirect(j, answer)
        await self.work.complete(r, j, answer.result)
        is_alike = await self.tied.is_alike(j, push.digest)
        values = await self.work.copy_of(r, j, answer.result, is_whole=not is_alike)
        await self.pace.turn(values.num_bytes)
        return Message(ReduceReply((self.books.told(r, j, remote),)), (values,))

    # ---- ballots ----------------------------------------------------------------------------

    async def _on_ballot(self, request: Request[BallotRequest]) -> Message[BallotReply]:
        asked = request.message.body
        remote = request.remote
        answers = await asyncio.gather(
            *(
                self._vote(remote, asked.round, j, Ballot(term, remote), asked.is_final)
                for j, term in zip(asked.shards, asked.terms, strict=True)
            )
        )
        told = [(i, found) for i, (_, found) in enumerate(answers) if found is not None]
        arrays = _values_in([found for _, found in told])
        reply = BallotReply(
            tuple(ballot.term for ballot, _ in answers),
            tuple(ballot.primary for ballot, _ in answers),
            tuple(i for i, _ in told),
            tuple(reply for _, (reply, _) in told),
        )
        return Message(reply, arrays)

    async def _vote(
        self, remote: str, asked: int, j: int, ballot: Ballot, is_final: bool
    ) -> tuple[Ballot, Told | None]:
        # A primary that has made its sum waits for the answer, and one that is not there will do.
        if await self._turn(asked, j, may_wait=not is_final) is Turn.LAST:
            return ballot, await self._straggler(asked, j, remote)
        exchange = self.exchange.now()
        answer = await exchange.answer(j, lambda call: on.Asked(call, remote, ballot, is_final))
        if isinstance(answer, do.Give):
            await self.work.complete(asked, j, answer.result)
            proof = self.proofs.stepped(asked, j, exchange.ballot(j).term, answer.result.hash)
            values = await self.work.copy_of(asked, j, answer.result)
            summed = self.proofs.sum_behind(asked, j)
            return ballot, (self.books.told(asked, j, remote, proof=proof, summed=summed), values)
        assert isinstance(answer, do.Agree | do.Deny)
        return answer.ballot, None

    # ---- mirrored steps ---------------------------------------------------------------------

    async def _on_mirror(self, request: Request[MirrorRequest]) -> Message[MirrorReply]:
        """As backup: the same step as the primary's, bit for bit."""
        mirror = request.message.body
        r, j, remote = mirror.round, mirror.shard, request.remote
        replica = self.replica
        if not await replica.changed.until(
            lambda: replica.current_exchange >= r, self.limits.enter_wait_s
        ):
            raise NotReady("the round has not begun here")
        replica.check_shard(mirror.stage, j)
        await self._until_now(r, j)
        if mirror.sum_digest:
            sums = self.exchange.now().sums
            total = await sums.of(mirror, remote, self.pace.waits().call_s)
            await self._until_now(r, j)
        else:
            self.exchange.now().sums.end(j)
            if len(request.message.arrays) != 1:
                raise ProtocolViolation("the gradient of one shard is one array")
            total = request.message.arrays[0]
            check_for_backup(replica, j, total)
        ballot, step = Ballot(mirror.term, remote), (mirror, total, remote)
        why_not = self.work.fits(mirror)
        if not why_not and self.exchange.now().ballot(j) == ballot:
            why_not = self.audits.not_shown(mirror, remote)
        answer = await self.exchange.now().answer(
            j, lambda call: on.MirrorCame(call, remote, ballot, step, fits=not why_not)
        )
        if isinstance(answer, do.Confirm):
            return Message(MirrorReply(answer.result.digest))
        if isinstance(answer, do.Deny):
            raise _redirect(j, answer)
        raise NotReady(why_not or "this step was made here already")

    async def _on_sums(self, request: Request[SumsRequest]) -> Message[SumsReply]:
        """As backup: what the steps will be made with that the primary is about to mirror."""
        ahead, arrays = request.message.body, request.message.arrays
        r, remote = ahead.round, request.remote
        if len(arrays) != len(ahead.shards):
            raise ProtocolViolation(f"{len(arrays)} gradients of {len(ahead.shards)} shards")
        refused = list[int]()
        num_tokens = ahead.num_tokens or (0,) * len(arrays)
        for j, term, total, tokens in zip(
            ahead.shards, ahead.terms, arrays, num_tokens, strict=True
        ):
            check_for_backup(self.replica, j, total)
            await self._until_now(r, j, may_wait=False)
            exchange = self.exchange.now()
            if exchange.ballot(j) == Ballot(term, remote):
                exchange.sums.put(j, remote, total)
                exchange.stand_in(j, remote, total, tokens)
            else:
                refused.append(j)
        return Message(SumsReply(tuple(refused)))

    # ---- who has the state ------------------------------------------------------------------

    async def _tell_primaries(self) -> None:
        """Tells of the state of shards that comes from other replicas."""
        while True:
            for j in self.states.take_loaded():
                self._note_state(j)
            await self.states.loaded.wait()

    def _note_state(self, j: int) -> None:
        """The optimizer state of a shard is here. Its primary may have heard that it is not, when
        this replica pushed."""
        exchange = self.exchange.known()
        if exchange is None or not self.states.is_before(j, exchange.number):
            return
        primary = exchange.ballot(j).primary
        if primary != self.gossip.own.peer_id:
            here = FetchRequest(exchange.number, self.replica.index, j)
            notify(self.transport, primary, FOLLOWS, Message(here))

    async def _on_follows(self, request: Request[FetchRequest]) -> Message[None]:
        """As primary: a replica has the state of a shard since it has pushed."""
        here = request.message.body
        exchange, current = self.exchange.known(), self.replica.current_exchange
        self._has_state = {key: r for key, r in self._has_state.items() if r >= current}
        if current <= here.round <= current + 1:
            self._has_state[request.remote, here.shard] = here.round
        if exchange is not None and exchange.number == here.round:
            exchange.progress.told_of_state(request.remote, here.shard, is_here=True)
        return Message()

    # ---- checks -----------------------------------------------------------------------------

    async def _until_now(self, r: int, j: int, *, may_wait: bool = True) -> None:
        """Raises as `_turn`, and `Stale` where the result is there."""
        if await self._turn(r, j, may_wait=may_wait) is not Turn.NOW:
            raise Stale(f"round {r} is over here", round=self.replica.current_exchange)

    async def _turn(self, asked: int, j: int, *, may_wait: bool = True) -> Turn:
        """`NOW` or `LAST`, after a wait for one that is to come. Raises `NotReady` where it does
        not begin here in time, `Stale` where its result is gone."""
        replica = self.replica
        turn = turn_of(replica.plan, j, asked, replica.current_exchange)
        if turn is Turn.TO_COME and may_wait:
            await replica.changed.until(
                lambda: (
                    turn_of(replica.plan, j, asked, replica.current_exchange) is not Turn.TO_COME
                ),
                self.limits.enter_wait_s,
            )
            turn = turn_of(replica.plan, j, asked, replica.current_exchange)
        if turn is Turn.TO_COME:
            raise NotReady(f"round {asked} has not begun here", round=replica.current_exchange)
        if turn is Turn.OVER:
            raise Stale(f"round {asked} is over here", round=replica.current_exchange)
        return turn


def _values_in(told: Sequence[Told]) -> tuple[Array, ...]:
    return tuple(values for _, values in told if values is not None)


def _redirect(shard: int, answer: do.Command) -> Redirect:
    assert isinstance(answer, do.Deny)
    ballot = answer.ballot
    return Redirect(
        "another ballot holds here", peer_id=ballot.primary, term=ballot.term, shard=shard
    )
