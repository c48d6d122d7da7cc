"""Leaving a stage: a replica drains, and hands over what only it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, OBSERVER_STAGE, Record
from swarmnet.protocol.timing import BULK_S, CONNECT_S, PATIENCE_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.step import StepService
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S
from swarmnet.swarm.update.handover import Handover
from swarmnet.swarm.update.rounds import Rounds

log = logging.getLogger("swarmnet.peer")

DRAIN_S = PATIENCE_S
"""Longest wait for the own microbatches and shards when leaving."""
LONGEST_DRAIN_S = BULK_S
"""The same while the gradient is on its way to another replica."""


class Departure:
    """Takes no more microbatches, and waits until this replica is not needed any more."""

    def __init__(
        self,
        gossip: Gossip,
        num_rounds: int,
        steps: StepService,
        replica: Replica,
        rounds: Rounds,
        handover: Handover,
    ) -> None:
        self._gossip = gossip
        self._num_rounds = num_rounds
        self._steps = steps
        self._replica = replica
        self._rounds = rounds
        self._handover = handover

    async def hand_over(self) -> bool:
        """Leaves the stage, be it without a replica; False where something that only this one has
        was not taken over in time."""
        self._gossip.update(moving_to=OBSERVER_STAGE)
        loop = asyncio.get_running_loop()
        now = loop.time()
        telling = loop.call_later(
            CONNECT_S,
            log.warning,
            "others take over what only this peer has: that may take %.0f s",
            LONGEST_DRAIN_S,
        )
        try:
            async with asyncio.timeout_at(now + DRAIN_S) as scope:
                return await self.until_handed_over(
                    alone=True, on_giving=lambda: scope.reschedule(now + LONGEST_DRAIN_S)
                )
        except TimeoutError:
            return False
        finally:
            telling.cancel()

    async def until_handed_over(
        self, *, alone: bool, on_giving: Callable[[], None] = lambda: None
    ) -> bool:
        """Leaving, until nothing is left that only this replica has; False where it stays after
        all. `alone`: may leave the stage without a replica. What the round has learned here goes to
        another replica, as soon as all of it counts and what the round before has learned is with
        the owners: `on_giving` is called before."""
        loop = asyncio.get_running_loop()
        give_at, ask_at = loop.time(), loop.time() + CONNECT_S
        self._gossip.update(state=LEAVING, urgent=True)
        while not self._is_handed_over(alone):
            if not self.others(ACTIVE):
                if not alone:  # the last of the others is gone, and this one is needed here
                    return False
                on_giving()  # to a newcomer
            if loop.time() >= ask_at:
                await self._settle_orphans()
                ask_at = loop.time() + CONNECT_S
            is_still = not self._steps.num_in_flight and not self._rounds.is_settling
            if loop.time() >= give_at and is_still and self._handover.may_give():
                on_giving()
                # What coding loses of the round before goes with this one: that comes first.
                if not self._rounds.updates.is_owing:
                    if not await self._handover.give():
                        give_at = loop.time() + LOOK_LESS_S
                    continue
            await self._gossip.changed.wait(LOOK_AGAIN_S)
            if self._gossip.own.state != LEAVING:
                return False
        return True

    def others(self, state: str) -> list[Record]:
        """The other peers of the stage that are in a state."""
        now, own = asyncio.get_running_loop().time(), self._gossip.own.peer_id
        members = self._gossip.view.members(self._replica.index, now)
        return [m for m in members if m.peer_id != own and m.state == state]

    def _is_handed_over(self, alone: bool) -> bool:
        """No microbatch and no gradient is inside, and every shard held here is held elsewhere too
        (or no other peer is left in the stage, nor on the way to it)."""
        others, replica = self.others(ACTIVE), self._replica
        if not others:
            return alone and not self.others(JOINING)
        if self._steps.num_in_flight or replica.closed or self._rounds.is_settling:
            return False
        # A gradient without tokens is zero: it is in nobody's way.
        if any(replica.ledger.num_tokens(replica.round + i) for i in (0, 1)):
            return False
        if self._handover.has_any(replica.round):
            return False
        if self._rounds.updates.is_owing:
            return False
        if replica.round >= self._num_rounds:
            return True
        return all(
            any(o.holds_shard(j) and o.round >= replica.round for o in others)
            for j in replica.optimizer.owned()
        )

    async def _settle_orphans(self) -> None:
        """In a long round, microbatches of which no peer will say that they count, for their feeder
        or a peer before this one is gone, would wait for its end."""
        replica = self._replica
        for r in (replica.round, replica.round + 1):
            if replica.takes(r) and replica.ledger.pending(r):
                try:
                    await self._rounds.settle(r, is_over=False)
                except SwarmnetError as e:  # the device has no room: the next look is soon
                    log.debug("round %d: orphans stay for now: %s", r, e)
