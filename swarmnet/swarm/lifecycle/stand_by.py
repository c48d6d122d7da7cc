"""Standing by while the machine's owner has paused the peer, or no stage fits any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from swarmnet.errors import StageLost, SwarmnetError, UserError
from swarmnet.printable import printable
from swarmnet.protocol.membership.records import JOINING, MAX_TEXT, OBSERVER_STAGE, OBSERVING
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.feeder import Feeder
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.swarm.recovery.restart import Recovery
from swarmnet.swarm.resource_limits import ResourceLimits

log = logging.getLogger("swarmnet.peer")


@dataclass
class StandBy:
    """Stays in the swarm as an observer while this peer may not work."""

    gossip: Gossip
    num_stages: int
    resource_limits: ResourceLimits
    feeder: Feeder | None
    disk: Disk | None
    recovery: Recovery
    _has_served: bool = False
    _why_not_built: str = ""

    def served(self) -> None:
        """This peer has served a stage. From now on it waits where none fits. (At the start that
        ends the peer, with a line: see `StageChoice.claim`.)"""
        self._has_served = True

    def not_built(self, error: UserError | MemoryError | StageLost) -> None:
        """A stage could not be built (the machine's memory, say, is another program's by now), or
        is gone. A peer that has served tries again in a while. Raises the error where it has served
        none yet."""
        if not self._has_served:
            raise error
        log.warning("no stage here for now: %s", error)
        self._why_not_built = str(error) or "no memory"

    async def until_paused(self) -> None:
        """Returns when the machine's owner wants the machine back."""
        while not self.resource_limits.why_paused:
            self.resource_limits.changed.clear()
            await self.resource_limits.changed.wait()

    async def until_wanted(self) -> None:
        """Returns when this peer may work; it is an observer meanwhile."""
        while reason := self.resource_limits.why_paused or self._why_no_stage():
            tries_again_s = UPKEEP_S if self._why_not_built else None
            self._why_not_built = ""
            said = printable(reason)[:MAX_TEXT]
            if self.gossip.own.paused != said:
                self.gossip.update(
                    state=OBSERVING,
                    stage=OBSERVER_STAGE,
                    paused=said,
                    digests=b"",
                    holds=b"",
                    restorable=(),
                    samples_per_s=0.0,
                    queue_length=0,
                    urgent=True,
                )
            self.resource_limits.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tries_again_s):
                    await self.resource_limits.changed.wait()
        if self.gossip.own.paused:
            self.gossip.update(state=JOINING, paused="", urgent=True)

    async def put_away(self) -> None:
        """Drops what a paused peer does not need: its microbatches, and what it knows of its
        disk."""
        if self.feeder is not None:
            self.feeder.leave()
            self.feeder.write_off()
        disk = self.disk
        if disk is not None:
            try:
                found = await disk.worker.run(disk.checkpoints.available)
            except (SwarmnetError, OSError) as e:
                log.warning("the checkpoints here cannot be read: %s", e)
                found = []
            self.recovery.found(found)

    def _why_no_stage(self) -> str:
        """One could not be built, or, after a pause, none fits any more beside what other seats of
        the machine serve."""
        if self._why_not_built or not self._has_served:
            return self._why_not_built
        reasons = [self.resource_limits.unfit(k) for k in range(self.num_stages)]
        return reasons[0] if all(reasons) else ""
