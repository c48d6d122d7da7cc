"""Nobody stands alone while the others go on, whoever was stopped and whoever was killed."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmnet.simulation.churn import CRASH, JOIN, STALL, ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.islands import Islands, parts
from swarmnet.simulation.scenario import Result, Scenario
from swarmnet.simulation.swarm import Simulation, simulate

HOUR_S = 3600.0
SHORT_S = 180.0
SWARM, NUM_REPLACED, EVERY_S = 5, 60, 2.5
"""Peers, newcomers, and how often one comes in the place of another."""
STOPPED_AT_S, STOPPED_S = 155.0, 14.0

CHAOS_FROM_S, REPLACED_AFTER_S = 20.0, 2.0
"""Times of `chaotic_swarm`, seconds."""


def chaotic_swarm(until_s: float, seed: int = 0) -> Scenario:
    """`swarmnet local --peers 4 --chaos kill=20/min,stop=10/min`, and one peer that lasts: it may
    be stopped for so long that all peers that it knew are gone when it continues. The scenario is
    about islands; a swarm of five that loses one peer every three seconds cannot keep books of its
    rounds."""
    rng = random.Random(f"chaos {seed}")
    trace: list[ChurnEvent] = []
    at = CHAOS_FROM_S
    while (at := at + rng.expovariate(20 / 60)) < until_s:
        trace += [ChurnEvent(at, CRASH), ChurnEvent(at + REPLACED_AFTER_S, JOIN)]
    at = CHAOS_FROM_S
    while (at := at + rng.expovariate(10 / 60)) < until_s:
        # Half of the time it hits the peer that lasts.
        peer = "peer-0000" if rng.random() < 0.5 else ""
        trace.append(ChurnEvent(at, STALL, peer, rng.uniform(2.0, 12.0)))
    return Scenario(
        seed=seed,
        peers=5,
        stages=2,
        until_s=until_s,
        trace=tuple(sorted(trace, key=lambda e: e.at_s)),
        lasting=1,
        max_peers=6,
        global_batch=32,
        service_s=1.0,
        check_s=1.0,
        keeps_books=False,
        keep_log=False,
    )


def test_parts_are_found_by_who_sees_whom() -> None:
    sees = {"a": {"b"}, "b": set[str](), "c": {"a", "gone"}, "d": {"e"}, "e": {"e"}, "f": set()}
    assert parts(sees) == [["a", "b", "c"], ["d", "e"], ["f"]]
    assert parts({}) == []


def test_an_island_is_as_old_as_its_oldest_member() -> None:
    islands = Islands()
    assert islands.look({"a": {"b"}, "b": {"a"}, "c": set()}, 10.0) == 0.0
    assert islands.look({"a": {"b"}, "b": {"a"}, "c": set(), "d": set()}, 14.0) == 4.0
    assert islands.look({"a": {"b", "c"}, "b": set(), "c": set(), "d": set()}, 15.0) == 1.0
    assert islands.look({"a": {"b"}, "b": set()}, 30.0) == 0.0
    assert islands.longest_s == 4.0


def replaced_while_stopped() -> Scenario:
    """All but one peer are replaced, one after the other, for minutes: the views are full of the
    dead. Then that one is stopped until all whom it knew are dead too."""
    trace = []
    for number in range(SWARM, SWARM + NUM_REPLACED):
        at = 20.0 + EVERY_S * (number - SWARM)
        trace.append(ChurnEvent(at, JOIN))
        trace.append(ChurnEvent(at + 1.5, CRASH, f"peer-{number - SWARM + 1:04d}"))
    trace.append(ChurnEvent(STOPPED_AT_S, STALL, "peer-0000", STOPPED_S))
    return Scenario(
        seed=1,
        peers=SWARM,
        stages=1,
        until_s=STOPPED_AT_S + STOPPED_S + 60.0,
        trace=tuple(sorted(trace, key=lambda e: e.at_s)),
        lasting=1,
        global_batch=32,
        service_s=1.0,
        check_s=1.0,
        keeps_books=False,
        keep_log=False,
    )


def test_who_was_stopped_until_all_were_replaced_is_found_by_those_who_came() -> None:
    result = simulate(replaced_while_stopped())
    assert result.broken is None
    assert result.longest_island_s < 5.0


def test_an_island_is_noticed() -> None:
    """A cut that nobody has announced to the monitor."""
    simulation = Simulation(
        Scenario(seed=1, peers=4, stages=1, until_s=60.0, service_s=1.0, check_s=1.0)
    )

    async def main() -> Result:
        def cut() -> None:
            for number in range(1, 4):
                simulation.hub.partition("peer-0000", f"peer-{number:04d}")

        asyncio.get_running_loop().call_later(10.0, cut)
        return await simulation.run()

    broken = run(main()).broken
    assert broken is not None
    assert "islands" in broken
    assert "['peer-0000']" in broken


def test_chaos_makes_no_island() -> None:
    result = simulate(chaotic_swarm(SHORT_S, seed=1))
    assert result.broken is None
    assert result.faults["crash"] > 40


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_an_hour_of_chaos_makes_no_island(seed: int) -> None:
    result = simulate(chaotic_swarm(HOUR_S, seed))
    assert result.broken is None
    assert result.faults["crash"] > 1000
