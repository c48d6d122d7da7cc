"""Looking at what an exchange has brought so far."""

from __future__ import annotations

from swarmnet.swarm.update.exchanges import Exchanges


def results_at(exchanges: Exchanges) -> set[tuple[int, int]]:
    """(round, shard) of the results that a peer has of exchanges that are not over."""
    r = exchanges.current
    return {(r, j) for j in exchanges.results_of(r)}
