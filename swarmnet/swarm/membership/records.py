"""The signed records that a peer knows: its own one, and those of the others.

The own record changes, gets versions and is signed for others (`OwnRecord`). The others' are
checked on arrival, and kept to be passed on (`KnownRecords`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from swarmnet.admission import Admission
from swarmnet.errors import Busy, Forged, ProtocolViolation
from swarmnet.household import is_of
from swarmnet.methods.records import MAX_RECORD_BYTES, SignedRecord
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.membership.failure_detector import CopyDetector
from swarmnet.protocol.membership.intake import LIKELY, MEMBERS, OTHERS, batches, cost
from swarmnet.protocol.membership.pace import GossipPace, Publishing
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.preference import matters
from swarmnet.protocol.membership.records import (
    MAX_CREDENTIAL_BYTES,
    MAX_TEXT,
    Record,
    RoundCount,
    Stamp,
)
from swarmnet.protocol.membership.run_bounds import ANY_RUN, RunBounds
from swarmnet.protocol.membership.stranger_room import StrangerRoom, kept_bytes
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.record_checks import RecordChecks, Signer
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.base import Transport
from swarmnet.wire import pack, unpack

log = logging.getLogger("swarmnet.gossip")

_decoded: WeakValueDictionary[bytes, Record] = WeakValueDictionary()
"""By their bytes, the records that some peer of this process holds: many peers in one process
decode the same ones."""
FORGET_AFTER_S = 600.0
"""It protects from records without end, and leaves those beyond a cut to be looked for
(tests/swarm/membership/test_known_records.py)."""


class News:
    """Wakes the tasks of this peer that wait for a change of its view: at once in a small swarm,
    else once for all news of a short while. There is always some news there, and a round is
    longer."""

    def __init__(self, pace: GossipPace) -> None:
        self.changed = Condition()
        self._pace = pace
        self._timer: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """The view has changed."""
        if self._pace.is_small:
            self.changed.notify_all()
        elif self._timer is None:
            together_s = min(self._pace.interval_s, LOOK_LESS_S)
            self._timer = asyncio.get_running_loop().call_later(together_s, self._tell_now)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tell_now(self) -> None:
        self._timer = None
        self.changed.notify_all()


class OwnRecord:
    """The record of this peer as it is now, and as it was last published.

    The own view sees a change at once, and so may be ahead of what has been published. Others see
    it with the next version that is sealed. A record is a heartbeat too: it is sealed anew at least
    every `pace.heartbeat_s`."""

    def __init__(
        self,
        record: Record,
        transport: Transport,
        view: View,
        signer: Signer,
        pace: GossipPace,
        news: News,
        *,
        is_quiet: bool = False,
    ) -> None:
        """`is_quiet`: an observer's record, which is never published."""
        self.peer_id = record.peer_id
        self.is_quiet = is_quiet
        self.state_since = 0.0
        """When the record's state changed last, by the loop's clock."""
        self._record = record
        self._transport = transport
        self._view = view
        self._signer = signer
        self._pace = pace
        self._news = news
        self._envelope: SignedRecord | None = None
        self._publishing = Publishing()

    @property
    def record(self) -> Record:
        return self._record

    @property
    def published(self) -> Stamp:
        """The stamp of the newest version that others may know."""
        return self._publishing.stamp

    @property
    def sealed(self) -> SignedRecord | None:
        """The record as it was published last; None before that."""
        return self._envelope

    # ---- changes ----------------------------------------------------------------------------

    def change(self, **changes: Any) -> None:
        """Changes fields of the record."""
        if changes.get("state", self._record.state) != self._record.state:
            self.state_since = asyncio.get_running_loop().time()
        self._begin_version(**changes)

    def change_count(self, count: RoundCount) -> None:
        """Replaces this feeder's counters of one round."""
        self._begin_version(counts=self._record.counts_with(count))

    def add_total(self, name: str, amount: int) -> None:
        """Adds to one of the totals. It is no news for the own view."""
        totals = self._record.totals
        self.amend(totals={**totals, name: totals.get(name, 0) + amount})
        self._publishing.changed()

    def set_totals(self, values: Mapping[str, int]) -> None:
        """Replaces these of the totals, which are no counts. It is no news for the own view."""
        if not values.items() <= self._record.totals.items():
            self.amend(totals={**self._record.totals, **values})
            self._publishing.changed()

    def amend(self, **changes: Any) -> None:
        """Changes fields without a new version: they travel with the next change, or heartbeat."""
        self._record = replace(self._record, **changes)

    def follow(self, version: int) -> None:
        """A copy of this identity runs elsewhere, or did, and is at `version`: the next version
        published here is a higher one."""
        self.amend(version=version)
        self._publishing.changed()

    def outdo(self, version: int) -> None:
        """Begins a version higher than `version`, which refutes a suspicion of it."""
        self._begin_version(version=max(self._record.version, version) + 1)

    def _begin_version(self, **changes: Any) -> None:
        self._publishing.changed()
        self._merge(**changes)

    def _merge(self, **changes: Any) -> None:
        self.amend(**{"version": self._record.version + 1, **changes})
        self._view.merge(self._record, asyncio.get_running_loop().time())
        self._news.tell()

    # ---- publishing -------------------------------------------------------------------------

    def seal(self) -> SignedRecord:
        """The record, signed. All changes are in it, except while a join is declared."""
        if self._envelope is None or self._publishing.has_news:
            self._merge(**self._traffic())
            return self._publish(self._record)
        return self._envelope

    def seal_if_due(self) -> None:
        """Publishes what has changed, where `pace.publish_every_s` have passed; nothing of an
        observer."""
        now = asyncio.get_running_loop().time()
        if not self.is_quiet and self._publishing.is_due(now, self._pace.publish_every_s):
            self.seal()

    def beat(self) -> None:
        """Makes a heartbeat due, where the last version is old."""
        self._publishing.beat(asyncio.get_running_loop().time(), self._pace.heartbeat_s)

    @contextmanager
    def declared(self, **changes: Any) -> Iterator[None]:
        """Publishes the record as it will be after `changes`. Nothing else is published before the
        end of the block, and the own view does not see them."""
        self._merge(**self._traffic())
        self._publish(replace(self._record, **changes))
        self._publishing.hold()
        try:
            yield
        finally:
            self._publishing.release()

    def _publish(self, record: Record) -> SignedRecord:
        payload = pack(record)
        self._envelope = SignedRecord(payload, self._signer.sign(payload))
        self._publishing.published(record.stamp, asyncio.get_running_loop().time())
        return self._envelope

    def _traffic(self) -> dict[str, Any]:
        """The fields of the record that say what was sent until now."""
        traffic = self._transport.traffic
        totals = {
            **self._record.totals,
            "sent_bytes": sum(traffic.sent_bytes.values()),
            "received_bytes": sum(traffic.received_bytes.values()),
            "direct_sent_bytes": traffic.direct_sent_bytes,
            "links": len(self._transport.connected()),
            "direct_links": traffic.direct_links,
        }
        upload = traffic.upload.published(asyncio.get_running_loop().time())
        return {"totals": totals, "upload_bytes_per_s": upload}


