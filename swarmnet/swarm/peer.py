"""A peer of the swarm, whatever carries its calls and whatever its device is.

Its life: hear of the others, take the stage that needs it most, fetch that stage, serve it round
after round (and feed, where it has data), hand over, leave. The daemon composes it with real
parts, tests and the simulation with others; this code is the same.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from swarmnet.admission import OPEN, Admission
from swarmnet.errors import NotReady, SwarmnetError, Unreachable, UserError, WrongRun
from swarmnet.protocol import recovery as recovering
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import (
    ACTIVE,
    JOINING,
    LEAVING,
    LEFT,
    MAX_ADDRESSES,
    MAX_TEXT,
    OBSERVER_STAGE,
    OBSERVING,
    Record,
)
from swarmnet.protocol.membership.seats import machine_of, stages_beside
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.update.sync_modes import AUTO, DELAYED, GOSSIP
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.own_record import Signer
from swarmnet.swarm.membership.pace import GossipSettings
from swarmnet.swarm.membership.probes import Probes
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.messages import SpecReply
from swarmnet.swarm.pipeline.fed_rounds import OnRound
from swarmnet.swarm.pipeline.feeder import Feeder
from swarmnet.swarm.pipeline.infer import InferService
from swarmnet.swarm.pipeline.step import StepService
from swarmnet.swarm.pipeline.wiring import Wiring
from swarmnet.swarm.ports import Data, Device, LocalSteps, Optimizer, Stage, Worker
from swarmnet.swarm.recovery.handover import Handover
from swarmnet.swarm.recovery.lost_samples import OnLoss
from swarmnet.swarm.recovery.restart import Checkpointing, Disk, Recovery
from swarmnet.swarm.recovery.state_sync import StateSync
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.averaging import Averaging, Behind, Diverged
from swarmnet.swarm.update.delayed_updates import DelayedUpdates
from swarmnet.swarm.update.gossip_averaging import GossipAveraging
from swarmnet.swarm.update.local_updates import LocalUpdates
from swarmnet.swarm.update.replica import Replica
from swarmnet.swarm.update.rounds import Rounds, Updates, ZeroUpdates
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message, convert

log = logging.getLogger("swarmnet.peer")

CLAIM_S = 0.5
"""How long a newcomer's choice of stage is left to be seen before it is made good."""
MAX_CLAIMS = 5
JOIN_RETRY_S = 0.2
DECLARE_JOIN_S, MAX_FORETOLD = 1.0, 64
"""A newcomer tells so many replicas of its stage before it begins, and waits so long, twice, for
each of them."""
EMPTY_STAGE_S = 2.0
"""How long a stage must have had no replica before a joiner begins it from its initial state."""
ALONE_S = 20.0
"""The same where nobody of a run that has begun can be heard of."""
MEET_S = 30.0
"""How long a newcomer tries to reach any of the peers that it was told of."""
STAGE_METHODS = (
    "reduce",
    "reduced",
    "adopt",
    "adopted",
    "mirror",
    "fetch_optimizer",
    "fetch_parameters",
    "fetch_moments",
    "contributions",
    "offer",
    "norm",
    "stage_norm",
)
"""Served with a replica only."""
DRAIN_S = 20.0
"""Longest wait for the own microbatches and shards when leaving."""
LONGEST_DRAIN_S = 50.0
"""The same while the gradient is on its way to another replica."""
TELL_LEAVING_S = 3.0
"""Whose peer takes longer than this to leave is told why."""
ASK_ORPHANS_S = 4.0
"""How often who leaves asks whether what was not committed will be."""
GIVE_AGAIN_S = 2.0
"""Rest after nobody has taken it."""
MOVE_S = 7200.0
"""Likewise when moving to another stage: nobody waits for that, and a round may be long."""
MOVE_PATIENCE_S = 30.0
"""Who moves waits so long for the end of its round, rather than hand its gradient over."""
LOOK_AGAIN_S = 1.0


@dataclass
class Machine:
    """What a machine brings into the swarm."""

    build: Callable[[int], tuple[Stage, Optimizer]]
    """The parts of a stage, by its index; runs on the worker."""
    device: Device
    worker: Worker
    data: Data | None = None
    disk: Disk | None = None
    """Where checkpoints are kept; None for nowhere."""
    build_local: Callable[[Any, Any], LocalSteps | None] = lambda stage, optimizer: None
    """The own steps of a replica, where the run's mode has them; runs on the worker."""
    services: dict[int, float] = field(default_factory=dict)
    """Device seconds of a microbatch, by the stage that the device serves: all seats of a machine
    share one device."""
    free: Callable[[], None] = lambda: None
    """Gives memory that is not used any more back to the machine; runs on the worker."""
    measure: Callable[[], float] = lambda: 0.0
    """Device seconds that a microbatch is likely to take in a stage of middle cost, before any was
    served; 0 where nobody knows. Runs on the worker."""
    stage_costs: tuple[float, ...] | None = None
    """Of each stage, in any unit; None where all are alike."""


