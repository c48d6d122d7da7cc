"""Passing news on to those that its peer cannot call.

In a small swarm each peer pushes its urgent news to all others, and so no feeder waits for the next
exchange of records to learn that a round is over. Two peers that are cut from each other would: so
the first of the serving peers that reach both passes it on."""

from __future__ import annotations

import asyncio

from swarmnet.methods.records import RECORDS, Records
from swarmnet.protocol.membership.records import OBSERVER_STAGE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.calls import notify
from swarmnet.swarm.membership.known_records import KnownRecords
from swarmnet.swarm.membership.own_record import OwnRecord
from swarmnet.swarm.membership.pace import GossipPace
from swarmnet.transport.base import Transport
from swarmnet.wire import Message


class PassingOn:
    """Of one peer."""

    def __init__(
        self,
        own: OwnRecord,
        transport: Transport,
        view: View,
        records: KnownRecords,
        pace: GossipPace,
    ) -> None:
        self._own = own
        self._transport = transport
        self._view = view
        self._records = records
        self._pace = pace
        records.on_news(self._pass_on)

    def _pass_on(self, record: Record) -> None:
        if self._own.record.stage == OBSERVER_STAGE or not self._pace.is_small:
            return
        view, now = self._view, asyncio.get_running_loop().time()
        serving = [r.peer_id for r in view.live(now) if r.stage != OBSERVER_STAGE]
        for peer_id in serving:
            if peer_id == record.peer_id or not view.reach.are_cut(record.peer_id, peer_id):
                continue
            both = (p for p in serving if p not in (peer_id, record.peer_id))
            first = next(
                (
                    p
                    for p in both
                    if not (view.reach.are_cut(p, peer_id) or view.reach.are_cut(p, record.peer_id))
                ),
                None,
            )
            if first == self._own.peer_id:
                envelopes = self._records.envelopes([record.peer_id])
                notify(self._transport, peer_id, RECORDS, Message(Records(records=envelopes)))
