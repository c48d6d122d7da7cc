"""Service times from announcements and from round trips through the rest of the pipeline."""

from __future__ import annotations

import pytest

from swarmnet.protocol.pipeline.service_estimates import (
    FIRST_SERVICE_S,
    ServiceEstimates,
)
from swarmnet.protocol.timing import SMOOTHING

SAMPLES = 8.0


def estimates_of(**samples_per_s: float) -> ServiceEstimates:
    estimates = ServiceEstimates(SAMPLES)
    estimates.announce(samples_per_s)
    return estimates


def test_an_announced_throughput_is_the_first_guess() -> None:
    estimates = estimates_of(fast=80.0, slow=20.0)
    assert estimates.all() == {"fast": 0.1, "slow": 0.4}
    assert estimates.usual_s == 0.25
    assert not estimates.is_measured("fast")


def test_where_nothing_is_announced_all_are_guessed_alike() -> None:
    estimates = estimates_of(a=0.0, b=float("inf"))
    assert estimates.all() == {"a": FIRST_SERVICE_S, "b": FIRST_SERVICE_S}
    assert estimates.usual_s is None
    estimates.measure("a", 0.3, crowd=1)
    assert estimates.seconds("b") == estimates.seconds("a")


def test_guesses_are_on_the_scale_of_the_measured() -> None:
    estimates = ServiceEstimates()
    estimates.announce({"a": 10.0, "b": 5.0})
    estimates.measure("a", 0.3, crowd=1)
    assert estimates.seconds("b") == pytest.approx(2 * estimates.seconds("a"))


def test_the_way_behind_the_stage_and_the_own_queue_are_no_service_time() -> None:
    """Device times 0.1 and 0.4 s, 2 s behind them; three own calls queued at the fast replica."""
    estimates = estimates_of(fast=80.0, slow=20.0)
    estimates.measure("slow", 0.4 + 2.0, crowd=1)
    estimates.measure("fast", 3 * 0.1 + 2.0, crowd=3)
    assert estimates.seconds("slow") == pytest.approx(0.4)
    assert estimates.seconds("fast") == pytest.approx(0.1)


def test_a_delay_that_nothing_explains_is_shared_among_the_own_calls() -> None:
    estimates = estimates_of(a=80.0, b=80.0)
    estimates.measure("a", 0.1, crowd=1)
    estimates.measure("b", 0.1 + 4 * 0.1 + 0.4, crowd=4)
    assert estimates.seconds("b") == pytest.approx(0.1 + 0.5 / 4)


def test_one_slow_call_is_forgotten_though_few_calls_follow_it() -> None:
    """The more calls go to others meanwhile, the more the next one counts."""
    for calls_of_others, wanted in ((1, 0.9), (30, 0.5), (300, 0.1)):
        estimates = estimates_of(a=80.0, b=80.0)
        estimates.measure("a", 0.1, crowd=1)
        estimates.measure("b", 1.1, crowd=1)
        assert estimates.seconds("b") == pytest.approx(1.1)
        for _ in range(calls_of_others):
            estimates.measure("a", 0.1, crowd=1)
        estimates.measure("b", 0.1, crowd=1)
        assert estimates.seconds("b") - 0.1 <= wanted + 1e-9
        assert calls_of_others > 1 or estimates.seconds("b") - 0.1 == pytest.approx(0.9)


def test_later_measurements_move_an_average() -> None:
    estimates = estimates_of(a=80.0, b=80.0)
    estimates.measure("b", 0.1, crowd=1)
    estimates.measure("a", 0.1, crowd=1)
    estimates.measure("a", 1.1, crowd=1)
    assert estimates.seconds("a") == pytest.approx(0.1 + SMOOTHING * 1.0)


def test_an_absent_replica_keeps_its_estimate_until_it_is_dropped() -> None:
    estimates = estimates_of(a=80.0, b=40.0)
    estimates.measure("b", 0.5, crowd=1)
    before = estimates.seconds("b")
    estimates.announce({"a": 80.0})
    assert estimates.seconds("b") == before
    assert estimates.usual_s == 0.1, "of those that are there"
    estimates.drop("b")
    assert list(estimates.all()) == ["a"]
