"""The optimizer state of shards at one replica: which is here, and whence it came.

A replica *follows* a shard while it has the state that the next step on it needs. `ownership` says
whose it should be, and fetches it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from swarmnet.errors import NotReady, UserError
from swarmnet.methods.state import FETCH_OPTIMIZER, FetchReply, FetchRequest
from swarmnet.protocol.membership.records import bitmap
from swarmnet.swarm.calls import serve
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

NOTHING = -2
"""Instead of the exchange whose step the state of a shard is after: there is no state here."""
WHOLE, LATE, CREATED = "whole", "late", "created"
"""What a step finds, see `OptimizerStates.make_ready`."""


@dataclass
class OptimizerStates:
    """What is called round here is the number of an exchange, as `Replica.current_exchange` gives
    it, unless it is said otherwise."""

    transport: Transport
    settings: RunSettings
    limits: WaitLimits
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
        self._fetched: set[int] = set()
        """Shards whose state has come, and has not seen a step since."""
        self._givers: dict[int, str] = {}
        """By shard, who gave the state here, until a step with it was found to be its primary's."""
        self._compared: set[int] = set()
        """Shards of which a step with such a state is being compared."""
        self.doubted: dict[str, None] = {}
        """Who gave a state with which a step was another than the primary's."""
        self.loaded = Condition()
        """The state of a shard has come from another replica, see `take_loaded`."""
        self._loaded: dict[int, None] = {}
        self.num_forgotten = 0
        """How often all state was dropped: what was asked for before does not hold."""
        self._serving = asyncio.Semaphore(self.limits.max_serving)
        serve(self.transport, FETCH_OPTIMIZER, self._on_fetch_optimizer)

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
        here = [j for j in self._applied if j not in self._compared]
        held = [j for j in here if self.has_input(j, self.replica.current_exchange)]
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
        r = self.replica.current_exchange
        for j in shards:
            if self.is_before(j, r):
                self.stepped(j, r)

    def start_fresh(self, kept: Collection[int] = ()) -> None:
        """The first replica of a stage: it owns all, with empty state but for what was put into
        the optimizer for these shards."""
        for j in range(self.replica.num_shards):
            if j not in kept:
                self.replica.optimizer.create(j)
            self._applied[j] = self.replica.current_exchange - 1
        self._lineages.clear()
        self._givers.clear()

    def restored(self, shards: list[int]) -> None:
        """The replica went on from a checkpoint: it has the state of these shards only."""
        self._fetched.clear()
        self._applied = dict.fromkeys(shards, self.replica.current_exchange - 1)
        self._lineages.clear()
        self._givers.clear()

    async def forget_state(self) -> None:
        """Drops the state of all shards."""
        optimizer = self.replica.optimizer

        def drop() -> None:
            for j in optimizer.owned():
                optimizer.drop(j)
            self._applied.clear()
            self._lineages.clear()
            self._fetched.clear()
            self.num_forgotten += 1

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
            self._givers.pop(shard_index, None)
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

    # ---- state that comes -------------------------------------------------------------------

    def has_come(self, shard_index: int) -> bool:
        """The state of the shard has come from another replica, and has not seen a step since."""
        return shard_index in self._fetched

    async def create(self, j: int) -> None:
        """For who has just seen that the run is in its first round: what is created then is the
        input of the round's step, even where the round is fed by the time that this is done."""

        def work() -> None:
            if j not in self._applied and not self.replica.current_exchange:
                self.replica.optimizer.create(j)
                self._applied[j] = self.replica.current_exchange - 1
                self._lineages.pop(j, None)

        await self.replica.worker.run(work)

    def giver(self, shard_index: int) -> str:
        """Who gave the state of the shard that is here, as long as nothing shows that it is the
        one that others have; empty where something does, or it is of this replica's own making."""
        return self._givers.get(shard_index, "") if shard_index in self._applied else ""

    def is_looked_at(self, shard_index: int) -> None:
        """A step with a state of another replica is being compared with that of its primary."""
        self._compared.add(shard_index)

    def looked_at(self, shard_index: int, giver: str, *, is_same: bool | None) -> None:
        """On the worker. It has been (None: in vain). A state with which another step is made is
        not kept: it is fetched again, from others first."""
        self._compared.discard(shard_index)
        if is_same is None or self._givers.get(shard_index) != giver:
            return
        del self._givers[shard_index]
        if not is_same:
            self.doubted[giver] = None
            for known in (self._applied, self._lineages):
                known.pop(shard_index, None)
            self._fetched.discard(shard_index)

    async def load(
        self, j: int, body: FetchReply, arrays: tuple[Array, ...], num_forgotten: int, giver: str
    ) -> None:
        """The state of a shard comes from another replica, which was asked for it when
        `num_forgotten` was this. Raises as `Optimizer.load`."""
        optimizer = self.replica.optimizer

        def work() -> None:
            if self.num_forgotten == num_forgotten and not self.has_input(j, body.round):
                optimizer.load(j, body.values, arrays)
                last = self.replica.plan.last_exchange(j, self.replica.current_exchange)
                same = self.replica.plan.last_exchange(j, body.round) == last
                self._applied[j] = max(body.round, self.replica.current_exchange if same else 0) - 1
                self._lineages[j] = body.lineage
                self._givers[j] = giver
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


def descended(lineage: bytes, round_index: int, gradient: Any) -> bytes:
    """The lineage of a shard's optimizer state after one more step. `gradient`: the bytes that it
    is made with, or others that no other step is made with."""
    digest = xxhash.xxh3_64_digest(gradient)
    return xxhash.xxh3_64_digest(lineage + round_index.to_bytes(8, "big") + digest)
