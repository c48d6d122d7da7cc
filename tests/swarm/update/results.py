"""Looking at what an exchange has brought so far."""

from __future__ import annotations

from swarmnet.swarm.update.averaging import Averaging


def results_at(averaging: Averaging) -> set[tuple[int, int]]:
    """(round, shard) of the results that a peer has of exchanges that are not over."""
    r = averaging.current
    return {(r, j) for j in averaging.results_of(r)}
