"""Admission control: which microbatches a replica lets in, and how long one would wait
(`admit`)."""

from __future__ import annotations

import asyncio
from typing import Any

from swarmnet.errors import Busy, NotReady, Stale
from swarmnet.methods.microbatch import AdmitReply, AdmitRequest
from swarmnet.ports import StepKey
from swarmnet.protocol.membership.records import LEAVING
from swarmnet.protocol.pipeline.admission import most_inside, queue_room, wait_s
from swarmnet.protocol.pipeline.reservations import Reservations
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.flights import Flights
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.replica.serving import Serving
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.transport.base import Request
from swarmnet.wire import Message


class AdmissionControl:
    """The places before the device of a replica, and those that are kept for microbatches that
    have been announced."""

    def __init__(
        self,
        gossip: Gossip,
        limits: WaitLimits,
        resource_limits: ResourceLimits,
        flights: Flights,
        serving: Serving,
    ) -> None:
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
        replica = self._serving.of(asked.stage)
        key = (asked.round, asked.microbatch_id)
        _check_device(replica)
        if asked.round < replica.round:
            raise Stale(f"round {asked.round} is over here", round=replica.round)
        if key in self._flights or replica.ledger.get(key) is not None:
            return Message(AdmitReply(0.0, known=True))
        now = asyncio.get_running_loop().time()
        if not self._places.has(request.remote, key, now):
            self.check_room(replica, asked.round, announced=True)
            record = self._gossip.view.get(request.remote)
            if asked.comes and record is not None and record.is_replica:
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
        _check_device(replica)
        limits, piece_s = self.limits, replica.measured.piece_s
        room = limits.max_waiting_forwards
        if announced:
            room = queue_room(room, limits.max_waiting_announced, limits.max_waiting_s, piece_s)
        is_coming = round_index > replica.round
        most = most_inside(limits.max_open_steps, replica.stage.max_in_flight, is_coming=is_coming)
        waiting, num_inside = self._num_waiting(replica, round_index), self._flights.num_in_flight
        if waiting >= room or num_inside >= most:
            # A place is free when a piece of work is done.
            over = waiting + 1 - room
            raise Busy("the queue is full", backlog_s=over * (piece_s or LOOK_AGAIN_S))
        if not self._resource_limits.has_room(replica.index, num_inside):
            raise Busy("no memory for more", backlog_s=replica.service_s)

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
        traffic = self._gossip.transport.traffic
        return wait_s(
            device_s=self._num_waiting(replica, round_index) * replica.measured.piece_s,
            link_s=traffic.upload_s(traffic.queued_bytes()),
            each_s=max(replica.service_s, traffic.upload_s(replica.measured.sent_bytes)),
            num_inside=self._flights.num_in_flight,
            is_last=bool(replica.ahead) and round_index == replica.round,
        )

    def _num_waiting(self, replica: Replica, round_index: int) -> int:
        """Pieces of work before the device, or on their way there. What is of the next round goes
        after this one's last microbatches, and keeps none out."""
        queued = replica.device.waiting_until(round_index)
        return queued + self.num_reserved() + len(self._entering)


def _check_device(replica: Replica) -> None:
    """Raises `NotReady` where the device hangs: what is here comes too late, if ever."""
    if replica.measured.hangs(asyncio.get_running_loop().time()):
        raise NotReady("the device does not answer")
