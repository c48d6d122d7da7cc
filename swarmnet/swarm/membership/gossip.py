"""The bus: every peer's signed record reaches every other peer.

Every `interval_s` a peer swaps stamps with a random other one and each sends what the other
lacks (anti-entropy). News that cannot wait is pushed at once to the peers that it has channels
with, at most `PUSH_FANOUT` of them. A view therefore converges whatever is lost.

Liveness. A record is a heartbeat: its version grows at least every `heartbeat_s`. In a large swarm
heartbeats and exchanges are rarer, so that control traffic per peer stays bounded. A channel that
closes is looked into at once: who cannot be reached again is suspected, the suspicion is gossiped,
and the suspected peer, if it lives, refutes it with a newer record (SWIM, Das et al. 2002)."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from swarmnet.admission import OPEN, Admission
from swarmnet.errors import (
    Busy,
    ProtocolViolation,
    Refused,
    RemoteError,
    SwarmnetError,
    WrongRun,
)
from swarmnet.protocol.membership.assignment import feeders
from swarmnet.protocol.membership.records import (
    LEFT,
    MAX_ADDRESSES,
    NO_STAMP,
    OBSERVING,
    Record,
    RoundCount,
)
from swarmnet.protocol.membership.seats import machine_of
from swarmnet.protocol.membership.view import MAX_STAMP_LEAD, View
from swarmnet.protocol.rate import RateLimiter
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.awake_clock import AwakeClock
from swarmnet.swarm.messages import (
    MAX_RECORDS,
    GossipRequest,
    Records,
    SignedRecord,
    Suspicion,
    Unreached,
)
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message, convert, pack, unpack

log = logging.getLogger("swarmnet.gossip")

RECONCILE_S = 10.0
"""Longest wait for another's news."""
CATCH_UP_S = 2.0
"""Longest wait for what was urgent in the last moments."""
UNREACHED_EVERY_S = 3.0
"""A peer is told no more often that it cannot be reached."""
KEPT_DOUBTS = 64
PUSH_FANOUT = 16
SUSPICION_FANOUT = 4
"""Likewise of suspicions, in a large swarm: all that had a channel to the dead notice it."""
SILENCE_STEP = 0.05
"""By what part the time after which a peer counts as silent must change to be changed."""
TELL_TOGETHER_S = 0.2
TELL_TOGETHER_PER_PEER_S = 0.0025
MAX_TELL_TOGETHER_S = 2.0
"""News within this time wakes its listeners once, in a large swarm: the more peers, the more news
there is, and the longer a round."""
PROBE_TIMEOUT_S = 2.0
STALL_S = 6.0
"""Who has been suspected for no longer than this, and has not closed its channels, is waited
for where its work would be lost otherwise. It took seconds already to take it for dead."""
FORGET_AFTER_S = 600.0
MAX_SENT_RECORDS = 512
DECODED_RECORDS = 8192
"""Kept in their decoded form."""
STRANGER_CALLS_PER_S = 20.0
STRANGER_BURST = 200.0
"""Of one peer whose record is not known here; more are answered `Busy`."""


@lru_cache(maxsize=DECODED_RECORDS)
def _decode(payload: bytes) -> Record:
    """The same record arrives from several peers; it is checked once."""
    return unpack(payload, Record)


class Signer(Protocol):
    """Signs as this peer and checks the signatures of others."""

    def sign(self, data: bytes) -> bytes: ...

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class GossipSettings:
    interval_s: float = 0.4
    interval_per_peer_s: float = 0.02
    """An exchange every `interval_s`, or every so many seconds times the number of live peers,
    whichever is longer: stamps of all peers travel with it."""
    heartbeat_s: float = 1.0
    heartbeat_per_peer_s: float = 0.1
    """The heartbeat is the longer of `heartbeat_s` and this times the number of live peers."""
    silence_s: float = 8.0
    """A peer whose record has not changed for so long is suspected..."""
    silent_heartbeats: float = 4.0
    """...or for so many heartbeats, whichever is longer."""
    push_delay_s: float = 0.01
    """Changes within this time travel as one."""


