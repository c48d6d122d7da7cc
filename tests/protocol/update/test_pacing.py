"""Parts of an uplink."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.update.pacing import (
    BULK_SHARE,
    LEAST_SHARE,
    LEFT_PART,
    URGENT_SHARE,
    feeding_left_s,
    gradient_share,
    share_beside,
)


@given(st.floats(1e6, 1e9), st.floats(1e4, 1e9), st.floats(1.0, 1e5))
def test_results_beside_a_long_round_take_no_more_of_the_link_than_they_need(
    num_bytes: float, rate: float, left_s: float
) -> None:
    share = share_beside(num_bytes, rate, left_s)
    assert LEAST_SHARE <= share <= BULK_SHARE
    takes_s = num_bytes / (share * rate)
    if share < BULK_SHARE:
        assert takes_s <= LEFT_PART * left_s * (1 + 1e-9)
    if share > LEAST_SHARE:
        assert takes_s >= LEFT_PART * left_s * (1 - 1e-9)


def test_while_nothing_is_known_results_take_half_of_the_link() -> None:
    assert share_beside(1e8, 0.0, 100.0) == share_beside(1e8, 1e6, None) == BULK_SHARE


def test_where_a_round_is_fed_before_it_begins_all_wait_for_the_results() -> None:
    assert share_beside(1e8, 1e6, 0.0) == URGENT_SHARE


@given(st.floats(1e6, 1e9), st.floats(1e4, 1e9), st.floats(0.0, 1e5))
def test_a_gradient_gets_half_of_the_link_and_more_where_that_is_too_slow(
    num_bytes: float, rate: float, left_s: float
) -> None:
    share = gradient_share(num_bytes, rate, left_s)
    assert BULK_SHARE <= share <= URGENT_SHARE
    takes_s = num_bytes / (share * rate)
    if share < URGENT_SHARE:
        assert takes_s <= LEFT_PART * left_s * (1 + 1e-9)
    assert gradient_share(num_bytes, 0.0, left_s) == BULK_SHARE
    assert gradient_share(num_bytes, rate, None) == BULK_SHARE


def test_how_long_until_a_round_is_launched() -> None:
    assert feeding_left_s(250, 1000, 10.0) == 30.0
    assert feeding_left_s(1001, 1000, 10.0) == 0.0
    assert feeding_left_s(0, 1000, 10.0) is None
    assert feeding_left_s(5, 1000, 0.0) is None
