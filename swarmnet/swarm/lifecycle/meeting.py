"""Meeting the run: a newcomer hears of it from at least one of the peers that it was told of."""

from __future__ import annotations

import asyncio
import logging

from swarmnet.errors import Unreachable, WrongRun
from swarmnet.protocol.timing import PATIENCE_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.timing import LOOK_AGAIN_S

log = logging.getLogger("swarmnet.peer")

MEET_S = PATIENCE_S
"""How long a newcomer tries to reach any of the peers that it was told of."""


async def meet(gossip: Gossip, neighbours: list[str]) -> None:
    """Hears of the run from at least one neighbour, where there are any. A peer that is cut off
    from all of them would otherwise begin the run anew, alone. Raises `Unreachable` where none
    answers within `MEET_S`, `WrongRun` where the only one belongs to another run."""
    loop = asyncio.get_running_loop()
    end = loop.time() + MEET_S
    met = not neighbours
    while not met:
        for peer_id in list(neighbours):
            try:
                met = await gossip.reconcile(peer_id) or met
            except WrongRun as e:
                if len(neighbours) == 1:
                    raise
                log.warning("%s is not asked any more: %s", peer_id[-8:], e)
                neighbours = [p for p in neighbours if p != peer_id]
        # Found otherwise, meanwhile; not by another newcomer that is alone too.
        met = met or any(r.is_replica for r in gossip.view.live(loop.time()))
        if not met and loop.time() >= end:
            raise Unreachable("none of the known peers of the run answers")
        if not met:
            await asyncio.sleep(LOOK_AGAIN_S)
