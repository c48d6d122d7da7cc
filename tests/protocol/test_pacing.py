"""Turns on an uplink."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.pacing import (
    BULK_SHARE,
    EXCHANGE_PART,
    LEAST_SHARE,
    MAX_TURN_S,
    Pacer,
    share_beside,
)


def test_messages_take_their_turns_at_a_part_of_the_bandwidth() -> None:
    pacer = Pacer()
    waits = [pacer.wait_s(1_000, 2_000.0, now=10.0) for _ in range(3)]
    assert waits == pytest.approx([0.0, 1.0, 2.0])
    assert pacer.wait_s(1_000, 2_000.0, now=12.5) == pytest.approx(0.5)


def test_an_idle_uplink_is_free_at_once() -> None:
    pacer = Pacer()
    pacer.wait_s(1_000, 1_000.0, now=0.0)
    assert pacer.wait_s(1_000, 1_000.0, now=100.0) == 0.0


def test_an_unknown_bandwidth_delays_nothing_and_a_wrong_one_not_for_ever() -> None:
    pacer = Pacer()
    assert pacer.wait_s(10**9, 0.0, now=0.0) == 0.0
    pacer.wait_s(10**9, 1.0, now=0.0)
    assert pacer.wait_s(10**9, 1.0, now=0.0) == MAX_TURN_S


def test_a_whole_exchange_on_a_slow_uplink_is_spread_out() -> None:
    """64 shards of a megabyte at 1.5 Mbit/s take eleven minutes: the last is not sent any earlier
    than its turn, together with others."""
    pacer = Pacer()
    waits = [pacer.wait_s(1 << 20, 187_500.0, now=0.0) for _ in range(64)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(waits)]
    assert gaps == pytest.approx([(1 << 20) / 93_750.0] * 63)


@given(st.floats(1e6, 1e9), st.floats(1e4, 1e9), st.floats(1.0, 1e5))
def test_an_exchange_beside_a_long_round_takes_no_more_of_the_link_than_it_needs(
    num_bytes: float, rate: float, round_s: float
) -> None:
    share = share_beside(num_bytes, rate, round_s)
    assert LEAST_SHARE <= share <= BULK_SHARE
    takes_s = num_bytes / (share * rate)
    if share < BULK_SHARE:
        assert takes_s <= EXCHANGE_PART * round_s * (1 + 1e-9)
    if share > LEAST_SHARE:
        assert takes_s >= EXCHANGE_PART * round_s * (1 - 1e-9)


def test_while_nothing_is_known_an_exchange_takes_half_of_the_link() -> None:
    assert share_beside(1e8, 0.0, 100.0) == share_beside(1e8, 1e6, 0.0) == BULK_SHARE
