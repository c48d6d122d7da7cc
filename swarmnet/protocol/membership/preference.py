"""Whose records go first, where there is neither time nor room for all. Pure.

An identity costs nothing, and so does a record that says that it serves. So what counts is what
this peer has seen."""

from __future__ import annotations

import random
from collections.abc import Iterable

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, OBSERVER_STAGE
from swarmnet.protocol.membership.view import View


def num_that_fit(sizes: Iterable[int], most_bytes: int, most: int) -> int:
    """How many of the first of these, of so many bytes each, have room together."""
    num, total = 0, 0
    for num_bytes in sizes:
        total += num_bytes
        if num == most or total > most_bytes:
            break
        num += 1
    return num


def in_order(view: View, peer_ids: Iterable[str], rng: random.Random, now: float) -> list[str]:
    """Peers in the order in which they get room that not all have: this one, those that matter, and
    then the others; drawn anew each time, so that all have their turn."""
    drawn = sorted(set(peer_ids))
    rng.shuffle(drawn)
    own = view.own_peer_id
    return sorted(drawn, key=lambda p: (p != own, not matters(view, p, now)))


def matters(view: View, peer_id: str, now: float) -> bool:
    """Whether a peer serves or feeds in the run, as far as this one can tell: it says so, there is
    a channel to it, and it has not failed to answer."""
    record = view.get(peer_id)
    return (
        record is not None
        and record.stage != OBSERVER_STAGE
        and record.state in (JOINING, ACTIVE, LEAVING)
        and view.detector.has_channel(peer_id)
        and view.reaches(peer_id, now)
    )