@dataclass(frozen=True, slots=True)
class RecordClaim:
    """The part of a record that says who may have signed it. Nothing else is decoded of a record
    before its signature is checked."""

    peer_id: str
    run_id: str
    incarnation: int
    version: int
    credential: bytes = b""

    def __post_init__(self) -> None:
        if not 0 < len(self.peer_id) <= MAX_TEXT or len(self.credential) > MAX_CREDENTIAL_BYTES:
            raise ValueError("a peer id or a credential of an impossible length")

    @property
    def stamp(self) -> Stamp:
        return (self.incarnation, self.version)


def _decode(payload: bytes) -> Record:
    """Of a record whose signature is right."""
    record = _decoded.get(payload)
    if record is None:
        record = _decoded[payload] = unpack(payload, Record)
    return record


@dataclass(frozen=True, slots=True)
class _Claimed:
    """A record that may be news, and is not believed yet."""

    envelope: SignedRecord
    claim: RecordClaim

    @property
    def num_bytes(self) -> int:
        return len(self.envelope.payload)


class KnownRecords:
    """Takes records of others into the view, and keeps the signed form of each."""

    def __init__(
        self,
        own: OwnRecord,
        transport: Transport,
        view: View,
        signer: Signer,
        admission: Admission,
        bounds: RunBounds = ANY_RUN,
        max_bytes: int = MAX_RECORD_BYTES,
        *,
        news: News,
        tasks: Tasks,
    ) -> None:
        """`bounds`: of what a record can say in this run. `max_bytes`: of a record in it. `tasks`
        runs the checks for which nobody waits."""
        self._own = own
        self._transport = transport
        self._view = view
        self._signer = signer
        self._admission = admission
        self._bounds = bounds
        self._max_bytes = max_bytes
        self._news = news
        self._tasks = tasks
        self._checks = RecordChecks()
        self._envelopes: dict[str, SignedRecord] = {}
        self._strangers = StrangerRoom()
        self._listeners: list[Callable[[Record], None]] = []
        self._copies = CopyDetector()
        self.copy: Record | None = None
        """Of a later process that lives and has this peer's identity."""

    def on_news(self, listener: Callable[[Record], None]) -> None:
        """`listener(record)` for every record of another peer that is news."""
        self._listeners.append(listener)

    def envelopes(self, peer_ids: Iterable[str]) -> tuple[SignedRecord, ...]:
        """The signed records of those peers of which there is one here, the own peer included."""
        own = self._own
        found = (own.sealed if p == own.peer_id else self._envelopes.get(p) for p in peer_ids)
        return tuple(e for e in found if e is not None)

    def close(self) -> None:
        """Nothing waits for its turn any more."""
        self._checks.close()

    # ---- one record ---------------------------------------------------------------------------

    def take(self, envelope: SignedRecord) -> bool:
        """Checks one record here and now, and merges it into the view; True when it was news.
        Raises `ProtocolViolation` where it is too long, of another run, of a peer not admitted, or
        false: in this order, and it is decoded only after that; and where it says what cannot be
        in this run."""
        claimed = self._claimed(envelope)
        return claimed is not None and self._merge("", envelope, self._judge(claimed))

    def _claimed(self, envelope: SignedRecord) -> _Claimed | None:
        """What costs next to nothing: None where it is no news. Raises `ProtocolViolation`."""
        payload = envelope.payload
        if len(payload) > self._max_bytes:
            raise ProtocolViolation(
                f"a record of {len(payload)} bytes; in this run at most {self._max_bytes}"
            )
        claim, own = unpack(payload, RecordClaim), self._own.record
        if claim.run_id != own.run_id:
            raise ProtocolViolation(f"a record of run {claim.run_id[:8]}, not of this one")
        if not self._is_news(claim):
            return None
        if not claim.credential and not self._admission.is_open:
            raise ProtocolViolation(f"{claim.peer_id} is not admitted: it shows no invite")
        return _Claimed(envelope, claim)

    def _is_news(self, claim: RecordClaim) -> bool:
        own = self._own.record
        present = own if claim.peer_id == own.peer_id else self._view.get(claim.peer_id)
        return present is None or claim.stamp > present.stamp

    def _judge(self, claimed: _Claimed) -> Record:
        """Verifies what is signed; may run on any thread. Raises `ProtocolViolation`, which is
        `Forged` where a signature is false."""
        envelope, peer_id = claimed.envelope, claimed.claim.peer_id
        try:
            self._admission.check(machine_of(peer_id), claimed.claim.credential)
        except ProtocolViolation as e:
            raise type(e)(f"{peer_id} is not admitted: {e}") from None
        if not self._signer.verify(peer_id, envelope.payload, envelope.signature):
            raise Forged(f"the signature on the record of {peer_id} is wrong")
        record = _decode(envelope.payload)
        if record.household is not None and not is_of(record.household, peer_id):
            raise Forged(f"{peer_id} is of no household that it names")
        if reason := self._bounds.impossible(record, self._own.record.incarnation):
            raise ProtocolViolation(f"{record.peer_id} says that it {reason}")
        return record

    def _merge(self, sender: str, envelope: SignedRecord, record: Record) -> bool:
        """Of a record that is right, and that a peer has brought."""
        if record.peer_id == self._own.peer_id:
            if record.stamp > self._own.record.stamp:
                self._own.follow(record.version)
                self._look_for_copy(record)
            return False
        present = self._view.get(record.peer_id)
        if not self._view.merge(record, asyncio.get_running_loop().time()):
            return False
        self._envelopes[record.peer_id] = envelope
        self._count(record, machine_of(sender))
        if record.peer_id not in self._envelopes:
            return False
        if present is None or present.addresses != record.addresses:
            self._transport.learn(record.peer_id, record.addresses)
        for listener in self._listeners:
            listener(record)
        return True

    def _look_for_copy(self, record: Record) -> None:
        now = asyncio.get_running_loop().time()
        own = self._own.record.incarnation
        if self._copies.heard(record.stamp, own, now, self._view.silence_s):
            self.copy = record
            self._news.tell()

    def _count(self, record: Record, machine: str) -> None:
        """The memory of a record that a machine has brought, where its peer does not matter; where
        that is too much, others are forgotten."""
        now = asyncio.get_running_loop().time()
        if matters(self._view, record.peer_id, now):
            self._strangers.drop(record.peer_id)
            return
        num_bytes = kept_bytes(len(self._envelopes[record.peer_id].payload), record)
        self._strangers.put(record.peer_id, num_bytes, machine)
        for peer_id in self._strangers.make_room(machine, self._view):
            self._view.forget(peer_id, now)
            self._envelopes.pop(peer_id, None)
            self._forget_machine(peer_id)

    # ---- those of a message -------------------------------------------------------------------

    async def take_all(
        self, sender: str, envelopes: Iterable[SignedRecord], *, is_asked: bool = False
    ) -> bool:
        """Takes each record that is valid, and logs one line about the others; True when any was
        news. `sender`: who brought them, which is banned for a false signature; empty for nobody.
        `is_asked`: this peer has asked for them. What is least likely to be of use is checked when
        there is time, and not waited for. Raises `Busy` where there was no room for the others."""
        reasons: list[str] = []
        is_news = False
        for lane, waiting in self._sorted(sender, envelopes, is_asked, reasons):
            if lane == OTHERS:
                self._tasks.start(self._take_later(sender, waiting))
            else:
                is_news |= await self._take_in(sender, lane, waiting, reasons)
        self._tell_refused(reasons)
        return is_news

    def _sorted(
        self, sender: str, envelopes: Iterable[SignedRecord], is_asked: bool, reasons: list[str]
    ) -> list[tuple[int, list[_Claimed]]]:
        """What may be news, by the lane in which it waits. Appends why others cannot be."""
        now = asyncio.get_running_loop().time()
        is_member = bool(sender) and matters(self._view, sender, now)
        newest: dict[str, _Claimed] = {}
        for envelope in envelopes:
            try:
                claimed = self._claimed(envelope)
            except ProtocolViolation as e:
                reasons.append(str(e))  # not the exception, which has the record in its traceback
                continue
            if claimed is not None:
                other = newest.get(claimed.claim.peer_id)
                if other is None or claimed.claim.stamp > other.claim.stamp:
                    newest[claimed.claim.peer_id] = claimed
        lanes: dict[int, list[_Claimed]] = {}
        for subject, claimed in newest.items():
            if is_member and matters(self._view, subject, now):
                lane = MEMBERS
            elif is_member or is_asked or machine_of(subject) == machine_of(sender):
                lane = LIKELY
            else:
                lane = OTHERS
            lanes.setdefault(lane, []).append(claimed)
        return sorted(lanes.items())

    async def _take_later(self, sender: str, waiting: list[_Claimed]) -> None:
        reasons: list[str] = []
        try:
            await self._take_in(sender, OTHERS, waiting, reasons)
        except Busy as e:
            log.debug("records of %s were dropped: %s", sender[-8:], e)
        self._tell_refused(reasons)

    async def _take_in(
        self, sender: str, lane: int, waiting: list[_Claimed], reasons: list[str]
    ) -> bool:
        """Checks what waits, in order; ends with the first false signature."""
        sizes = [claimed.num_bytes for claimed in waiting]
        if lane == MEMBERS and self._checks.may_check_at_once(sizes):
            return self._merge_all(sender, waiting, self._judge_all(waiting), reasons)
        ticket = self._checks.enter(machine_of(sender), lane, sum(sizes))
        if ticket is None:
            raise Busy("too many records wait here", backlog_s=FIRST_PAUSE_S)
        is_news = False
        try:
            for batch in batches(waiting, sizes):
                total = sum(cost(claimed.num_bytes) for claimed in batch)
                async with self._checks.turn(ticket, total) as has_come:
                    if not has_come:
                        raise Busy("too many records wait here", backlog_s=FIRST_PAUSE_S)
                    # Others may have brought the same meanwhile.
                    left = [claimed for claimed in batch if self._is_news(claimed.claim)]
                    judged = await self._signer.beside(partial(self._judge_all, left))
                is_news |= self._merge_all(sender, left, judged, reasons)
                if judged and isinstance(judged[-1], Forged):
                    break
        finally:
            self._checks.leave(ticket)
        return is_news

    def _judge_all(self, waiting: Sequence[_Claimed]) -> list[Record | ProtocolViolation]:
        """What is found of each, up to the first false signature; may run on any thread."""
        found: list[Record | ProtocolViolation] = []
        for claimed in waiting:
            try:
                found.append(self._judge(claimed))
            except ProtocolViolation as e:
                found.append(type(e)(str(e)))  # without the traceback, which has the record
                if isinstance(e, Forged):
                    break
        return found

    def _merge_all(
        self,
        sender: str,
        waiting: Sequence[_Claimed],
        judged: Sequence[Record | ProtocolViolation],
        reasons: list[str],
    ) -> bool:
        is_news = False
        for claimed, found in zip(waiting, judged):
            if isinstance(found, Record):
                is_news |= self._merge(sender, claimed.envelope, found)
            elif not (sender and isinstance(found, Forged)):  # the ban has a line of its own
                reasons.append(str(found))
        if is_news:
            self._news.tell()
        if judged and isinstance(judged[-1], Forged) and sender:
            self._checks.drop(machine_of(sender))
            self._transport.ban(sender, str(judged[-1]))
        return is_news

    def _tell_refused(self, reasons: Sequence[str]) -> None:
        if reasons:
            others = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            log.warning("a record was dropped: %s%s", reasons[0], others)

    # ---- forgetting ---------------------------------------------------------------------------

    def forget_old(self) -> None:
        """Drops the records of peers that have been gone for long."""
        self._view.forget_old(asyncio.get_running_loop().time(), FORGET_AFTER_S)
        for peer_id in list(self._envelopes):
            record = self._view.get(peer_id)
            if record is None:  # a full view forgets others too
                self._envelopes.pop(peer_id, None)
                self._strangers.drop(peer_id)
                self._forget_machine(peer_id)
            elif peer_id not in self._strangers:  # it may not matter any more
                self._count(record, "")

    def _forget_machine(self, peer_id: str) -> None:
        """The record of a peer is gone: where its machine is found too, unless it has others."""
        machine = machine_of(peer_id)
        if not self._view.has_machine(machine):
            self._transport.forget(machine)
