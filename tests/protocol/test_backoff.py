"""Pauses that grow."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.backoff import next_pause_s


@given(st.floats(0.01, 100.0), st.floats(1.0, 1e4))
def test_pauses_double_from_the_first_to_the_longest(first_s: float, times: float) -> None:
    longest_s = first_s * times
    pauses = [next_pause_s(None, first_s, longest_s)]
    for _ in range(20):
        pauses.append(next_pause_s(pauses[-1], first_s, longest_s))
    assert pauses[0] == first_s
    assert all(b == min(2 * a, longest_s) for a, b in pairwise(pauses))
    assert pauses[-1] == longest_s
