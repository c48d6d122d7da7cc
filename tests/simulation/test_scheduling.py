"""Uneven machines on slow links are kept at work; virtual time, the production code."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from swarmnet.protocol.pipeline.admission import ASK_WORK_S
from swarmnet.simulation.churn import ChurnRates
from swarmnet.simulation.clock import run
from swarmnet.simulation.scenario import large_swarm
from swarmnet.simulation.swarm import Simulation, simulate


def test_uneven_machines_on_home_links_are_kept_at_work() -> None:
    """Speeds 10:1, log-normal links, three stages; within one round, nobody comes or goes."""
    scenario = replace(large_swarm(18, 3, 260.0, ChurnRates()), warmup_s=120.0, check_s=20.0)
    result = simulate(scenario)
    assert result.broken is None
    print(f"{result.fraction_of_bound:.3f} of the bound as they served")
    assert result.fraction_of_bound > 0.75
    assert result.rerouted <= 20


def early_replicas(simulation: Simulation) -> int:
    """Replicas that have begun a round of which not even the one before is launched."""
    peers = [m.peer for m in simulation.monitor.members.values()]
    launched: defaultdict[int, int] = defaultdict(int)
    """By round, a mask."""
    for count in (c for p in peers for c in p.gossip.own.counts):
        launched[count.round] |= count.launched.mask
    ahead = [p.replica.round for p in peers if p.replica is not None and p.replica.ahead]
    return sum(launched[r].bit_count() < simulation.scenario.num_slots for r in ahead)


def test_fast_feeders_go_on_while_slow_ones_launch_their_last() -> None:
    """Nobody knows at once what nineteen others have launched; who has done its part does not wait
    until it does, and the round counts its batch all the same. Work so short is begun at home."""
    work_s = ASK_WORK_S / 2
    scenario = large_swarm(20, 2, 50.0, ChurnRates(), service_s=work_s, microbatches_per_replica=30)
    fast = replace(scenario, home_links=False, check_s=0.5, warmup_s=10.0)
    early: list[int] = []

    def watch() -> bool:
        early.append(early_replicas(simulation))
        return False

    simulation = Simulation(fast, stop=watch)
    result = run(simulation.run(), seed=0)
    assert result.broken is None
    assert result.rounds >= 2
    assert sum(early) > 0
    assert result.samples_lost == 0
    print(f"{result.fraction_of_bound:.3f} of the bound as they served")
