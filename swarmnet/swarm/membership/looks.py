"""Looks at other peers: pings, whose answers, or the lack of them, go to the failure detector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from swarmnet.errors import RemoteError, SwarmnetError
from swarmnet.methods.contact import PING
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import NO_STAMP, Stamp
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.swarm.calls import call
from swarmnet.swarm.tasks import Tasks
from swarmnet.transport.base import Transport
from swarmnet.wire import Message

PROBE_TIMEOUT_S = 2.0
"""For the answer to a ping, over a channel that is open. It protects from a peer that is silent
with its channels open (tests/swarm/membership/test_detection.py)."""


class Looks:
    """Those under way, at most one at each peer."""

    def __init__(
        self,
        transport: Transport,
        view: View,
        tasks: Tasks,
        answered: Callable[[str], None],
        unanswered: Callable[[str, Stamp], None],
    ) -> None:
        self._transport = transport
        self._view = view
        self._tasks = tasks
        self._answered = answered
        self._unanswered = unanswered
        self._under_way: dict[str, asyncio.Task[Any]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, peer_id: str) -> None:
        """Looks at a peer, which is lost where it does not answer."""
        if peer_id not in self._under_way and peer_id != self._view.own_peer_id:
            self._view.detector.looks(peer_id)
            self._under_way[peer_id] = self._tasks.start(self._look(peer_id))

    async def look_into(self, peer_ids: Iterable[str]) -> None:
        """Looks at each of these peers, and returns when it is known which of them answer now."""
        await asyncio.gather(*map(self._look_into, peer_ids))

    async def _look_into(self, peer_id: str) -> None:
        for is_last in (False, True):  # one that is under way may end with an answer from before
            is_new = is_last or peer_id not in self._under_way
            self.begin(peer_id)
            if peer_id in self._under_way:
                await asyncio.wait([self._under_way[peer_id]])
            if is_new or self._view.detector.is_lost(peer_id):
                return

    async def _look(self, peer_id: str) -> None:
        try:
            for is_last in (False, True):
                stamp = self._stamp_of(peer_id)
                try:
                    while not await self._answers(peer_id):
                        pass
                    return self._answered(peer_id)
                except SwarmnetError:
                    # News of it that was on its way meanwhile refutes a suspicion from before.
                    if is_last or self._stamp_of(peer_id) == stamp:
                        return self._unanswered(peer_id, stamp)
        finally:
            self._under_way.pop(peer_id, None)

    def _stamp_of(self, peer_id: str) -> Stamp:
        record = self._view.get(peer_id)
        return record.stamp if record is not None else NO_STAMP

    async def _answers(self, peer_id: str) -> bool:
        """True where a ping is answered. False where this process stood still meanwhile, or a
        channel has opened, so that the silence means nothing. Raises a `SwarmnetError` where it is
        not answered."""
        loop, reach = asyncio.get_running_loop(), self._view.reach
        clock = self._view.detector.clock
        reach.awake_s(loop.time())
        stalled_s, limit_s = clock.stalled_s, PROBE_TIMEOUT_S
        was_connected = self._is_connected(peer_id)
        if not was_connected:
            limit_s += CONNECT_S  # a dial says nothing yet by taking its time
        try:
            await call(self._transport, peer_id, PING, Message(), timeout_s=limit_s)
        except RemoteError:
            pass  # it answered
        except SwarmnetError:
            reach.awake_s(loop.time())
            if clock.stalled_s > stalled_s or (
                not was_connected and self._is_connected(peer_id)
            ):  # the other's own dial was the quicker one
                return False
            raise
        return True

    def _is_connected(self, peer_id: str) -> bool:
        return machine_of(peer_id) in self._transport.connected()
