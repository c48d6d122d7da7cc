"""Leaving a stage: a replica drains, and hands over what only it has. It does so at the end, for a
pause, or to move to another stage where that helps the swarm more
(`protocol.membership.assignment`)."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.departure import Inside, MovePatience, is_handed_over
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, OBSERVER_STAGE, Record
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.sync_modes import RunEnd
from swarmnet.protocol.timing import BULK_S, CONNECT_S, DAY_S, PATIENCE_S
from swarmnet.protocol.update import round_end
from swarmnet.swarm.machine import Machine
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.step import StepService
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S
from swarmnet.swarm.update.handover import Handover
from swarmnet.swarm.update.rounds import Rounds

log = logging.getLogger("swarmnet.peer")

DRAIN_S = PATIENCE_S
"""Longest wait for the own microbatches and shards when leaving."""
LONGEST_DRAIN_S = BULK_S
"""The same while the gradient is on its way to another replica."""

MOVE_S = DAY_S
"""Longest wait for the own microbatches and shards when moving: no other peer waits for that, and a
round may be long."""


@dataclass
class Departure:
    """Takes no more microbatches, and waits until this replica is not needed any more."""

    gossip: Gossip
    num_rounds: int
    steps: StepService
    replica: Replica
    rounds: Rounds
    handover: Handover
    stop: RunEnd = field(default_factory=RunEnd)
    """The round that the run ends with before its time."""

    async def hand_over(self) -> bool:
        """Leaves the stage, be it without a replica; False where something that only this one has
        was not taken over in time."""
        self.gossip.update(moving_to=OBSERVER_STAGE)
        loop = asyncio.get_running_loop()
        telling = loop.call_later(
            CONNECT_S,
            log.warning,
            "others take over what only this peer has: that may take %.0f s",
            LONGEST_DRAIN_S,
        )
        try:
            async with asyncio.timeout_at(Deadline.after(loop.time(), DRAIN_S).at) as patience:
                return await self.until_handed_over(alone=True, patience=patience)
        except TimeoutError:
            return False
        finally:
            telling.cancel()

    async def until_handed_over(
        self, *, alone: bool, patience: asyncio.Timeout | None = None
    ) -> bool:
        """Leaving, until nothing is left that only this replica has; False where it stays after
        all. `alone`: may leave the stage without a replica. What the round has learned here goes to
        another replica, as soon as all of it counts and what the round before has learned is with
        the owners; `patience` is longer then."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        longest = Deadline.after(now, LONGEST_DRAIN_S)
        rest, question = Deadline(now), Deadline.after(now, CONNECT_S)
        self.gossip.update(state=LEAVING, urgent=True)
        while not self._is_handed_over(alone):
            if not self.others(ACTIVE):
                if not alone:  # the last of the others is gone, and this one is needed here
                    return False
                _prolong(patience, longest)  # it gives to a newcomer
            if question.is_over(loop.time()):
                await self._settle_orphans()
                question = Deadline.after(loop.time(), CONNECT_S)
            is_still = not self.steps.num_in_flight and not self.rounds.is_settling
            if rest.is_over(loop.time()) and is_still and self.handover.may_give():
                _prolong(patience, longest)
                # What coding loses of the round before goes with this one: that comes first.
                if not self.rounds.updates.is_owing:
                    if not await self.handover.give():
                        rest = Deadline.after(loop.time(), LOOK_LESS_S)
                    continue
            await self.gossip.changed.wait(LOOK_AGAIN_S)
            if self.gossip.own.state != LEAVING:
                return False
        return True

    def others(self, state: str) -> list[Record]:
        """The other peers of the stage that are in a state."""
        now, own = asyncio.get_running_loop().time(), self.gossip.own.peer_id
        members = self.gossip.view.members(self.replica.index, now)
        return [m for m in members if m.peer_id != own and m.state == state]

    def _is_handed_over(self, alone: bool) -> bool:
        replica, rounds, r = self.replica, self.rounds, self.replica.round
        has_own = any(replica.ledger.num_tokens(r + i) for i in (0, 1))
        inside = Inside(
            r,
            replica.optimizer.owned(),
            num_in_flight=self.steps.num_in_flight,
            is_closing=replica.closed or rounds.is_settling,
            has_gradient=has_own or self.handover.has_any(r),
            is_owing=rounds.updates.is_owing,
        )
        return is_handed_over(
            inside,
            self.others(ACTIVE),
            self.others(JOINING),
            num_rounds=min(self.num_rounds, self.stop.round),
            alone=alone,
        )

    async def _settle_orphans(self) -> None:
        """In a long round, microbatches of which no peer will say that they count, for their feeder
        or a peer before this one is gone, would wait for its end."""
        replica = self.replica
        for r in (replica.round, replica.round + 1):
            if replica.takes(r) and replica.ledger.pending(r):
                try:
                    await self.rounds.settle(r, is_over=False)
                except SwarmnetError as e:  # the device has no room: the next look is soon
                    log.debug("round %d: orphans stay for now: %s", r, e)


