"""A peer of the swarm, whatever carries its calls and whatever its device is.

Its life (`swarm.lifecycle`): meet the others, take the stage that needs it most, fetch that stage,
serve it round after round (and feed, where it has data), hand over, leave. The daemon composes it
with real parts, tests and the simulation with others; this code is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from swarmnet.admission import OPEN, Admission
from swarmnet.errors import StageLost, UserError
from swarmnet.methods.contact import StopRequest
from swarmnet.ports import Data
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.pace import GossipSettings
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import (
    ACTIVE,
    JOINING,
    LEFT,
    MAX_ADDRESSES,
    OBSERVER_STAGE,
    Household,
    Record,
)
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.sync_modes import AUTO, DELAYED
from swarmnet.protocol.update.lost_samples import Loss
from swarmnet.protocol.update.replica_phase import Phase, State
from swarmnet.stop_order import StopCheck
from swarmnet.swarm.generation.service import GenerateService
from swarmnet.swarm.initial.data import DataService, LateData
from swarmnet.swarm.initial.files import FileService, SpecService
from swarmnet.swarm.initial.weights import WeightService
from swarmnet.swarm.lifecycle.arrival import StageChoice, meet
from swarmnet.swarm.lifecycle.departure import Mover
from swarmnet.swarm.lifecycle.opening import Openings, Renamed, Speed
from swarmnet.swarm.lifecycle.served_stage import ServedStage
from swarmnet.swarm.lifecycle.stand_by import StandBy
from swarmnet.swarm.lifecycle.stopping import Stopping
from swarmnet.swarm.machine import Machine
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.probes import Probes
from swarmnet.swarm.membership.reconnecting import Reconnecting, Remembered
from swarmnet.swarm.membership.record_checks import Signer
from swarmnet.swarm.pipeline.dispatcher import Dispatcher
from swarmnet.swarm.pipeline.feeder import Feeder, Journal
from swarmnet.swarm.pipeline.infer import InferService
from swarmnet.swarm.pipeline.step import Contested, Measured, StepService
from swarmnet.swarm.recovery.checkpointing import Checkpointing
from swarmnet.swarm.recovery.restart import Recovery
from swarmnet.swarm.recovery.saved_models import SavedModels
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.replica.serving import Serving
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.swarm.update.handover import Handover
from swarmnet.swarm.update.rounds import Rounds, Updates
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")


@dataclass
class Identity:
    """The name of a peer, and the run that it belongs to."""

    run_id: str
    spec: bytes
    """Canonical bytes of the run's spec, given to all that ask."""
    incarnation: int
    started_unix_s: float = 0.0
    agent: str = ""
    credential: bytes = b""
    """What admits this peer to a closed run."""
    household: Household | None = None
    """Whose neighbours this peer's are."""


