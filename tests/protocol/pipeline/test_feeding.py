"""How many microbatches feeders keep in flight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.pipeline.feeding import (
    FASTEST,
    IN_FLIGHT_OF_MANY,
    IN_FLIGHT_UNASKED,
    MAX_REFUSED,
    MOST_OF_A_ROUND,
    REST_S,
    Rest,
    does_own,
    part_of_feeder,
    send_window_room,
    slow_start,
    window,
)

rates = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1e6)), min_size=1, max_size=40)


@given(rates)
def test_the_parts_of_all_feeders_make_about_one(all_rates: list[float]) -> None:
    known = [r for r in all_rates if r > 0]
    if len(known) == len(all_rates):
        assert sum(part_of_feeder(r, all_rates) for r in all_rates) == pytest.approx(1.0)
    for rate in all_rates:
        assert 0 < part_of_feeder(rate, all_rates) <= 1.0


def test_by_speed() -> None:
    assert part_of_feeder(3.0, [1.0, 3.0]) == pytest.approx(0.75)
    assert part_of_feeder(1.0, [1.0, 0.0, 1.0]) == pytest.approx(1 / 3)
    assert part_of_feeder(0.0, [5.0, 0.0]) == 0.5


@given(st.floats(1e3, 1e12), st.integers(2, 20))
def test_a_boast_leaves_the_others_their_part(boast: float, others: int) -> None:
    all_rates = [1.0] * others + [boast]
    assert part_of_feeder(1.0, all_rates) >= 1 / (others + FASTEST) - 1e-9


def test_a_slower_feeder_of_a_small_swarm_does_itself_what_it_can_begin_soonest() -> None:
    all_rates = [2.0, 1.0, 2.1, 0.0]
    assert does_own(1.0, all_rates, wait_s=0.0, upload_s=0.0)
    assert does_own(1.0, all_rates, wait_s=0.4, upload_s=0.5)
    assert not does_own(1.0, all_rates, wait_s=0.4, upload_s=0.1)
    assert does_own(1.9, all_rates, wait_s=9.0, upload_s=0.1), "as fast as others, but for noise"
    assert does_own(9.0, all_rates, wait_s=9.0, upload_s=0.1)
    assert does_own(0.0, all_rates, wait_s=9.0, upload_s=0.1), "nobody knows"
    assert does_own(0.1, [0.0, 0.0], wait_s=9.0, upload_s=0.1)


def test_all_windows_together_fill_the_replicas() -> None:
    all_rates = [0.1, 0.2, 0.4, 0.8]
    parts = [part_of_feeder(r, all_rates) for r in all_rates]
    for asks, each in ((True, IN_FLIGHT_OF_MANY), (False, IN_FLIGHT_UNASKED)):
        total = sum(window(32, part, 10_000, is_small=False, asks=asks) for part in parts)
        assert each * 32 <= total <= each * 32 + len(all_rates)
    assert window(1, 0.001, 100, is_small=True, asks=False) == 1


@given(st.integers(1, 4000), st.integers(1, 10_000), st.integers(1, 200))
def test_a_short_round_is_never_in_the_air_as_a_whole(
    num_replicas: int, num_microbatches: int, num_feeders: int
) -> None:
    for asks in (True, False):
        each = window(num_replicas, 1 / num_feeders, num_microbatches, is_small=False, asks=asks)
        assert each >= 1
        assert num_feeders * each <= MOST_OF_A_ROUND * num_microbatches + num_feeders


def test_a_feeder_begins_with_few_and_has_its_whole_window_when_these_are_home() -> None:
    part = 1 / 50
    most = window(400, part, 100_000, is_small=False, asks=True)
    first = slow_start(most, 400, part, 0)
    assert 1 <= first < most
    assert slow_start(most, 400, part, most - first - 1) == most - 1
    assert slow_start(most, 400, part, most) == slow_start(most, 400, part, 10**6) == most


@given(st.integers(2, 16), st.integers(1, 16))
def test_in_a_small_swarm_too_few_come_first_and_then_more_than_two_for_each_replica(
    num_replicas: int, num_feeders: int
) -> None:
    """One that it works on, one on its way, and some more; but not before the first are home."""
    part = 1 / num_feeders
    most = window(num_replicas, part, 10_000, is_small=True, asks=True)
    first = slow_start(most, num_replicas, part, 0)
    assert num_feeders * most > 2 * num_replicas
    assert num_feeders * (first - 1) <= 2 * num_replicas
    assert first < most or num_feeders > num_replicas / 2
    assert slow_start(most, num_replicas, part, most) == most


def test_a_full_device_or_uplink_gets_no_more() -> None:
    assert send_window_room(6, 2, queued_bytes=0, sent_bytes=100) == 4
    assert send_window_room(6, 9, queued_bytes=0, sent_bytes=100) == 0
    assert send_window_room(6, 0, queued_bytes=601, sent_bytes=100) == 0
    assert send_window_room(6, 0, queued_bytes=600, sent_bytes=100) == 6


def test_a_feeder_whose_data_is_refused_rests_and_tries_it_again() -> None:
    rest = Rest()
    assert not any(rest.refused(1.0, feeds=True) for _ in range(MAX_REFUSED - 1))
    rest.accepted()
    assert not any(rest.refused(2.0, feeds=True) for _ in range(MAX_REFUSED - 1))
    assert not rest.ends(1e9), "none has begun"
    assert rest.refused(3.0, feeds=True)
    assert rest.num_refused == MAX_REFUSED
    assert not rest.refused(4.0, feeds=False), "it rests already"
    assert not rest.ends(2.9 + REST_S)
    assert rest.ends(3.0 + REST_S)
    assert not rest.ends(4.0 + REST_S), "said once"
    assert rest.num_refused == 0
