"""Declaring a join to the replicas of a stage before it happens, so that none is surprised."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import Any

from swarmnet.errors import SwarmnetError
from swarmnet.methods.records import RECORDS, Records
from swarmnet.swarm.calls import call
from swarmnet.swarm.membership.anti_entropy import AntiEntropy
from swarmnet.swarm.membership.own_record import OwnRecord
from swarmnet.swarm.membership.pace import GossipPace
from swarmnet.transport.base import Transport
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.gossip")


class JoinDeclaration:
    """Tells peers how the own record is about to change, and hears what they know."""

    def __init__(
        self,
        own: OwnRecord,
        transport: Transport,
        exchange: AntiEntropy,
        pace: GossipPace,
        rng: random.Random,
    ) -> None:
        self._own = own
        self._transport = transport
        self._exchange = exchange
        self._pace = pace
        self._rng = rng

    async def declare(self, peer_ids: Iterable[str], timeout_s: float, **changes: Any) -> None:
        """Returns when these peers know of the changes, and this one knows what they knew then. In
        a large swarm, where that is much and rounds are long, it asks one of them only. A peer that
        does not answer within `timeout_s`, twice, is not waited for."""
        if self._own.is_quiet:
            return
        with self._own.declared(**changes):
            told = list(peer_ids)
            answered = await asyncio.gather(*(self._tell(p, timeout_s) for p in told))
            known = [p for p, is_known in zip(told, answered) if is_known]
            if known and not self._pace.is_small:
                known = [self._rng.choice(known)]
            await asyncio.gather(*(self._exchange.hear_from(p, timeout_s) for p in known))

    async def _tell(self, peer_id: str, timeout_s: float) -> bool:
        message = Message(Records(records=(self._own.seal(),)))
        try:
            await call(self._transport, peer_id, RECORDS, message, timeout_s=timeout_s)
        except SwarmnetError as e:
            log.debug("%s may not know what is to come: %s", peer_id[-8:], e)
            return False
        return True
