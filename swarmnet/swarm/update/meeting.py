"""One meeting of two replicas in gossip averaging: the table of a shard's update with a pair as its
roster (`protocol.update.roster.pair`), for all shards at once."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import SUSPECT, Standing, pair
from swarmnet.protocol.update.shard_update import ShardUpdate
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.gossip_averaging")

OFFER_WAIT_S = 10.0
"""How long a replica that has all waits for its partner to ask, with nothing on its way there."""

Offer = tuple[dict[str, Any], tuple[Array, ...]]
Offers = dict[int, Offer]
"""By shard."""


class Meeting:
    """Of one replica, in one round."""

    def __init__(
        self,
        round_index: int,
        gossip: Gossip,
        partner: str | None,
        num_shards: int,
        ask: Callable[[str], Awaitable[Offers]],
        step: Callable[[Offers], Awaitable[None]],
        is_sending: Callable[[], bool],
        longest_s: float,
    ) -> None:
        """`ask(partner)`: what it offers of each shard, as far as it gives any. `step(offers)`:
        makes the outer step. `is_sending()`: something large is on its way from here. `longest_s`:
        so long the partner may ask, at most."""
        self.round = round_index
        self._gossip = gossip
        self._partner = partner
        self._num_shards = num_shards
        self._ask = ask
        self._step = step
        self._is_sending = is_sending
        self._longest_s = longest_s
        self._asked_at = -math.inf
        self._machine = ShardUpdate(gossip.own.peer_id, pair(gossip.own.peer_id, partner))
        self._wanted = set(range(num_shards))
        """Shards whose offer the partner has not asked for."""
        self._error: Exception | None = None
        self._over = Condition()
        self._tasks = Tasks("meeting")

    async def run(self, num_tokens: int) -> None:
        """Returns when the partner has what it needs or is gone, and the step is made: by it what
        is offered here changes."""
        try:
            self._refresh()
            self._feed(on.Begun(num_tokens, None))
            while not self._machine.is_over:
                if self._error is not None:
                    raise self._error
                await self._over.wait(LOOK_AGAIN_S)
                self._refresh()
        finally:
            await self._tasks.close()

    def asked(self, peer_id: str, shard: int) -> None:
        """A replica has been given the offer of a shard."""
        if peer_id == self._partner and shard in self._wanted:
            self._wanted.remove(shard)
            self._asked_at = asyncio.get_running_loop().time()
            if not self._wanted:
                self._feed(on.Confirmed(peer_id, self._machine.facts.attempt))

    def _refresh(self) -> None:
        partner, liveness = self._partner, self._gossip.liveness
        members = {}
        if partner is not None and liveness.is_live(partner):
            members[partner] = Standing()
        elif partner is not None and liveness.is_suspect(partner):
            members[partner] = Standing(SUSPECT)
        self._feed(on.Seen(members))

    def _feed(self, event: on.Event) -> None:
        for command in self._machine.handle(event):
            match command:
                case do.Pull(target):
                    self._tasks.start(self._pull(target))
                case do.Sum(parts, _, _, attempt):
                    offers = parts[0][2] if parts else None
                    self._tasks.start(self._later(on.Summed(offers, attempt)))
                case do.Step(offers, _, attempt):
                    self._tasks.start(self._make_step(offers, attempt))
                case do.SetDeadline():
                    self._tasks.start(self._expire())
        self._over.notify_all()

    async def _later(self, event: on.Event) -> None:
        self._feed(event)

    async def _pull(self, target: str) -> None:
        offers = await self._ask(target)
        if offers:
            ballot = self._machine.facts.ballot
            self._feed(on.Pushed(None, target, ballot, 1, offers))
        else:
            self._feed(on.PushFailed(target))

    async def _make_step(self, offers: Offers | None, attempt: int) -> None:
        while self._machine.facts.awaited():
            await self._over.wait(LOOK_AGAIN_S)
        try:
            await self._step(offers or {})
        except Exception as e:  # of the device: it ends the round, as without a partner
            self._error = e
            self._over.notify_all()
            return
        self._feed(on.Stepped(True, attempt))

    async def _expire(self) -> None:
        """On a slow link what was asked for takes longer than the next question may."""
        loop = asyncio.get_running_loop()
        quiet_since = began = loop.time()
        while loop.time() < min(quiet_since + OFFER_WAIT_S, began + self._longest_s):
            await asyncio.sleep(LOOK_AGAIN_S)
            quiet_since = loop.time() if self._is_sending() else max(quiet_since, self._asked_at)
        self._feed(on.DeadlinePassed())
