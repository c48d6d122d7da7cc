"""Which peers have the run's data, and how many are enough."""

from __future__ import annotations

from collections.abc import Iterable

from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View

ENOUGH_HOLDERS = 4
"""Live peers with data. While there are fewer, more fetch them unasked: the run survives the loss
of all but one, and the uplinks of the first ones carry little besides training."""


def only_holder(live: Iterable[Record]) -> Record | None:
    """The live peer without which nobody could feed; None where several could, or none."""
    found = [r for r in live if r.has_data and r.state == ACTIVE]
    return found[0] if len(found) == 1 else None


def givers(view: View, now: float) -> list[str]:
    """Ids of the other live peers that give the data to members, ascending."""
    return [r.peer_id for r in view.live(now) if r.serves_data and r.peer_id != view.own_peer_id]


def are_few(view: View, now: float) -> bool:
    """Whether more peers should have the data."""
    return sum(r.has_data for r in view.live(now)) < ENOUGH_HOLDERS
