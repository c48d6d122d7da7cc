"""The signed records of the other peers: checked on arrival, and kept to be passed on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from swarmnet.admission import Admission
from swarmnet.errors import ProtocolViolation
from swarmnet.methods.records import MAX_RECORD_BYTES, SignedRecord
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import (
    MAX_CREDENTIAL_BYTES,
    MAX_TEXT,
    Record,
    Stamp,
)
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.membership.own_record import OwnRecord, Signer
from swarmnet.transport.base import Transport
from swarmnet.wire import unpack

log = logging.getLogger("swarmnet.gossip")

DECODED_RECORDS, DECODED_BYTES = 8192, 4096
"""Kept in their decoded form, and how long the longest of them is: for many peers in one process,
which all decode the same records."""
FORGET_AFTER_S = 600.0
"""It protects from records without end, and leaves those beyond a cut to be looked for
(tests/swarm/membership/test_known_records.py)."""


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
        last_round: int | None,
        max_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        """`last_round`: of the run, where it is known. No peer is in a later one. `max_bytes`: of a
        record in this run."""
        self._own = own
        self._transport = transport
        self._view = view
        self._signer = signer
        self._admission = admission
        self._last_round = last_round
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
        false: in this order, and it is decoded, and then kept, only after that."""
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
        if self._last_round is not None and record.round > self._last_round:
            raise ProtocolViolation(
                f"{record.peer_id} says that it is in round {record.round} of {self._last_round}"
            )
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
