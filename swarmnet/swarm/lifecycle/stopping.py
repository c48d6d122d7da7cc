"""The end of a run by its owner's order (`stop_order`): every peer that has it tells it to all it
meets, begins no more microbatches of the round that it names, saves that round and leaves. Who
watches hears of it as well, and passes it on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarmnet.methods.contact import STOP, StopRequest
from swarmnet.protocol.moments import NEVER, Deadline
from swarmnet.protocol.pipeline.ending import is_over, may_stand_still_s, state_of
from swarmnet.stop_order import StopCheck, StopOrder
from swarmnet.swarm.calls import notify, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.transport.base import Request
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.peer")


class Stopping:
    """The order, at one peer or onlooker."""

    def __init__(
        self,
        gossip: Gossip,
        check: StopCheck,
        keep: Callable[[StopRequest], None] = lambda given: None,
    ) -> None:
        """`keep`: for the time after a restart; called with each order that is new."""
        self._gossip = gossip
        self._check = check
        self._end = gossip.view.run_end
        self._keep = keep
        self._known: StopRequest | None = None
        self._has_order = asyncio.Event()
        serve(gossip.transport, STOP, self._on_stop)
        gossip.transport.on_connected(self._tell)

    async def _on_stop(self, request: Request[StopRequest]) -> Message[None]:
        self.take(request.message.body)
        return Message()

    def take(self, given: StopRequest) -> StopOrder:
        """Heeds an order, and passes it on. Raises what `StopCheck.check` raises."""
        order = self._check.check(given, self._known)
        if given != self._known:
            self._known = given
            self._keep(given)
            self._end.at(order.round)
            self._has_order.set()
            log.warning("the run's owner ends it with round %d", order.round)
            for peer_id in self._gossip.transport.connected():
                self._tell(peer_id)
            self._gossip.changed.notify_all()
        return order

    def _tell(self, peer_id: str) -> None:
        if self._known is not None:
            notify(self._gossip.transport, peer_id, STOP, Message(self._known))

    async def until_over(self) -> None:
        """Returns when this peer is to leave: the run has come to the round of an order, as far as
        it will."""
        await self._has_order.wait()
        loop, view = asyncio.get_running_loop(), self._gossip.view
        state, deadline = (-1, -1), Deadline(NEVER)
        while not deadline.is_over(loop.time()):
            replicas = [r for r in view.live(loop.time()) if r.is_replica]
            if is_over(replicas, self._end.round):
                return
            if (seen := state_of(replicas)) != state:
                state, deadline = seen, Deadline.after(loop.time(), may_stand_still_s(replicas))
            await self._gossip.changed.wait(LOOK_AGAIN_S)
