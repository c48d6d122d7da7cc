"""What a peer tells others at once, without waiting for the next exchange of records.

Its own urgent news goes to all, or in a large swarm to some (`Pushes`). In a small swarm no feeder
waits for the next exchange to learn that a round is over. Two peers that are cut from each other
would: so the first of the serving peers that reach both passes news on.

A peer that cannot be reached from here is told so through a third one (`UnreachedNotices`). It may
be alive with only the way to it cut, and then looks for a relay (`relaying`)."""

from __future__ import annotations

import asyncio
import random

from swarmnet.errors import RemoteError, SwarmnetError
from swarmnet.methods.contact import PING
from swarmnet.methods.records import RECORDS, UNREACHED, Records, Unreached
from swarmnet.protocol.membership.failure_detector import PROBE_TIMEOUT_S
from swarmnet.protocol.membership.pace import PUSH_FANOUT, GossipPace, push_targets
from swarmnet.protocol.membership.reachability import Doubts, ToldUnreached
from swarmnet.protocol.membership.records import LEFT, OBSERVER_STAGE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.swarm.calls import call, notify, serve
from swarmnet.swarm.membership.records import KnownRecords, OwnRecord
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

MAX_LOOKING = 8
"""Accusers that a peer looks at, at a time."""


class Pushes:
    """Sends the own record to all peers, or in a large swarm to `PUSH_FANOUT` of them."""

    def __init__(
        self,
        own: OwnRecord,
        transport: Transport,
        view: View,
        *,
        records: KnownRecords,
        pace: GossipPace,
        rng: random.Random,
        delay_s: float,
    ) -> None:
        """`delay_s`: changes within this time are pushed together."""
        self._own = own
        self._transport = transport
        self._view = view
        self._records = records
        self._pace = pace
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

    def pass_on(self, record: Record) -> None:
        """News of another peer goes to those that it cannot call, where this peer is the first that
        reaches both."""
        if self._own.record.stage == OBSERVER_STAGE or not self._pace.is_small:
            return
        view, now = self._view, asyncio.get_running_loop().time()
        serving = [r.peer_id for r in view.live(now) if r.stage != OBSERVER_STAGE]
        for peer_id, between in view.reach.go_betweens(record.peer_id, serving):
            if between == self._own.peer_id:
                envelopes = self._records.envelopes([record.peer_id])
                notify(self._transport, peer_id, RECORDS, Message(Records(records=envelopes)))

    def targets(self, fanout: int) -> list[str]:
        """Whom to tell what is urgent (see `protocol.membership.pace.push_targets`)."""
        now = asyncio.get_running_loop().time()
        return push_targets(self._view, self._transport.connected(), fanout, self._rng, now)

    def _push(self) -> None:
        self._timer = None
        if self._own.is_quiet:
            return
        message = self._message()
        for peer_id in self.targets(PUSH_FANOUT):
            notify(self._transport, peer_id, RECORDS, message)

    def _message(self) -> Message:
        return Message(Records(records=(self._own.seal(),)))


class UnreachedNotices:
    """Sends such notices, passes those of others on, and remembers those about this peer."""

    def __init__(
        self,
        own_peer_id: str,
        transport: Transport,
        view: View,
        rng: random.Random,
    ) -> None:
        self.doubts = Doubts()
        self._own = own_peer_id
        self._transport = transport
        self._view = view
        self._rng = rng
        self._told = ToldUnreached()
        self._looking: dict[str, None] = {}
        """Accusers of this peer, while it finds out whether it reaches them."""
        serve(transport, UNREACHED, self._on_unreached)

    def tell(self, peer_id: str) -> None:
        """Lets a peer that does not answer here know of it, through another one."""
        now = asyncio.get_running_loop().time()
        if not self._told.may_tell(self._own, peer_id, now):
            return
        live = (r.peer_id for r in self._view.live(now))
        others = [p for p in live if p not in (peer_id, self._own) and self._view.reaches(p, now)]
        if others:
            self._notify(self._rng.choice(others), Unreached(peer_id))

    async def _on_unreached(self, request: Request[Unreached]) -> Message[None]:
        """The notice is about this peer, or about one to which it is passed on."""
        notice, accuser = request.message.body, request.remote
        now = asyncio.get_running_loop().time()
        if notice.peer_id == self._own:
            await self._look_at(notice.by)
        elif self._view.reaches(notice.peer_id, now) and self._told.may_tell(
            accuser, notice.peer_id, now
        ):
            self._notify(notice.peer_id, Unreached(notice.peer_id, by=accuser))
        return Message()

    async def _look_at(self, accuser: str) -> None:
        """Counts a doubt where this peer does not reach its accuser either."""
        record = self._view.get(accuser)
        if record is None or record.state == LEFT or accuser == self._own:
            return
        if self._view.detector.is_lost(accuser):
            self.doubts.add(accuser, asyncio.get_running_loop().time())
            return
        if accuser in self._looking or len(self._looking) >= MAX_LOOKING:
            return
        self._looking[accuser] = None
        try:
            limit_s = PROBE_TIMEOUT_S + CONNECT_S
            await call(self._transport, accuser, PING, Message(), timeout_s=limit_s)
        except RemoteError:
            pass  # it answered
        except SwarmnetError:
            self.doubts.add(accuser, asyncio.get_running_loop().time())
        finally:
            del self._looking[accuser]

    def _notify(self, target: str, notice: Unreached) -> None:
        notify(self._transport, target, UNREACHED, Message(notice))
