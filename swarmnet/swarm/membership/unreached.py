"""Telling a peer that it cannot be reached from here, through a third peer.

The peer may be alive with only the way to it cut. It then looks for a relay (`relaying`)."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from swarmnet.methods.records import UNREACHED, Unreached
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.swarm.calls import notify, serve
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

KEPT_DOUBTS = 64


class UnreachedNotices:
    """Sends such notices, passes those of others on, and remembers those about this peer."""

    def __init__(
        self,
        own_peer_id: str,
        transport: Transport,
        view: View,
        rng: random.Random,
    ) -> None:
        self.doubts: deque[float] = deque(maxlen=KEPT_DOUBTS)
        """The newest times, by the loop's clock, when another peer could not reach this one."""
        self._own = own_peer_id
        self._transport = transport
        self._view = view
        self._rng = rng
        self._told: dict[str, float] = {}
        """When a peer was told last."""
        serve(transport, UNREACHED, self._on_unreached)

    def tell(self, peer_id: str) -> None:
        """Lets a peer that does not answer here know of it, through another one."""
        now = asyncio.get_running_loop().time()
        if not self._may_tell(peer_id, now):
            return
        live = (r.peer_id for r in self._view.live(now))
        others = [p for p in live if p not in (peer_id, self._own) and self._view.reaches(p, now)]
        if others:
            self._notify(self._rng.choice(others), peer_id)

    async def _on_unreached(self, request: Request[Unreached]) -> Message[None]:
        """The notice is about this peer, or about one to which it is passed on."""
        peer_id = request.message.body.peer_id
        now = asyncio.get_running_loop().time()
        if peer_id == self._own:
            self.doubts.append(now)
        elif self._view.reaches(peer_id, now) and self._may_tell(peer_id, now):
            self._notify(peer_id, peer_id)
        return Message()

    def _notify(self, target: str, unreached: str) -> None:
        notify(self._transport, target, UNREACHED, Message(Unreached(unreached)))

    def _may_tell(self, peer_id: str, now: float) -> bool:
        told = self._told
        if now - told.get(peer_id, float("-inf")) < CONNECT_S:
            return False
        self._told = {p: at for p, at in told.items() if now - at < CONNECT_S}
        self._told[peer_id] = now
        return True
