"""Checkpoints, saved while training goes on.

`Checkpointing` copies a replica's state right after a round has opened, on the worker thread, a
shard at a time, and has it written by a thread of its own: neither the device nor the event loop
waits for the disk. `restart` goes on from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from swarmnet.errors import SwarmnetError
from swarmnet.plurals import counted
from swarmnet.ports import Checkpoints, OwnSteps, Saved, Snapshot, Worker
from swarmnet.protocol.membership.assignment import measurers
from swarmnet.protocol.membership.records import MAX_LOSS
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.pipeline import held_out
from swarmnet.protocol.saved_rounds import CheckpointPace, KeptRounds
from swarmnet.protocol.sync_modes import RunEnd
from swarmnet.protocol.timing import BULK_S
from swarmnet.protocol.trouble import Trouble
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.recovery")

LAST_MEASUREMENT_S = BULK_S
"""Longest wait for the held-out loss after the last round."""
LAST_SAVE_S = BULK_S
"""Longest wait for the checkpoint of a peer that leaves."""
MAX_NOTED = 1024
"""Rounds whose held-out losses are remembered as written: records tell of none that is older."""


@dataclass
class Disk:
    """Where a machine keeps checkpoints."""

    checkpoints: Checkpoints
    worker: Worker
    """A thread of its own."""
    every: int = 10
    """Rounds between checkpoints."""
    found: Sequence[Saved] = ()
    """What was there at the start."""
    unreadable: Sequence[str] = ()
    """What was there and cannot be read: a line for each."""
    is_any: bool = False
    """The state folder is the first that was free of those that this machine's peers use: what lies
    in the others may be what this peer had before."""


@dataclass
class Checkpointing:
    """Saves the state of one peer's replica."""

    gossip: Gossip
    disk: Disk
    rounds: int
    """Length of the run."""
    is_measured: bool = False
    """The run measures its held-out loss."""
    kept: KeptRounds = field(default_factory=KeptRounds)
    """Rounds whose checkpoints somebody is fetching."""
    stop: RunEnd = field(default_factory=RunEnd)
    """The round that the run ends with before its time."""

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()
        self._last: tuple[int, int] | None = None
        """(stage, round) of the newest state that is on the disk."""
        self._pace = CheckpointPace(self.disk.every, self.rounds)
        self._unwritten: dict[int, float] = {}
        """Held-out losses that are not on the disk yet, by round."""
        self._noted: dict[int, float] = {}
        """The newest that are there."""
        self._first_noted = 0
        """Before it, all that is known is on the disk."""
        self._trouble = Trouble()
        self._trouble_with_losses = Trouble()
        self._failure = ""
        """Why the newest state that was to be saved is not on the disk."""

    async def opened(self, replica: Replica, exchanges: Exchanges) -> None:
        """A round has opened: saves its beginning when it is due."""
        r = replica.round
        self._hear_losses()
        is_due = self._pace.is_due(r, is_writing=self._turn.locked())
        if not is_due and r < self.stop.round:
            return
        await self._save(replica, exchanges)
        self._adapt(replica.round - r)
        if r >= self.rounds and self.is_measured:
            await self._await_measurement(r)

    def _hear_losses(self) -> None:
        """A record tells the newest held-out loss only: the next one takes its place. One that
        cannot be is not noted, for it would be in every answer about what is saved. One that was
        noted stays."""
        view, now = self.gossip.view, asyncio.get_running_loop().time()
        for r, told in held_out.told(view.records(), measurers(view, now)).items():
            is_new = r not in self._noted and r >= self._first_noted
            if is_new and r <= self.rounds and 0 <= told.loss <= MAX_LOSS:
                self._unwritten[r] = told.loss

    async def _write_losses(self) -> None:
        """What cannot be written now is tried again with what is heard later."""
        if not (news := dict(self._unwritten)):
            return
        try:
            await self.disk.worker.run(lambda: self.disk.checkpoints.note_held_out(news))
        except (SwarmnetError, OSError) as e:
            more = self._trouble_with_losses.failed(asyncio.get_running_loop().time())
            if more is not None:
                log.warning("a held-out loss was not noted: %s%s", e, more)
            return
        if self._trouble_with_losses.is_over():
            log.warning("held-out losses are noted again")
        self._noted |= news
        for old in sorted(self._noted)[:-MAX_NOTED]:
            del self._noted[old]
            self._first_noted = max(self._first_noted, old + 1)
        self._unwritten = {r: x for r, x in self._unwritten.items() if news.get(r) != x}

    async def _await_measurement(self, r: int) -> None:
        """The last one comes after the last checkpoint, where there is anybody who measures."""
        loop = asyncio.get_running_loop()
        deadline = Deadline.after(loop.time(), LAST_MEASUREMENT_S)
        while r not in self._noted and not deadline.is_over(loop.time()):
            self._hear_losses()
            await self._write_losses()
            if not measurers(self.gossip.view, loop.time()):
                return
            await self.gossip.changed.wait(LOOK_AGAIN_S)

    def _adapt(self, took: int) -> None:
        """After writing took so many rounds."""
        before = self._pace.interval
        if not self._pace.took(took):
            log.warning(
                "writing a checkpoint took %s; where all peers end at once the run may have "
                "to go on from much earlier, or begin anew: use a larger --checkpoint-every",
                counted(took, "round"),
            )
        if (interval := self._pace.interval) > before:
            log.info("the disk is slow: a checkpoint every %s", counted(interval, "round"))

    async def leaving(self, replica: Replica, exchanges: Exchanges) -> None:
        """The peer is about to leave: saves what it has now. In the middle of an exchange its
        moments are not those of the round; a checkpoint without them is worth less than the one
        before, which it must not take the place of."""
        if replica.round == 0:
            return
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                await self._save(replica, exchanges, is_leaving=True)
        except TimeoutError:
            self._failure = "the disk took too long"
            log.warning("left before its last checkpoint was written")

    async def unsaved(self, replica: Replica, *, is_needed: bool) -> str:
        """Why a replica that ends with the run, or whose stage has no other (`is_needed`), leaves a
        state that is on no disk, in a line; empty where it does not."""
        state = (replica.index, replica.round)
        is_saved = not self._failure or not replica.round or self._last == state
        if is_saved or not (is_needed or replica.round >= min(self.rounds, self.stop.round)):
            return ""
        try:
            saved = await self.disk.worker.run(self.disk.checkpoints.available)
        except (SwarmnetError, OSError):
            saved = ()
        rounds = [s.round for s in saved if s.stage == replica.index]
        there = f"the newest checkpoint here is of round {max(rounds)}" if rounds else ""
        return (
            f"stage {replica.index} ends unsaved in round {replica.round} ({self._failure}); "
            f"{there or 'there is no checkpoint of it here'}"
        )

    def restored(self, replica: Replica) -> None:
        """The replica's state came from the disk."""
        self._last = (replica.index, replica.round)

    async def _save(
        self, replica: Replica, exchanges: Exchanges, *, is_leaving: bool = False
    ) -> None:
        async with self._turn:
            if self._last == (replica.index, replica.round):
                return
            try:
                for _ in range(MAX_TRIES):  # a round that ends meanwhile spoils the copy
                    snapshot = await self._snapshot(replica, exchanges)
                    if snapshot is not None:
                        if not (is_leaving and await self._is_worse(snapshot, replica)):
                            await self._write(snapshot)
                        self._failure = ""
                        if self._trouble.is_over():
                            self.gossip.add_total("checkpoints_resumed")
                            log.warning("checkpoints are written again: round %d", snapshot.round)
                        return
                    await self.gossip.changed.wait(LOOK_AGAIN_S)
            except (SwarmnetError, OSError) as e:
                self._failure = str(e)
                if not self._trouble.lasts:
                    self.gossip.add_total("checkpoints_failed")
                more = self._trouble.failed(asyncio.get_running_loop().time())
                if more is not None:
                    log.warning("no checkpoint of round %d: %s%s", replica.round, e, more)

    async def _is_worse(self, snapshot: Snapshot, replica: Replica) -> bool:
        """It lacks moments that the replica has, and an older checkpoint of the stage has some."""
        if len(snapshot.optimizer) >= len(replica.optimizer.owned()):
            return False
        saved = await self.disk.worker.run(self.disk.checkpoints.available)
        older = [s for s in saved if s.stage == snapshot.stage and s.round <= snapshot.round]
        return any(s.held for s in older)

    async def _write(self, snapshot: Snapshot) -> None:
        checkpoints = self.disk.checkpoints
        checkpoints.keep(self.kept.at(asyncio.get_running_loop().time()))
        self._hear_losses()
        await self._write_losses()  # before older checkpoints are removed: the best of them stays
        await self.disk.worker.run(lambda: checkpoints.save(snapshot))
        self._last = (snapshot.stage, snapshot.round)
        self.gossip.add_total("checkpoints")

    async def _snapshot(self, replica: Replica, exchanges: Exchanges) -> Snapshot | None:
        """The beginning of the present round; None where the round ended meanwhile. What coding has
        lost comes first, then moments, then parameters: in this order an exchange changes them."""
        r, digests, worker = replica.round, replica.digests, replica.worker
        optimizer = replica.optimizer
        history = self.gossip.own.history
        moments = {}
        own_steps: tuple[OwnSteps, ...] | None = ()
        exchanges.work.export_begins()
        try:
            errors = await exchanges.work.errors(r)
            for j in optimizer.owned():
                state = await worker.run(
                    lambda j=j: optimizer.export(j) if exchanges.states.follows(j, r) else None  # type: ignore[misc]
                )
                if state is not None:
                    moments[j] = state
            if replica.local is not None:
                own_steps = await _own_steps(replica)
        finally:
            exchanges.work.export_ends()
        if own_steps is None:
            return None
        parameters: list[Array] = []
        for j in range(replica.num_shards):
            shard, digest = await worker.run(lambda j=j: _copied(replica, j))  # type: ignore[misc]
            if digest != digests[8 * j : 8 * j + 8]:
                return None
            parameters.append(shard)
        return Snapshot(
            r, history, replica.index, tuple(parameters), digests, moments, own_steps, errors
        )


def _copied(replica: Replica, j: int) -> tuple[Array, bytes]:
    copied = _copy(replica.common_shard(j))
    return copied, xxhash.xxh3_64_digest(copied.data)


def _copy(shard: Array) -> Array:
    return Array(shard.dtype, shard.shape, bytes(shard.data))


async def _own_steps(replica: Replica) -> tuple[OwnSteps, ...] | None:
    """Of the present round, a shard at a time; None where something changes them meanwhile. What
    changes them does so on the worker first, hence never in the middle of a shard."""
    local = replica.local
    assert local is not None
    if replica.closed:
        return None
    changes, tokens = local.changes, list(local.tokens)

    def copied(j: int) -> OwnSteps | None:
        if local.changes != changes:
            return None
        return OwnSteps(_copy(replica.stage.parameter_shard(j)), tokens[j], local.export(j))

    shards = []
    for j in range(replica.num_shards):
        shard = await replica.worker.run(lambda j=j: copied(j))  # type: ignore[misc]
        if shard is None:
            return None
        shards.append(shard)
    return tuple(shards)