class Tasks:
    """The children of one owner: none outlives it, and none fails unseen."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In the order in which they began, in which they are ended too: a history is replayed."""

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, SwarmnetError) else logging.ERROR
            log.log(level, "%s: %s: %s", self._name, type(error).__name__, error, exc_info=error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Gossip:
    """Keeps `view` equal to everybody else's, and makes `own` known."""

    transport: Transport
    view: View
    signer: Signer
    own: Record
    rng: random.Random
    settings: GossipSettings = field(default_factory=GossipSettings)
    quiet: bool = False
    """An observer: listens, but makes no record of its own known."""
    admission: Admission = OPEN
    last_round: int | None = None
    """Of the run, where it is known: nobody is in a later one."""

    def __post_init__(self) -> None:
        self._strangers = RateLimiter(STRANGER_CALLS_PER_S, STRANGER_BURST)
        self.changed = Condition()
        self._envelopes: dict[str, SignedRecord] = {}
        self._tasks = Tasks("gossip")
        self._push_timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._dirty = False
        self._published_at = 0.0
        self._published = NO_STAMP
        self._is_join_declared = False
        self.state_since = 0.0
        """When the own record's state changed last, by the loop's clock."""
        self._interval_s, self._heartbeat_s = self.settings.interval_s, self.settings.heartbeat_s
        self._awake = AwakeClock(self._stood_still)
        self._probing: dict[str, asyncio.Task[Any]] = {}
        self._listeners: list[Callable[[Record], None]] = []
        self._suspected: list[Callable[[str], None]] = []
        self._unreached: dict[str, float] = {}
        self.doubts: deque[float] = deque(maxlen=KEPT_DOUBTS)
        """When this peer heard, lately, that somebody cannot reach it."""
        self.transport.handle("gossip", self._on_gossip)
        self.transport.handle("records", self._on_records)
        self.transport.handle("ping", self._on_ping)
        self.transport.handle("unreached", self._on_unreached)
        self.transport.on_disconnected(self._on_disconnected)
        if not self.admission.is_open:
            self.transport.on_connected(self._introduce)

    # ---- own record -------------------------------------------------------------------------

    def update(self, *, urgent: bool = False, **changes: Any) -> None:
        """Changes fields of the own record; it is published with the next exchange, or at once."""
        state = self.own.state
        self.own = replace(self.own, **changes)
        if self.own.state != state:
            self.state_since = asyncio.get_running_loop().time()
        self._changed(urgent)

    def tell_addresses(self) -> None:
        """Puts those that the transport has now into the own record."""
        addresses = tuple(self.transport.addresses()[:MAX_ADDRESSES])
        if addresses != self.own.addresses:
            self.update(addresses=addresses, urgent=True)

    def update_count(self, count: RoundCount, *, urgent: bool = False) -> None:
        """Replaces this feeder's counters of one round. In a small swarm that is always urgent: one
        push reaches everybody, and nobody launches what others have launched already."""
        self.own = self.own.with_count(count)
        self._changed(urgent or self.is_small)

    @property
    def is_small(self) -> bool:
        """A push reaches everybody."""
        return len(self.view) <= PUSH_FANOUT

    @property
    def spread_s(self) -> float:
        """About how long it takes until news that is not urgent is known everywhere."""
        if self.is_small:
            return 0.0
        return self._interval_s * math.log2(len(self.view)) + self._publish_every_s()

    def add_total(self, name: str, amount: int = 1) -> None:
        """Adds to one of the own record's totals."""
        self.own = replace(
            self.own, totals={**self.own.totals, name: self.own.totals.get(name, 0) + amount}
        )
        self._dirty = True

    def _count_traffic(self) -> None:
        traffic = self.transport.traffic
        totals = {
            **self.own.totals,
            "sent_bytes": sum(traffic.sent_bytes.values()),
            "received_bytes": sum(traffic.received_bytes.values()),
            "direct_sent_bytes": traffic.direct_sent_bytes,
            "links": len(self.transport.connected()),
            "direct_links": traffic.direct_links,
        }
        upload = traffic.upload.published(asyncio.get_running_loop().time())
        self.own = replace(self.own, totals=totals, upload_bytes_per_s=upload)

    def _changed(self, urgent: bool) -> None:
        self._dirty = True
        # The own decisions see the change now; the others with the next version.
        self._merge_own()
        if urgent and self._push_timer is None:
            loop = asyncio.get_running_loop()
            self._push_timer = loop.call_later(self.settings.push_delay_s, self._push)

    def _merge_own(self) -> None:
        self.own = replace(self.own, version=self.own.version + 1)
        self.view.merge(self.own, asyncio.get_running_loop().time())
        self._tell()

    def _tell(self) -> None:
        """Wakes who waits for news: at once, or, in a large swarm, where there is always some,
        for all of a short while together."""
        if self.is_small:
            self.changed.notify_all()
        elif self._telling is None:
            together_s = max(TELL_TOGETHER_S, TELL_TOGETHER_PER_PEER_S * len(self.view))
            self._telling = asyncio.get_running_loop().call_later(
                min(together_s, MAX_TELL_TOGETHER_S), self._tell_now
            )

    def _tell_now(self) -> None:
        self._telling = None
        self.changed.notify_all()

    def _seal_own(self) -> SignedRecord:
        """Signs the own record in its present version."""
        is_due = self._dirty and not self._is_join_declared
        if is_due or self.own.peer_id not in self._envelopes:
            self._count_traffic()
            self._merge_own()
            self._publish(self.own)
        return self._envelopes[self.own.peer_id]

    def _publish(self, record: Record) -> None:
        payload = pack(record)
        self._envelopes[record.peer_id] = SignedRecord(payload, self.signer.sign(payload))
        self._dirty = False
        self._published_at = asyncio.get_running_loop().time()
        self._published = record.stamp

    async def declare_join(self, peer_ids: Iterable[str], timeout_s: float, **changes: Any) -> None:
        """Before the own record changes so: until these peers know of it, and this one knows what
        they knew then (in a large swarm, where that is much and rounds are long, one of them). Who
        does not answer within `timeout_s`, twice, is not waited for."""
        if self.quiet:
            return
        self._count_traffic()
        self._merge_own()
        self._publish(replace(self.own, **changes))
        self._is_join_declared = True  # what is published meanwhile is this
        try:
            told = list(peer_ids)
            answered = await asyncio.gather(*(self._declare_join_to(p, timeout_s) for p in told))
            known = [p for p, is_known in zip(told, answered) if is_known]
            if known and not self.is_small:
                known = [self.rng.choice(known)]
            await asyncio.gather(*(self._hear_from(p, timeout_s) for p in known))
        finally:
            self._is_join_declared, self._dirty = False, True

    async def _declare_join_to(self, peer_id: str, timeout_s: float) -> bool:
        message = Message(Records(records=(self._seal_own(),)))
        try:
            await self.transport.call(peer_id, "records", message, timeout_s=timeout_s)
        except SwarmnetError as e:
            log.debug("%s may not know what is to come: %s", peer_id[-8:], e)
            return False
        return True

    def _publish_every_s(self) -> float:
        """Changes that are not urgent are collected for so long."""
        return 0.0 if self.is_small else self._heartbeat_s / 4

    def _seal_if_due(self) -> None:
        if self._published == NO_STAMP:
            self._seal_own()
        elif self._dirty:
            now = asyncio.get_running_loop().time()
            if now - self._published_at >= self._publish_every_s():
                self._seal_own()

    def envelope(self) -> SignedRecord:
        """The own record, signed."""
        return self._seal_own()

    def _push(self) -> None:
        """Sends the own record to the peers at hand."""
        self._push_timer = None
        if self.quiet:
            return
        message = Message(Records(records=(self._seal_own(),)))
        for peer_id in self._push_targets(PUSH_FANOUT):
            self.transport.notify(peer_id, "records", message)

    def _push_targets(self, fanout: int) -> list[str]:
        """Everybody, or, where these are more than `PUSH_FANOUT`, `fanout` of them: half of these
        are the first of the feeders, so that somebody has all the urgent news and sees at once that
        a round is over; the others are drawn."""
        now = asyncio.get_running_loop().time()
        own = self.own.peer_id
        live = [r.peer_id for r in self.view.live(now) if r.peer_id != own]
        if len(live) <= PUSH_FANOUT:
            live = sorted({*live, *self.transport.connected()} - {own})
        if len(live) <= PUSH_FANOUT:
            return live
        first = self._first_to_hear(fanout)
        drawn = self.rng.sample(live, fanout)
        return [*first, *(p for p in drawn if p not in first)][:fanout]

    async def publish_now(self) -> None:
        """Pushes the own record without delay."""
        if self._push_timer is not None:
            self._push_timer.cancel()
        self._push()

    # ---- exchange ---------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Hears what was urgent in the last moments: in a large swarm from one of those who are
        told all of that. In a small one everybody is."""
        told = self._first_to_hear(PUSH_FANOUT)
        if told and not self.is_small:
            await self._hear_from(self.rng.choice(told), CATCH_UP_S)

    async def _hear_from(self, peer_id: str, timeout_s: float) -> None:
        try:
            await self.reconcile(peer_id, timeout_s)
        except SwarmnetError as e:  # it is of another run by now, say
            log.debug("the newest news was not heard: %s", e)

    def _first_to_hear(self, fanout: int) -> list[str]:
        """To whom urgent news goes in any case: the first of the feeders."""
        now = asyncio.get_running_loop().time()
        others = [p for p in feeders(self.view, now)[: fanout // 2 + 1] if p != self.own.peer_id]
        return others[: fanout // 2]

    async def run(self) -> None:
        """Gossips until cancelled."""
        self._awake.start()
        try:
            while True:
                await asyncio.sleep(self._interval_s * self.rng.uniform(0.7, 1.3))
                self._tend()
                peer_id = self._partner()
                if peer_id is not None:
                    self._tasks.start(self._hear_from(peer_id, RECONCILE_S))
        finally:
            self._awake.stop()
            for timer in (self._push_timer, self._telling):
                if timer is not None:
                    timer.cancel()
            await self._tasks.close()

    def awake_s(self) -> float:
        """The loop's time without that in which this process stood still: for deadlines of others.
        To be asked for before it is looked who lives: nobody is silent for a stall of one's own."""
        return self._awake.time()

    def stood_still_s(self) -> float:
        """For how long this process has stood still, in all."""
        return self._awake.stood_still_s()

    def _stood_still(self, seconds: float) -> None:
        log.debug("this process stood still for %.1f s", seconds)
        self.view.stood_still(seconds, asyncio.get_running_loop().time())

    def has_stalled(self, peer_id: str) -> bool:
        """A peer has fallen silent a moment ago, with its channels open. A machine that swaps, or a
        link that is down for seconds, is soon back; who has died closes its channels."""
        now = asyncio.get_running_loop().time()
        if self.view.is_live(peer_id, now) or self.view.gone_s(peer_id, now) >= STALL_S:
            return False
        return machine_of(peer_id) in self.transport.connected()

    def _tend(self) -> None:
        """Heartbeat, the own addresses as they are now, and forgetting."""
        now = asyncio.get_running_loop().time()
        self._pace(len(self.view.live(now)))
        if not self.quiet:
            self.tell_addresses()
        if now - self._published_at >= self._heartbeat_s:
            self._dirty = True
        if not self.quiet:
            self._seal_if_due()
        for peer_id in self.view.forget_old(now, FORGET_AFTER_S):
            self._envelopes.pop(peer_id, None)
        self._tell()

    def _pace(self, num_live: int) -> None:
        """How often to speak, in a swarm of this size: so that what a peer sends and hears in a
        second does not grow with the swarm."""
        settings = self.settings
        self._interval_s = max(settings.interval_s, settings.interval_per_peer_s * num_live)
        self._heartbeat_s = max(settings.heartbeat_s, settings.heartbeat_per_peer_s * num_live)
        silence_s = max(settings.silence_s, settings.silent_heartbeats * self._heartbeat_s)
        if abs(silence_s - self.view.silence_s) > SILENCE_STEP * silence_s:
            self.view.silence_s = silence_s

    def _partner(self) -> str | None:
        """Somebody who lives; who is missing is looked for apart
        (`swarm.membership.reconnecting`)."""
        now = asyncio.get_running_loop().time()
        own = self.own.peer_id
        live = self.view.live(now)
        if len(live) > 1:
            drawn = self.rng.choice(live).peer_id
            if drawn != own:
                return drawn
        pool = [r.peer_id for r in live if r.peer_id != own]
        pool = pool or [p for p in self.transport.connected() if p != own]
        return self.rng.choice(pool) if pool else None

    async def reconcile(self, peer_id: str, timeout_s: float = RECONCILE_S) -> bool:
        """Swaps what is new with one peer; False where it cannot be reached. Raises `WrongRun`."""
        if not self.quiet:
            self._seal_if_due()
        request = GossipRequest(stamps=self._stamps(), suspicions=self._suspicions())
        try:
            reply = await self.transport.call(
                peer_id, "gossip", Message(request), timeout_s=timeout_s
            )
            news = convert(reply.body, Records)
        except WrongRun:
            raise
        except SwarmnetError as e:
            log.debug("gossip with %s: %s", peer_id[-8:], e)
            if not isinstance(e, RemoteError):  # which is an answer
                self._tell_unreached(peer_id)
            return False
        self._take(news)
        wanted = tuple(
            self._envelopes[p] for p in news.wanted[:MAX_SENT_RECORDS] if p in self._envelopes
        )
        if wanted:
            self.transport.notify(peer_id, "records", Message(Records(records=wanted)))
        return True

    def _stamps(self) -> dict[str, tuple[int, int]]:
        stamps = self.view.digest.stamps()
        if self.quiet or self._published == NO_STAMP:
            stamps.pop(self.own.peer_id, None)
        else:  # the view is ahead of what has been said
            stamps[self.own.peer_id] = self._published
        if len(stamps) > MAX_RECORDS:  # as many as a message may have; others another time
            stamps = {p: stamps[p] for p in self.rng.sample(sorted(stamps), MAX_RECORDS)}
        return stamps

    def _suspicions(self) -> tuple[Suspicion, ...]:
        return tuple(Suspicion(p, s[0], s[1]) for p, s in self.view.detector.suspicions())

    def check_run(self, request: Request) -> None:
        """Raises `WrongRun` for callers that belong to another run, `Refused` for those that a
        closed run has not admitted. For every method that costs or changes something."""
        self._check_same_run(request)
        if not self.is_admitted(request.remote):
            raise Refused("this run is closed, and you have shown no valid invite")

    def is_admitted(self, peer_id: str) -> bool:
        """May a peer take part? In a closed run: those whose record shows it."""
        if self.admission.is_open:
            return True
        machine = machine_of(peer_id)  # an invite admits all its seats
        record = self.view.get(peer_id) or self.view.get(machine)
        try:
            self.admission.check(machine, record.credential if record is not None else b"")
        except ProtocolViolation:
            return False
        return True

    def check_stranger(self, request: Request) -> None:
        """For what anyone may ask: raises `Busy` where a stranger asks too often."""
        if self.view.get(request.remote) is None:
            now = asyncio.get_running_loop().time()
            if not self._strangers.allows(request.remote, now):
                raise Busy("you ask too often", backlog_s=1.0)

    def _check_same_run(self, request: Request) -> None:
        if request.run_id != self.own.run_id:
            raise WrongRun(
                f"this peer trains run {self.own.run_id[:8]}, not {request.run_id[:8] or 'none'}"
            )

    def _introduce(self, peer_id: str) -> None:
        """In a closed run the first thing that is said on a channel is who speaks: calls of a peer
        whose record has not arrived are refused."""
        if not self.quiet and self.own.run_id:
            self.transport.notify(peer_id, "records", Message(Records(records=(self._seal_own(),))))

    async def _on_gossip(self, request: Request) -> Message:
        """Observers may listen: records are no secret."""
        self._check_same_run(request)
        self.check_stranger(request)
        theirs = convert(request.message.body, GossipRequest)
        if not self.quiet:
            self._seal_if_due()
        own = self.own.peer_id
        own_is_known = theirs.stamps.get(own, NO_STAMP) >= self._published
        records = tuple(
            self._envelopes[r.peer_id]
            for r in self.view.newer_than(theirs.stamps)[:MAX_SENT_RECORDS]
            if r.peer_id in self._envelopes and not (own_is_known and r.peer_id == own)
        )
        wanted = tuple(self.view.digest.wanted_from(theirs.stamps)[:MAX_SENT_RECORDS])
        if self.is_admitted(request.remote):
            self._hear_suspicions(theirs.suspicions)
        return Message(Records(records=records, wanted=wanted, suspicions=self._suspicions()))

    async def _on_records(self, request: Request) -> Message:
        """A record speaks for itself, whoever brings it."""
        self._check_same_run(request)
        self.check_stranger(request)
        news = convert(request.message.body, Records)
        self._take(news, suspicions=False)
        if self.is_admitted(request.remote):
            self._hear_suspicions(news.suspicions)
        return Message()

    async def _on_ping(self, request: Request) -> Message:
        self.check_stranger(request)
        return Message()

    # ---- who cannot be reached, and lives ---------------------------------------------------

    def _tell_unreached(self, peer_id: str) -> None:
        """Lets a peer that does not answer here know of it, through another, in case it lives and
        only the way there is cut (see `relaying`)."""
        now = asyncio.get_running_loop().time()
        if not self._may_tell_unreached(peer_id, now):
            return
        others = [
            r.peer_id for r in self.view.live(now) if r.peer_id not in (peer_id, self.own.peer_id)
        ]
        if others:
            message = Message(Unreached(peer_id))
            self.transport.notify(self.rng.choice(others), "unreached", message)

    def _may_tell_unreached(self, peer_id: str, now: float) -> bool:
        told = self._unreached
        if now - told.get(peer_id, float("-inf")) < UNREACHED_EVERY_S:
            return False
        self._unreached = {p: at for p, at in told.items() if now - at < UNREACHED_EVERY_S}
        self._unreached[peer_id] = now
        return True

    async def _on_unreached(self, request: Request) -> Message:
        """Of this peer, or of one to which it passes that on."""
        self.check_run(request)
        peer_id = convert(request.message.body, Unreached).peer_id
        now = asyncio.get_running_loop().time()
        if peer_id == self.own.peer_id:
            self.doubts.append(now)
        elif self.view.is_live(peer_id, now) and self._may_tell_unreached(peer_id, now):
            self.transport.notify(peer_id, "unreached", Message(Unreached(peer_id)))
        return Message()

    # ---- taking in --------------------------------------------------------------------------

    def _take(self, news: Records, *, suspicions: bool = True) -> None:
        changed = False
        for envelope in news.records:
            try:
                changed |= self.take(envelope)
            except ProtocolViolation as e:
                log.warning("a record was dropped: %s", e)
        if suspicions:
            self._hear_suspicions(news.suspicions)
        if changed:
            self._tell()

    def take(self, envelope: SignedRecord) -> bool:
        """Checks and merges one record; True when it was news. Raises `ProtocolViolation`."""
        record = _decode(envelope.payload)
        if record.run_id != self.own.run_id:
            raise ProtocolViolation(f"a record of run {record.run_id[:8]}, not of this one")
        if self.last_round is not None and record.round > self.last_round:
            raise ProtocolViolation(
                f"{record.peer_id} says that it is in round {record.round} of {self.last_round}"
            )
        is_own = record.peer_id == self.own.peer_id
        present = self.own if is_own else self.view.get(record.peer_id)
        if present is not None and record.stamp <= present.stamp:
            return False
        if not self.signer.verify(record.peer_id, envelope.payload, envelope.signature):
            raise ProtocolViolation(f"the signature on the record of {record.peer_id} is wrong")
        try:
            self.admission.check(machine_of(record.peer_id), record.credential)
        except ProtocolViolation as e:
            raise ProtocolViolation(f"{record.peer_id} is not admitted: {e}") from None
        if is_own:  # a copy of this identity runs elsewhere, or did
            self.own = replace(self.own, version=record.version)
            self._dirty = True
            return False
        if not self.view.merge(record, asyncio.get_running_loop().time()):
            return False
        self._envelopes[record.peer_id] = envelope
        if present is None or present.addresses != record.addresses:
            self.transport.learn(record.peer_id, record.addresses)
        for listener in self._listeners:
            listener(record)
        return True

    def on_record(self, listener: Callable[[Record], None]) -> None:
        """`listener(record)` for every record that is news."""
        self._listeners.append(listener)

    def _hear_suspicions(self, suspicions: tuple[Suspicion, ...]) -> None:
        now = asyncio.get_running_loop().time()
        for s in suspicions:
            stamp = (s.incarnation, s.version)
            if s.peer_id == self.own.peer_id:
                if stamp >= self.own.stamp or stamp[0] == self.own.incarnation:
                    self._refute(stamp)
            elif self.view.suspect(s.peer_id, stamp, now):
                self._tell_suspected(s.peer_id)
                self.changed.notify_all()

    def _refute(self, stamp: tuple[int, int]) -> None:
        if self.quiet or stamp[0] > self.own.incarnation:
            return
        # Nobody keeps a suspicion that is further ahead; more would let a stranger use the numbers
        # up.
        version = min(stamp[1], self.own.version + MAX_STAMP_LEAD)
        self.own = replace(self.own, version=max(self.own.version, version))
        self._changed(urgent=True)

    # ---- failure detection ------------------------------------------------------------------

    def _on_disconnected(self, peer_id: str) -> None:
        record = self.view.get(peer_id)
        if record is not None and record.state not in (LEFT, OBSERVING):
            self.probe(peer_id)

    def probe(self, peer_id: str) -> None:
        """Looks into whether a peer still answers; suspects it where it does not."""
        if peer_id not in self._probing and peer_id != self.own.peer_id:
            self._probing[peer_id] = self._tasks.start(self._probe(peer_id))

    async def look_into(self, peer_ids: Iterable[str]) -> None:
        """Until it is known of each of them whether it answers now; suspects who does not."""
        await asyncio.gather(*map(self._look_into, peer_ids))

    async def _look_into(self, peer_id: str) -> None:
        for _ in range(2):  # one that is under way may end with an answer from before
            is_new = peer_id not in self._probing
            self.probe(peer_id)
            if peer_id in self._probing:
                await asyncio.wait([self._probing[peer_id]])
            if is_new or not self.view.is_live(peer_id, asyncio.get_running_loop().time()):
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

    def _stamp_of(self, peer_id: str) -> tuple[int, int]:
        record = self.view.get(peer_id)
        return record.stamp if record is not None else (0, 0)

    async def _answers(self, peer_id: str) -> bool:
        """A ping is answered. False where this process stood still meanwhile, so that nobody
        knows; raises a `SwarmnetError` where it is not answered."""
        loop = asyncio.get_running_loop()
        began, awake = loop.time(), self.awake_s()
        try:
            await self.transport.call(peer_id, "ping", Message(), timeout_s=PROBE_TIMEOUT_S)
        except RemoteError:
            pass  # it answered
        except SwarmnetError:
            if loop.time() - began > self.awake_s() - awake + PROBE_TIMEOUT_S / 4:
                return False
            raise
        return True

    def on_suspected(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` when a peer is suspected."""
        self._suspected.append(callback)

    def _tell_suspected(self, peer_id: str) -> None:
        for callback in self._suspected:
            callback(peer_id)

    def suspect(self, peer_id: str, stamp: tuple[int, int]) -> None:
        """Takes a peer for dead until a record newer than `stamp` arrives, and says so to
        others."""
        now = asyncio.get_running_loop().time()
        if not self.view.suspect(peer_id, stamp, now):
            return
        self._tell_unreached(peer_id)
        self._tell_suspected(peer_id)
        log.debug("%s does not answer", peer_id[-8:])
        self.changed.notify_all()
        message = Message(Records(suspicions=(Suspicion(peer_id, *stamp),)))
        for target in self._push_targets(SUSPICION_FANOUT):
            self.transport.notify(target, "records", message)
