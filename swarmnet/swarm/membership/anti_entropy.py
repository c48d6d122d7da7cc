"""Exchanges of records with one partner at a time: each side sends what the other lacks.

A view converges this way whatever else is lost. A join is declared so too, to the replicas of a
stage before it happens, so that none is surprised."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from swarmnet.errors import Busy, RemoteError, SwarmnetError, WrongRun
from swarmnet.methods.ranges import MAX_RECORDS
from swarmnet.methods.records import GOSSIP, RECORDS, GossipRequest, Records, SignedRecord
from swarmnet.protocol.membership.pace import GossipPace, partner
from swarmnet.protocol.membership.preference import in_order, num_that_fit
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
SENT_BYTES = 3 << 20
"""Of the records of one message: it has to stay below what a message may have. What has no room
comes with the next exchange."""
WANTED_BYTES = 256 << 10
"""Of the peer ids of which a message asks for records."""
ENTRY_BYTES = 128
"""Of a signed record beside its payload."""


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
        """Exchanges records with one peer; False where that fails. Raises `WrongRun`."""
        try:
            await self.exchange(peer_id, timeout_s)
        except WrongRun:
            raise
        except SwarmnetError as e:
            log.debug("gossip with %s: %s", peer_id[-8:], e)
            return False
        return True

    async def exchange(self, peer_id: str, timeout_s: float = RECONCILE_S) -> None:
        """Exchanges records with one peer. Raises `SwarmnetError`."""
        self._own.seal_if_due()
        request = GossipRequest(stamps=self._stamps(), suspicions=self._liveness.suspicions())
        try:
            # One that is not alive may be back.
            is_live = self._liveness.is_live(peer_id)
            ask = self._liveness.call_while_live if is_live else partial(call, self._transport)
            reply = await ask(peer_id, GOSSIP, Message(request), timeout_s=timeout_s)
            theirs = reply.body
        except SwarmnetError as e:
            if not isinstance(e, RemoteError):  # which is an answer
                self._unreached.tell(peer_id)
            raise
        self._liveness.answered(peer_id)
        try:
            await self._records.take_all(peer_id, theirs.records, is_asked=True)
        except Busy as e:
            log.debug("the records of %s: %s", peer_id[-8:], e)
        self._view.met(peer_id)
        self._liveness.hear(theirs.suspicions)
        wanted = self._fitting(theirs.wanted)
        if wanted:
            notify(self._transport, peer_id, RECORDS, Message(Records(records=wanted)))

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
            stamps = {p: stamps[p] for p in self._in_order(stamps)[:MAX_RECORDS]}
        return stamps

    def _fitting(self, peer_ids: Sequence[str]) -> tuple[SignedRecord, ...]:
        """The records of these peers: where one message has no room for all, of those that matter
        first."""
        found = self._records.envelopes(peer_ids)
        if _num_that_fit(found) < len(found):
            found = self._records.envelopes(self._in_order(peer_ids))
        return found[: _num_that_fit(found)]

    def _wanted_from(self, stamps: Mapping[str, Stamp]) -> tuple[str, ...]:
        """Peers of which the owner of `stamps` has newer records; likewise."""
        wanted = self._view.digest.wanted_from(stamps)
        if _num_of_ids(wanted) < len(wanted):
            wanted = self._in_order(wanted)
        return tuple(wanted[: _num_of_ids(wanted)])

    def _in_order(self, peer_ids: Iterable[str]) -> list[str]:
        return in_order(self._view, peer_ids, self._rng, asyncio.get_running_loop().time())

    async def _on_gossip(self, request: Request[GossipRequest]) -> Message[Records]:
        """Observers may listen: records are no secret."""
        theirs = request.message.body
        self._own.seal_if_due()
        own = self._own.peer_id
        own_is_known = theirs.stamps.get(own, NO_STAMP) >= self._own.published
        newer = self._view.digest.newer_than(theirs.stamps)
        records = self._fitting([p for p in newer if not (own_is_known and p == own)])
        wanted = self._wanted_from(theirs.stamps)
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


def _num_that_fit(envelopes: Iterable[SignedRecord]) -> int:
    sizes = (len(envelope.payload) + ENTRY_BYTES for envelope in envelopes)
    return num_that_fit(sizes, SENT_BYTES, MAX_RECORDS)


def _num_of_ids(peer_ids: Iterable[str]) -> int:
    return num_that_fit((len(peer_id.encode()) for peer_id in peer_ids), WANTED_BYTES, MAX_RECORDS)
