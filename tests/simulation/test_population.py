from __future__ import annotations

from swarmnet.simulation.churn import CRASH, ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.network import FAST_LINK, Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.swarm import Simulation

SLOW = Link(1e6, 1e6, 0.1)


def test_machines_have_the_links_of_the_scenario_and_speeds_of_its_seed() -> None:
    population = Simulation(Scenario(seed=4, links=(SLOW,), speed_ratio=9.0)).population
    hosts = [population.add_host() for _ in range(3)]
    assert [h.name for h in hosts] == ["peer-0000", "peer-0001", "peer-0002"]
    assert [h.link for h in hosts] == [SLOW, FAST_LINK, FAST_LINK]
    assert all(1 / 3 <= h.speed <= 3 for h in hosts)
    again = Simulation(Scenario(seed=4, speed_ratio=9.0)).population
    assert [again.add_host().speed for _ in hosts] == [h.speed for h in hosts]


def test_counters_of_the_dead_are_kept() -> None:
    crash = (ChurnEvent(20.0, CRASH, "peer-0001"),)
    scenario = Scenario(seed=2, peers=3, stages=1, until_s=20.5, service_s=0.4, trace=crash)

    async def main() -> None:
        simulation = Simulation(scenario)
        population, members = simulation.population, simulation.monitor.members
        await simulation.play()
        assert sorted(members) == ["peer-0000", "peer-0002"]
        sent = sum(sum(m.peer.transport.traffic.sent_bytes.values()) for m in members.values())
        assert population.sent_bytes().total > sent
        assert 0 < population.sent_bytes().control < population.sent_bytes().total
        await population.close()
        assert all(host.life is None or host.life.done() for host in population.hosts.values())

    run(main(), seed=0)
