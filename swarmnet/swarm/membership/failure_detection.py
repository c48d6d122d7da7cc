"""When a peer dies: a closed channel or a lost call leads to a probe, the probe to a suspicion.

A peer that does not answer a ping is suspected. The suspicion is gossiped, and the suspected peer,
if it lives, refutes it with a newer record (SWIM, Das et al. 2002). A peer whose record stops
changing without any of that is found silent by the view (`View.silence_s`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from swarmnet.errors import RemoteError, SwarmnetError
from swarmnet.protocol.membership.records import LEFT, OBSERVING
from swarmnet.protocol.membership.seats import machine_of
from swarmnet.protocol.membership.view import MAX_STAMP_LEAD, Stamp, View
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.awake_clock import AwakeClock
from swarmnet.swarm.membership.own_record import OwnRecord
from swarmnet.swarm.membership.pushes import Pushes
from swarmnet.swarm.membership.unreached import UnreachedNotices
from swarmnet.swarm.messages import Records, Suspicion
from swarmnet.swarm.tasks import Tasks
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.gossip")

SUSPICION_FANOUT = 4
"""Peers that are told of a suspicion in a large swarm: every peer that had a channel to the dead
one notices its death."""
PROBE_TIMEOUT_S = 2.0
STALL_S = 6.0
"""A peer that has been suspected for no longer than this, and has not closed its channels, is
waited for where its work would be lost otherwise. It took seconds already to suspect it."""


class FailureDetector:
    """Probes peers, suspects those that do not answer, and refutes suspicions of this peer."""

    def __init__(
        self,
        own: OwnRecord,
        transport: Transport,
        view: View,
        *,
        pushes: Pushes,
        unreached: UnreachedNotices,
        changed: Condition,
        clock: AwakeClock,
        tasks: Tasks,
    ) -> None:
        """`changed` is notified of suspicions. `tasks` runs the probes."""
        self._own, self._transport, self._view = own, transport, view
        self._pushes, self._unreached = pushes, unreached
        self._changed, self._clock, self._tasks = changed, clock, tasks
        self._probing: dict[str, asyncio.Task[Any]] = {}
        self._on_suspected: list[Callable[[str], None]] = []
        transport.handle("ping", self._on_ping)
        transport.on_disconnected(self._on_disconnected)

    def on_suspected(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` when a peer is suspected."""
        self._on_suspected.append(callback)

    # ---- probes -----------------------------------------------------------------------------

    def probe(self, peer_id: str) -> None:
        """Starts a probe of a peer, which suspects it where it does not answer."""
        if peer_id not in self._probing and peer_id != self._own.peer_id:
            self._probing[peer_id] = self._tasks.start(self._probe(peer_id))

    async def look_into(self, peer_ids: Iterable[str]) -> None:
        """Probes each of these peers, and returns when it is known which of them answer now."""
        await asyncio.gather(*map(self._look_into, peer_ids))

    async def _look_into(self, peer_id: str) -> None:
        for _ in range(2):  # one that is under way may end with an answer from before
            is_new = peer_id not in self._probing
            self.probe(peer_id)
            if peer_id in self._probing:
                await asyncio.wait([self._probing[peer_id]])
            if is_new or not self._view.is_live(peer_id, asyncio.get_running_loop().time()):
                return

    async def _probe(self, peer_id: str) -> None:
        try:
            for is_last in (False, True):
                stamp = self._stamp_of(peer_id)
                try:
                    while not await self._answers(peer_id):
                        pass
                    return
                except SwarmnetError:
                    # News of it that was on its way meanwhile refutes a suspicion from before.
                    if is_last or self._stamp_of(peer_id) == stamp:
                        self.suspect(peer_id, stamp)
                        return
        finally:
            self._probing.pop(peer_id, None)

    def _stamp_of(self, peer_id: str) -> Stamp:
        record = self._view.get(peer_id)
        return record.stamp if record is not None else (0, 0)

    async def _answers(self, peer_id: str) -> bool:
        """True where a ping is answered. False where this process stood still meanwhile, so that
        the silence means nothing. Raises a `SwarmnetError` where it is not answered."""
        loop = asyncio.get_running_loop()
        began, awake = loop.time(), self._clock.time()
        try:
            await self._transport.call(peer_id, "ping", Message(), timeout_s=PROBE_TIMEOUT_S)
        except RemoteError:
            pass  # it answered
        except SwarmnetError:
            if loop.time() - began > self._clock.time() - awake + PROBE_TIMEOUT_S / 4:
                return False
            raise
        return True

    async def _on_ping(self, request: Request) -> Message:
        return Message()

    def _on_disconnected(self, peer_id: str) -> None:
        record = self._view.get(peer_id)
        if record is not None and record.state not in (LEFT, OBSERVING):
            self.probe(peer_id)

    # ---- suspicions -------------------------------------------------------------------------

    def suspect(self, peer_id: str, stamp: Stamp) -> None:
        """Suspects a peer until a record newer than `stamp` arrives, and tells others."""
        now = asyncio.get_running_loop().time()
        if not self._view.suspect(peer_id, stamp, now):
            return
        self._unreached.tell(peer_id)
        self._tell_suspected(peer_id)
        log.debug("%s does not answer", peer_id[-8:])
        message = Message(Records(suspicions=(Suspicion(peer_id, *stamp),)))
        for target in self._pushes.targets(SUSPICION_FANOUT):
            self._transport.notify(target, "records", message)

    def suspicions(self) -> tuple[Suspicion, ...]:
        """Those in force here."""
        return tuple(Suspicion(p, s[0], s[1]) for p, s in self._view.detector.suspicions())

    def hear(self, suspicions: Iterable[Suspicion]) -> None:
        """Takes over what others suspect. A suspicion of this peer is refuted."""
        now = asyncio.get_running_loop().time()
        for s in suspicions:
            stamp = (s.incarnation, s.version)
            if s.peer_id == self._own.peer_id:
                own = self._own.record.stamp
                if stamp >= own or stamp[0] == own[0]:
                    self._refute(stamp)
            elif self._view.suspect(s.peer_id, stamp, now):
                self._tell_suspected(s.peer_id)

    def has_stalled(self, peer_id: str) -> bool:
        """Whether a peer has fallen silent a moment ago, with its channels open. A machine that
        swaps, or a link that is down for seconds, is soon back; a process that has died closes its
        channels."""
        now = asyncio.get_running_loop().time()
        if self._view.is_live(peer_id, now) or self._view.gone_s(peer_id, now) >= STALL_S:
            return False
        return machine_of(peer_id) in self._transport.connected()

    def _tell_suspected(self, peer_id: str) -> None:
        for callback in self._on_suspected:
            callback(peer_id)
        self._changed.notify_all()

    def _refute(self, stamp: Stamp) -> None:
        own = self._own.record
        if self._own.is_quiet or stamp[0] > own.incarnation:
            return
        # No peer keeps a suspicion that is further ahead. Going further would let a stranger use
        # the version numbers up.
        self._own.outdo(min(stamp[1], own.version + MAX_STAMP_LEAD))
        self._pushes.soon()