@dataclass
class Identity:
    """Who a peer is in its run."""

    run_id: str
    spec: bytes
    """Canonical bytes of the run's spec, given to whoever asks."""
    incarnation: int
    started_unix_s: float = 0.0
    agent: str = ""
    credential: bytes = b""
    """What admits this peer to a closed run."""


@dataclass
class Peer:
    """One peer; `run()` is its life, `stop()` its wish to end."""

    transport: Transport
    signer: Signer
    identity: Identity
    settings: RunSettings
    machine: Machine
    rng: random.Random
    limits: Limits = field(default_factory=Limits)
    gossip_settings: GossipSettings = field(default_factory=GossipSettings)
    wanted_stage: int | None = None
    feeds: bool = True
    begin_anew: bool = False
    """As `Recovery.begin_anew`."""
    admission: Admission = OPEN
    assigner: assignment.Assigner = field(default_factory=assignment.Adaptive)
    on_round: OnRound = lambda round_index, ids: None
    resource_limits: ResourceLimits = field(default_factory=ResourceLimits)
    on_history: Callable[[int, int], None] = lambda old, new: None
    """Hears when the run's history turns out to be named otherwise (see `Record.history`)."""
    on_loss: OnLoss = lambda loss: None
    """Hears of the books that this peer closes for its stage (see
    `swarm.recovery.lost_samples`)."""

    def __post_init__(self) -> None:
        disk = self.machine.disk
        self.view = View(self.transport.peer_id)
        own = Record(
            peer_id=self.transport.peer_id,
            run_id=self.identity.run_id,
            incarnation=self.identity.incarnation,
            version=0,
            has_data=self.feeds and self.machine.data is not None,
            agent=self.identity.agent,
            started_unix_s=self.identity.started_unix_s,
            credential=self.identity.credential,
        )
        self.gossip = Gossip(
            self.transport,
            self.view,
            self.signer,
            own,
            self.rng,
            self.gossip_settings,
            admission=self.admission,
            last_round=self.settings.rounds,
        )
        self.reconnecting = Reconnecting(
            self.gossip, random.Random(f"missing|{own.peer_id}|{own.incarnation}")
        )
        self.recovery = Recovery(
            self.gossip, self.settings.num_stages, disk, self.begin_anew, self.reconnecting
        )
        # Before anybody asks: who sees this record must not begin the run anew.
        self.gossip.amend(restorable=self.recovery.offers())
        self.checkpointing = (
            Checkpointing(self.gossip, disk, self.settings.rounds) if disk is not None else None
        )
        self.wiring = Wiring(
            self.transport,
            self.gossip,
            self.limits,
            self.settings.num_stages,
            self.settings.samples_per_microbatch,
            self.rng,
            overlaps=self.settings.sync_mode in (DELAYED, AUTO),
        )
        self.steps = StepService(
            self.transport,
            self.gossip,
            self.wiring,
            self.limits,
            resource_limits=self.resource_limits,
        )
        self.steps.on_measured = self._announce_rate
        self.inference = InferService(self.wiring, self.limits, self.steps.serving)
        self.feeder = (
            Feeder(
                self.transport,
                self.gossip,
                self.wiring,
                self.steps,
                self.settings,
                self.limits,
                self.machine.data,
                self.on_round,
            )
            if self.machine.data is not None and self.feeds
            else None
        )
        self.replica: Replica | None = None
        self._tasks = Tasks("peer")
        self._counted_history = 0
        """The history of the rounds that this peer has counted samples of."""
        self._stopping = asyncio.Event()
        self._busy_s = 0.0
        self._expected_s = 0.0
        """Device seconds of a microbatch in a stage of middle cost; 0: unknown."""
        self._has_served = False
        self.transport.handle("spec", self._on_spec)
        self.probes = Probes(self.transport, self.gossip)

    # ---- life -------------------------------------------------------------------------------

    async def run(self, neighbours: list[str]) -> None:
        """Joins through `neighbours` (peer ids with known addresses; none for the first peer of a
        run), serves until `stop()`, leaves. Raises `Unreachable` where no neighbour answers."""
        self.transport.set_run(self.identity.run_id)
        self.gossip.update(addresses=tuple(self.transport.addresses()[:MAX_ADDRESSES]))
        gossiping = self._tasks.start(self.gossip.run())
        living = self._tasks.start(self._live(neighbours))
        stopping = self._tasks.start(self._stopping.wait())
        if self.gossip.own.peer_id == machine_of(self.gossip.own.peer_id):  # once a machine
            self._tasks.start(self.reconnecting.run())
        try:
            await asyncio.wait((gossiping, living, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in (gossiping, living):
                if task.done():
                    task.result()
            await self._leave(living)
        finally:
            await self._tasks.close()
            await self.steps.close()

    def stop(self) -> None:
        """Asks the peer to drain, hand over and leave; `run` then returns."""
        self._stopping.set()

    async def _live(self, neighbours: list[str]) -> None:
        await self._meet(neighbours)
        while True:
            await self._rest()
            await self._serve_stages()
            await self._put_away()

    async def _serve_stages(self) -> None:
        """Takes the stage that needs this peer most, then others; returns when it must pause."""
        if not self._expected_s:
            self._expected_s = await self.machine.worker.run(self.machine.measure)
        target: int | None = await self._claim_stage()
        while target is not None:
            target = await self._serve_stage(target)
            await self._let_go()  # the next stage may need all of the memory that this one had

    async def _serve_stage(self, stage_index: int) -> int | None:
        """Builds a stage and serves it; as `_serve_until_moved`."""
        machine = self.machine
        stage, optimizer = await machine.worker.run(lambda: machine.build(stage_index))
        replica = Replica(
            stage,
            optimizer,
            machine.device,
            machine.worker,
            progress.newest_round(self.view, asyncio.get_running_loop().time()),
            self.settings.plan,
            await machine.worker.run(lambda: machine.build_local(stage, optimizer)),
        )
        self.replica = self.steps.replica = replica
        self._has_served = True
        return await self._serve_until_moved(replica)

    async def _meet(self, neighbours: list[str]) -> None:
        """Hears of the run from at least one neighbour, where there are any: who is cut off from
        all of them would otherwise begin the run anew, alone."""
        loop = asyncio.get_running_loop()
        end = loop.time() + MEET_S
        met = not neighbours
        while not met:
            for peer_id in list(neighbours):
                try:
                    met = await self.gossip.reconcile(peer_id) or met
                except WrongRun as e:
                    if len(neighbours) == 1:
                        raise
                    log.warning("%s is not asked any more: %s", peer_id[-8:], e)
                    neighbours = [p for p in neighbours if p != peer_id]
            # Found otherwise, meanwhile; not by another newcomer that has met nobody either.
            met = met or any(r.is_replica for r in self.view.live(loop.time()))
            if not met and loop.time() >= end:
                raise Unreachable("none of the known peers of the run answers")
            if not met:
                await asyncio.sleep(JOIN_RETRY_S)

    async def _claim_stage(self) -> int:
        """Chooses a stage and says so; chooses again where another newcomer chose the same."""
        loop = asyncio.get_running_loop()
        num_stages = self.settings.num_stages
        old = self.recovery.old_stage()
        if old in stages_beside(self.view, self.gossip.own.peer_id, num_stages, loop.time()):
            old = None
        wanted = old if self.wanted_stage is None else self.wanted_stage
        allowed = self._stages_that_fit()
        if wanted is not None and (wanted in allowed or self.wanted_stage is not None):
            self._say_joining(wanted)
            return wanted
        await self.gossip.catch_up()
        present = {r.peer_id for r in self.view.live(loop.time()) if r.stage != OBSERVER_STAGE}
        chosen = self.assigner.choose(
            self.view,
            num_stages,
            loop.time(),
            self.rng,
            costs=self.machine.stage_costs,
            allowed=allowed,
        )
        for _ in range(MAX_CLAIMS):
            self._say_joining(chosen)
            await asyncio.sleep(CLAIM_S)
            await self.gossip.catch_up()
            better = self.assigner.settle(
                self.view,
                num_stages,
                loop.time(),
                chosen,
                present,
                costs=self.machine.stage_costs,
                allowed=allowed,
            )
            if better == chosen:
                return chosen
            chosen = better
        self._say_joining(chosen)
        return chosen

    def _say_joining(self, stage_index: int) -> None:
        """Says that it comes to a stage, and how fast it is likely to be: those who come at the
        same time go elsewhere."""
        self.gossip.update(
            state=JOINING,
            stage=stage_index,
            restorable=self.recovery.offers(stage_index),
            samples_per_s=self._expected_rate(stage_index),
            urgent=True,
        )

    def _expected_rate(self, stage_index: int) -> float:
        """Samples/s of this stage beside those that the machine serves; 0 while unknown."""
        if not self._expected_s:
            return 0.0
        own_s = self._expected_s * self._relative_cost(stage_index)
        return self.settings.samples_per_microbatch / (own_s + sum(self.machine.services.values()))

    def _relative_cost(self, stage_index: int) -> float:
        """Of a stage, over that of a middle one."""
        costs = self.machine.stage_costs
        return costs[stage_index] / fmean(costs) if costs else 1.0

    # ---- serving ----------------------------------------------------------------------------

    async def _serve_until_moved(self, replica: Replica) -> int | None:
        """Serves a stage; returns the one to serve instead, when that helps the swarm more, or
        None when this peer must pause."""
        serving = Tasks("serve")
        balancing = self._tasks.start(self._balance(replica))
        pausing = serving.start(self._until_paused())
        ended = serving.start(self._serve(replica))
        feeding = serving.start(self.feeder.run(replica)) if self.feeder is not None else ended
        try:
            await asyncio.wait(
                (balancing, pausing, ended, feeding), return_when=asyncio.FIRST_COMPLETED
            )
            for task in (ended, feeding):
                if task.done():
                    task.result()
            target = balancing.result() if balancing.done() else None
            if target is None:
                balancing.cancel()
                await self._hand_over_to_pause(replica)
        finally:
            balancing.cancel()
            await serving.close()
        if self._stopping.is_set():  # `_leave` goes on with this replica, and ends this task
            await asyncio.get_running_loop().create_future()
        self.machine.services.pop(replica.index, None)
        self.steps.replica = None  # what comes late is for a stage that it serves no more
        self.steps.drop_round(replica.round + 1)
        if target is None:
            return None
        self.gossip.add_total("moved")
        if replica.service_s:
            self._expected_s = replica.service_s / self._relative_cost(replica.index)
        self.gossip.update(
            state=JOINING,
            stage=target,
            moving_to=OBSERVER_STAGE,
            digests=b"",
            holds=b"",
            samples_per_s=self._expected_rate(target),
            urgent=True,
        )
        return target

    async def _balance(self, replica: Replica) -> int:
        """Looks every so often whether this peer should serve another stage
        (`assignment.propose_move`), and hands over what it holds; returns the stage to go to. No
        move uncovers a stage: this peer goes only while another serves the one that it leaves."""
        loop = asyncio.get_running_loop()
        gate = assignment.MoveGate(
            self.gossip.own.peer_id,
            times=self.limits.move_proposals,
            cooldown_s=self.limits.move_cooldown_s,
        )
        passed_over = assignment.PassedOver(self.gossip.own.peer_id)
        gate_opens = loop.time() + self.limits.move_cooldown_s
        while True:
            await asyncio.sleep(self.limits.balance_every_s * self.rng.uniform(0.7, 1.3))
            if self.wanted_stage is not None or self.gossip.own.state != ACTIVE:
                continue
            move = self.assigner.propose(
                self.view,
                self.settings.num_stages,
                loop.time(),
                margin=self.limits.move_margin,
                costs=self.machine.stage_costs,
                without=passed_over.peers,
            )
            passed_over.heard(move)
            is_resting = loop.time() < gate_opens and not self._is_uncovered(move)
            if is_resting or not gate.decide(move, loop.time()):
                continue
            assert move is not None
            if self.resource_limits.unfit(move.target):
                continue
            if not assignment.pays(
                move, self.steps.flights.passage_s(), margin=self.limits.move_margin
            ):
                continue
            log.info("stage %d needs this peer more than stage %d", move.target, move.source)
            if await self._prepare_move(replica, move):
                return move.target
            gate_opens = loop.time() + self.limits.move_cooldown_s
            if self.gossip.own.state == LEAVING:
                active_from = replica.plan.next_owner_round(replica.round)
                self.gossip.update(state=ACTIVE, active_from=active_from)
            self.gossip.update(moving_to=OBSERVER_STAGE, urgent=True)

    async def _prepare_move(self, replica: Replica, move: assignment.Move) -> bool:
        """Serves on until little is lost by going, then hands over; False where that did not come
        about. Others know meanwhile who is coming to them."""
        self.gossip.update(moving_to=move.target, urgent=True)
        loop, stages, costs = (
            asyncio.get_running_loop(),
            self.settings.num_stages,
            self.machine.stage_costs,
        )
        try:
            async with asyncio.timeout(MOVE_S):
                if not self._is_uncovered(move) and not await self._until_free_to_move(replica):
                    return False
                if not self.assigner.confirm(self.view, stages, loop.time(), move, costs=costs):
                    log.info("stage %d does not need this peer any more", move.target)
                    return False
                return await self._until_handed_over(replica, False, lambda: None)
        except TimeoutError:
            return False

    def _is_uncovered(self, move: assignment.Move | None) -> bool:
        """Nobody serves the stage: nothing goes on, and there is nothing to wait for."""
        now = asyncio.get_running_loop().time()
        return move is not None and not self.view.members(move.target, now)

    async def _until_free_to_move(self, replica: Replica) -> bool:
        """At work until no gradient of this replica is on its way to the owners, and the newest
        round that has begun here is fed. The end of a long round is not waited for where
        microbatches pass quickly: another replica takes over what was learned here, and nothing is
        done while the last ones come back. False where this peer is not to serve here any more."""
        loop = asyncio.get_running_loop()
        last = replica.round + (1 if replica.ahead else 0)
        patient_until: float | None = None
        while replica.round <= last + 1:  # an exchange may take as long as a round
            if self.gossip.own.state != ACTIVE:
                return False
            if not self.updates.is_owing:
                now = loop.time()
                if replica.round > last or self._is_fed(replica, last):
                    return True
                patient_until = patient_until or now + MOVE_PATIENCE_S
                may_give = replica.local is None and not replica.ahead
                if (
                    may_give
                    and now >= patient_until
                    and self.steps.flights.passage_s() <= assignment.LONG_PASSAGE_S
                ):
                    return True
            await self.gossip.changed.wait(LOOK_AGAIN_S)
        return True

    def _is_fed(self, replica: Replica, r: int) -> bool:
        now = asyncio.get_running_loop().time()
        return replica.is_fed(r, self.view, now, self.settings.global_batch)

    async def _hand_over(self, replica: Replica, *, alone: bool) -> bool:
        """Takes no more microbatches, and returns when this peer is not needed in its stage any
        more; False where that did not come about in time. `alone`: may leave a stage without a
        replica."""
        self.gossip.update(moving_to=OBSERVER_STAGE)
        loop = asyncio.get_running_loop()
        now = loop.time()
        telling = loop.call_later(
            TELL_LEAVING_S,
            log.warning,
            "others take over what only this peer has: that may take %.0f s",
            LONGEST_DRAIN_S,
        )
        try:
            async with asyncio.timeout_at(now + DRAIN_S) as scope:
                return await self._until_handed_over(
                    replica, alone, lambda: scope.reschedule(now + LONGEST_DRAIN_S)
                )
        except TimeoutError:
            return False
        finally:
            telling.cancel()

    async def _until_handed_over(
        self, replica: Replica, alone: bool, on_giving: Callable[[], None]
    ) -> bool:
        """Leaving, until nothing is left that only it has; False where it stays after all. What the
        round has learned here goes to another replica, as soon as all of it counts: `on_giving` is
        called before."""
        loop = asyncio.get_running_loop()
        give_at, ask_at = loop.time(), loop.time() + ASK_ORPHANS_S
        self.gossip.update(state=LEAVING, urgent=True)
        while not self._handed_over(replica, alone):
            if not self._heirs(replica, ACTIVE):
                if not alone:  # the last of the others is gone, and this one is needed here
                    return False
                on_giving()  # to a newcomer
            if loop.time() >= ask_at:
                await self._settle_orphans(replica)
                ask_at = loop.time() + ASK_ORPHANS_S
            is_still = not self.steps.num_in_flight and not self.rounds.is_settling
            if loop.time() >= give_at and is_still and self.handover.may_give():
                on_giving()
                if not await self.handover.give():
                    give_at = loop.time() + GIVE_AGAIN_S
                continue
            await self.gossip.changed.wait(JOIN_RETRY_S)
            if self.gossip.own.state != LEAVING:
                return False
        return True

    async def _settle_orphans(self, replica: Replica) -> None:
        """In a long round, microbatches of which nobody will say that they count, for their feeder
        or a peer before this one is gone, would wait for its end."""
        for r in (replica.round, replica.round + 1):
            if replica.takes(r) and replica.ledger.pending(r):
                try:
                    await self.rounds.settle(r, is_over=False)
                except SwarmnetError as e:  # the device has no room: the next look is soon
                    log.debug("round %d: orphans stay for now: %s", r, e)

    async def _serve(self, replica: Replica) -> None:
        """Fetches the stage, then serves it; begins again where it fell behind. Ends never."""
        averaging = Averaging(
            self.transport, self.gossip, self.settings, self.limits, replica, self.on_loss
        )
        sync = StateSync(self.transport, self.gossip, self.limits, replica, self.rng)
        self.handover = Handover(
            self.transport, self.gossip, self.settings, replica, averaging, self.rng
        )
        updates = self.updates = self._updates(replica, averaging)
        rounds = self.rounds = Rounds(
            self.transport,
            self.gossip,
            self.settings,
            self.limits,
            replica,
            self.steps,
            updates,
            self.feeder,
            lambda: self._opened(replica, averaging),
        )
        self.averaging = averaging
        await replica.measure_digests()
        try:
            while True:
                try:
                    await self._join(replica, averaging, sync, rounds)
                    await rounds.run()
                    await self.gossip.changed.wait()  # the run has done its rounds: serve on
                except Behind as e:
                    log.warning("%s: fetching the stage again", e)
                    self.gossip.update(state=JOINING, urgent=True)
                    replica.synced = False
                    self.handover.forget()
                    if replica.ahead:
                        self.steps.drop_round(replica.round + 1)
                        await replica.drop_ahead()
                    averaging.forget_results()
                    await updates.close()
                except Diverged as e:
                    log.warning("%s: going over to them", e)
                    replica.synced = False
                    self.handover.forget()
                    self.gossip.add_total("diverged")
                    self.gossip.update(state=JOINING, digests=b"", holds=b"", urgent=True)
                    self.steps.drop_round(replica.round)  # no receipt of theirs is to be reused
                    await averaging.forget_state()
        finally:
            await rounds.close()
            await updates.close()
            await averaging.close()

    def _updates(self, replica: Replica, averaging: Averaging) -> Updates:
        """What the run's mode does with a round's gradient."""
        if replica.plan.mode in (DELAYED, AUTO):
            return DelayedUpdates(self.gossip, replica, averaging, self.handover)
        if replica.plan.mode == GOSSIP:
            return GossipAveraging(self.transport, self.gossip, self.limits, replica, averaging)
        if replica.local is not None:
            return LocalUpdates(self.transport, self.gossip, self.limits, replica, averaging)
        return ZeroUpdates(replica, averaging, self.handover)

    async def _join(
        self, replica: Replica, averaging: Averaging, sync: StateSync, rounds: Rounds
    ) -> None:
        """Returns when the replica has the parameters of a round that is going on."""
        if replica.synced:
            return
        loop = asyncio.get_running_loop()
        alone_since = loop.time()
        while not replica.synced:
            rounds.updates.attend()
            donors = sync.donors()
            if donors:
                if await self.recovery.resume(replica, averaging, donors):
                    continue
                self.recovery.forget_loaded()
                if isinstance(rounds.updates, LocalUpdates | GossipAveraging):
                    await rounds.updates.follow(sync, rounds)
                else:
                    await self._follow(max(d.round for d in donors), replica, sync, rounds)
            elif self._heirs(replica, ACTIVE) or self._heirs(replica, LEAVING):
                alone_since = loop.time()
                await self.gossip.changed.wait(JOIN_RETRY_S)
            elif await self.recovery.attend(replica, averaging):
                if replica.synced and self.checkpointing is not None:
                    self.checkpointing.restored(replica)
            elif loop.time() - alone_since >= self._patience_with_empty_stage():
                await self._begin_stage(replica, averaging)
            else:
                await self.gossip.changed.wait(JOIN_RETRY_S)
        if self.gossip.own.state != ACTIVE:
            await self._opened(replica, averaging)

    def _patience_with_empty_stage(self) -> float:
        """In a run that goes on already, a replica of the stage may yet be heard of; where nobody
        of such a run is live, it is rather this peer that is cut off."""
        now = asyncio.get_running_loop().time()
        if progress.newest_round(self.view, now):
            return EMPTY_STAGE_S
        return ALONE_S if self._known_round() else 0.0

    def _known_round(self) -> int:
        """The newest round that anybody, live or not, is known to have served in."""
        return max((r.round for r in self.view.records() if r.state != OBSERVING), default=0)

    async def _begin_stage(self, replica: Replica, averaging: Averaging) -> None:
        """The first replica of its stage: initial parameters, and all the optimizer state."""
        now = asyncio.get_running_loop().time()
        round_index = progress.newest_round(self.view, now) or self._known_round()
        if round_index:
            log.warning("stage %d had no replica left: it starts afresh", replica.index)
            self.gossip.add_total("stage_restarted")
        if not recovering.is_running(self.view.live(now)):
            self.gossip.update(history=self.recovery.new_history())
        if replica.local is not None:
            await _drop_own_steps(replica)
        await replica.open_round(round_index, synced=True)
        averaging.ownership.start_fresh()

    async def _follow(
        self, round_index: int, replica: Replica, sync: StateSync, rounds: Rounds
    ) -> None:
        """Fetches a round's parameters; where that round ends first, gets the next one's with its
        update, like every other replica but without a gradient of its own."""
        if replica.round != round_index:
            replica.round = round_index
        fetching = asyncio.get_running_loop().create_task(sync.fetch(round_index))
        try:
            while not fetching.done():
                if rounds.is_drained(round_index) and round_index < self.settings.rounds:
                    await _end(fetching)  # else it would go on over the parameters to come
                    await rounds.finish(round_index)
                    return
                told = asyncio.get_running_loop().create_task(
                    self.gossip.changed.wait(JOIN_RETRY_S)
                )
                await asyncio.wait((fetching, told), return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
            if fetching.result() and not rounds.is_drained(round_index):
                await replica.open_round(round_index, synced=True)
                await replica.measure_digests()
            elif fetching.result() and round_index >= self.settings.rounds:
                await replica.open_round(round_index, synced=True)
            else:
                await self.gossip.changed.wait(JOIN_RETRY_S)
        finally:
            await _end(fetching)

    async def _opened(self, replica: Replica, averaging: Averaging) -> None:
        """A round has begun here: says so, with digests, and sees to the shards it owns."""
        await replica.measure_digests()
        own = self.gossip.own
        rate = self._rate(replica)
        joined = own.state == JOINING
        history = self.recovery.history()
        if not joined and history != own.history:
            self.on_history(own.history, history)
        holds_any = len(averaging.ownership.holds().strip(b"\0")) > 0
        fresh = joined and (
            holds_any or averaging.ownership.owns_from_now or self.recovery.restored is not None
        )
        active_from = own.active_from
        if joined:
            active_from = replica.round if fresh else replica.plan.next_owner_round(replica.round)
        changes = {
            "stage": replica.index,
            "round": replica.round,
            "digests": replica.digests,
            "holds": averaging.ownership.holds(),
            "active_from": active_from,
            "samples_per_s": rate,
            "queue_length": replica.device.num_waiting,
            "restorable": (),
            "history": history,
            "samples": replica.samples,
            "last_open_s": replica.open_s,
            "last_busy_s": self._busy_since(replica),
            "last_exchange_s": averaging.pace.last_s if replica.open_s else 0.0,
        }
        if joined and history != self._counted_history:
            # Rounds of another history: they have nothing in common with these but their number.
            changes["counts"] = tuple(c for c in own.counts if c.round < replica.round)
        self._counted_history = history
        if joined:
            replica.is_join_declared = True
            try:
                sisters = self._sisters(replica.index)
                await self.gossip.declare_join(sisters, DECLARE_JOIN_S, state=ACTIVE, **changes)
            finally:
                replica.is_join_declared = False
        state = self.gossip.own.state
        self.gossip.update(state=ACTIVE if state == JOINING else state, urgent=True, **changes)
        replica.changed.notify_all()
        averaging.lost.opened(replica.round)
        if joined:
            self.recovery.opened(replica.round, history)
        self.recovery.forget_loaded()
        if averaging.current == replica.round:  # else after the exchange that runs beside it
            averaging.ownership.tasks.start(self._own_shards(replica, averaging))
        if self.checkpointing is not None:
            self._tasks.start(self.checkpointing.opened(replica, averaging))
        if joined:
            log.info("stage %d: serving from round %d", replica.index, replica.round)

    def _sisters(self, stage_index: int) -> list[str]:
        """The other replicas of a stage; some of them where these are many, and rounds are long."""
        now = asyncio.get_running_loop().time()
        members = [r.peer_id for r in self.view.members(stage_index, now)]
        others = [p for p in members if p != self.gossip.own.peer_id]
        if len(others) <= MAX_FORETOLD:
            return others
        return self.gossip.rng.sample(others, MAX_FORETOLD)

    def _rate(self, replica: Replica) -> float:
        """Samples/s that the device could do of this stage, or the uplink carry: as measured, else
        as expected; 0 while unknown."""
        services = self.machine.services
        expected_s = self._expected_s * self._relative_cost(replica.index)
        services[replica.index] = replica.service_s or expected_s
        if not services[replica.index]:
            return 0.0
        link_s = self.transport.traffic.upload_s(replica.sent_bytes)
        return self.settings.samples_per_microbatch / max(sum(services.values()), link_s)

    def _announce_rate(self, replica: Replica) -> None:
        """Newcomers, and those who move, go by what is announced; a round may be long."""
        if replica is self.replica and self.gossip.own.state == ACTIVE:
            self.gossip.update(samples_per_s=self._rate(replica))

    def _busy_since(self, replica: Replica) -> float:
        """Seconds that the device has worked since the round before was opened."""
        before, self._busy_s = self._busy_s, replica.device.busy_s
        return max(0.0, self._busy_s - before) if replica.open_s else 0.0

    # ---- pausing ----------------------------------------------------------------------------

    async def _until_paused(self) -> None:
        """Returns when the machine's owner wants it to himself."""
        while not self.resource_limits.why_paused:
            self.resource_limits.changed.clear()
            await self.resource_limits.changed.wait()

    async def _rest(self) -> None:
        """Stays in the swarm and does nothing, until this peer may work."""
        while reason := self.resource_limits.why_paused or self._why_no_stage():
            if self.gossip.own.paused != reason[:MAX_TEXT]:
                self.gossip.update(
                    state=OBSERVING,
                    stage=OBSERVER_STAGE,
                    paused=reason[:MAX_TEXT],
                    digests=b"",
                    holds=b"",
                    restorable=(),
                    samples_per_s=0.0,
                    queue_length=0,
                    urgent=True,
                )
            self.resource_limits.changed.clear()
            await self.resource_limits.changed.wait()
        if self.gossip.own.paused:
            self.gossip.update(state=JOINING, paused="", urgent=True)

    def _why_no_stage(self) -> str:
        """After a pause: no stage fits any more, beside what other seats of the machine serve. (At
        the start that ends the peer, with a line: see `_stages_that_fit`.)"""
        if not self._has_served:
            return ""
        reasons = [self.resource_limits.unfit(k) for k in range(self.settings.num_stages)]
        return reasons[0] if all(reasons) else ""

    async def _hand_over_to_pause(self, replica: Replica) -> None:
        """As when leaving: drains, waits until others hold the shards, saves."""
        if not replica.synced:
            return
        if not await self._hand_over(replica, alone=True):
            log.warning("paused before others had taken over every shard")
        if self.checkpointing is not None:
            await self.checkpointing.leaving(replica, self.averaging)

    async def _let_go(self) -> None:
        """Of the replica and of everything that holds on to it."""
        self.replica = self.steps.replica = None
        del self.averaging, self.updates, self.handover, self.rounds
        for method in STAGE_METHODS:
            self.transport.handle(method, _on_none)
        await self.machine.worker.run(self.machine.free)

    async def _put_away(self) -> None:
        """What a paused peer does not need: its microbatches, and what it knows of its disk."""
        if self.feeder is not None:
            self.feeder.leave()
            self.feeder.write_off()
        disk = self.machine.disk
        if disk is not None:
            try:
                found = await disk.worker.run(disk.checkpoints.available)
            except (SwarmnetError, OSError) as e:
                log.warning("the checkpoints here cannot be read: %s", e)
                found = []
            self.recovery.found(found)

    def _stages_that_fit(self) -> list[int]:
        """Into the memory that this peer may take. Raises `UserError` where none does, or not the
        wanted one."""
        stages = range(self.settings.num_stages)
        reasons = [self.resource_limits.unfit(k) for k in stages]
        wanted = self.wanted_stage
        if all(reasons) or (wanted is not None and reasons[wanted]):
            raise UserError(reasons[wanted or 0])
        return [k for k in stages if not reasons[k]]

    async def _own_shards(self, replica: Replica, averaging: Averaging) -> None:
        """Sees to the shards that this replica owns; of those of the first round it says so."""
        r = replica.round
        await averaging.ownership.follow_owners()
        if r == 0 and replica.is_open(r) and self.gossip.own.holds != averaging.ownership.holds():
            self.gossip.update(holds=averaging.ownership.holds())

    # ---- leaving ----------------------------------------------------------------------------

    async def _leave(self, living: asyncio.Task[None]) -> None:
        """Drains, waits until others hold the shards, says goodbye."""
        replica = self.replica
        if replica is not None and replica.synced and not living.done():
            if not await self._hand_over(replica, alone=True):
                log.warning("left before others had taken over every shard")
            if self.checkpointing is not None:
                await self.checkpointing.leaving(replica, self.averaging)
        if replica is not None:
            self.machine.services.pop(replica.index, None)
        if self.feeder is not None:
            self.feeder.leave()
        self.gossip.update(state=LEFT, stage=OBSERVER_STAGE)
        self.gossip.pushes.now()
        await asyncio.sleep(2 * self.gossip_settings.push_delay_s)

    def _handed_over(self, replica: Replica, alone: bool) -> bool:
        """No microbatch and no gradient is inside, and every shard held here is held elsewhere too
        (or nobody else is left in the stage, nor on the way to it)."""
        others = self._heirs(replica, ACTIVE)
        if not others:
            return alone and not self._heirs(replica, JOINING)
        if self.steps.num_in_flight or replica.closed or self.rounds.is_settling:
            return False
        if any(replica.ledger.num_samples(replica.round + i) for i in (0, 1)):
            return False
        if self.handover.has_any(replica.round):
            return False
        if self.updates.is_owing:
            return False
        if replica.round >= self.settings.rounds:
            return True
        return all(
            any(o.holds_shard(j) and o.round >= replica.round for o in others)
            for j in replica.optimizer.owned()
        )

    def _heirs(self, replica: Replica, state: str) -> list[Record]:
        """The others of its stage that are in a state."""
        now, own = asyncio.get_running_loop().time(), self.gossip.own.peer_id
        members = self.view.members(replica.index, now)
        return [m for m in members if m.peer_id != own and m.state == state]

    # ---- others -----------------------------------------------------------------------------

    async def _on_spec(self, request: Request) -> Message:
        """For newcomers who know an address only."""
        self.gossip.check_stranger(request)
        return Message(SpecReply(self.identity.run_id, self.identity.spec))


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _drop_own_steps(replica: Replica) -> None:
    """A stage begins with the common parameters: nobody counts the steps after them any more."""
    for j in range(replica.num_shards):
        await replica.worker.run(lambda j=j: replica.put_common(j, replica.common_shard(j)))  # type: ignore[misc]


async def _on_none(request: Request) -> Message:
    raise NotReady("this peer serves no stage")


async def fetch_spec(transport: Transport, peer_id: str, timeout_s: float = 10.0) -> SpecReply:
    """The spec of the run that a peer belongs to; the caller checks the hash."""
    reply = await transport.call(peer_id, "spec", Message(), timeout_s=timeout_s)
    return convert(reply.body, SpecReply)


__all__ = ["Identity", "Machine", "Peer", "SwarmnetError", "fetch_spec"]
