"""The signed records that a peer knows: its own one, and those of the others.

The own record changes, gets versions and is signed for others (`OwnRecord`). The others' are
checked on arrival, and kept to be passed on (`KnownRecords`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from swarmnet.admission import Admission
from swarmnet.errors import ProtocolViolation
from swarmnet.methods.records import MAX_RECORD_BYTES, SignedRecord
from swarmnet.protocol.membership.pace import GossipPace, Publishing
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import (
    MAX_CREDENTIAL_BYTES,
    MAX_TEXT,
    Record,
    RoundCount,
    Stamp,
)
from swarmnet.protocol.membership.run_bounds import ANY_RUN, RunBounds
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.base import Transport
from swarmnet.wire import pack, unpack

log = logging.getLogger("swarmnet.gossip")

DECODED_RECORDS, DECODED_BYTES = 8192, 4096
"""Kept in their decoded form, and how long the longest of them is: for many peers in one process,
which all decode the same records."""
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


class Signer(Protocol):
    """Signs as this peer and checks the signatures of others."""

    def sign(self, data: bytes) -> bytes: ...

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool: ...


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
        state = self._record.state
        self.amend(**changes)
        if self._record.state != state:
            self.state_since = asyncio.get_running_loop().time()
        self._begin_version()

    def change_count(self, count: RoundCount) -> None:
        """Replaces this feeder's counters of one round."""
        self._record = self._record.with_count(count)
        self._begin_version()

    def add_total(self, name: str, amount: int) -> None:
        """Adds to one of the totals. It is no news for the own view."""
        totals = self._record.totals
        self.amend(totals={**totals, name: totals.get(name, 0) + amount})
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
        self.amend(version=max(self._record.version, version))
        self._begin_version()

    def _begin_version(self) -> None:
        self._publishing.changed()
        self._merge()

    def _merge(self) -> None:
        self.amend(version=self._record.version + 1)
        self._view.merge(self._record, asyncio.get_running_loop().time())
        self._news.tell()

    # ---- publishing -------------------------------------------------------------------------

    def seal(self) -> SignedRecord:
        """The record, signed. All changes are in it, except while a join is declared."""
        if self._envelope is None or self._publishing.has_news:
            self._measure_traffic()
            self._merge()
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
        self._measure_traffic()
        self._merge()
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

    def _measure_traffic(self) -> None:
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
        self.amend(totals=totals, upload_bytes_per_s=upload)


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


@lru_cache(maxsize=DECODED_RECORDS)
def _decode_once(payload: bytes) -> Record:
    return unpack(payload, Record)


def _decode(payload: bytes) -> Record:
    """Of a record whose signature is right."""
    is_short = len(payload) <= DECODED_BYTES
    return _decode_once(payload) if is_short else unpack(payload, Record)


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
    ) -> None:
        """`bounds`: of what a record can say in this run. `max_bytes`: of a record in it."""
        self._own = own
        self._transport = transport
        self._view = view
        self._signer = signer
        self._admission = admission
        self._bounds = bounds
        self._max_bytes = max_bytes
        self._envelopes: dict[str, SignedRecord] = {}
        self._listeners: list[Callable[[Record], None]] = []

    def on_news(self, listener: Callable[[Record], None]) -> None:
        """`listener(record)` for every record of another peer that is news."""
        self._listeners.append(listener)

    def envelopes(self, peer_ids: Iterable[str]) -> tuple[SignedRecord, ...]:
        """The signed records of those peers of which there is one here, the own peer included."""
        own = self._own
        found = (own.sealed if p == own.peer_id else self._envelopes.get(p) for p in peer_ids)
        return tuple(e for e in found if e is not None)

    def take(self, envelope: SignedRecord) -> bool:
        """Checks one record and merges it into the view; True when it was news. Raises
        `ProtocolViolation` where it is too long, of another run, of a peer not admitted, or
        false: in this order, and it is decoded only after that; and where it says what cannot be
        in this run."""
        payload = envelope.payload
        if len(payload) > self._max_bytes:
            raise ProtocolViolation(
                f"a record of {len(payload)} bytes; in this run at most {self._max_bytes}"
            )
        claim, own = unpack(payload, RecordClaim), self._own.record
        if claim.run_id != own.run_id:
            raise ProtocolViolation(f"a record of run {claim.run_id[:8]}, not of this one")
        is_own = claim.peer_id == own.peer_id
        present = own if is_own else self._view.get(claim.peer_id)
        if present is not None and claim.stamp <= present.stamp:
            return False
        try:
            self._admission.check(machine_of(claim.peer_id), claim.credential)
        except ProtocolViolation as e:
            raise ProtocolViolation(f"{claim.peer_id} is not admitted: {e}") from None
        if not self._signer.verify(claim.peer_id, payload, envelope.signature):
            raise ProtocolViolation(f"the signature on the record of {claim.peer_id} is wrong")
        record = _decode(payload)
        if reason := self._bounds.impossible(record, own.incarnation):
            raise ProtocolViolation(f"{record.peer_id} says that it {reason}")
        if is_own:
            self._own.follow(record.version)
            return False
        if not self._view.merge(record, asyncio.get_running_loop().time()):
            return False
        self._envelopes[record.peer_id] = envelope
        if present is None or present.addresses != record.addresses:
            self._transport.learn(record.peer_id, record.addresses)
        for listener in self._listeners:
            listener(record)
        return True

    def take_all(self, envelopes: Iterable[SignedRecord]) -> bool:
        """Takes each record that is valid, and logs one line about the others; True when any was
        news."""
        is_news, reasons = False, []
        for envelope in envelopes:
            try:
                is_news |= self.take(envelope)
            except ProtocolViolation as e:
                reasons.append(str(e))  # not the exception, which has the record in its traceback
        if reasons:
            others = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            log.warning("a record was dropped: %s%s", reasons[0], others)
        return is_news

    def forget_old(self) -> None:
        """Drops the records of peers that have been gone for long."""
        self._view.forget_old(asyncio.get_running_loop().time(), FORGET_AFTER_S)
        # Of others too, which a full view has forgotten for a newer one.
        for peer_id in [p for p in self._envelopes if self._view.get(p) is None]:
            del self._envelopes[peer_id]
