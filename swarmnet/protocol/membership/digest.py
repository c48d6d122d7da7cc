"""The stamps of all records in a view, which gossip compares to find newer records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet.protocol.membership.records import NO_STAMP, Stamp

MAX_FORGOTTEN = 16_384
"""Peers remembered as forgotten at most."""


@dataclass(slots=True)
class _Forgotten:
    stamp: Stamp
    at: float


class Digest:
    """Stamps of the known records, and of those that were forgotten a while ago: another peer that
    forgets later would bring these back."""

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp] = {}
        self._forgotten: dict[str, _Forgotten] = {}

    def is_news(self, peer_id: str, stamp: Stamp) -> bool:
        """The stamp is higher than the one that is known, or that was forgotten."""
        known = self._stamps.get(peer_id)
        if known is None:
            forgotten = self._forgotten.get(peer_id)
            known = NO_STAMP if forgotten is None else forgotten.stamp
        return stamp > known

    def put(self, peer_id: str, stamp: Stamp) -> None:
        """A record with this stamp is known now."""
        self._stamps[peer_id] = stamp
        self._forgotten.pop(peer_id, None)

    def forget(self, peer_id: str, now: float) -> None:
        """The record of a known peer was dropped. The oldest forgotten stamp makes room."""
        stamp = self._stamps.pop(peer_id)
        if len(self._forgotten) >= MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        self._forgotten[peer_id] = _Forgotten(stamp, now)

    def expire(self, now: float, after_s: float) -> None:
        """Stamps that were forgotten `after_s` seconds ago, or earlier, may come in again."""
        if self._forgotten:
            self._forgotten = {p: f for p, f in self._forgotten.items() if now - f.at < after_s}

    # -- comparison ------------------------------------------------------------------------

    def stamps(self) -> dict[str, Stamp]:
        """Peer id to stamp, of the known records: what gossip sends."""
        return dict(self._stamps)

    def newer_than(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """Peer ids of records that the owner of `stamps` lacks or has older, sorted."""
        get = stamps.get
        return sorted(p for p, stamp in self._stamps.items() if stamp > get(p, NO_STAMP))

    def wanted_from(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """Peer ids of which the owner of `stamps` has newer records, sorted."""
        get = self._stamps.get
        wanted = [p for p, stamp in stamps.items() if stamp > get(p, NO_STAMP)]
        forgotten = self._forgotten
        return sorted(p for p in wanted if p not in forgotten or stamps[p] > forgotten[p].stamp)
