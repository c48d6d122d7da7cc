"""The max-flow bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.simulation.bound import (
    Capacity,
    CodingCosts,
    Integral,
    SampleCosts,
    best_flow,
    max_flow,
    replica_rate,
)

FAST = Capacity(8.0, 1e9, 1e9)
SIZES = SampleCosts(1000.0, 1000.0)


def test_the_poorest_stage_bounds_the_swarm() -> None:
    machines = [(0, FAST), (0, FAST), (1, FAST), (2, FAST), (2, FAST)]
    assert max_flow(machines, 3, SIZES) == 8.0


def test_a_stage_without_a_machine_stops_the_flow() -> None:
    assert max_flow([(0, FAST)], 2, SIZES) == 0.0


def test_a_slow_upload_bounds_a_machine_and_twice_in_the_middle() -> None:
    """It would compute 10 samples/s; its link carries 4 activations, or 2 and 2 gradients."""
    machine = Capacity(10.0, 4_000.0, 1e9)
    assert replica_rate(machine, 0, 3, SIZES) == 4.0
    assert replica_rate(machine, 1, 3, SIZES) == 2.0
    assert replica_rate(machine, 2, 3, SIZES) == 4.0
    assert replica_rate(machine, 0, 1, SIZES) == 10.0


def test_activations_and_gradients_of_other_sizes_go_either_way() -> None:
    """The first stage sends activations, the last one gradients, those between both."""
    machine, sizes = Capacity(100.0, 4_000.0, 3_000.0), SampleCosts(200.0, 50.0)
    rates = [replica_rate(machine, stage, 3, sizes) for stage in range(3)]
    assert rates == [4_000 / 200, 3_000 / 250, 3_000 / 200]


def test_no_assignment_beats_the_best() -> None:
    machines = [Capacity(float(s), 1e9, 1e9) for s in (1, 2, 3, 4)]
    best = best_flow(machines, 2, SIZES)
    splits = [
        max_flow([(i >> k & 1, m) for k, m in enumerate(machines)], 2, SIZES) for i in range(16)
    ]
    assert max(splits) == best == 5.0
    assert best_flow(machines[:1], 2, SIZES) == 0.0


def test_an_integral_of_a_rate_that_changes() -> None:
    integral = Integral()
    integral.set(2.0, 0.0)
    integral.set(5.0, 3.0)
    integral.set(0.0, 4.0)
    assert integral.total == pytest.approx(11.0)


CODED = SampleCosts(1.0, 1.0, CodingCosts(0.02, 0.08), CodingCosts(0.03, 0.02))
"""A tenth of a second is coded before it, and half of it after."""


def test_a_device_that_codes_computes_less() -> None:
    """It computes a sample in a tenth of a second."""
    machine, costs = Capacity(10.0, 1e9, 1e9), CODED
    rates = [replica_rate(machine, stage, 3, costs) for stage in range(3)]
    assert rates == pytest.approx([1 / 0.15, 1 / 0.25, 1 / 0.2])
    assert replica_rate(machine, 0, 1, costs) == 10.0


def test_a_coder_beside_the_device_costs_what_both_have_to_do_and_no_less() -> None:
    """The device may decode, not encode; a middle stage encodes for 0.05 s and decodes for 0.1."""
    costs = replace(CODED, is_beside=True)

    def rate(compute_s: float, costs: SampleCosts = costs) -> float:
        return replica_rate(Capacity(1.0 / compute_s, 1e9, 1e9), 1, 3, costs)

    assert rate(0.2) == pytest.approx(1 / 0.2), "all that is coded is coded meanwhile"
    assert rate(0.01) == pytest.approx(2 / 0.16), "both have as much to do"
    encoding = replace(costs, before=CodingCosts(0.5, 0.0), after=CodingCosts(0.0, 0.0))
    assert rate(0.01, encoding) == pytest.approx(1 / 0.5), "the coder encodes alone"
