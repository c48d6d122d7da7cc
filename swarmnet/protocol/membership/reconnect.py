"""Whom to look for: members of the run that are remembered and not seen. Pure.

A swarm that was cut in two does not mend by itself: each side has forgotten to talk to the other,
and who is on a side with others does not miss them. So every peer goes on dialling whom it
remembers and does not see, whether it is alone or not (as serf reconnects to failed members,
hashicorp/serf `serf/serf.go`); whoever answers is gossiped with, and both sides are one again.

One row a member; each dial tries all of its addresses. How long a row rests grows with the time
for which the member has not been seen, from `FIRST_S` to `LONGEST_S`: of a cut of ten minutes the
end is found within one. Where more rows are due than may be dialled, the ones most overdue in
proportion to their rest come first, which are those that were seen lately. Where none is due, some
row is dialled every `EVERY_S` all the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_S, LONGEST_S = 1.0, 600.0
"""Between two dials of one member."""
AGE_PART = 0.1
"""The rest of a row, as a part of the time for which its member has not been seen."""
EVERY_S = 10.0
"""At least one dial of any member within this time."""
LEAST_PAUSE_S = 0.25
"""Between the starts of two dials."""
AT_ONCE = 8
"""Dials that are under way at a time, at most."""
MAX_ROWS = 64


@dataclass(slots=True)
class Row:
    """A member that is looked for."""

    peer_id: str
    addresses: tuple[str, ...]
    since: float
    """From when it has not been seen."""
    tried_at: float
    rest_s: float = 0.0
    """After the last dial."""
    tries: int = 0
    """Dials that have ended; none reached it."""
    is_trying: bool = False

    def lateness(self, now: float) -> float:
        """Time since the last dial over the rest; due from 1 on."""
        return (now - self.tried_at) / self.rest_s if self.rest_s else math.inf


class Reconnect:
    """The table. `look` says who is missing, `next` whom to dial now, `ended` that it was tried."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rows: dict[str, Row] = {}
        self._dialled_at = -math.inf

    def look(self, missing: Mapping[str, Sequence[str]], now: float) -> None:
        """`missing`: addresses of the members that are remembered and not seen, by peer id; the
        first `MAX_ROWS` of them are looked for, so those seen last should come first. One whose
        addresses have changed is dialled at once."""
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
        self._rows = rows

    def next(self, now: float) -> Row | None:
        """Whom to dial now; counts as under way until `ended`."""
        if now - self._dialled_at < LEAST_PAUSE_S:
            return None
        if sum(row.is_trying for row in self._rows.values()) >= AT_ONCE:
            return None
        waiting = [row for row in self._rows.values() if not row.is_trying]
        first = max(waiting, key=lambda row: row.lateness(now), default=None)
        if first is None:
            return None
        if first.lateness(now) < 1.0 and now - self._dialled_at < EVERY_S:
            return None
        first.is_trying, first.tried_at, self._dialled_at = True, now, now
        return first

    def ended(self, row: Row, now: float) -> None:
        """A dial did not reach its member, or what was said there did not bring it back."""
        row.is_trying = False
        row.tries += 1
        wanted_s = min(max(FIRST_S, AGE_PART * (now - row.since)), LONGEST_S)
        row.rest_s = wanted_s * self._rng.uniform(0.8, 1.0)

    def is_looking(self) -> bool:
        """Somebody has not been tried yet: he may be there."""
        return any(row.tries == 0 for row in self._rows.values())

    def rows(self) -> list[Row]:
        """Who is looked for, those seen last first."""
        return list(self._rows.values())
