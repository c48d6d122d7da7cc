"""The optimizer state of shards at one replica: which is here, whence it came, how it is fetched.

A replica *follows* a shard while it has the state that the next step on it needs. `ownership` says
whose it should be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import xxhash

from swarmnet.errors import NotReady, SwarmnetError, UserError
from swarmnet.methods.state import FETCH_OPTIMIZER, FetchReply, FetchRequest
from swarmnet.protocol.membership.records import bitmap
from swarmnet.protocol.pipeline import progress
from swarmnet.swarm.calls import serve
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.swarm.timing import SHARD_TIMEOUT_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.ownership")

NOTHING = -2
"""Instead of the exchange whose step the state of a shard is after: there is no state here."""
MAX_ASKED = 1
"""Shards that a replica asks one holder for at a time. The holder sends one after the other as its
uplink has room, and state that waits there is of a round that is over when it comes: it would be
fetched again (tests/swarm/recovery/test_slow_join.py)."""
WHOLE, LATE, CREATED = "whole", "late", "created"
"""What a step finds, see `OptimizerStates.make_ready`."""


Holders = Callable[[int, int], list[str]]
"""By round and shard: peers that hold its state, the first choice first."""


@dataclass
class OptimizerStates:
    """What is called round here is the number of an exchange, as `Replica.current_exchange` gives
    it, unless it is said otherwise."""

    transport: Transport
    gossip: Gossip
    settings: RunSettings
    limits: Limits
    replica: Replica

    def __post_init__(self) -> None:
        self.failure: UserError | None = None
        """Why this machine cannot keep optimizer state; ends the peer."""
        self._applied: dict[int, int] = {}
        """By shard, the exchange whose step its state here is after; -1 before the first."""
        self._spoiled: dict[int, int] = {}
        """By shard, the exchange whose step was made here and does not hold."""
        self._lineages: dict[int, bytes] = {}
        """By shard, what its state here has come from, see `lineage`."""
        self._coming: set[int] = set()
        """Shards whose state is on its way, which may take several rounds."""
        self._fetched: set[int] = set()
        """Shards whose state has come, and has not seen a step since."""
        self.loaded = Condition()
        """The state of a shard has come from another replica, see `take_loaded`."""
        self._loaded: dict[int, None] = {}
        self._num_forgotten = 0
        """How often all state was dropped: what was asked for before does not hold."""
        self._serving = asyncio.Semaphore(self.limits.max_serving)
        serve(self.transport, FETCH_OPTIMIZER, self._on_fetch_optimizer)

    @property
    def current(self) -> int:
        """The exchange whose input the present common parameters are."""
        return self.replica.current_exchange

    # ---- what is here -----------------------------------------------------------------------

    def has_input(self, shard_index: int, round_index: int) -> bool:
        """The state of the shard here is that of the round's beginning, or a later one."""
        return self._applied.get(shard_index, NOTHING) >= round_index - 1

    def is_before(self, shard_index: int, round_index: int) -> bool:
        """The state of the shard here is that before the step of the round: not a later one."""
        return self._applied.get(shard_index) == round_index - 1

    def follows(self, shard_index: int, round_index: int) -> bool:
        """The shard's state here is that of the beginning of the round (no exchange, but a round of
        the run). On the worker."""
        return self.is_before(shard_index, self.replica.plan.parameter_version(round_index))

    def holds(self) -> bytes:
        """For the own record: shards whose state is that of the beginning of this round."""
        held = [j for j in self._applied if self.has_input(j, self.current)]
        return bitmap(sorted(held), self.replica.num_shards)

    def lineage(self, shard_index: int) -> bytes:
        """A digest of the gradients that the state of the shard here has seen, one after the other.
        Two copies of as many steps need not be one: each side of a partition makes its own. Empty
        where it is not known: before the first step, and in a checkpoint."""
        return self._lineages.get(shard_index, b"")

    def is_copy(self, shard_index: int, lineage: bytes) -> bool:
        """The state of the shard here has seen the same gradients as one of this lineage, as far as
        is known."""
        own = self.lineage(shard_index)
        return not own or not lineage or own == lineage

    def stepped(self, shard_index: int, round_index: int, lineage: bytes | None = None) -> None:
        """The step of the round has been made on the shard's state, which is of this lineage now;
        or there was none to make."""
        if self._spoiled.get(shard_index) == round_index:
            return  # the step was under way when it turned out not to hold
        self._applied[shard_index] = round_index
        self._fetched.discard(shard_index)
        if lineage is not None:
            self._lineages[shard_index] = lineage

    def skip(self, shards: Sequence[int]) -> None:
        """These are not exchanged in this round: their state is that of the next one too."""
        r = self.current
        for j in shards:
            if self.is_before(j, r):
                self.stepped(j, r)

    def start_fresh(self, kept: Collection[int] = ()) -> None:
        """The first replica of a stage: it owns all, with empty state but for what was put into
        the optimizer for these shards."""
        for j in range(self.replica.num_shards):
            if j not in kept:
                self.replica.optimizer.create(j)
            self._applied[j] = self.current - 1
        self._lineages.clear()

    def restored(self, shards: list[int]) -> None:
        """The replica went on from a checkpoint: it has the state of these shards only."""
        self._fetched.clear()
        self._applied = dict.fromkeys(shards, self.current - 1)
        self._lineages.clear()

    async def forget_state(self) -> None:
        """Drops the state of all shards."""
        optimizer = self.replica.optimizer

        def drop() -> None:
            for j in optimizer.owned():
                optimizer.drop(j)
            self._applied.clear()
            self._lineages.clear()
            self._fetched.clear()
            self._num_forgotten += 1

        await self.replica.worker.run(drop)

    def here(self) -> list[int]:
        """Shards of which there is any state here, ascending."""
        return sorted(self._applied)

    def spoil(self, shard_index: int, round_index: int) -> None:
        """The step of the round that was made here does not hold: the state is to be fetched again,
        and until then stands in for none."""
        self._spoiled[shard_index] = round_index
        self._fetched.discard(shard_index)
        self._applied[shard_index] = round_index - 2
        self._lineages.pop(shard_index, None)

    def lacks(self, shard_index: int, round_index: int) -> bool:
        """The step of the round would begin with a new state, in place of one that there has
        been."""
        is_new = not round_index and not self.settings.begins_with_moments
        is_spoiled = self._spoiled.get(shard_index) == round_index
        return not is_new and (is_spoiled or self.replica.optimizer.steps(shard_index) < 0)

    async def make_ready(self, shard_index: int, round_index: int) -> str:
        """For the step of the round: `CREATED` where there was no state here, or one that had seen
        a step that does not hold; `LATE` where it lacks steps before that of the round; `WHOLE`."""
        optimizer = self.replica.optimizer
        is_spoiled = self._spoiled.get(shard_index) == round_index
        if is_spoiled or optimizer.steps(shard_index) < 0:
            # First, for what is spoiled meanwhile is so by the step that this is for.
            self._spoiled.pop(shard_index, None)
            self._lineages.pop(shard_index, None)
            try:
                await self.replica.worker.run(lambda: optimizer.create(shard_index))
            except BaseException:  # no memory, say: what is here is as spoiled as before
                if is_spoiled:
                    self._spoiled.setdefault(shard_index, round_index)
                raise
            return CREATED
        return LATE if self._applied.get(shard_index, round_index) < round_index - 1 else WHOLE

    def fail(self, error: UserError) -> None:
        """This machine cannot keep optimizer state."""
        self.failure = error

    async def drop(self, shards: Sequence[int]) -> None:
        """Forgets the state of these shards, which others own now."""
        for j in shards:
            self._applied.pop(j, None)
            self._lineages.pop(j, None)
            self._fetched.discard(j)
        for j in shards:
            await self.replica.worker.run(lambda j=j: self.replica.optimizer.drop(j))  # type: ignore[misc]

    def is_first(self, r: int) -> bool:
        """No step of the run has been made yet, and none is about to be: the optimizer state of
        every shard is empty, so that nobody needs to fetch it."""
        if r or self.replica.round or self.settings.begins_with_moments:
            return False
        now = asyncio.get_running_loop().time()
        return not progress.is_launched(self.gossip.view, 0, now, self.settings.num_slots)

    # ---- state on its way -------------------------------------------------------------------

    async def fetch_all(
        self,
        r: int,
        shards: Sequence[int],
        holders: Holders,
        is_wanted: Callable[[int], bool] = lambda shard_index: True,
    ) -> None:
        """The state of those shards that this replica does not follow, and that is not on its way
        already. That may take several rounds: of each shard the newest state is fetched, if it is
        wanted by then."""
        wanted = [j for j in shards if not self.has_input(j, r)]
        asked: dict[str, asyncio.Semaphore] = {}

        async def fetch(j: int) -> None:
            if j in self._coming:
                return
            self._coming.add(j)
            try:
                await self._fetch(r, j, holders, is_wanted, asked)
            finally:
                self._coming.discard(j)

        await asyncio.gather(*map(fetch, wanted))

    async def _fetch(
        self,
        r: int,
        j: int,
        holders: Holders,
        is_wanted: Callable[[int], bool],
        asked: dict[str, asyncio.Semaphore],
    ) -> None:
        """The optimizer state of one shard from a peer that holds it; tried again next round.
        `asked`: by holder."""
        if self.is_first(r):
            await self._create(j)
            return
        num_forgotten = self._num_forgotten
        for holder in holders(r, j):
            turn = asked.setdefault(holder, asyncio.Semaphore(MAX_ASKED))
            try:
                async with asyncio.timeout(self.limits.fetch_timeout_s):
                    await turn.acquire()
            except TimeoutError:
                continue  # it gives nothing, or others have enough to do with it
            try:
                newest = max(r, self.current)
                if self.has_input(j, newest) or not is_wanted(j):
                    return
                reply = await self.gossip.liveness.call_while_live(
                    holder,
                    FETCH_OPTIMIZER,
                    # Whose state has come once, and in vain, waits for nobody this time.
                    Message(FetchRequest(newest, self.replica.index, j, j in self._fetched)),
                    timeout_s=SHARD_TIMEOUT_S,
                )
                body = reply.body
                await self._load(j, body, reply.arrays, num_forgotten)
                return
            except UserError as e:
                self.failure = e
                return
            except SwarmnetError as e:
                log.debug("optimizer shard %d from %s: %s", j, holder[-8:], e)
            except (MemoryError, RuntimeError) as e:  # torch has none left, say
                log.warning("optimizer shard %d cannot be held here: %s", j, e)
                return
            finally:
                turn.release()

    async def _create(self, j: int) -> None:
        """For who has just seen that the run is in its first round: what is created then is the
        input of the round's step, even where the round is fed by the time that this is done."""

        def work() -> None:
            if j not in self._applied and not self.current:
                self.replica.optimizer.create(j)
                self._applied[j] = self.current - 1
                self._lineages.pop(j, None)

        await self.replica.worker.run(work)

    async def _load(
        self, j: int, body: FetchReply, arrays: tuple[Array, ...], num_forgotten: int
    ) -> None:
        optimizer = self.replica.optimizer

        def work() -> None:
            if self._num_forgotten == num_forgotten and not self.has_input(j, body.round):
                optimizer.load(j, body.values, arrays)
                last = self.replica.plan.last_exchange(j, self.current)
                same = self.replica.plan.last_exchange(j, body.round) == last
                self._applied[j] = max(body.round, self.current if same else 0) - 1
                self._lineages[j] = body.lineage
                self._fetched.add(j)

        await self.replica.worker.run(work)
        self._loaded[j] = None
        self.loaded.notify_all()

    def take_loaded(self) -> list[int]:
        """Shards whose state has come from another replica since this was asked last."""
        loaded, self._loaded = self._loaded, {}
        return list(loaded)

    async def _on_fetch_optimizer(self, request: Request[FetchRequest]) -> Message[FetchReply]:
        fetch = request.message.body
        j = fetch.shard
        optimizer = self.replica.optimizer
        async with self._serving:
            if not self.has_input(j, fetch.round) or optimizer.steps(j) < 0:
                raise NotReady("the state of that shard is not held here")
            (values, arrays), applied, lineage = await self.replica.worker.run(
                lambda: (optimizer.export(j), self._applied[j], self.lineage(j))
            )
            reply = FetchReply(applied + 1, values, lineage)
            return Message(reply, arrays, is_background=not fetch.is_urgent)


def descended(lineage: bytes, round_index: int, gradient: Array) -> bytes:
    """The lineage of a shard's optimizer state after one more step."""
    digest = xxhash.xxh3_64_digest(gradient.data)
    return xxhash.xxh3_64_digest(lineage + round_index.to_bytes(8, "big") + digest)
