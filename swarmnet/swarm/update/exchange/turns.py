"""Turns of the worker in an exchange.

A turn takes longer than the arithmetic on a small shard: two threads wake each other, in a process
whose cores are busy. Where a replica has its stage to itself nobody waits for the first shard. So
what is begun for all of them in one turn of the loop is done in one turn of the worker, and by
several threads where cores are free.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarmnet.swarm.condition import Condition
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchange.proofs import Proofs

T = TypeVar("T")


class Exports:
    """Copies of the optimizer state that are under way, each shard by shard: no step meanwhile, so
    that one is of one round."""

    def __init__(self) -> None:
        self._num_begun = 0
        self._ended = Condition()

    def begin(self) -> None:
        """One begins."""
        self._num_begun += 1

    def end(self) -> None:
        """One is over."""
        self._num_begun -= 1
        self._ended.notify_all()

    async def until_over(self) -> None:
        """Returns when there is none, at once where there is none now."""
        while self._num_begun:
            await self._ended.wait()


@dataclass(slots=True, eq=False)
class _Piece:
    """Of work, on one shard."""

    work: Callable[[], Any]
    future: asyncio.Future[Any]
    _value: Any = None
    _error: BaseException | None = None

    def do(self) -> None:
        """On the worker. What was given up before it begins is left undone."""
        if self.future.cancelled():
            return
        try:
            self._value = self.work()
        except BaseException as error:
            self._error = error

    def tell(self, error: BaseException | None = None) -> None:
        """What has come of it, or why nothing has."""
        error = error or self._error
        if self.future.done():
            return
        if error is None:
            self.future.set_result(self._value)
        else:
            self.future.set_exception(error)


@dataclass
class Turns:
    """Of one replica's worker."""

    replica: Replica
    proofs: Proofs
    """By which nobody else may look at a result, where the replica is alone."""
    tasks: Tasks
    exports: Exports
    """These are over before such work begins."""
    _waiting: list[_Piece] = field(default_factory=list)

    async def run(self, work: Callable[[], T]) -> T:
        """As `ports.Worker.run`. What works on different shards may go on at the same time."""
        if not self._waiting and self.proofs.is_of_use:
            await self.exports.until_over()
            return await self.replica.worker.run(work)
        piece = _Piece(work, asyncio.get_running_loop().create_future())
        self._waiting.append(piece)
        if len(self._waiting) == 1:
            self.tasks.start(self._do())
        return await piece.future

    async def _do(self) -> None:
        """What was begun in the turn of the loop that this is started in, or before it may."""
        pieces = self._waiting
        try:
            await self.exports.until_over()
            self._waiting = []
            how = self._are_side_by_side
            await self.replica.worker.run_all([piece.do for piece in pieces], side_by_side=how)
        except asyncio.CancelledError:
            self._waiting = [piece for piece in self._waiting if piece not in pieces]
            for piece in pieces:
                piece.future.cancel()
            raise
        except Exception as error:
            for piece in pieces:
                piece.tell(error)
        else:
            for piece in pieces:
                piece.tell()

    @functools.cached_property
    def _are_side_by_side(self) -> bool:
        """Not steps that share the cores out themselves, and need much memory (Muon's); nor those
        on a device, which does one thing after the other."""
        optimizer, shards = self.replica.optimizer, range(self.replica.num_shards)
        return self.replica.stage.is_on_host and all(map(optimizer.is_repeatable, shards))
