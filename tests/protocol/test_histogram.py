from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.histogram import SECONDS, Histogram


@given(st.lists(st.floats(0, 1000)))
def test_each_value_counts_in_every_range_that_reaches_it(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    expected = [sum(v <= bound for v in values) for bound in (*SECONDS, float("inf"))]
    assert [count for _, count in histogram.cumulative()] == expected
    assert abs(histogram.sum - sum(values)) < 1e-6 * (1 + sum(values))
