"""Whose records go first, where there is neither time nor room for all. Pure.

An identity costs nothing, and so does a record that says that it serves. So what counts is what
this peer has seen."""

from __future__ import annotations

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, OBSERVER_STAGE
from swarmnet.protocol.membership.view import View


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
