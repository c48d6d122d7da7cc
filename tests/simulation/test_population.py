from __future__ import annotations

from swarmnet.simulation.churn import CRASH, ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.network import FAST_LINK, Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import Sizes
from swarmnet.simulation.swarm import Simulation, simulate

SLOW = Link(1e6, 1e6, 0.1)


def test_machines_have_the_links_of_the_scenario_and_speeds_of_its_seed() -> None:
    population = Simulation(Scenario(seed=4, links=(SLOW,), speed_ratio=9.0)).population
    hosts = [population.add_host() for _ in range(3)]
    assert [h.name for h in hosts] == ["peer-0000", "peer-0001", "peer-0002"]
    assert [h.link for h in hosts] == [SLOW, FAST_LINK, FAST_LINK]
    assert all(1 / 3 <= h.speed <= 3 for h in hosts)
    again = Simulation(Scenario(seed=4, speed_ratio=9.0)).population
    assert [again.add_host().speed for _ in hosts] == [h.speed for h in hosts]


def test_machines_of_a_house_have_the_link_of_its_first() -> None:
    scenario = Scenario(seed=4, home_links=True, house=2)
    hosts = [h for p in [Simulation(scenario).population] for h in (p.add_host() for _ in range(4))]
    assert [h.link for h in hosts[1::2]] == [h.link for h in hosts[::2]]
    assert hosts[0].link != hosts[2].link


def test_households_are_worth_what_a_slow_uplink_carries_less() -> None:
    """A round takes 4 s of computing, and about 8 s of the busier uplink, or half as much."""
    rates = []
    for has_households in (False, True):
        scenario = Scenario(
            peers=4,
            stages=1,
            link=Link(1e6, 5e6, 0.01),
            house=2,
            has_households=has_households,
            global_batch=16,
            samples_per_microbatch=1,
            service_s=1.0,
            speed_ratio=1.0,
            sizes=Sizes(num_shards=8, shard_parameters=250_000, update_codec="none"),
            warmup_s=60.0,
            until_s=240.0,
            keep_log=False,
        )
        result = simulate(scenario)
        assert result.broken is None
        rates.append(result.samples_per_s)
    assert rates[1] > 1.25 * rates[0]


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
