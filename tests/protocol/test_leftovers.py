"""What a background leaves to others, and what it has of an uplink."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.leftovers import (
    LEAST_SHARE,
    LONGEST_BACKLOG_S,
    ROOM_S,
    Backlog,
    Leftovers,
)

RATE = 1_000.0
PART_S = 0.05
PART = int(PART_S * RATE)


class Uplink:
    """With a background that always has a part to send."""

    def __init__(self) -> None:
        self.backlog, self.leftovers = Backlog(), Leftovers()
        self.now = self.longest_wait_s = 0.0
        self.background_bytes = 0

    def run_until(self, end: float) -> None:
        while True:
            wait_s = self.leftovers.wait_s(self.backlog.seconds(self.now), self.now)
            if self.now + wait_s > end:
                self.now = end
                return
            self.now += wait_s
            self.backlog.add(PART, RATE, self.now)
            self.leftovers.sent(PART_S, self.now)
            self.background_bytes += PART

    def urgent(self, num_bytes: int) -> None:
        self.longest_wait_s = max(self.longest_wait_s, self.backlog.seconds(self.now))
        self.backlog.add(num_bytes, RATE, self.now)


def test_a_background_has_all_of_an_idle_link() -> None:
    link = Uplink()
    link.run_until(60.0)
    assert link.background_bytes == pytest.approx(60.0 * RATE, rel=0.01)


@given(st.lists(st.floats(0.05, 0.6), min_size=5, max_size=40))
def test_what_is_urgent_waits_behind_one_part_and_the_background_has_the_rest(
    busy: list[float],
) -> None:
    """Of each second, others take such a part, in one message."""
    link = Uplink()
    for second, part in enumerate(busy):
        link.run_until(float(second))
        link.urgent(int(part * RATE))
    link.run_until(float(len(busy)))
    assert link.longest_wait_s <= PART_S + ROOM_S + 1e-6
    left = len(busy) - sum(busy)
    assert link.background_bytes / RATE == pytest.approx(left, abs=0.02 * len(busy) + 2 * PART_S)


def test_a_background_has_its_share_of_a_link_that_is_full() -> None:
    link = Uplink()
    for step in range(600):
        link.run_until(0.1 * step)
        while link.backlog.seconds(link.now) < 0.5:
            link.urgent(100)
    assert link.background_bytes == pytest.approx(LEAST_SHARE * 60.0 * RATE, rel=0.05)


def test_a_link_of_unknown_rate_has_no_backlog_and_a_wrong_rate_no_endless_one() -> None:
    backlog = Backlog()
    backlog.add(10**9, 0.0, 1.0)
    assert backlog.seconds(1.0) == 0.0
    for _ in range(100):
        backlog.add(10**6, 1.0, 1.0)
    assert backlog.seconds(1.0) == LONGEST_BACKLOG_S
    assert backlog.seconds(1.0 + LONGEST_BACKLOG_S) == 0.0
