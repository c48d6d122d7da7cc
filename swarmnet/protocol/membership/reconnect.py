"""The search for members of the run that are remembered and not seen. Pure.

A swarm that was cut in two does not heal by itself: each side has forgotten the other, and a peer
that sees others does not miss them. So every peer goes on dialling the members that it remembers
and does not see, whether it is alone or not (as serf reconnects to failed members, hashicorp/serf
`serf/serf.go`). A member that answers is gossiped with, and both sides are one again.

The table has one row a member; each dial tries all of its addresses. The rest of a row between two
dials grows with the time for which the member has not been seen, as pauses do (`backoff`): the end
of a cut of ten minutes is found within one minute. Where more rows are due than may be dialled, the
ones most overdue in proportion to their rest come first, which are those that were seen lately.
Where none is due, one row is dialled every `ANSWER_S` seconds all the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnet.protocol.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import LEFT
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import LONG_AGO, Since
from swarmnet.protocol.timing import ANSWER_S

AGE_PART = 0.1
"""The rest of a row, as a part of the time for which its member has not been seen. It protects
from many dials of members that are gone for good, and finds the end of a cut of ten minutes within
one (tests/protocol/membership/test_reconnect.py)."""
AT_ONCE = 8
"""Concurrent dials at most."""
MAX_ROWS = 64


@dataclass(slots=True)
class Row:
    """A member that is looked for."""

    peer_id: str
    addresses: tuple[str, ...]
    since: float
    """Time since which it has not been seen."""
    tried_at: float
    rest_s: float = 0.0
    """Seconds to wait after the last dial."""
    tries: int = 0
    """Dials that have ended; none reached the member."""
    is_trying: bool = False

    def lateness(self, now: float) -> float:
        """Time since the last dial, divided by the rest; the row is due from 1 on."""
        return (now - self.tried_at) / self.rest_s if self.rest_s else math.inf

    def is_connection_dead(self, now: float) -> bool:
        """Whether a connection to it that is open leads nowhere: it has moved, or the way there
        has, and that takes a connection a minute to notice."""
        return now - self.since > ANSWER_S


class Reconnect:
    """The table of missing members. `look` updates it, `next` returns the member to dial now, and
    `ended` takes in the end of a dial that failed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._looked = Since()
        self._rows: dict[str, Row] = {}
        self._dialled_at = -math.inf

    def is_look_due(self, now: float, every_s: float) -> bool:
        """Whether it is time to look again which members are missing."""
        return self._looked.is_older(now, every_s)

    def look(self, missing: Mapping[str, Sequence[str]], now: float) -> list[Row]:
        """Those that are not looked for any more. `missing`: addresses of the members that are
        remembered and not seen, by peer id; the first `MAX_ROWS` of them are looked for, so those
        seen last should come first. One whose addresses have changed is dialled at once."""
        self._looked.begin(now)
        rows: dict[str, Row] = {}
        for peer_id, addresses in missing.items():
            if len(rows) >= MAX_ROWS:
                break
            row = self._rows.get(peer_id)
            if row is None:
                row = Row(peer_id, tuple(addresses), now, now)
            elif row.addresses != tuple(addresses):
                row.addresses, row.rest_s = tuple(addresses), 0.0
            rows[peer_id] = row
        over = [row for peer_id, row in self._rows.items() if peer_id not in rows]
        self._rows = rows
        return over

    def next(self, now: float) -> Row | None:
        """The member to dial now, or None. The dial counts as under way until `ended`."""
        if sum(row.is_trying for row in self._rows.values()) >= AT_ONCE:
            return None
        waiting = [row for row in self._rows.values() if not row.is_trying]
        first = max(waiting, key=lambda row: row.lateness(now), default=None)
        if first is None:
            return None
        if first.lateness(now) < 1.0 and now - self._dialled_at < ANSWER_S:
            return None
        first.is_trying, first.tried_at, self._dialled_at = True, now, now
        return first

    def ended(self, row: Row, now: float) -> None:
        """A dial did not reach its member, or the member did not come back into the view."""
        row.is_trying = False
        row.tries += 1
        wanted_s = min(max(FIRST_PAUSE_S, AGE_PART * (now - row.since)), LONGEST_PAUSE_S)
        row.rest_s = wanted_s * self._rng.uniform(0.8, 1.0)

    def is_looking(self) -> bool:
        """True while a member has not been tried yet, and may be there, also before the first
        `look`."""
        return self._looked.at == LONG_AGO or any(row.tries == 0 for row in self._rows.values())

    def rows(self) -> list[Row]:
        """The missing members, those seen last first."""
        return list(self._rows.values())


def missing_members(
    view: View, own_machine: str, remembered: Mapping[str, Sequence[str]], now: float
) -> dict[str, tuple[str, ...]]:
    """Machines that are not live, those seen last first, with their addresses, the newest first:
    what a record says, then what was remembered of other times or places."""
    live = [r for r in view.live(now) if view.reaches(r.peer_id, now)]
    if len(live) == len(view) and not remembered:
        return {}
    seen = {machine_of(r.peer_id) for r in live} | {own_machine}
    gone = [r for r in view.records() if machine_of(r.peer_id) not in seen]
    gone.sort(key=lambda r: (r.state == LEFT, view.detector.silent_s(r.peer_id, now), r.peer_id))
    missing: dict[str, dict[str, None]] = {}
    for record in gone:
        addresses = missing.setdefault(machine_of(record.peer_id), {})
        addresses.update(dict.fromkeys(record.addresses))
    for peer_id, saved in remembered.items():
        if peer_id not in seen:
            missing.setdefault(peer_id, {}).update(dict.fromkeys(saved))
    return {p: tuple(addresses) for p, addresses in missing.items()}
