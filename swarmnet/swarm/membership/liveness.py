"""Who is alive, and the calls that end with their callee.

`protocol.membership.failure_detector` decides; here its looks become pings, its commands messages,
and what is heard from others its events. Everything that asks whether another peer lives asks
here: `state_of`, `is_live`, `on_change`, and `call_while_live`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from swarmnet.errors import RemoteError, SwarmnetError
from swarmnet.methods.contact import PING
from swarmnet.methods.records import RECORDS, Records, Suspicion
from swarmnet.protocol.membership.failure_detector import (
    ALIVE,
    PROBE_TIMEOUT_S,
    SUSPECT,
    TICK_S,
    Changed,
    Command,
    Look,
    State,
    TellSuspicion,
    TellUnreached,
)
from swarmnet.protocol.membership.pace import Refutations
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.reach import MAX_STAMP_LEAD
from swarmnet.protocol.membership.records import (
    LEFT,
    NO_STAMP,
    OBSERVING,
    Record,
    Stamp,
)
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import Stalls
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.swarm.calls import LiveCalls, call, notify, serve
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.callers import CallerChecks
from swarmnet.swarm.membership.pushes import Pushes, UnreachedNotices
from swarmnet.swarm.membership.records import OwnRecord
from swarmnet.swarm.tasks import Tasks
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.gossip")

SUSPICION_FANOUT = 4
"""Peers that are told of a suspicion in a large swarm: every peer that had a channel to the dead
one notices its death."""
MAX_LOOKS = 64
"""At a time, at the word of others."""


class Liveness:
    """Of all peers, as this one finds them."""

    def __init__(
        self,
        own: OwnRecord,
        transport: Transport,
        view: View,
        *,
        pushes: Pushes,
        unreached: UnreachedNotices,
        gate: CallerChecks,
        changed: Condition,
        tasks: Tasks,
    ) -> None:
        """`changed` is notified of changes of state. `tasks` runs the probes."""
        self._own = own
        self._transport = transport
        self._view = view
        self._pushes = pushes
        self._unreached = unreached
        self._changed = changed
        self._tasks = tasks
        self._looks: dict[str, asyncio.Task[Any]] = {}
        """Those under way, at most one at each peer."""
        self._on_change: list[Callable[[str, State], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._refutations = Refutations()
        self._calls = LiveCalls(transport, view)
        self.call_while_live = self._calls.call
        gate.on_call(self._on_call)
        serve(transport, PING, self._on_ping)
        for machine in transport.connected():
            view.detector.opened(machine)
        transport.on_connected(lambda machine: self._carry_out(view.detector.opened(machine)))
        transport.on_disconnected(self._on_disconnected)

    def start(self) -> None:
        """Begins to notice the stalls of this process, and the passing of time."""
        loop = asyncio.get_running_loop()
        self._view.detector.clock.tick(loop.time())
        self._timer = loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Ends."""
        self._view.detector.clock.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now = _now()
        self._view.reach.awake_s(now)
        if slept_s := self._view.detector.clock.slept_s():
            log.warning("this machine stood still for %.0f s: its peer comes back", slept_s)
        self._carry_out(self._view.detector.passed(now))
        for peer_id in self._calls.look(now):
            self.probe(peer_id)
        self._refute_if_due()
        self._tell_unreached()
        self.start()

    # ---- answers ----------------------------------------------------------------------------

    def state_of(self, peer_id: str) -> State:
        """`ALIVE`, `SUSPECT` or `DEAD`, to this peer."""
        return self._view.reach.state_of(peer_id, _now())

    def is_live(self, peer_id: str) -> bool:
        """Whether a peer can be called."""
        return self.state_of(peer_id) is ALIVE

    def is_suspect(self, peer_id: str) -> bool:
        """Whether a peer has fallen silent a moment ago, with its channels open. A machine that
        swaps, or a link that is down for seconds, is soon back; a process that has died closes its
        channels."""
        return self.state_of(peer_id) is SUSPECT

    def awake_s(self) -> float:
        """The loop's time without that in which this process stood still: for deadlines of
        others."""
        return self._view.reach.awake_s(_now())

    def stalled_s(self) -> float:
        """For how long this process has stood still, in all."""
        self._view.reach.awake_s(_now())
        return self._view.detector.clock.stalled_s

    def on_change(self, callback: Callable[[str, State], None]) -> None:
        """`callback(peer_id, state)` when a peer is lost, dead, or back."""
        self._on_change.append(callback)

    # ---- what has happened ------------------------------------------------------------------

    def answered(self, peer_id: str) -> None:
        """A peer has answered a call of this one."""
        self._carry_out(self._view.reach.answered(peer_id, _now()))

    def unanswered(self, peer_id: str, stamp: Stamp) -> None:
        """A peer, whose stamp was `stamp` when it was looked at, did not answer."""
        self._carry_out(self._view.reach.unanswered(peer_id, stamp, _now()))

    async def _on_ping(self, request: Request[None]) -> Message[None]:
        return Message()

    def _on_call(self, peer_id: str) -> None:
        if self._view.detector.is_lost(peer_id):
            self._carry_out(self._view.detector.called(peer_id, _now()))

    def _on_disconnected(self, machine: str) -> None:
        commands = self._view.detector.closed(machine, _now())
        self._carry_out(c for c in commands if not (isinstance(c, Look) and self._left(c.peer_id)))

    def _left(self, peer_id: str) -> bool:
        """Whether it is no news that a peer is gone."""
        record = self._view.get(peer_id)
        return record is None or record.state in (LEFT, OBSERVING)

    def on_news(self, record: Record) -> None:
        """A newer record has come into the view."""
        self._carry_out(self._view.reach.take_commands())
        if self._view.detector.is_lost(record.peer_id):
            self._tell_unreached()

    # ---- looks ------------------------------------------------------------------------------

    def probe(self, peer_id: str) -> None:
        """Looks at a peer, which is lost where it does not answer."""
        if peer_id not in self._looks and peer_id != self._view.own_peer_id:
            self._view.detector.looks(peer_id)
            self._looks[peer_id] = self._tasks.start(self._look(peer_id))

    async def look_into(self, peer_ids: Iterable[str]) -> None:
        """Looks at each of these peers, and returns when it is known which of them answer now."""
        await asyncio.gather(*map(self._look_into, peer_ids))

    async def _look_into(self, peer_id: str) -> None:
        for is_last in (False, True):  # one that is under way may end with an answer from before
            is_new = is_last or peer_id not in self._looks
            self.probe(peer_id)
            if peer_id in self._looks:
                await asyncio.wait([self._looks[peer_id]])
            if is_new or self._view.detector.is_lost(peer_id):
                return

    async def _look(self, peer_id: str) -> None:
        try:
            for is_last in (False, True):
                stamp = self._stamp_of(peer_id)
                try:
                    while not await self._answers(peer_id):
                        pass
                    return self.answered(peer_id)
                except SwarmnetError:
                    # News of it that was on its way meanwhile refutes a suspicion from before.
                    if is_last or self._stamp_of(peer_id) == stamp:
                        return self.unanswered(peer_id, stamp)
        finally:
            self._looks.pop(peer_id, None)

    def _stamp_of(self, peer_id: str) -> Stamp:
        record = self._view.get(peer_id)
        return record.stamp if record is not None else NO_STAMP

    async def _answers(self, peer_id: str) -> bool:
        """True where a ping is answered. False where this process stood still meanwhile, or a
        channel has opened, so that the silence means nothing. Raises a `SwarmnetError` where it is
        not answered."""
        stalls, limit_s = Stalls(self.stalled_s()), PROBE_TIMEOUT_S
        was_connected = self._is_connected(peer_id)
        if not was_connected:
            limit_s += CONNECT_S  # a dial says nothing yet by taking its time
        try:
            await call(self._transport, peer_id, PING, Message(), timeout_s=limit_s)
        except RemoteError:
            pass  # it answered
        except SwarmnetError:
            # The other's own dial may have been the quicker one.
            has_opened = not was_connected and self._is_connected(peer_id)
            if stalls.is_new(self.stalled_s()) or has_opened:
                return False
            raise
        return True

    def _is_connected(self, peer_id: str) -> bool:
        return machine_of(peer_id) in self._transport.connected()

    # ---- suspicions -------------------------------------------------------------------------

    def suspicions(self) -> tuple[Suspicion, ...]:
        """Those of this peer."""
        return tuple(Suspicion(p, s[0], s[1]) for p, s in self._view.detector.suspicions())

    def hear(self, suspicions: Iterable[Suspicion]) -> None:
        """What others suspect is looked into. A suspicion of this peer is refuted."""
        for s in suspicions:
            stamp = (s.incarnation, s.version)
            if s.peer_id == self._own.peer_id:
                own = self._own.record.stamp
                if stamp >= own or stamp[0] == own[0]:
                    self._refute(stamp)
                continue
            record = self._view.get(s.peer_id)
            if record is not None and record.state != LEFT and len(self._looks) < MAX_LOOKS:
                self._carry_out(self._view.reach.suspected_by_another(s.peer_id, stamp, _now()))

    def _refute(self, stamp: Stamp) -> None:
        own = self._own.record
        if self._own.is_quiet or stamp[0] > own.incarnation:
            return
        # No peer keeps a suspicion that is further ahead. Going further would let a stranger use
        # the version numbers up.
        self._refutations.heard((own.incarnation, min(stamp[1], own.version + MAX_STAMP_LEAD)))
        self._refute_if_due()

    def _refute_if_due(self) -> None:
        stamp = self._refutations.due(_now())
        if stamp is not None:
            self._own.outdo(stamp[1])
            self._pushes.soon()

    # ---- what is to be done -----------------------------------------------------------------

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Look(peer_id):
                    self.probe(peer_id)
                case TellUnreached(peer_id):
                    self._unreached.tell(peer_id)
                case TellSuspicion(peer_id, stamp):
                    log.debug("%s does not answer", peer_id[-8:])
                    message = Message(Records(suspicions=(Suspicion(peer_id, *stamp),)))
                    for target in self._pushes.targets(SUSPICION_FANOUT):
                        notify(self._transport, target, RECORDS, message)
                case Changed(peer_id, state):
                    self._calls.changed(peer_id, state)
                    for callback in self._on_change:
                        callback(peer_id, state)
                    self._tell_unreached()
                    self._changed.notify_all()

    def _tell_unreached(self) -> None:
        """Puts the living members that this peer cannot call into its record."""
        if self._own.is_quiet:
            return
        unreached = self._view.reach.unreached()
        if unreached != self._own.record.unreached:
            self._own.change(unreached=unreached)
            self._pushes.soon()


def _now() -> float:
    return asyncio.get_running_loop().time()
