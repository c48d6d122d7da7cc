"""Moving to another stage where that helps the swarm more (`protocol.membership.assignment`)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, OBSERVER_STAGE
from swarmnet.protocol.timing import DAY_S, PATIENCE_S
from swarmnet.protocol.update import round_end
from swarmnet.swarm.lifecycle.served_stage import ServedStage
from swarmnet.swarm.machine import Machine
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.step import StepService
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.swarm.timing import LOOK_LESS_S

log = logging.getLogger("swarmnet.peer")

MOVE_S = DAY_S
"""Longest wait for the own microbatches and shards when moving: no other peer waits for that, and a
round may be long."""
MOVE_PATIENCE_S = PATIENCE_S
"""A moving peer waits so long for the end of its round, rather than hand its gradient over."""


class Mover:
    """Decides when this peer goes to another stage, and prepares that."""

    def __init__(
        self,
        gossip: Gossip,
        settings: RunSettings,
        limits: Limits,
        *,
        machine: Machine,
        assigner: assignment.Assigner,
        resource_limits: ResourceLimits,
        steps: StepService,
        rng: random.Random,
        wanted: Callable[[], int | None],
    ) -> None:
        """`wanted()` is the stage that the user wants, or None: then this peer may move."""
        self._gossip = gossip
        self._settings = settings
        self._limits = limits
        self._machine = machine
        self._assigner = assigner
        self._resource_limits = resource_limits
        self._steps = steps
        self._rng = rng
        self._wanted = wanted

    async def balance(self, served: ServedStage) -> int:
        """Looks every so often whether this peer should serve another stage
        (`assignment.propose_move`), and hands over what it holds; returns the stage to go to. No
        move uncovers a stage: this peer goes only while another serves the one that it leaves."""
        loop, limits, replica = asyncio.get_running_loop(), self._limits, served.replica
        own = self._gossip.own.peer_id
        gate = assignment.MoveGate(
            own, times=limits.move_proposals, cooldown_s=limits.move_cooldown_s
        )
        passed_over = assignment.PassedOver(own)
        gate_opens = loop.time() + limits.move_cooldown_s
        while True:
            await asyncio.sleep(limits.balance_every_s * self._rng.uniform(0.7, 1.3))
            if self._wanted() is not None or self._gossip.own.state != ACTIVE:
                continue
            move = self._assigner.propose(
                self._gossip.view,
                self._settings.num_stages,
                loop.time(),
                margin=limits.move_margin,
                costs=self._machine.stage_costs,
                without=passed_over.peers,
            )
            passed_over.heard(move, is_uncovered=self._is_uncovered(move))
            is_resting = loop.time() < gate_opens and not self._is_uncovered(move)
            if is_resting or not gate.decide(move, loop.time()):
                continue
            assert move is not None
            if self._resource_limits.unfit(move.target):
                continue
            passage_s = self._steps.flights.passage_s()
            if not assignment.pays(move, passage_s, margin=limits.move_margin):
                continue
            log.info("stage %d needs this peer more than stage %d", move.target, move.source)
            if await self.prepare(served, move):
                return move.target
            gate_opens = loop.time() + limits.move_cooldown_s
            if self._gossip.own.moving_to != move.target:
                continue  # this peer was stopped, or pauses: it leaves the stage for good
            if self._gossip.own.state == LEAVING:
                active_from = replica.plan.next_owner_round(replica.round)
                self._gossip.update(state=ACTIVE, active_from=active_from)
            self._gossip.update(moving_to=OBSERVER_STAGE, urgent=True)

    async def prepare(self, served: ServedStage, move: assignment.Move) -> bool:
        """Serves on until little is lost by going, then hands over; False where that did not come
        about. Others know meanwhile which peer is coming to them."""
        self._gossip.update(moving_to=move.target, urgent=True)
        loop, stages = asyncio.get_running_loop(), self._settings.num_stages
        view, costs = self._gossip.view, self._machine.stage_costs
        try:
            async with asyncio.timeout(MOVE_S):
                if not self._is_uncovered(move) and not await self._until_free(served):
                    return False
                if not self._assigner.confirm(view, stages, loop.time(), move, costs=costs):
                    log.info("stage %d does not need this peer any more", move.target)
                    return False
                return await served.departure.until_handed_over(alone=False)
        except TimeoutError:
            return False

    def _is_uncovered(self, move: assignment.Move | None) -> bool:
        """No peer serves the stage: nothing goes on, and there is nothing to wait for."""
        now = asyncio.get_running_loop().time()
        return move is not None and not self._gossip.view.members(move.target, now)

    async def _until_free(self, served: ServedStage) -> bool:
        """At work until no gradient of this replica is on its way to the owners, and the newest
        round that has begun here is fed. The end of a long round is not waited for where
        microbatches pass quickly: another replica takes over what was learned here, and nothing is
        done while the last ones come back. False where this peer is not to serve here any more."""
        loop, replica = asyncio.get_running_loop(), served.replica
        last = replica.round + (1 if replica.ahead else 0)
        patient_until: float | None = None
        while replica.round <= last + 1:  # an exchange may take as long as a round
            if self._gossip.own.state != ACTIVE:
                return False
            if not served.updates.is_owing:
                now = loop.time()
                if replica.round > last or self._is_fed(served, last):
                    return True
                patient_until = patient_until or now + MOVE_PATIENCE_S
                may_give = replica.local is None and not replica.ahead
                if (
                    may_give
                    and now >= patient_until
                    and self._steps.flights.passage_s() <= assignment.LONG_PASSAGE_S
                ):
                    return True
            await self._gossip.changed.wait(LOOK_LESS_S)
        return True

    def _is_fed(self, served: ServedStage, r: int) -> bool:
        now, phase = asyncio.get_running_loop().time(), served.replica.phase
        return round_end.is_fed(self._gossip.view, phase, r, now, self._settings.num_slots)
