"""Uneven machines on slow links are kept at work; virtual time, the production code."""

from __future__ import annotations

from dataclasses import replace

from swarmnet.simulation.churn import ChurnRates
from swarmnet.simulation.scenario import large_swarm
from swarmnet.simulation.swarm import simulate


def test_uneven_machines_on_home_links_are_kept_at_work() -> None:
    """Speeds 10:1, log-normal links, three stages; within one round, nobody comes or goes."""
    scenario = replace(large_swarm(24, 3, 360.0, ChurnRates()), warmup_s=160.0, check_s=20.0)
    result = simulate(scenario)
    assert result.broken is None
    print(f"{result.fraction_of_bound:.3f} of the bound as they served")
    assert result.fraction_of_bound > 0.75
    assert result.rerouted <= 20
