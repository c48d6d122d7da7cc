"""The exchanges of one replica's stage, one after the other: every shard's gradient goes to its
primary, one step is made there, all get the result (ZeRO, Rajbhandari et al. 2020, with owners that
may vanish).

The words: a *round* makes one *update*, which is the change of a stage's parameters at its end. An
*exchange* is how replicas of a stage come to it: contributions go up, results come down. It has the
number of the round whose gradient it is about. What each mode does with a round's gradient, and so
which exchanges it makes when, are `Updates` (`rounds`). A *meeting* is the exchange of a pair in
gossip *averaging*, which is the only averaging there is. `reduce` is the name on the wire of a
push: of the call that carries a contribution.

What a replica does for one shard, and why there is one result, is the table in
`protocol.update.shard_update`; `exchange.exchange` carries it out. Here is what lies around it:
what a replica contributes, and what it has to know of an exchange when it is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.audit import Conclusions
from swarmnet.protocol.moments import Deadline, Since
from swarmnet.protocol.sync_modes import GOSSIP, SyncPlan
from swarmnet.protocol.update.exchange_waits import brings_state
from swarmnet.protocol.update.lost_samples import LostSamples
from swarmnet.protocol.update.round_end import Newcomers
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.swarm.update.exchange.auditing import UpdateAudits
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.calls import Contribution, LongCalls
from swarmnet.swarm.update.exchange.coded import coded_bytes
from swarmnet.swarm.update.exchange.exchange import Behind, Exchange, PresentExchange
from swarmnet.swarm.update.exchange.late import LateContributions
from swarmnet.swarm.update.exchange.norms import ContributionNorms, Norms
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchange.proofs import Proofs
from swarmnet.swarm.update.exchange.service import ExchangeService
from swarmnet.swarm.update.exchange.shard_work import Put, ShardWork, rule_of
from swarmnet.swarm.update.exchange.speakers import Speakers
from swarmnet.swarm.update.exchange.tied_shards import TiedShards
from swarmnet.swarm.update.optimizer_states import OptimizerStates
from swarmnet.swarm.update.ownership import ExchangeMembers, Ownership
from swarmnet.transport.base import Transport

__all__ = ["Behind", "Diverged", "Exchanges"]

RESTORE_WAIT_S = 10.0
"""How long an update waits for a replica that is about to become active with optimizer state that
nobody else has."""
CODED_AT_ONCE_BYTES = 1 << 20
"""Of contributions that are coded before any of them is sent: so many shards share a call."""


class Diverged(SwarmnetError):
    """Others of the stage have another result of the same round, and theirs holds."""


class Exchanges:
    """Makes the exchanges of one replica's stage."""

    def __init__(
        self,
        transport: Transport,
        gossip: Gossip,
        settings: RunSettings,
        limits: WaitLimits,
        replica: Replica,
        conclusions: Conclusions,
        rng: random.Random,
    ) -> None:
        self.transport = transport
        self.gossip = gossip
        self.replica = replica
        self._tasks = Tasks("averaging")
        self._has_exchanged = False
        self.lost = LostSamples(
            gossip.view, replica.index, settings.slots, settings.samples_per_microbatch
        )
        self.states = OptimizerStates(transport, settings, limits, replica)
        self.members = ExchangeMembers(gossip, replica)
        self.ownership = Ownership(
            gossip,
            settings,
            limits,
            replica,
            self.states,
            self.members,
            self._tasks,
        )
        self.pace = ExchangePace(transport.traffic, gossip, settings, limits, replica)
        self.calls = LongCalls(gossip, replica, self.pace)
        speakers = Speakers(self.ownership)
        self.norms = Norms(
            transport, gossip, replica, settings.num_stages, self.ownership, speakers, self.pace
        )
        self.books = Books(gossip, settings, replica, self.norms)
        self._contribution_norms = ContributionNorms(
            transport, gossip, replica, self.ownership, speakers
        )
        self.proofs = Proofs(gossip, replica)
        self.audits = UpdateAudits(
            gossip, settings, replica, self.ownership, self.proofs, self.norms, conclusions, rng
        )
        self.work = ShardWork(
            gossip,
            settings,
            replica,
            self.states,
            self.norms,
            self._contribution_norms,
            self.books,
            self.proofs,
            self._tasks,
        )
        self.late = LateContributions(
            gossip, replica, self.books, rule_of(settings.aggregation, replica.plan)
        )
        self.tied = TiedShards(
            gossip, replica, settings.num_stages, self.ownership, speakers, self.pace
        )
        self._newcomers = Newcomers()
        self._exchange = PresentExchange(
            gossip,
            replica,
            self.ownership,
            self.work,
            self.books,
            self.pace,
            self.tied,
            self.proofs,
            self.audits,
            self.late,
            speakers,
            self._tasks,
        )
        self._service = ExchangeService(
            transport,
            gossip,
            limits,
            replica,
            self.states,
            self.work,
            self.books,
            self.pace,
            self.tied,
            self.proofs,
            self.audits,
            self.late,
            self._newcomers,
            self._exchange,
            self._tasks,
        )

    async def close(self) -> None:
        await self._exchange.close()
        await self._tasks.close()
        await self.audits.close()
        self.pace.close()
        await self.norms.close()
        await self._contribution_norms.close()

    @property
    def plan(self) -> SyncPlan:
        """When the stage exchanges what."""
        return self.replica.plan

    @property
    def current(self) -> int:
        """The exchange whose input the present common parameters are."""
        return self.replica.current_exchange

    # ---- one exchange ------------------------------------------------------------------------

    async def make(
        self,
        part: Callable[[int], Awaitable[Contribution]],
        store: Put | None = None,
        due: Sequence[int] | None = None,
    ) -> None:
        """Makes the present exchange: gives this replica's contributions, and puts the next round's
        parameters aside.

        `part`: the contribution to a shard; of no tokens for a joiner. `store`: where the results
        go, on the worker; the stage's coming parameters where it is left out. `due`: the shards
        that are exchanged; all of them where it is left out. Raises `Behind` where the stage has
        moved on by more than this round.
        """
        r = self.current
        self.audits.begins(r)
        if not self._has_exchanged:
            await self._until_restored(r)
        self._has_exchanged = True
        started = Since(self.gossip.liveness.awake_s())
        has_others = len(self.members.contributors(r)) > 1
        exchange = self._exchange.now()
        shards = list(range(self.replica.num_shards) if due is None else due)
        put = store or self.replica.stage.stage_parameters
        declared = await self._contribute(exchange, shards, part, put, stays_in_stage=store is None)
        error = await self._until_over(exchange, shards, started)
        late = [j for j in shards if not exchange.done.get(j)]
        await self.work.contributions_lost(late)
        if error is not None:
            raise error
        if late:
            self.gossip.add_total("late_shards", len(late))
        # Where shards take turns, the first one stands for all.
        averaged = self.books.least_tokens(r, [0] if self.plan.is_local else shards)
        if averaged is not None:
            self.lost.averaged(r, averaged, self.books.late_behind(r, 0))
        took_s = started.s(self.gossip.liveness.awake_s())
        known = exchange.progress
        is_usual = has_others and declared > 0 and known.is_usual
        self.pace.durations.took(took_s, is_usual=is_usual, missed=known.missed)
        self.replica.measured.exchanged(took_s)
        await self._until_given()

    async def _until_given(self) -> None:
        """Newcomers have the parameters that they were given here, with which they begin the next
        round; or they had the time for it."""
        gossip, replica, queued_to = self.gossip, self.replica, self.transport.traffic.queued_to
        while True:
            now, rate = asyncio.get_running_loop().time(), gossip.own.upload_bytes_per_s
            live = {m.peer_id: m for m in gossip.view.members(replica.index, now)}
            if not self._newcomers.are_waited_for(live, replica.round, queued_to, rate, now):
                return
            await gossip.changed.wait(LOOK_AGAIN_S)

    async def _until_over(
        self, exchange: Exchange, shards: list[int], started: Since
    ) -> Exception | None:
        """Returns why it cannot end well, if so. `started`: by seconds awake."""
        while not exchange.is_over(shards):
            if self.states.failure is not None:
                return self.states.failure
            now, call_s = self.gossip.liveness.awake_s(), self.pace.waits().call_s
            is_late = started.is_older(now, call_s)
            if is_late and not exchange.is_at_work:
                return Behind(f"shards of round {exchange.number} were given by no owner")
            await exchange.changed.wait(LOOK_AGAIN_S)
        return exchange.failure

    async def _contribute(
        self,
        exchange: Exchange,
        shards: list[int],
        part: Callable[[int], Awaitable[Contribution]],
        put: Put,
        *,
        stays_in_stage: bool,
    ) -> int:
        """Codes and gives the contributions, a few at a time where there are others: the first are
        on their way while the others are coded. Returns the tokens behind them."""
        declared, parts, num_bytes = -1, dict[int, Contribution](), 0
        own = self.gossip.own.peer_id

        async def code(parts: dict[int, Contribution]) -> None:
            given = {j: gradient for j, (_, gradient) in parts.items() if gradient is not None}
            if given and self.work.codes_contributions:
                coded = await self.work.contributions(exchange.number, given)
                parts.update((j, (parts[j][0], gradient)) for j, gradient in coded.items())

        async def gather(shard: int, part: Contribution) -> None:
            found = {shard: await exchange.gathered(shard, part)}
            await code(found)
            exchange.contribute(found, put, stays_in_stage=stays_in_stage)

        async def give() -> None:
            nonlocal declared
            tokens = max((num_tokens for num_tokens, _ in parts.values()), default=0)
            headed = {j: parts.pop(j) for j in list(parts) if exchange.head(j) == own}
            await code(parts)
            if tokens > declared:
                declared = tokens
                self.gossip.update(declared=(exchange.number, declared))
            exchange.contribute(parts, put, stays_in_stage=stays_in_stage)
            for j, part in headed.items():
                exchange.start(gather(j, part))

        is_coded = self.work.codes_contributions and self.proofs.is_of_use
        for j in _rotated(shards, self.gossip.own.peer_id):
            num_tokens, gradient = await part(j)
            if gradient is not None and is_coded:
                if num_bytes > CODED_AT_ONCE_BYTES:
                    await give()
                    parts, num_bytes = {}, 0
                num_bytes += coded_bytes(self.replica, j)
            parts[j] = num_tokens, gradient
        await give()
        return declared

    async def _until_restored(self, r: int) -> None:
        """When a whole swarm goes on from checkpoints, its peers become active one after the other;
        the state that the last one brings is not to be taken for lost. It is so in the first
        exchange of all of them: in a later one nobody waits for the word of a newcomer."""
        loop, view = asyncio.get_running_loop(), self.gossip.view
        end = Deadline.after(loop.time(), RESTORE_WAIT_S)
        while not end.is_over(loop.time()) and any(
            brings_state(record, r) for record in view.members(self.replica.index, loop.time())
        ):
            await self.gossip.changed.wait(LOOK_AGAIN_S)

    # ---- owners come and go -----------------------------------------------------------------

    async def follow_owners(self) -> None:
        """Fetches the state of shards that this replica has come to own, drops that of shards which
        others own now: early in a round, for its exchange."""
        if self.plan.mode == GOSSIP:  # nothing is shared out: each replica has its own state
            return
        r = self.current
        await self.ownership.fetch_owned(r)
        await self.drop_spare(r)

    async def drop_spare(self, r: int) -> None:
        """Drops the state of shards that others own in exchange `r`; not where a step is made here,
        or may be."""
        spare = await self.ownership.spare(r)
        await self.ownership.drop([j for j in spare if not self._is_stepping(j)])

    # ---- what others ask --------------------------------------------------------------------

    def _is_stepping(self, j: int) -> bool:
        """A step on a shard is being made here in the present exchange, or may be."""
        exchange = self._exchange.known()
        return exchange is not None and exchange.number == self.current and exchange.may_step(j)

    def results_of(self, r: int) -> set[int]:
        """Shards whose step in an exchange is known here."""
        exchange = self._exchange.known()
        return exchange.has_step() if exchange is not None and exchange.number == r else set()

    def repair_beside(self) -> None:
        """As `Ownership.repair`, while an exchange is under way: its results may travel for long
        after the steps."""
        r = self.current
        self.ownership.repair(r + 1, self.results_of(r))

    def needs_nothing_of(self, r: int) -> bool:
        """The owners of every shard have made the step of an exchange, and none is being made here:
        a replica that leaves need not wait for the results."""
        exchange = self._exchange.known()
        if exchange is None or exchange.number != r or exchange.leads_any():
            return False
        return len({*exchange.done, *exchange.progress.taken}) == self.replica.num_shards

    # ---- what does not hold any more --------------------------------------------------------

    def finish_round(self, r: int) -> None:
        """Round `r` is over here: forgets its exchange."""
        known = self._exchange.known()
        if known is not None and known.number <= r:
            self._exchange.end()
        self.books.finish_round(r)
        self.proofs.finish_round(r)
        self.tied.finish_round(r)
        self.norms.finish_round(r)
        self._contribution_norms.finish_round(r)

    async def forget_state(self) -> None:
        """What this replica has of the optimizer belongs to parameters that do not hold: drops it,
        to fetch it from those whose parameters do."""
        await self.states.forget_state()
        self.late.forget()
        self.norms.forget()
        self.forget_results()

    def forget_results(self) -> None:
        """What was put aside for the coming round does not hold."""
        self._exchange.end()


def _rotated(items: list[int], name: str) -> list[int]:
    """Each replica begins elsewhere, so that they do not all push to one primary first."""
    if not items:
        return items
    start = sum(name.encode()) % len(items)
    return items[start:] + items[:start]
