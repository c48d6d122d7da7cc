"""`[sync] mode = "local"`: steps of each replica's own, and an outer step every so often.

A round ends with an AdamW step of each replica on the gradient of the microbatches that it happened
to get. In the rounds in which a shard is due (`protocol.sync_modes`), every replica pushes
how far it has come since the last exchange, weighted by the tokens behind it, to the shard's
primary, which makes the outer step on the mean; takeovers, backups and stragglers are as in mode
`zero` (`protocol.update.shard_update`). All replicas go on from the result.

Between exchanges, replicas have the parameters of the last one in common: digests, checkpoints and
newcomers are about those. A newcomer begins with them, and takes the moments of the
own steps from one donor where it can, so that its first steps are no wilder than the others'."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from swarmnet.errors import ProtocolViolation, SwarmnetError
from swarmnet.methods.state import FETCH_MOMENTS, FetchReply, FetchRequest
from swarmnet.plurals import counted
from swarmnet.ports import LocalSteps
from swarmnet.protocol.membership.records import Record
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.swarm.update.exchange.calls import Contribution
from swarmnet.swarm.update.exchange.shard_work import strike
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.swarm.update.state_sync import StateSync
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.local_updates")


@dataclass
class Moments:
    """The moments of the own steps: given to newcomers, and fetched as one."""

    gossip: Gossip
    limits: WaitLimits
    replica: Replica

    def __post_init__(self) -> None:
        self._serving = asyncio.Semaphore(self.limits.max_serving)
        serve(self.gossip.transport, FETCH_MOMENTS, self._on_fetch)

    async def fetch(self, donor: Record) -> None:
        """Those of one donor; a shard's begin at zero where it does not give them, or has made no
        step yet."""
        if not donor.round:
            return
        at_once = asyncio.Semaphore(self.limits.max_fetching)
        shards = range(self.replica.num_shards)
        await asyncio.gather(*(self._fetch(donor, j, at_once) for j in shards))

    async def _fetch(self, donor: Record, j: int, at_once: asyncio.Semaphore) -> None:
        local = self.replica.local
        assert local is not None
        request = Message(FetchRequest(donor.round, self.replica.index, j))
        async with at_once:
            try:
                reply = await call(
                    self.gossip.transport,
                    donor.peer_id,
                    FETCH_MOMENTS,
                    request,
                    timeout_s=self.limits.fetch_timeout_s,
                )
                values = reply.body.values
                await self.replica.worker.run(lambda: local.load(j, values, reply.arrays))
            except SwarmnetError as e:
                log.info("shard %d: the moments begin at zero: %s", j, e)

    async def _on_fetch(self, request: Request[FetchRequest]) -> Message[FetchReply]:
        fetch = request.message.body
        replica, j, local = self.replica, fetch.shard, self.replica.local
        assert local is not None
        async with self._serving:
            values, arrays = await replica.worker.run(lambda: local.export(j))
            return Message(FetchReply(replica.round, values), arrays)


async def own_step(replica: Replica, gossip: Gossip, num_tokens: int, round_index: int) -> None:
    """A replica's own step at the end of a round. None on a gradient that is not finite, such as a
    backward pass leaves that failed half way: it is reported as primaries report one in the other
    modes, and the microbatches behind it are lost."""
    local = replica.local
    assert local is not None
    try:
        await replica.worker.run(lambda: local.step(num_tokens, round_index))
    except ProtocolViolation as e:
        strike(gossip, gossip.own.peer_id)
        log.warning("round %d: no step of its own here: %s", round_index, e)


async def common_of(sync: StateSync, donor: Record, j: int) -> Array:
    """A shard of a donor's common parameters: the own ones where they are the same, as at the
    beginning of a run. Raises as `StateSync.ask`."""
    replica = sync.replica
    local = replica.local
    assert local is not None
    if await replica.worker.run(lambda: local.digest(j)) == donor.digest(j):
        return local.common_shard(j)
    return await sync.ask(donor, donor.round, j)


@dataclass
class LocalUpdates:
    """Implements `swarm.update.rounds.Updates`."""

    gossip: Gossip
    limits: WaitLimits
    replica: Replica
    exchanges: Exchanges

    def __post_init__(self) -> None:
        self._have: dict[int, int] = {}
        """Of a newcomer: shards that it has, and the exchange that they come from."""
        self._takes_newer = True
        self.moments = Moments(self.gossip, self.limits, self.replica)

    @property
    def local(self) -> LocalSteps:
        """The own steps."""
        assert self.replica.local is not None
        return self.replica.local

    @property
    def is_owing(self) -> bool:
        return any(self.local.tokens) or self.exchanges.late.has_any

    def is_ready_ahead(self, round_index: int) -> bool:
        return False

    def attend(self) -> None:
        self.repair()

    def repair(self) -> None:
        if self.replica.synced:
            self.exchanges.ownership.repair(self.exchanges.current)

    async def make(self, round_index: int, num_tokens: int) -> bool:
        replica, plan = self.replica, self.replica.plan
        await self.exchanges.work.until_exported()
        self.exchanges.books.note_counted(round_index)
        if replica.synced:
            await own_step(replica, self.gossip, num_tokens, round_index)
        due = plan.due(round_index, replica.num_shards)
        if due:

            def store(j: int, values: Array) -> None:
                self.local.set_common(j, values)
                self._have[j] = round_index

            await self.exchanges.make(self._part, store, due)
            self.local.exchanged(due)
        skipped = set(range(replica.num_shards)) - set(due)
        self.exchanges.states.skip(sorted(skipped))
        return replica.synced or await self.settles(round_index + 1)

    def finish_round(self, round_index: int) -> None:
        self.exchanges.finish_round(round_index)

    async def close(self) -> None:
        self._forget_steps()

    def _forget_steps(self) -> None:
        self.local.exchanged(range(self.replica.num_shards))

    async def _part(self, j: int) -> Contribution:
        num_tokens, change = self.local.tokens[j] if self.replica.synced else 0, None
        if num_tokens:
            change = await self.replica.worker.run(lambda: self.local.change(j, float(num_tokens)))
        late = self.exchanges.late
        return await late.contribution(self.exchanges.current, j, num_tokens, change)

    # ---- newcomers --------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """The common parameters are to be fetched while rounds go by: a shard that is exchanged
        meanwhile comes with its exchange."""
        self._have = {}
        self._takes_newer = True
        self._forget_steps()  # of a checkpoint that was loaded, and that others have gone on from
        self.exchanges.late.forget()

    async def settles(self, round_index: int) -> bool:
        """Whether all common parameters of a round are here, to begin with it. Then they stay as
        they are: a donor may be in a later round already."""
        self._takes_newer = False
        if self._is_whole(round_index):
            await self.replica.worker.run(lambda: None)  # a shard was perhaps being put in place
        self._takes_newer = not self._is_whole(round_index)
        return not self._takes_newer

    def _is_whole(self, round_index: int) -> bool:
        plan = self.replica.plan
        return all(
            self._have.get(j, -2) == plan.last_exchange(j, round_index)
            for j in range(self.replica.num_shards)
        )

    async def fetch_all(self, sync: StateSync) -> None:
        """Fetches what donors have newer than this replica, until cancelled."""
        at_once = asyncio.Semaphore(self.limits.max_fetching)
        shards_text = counted(self.replica.num_shards, "shard")
        log.info("stage %d: %s to fetch", self.replica.index, shards_text)
        donors = sync.donors()
        if donors:
            await self.moments.fetch(donors[0])
        while True:
            shards = range(self.replica.num_shards)
            await asyncio.gather(*(self._fetch(sync, j, at_once) for j in shards))
            await self.gossip.changed.wait(LOOK_AGAIN_S)

    async def _fetch(self, sync: StateSync, j: int, at_once: asyncio.Semaphore) -> None:
        """One shard, where a donor has a newer one than this replica."""
        plan = self.replica.plan
        async with at_once:
            donors = sync.donors()
            if not donors:
                return
            donor = sync.rng.choice(donors)
            exchange = plan.last_exchange(j, donor.round)
            if self._have.get(j, -2) >= exchange:
                return
            try:
                values = await common_of(sync, donor, j)

                def store() -> None:
                    if self._takes_newer and self._have.get(j, -2) < exchange:
                        self.local.set_common(j, values)
                        self._have[j] = exchange

                await self.replica.worker.run(store)
            except SwarmnetError as e:
                log.debug("shard %d from %s: %s", j, donor.peer_id[-8:], e)
