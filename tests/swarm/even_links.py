"""Simulated swarms of equal machines on links that are alike, where messages take all the time."""

from __future__ import annotations

from typing import Any

from swarmnet.simulation.clock import run
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.swarm import Simulation


def simulate_even_links(way_s: float, *, peers: int, **changes: Any) -> None:
    """`way_s`: from one peer to another. `changes`: of the `Scenario`. Fails where the run
    breaks."""
    links = tuple(Link(1e9, 1e9, way_s / 2) for _ in range(peers))
    usual = {"seed": 1, "start_s": 0.5, "global_batch": 16, "service_s": 0.01, "speed_ratio": 1.0}
    scenario = Scenario(peers=peers, links=links, keep_log=False, **(usual | changes))

    async def simulated() -> None:
        result = await Simulation(scenario).run()
        assert result.broken is None

    run(simulated())
