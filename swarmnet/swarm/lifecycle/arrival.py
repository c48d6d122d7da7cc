"""Arriving: a newcomer hears of the run from the peers that it was told of, and chooses the stage
that needs it most, or the one that its checkpoint is of."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

from swarmnet.causes import Failures
from swarmnet.errors import SwarmnetError, UserError, WrongRun
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import JOINING, OBSERVER_STAGE
from swarmnet.protocol.membership.seats import stages_beside
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.timing import PATIENCE_S
from swarmnet.swarm.lifecycle.opening import Speed
from swarmnet.swarm.machine import Machine
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery.restart import Recovery
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES

log = logging.getLogger("swarmnet.peer")

NOBODY_TELLS = "no known peer of the run tells who is in it"
MEET_S = PATIENCE_S
"""How long a newcomer tries to reach any of the peers that it was told of."""
CLAIM_S = 0.5
"""How long a newcomer's choice of stage is left to be seen before it is made good. It protects from
newcomers of one moment that all take the same stage (tests/swarm/membership/test_membership.py)."""


async def meet(gossip: Gossip, neighbours: list[str]) -> None:
    """Hears of the run from at least one neighbour, where there are any. A peer that is cut off
    from all of them would otherwise begin the run anew, alone. Raises `UserError` or
    `NotNow` where none answers within `MEET_S`, or the only one belongs to another run."""
    loop = asyncio.get_running_loop()
    end = Deadline.after(loop.time(), MEET_S)
    met, failures = not neighbours, Failures()
    while not met:
        for peer_id in list(neighbours):
            try:
                await gossip.exchange(peer_id)
                gossip.view.named(peer_id)
                met = True
            except WrongRun as e:
                failures.add(e, peer_id)
                if len(neighbours) == 1:
                    raise failures.as_error(NOBODY_TELLS) from None
                log.warning("%s is not asked any more: %s", peer_id[-8:], e)
                neighbours = [p for p in neighbours if p != peer_id]
            except SwarmnetError as e:
                failures.add(e, peer_id)
        # Found otherwise, meanwhile; not by another newcomer that is alone too.
        met = met or any(r.is_replica for r in gossip.view.live(loop.time()))
        if not met and end.is_over(loop.time()):
            raise failures.as_error(NOBODY_TELLS)
        if not met:
            await asyncio.sleep(LOOK_AGAIN_S)


@dataclass
class StageChoice:
    """Chooses among the stages that fit into this peer's memory, and announces the choice."""

    gossip: Gossip
    num_stages: int
    machine: Machine
    recovery: Recovery
    assigner: assignment.Assigner
    resource_limits: ResourceLimits
    speed: Speed
    rng: random.Random

    async def claim(self, by_user: int | None) -> int:
        """Chooses a stage and says so; chooses again where another newcomer chose the same.
        `by_user`: the one that the user wants. Raises `UserError` where no stage fits, or not the
        wanted one."""
        loop, view, num_stages = asyncio.get_running_loop(), self.gossip.view, self.num_stages
        old = self.recovery.old_stage()
        if old in stages_beside(view, self.gossip.own.peer_id, num_stages, loop.time()):
            old = None
        wanted = old if by_user is None else by_user
        allowed = self._stages_that_fit(by_user)
        if wanted is not None and (wanted in allowed or by_user is not None):
            self._announce(wanted)
            return wanted
        await self.gossip.catch_up()
        present = {r.peer_id for r in view.live(loop.time()) if r.stage != OBSERVER_STAGE}
        costs = self.machine.stage_costs
        chosen = self.assigner.choose(
            view, num_stages, loop.time(), self.rng, costs=costs, allowed=allowed
        )
        for _ in range(MAX_TRIES):
            self._announce(chosen)
            await asyncio.sleep(CLAIM_S)
            await self.gossip.catch_up()
            better = self.assigner.settle(
                view, num_stages, loop.time(), chosen, present, costs=costs, allowed=allowed
            )
            if better == chosen:
                return chosen
            chosen = better
        self._announce(chosen)
        return chosen

    def _announce(self, stage_index: int) -> None:
        """Says that this peer comes to a stage, and how fast it is likely to be: newcomers of the
        same moment go elsewhere."""
        self.gossip.update(
            state=JOINING,
            stage=stage_index,
            restorable=self.recovery.offers(stage_index),
            samples_per_s=self.speed.expected_rate(stage_index),
            product_flops_per_s=self.speed.product_flops_per_s,
            urgent=True,
        )

    def _stages_that_fit(self, wanted: int | None) -> list[int]:
        """Into the memory that this peer may take."""
        stages = range(self.num_stages)
        reasons = [self.resource_limits.unfit(k) for k in stages]
        if all(reasons) or (wanted is not None and reasons[wanted]):
            raise UserError(reasons[wanted or 0])
        return [k for k in stages if not reasons[k]]
