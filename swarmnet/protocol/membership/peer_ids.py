"""The ids of peers: that of a machine, and those of its seats (see `seats`)."""

from __future__ import annotations

SEPARATOR = "/"


def machine_of(peer_id: str) -> str:
    """The machine's peer id, which is that of its first seat. Cheap; checks nothing."""
    return peer_id.partition(SEPARATOR)[0]