def _prolong(patience: asyncio.Timeout | None, until: Deadline) -> None:
    if patience is not None:
        patience.reschedule(until.at)


@dataclass
class Mover:
    """Decides when this peer goes to another stage, and prepares that."""

    gossip: Gossip
    settings: RunSettings
    limits: WaitLimits
    machine: Machine
    assigner: assignment.Assigner
    resource_limits: ResourceLimits
    steps: StepService
    rng: random.Random
    wanted: int | None
    """The stage that the user wants, or None: then this peer may move."""

    async def balance(self, departure: Departure) -> int:
        """Looks every so often whether this peer should serve another stage
        (`assignment.propose_move`), and hands over what it holds; returns the stage to go to. No
        move uncovers a stage: this peer goes only while another serves the one that it leaves."""
        loop, limits, replica = asyncio.get_running_loop(), self.limits, departure.replica
        own = self.gossip.own.peer_id
        gate = assignment.MoveGate(
            own, times=limits.move_proposals, cooldown_s=limits.move_cooldown_s
        )
        passed_over = assignment.PassedOver(own)
        rest = Deadline.after(loop.time(), limits.move_cooldown_s)
        while True:
            await asyncio.sleep(limits.balance_every_s * self.rng.uniform(0.7, 1.3))
            if self.wanted is not None or self.gossip.own.state != ACTIVE:
                continue
            move = self.assigner.propose(
                self.gossip.view,
                self.settings.num_stages,
                loop.time(),
                margin=limits.move_margin,
                costs=self.machine.stage_costs,
                without=passed_over.peers,
            )
            passed_over.heard(move, is_uncovered=self._is_uncovered(move))
            is_resting = not rest.is_over(loop.time()) and not self._is_uncovered(move)
            if is_resting or not gate.decide(move, loop.time()):
                continue
            assert move is not None
            if self.resource_limits.unfit(move.target):
                continue
            passage_s = self.steps.flights.passage_s()
            if not assignment.pays(move, passage_s, margin=limits.move_margin):
                continue
            log.info("stage %d needs this peer more than stage %d", move.target, move.source)
            if await self.prepare(departure, move):
                return move.target
            rest = Deadline.after(loop.time(), limits.move_cooldown_s)
            if self.gossip.own.moving_to != move.target:
                continue  # this peer was stopped, or pauses: it leaves the stage for good
            if self.gossip.own.state == LEAVING:
                active_from = replica.plan.next_owner_round(replica.round)
                self.gossip.update(state=ACTIVE, active_from=active_from)
            self.gossip.update(moving_to=OBSERVER_STAGE, urgent=True)

    async def prepare(self, departure: Departure, move: assignment.Move) -> bool:
        """Serves on until little is lost by going, then hands over; False where that did not come
        about. Others know meanwhile which peer is coming to them."""
        self.gossip.update(moving_to=move.target, urgent=True)
        loop, stages = asyncio.get_running_loop(), self.settings.num_stages
        view, costs = self.gossip.view, self.machine.stage_costs
        try:
            async with asyncio.timeout(MOVE_S):
                if not self._is_uncovered(move) and not await self._until_free(departure):
                    return False
                if not self.assigner.confirm(view, stages, loop.time(), move, costs=costs):
                    log.info("stage %d does not need this peer any more", move.target)
                    return False
                return await departure.until_handed_over(alone=False)
        except TimeoutError:
            return False

    def _is_uncovered(self, move: assignment.Move | None) -> bool:
        """No peer serves the stage: nothing goes on, and there is nothing to wait for."""
        now = asyncio.get_running_loop().time()
        return move is not None and not self.gossip.view.members(move.target, now)

    async def _until_free(self, departure: Departure) -> bool:
        """At work until it may be left (`MovePatience`). False where this peer is not to serve here
        any more."""
        loop, replica = asyncio.get_running_loop(), departure.replica
        patience = MovePatience(replica.phase.newest_open)
        last = patience.newest_open
        view, num_slots = self.gossip.view, self.settings.slots.of(last)
        while replica.round <= last + 1:  # an exchange may take as long as a round
            if self.gossip.own.state != ACTIVE:
                return False
            now = loop.time()
            if not departure.rounds.updates.is_owing and patience.is_over(
                now,
                replica.round,
                is_fed=round_end.is_fed(view, replica.phase, last, now, num_slots),
                may_give=replica.local is None and not replica.ahead,
                passage_s=self.steps.flights.passage_s(),
            ):
                return True
            await self.gossip.changed.wait(LOOK_LESS_S)
        return True
