"""Who is alive, and the calls that end with their callee.

`protocol.membership.failure_detector` decides; here its looks become pings, its commands messages,
and what is heard from others its events. Everything that asks whether another peer lives asks
here: `state_of`, `is_live`, `suspect_until`, `on_change`, and `call_while_live`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from swarmnet.errors import RemoteError, SwarmnetError
from swarmnet.protocol.membership.awake import TICK_S
from swarmnet.protocol.membership.failure_detector import (
    ALIVE,
    SUSPECT,
    Changed,
    Command,
    Look,
    State,
    TellSuspicion,
    TellUnreached,
)
from swarmnet.protocol.membership.records import (
    LEFT,
    MAX_UNREACHED,
    NO_STAMP,
    OBSERVER_STAGE,
    OBSERVING,
    Record,
    Stamp,
)
from swarmnet.protocol.membership.view import MAX_STAMP_LEAD, View
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.callers import CallerChecks
from swarmnet.swarm.membership.live_calls import LiveCalls
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
"""For the answer to a ping. It protects from a peer that is silent with its channels open
(`tests/swarm/membership/test_detection.py`)."""
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
        callers: CallerChecks,
        changed: Condition,
        tasks: Tasks,
    ) -> None:
        """`changed` is notified of changes of state. `tasks` runs the probes."""
        self._own, self._transport, self._view = own, transport, view
        self._pushes, self._unreached, self._callers = pushes, unreached, callers
        self._changed, self._tasks = changed, tasks
        self._probing: dict[str, asyncio.Task[Any]] = {}
        self._on_change: list[Callable[[str, State], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls = LiveCalls(transport, self)
        self.call_while_live = self._calls.call
        callers.on_call(self._on_call)
        transport.handle("ping", self._on_ping)
        for machine in transport.connected():
            view.detector.opened(machine)
        transport.on_connected(view.detector.opened)
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
        self._view.awake_s(now)
        self._carry_out(self._view.detector.passed(now))
        self._calls.look()
        self._tell_unreached()
        self.start()

    # ---- answers ----------------------------------------------------------------------------

    def state_of(self, peer_id: str) -> State:
        """`ALIVE`, `SUSPECT` or `DEAD`, to this peer."""
        return self._view.state_of(peer_id, _now())

    def is_live(self, peer_id: str) -> bool:
        """Whether a peer can be called."""
        return self.state_of(peer_id) is ALIVE

    def is_suspect(self, peer_id: str) -> bool:
        """Whether a peer has fallen silent a moment ago, with its channels open. A machine that
        swaps, or a link that is down for seconds, is soon back; a process that has died closes its
        channels."""
        return self.state_of(peer_id) is SUSPECT

    def suspect_until(self, peer_id: str) -> float:
        """Until when a peer that is not alive is waited for, by the loop's time; infinity for one
        that has not been lost."""
        return self._view.detector.suspect_until(peer_id)

    def awake_s(self) -> float:
        """The loop's time without that in which this process stood still: for deadlines of
        others."""
        return self._view.awake_s(_now())

    def on_change(self, callback: Callable[[str, State], None]) -> None:
        """`callback(peer_id, state)` when a peer is lost, dead, or back."""
        self._on_change.append(callback)

    # ---- probes -----------------------------------------------------------------------------

    def probe(self, peer_id: str) -> None:
        """Starts a probe of a peer, which is lost where it does not answer."""
        if peer_id not in self._probing and peer_id != self._own.peer_id:
            self._view.detector.looks(peer_id)
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
            if is_new or not self.is_live(peer_id):
                return

    async def _probe(self, peer_id: str) -> None:
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
            self._probing.pop(peer_id, None)

    def _stamp_of(self, peer_id: str) -> Stamp:
        record = self._view.get(peer_id)
        return record.stamp if record is not None else NO_STAMP

    async def _answers(self, peer_id: str) -> bool:
        """True where a ping is answered. False where this process stood still meanwhile, so that
        the silence means nothing. Raises a `SwarmnetError` where it is not answered."""
        began, awake = _now(), self.awake_s()
        try:
            await self._transport.call(peer_id, "ping", Message(), timeout_s=PROBE_TIMEOUT_S)
        except RemoteError:
            pass  # it answered
        except SwarmnetError:
            if _now() - began > self.awake_s() - awake + PROBE_TIMEOUT_S / 4:
                return False
            raise
        return True

    def answered(self, peer_id: str) -> None:
        """A peer has answered a call of this one."""
        self._carry_out(self._view.answered(peer_id, _now()))

    def unanswered(self, peer_id: str, stamp: Stamp) -> None:
        """A peer, whose stamp was `stamp` when it was looked at, did not answer."""
        self._carry_out(self._view.unanswered(peer_id, stamp, _now()))

    async def _on_ping(self, request: Request) -> Message:
        self._callers.check_stranger(request)
        return Message()

    def _on_call(self, peer_id: str) -> None:
        if self._view.detector.is_lost(peer_id):
            self._carry_out(self._view.detector.called(peer_id, _now()))

    def _on_disconnected(self, machine: str) -> None:
        commands = self._view.detector.closed(machine, _now())
        record = self._view.get(machine)
        if record is not None and record.state not in (LEFT, OBSERVING):
            self._carry_out(commands)

    def on_news(self, record: Record) -> None:
        """A newer record has come into the view."""
        self._carry_out(self._view.take_commands())
        if self._view.detector.is_lost(record.peer_id):
            self._tell_unreached()

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
            if record is not None and record.state != LEFT and len(self._probing) < MAX_LOOKS:
                self._carry_out(self._view.suspected_by_another(s.peer_id, stamp, _now()))

    def _refute(self, stamp: Stamp) -> None:
        own = self._own.record
        if self._own.is_quiet or stamp[0] > own.incarnation:
            return
        # No peer keeps a suspicion that is further ahead. Going further would let a stranger use
        # the version numbers up.
        self._own.outdo(min(stamp[1], own.version + MAX_STAMP_LEAD))
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
                        self._transport.notify(target, "records", message)
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
        view = self._view
        names = view.detector.out_of_reach()
        records = (r for p in names if (r := view.get(p)) is not None)
        found = [r.peer_id for r in records if r.state != LEFT and r.stage != OBSERVER_STAGE]
        unreached = tuple(found[:MAX_UNREACHED])
        if unreached != self._own.record.unreached:
            self._own.change(unreached=unreached)
            self._pushes.soon()


def _now() -> float:
    return asyncio.get_running_loop().time()
