"""How often a peer gossips and with whom, and when it publishes its own record anew. Pure.

In a large swarm both are slower, so that the control traffic of a peer stays bounded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.protocol.membership.assignment import feeders
from swarmnet.protocol.membership.failure_detector import SILENCE_S, TICK_S
from swarmnet.protocol.membership.records import NO_STAMP, Record, Stamp
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import Since

PUSH_FANOUT = 16
"""Peers to which urgent news is pushed at most."""
COUNTED_PART = 0.5
"""Of the exchanges of records, those that are with peers that count, however many others there
are."""


REFUTE_EVERY_S = TICK_S
"""Suspicions of a peer that come within this time have one answer. It protects from signing, and
sending to all, for each message of a stranger (tests/protocol/membership/test_pace.py)."""


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """Of a swarm that a push reaches. In a larger one all but the last are longer in proportion to
    the number of live peers, all of whose stamps travel with an exchange."""

    interval_s: float = 0.4
    """Between two exchanges of records with a random peer: what no push has brought comes with
    them. It protects from news that is lost (tests/swarm/membership/test_urgent_news.py)."""
    heartbeat_s: float = 1.0
    """A record is sealed anew so often. It protects peers that have nothing to say from seeming
    dead (tests/swarm/membership/test_own_record.py)."""
    silence_s: float = SILENCE_S
    """A peer whose record has not changed for so long is silent."""
    push_delay_s: float = 0.01
    """Changes within this time are pushed together. It protects from a message for each of them
    (tests/swarm/membership/test_pushes.py)."""


class GossipPace:
    """The intervals of gossip in a swarm of the present size: of the peers that count."""

    def __init__(self, settings: GossipSettings, view: View) -> None:
        self._settings = settings
        self._view = view
        self._num_counted: int | None = None
        self.interval_s = settings.interval_s
        self.heartbeat_s = settings.heartbeat_s

    @property
    def _num_peers(self) -> int:
        known = len(self._view)
        return known if self._num_counted is None else min(known, self._num_counted)

    @property
    def is_small(self) -> bool:
        """A push reaches every peer."""
        num_counted = self._num_counted
        if num_counted is not None and num_counted <= PUSH_FANOUT:
            return True
        return len(self._view) <= PUSH_FANOUT

    @property
    def publish_every_s(self) -> float:
        """Changes that are not urgent are collected for so long."""
        return 0.0 if self.is_small else self.interval_s

    @property
    def spread_s(self) -> float:
        """About how long it takes until news that is not urgent is known everywhere."""
        if self.is_small:
            return 0.0
        return self.interval_s * math.log2(max(1, self._num_peers)) + self.publish_every_s

    def adapt(self, num_counted: int) -> None:
        """Sets the intervals for a swarm of `num_counted` live peers that count, and after what
        silence the view counts a peer as dead. What a peer sends and hears in a second then does
        not grow with the swarm."""
        self._num_counted = num_counted
        settings, part = self._settings, max(1.0, num_counted / PUSH_FANOUT)
        self.interval_s = part * settings.interval_s
        self.heartbeat_s = part * settings.heartbeat_s
        self._view.set_silence(part * settings.silence_s)


class Publishing:
    """Of a peer's own record: which version others may know, and when the next one is due."""

    def __init__(self) -> None:
        self.stamp: Stamp = NO_STAMP
        """Of the newest version that others may know."""
        self._last = Since(0.0)
        self._is_dirty = False
        """A change, or a heartbeat, is to be published."""
        self._is_held = False
        """What is published stays as it is until the join that it declares."""

    @property
    def has_news(self) -> bool:
        """There is something to publish, and it may be."""
        return self._is_dirty and not self._is_held

    def is_due(self, now: float, every_s: float) -> bool:
        """Whether to publish what is not urgent, which is collected for `every_s` after the last
        version."""
        if self.stamp == NO_STAMP:
            return True
        return self._is_dirty and self._last.is_older(now, every_s)

    def changed(self) -> None:
        """The record is another one than others know."""
        self._is_dirty = True

    def beat(self, now: float, every_s: float) -> None:
        """A version that old is followed by another one, though nothing may have changed."""
        if self._last.is_older(now, every_s):
            self._is_dirty = True

    def published(self, stamp: Stamp, now: float) -> None:
        """Others may know this version from now on."""
        self.stamp = stamp
        self._is_dirty = False
        self._last.begin(now)

    def hold(self) -> None:
        """The last version declares what is to come: none follows it before `release`."""
        self._is_held = True

    def release(self) -> None:
        """What was declared has happened, or will not."""
        self._is_held = False
        self._is_dirty = True


class Refutations:
    """Suspicions of this peer that it has not answered yet. Each takes a new version of its record,
    signed and pushed, so those that come close together have one answer."""

    def __init__(self) -> None:
        self._suspected = NO_STAMP
        self._last = Since()

    def heard(self, stamp: Stamp) -> None:
        """A suspicion of the version with this stamp."""
        self._suspected = max(self._suspected, stamp)

    def due(self, now: float) -> Stamp | None:
        """The newest version that is suspected, where it is to be refuted now."""
        if self._suspected == NO_STAMP or not self._last.is_due(now, REFUTE_EVERY_S):
            return None
        suspected, self._suspected = self._suspected, NO_STAMP
        return suspected


def partner(view: View, connected: Iterable[str], rng: random.Random, now: float) -> str | None:
    """A random live peer, to exchange records with: every other time one that counts, where not
    all do. `connected`: machines to which a channel is open, where no peer is live."""
    own, live, counted = view.own_peer_id, view.live(now), view.counted(now)
    if len(counted) < len(live) and len(counted) > 1 and rng.random() < COUNTED_PART:
        live = counted
    if len(live) > 1:
        drawn = rng.choice(live).peer_id
        if drawn != own and view.reaches(drawn, now):
            return drawn
    pool = [r.peer_id for r in live if r.peer_id != own and view.reaches(r.peer_id, now)]
    pool = pool or [p for p in connected if p != own]
    return rng.choice(pool) if pool else None


def push_targets(
    view: View, connected: Iterable[str], fanout: int, rng: random.Random, now: float
) -> list[str]:
    """All live peers that count, with others up to `PUSH_FANOUT`, or, where more count, `fanout`
    of them. Half of these are the first of the feeders, so that some peer has all the urgent news
    and sees at once that a round is over; the others are drawn. `connected`: as of `partner`."""

    def reached(records: Iterable[Record]) -> list[str]:
        return [p for r in records if (p := r.peer_id) != own and view.reaches(p, now)]

    own = view.own_peer_id
    live = reached(view.counted(now))
    if len(live) <= PUSH_FANOUT:
        others = sorted({*reached(view.live(now)), *connected} - {own, *live})
        room = PUSH_FANOUT - len(live)
        return sorted([*live, *(others if len(others) <= room else rng.sample(others, room))])
    first = first_targets(view, fanout, now)
    drawn = rng.sample(live, fanout)
    return [*first, *(p for p in drawn if p not in first)][:fanout]


def first_targets(view: View, fanout: int, now: float) -> list[str]:
    """The first of the feeders, which are told all urgent news."""
    first = feeders(view, now)[: fanout // 2 + 1]
    return [p for p in first if p != view.own_peer_id][: fanout // 2]
