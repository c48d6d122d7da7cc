"""Which microbatches a replica lets in, and how long one would wait (`admit`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from swarmnet.errors import Busy, NotReady, Stale
from swarmnet.methods.microbatch import AdmitReply, AdmitRequest
from swarmnet.ports import StepKey
from swarmnet.protocol.membership.records import LEAVING
from swarmnet.protocol.pipeline.reservations import Reservations
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.flights import Flights
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import Limits
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

IN_HAND_PART = 0.03
"""How much the work for the microbatches that are inside a replica weighs against that which waits
before its device. It protects slow replicas from work that fast ones would have done sooner
(tests/simulation/test_scheduling.py)."""
LEAST_IN_HAND = 0.1
"""Counted for a replica that has none, so that of two idle ones the faster one is chosen."""


class Entrance:
    """The places before the device of a replica, and those that are kept for microbatches that
    have been announced."""

    def __init__(
        self,
        transport: Transport,
        gossip: Gossip,
        limits: Limits,
        resource_limits: ResourceLimits,
        flights: Flights,
        serving: Callable[[int], Replica],
    ) -> None:
        """`serving(stage_index)` is the replica of that stage here, or raises `NotReady`."""
        self._transport = transport
        self._gossip = gossip
        self._flights = flights
        self.limits = limits
        self._resource_limits = resource_limits
        self._serving = serving
        # One caller never has all places: others get through whatever it does.
        self._places = Reservations(max(1, limits.max_waiting_forwards - 1))
        self._entering: set[StepKey] = set()
        """Microbatches that were let in a moment ago, and are not in the device's queue yet."""

    async def on_admit(self, request: Request[AdmitRequest]) -> Message[AdmitReply]:
        """Says how long a microbatch would take here, and keeps a place for one that is coming."""
        asked = request.message.body
        replica = self._serving(asked.stage)
        key = (asked.round, asked.microbatch_id)
        self._check_device(replica)
        if asked.round < replica.round:
            raise Stale(f"round {asked.round} is over here", round=replica.round)
        if key in self._flights or replica.ledger.get(key) is not None:
            return Message(AdmitReply(0.0, known=True))
        now = asyncio.get_running_loop().time()
        if not self._places.has(request.remote, key, now):
            self.check_room(replica, asked.round, announced=True)
            if asked.comes and is_replica(self._gossip, request.remote):
                self._places.keep(request.remote, key, now)
        return Message(AdmitReply(self._wait_s(replica, asked.round)))

    def claim(self, caller: str, key: StepKey) -> None:
        """A microbatch has come: the place that was kept for it is free again."""
        self._places.take(caller, key, asyncio.get_running_loop().time())

    def check_room(self, replica: Replica, round_index: int, *, announced: bool) -> None:
        """Raises `Busy` where the queue is full, `NotReady` where this peer is about to leave.
        `announced`: the caller asks, or has asked, before it sends the microbatch."""
        if self._gossip.own.state == LEAVING or replica.phase.is_given(round_index):
            raise NotReady("this peer is leaving")
        self._check_device(replica)
        waiting = self._num_waiting(replica, round_index)
        # A place is free when a piece of work is done.
        limits = self.limits
        # A replica that does not know its speed yet must not be trusted with many.
        room = limits.max_waiting_forwards
        piece_s = replica.measured.piece_s
        if announced and piece_s > 0:
            in_time = int(limits.max_waiting_s / piece_s)
            room = max(room, min(limits.max_waiting_announced, in_time))
        over = waiting + 1 - room
        most = min(limits.max_open_steps, replica.stage.max_in_flight)
        if round_index > replica.round:  # the present round always has room to come to its end
            most = max(1, most // 2)
        num_in_flight = self._flights.num_in_flight
        if waiting >= room or num_in_flight >= most:
            raise Busy("the queue is full", backlog_s=over * (piece_s or LOOK_AGAIN_S))
        if not self._resource_limits.has_room(replica.index, num_in_flight):
            raise Busy("no memory for more", backlog_s=replica.service_s)

    def _check_device(self, replica: Replica) -> None:
        """Raises `NotReady` where the device hangs: what is here comes too late, if ever."""
        if replica.measured.hangs(asyncio.get_running_loop().time()):
            raise NotReady("the device does not answer")

    def entering(self, key: StepKey, task: asyncio.Task[Any]) -> None:
        """A microbatch was let in: it waits here until `entered`, or the end of its task."""
        self._entering.add(key)
        task.add_done_callback(lambda _: self._entering.discard(key))

    def entered(self, key: StepKey) -> None:
        """Its work goes to the device's queue now."""
        self._entering.discard(key)

    def num_reserved(self) -> int:
        """Places that are kept for microbatches on their way here."""
        return self._places.count(asyncio.get_running_loop().time())

    def drop_round(self, round_index: int) -> None:
        """Gives up the places that were kept for a round and for those before it."""
        self._places.drop_round(round_index)

    def _wait_s(self, replica: Replica, round_index: int) -> float:
        """Seconds until work on one more microbatch would begin here, behind what waits for the
        device or for the uplink, whichever takes longer; and a part of the work for all that this
        replica has in flight, for that comes back.

        Not until it would be *done*: then slow devices would stand idle beside short queues of fast
        ones, and twice as many microbatches would have to be in flight to keep all of them at
        work. Only of a round's last ones, when the next one has work for all devices, nothing
        counts but when they are completed."""
        traffic = self._transport.traffic
        waiting = self._num_waiting(replica, round_index)
        device_s = waiting * replica.measured.piece_s
        link_s = traffic.upload_s(traffic.queued_bytes())
        each_s = max(replica.service_s, traffic.upload_s(replica.measured.sent_bytes))
        if replica.ahead and round_index == replica.round:
            return max(device_s, link_s) + each_s
        # Of two that could begin at once, the faster one.
        in_hand = max(self._flights.num_in_flight, LEAST_IN_HAND)
        return max(device_s, link_s) + IN_HAND_PART * in_hand * each_s

    def _num_waiting(self, replica: Replica, round_index: int) -> int:
        """Pieces of work before the device, or on their way there. What is of the next round goes
        after this one's last microbatches, and keeps none out."""
        queued = replica.device.waiting_until(round_index)
        return queued + self.num_reserved() + len(self._entering)


def is_replica(gossip: Gossip, peer_id: str) -> bool:
    """Whether a peer is known to serve a stage."""
    record = gossip.view.get(peer_id)
    return record is not None and record.is_replica
