"""The assignments that the swarm's own is compared with."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.assignments import (
    ADAPTIVE,
    ASSIGNMENTS,
    STATIC,
    SWARM,
    StaticAssignment,
    SwarmRebalancing,
    with_assignment,
)
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.churn import ChurnRates
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.swarm import simulate


def view_of(stages: dict[int, int], own: str = "s0-0") -> View:
    """So many replicas of each stage, all equally fast."""
    view = View(own, silence_s=1e9)
    for stage, number in stages.items():
        for i in range(number):
            record = Record(
                f"s{stage}-{i}", "run", 1, 1, state=ACTIVE, stage=stage, samples_per_s=1.0
            )
            view.merge(record, 0.0)
    return view


def test_static_covers_empty_stages_first_and_never_moves() -> None:
    static = StaticAssignment()
    rng = random.Random(0)
    view = view_of({0: 5, 1: 1})
    assert {static.choose(view, 3, 0.0, rng) for _ in range(20)} == {2}
    drawn = {static.choose(view_of({0: 5, 1: 1, 2: 1}), 3, 0.0, rng) for _ in range(50)}
    assert drawn == {0, 1, 2}
    assert static.propose(view, 3, 0.0, margin=0.0) is None


def test_swarm_moves_one_from_the_richest_to_the_poorest_once_a_period() -> None:
    view = view_of({0: 5, 1: 2, 2: 3})
    first = SwarmRebalancing().propose(view, 3, 301.0, margin=0.15)
    assert first is not None
    assert (first.source, first.target) == (0, 1)
    others = [
        SwarmRebalancing().propose(view_of({0: 5, 1: 2, 2: 3}, own), 3, 310.0, margin=0.15)
        for own in ("s1-0", "s2-2")
    ]
    assert all(o == first for o in others), "all name the same peer"
    mover = SwarmRebalancing()
    own_view = view_of({0: 5, 1: 2, 2: 3}, first.peer_id)
    assert mover.propose(own_view, 3, 301.0, margin=0.15) == first
    assert mover.propose(own_view, 3, 310.0, margin=0.15) is None
    assert mover.propose(own_view, 3, 450.0, margin=0.15) is None, "between two periods"
    assert mover.propose(view_of({0: 1, 1: 0}), 2, 601.0, margin=0.15) is None


def test_only_swarm_changes_the_limits() -> None:
    scenario = Scenario()
    assert with_assignment(scenario, ADAPTIVE) is scenario
    assert with_assignment(scenario, STATIC).limits == scenario.limits
    assert with_assignment(scenario, SWARM).limits.move_cooldown_s == 0.0


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == ADAPTIVE else [pytest.mark.long]) for n in ASSIGNMENTS],
)
def test_every_assignment_holds_the_invariants(name: str) -> None:
    scenario = Scenario(
        seed=5,
        peers=8,
        stages=2,
        until_s=40.0,
        service_s=0.2,
        churn=ChurnRates(join=360.0, crash=360.0),
        keep_log=False,
    )
    scenario = with_assignment(scenario, name, every_s=10.0)
    result = simulate(scenario)
    assert result.broken is None
    assert sum(result.breakdown.values()) == pytest.approx(1.0)
    assert result.breakdown["at work"] > 0.1
    assert simulate(replace(scenario)).log_hash == result.log_hash
