"""Which of two ways to a peer is faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.upgrade import Way

LAN, SLOW_LAN, ROUTER, FAR = (
    Way(0.0003, True),
    Way(0.0018, True),
    Way(0.0008, False),
    Way(0.02, False),
)
WAYS = st.builds(Way, st.floats(0.0, 1.0), st.booleans())


@pytest.mark.parametrize(
    ("way", "other", "is_faster"),
    [
        (LAN, FAR, True),
        (FAR, LAN, False),
        (SLOW_LAN, ROUTER, True),  # both within the house: the shared network decides
        (ROUTER, SLOW_LAN, False),
        (Way(0.019, False), FAR, False),  # the same way, measured again
        (Way(0.009, False), FAR, True),
        (Way(0.0001, False), ROUTER, False),  # nobody notices
        (Way(0.021, True), FAR, False),  # a VPN around the world
        (Way(0.015, True), FAR, True),
        (FAR, Way(0.3, True), True),
    ],
)
def test_a_way_is_faster_by_its_round_trip_and_its_network(
    way: Way, other: Way, is_faster: bool
) -> None:
    assert way.is_faster(other) is is_faster


@given(WAYS, WAYS)
def test_of_two_ways_one_at_most_is_faster(way: Way, other: Way) -> None:
    assert not (way.is_faster(other) and other.is_faster(way))
    assert not way.is_faster(way)
