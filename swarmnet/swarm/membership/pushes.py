"""Pushing urgent news of this peer to others, without waiting for the next exchange."""

from __future__ import annotations

import asyncio
import random

from swarmnet.methods.records import RECORDS, Records
from swarmnet.protocol.membership.assignment import feeders
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.calls import notify
from swarmnet.swarm.membership.own_record import OwnRecord
from swarmnet.swarm.membership.pace import PUSH_FANOUT
from swarmnet.transport.base import Transport
from swarmnet.wire import Message


class Pushes:
    """Sends the own record to all peers, or in a large swarm to `PUSH_FANOUT` of them."""

    def __init__(
        self, own: OwnRecord, transport: Transport, view: View, rng: random.Random, delay_s: float
    ) -> None:
        """`delay_s`: changes within this time are pushed together."""
        self._own = own
        self._transport = transport
        self._view = view
        self._rng = rng
        self._delay_s = delay_s
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Pushes the own record within `delay_s`."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._push)

    def now(self) -> None:
        """Pushes the own record without delay."""
        self.close()
        self._push()

    def close(self) -> None:
        """Cancels the push that is due."""
        if self._timer is not None:
            self._timer.cancel()

    def introduce(self, peer_id: str) -> None:
        """Sends the own record to a peer to which a channel was just opened. In a closed run calls
        of a peer are refused until its record has arrived, so this is said first."""
        if not self._own.is_quiet and self._own.record.run_id:
            notify(self._transport, peer_id, RECORDS, self._message())

    def targets(self, fanout: int) -> list[str]:
        """All live peers, or, where these are more than `PUSH_FANOUT`, `fanout` of them. Half of
        these are the first of the feeders, so that some peer has all the urgent news and sees at
        once that a round is over; the others are drawn."""
        own = self._own.peer_id
        now = asyncio.get_running_loop().time()
        view = self._view
        live = [r.peer_id for r in view.live(now) if r.peer_id != own]
        live = [p for p in live if view.reaches(p, now)]
        if len(live) <= PUSH_FANOUT:
            live = sorted({*live, *self._transport.connected()} - {own})
        if len(live) <= PUSH_FANOUT:
            return live
        first = self.first_targets(fanout)
        drawn = self._rng.sample(live, fanout)
        return [*first, *(p for p in drawn if p not in first)][:fanout]

    def first_targets(self, fanout: int = PUSH_FANOUT) -> list[str]:
        """The first of the feeders, which are told all urgent news."""
        now = asyncio.get_running_loop().time()
        first = feeders(self._view, now)[: fanout // 2 + 1]
        return [p for p in first if p != self._own.peer_id][: fanout // 2]

    def _push(self) -> None:
        self._timer = None
        if self._own.is_quiet:
            return
        message = self._message()
        for peer_id in self.targets(PUSH_FANOUT):
            notify(self._transport, peer_id, RECORDS, message)

    def _message(self) -> Message:
        return Message(Records(records=(self._own.seal(),)))
