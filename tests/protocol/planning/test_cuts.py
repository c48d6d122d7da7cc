"""Layers cut into stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.planning.cuts import split_layers


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_the_split_is_the_best_of_all(costs: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(costs)))
    stages = split_layers(costs, k)
    assert [i for s in stages for i in s] == list(range(len(costs)))
    assert len(stages) == k
    assert all(len(s) > 0 for s in stages)

    def measure(cuts: tuple[int, ...]) -> tuple[int, int]:
        ends = (0, *cuts, len(costs))
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        return max(sums), sum(x * x for x in sums)

    best = min(map(measure, itertools.combinations(range(1, len(costs)), k - 1)))
    assert measure(tuple(s.start for s in stages[1:])) == best


def test_a_dear_last_layer_gets_company_last() -> None:
    assert split_layers([1, 1, 1, 1, 1, 1, 3], 3) == [range(3), range(3, 6), range(6, 7)]


@pytest.mark.parametrize(("costs", "k"), [([1.0], 2), ([], 1), ([1.0], 0), ([-1.0], 1)])
def test_impossible_splits_are_refused(costs: list[float], k: int) -> None:
    with pytest.raises(ValueError, match="layer"):
        split_layers(costs, k)
