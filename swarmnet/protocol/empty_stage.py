"""The wait of a peer before it begins a stage that nobody serves."""

from __future__ import annotations

from swarmnet.protocol.membership.records import OBSERVING
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.recovery import RESTORE_PATIENCE_S
from swarmnet.protocol.timing import PATIENCE_S

EMPTY_STAGE_S = 2.0
"""Time for which a stage must have had no replica before a joiner begins it from its initial state.
It protects the parameters of a stage of which news is on its way
(tests/swarm/membership/test_membership.py)."""
ALONE_S = PATIENCE_S
"""The same where no peer of a run that has begun can be heard of."""


def known_round(view: View) -> int:
    """The newest round that any peer, live or not, is known to have served in. One that serves no
    stage yet only names a round."""
    served = (r.round for r in view.records() if r.stage >= 0 and r.state != OBSERVING)
    return max(served, default=0)


def patience_s(view: View, stage: int, now: float) -> float:
    """Seconds for which a stage must have had no replica. In a run that goes on already, one may
    yet be heard of, and one that did not leave may be back with what it has saved; where no peer of
    such a run is live, it is rather this peer that is cut off."""
    if not progress.newest_round(view, now):
        return ALONE_S if known_round(view) else 0.0
    here = (r for r in view.records() if r.stage == stage)
    may_be_back = any(r.is_replica and r.round and r.peer_id != view.own_peer_id for r in here)
    return RESTORE_PATIENCE_S if may_be_back else EMPTY_STAGE_S
