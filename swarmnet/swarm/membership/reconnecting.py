"""Looking for members of the run that this peer remembers and does not see, as long as it lives.

`protocol.membership.reconnect` decides which ones, and when. A peer that answers is gossiped with.
Where it was on another side of a network cut, each side learns of all peers on the other with that,
and the two become one swarm by the rules that heal a partition."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from swarmnet.errors import SwarmnetError
from swarmnet.printable import printable
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.reconnect import Reconnect, Row, missing_members
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S

log = logging.getLogger("swarmnet.peer")

NAMED = 4
"""Peers that a line for people names."""
Remembered = Callable[[], Mapping[str, Sequence[str]]]
"""Addresses by peer id, those met last first."""


class Reconnecting:
    """Looks for missing members, for one peer or one observer."""

    def __init__(
        self,
        gossip: Gossip,
        rng: random.Random,
        remembered: Remembered = dict[str, Sequence[str]],
    ) -> None:
        """`remembered`: members beside those in the view, from other times or places."""
        self._gossip = gossip
        self._own_machine = machine_of(gossip.own.peer_id)
        self._remembered = remembered
        self._table = Reconnect(rng)
        self._tasks = Tasks("reconnecting")

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                now = loop.time()
                # A look takes longer in a large swarm, and so does news.
                if self._table.is_look_due(now, max(LOOK_LESS_S, self._gossip.spread_s)):
                    missing = missing_members(
                        self._gossip.view, self._own_machine, self._remembered(), now
                    )
                    for given_up in self._table.look(missing, now):
                        self._forget(given_up)
                row = self._table.next(now)
                if row is not None:
                    self._tasks.start(self._try(row))
                await asyncio.sleep(LOOK_AGAIN_S if self._table.rows() else LOOK_LESS_S)
        finally:
            await self._tasks.close()

    async def _try(self, row: Row) -> None:
        """All addresses of a member; the transport begins with the first of them."""
        gossip, peer_id = self._gossip, row.peer_id
        transport = gossip.transport
        loop = asyncio.get_running_loop()
        try:
            if row.is_connection_dead(loop.time()) and peer_id in transport.connected():
                await transport.drop(peer_id)
            if row.addresses:
                transport.learn(peer_id, row.addresses)
            if await gossip.reconcile(peer_id, CONNECT_S):
                log.info("%s answers again", peer_id[-8:])
        except SwarmnetError as e:  # it is of another run by now, say
            log.debug("%s was looked for: %s", peer_id[-8:], e)
        finally:
            self._table.ended(row, loop.time())
            if row not in self._table.rows():
                self._forget(row)

    def _forget(self, row: Row) -> None:
        """Nobody looks for it any more, and where it is was learned here: that goes, unless there
        is a record of it."""
        if not row.is_trying and not self._gossip.view.has_machine(row.peer_id):
            self._gossip.transport.forget(row.peer_id)

    def is_looking(self) -> bool:
        """Whether some remembered peer has not been tried at all yet."""
        return self._table.is_looking()

    def describe(self) -> str:
        """Which peers could not be reached, and where, in a part of a line; empty where none is
        looked for."""
        rows = self._table.rows()
        named = [
            printable(f"...{r.peer_id[-8:]} ({', '.join(r.addresses) or 'no address'})")
            for r in rows
        ]
        more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
        return f"none of these answers: {', '.join(named[:NAMED])}{more}" if rows else ""