@dataclass
class Peer:
    """One peer; `run()` is its life, `stop()` its wish to end."""

    transport: Transport
    signer: Signer
    identity: Identity
    settings: RunSettings
    machine: Machine
    rng: random.Random
    limits: WaitLimits = field(default_factory=WaitLimits)
    gossip_settings: GossipSettings = field(default_factory=GossipSettings)
    wanted_stage: int | None = None
    feeds: bool = True
    begin_anew: bool = False
    """As `Recovery.begin_anew`."""
    admission: Admission = OPEN
    assigner: assignment.Assigner | None = None
    """None: `assignment.Adaptive`, with the run's replication."""
    journal: Journal = field(default_factory=Journal)
    """Of what this peer feeds."""
    resource_limits: ResourceLimits = field(default_factory=ResourceLimits)
    remembered: Remembered = dict[str, Sequence[str]]
    """Members that this machine has met before, or was told of."""
    owner: str = ""
    """Of a closed run: the peer id of the key that may end it."""
    keep_stop: Callable[[StopRequest], None] = lambda given: None
    """Keeps the order that ends the run."""
    on_loss: Callable[[Loss], None] = lambda loss: None
    """Hears of the books that this peer closes for its stage (see
    `protocol.update.lost_samples`)."""

    def __post_init__(self) -> None:
        self._tasks = Tasks("peer")
        self._stopping = asyncio.Event()
        self._served: ServedStage | None = None
        self.unsaved = ""
        """Once it has left: why what only it had is on no disk; empty where that is not so."""
        self._build_membership()
        self._build_pipeline()
        self._build_lifecycle()
        SpecService(self.transport, self.identity.run_id, self.identity.spec)
        machine = self.machine
        FileService(self.transport, machine.file_sizes, machine.read_file, machine.worker)
        Probes(self.transport, self.gossip)
        self.stopping = Stopping(
            self.gossip,
            StopCheck(self.identity.run_id, self.owner),
            self.keep_stop,
        )

    def _build_membership(self) -> None:
        """The bus, and what a restart needs of it."""
        self.view = View(self.transport.peer_id, run_end=self.settings.stop)
        data = self.machine.data
        own = Record(
            peer_id=self.transport.peer_id,
            run_id=self.identity.run_id,
            incarnation=self.identity.incarnation,
            version=0,
            has_data=self.feeds and data is not None,
            serves_data=self.machine.shared is not None and self.machine.shared.given is not None,
            measures=data is None or data.num_held_out > 0,
            agent=self.identity.agent,
            started_unix_s=self.identity.started_unix_s,
            credential=self.identity.credential,
            household=self.identity.household,
        )
        self.gossip = Gossip(
            self.transport,
            self.view,
            self.signer,
            own,
            self.rng,
            self.gossip_settings,
            admission=self.admission,
            bounds=self.settings.bounds,
            max_record_bytes=self.settings.max_record_bytes,
        )
        self.reconnecting = Reconnecting(
            self.gossip,
            random.Random(f"missing|{own.peer_id}|{own.incarnation}"),
            self.remembered,
        )
        disk = self.machine.disk
        self.recovery = Recovery(
            self.gossip, self.settings.num_stages, disk, self.begin_anew, self.reconnecting
        )
        # Before any peer asks: one that sees this record must not begin the run anew.
        self.gossip.amend(restorable=self.recovery.offers())
        self.checkpointing = None
        if disk is not None:
            saved = SavedModels(self.transport, self.gossip, disk.checkpoints, disk.worker)
            rounds, is_measured = self.settings.rounds, self.settings.evaluate_every > 0
            self.checkpointing = Checkpointing(
                self.gossip, disk, rounds, is_measured, saved.kept, self.settings.stop
            )

    def _build_pipeline(self) -> None:
        """The way of microbatches."""
        self._here = Serving()
        self.dispatcher = Dispatcher(
            self.gossip,
            self.limits,
            self.settings.num_stages,
            self.settings.samples_per_microbatch,
            self.rng,
            overlaps=self.settings.sync_mode in (DELAYED, AUTO),
        )
        self.steps = StepService(
            self.gossip,
            self.dispatcher,
            self.limits,
            self._here,
            self.resource_limits,
            self.settings.slots,
            codec=self.settings.boundary_codec,
            is_audited=not self.settings.plan.is_local,
        )
        self.inference = InferService(self.dispatcher, self.limits, self._here)
        self.generation = GenerateService(
            self.transport,
            self._here,
            self.resource_limits,
            self.machine.free_bytes,
            self.view.reputation,
        )
        data: Data | None = self.machine.data
        self._sharing = None
        if (shared := self.machine.shared) is not None:
            late = LateData()
            self._sharing = DataService(self.transport, self.gossip, shared, late, self.rng)
            if data is None and shared.coming is not None:
                data = late
        self.feeder = (
            Feeder(
                self.gossip,
                self.dispatcher,
                self.steps,
                self.settings,
                self.limits,
                data,
                self.journal,
            )
            if data is not None and self.feeds
            else None
        )

    def _build_lifecycle(self) -> None:
        """What decides on the next step of its life."""
        gossip, settings, machine = self.gossip, self.settings, self.machine
        assigner = self.assigner or assignment.Adaptive(settings.replication)
        self._speed = Speed(machine, self.transport, settings.samples_per_microbatch)
        self._stage_choice = StageChoice(
            gossip,
            settings.num_stages,
            machine=machine,
            recovery=self.recovery,
            assigner=assigner,
            resource_limits=self.resource_limits,
            speed=self._speed,
            rng=self.rng,
        )
        self.mover = Mover(
            gossip,
            settings,
            self.limits,
            machine=machine,
            assigner=assigner,
            resource_limits=self.resource_limits,
            steps=self.steps,
            rng=self.rng,
            wanted=self.wanted_stage,
        )
        self._weights = (
            WeightService(
                self.transport, gossip, self.limits, machine.worker, machine.weights, self.rng
            )
            if machine.weights is not None
            else None
        )
        self._stand_by = StandBy(
            gossip,
            settings.num_stages,
            self.resource_limits,
            feeder=self.feeder,
            disk=machine.disk,
            recovery=self.recovery,
        )
        self._openings = Openings(
            gossip,
            self.recovery,
            self.checkpointing,
            self._speed,
            self._tasks,
        )

    # ---- the served stage -------------------------------------------------------------------

    @property
    def replica(self) -> Replica | None:
        """Of the stage that it serves; None between two stages, and while it stands by."""
        return self._served.replica if self._served is not None else None

    @property
    def exchanges(self) -> Exchanges:
        """Of the stage that it serves, as are the next three."""
        return self._serving.exchanges

    @property
    def updates(self) -> Updates:
        return self._serving.updates

    @property
    def rounds(self) -> Rounds:
        return self._serving.rounds

    @property
    def handover(self) -> Handover:
        return self._serving.handover

    @property
    def _serving(self) -> ServedStage:
        if self._served is None:
            raise AttributeError("this peer serves no stage now")
        return self._served

    # ---- life -------------------------------------------------------------------------------

    async def run(self, neighbours: list[str]) -> None:
        """Joins through `neighbours` (peer ids with known addresses; none for the first peer of a
        run), serves until `stop()`, leaves. Raises `SwarmnetError` where no neighbour answers."""
        self.transport.set_run(self.identity.run_id)
        self.gossip.update(addresses=tuple(self.transport.addresses()[:MAX_ADDRESSES]))
        gossiping = self._tasks.start(self.gossip.run())
        living = self._tasks.start(self._live(neighbours))
        self._tasks.start(self.generation.run())
        self._tasks.start(self._hear_steps())
        stopping = self._tasks.start(self._stopping.wait())
        if self.gossip.own.peer_id == machine_of(self.gossip.own.peer_id):  # once a machine
            self._tasks.start(self.reconnecting.run())
        if self._sharing is not None:
            self._tasks.start(self._sharing.run())
        try:
            await asyncio.wait((gossiping, living, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in (gossiping, living):
                if task.done():
                    task.result()
            await self._leave(living)
        except Exception:
            # Where other seats of this machine go on, its channels stay open: nobody would notice.
            await self._say_goodbye()
            raise
        finally:
            await self._tasks.close()
            await self.steps.close()
            await self.dispatcher.close()
            self._let_go()

    def stop(self) -> None:
        """Asks the peer to drain, hand over and leave; `run` then returns."""
        self._stopping.set()

    async def _live(self, neighbours: list[str]) -> None:
        await meet(self.gossip, neighbours)
        while True:
            await self._stand_by.until_wanted()
            await self._serve_stages()
            await self._stand_by.put_away()

    async def _serve_stages(self) -> None:
        """Takes the stage that needs this peer most, then others; returns when it must pause."""
        await self._speed.measure()
        target: int | None = await self._stage_choice.claim(self.wanted_stage)
        while target is not None:
            target = await self._serve_stage(target)
            # The next stage may need all of the memory that this one had.
            await self.machine.worker.run(self.machine.free)

    async def _serve_stage(self, stage_index: int) -> int | None:
        """Builds a stage and serves it; returns the one to serve instead, when that helps the swarm
        more, or None when this peer must pause. Nothing holds on to the stage after that."""
        try:
            self._served = served = await self._built(stage_index)
        except (UserError, MemoryError, StageLost) as e:
            self._stand_by.not_built(e)
            return None
        self._here.begin(served.replica)
        self._stand_by.served()
        target, is_lost = None, False
        try:
            target = await self._until_moved(served)
        except StageLost as e:
            is_lost = True
            self._stand_by.not_built(e)
        if self._stopping.is_set() and not is_lost:
            # `_leave` goes on with this replica, and ends this task.
            await asyncio.get_running_loop().create_future()
        self._let_go()
        self._speed.stopped(served.replica.index)
        self.steps.drop_round(served.replica.round + 1)
        if target is not None:
            self._go_to(target, served.replica)
        return target

    def _let_go(self) -> None:
        """What comes late is for a stage that it serves no more."""
        if self._served is not None:
            self._served.let_go()
        self._served = None
        self._here.end()
        self.generation.forget()

    async def _built(self, stage_index: int) -> ServedStage:
        machine, now = self.machine, asyncio.get_running_loop().time()
        stage, optimizer = await machine.worker.run(lambda: machine.build(stage_index))
        replica = Replica(
            stage,
            optimizer,
            machine.device,
            machine.worker,
            Phase(State.FETCHING, progress.newest_round(self.view, now)),
            self.settings.plan,
            await machine.worker.run(lambda: machine.build_local(stage, optimizer)),
        )
        return ServedStage(
            self.gossip,
            self.settings,
            self.limits,
            replica,
            steps=self.steps,
            feeder=self.feeder,
            recovery=self.recovery,
            checkpointing=self.checkpointing,
            openings=self._openings,
            weights=self._weights,
            rng=self.rng,
        )

    async def _until_moved(self, served: ServedStage) -> int | None:
        """Serves a stage, as `_serve_stage`."""
        serving = Tasks("serve")
        balancing = serving.start(self.mover.balance(served.departure))
        pausing = serving.start(self._stand_by.until_paused())
        running = serving.start(self._run(served))
        losing = serving.start(self.machine.until_lost())
        feeding = [serving.start(self.feeder.run(served.replica))] if self.feeder else []
        try:
            await asyncio.wait(
                (balancing, pausing, running, losing, *feeding),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in (losing, running, *feeding):
                if task.done():
                    task.result()
            if balancing.done():
                return balancing.result()
            balancing.cancel()
            await self._hand_over(served, "paused before others had taken over every shard")
            return None
        finally:
            await serving.close()

    async def _run(self, served: ServedStage) -> None:
        async with aclosing(served.run()) as events:
            async for event in events:
                match event:
                    case Loss():
                        self.on_loss(event)
                    case Renamed(before, after):
                        if self.feeder is not None:
                            self.journal.renamed(before, after)

    def _go_to(self, target: int, replica: Replica) -> None:
        """Tells that this peer goes to another stage."""
        self.gossip.add_total("moved")
        self._speed.learn(replica)
        self.gossip.update(
            state=JOINING,
            stage=target,
            moving_to=OBSERVER_STAGE,
            digests=b"",
            holds=b"",
            samples_per_s=self._speed.expected_rate(target),
            urgent=True,
        )

    async def _hand_over(self, served: ServedStage, warning: str) -> None:
        """Drains, waits until others hold the shards, saves a checkpoint. `warning` is logged where
        they did not in time."""
        if not served.replica.synced:
            return
        if not await served.departure.hand_over():
            log.warning(warning)
        if self.checkpointing is not None:
            await self.checkpointing.leaving(served.replica, served.exchanges)

    async def _leave(self, living: asyncio.Task[None]) -> None:
        """Drains, waits until others hold the shards, says goodbye."""
        served = self._served
        if served is not None:
            if not living.done():
                is_alone = not served.departure.others(ACTIVE)
                with contextlib.suppress(StageLost):  # then there is nothing left to give
                    await self._hand_over(served, "left before others had taken over every shard")
                if self.checkpointing is not None and served.replica.synced:
                    self.unsaved = await self.checkpointing.unsaved(
                        served.replica, is_needed=is_alone
                    )
            self._speed.stopped(served.replica.index)
        else:  # it would say that it joins, after it has said that it left
            living.cancel()
            await asyncio.wait((living,))
        if self.feeder is not None:
            self.feeder.leave()
        await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        self.gossip.update(state=LEFT, stage=OBSERVER_STAGE)
        self.gossip.pushes.now()
        await asyncio.sleep(self.gossip_settings.push_delay_s)

    async def _hear_steps(self) -> None:
        """Does what its microbatches ask for. Between two events it holds on to none: one has a
        replica, whose memory is the next stage's."""
        while True:
            self._heed(await self.steps.events.get())

    def _heed(self, event: Contested | Measured) -> None:
        if isinstance(event, Contested):
            if self._served is not None:
                self._served.rounds.settle_early(event.round)
        elif event.replica is self.replica and self.gossip.own.state == ACTIVE:
            self._openings.announce_rate(event.replica)


__all__ = ["Identity", "Machine", "Peer"]
