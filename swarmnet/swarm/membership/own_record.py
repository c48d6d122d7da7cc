"""The peer's own record: its changes, its versions, and its signature for others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from swarmnet.methods.records import SignedRecord
from swarmnet.protocol.membership.records import NO_STAMP, Record, RoundCount, Stamp
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.membership.news import News
from swarmnet.swarm.membership.pace import GossipPace
from swarmnet.transport.base import Transport
from swarmnet.wire import pack


class Signer(Protocol):
    """Signs as this peer and checks the signatures of others."""

    def sign(self, data: bytes) -> bytes: ...

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool: ...


class OwnRecord:
    """The record of this peer as it is now, and as it was last published.

    The own view sees a change at once. Others see it with the next version that is sealed. A record
    is a heartbeat too: it is sealed anew at least every `pace.heartbeat_s`."""

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
        self.published: Stamp = NO_STAMP
        """The stamp of the newest version that others may know. The view may be ahead of it."""
        self.state_since = 0.0
        """When the record's state changed last, by the loop's clock."""
        self._record = record
        self._transport = transport
        self._view = view
        self._signer = signer
        self._pace = pace
        self._news = news
        self._envelope: SignedRecord | None = None
        self._published_at = 0.0
        self._is_dirty = False
        """A change, or a heartbeat, is to be published."""
        self._is_join_declared = False
        """What is published stays as it is until the join that it declares."""

    @property
    def record(self) -> Record:
        return self._record

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
        self._is_dirty = True

    def amend(self, **changes: Any) -> None:
        """Changes fields without a new version: they travel with the next change, or heartbeat."""
        self._record = replace(self._record, **changes)

    def follow(self, version: int) -> None:
        """A copy of this identity runs elsewhere, or did, and is at `version`: the next version
        published here is a higher one."""
        self.amend(version=version)
        self._is_dirty = True

    def outdo(self, version: int) -> None:
        """Begins a version higher than `version`, which refutes a suspicion of it."""
        self.amend(version=max(self._record.version, version))
        self._begin_version()

    def _begin_version(self) -> None:
        self._is_dirty = True
        self._merge()

    def _merge(self) -> None:
        self.amend(version=self._record.version + 1)
        self._view.merge(self._record, asyncio.get_running_loop().time())
        self._news.tell()

    # ---- publishing -------------------------------------------------------------------------

    def seal(self) -> SignedRecord:
        """The record, signed. All changes are in it, except while a join is declared."""
        is_due = self._is_dirty and not self._is_join_declared
        if self._envelope is None or is_due:
            self._measure_traffic()
            self._merge()
            return self._publish(self._record)
        return self._envelope

    def seal_if_due(self) -> None:
        """Publishes what has changed, where `pace.publish_every_s` have passed; nothing of an
        observer."""
        if self.is_quiet:
            return
        now = asyncio.get_running_loop().time()
        is_first = self.published == NO_STAMP
        if is_first or (self._is_dirty and now - self._published_at >= self._pace.publish_every_s):
            self.seal()

    def beat(self) -> None:
        """Makes a heartbeat due, where the last version is old."""
        now = asyncio.get_running_loop().time()
        if now - self._published_at >= self._pace.heartbeat_s:
            self._is_dirty = True

    @contextmanager
    def declared(self, **changes: Any) -> Iterator[None]:
        """Publishes the record as it will be after `changes`. Nothing else is published before the
        end of the block, and the own view does not see them."""
        self._measure_traffic()
        self._merge()
        self._publish(replace(self._record, **changes))
        self._is_join_declared = True
        try:
            yield
        finally:
            self._is_join_declared = False
            self._is_dirty = True

    def _publish(self, record: Record) -> SignedRecord:
        payload = pack(record)
        self._envelope = SignedRecord(payload, self._signer.sign(payload))
        self._is_dirty = False
        self._published_at = asyncio.get_running_loop().time()
        self.published = record.stamp
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
