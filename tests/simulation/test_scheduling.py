"""Uneven machines on slow links are kept at work; virtual time, the production code."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from swarmnet.protocol.pipeline.admission import ASK_WORK_S
from swarmnet.protocol.sync_modes import LOCAL
from swarmnet.simulation.churn import ChurnRates
from swarmnet.simulation.clock import run
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario, large_swarm
from swarmnet.simulation.stage import Sizes
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


def test_a_slow_feeder_of_a_small_swarm_does_not_hold_up_fast_ones() -> None:
    """Of 3, 2 and 3 replicas, the slowest three times as slow as the fastest, all feeders have a
    third of a round. 0.61 of the bound where each does its own part at stage 0."""
    scenario = Scenario(
        seed=5,
        peers=8,
        stages=3,
        global_batch=256,
        samples_per_microbatch=8,
        service_s=0.2,
        link=Link(6.25e6, 12.5e6, 0.02231),
        sizes=Sizes(
            num_shards=8, shard_parameters=10_000, activation_numbers=8192, width=128, codec="none"
        ),
        sync_mode=LOCAL,
        local_steps=5,
        until_s=68.0,
        warmup_s=29.0,
        keep_log=False,
    )
    result = simulate(scenario)
    assert result.broken is None
    print(f"{result.fraction_of_bound:.3f} of the bound as they served")
    assert result.fraction_of_bound > 0.68
