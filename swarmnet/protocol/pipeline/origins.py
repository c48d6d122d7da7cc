"""Whose microbatches a replica takes, and who may bring them.

A slot belongs to the feeders of the run: nobody else's data are in an update. A feeder brings its
microbatches into the first stage itself. Into each other stage a replica of the stage before brings
them, which has computed what it brings. Both by the view: what a call says of its caller is no
title. What it says of the feeder is none either: the feeder has signed each microbatch.

A record makes nobody a replica that computes. So a caller that this peer has no reason to believe
in brings one microbatch at a time, until one has counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from swarmnet.protocol.membership.assignment import feeders
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.contests import waits_s

UNPROVEN_FLIGHTS = 1
"""That one caller may have here and that do not count yet, before anything of it has counted."""


class Origins:
    """What one replica knows of feeders. A peer that feeds no more, because it rests, leaves or
    moves, ends what it has begun: so whoever was a feeder in this round or in the one before may
    bring more of it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._found: tuple[int, Sequence[str]] = (-1, ())
        self._last: dict[str, int] = {}
        """By peer, the newest round in which it was seen to be a feeder, of this one and the one
        before."""

    def may_feed(self, feeder: str, present: int, now: float) -> bool:
        """Whether microbatches may be of a peer. `present`: the round here."""
        found = feeders(self._view, now)
        if found is not self._found[1] or present != self._found[0]:
            self._found = (present, found)
            kept = {p: r for p, r in self._last.items() if present - 1 <= r <= present}
            self._last = kept | dict.fromkeys(found, present)
        return feeder in self._last

    def may_bring(self, caller: str, feeder: str, stage: int) -> bool:
        """Whether a peer may bring microbatches of a feeder into a stage."""
        if stage == 0:
            return caller == feeder
        record = self._of_stage_before(caller, stage)
        return record is not None and record.state in (ACTIVE, LEAVING)

    def may_bring_more(
        self, caller: str, begun_at: Callable[[], Iterable[float]], usual_s: float, now: float
    ) -> bool:
        """Whether a peer may begin another flight here. `begun_at()`: when those did that do not
        count yet. `usual_s`: as of `contests.waits_s`; an older one may have counted unheard."""
        if caller == self._view.own_peer_id or self._view.reputation.works(caller):
            return True
        return sum(now - at <= waits_s(usual_s) for at in begun_at()) < UNPROVEN_FLIGHTS

    def may_pass_on(self, caller: str, stage: int) -> bool:
        """Whether a peer may have a stage other than the first go on with a forward pass alone,
        which leaves nothing behind: also a newcomer with parameters, which is on trial."""
        record = self._of_stage_before(caller, stage)
        return record is not None and (
            record.state in (ACTIVE, LEAVING) or (record.state == JOINING and bool(record.digests))
        )

    def _of_stage_before(self, caller: str, stage: int) -> Record | None:
        record = self._view.get(caller)
        return record if record is not None and record.stage == stage - 1 else None
