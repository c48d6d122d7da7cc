"""Churn events and whom they hit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.simulation.churn import (
    CRASH,
    JOIN,
    LEAVE,
    ONE_WAY,
    PARTITION,
    REJOIN,
    STALL,
    ChurnEvent,
)
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.swarm import simulate

CALM = Scenario(seed=2, peers=2, stages=2, until_s=30.0, service_s=0.4)


def faults(scenario: Scenario, *events: ChurnEvent) -> dict[str, int]:
    result = simulate(replace(scenario, trace=events))
    assert result.broken is None
    return result.faults


@pytest.mark.parametrize("action", [CRASH, LEAVE, STALL, REJOIN, PARTITION, ONE_WAY])
def test_no_fault_hits_the_last_replica_of_a_stage(action: str) -> None:
    assert faults(CALM, ChurnEvent(15.0, action, duration_s=1.0)) == {}


def test_a_fault_ends_after_its_duration() -> None:
    swarm = replace(CALM, peers=4, stages=1)
    events = [
        ChurnEvent(10.0, REJOIN, "peer-0001", 2.0),
        ChurnEvent(11.0, STALL, "peer-0002", 2.0),
        ChurnEvent(14.0, PARTITION, "peer-0003", 2.0),
        ChurnEvent(28.0, ONE_WAY, "peer-0003", 20.0),
    ]
    counts = {REJOIN: 1, "back": 1, STALL: 1, "thaw": 1, PARTITION: 1, "healed": 1, ONE_WAY: 1}
    assert faults(swarm, *events) == counts


def test_lasting_peers_do_not_crash_and_no_more_join_than_may() -> None:
    swarm = replace(CALM, peers=3, stages=1, lasting=3, max_peers=4)
    crashes = [ChurnEvent(10.0 + n, CRASH) for n in range(5)]
    assert faults(swarm, *crashes) == {}
    joins = [ChurnEvent(10.0 + n, JOIN) for n in range(5)]
    assert faults(swarm, *joins) == {JOIN: 1}


def test_an_event_of_a_peer_that_is_gone_does_nothing() -> None:
    swarm = replace(CALM, peers=3, stages=1)
    twice = [ChurnEvent(at_s, CRASH, "peer-0001") for at_s in (10.0, 20.0)]
    assert faults(swarm, *twice) == {CRASH: 1}
