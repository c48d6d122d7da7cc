"""Bans grow with each offence, up to a bound, and are forgiven."""

from __future__ import annotations

from swarmnet.protocol.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S
from swarmnet.transport.bans import (
    MAX_OFFENDERS,
    Bans,
)


def test_bans_grow_up_to_a_bound_and_are_forgiven() -> None:
    bans, now = Bans(), 5.0
    assert not bans.is_banned("x", now)
    assert [bans.add("x", now) for _ in range(3)] == [
        FIRST_PAUSE_S,
        2 * FIRST_PAUSE_S,
        4 * FIRST_PAUSE_S,
    ]
    assert max(bans.add("x", now) for _ in range(12)) == LONGEST_PAUSE_S
    assert bans.is_banned("x", now + LONGEST_PAUSE_S - 0.1)
    now += LONGEST_PAUSE_S
    assert not bans.is_banned("x", now)
    assert bans.add("x", now + LONGEST_PAUSE_S + 0.1) == FIRST_PAUSE_S


def test_what_is_remembered_is_bounded() -> None:
    bans = Bans()
    for number in range(MAX_OFFENDERS + 10):
        bans.add(f"p{number}", 0.0)
    assert len(bans) == MAX_OFFENDERS
    assert not bans.is_banned("p9", 0.0)
    assert bans.is_banned("p10", 0.0)
