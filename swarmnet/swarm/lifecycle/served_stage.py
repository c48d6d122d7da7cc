"""The stage that a peer serves: it joins the stage, goes from round to round, and falls behind."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import NotReady
from swarmnet.methods.method import Callee
from swarmnet.methods.table import METHODS
from swarmnet.protocol import empty_stage
from swarmnet.protocol import recovery as recovering
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING
from swarmnet.protocol.moments import Deadline, Since
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.pipeline.trials import SAMPLED_ROUNDS
from swarmnet.protocol.sync_modes import AUTO, DELAYED, GOSSIP
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.swarm.calls import serve
from swarmnet.swarm.initial.weights import WeightService
from swarmnet.swarm.lifecycle.departure import Departure
from swarmnet.swarm.lifecycle.opening import Happened, Openings
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.feeder import Feeder
from swarmnet.swarm.pipeline.step import StepService
from swarmnet.swarm.recovery.checkpointing import Checkpointing
from swarmnet.swarm.recovery.restart import Recovery
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.swarm.update.delayed_updates import DelayedUpdates
from swarmnet.swarm.update.exchanges import Behind, Diverged, Exchanges
from swarmnet.swarm.update.gossip_averaging import GossipAveraging
from swarmnet.swarm.update.handover import Handover
from swarmnet.swarm.update.local_updates import LocalUpdates
from swarmnet.swarm.update.rounds import Rounds, Updates, ZeroUpdates
from swarmnet.swarm.update.state_sync import StateSync
from swarmnet.transport.base import Request
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.peer")

TRIED_S = ANSWER_S
"""How long a newcomer waits to be tried before it says that it serves. It protects swarms of short
rounds from a newcomer that nobody waits for yet, and that would fall behind at once
(tests/swarm/pipeline/test_first_round.py)."""


@dataclass
class ServedStage:
    """A replica with all that serves it, from its download to its departure."""

    gossip: Gossip
    settings: RunSettings
    limits: WaitLimits
    replica: Replica
    steps: StepService
    feeder: Feeder | None
    recovery: Recovery
    checkpointing: Checkpointing | None
    openings: Openings
    weights: WeightService | None
    rng: random.Random

    def __post_init__(self) -> None:
        gossip, settings, limits, replica = self.gossip, self.settings, self.limits, self.replica
        conclusions = self.steps.dispatcher.conclusions
        self.exchanges = Exchanges(
            gossip.transport, gossip, settings, limits, replica, conclusions, self.rng
        )
        self._sync = StateSync(gossip, limits, replica, self.rng)
        self.handover = Handover(gossip, settings, replica, self.exchanges, self.rng)
        self.updates = self._updates()
        self.rounds = Rounds(
            gossip,
            settings,
            limits,
            replica,
            self.steps,
            self.updates,
            self.feeder,
            self.exchanges.lost,
        )
        gossip.serves(replica)
        self.departure = Departure(
            gossip,
            settings.rounds,
            self.steps,
            replica,
            self.rounds,
            self.handover,
            settings.stop,
        )

    def _updates(self) -> Updates:
        """What the run's mode does with a round's gradient."""
        gossip, limits, replica = self.gossip, self.limits, self.replica
        exchanges = self.exchanges
        if replica.plan.mode in (DELAYED, AUTO):
            return DelayedUpdates(gossip, replica, exchanges, self.handover)
        if replica.plan.mode == GOSSIP:
            return GossipAveraging(gossip, limits, replica, exchanges)
        if replica.local is not None:
            return LocalUpdates(gossip, limits, replica, exchanges)
        return ZeroUpdates(replica, exchanges, self.handover)

    async def run(self) -> AsyncGenerator[Happened]:
        """Fetches the stage, then serves it; begins again where it fell behind. Ends never. Yields
        what the peer is to know of."""
        replica, exchanges = self.replica, self.exchanges
        await replica.measure_digests()
        try:
            while self.weights is not None and not await self.weights.fill_base(replica):
                pass  # it has waited, and said for what
            while True:
                try:
                    for event in await self._join():
                        yield event
                    while await self.rounds.until_next():
                        for event in await self._announce():
                            yield event
                    await self.gossip.changed.wait()  # the run has done its rounds: serve on
                except (Behind, Diverged) as e:
                    await self._give_up(e)
        finally:
            await self.rounds.close()
            await self.updates.close()
            await exchanges.close()

    async def _give_up(self, why: Behind | Diverged) -> None:
        """What is here does not hold: it is fetched again. What belongs to other parameters goes
        too: optimizer state, and what coding has lost of gradients."""
        replica, exchanges = self.replica, self.exchanges
        if isinstance(why, Diverged):
            log.warning("%s: going over to them", why)
            self.gossip.add_total("diverged")
            exchanges.audits.begins(exchanges.current)
            self.gossip.update(state=JOINING, digests=b"", holds=b"", urgent=True)
        else:
            log.warning("%s: fetching the stage again", why)
            self.gossip.update(state=JOINING, urgent=True)
        self.steps.drop_round(replica.phase.newest_open)  # no receipt of theirs is to be reused
        await replica.transitions.lose()
        self.handover.forget()
        if isinstance(why, Diverged):
            await exchanges.forget_state()
        else:
            exchanges.forget_results()
        await self.updates.close()
        if isinstance(why, Diverged):  # after the last exchange has ended: it may have been coding
            await exchanges.work.contributions_lost(range(replica.num_shards))

    def let_go(self) -> None:
        """The peer goes to another stage, or to none: nothing that comes in reaches this one any
        more."""
        self.gossip.serves(None)
        for method in METHODS.values():
            if method.callee is not Callee.ANY:
                serve(self.gossip.transport, method, _on_none)

    async def _join(self) -> list[Happened]:
        """Returns when the replica has the parameters of a round that is going on."""
        replica, exchanges, updates = self.replica, self.exchanges, self.updates
        if replica.synced:
            return []
        loop = asyncio.get_running_loop()
        view, alone = self.gossip.view, Since(loop.time())
        self._sync.begins()
        while not replica.synced:
            self._sync.say_why()
            updates.attend()
            donors = self._sync.donors()
            if donors:
                if await self.recovery.resume(replica, exchanges, donors):
                    continue
                self.recovery.forget_loaded()
                if isinstance(updates, GossipAveraging):
                    await updates.follow(self._sync)
                elif isinstance(updates, LocalUpdates):
                    await self._follow_exchanges(updates)
                else:
                    await self._follow(max(d.round for d in donors))
            elif self.departure.others(ACTIVE) or self.departure.others(LEAVING):
                alone.begin(loop.time())
                await self.gossip.changed.wait(LOOK_AGAIN_S)
            elif await self.recovery.attend(replica, exchanges):
                if replica.synced and self.checkpointing is not None:
                    self.checkpointing.restored(replica)
            elif alone.is_older(
                now := loop.time(), empty_stage.patience_s(view, replica.index, now)
            ):
                # Fetching them takes a while, in which others may have begun the stage.
                has_weights = self.weights is None or await self.weights.fill(replica)
                if has_weights and not self._sync.donors():
                    await self._begin()
            else:
                await self.gossip.changed.wait(LOOK_AGAIN_S)
        if self.weights is not None:
            self.weights.forget_moments()  # others have begun the stage
        if not replica.phase.is_declaring:
            return []
        await self._show_parameters()
        return await self._announce()

    async def _show_parameters(self) -> None:
        """Before others are asked to wait for this replica: shows to those that do not know it what
        it has, so that they can try it (`protocol.membership.reputation`). Returns when it counts,
        or has waited for long."""
        gossip, loop = self.gossip, asyncio.get_running_loop()
        end, view, replica = Deadline.after(loop.time(), TRIED_S), gossip.view, self.replica
        if not view.is_to_show(replica.index, loop.time()):
            return
        await replica.measure_digests()
        gossip.update(round=replica.round, digests=replica.digests, urgent=True)
        while view.is_to_show(replica.index, loop.time()) and not end.is_over(loop.time()):
            newest = progress.newest_round(view, loop.time(), replica.index)
            if newest >= replica.round + SAMPLED_ROUNDS:  # it will be found to be behind
                return
            await gossip.changed.wait(LOOK_AGAIN_S)

    async def _announce(self) -> list[Happened]:
        """A round has begun here."""
        happened = await self.openings.opened(self.replica, self.exchanges)
        self.rounds.announced()
        return happened

    async def _begin(self) -> None:
        """The first replica of its stage: initial parameters, and all the optimizer state."""
        now = asyncio.get_running_loop().time()
        replica, view = self.replica, self.gossip.view
        round_index = progress.newest_round(view, now) or empty_stage.known_round(view)
        if round_index:
            log.warning("stage %d had no replica left: it starts afresh", replica.index)
            self.gossip.add_total("stage_restarted")
        if not recovering.is_running(view.live(now)):
            self.gossip.update(history=self.recovery.new_history())
        is_filled = self.weights is not None and self.weights.weights.has_trained
        if not is_filled:  # what was filled in is put aside already
            await _put_present_aside(replica)
        kept = await self.weights.put_moments(replica) if self.weights is not None else ()
        await replica.transitions.open_round(round_index, is_whole=True)
        self.exchanges.states.start_fresh(kept)

    async def _follow(self, round_index: int) -> None:
        """Fetches a round's parameters; where that round ends first, gets the next one's with its
        update, like every other replica but without a gradient of its own."""
        replica, rounds = self.replica, self.rounds
        replica.transitions.aim(round_index)
        fetching = asyncio.get_running_loop().create_task(self._sync.fetch(round_index))
        try:
            while not fetching.done():
                if rounds.is_drained(round_index) and round_index < self.settings.rounds:
                    await _end(fetching)  # else it would go on over the parameters to come
                    await rounds.finish(round_index)
                    return
                told = asyncio.get_running_loop().create_task(
                    self.gossip.changed.wait(LOOK_AGAIN_S)
                )
                await asyncio.wait((fetching, told), return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
            if fetching.result() and not rounds.is_drained(round_index):
                await replica.transitions.open_round(round_index, is_whole=True)
                await replica.measure_digests()
            elif fetching.result() and round_index >= self.settings.rounds:
                await replica.transitions.open_round(round_index, is_whole=True)
            else:
                await self.gossip.changed.wait(LOOK_AGAIN_S)
        finally:
            await _end(fetching)

    async def _follow_exchanges(self, updates: LocalUpdates) -> None:
        """Fetches the common parameters while rounds go by. Returns when the replica is synced or
        no peer is left to fetch from."""
        replica, sync, rounds = self.replica, self._sync, self.rounds
        updates.begin_anew()
        replica.transitions.aim(max(d.round for d in sync.donors()))
        fetching = asyncio.get_running_loop().create_task(updates.fetch_all(sync))
        try:
            while not replica.synced and sync.donors():
                sync.say_why()
                if fetching.done():
                    fetching.result()
                if await updates.settles(replica.round):
                    await replica.transitions.open_round(replica.round, is_whole=True)
                    await replica.measure_digests()
                elif replica.round < self.settings.rounds and rounds.is_drained(replica.round):
                    try:
                        await rounds.finish(replica.round)
                    except Behind:
                        await replica.transitions.lose()
                        self.exchanges.forget_results()
                        newest = max((d.round for d in sync.donors()), default=replica.round)
                        replica.transitions.aim(newest)
                        await self.gossip.changed.wait(LOOK_AGAIN_S)
                else:
                    await self.gossip.changed.wait(LOOK_AGAIN_S)
        finally:
            await _end(fetching)


async def _on_none(request: Request) -> Message:
    raise NotReady("this peer serves no stage")


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _put_present_aside(replica: Replica) -> None:
    """A stage begins with the common parameters that are here: steps that a replica made after them
    count for nobody, and shards that it has of donors, who are gone, are not all of them."""
    for j in range(replica.num_shards):
        await replica.worker.run(lambda j=j: replica.put_common(j, replica.common_shard(j)))  # type: ignore[misc]
