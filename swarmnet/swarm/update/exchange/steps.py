"""Sums and steps of one exchange: commands of the table that work on tensors, each as a task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from swarmnet.errors import Stale, UserError
from swarmnet.methods.update import MirrorRequest
from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.swarm.replica.replica import Replica, decides_tied, follows_tied
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.outbox import Feed, Outbox
from swarmnet.swarm.update.exchange.shard_work import Before, Result, ShardWork, Total
from swarmnet.swarm.update.exchange.tied_shards import TiedShards
from swarmnet.swarm.update.optimizer_states import OptimizerStates
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.averaging")

Work = Callable[..., Awaitable[None]]
"""What is done for a shard."""


class ExchangeSteps:
    """Of one exchange at one replica."""

    def __init__(
        self,
        exchange: int,
        replica: Replica,
        states: OptimizerStates,
        work: ShardWork,
        books: Books,
        tied: TiedShards,
        outbox: Outbox,
        tasks: Tasks,
        feed: Feed,
        fail: Callable[[Exception], None],
    ) -> None:
        """`fail(error)`: what the user of this machine has to see to."""
        self._number = exchange
        self._replica = replica
        self._states = states
        self._work = work
        self._books = books
        self._outbox = outbox
        self._tasks = tasks
        self._tied = tied
        self._feed = feed
        self._fail = fail
        self._attempts: dict[int, int] = {}
        """By shard, the newest sum that was begun here."""
        self._totals: dict[int, Total | None] = {}
        self._of_stage: dict[int, Total | None] = {}
        """Of tied shards that another stage makes the step on: what goes there."""
        self._scales: dict[int, float] = {}
        self._before: dict[int, asyncio.Future[Before]] = {}
        """By shard that is stepped here: the state before the step."""

    def forget(self, shard: int) -> None:
        """The shard has its result."""
        for known in (self._totals, self._of_stage, self._scales, self._before):
            known.pop(shard, None)

    def carry_out(
        self, j: int, command: do.Sum | do.FindNorm | do.Step | do.Mirror | do.Repeat
    ) -> None:
        match command:
            case do.Sum():
                self._start(j, command.attempt, self._sum, command)
            case do.FindNorm(attempt, total, backups, ballot):
                if total is not None:
                    self._outbox.sum_ahead(j, total.gradient, ballot, backups)
                self._start(j, attempt, self._find_norm, attempt)
            case do.Step():
                before = self._before[j] = asyncio.get_running_loop().create_future()
                self._start(j, command.attempt, self._step, command, before)
            case do.Mirror():
                for backup in command.backups:
                    self._tasks.start(self._mirror(j, backup, command, self._before[j]))
            case do.Repeat((mirror, gradient, maker), attempt):
                self._start(j, attempt, self._repeat, attempt, mirror, gradient, maker)

    def _start(self, j: int, attempt: int, work: Work, *arguments: Any) -> None:
        self._tasks.start(self._guarded(j, attempt, work, *arguments))

    async def _guarded(self, j: int, attempt: int, work: Work, *arguments: Any) -> None:
        """An error of the machine ends the attempt, not the exchange; one that its user has to see
        to ends the peer."""
        try:
            await work(j, *arguments)
        except UserError as e:
            self._states.fail(e)
            self._fail(e)
        except Exception as e:
            log.warning("round %d shard %d: no step here: %s", self._number, j, e)
            self._feed(j, on.StepFailed(attempt))

    async def _sum(self, j: int, command: do.Sum) -> None:
        self._books.summed(self._number, j, command.senders)
        if command.absent:
            names = ", ".join(p[-8:] for p in command.absent)
            log.info("round %d shard %d: went on without %s", self._number, j, names)
        self._attempts[j] = command.attempt
        is_whole = not decides_tied(self._replica, j)
        total = await self._work.total(self._number, j, command.parts, is_whole=is_whole)
        if not is_whole:
            total = await self._tied.add(self._number, j, total)
            total = None if total is None else await self._work.coded(self._number, j, total)
        if self._attempts[j] != command.attempt:
            return
        if follows_tied(self._replica, j):
            self._of_stage[j], total = total, None
        self._totals[j] = total
        self._scales.pop(j, None)
        self._feed(j, on.Summed(total, command.attempt))

    async def _find_norm(self, j: int, attempt: int) -> None:
        scale = await self._work.scale(self._number, j, self._totals[j])
        if self._attempts[j] == attempt:  # else another one has a sum of its own
            self._scales[j] = scale
        self._feed(j, on.ClipKnown(attempt))

    async def _step(self, j: int, command: do.Step, before: asyncio.Future[Before]) -> None:
        total: Total | None = command.total
        if follows_tied(self._replica, j):
            followed = await self._follow(j, command)
            if followed is None:
                return
            result = followed
        elif total is None:
            result = await self._work.leave_as_it_is(self._number, j)
        else:
            scale = self._scales.get(j)
            if scale is None:
                scale = await self._work.scale(self._number, j, total)
            state = await self._work.before(self._number, j, scale)
            if not before.done():
                before.set_result(state)
            result = await self._work.step(self._number, j, total, state)
        self._feed(j, on.Stepped(result, command.attempt))

    async def _follow(self, j: int, command: do.Step) -> Result | None:
        """The step that another stage makes; None where that stage is too far on."""
        total = self._of_stage.get(j)
        # This stage's norm is complete without the shard, and the other's step waits for that.
        norm = self._tasks.start(self._work.scale(self._number, j, None))
        try:
            told, values = await self._tied.result(self._number, j, command.ballot.term, total)
        except Stale:
            self._feed(j, on.StepFailed(command.attempt))
            self._feed(j, on.MovedOn())
            return None
        finally:
            norm.cancel()
        await self._work.checked(j, values)
        self._books.heard(self._number, j, told)
        self._books.stepped(self._number, j, 0 if total is None else total.num_tokens)
        return Result(values)

    async def _mirror(
        self, j: int, backup: str, command: do.Mirror, before: asyncio.Future[Before]
    ) -> None:
        total: Total | None = command.total
        assert total is not None  # there is nothing to mirror otherwise
        state = await before
        request = MirrorRequest(
            self._number,
            self._replica.index,
            j,
            state.scale,
            state.steps,
            total.num_tokens,
            self._books.norm(self._number),
            state.lineage,
            command.ballot.term,
        )
        event, digest = await self._outbox.mirror(backup, request, total.gradient, command.attempt)
        if self._attempts[j] == command.attempt:
            self._books.copied(self._number, j, backup, digest)
        self._feed(j, event)

    async def _repeat(
        self, j: int, attempt: int, mirror: MirrorRequest, gradient: Array, maker: str
    ) -> None:
        result = await self._work.repeat(mirror, gradient, maker)
        self._feed(j, on.Stepped(result, attempt))
