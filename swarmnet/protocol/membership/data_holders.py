"""Which peers have the run's data, how many are enough, and which are asked for them. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View

ENOUGH_HOLDERS = 4
"""Live peers with data. While there are fewer, more fetch them unasked: the run survives the loss
of all but one, and the uplinks of the first ones carry little besides training."""
MAX_ASKED_SIZES = 8
"""Peers that are asked how much the data are, before any of them is believed."""

ClaimT = TypeVar("ClaimT", bound=Hashable)


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


class Givers:
    """The peers that one asks for the data."""

    def __init__(self) -> None:
        self._liars: set[str] = set()
        self._aside_until: dict[str, float] = {}

    def lied(self, peer_id: str) -> None:
        """A peer gave other data than the run's."""
        self._liars.add(peer_id)

    def gave_nothing(self, peer_id: str, now: float, pause_s: float) -> None:
        """A peer is not asked again before `pause_s` have passed."""
        self._aside_until[peer_id] = now + pause_s

    def to_ask(self, view: View, now: float, *, at_once: bool) -> list[str]:
        """Whom to ask now; nobody where enough peers have the data, unless this one is to have them
        at once."""
        if not at_once and not are_few(view, now):
            return []
        self._liars = {p for p in self._liars if view.get(p) is not None}
        self._aside_until = {p: at for p, at in self._aside_until.items() if at > now}
        return [p for p in givers(view, now) if p not in self._liars and p not in self._aside_until]


def in_order(claims: Mapping[ClaimT, int], said_by: Mapping[str, ClaimT]) -> list[ClaimT]:
    """What peers say of the data, in the order in which it is believed, until their hashes tell:
    what most say, and of that the smallest. `claims`: with the bytes that each has to do with;
    `said_by`: what each peer says."""
    votes = list(said_by.values())
    return sorted(claims, key=lambda claim: (-votes.count(claim), claims[claim]))
