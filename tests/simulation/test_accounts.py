from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.simulation.accounts import SAMPLES_KEPT
from swarmnet.simulation.scenario import Sample, Scenario
from swarmnet.simulation.swarm import simulate

SCENARIO = Scenario(seed=2, peers=4, stages=1, until_s=60.0, service_s=0.4, keep_log=False)


def test_the_curve_adds_up_to_the_samples_of_the_run() -> None:
    seen: list[Sample] = []
    result = simulate(SCENARIO, on_sample=seen.append)
    assert tuple(seen) == result.samples_over_time
    assert 0 < len(seen) <= SAMPLES_KEPT
    begins = [0.0, *(s.at_s for s in seen)]
    samples = sum(s.samples_per_s * (s.at_s - at) for s, at in zip(seen, begins, strict=False))
    assert samples == pytest.approx(result.samples, rel=0.02)
    assert all(s.bound_per_s <= s.best_per_s + 1e-9 for s in seen)


def test_rates_leave_the_warmup_out() -> None:
    cold = simulate(SCENARIO)
    warm = simulate(replace(SCENARIO, warmup_s=30.0))
    assert warm.log_hash == cold.log_hash, "it is the same history"
    assert warm.bound_per_s > cold.bound_per_s, "nobody serves at first"
    assert warm.samples_per_s > cold.samples_per_s
    assert sum(warm.breakdown.values()) == pytest.approx(1.0)
