"""Exchanges of records with one partner at a time: each side sends what the other lacks.

A view converges this way whatever else is lost. A join is declared so too, to the replicas of a
stage before it happens, so that none is surprised."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from functools import partial
from typing import Any

from swarmnet.errors import Busy, RemoteError, SwarmnetError, WrongRun
from swarmnet.methods.ranges import MAX_RECORDS
from swarmnet.methods.records import GOSSIP, RECORDS, GossipRequest, Records
from swarmnet.protocol.membership.pace import GossipPace, partner
from swarmnet.protocol.membership.records import NO_STAMP, Stamp
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.swarm.calls import call, notify, serve
from swarmnet.swarm.membership.callers import CallerChecks
from swarmnet.swarm.membership.liveness import Liveness
from swarmnet.swarm.membership.pushes import UnreachedNotices
from swarmnet.swarm.membership.records import KnownRecords, OwnRecord
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.gossip")

RECONCILE_S = ANSWER_S
"""Longest wait for a partner's records."""
MAX_SENT_RECORDS = 512


class AntiEntropy:
    """Swaps stamps with a partner, and then the records that differ."""

    def __init__(
        self,
        own: OwnRecord,
        transport: Transport,
        view: View,
        *,
        records: KnownRecords,
        liveness: Liveness,
        unreached: UnreachedNotices,
        gate: CallerChecks,
        pace: GossipPace,
        rng: random.Random,
    ) -> None:
        self._own = own
        self._transport = transport
        self._view = view
        self._records = records
        self._liveness = liveness
        self._unreached = unreached
        self._gate = gate
        self._pace = pace
        self._rng = rng
        serve(transport, GOSSIP, self._on_gossip)
        serve(transport, RECORDS, self._on_records)

    def partner(self) -> str | None:
        """A random live peer. A peer that is missing is looked for elsewhere
        (`swarm.membership.reconnecting`)."""
        now = asyncio.get_running_loop().time()
        return partner(self._view, self._transport.connected(), self._rng, now)

    async def reconcile(self, peer_id: str, timeout_s: float = RECONCILE_S) -> bool:
        """Exchanges records with one peer; False where it cannot be reached. Raises `WrongRun`."""
        self._own.seal_if_due()
        request = GossipRequest(stamps=self._stamps(), suspicions=self._liveness.suspicions())
        try:
            # One that is not alive may be back.
            is_live = self._liveness.is_live(peer_id)
            ask = self._liveness.call_while_live if is_live else partial(call, self._transport)
            reply = await ask(peer_id, GOSSIP, Message(request), timeout_s=timeout_s)
            theirs = reply.body
        except WrongRun:
            raise
        except SwarmnetError as e:
            log.debug("gossip with %s: %s", peer_id[-8:], e)
            if not isinstance(e, RemoteError):  # which is an answer
                self._unreached.tell(peer_id)
            return False
        self._liveness.answered(peer_id)
        try:
            await self._records.take_all(peer_id, theirs.records, is_asked=True)
        except Busy as e:
            log.debug("the records of %s: %s", peer_id[-8:], e)
        self._liveness.hear(theirs.suspicions)
        wanted = self._records.envelopes(theirs.wanted[:MAX_SENT_RECORDS])
        if wanted:
            notify(self._transport, peer_id, RECORDS, Message(Records(records=wanted)))
        return True

    async def hear_from(self, peer_id: str, timeout_s: float) -> None:
        """As `reconcile`, where it does not matter whether that works."""
        try:
            await self.reconcile(peer_id, timeout_s)
        except SwarmnetError as e:  # it is of another run by now, say
            log.debug("the newest news was not heard: %s", e)

    async def declare_join(self, peer_ids: Iterable[str], timeout_s: float, **changes: Any) -> None:
        """Before the own record changes so: returns when these peers know of it, and this one knows
        what they knew then. In a large swarm, where that is much and rounds are long, it asks one
        of them only. A peer that does not answer within `timeout_s`, twice, is not waited for."""
        if self._own.is_quiet:
            return
        with self._own.declared(**changes):
            told = list(peer_ids)
            answered = await asyncio.gather(*(self._declare_to(p, timeout_s) for p in told))
            known = [p for p, is_known in zip(told, answered) if is_known]
            if known and not self._pace.is_small:
                known = [self._rng.choice(known)]
            await asyncio.gather(*(self.hear_from(p, timeout_s) for p in known))

    async def _declare_to(self, peer_id: str, timeout_s: float) -> bool:
        message = Message(Records(records=(self._own.seal(),)))
        try:
            await call(self._transport, peer_id, RECORDS, message, timeout_s=timeout_s)
        except SwarmnetError as e:
            log.debug("%s may not know what is to come: %s", peer_id[-8:], e)
            return False
        return True

    def _stamps(self) -> dict[str, Stamp]:
        stamps = self._view.digest.stamps()
        if self._own.is_quiet or self._own.published == NO_STAMP:
            stamps.pop(self._own.peer_id, None)
        else:  # the view is ahead of what has been published
            stamps[self._own.peer_id] = self._own.published
        if len(stamps) > MAX_RECORDS:  # as many as a message may have; others another time
            stamps = {p: stamps[p] for p in self._rng.sample(sorted(stamps), MAX_RECORDS)}
        return stamps

    async def _on_gossip(self, request: Request[GossipRequest]) -> Message[Records]:
        """Observers may listen: records are no secret."""
        theirs = request.message.body
        self._own.seal_if_due()
        own = self._own.peer_id
        own_is_known = theirs.stamps.get(own, NO_STAMP) >= self._own.published
        newer = [r.peer_id for r in self._view.newer_than(theirs.stamps)[:MAX_SENT_RECORDS]]
        records = self._records.envelopes(p for p in newer if not (own_is_known and p == own))
        wanted = tuple(self._view.digest.wanted_from(theirs.stamps)[:MAX_SENT_RECORDS])
        if self._gate.is_admitted(request.remote):
            self._liveness.hear(theirs.suspicions)
        suspicions = self._liveness.suspicions()
        return Message(Records(records=records, wanted=wanted, suspicions=suspicions))

    async def _on_records(self, request: Request[Records]) -> Message[None]:
        """A record speaks for itself, whichever peer brings it."""
        theirs = request.message.body
        await self._records.take_all(request.remote, theirs.records)
        if self._gate.is_admitted(request.remote):
            self._liveness.hear(theirs.suspicions)
        return Message()
