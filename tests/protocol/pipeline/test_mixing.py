"""Shares of sources are exact in any consecutive samples, and positions and lengths agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.pipeline.mixing import PATTERN, Mixture, check_weights

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 10**6))
def test_any_consecutive_samples_hold_the_shares(weights: list[float], start: int) -> None:
    mixture = Mixture.of(weights)
    found = [mixture.at(p)[0] for p in range(start, start + PATTERN)]
    for k, weight in enumerate(weights):
        assert abs(found.count(k) - PATTERN * weight / sum(weights)) < 1


@given(WEIGHTS)
def test_sources_take_turns_evenly(weights: list[float]) -> None:
    mixture = Mixture.of(weights)
    for k, weight in enumerate(weights):
        taken = 0
        for n, source in enumerate(mixture.sources, 1):
            taken += source == k
            assert abs(taken - n * weight / sum(weights)) < 2


@given(WEIGHTS, st.integers(0, 5000))
def test_a_source_counts_its_own_samples(weights: list[float], start: int) -> None:
    mixture = Mixture.of(weights)
    seen: dict[int, int] = {}
    for p in range(start, start + 2 * PATTERN):
        source, n = mixture.at(p)
        assert n == seen.get(source, n)
        seen[source] = n + 1


@given(WEIGHTS, st.data())
def test_the_shortest_row_with_so_many_samples(weights: list[float], data: st.DataObject) -> None:
    mixture = Mixture.of(weights)
    source = data.draw(st.integers(0, len(weights) - 1))
    wanted = data.draw(st.integers(1, 3000))
    length = mixture.length_with(source, wanted)
    assert mixture.at(length - 1) == (source, wanted - 1)
    assert mixture.length_with(source, 0) == 0


def test_a_source_without_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 of 1000"):
        check_weights([1.0, 10000.0])
