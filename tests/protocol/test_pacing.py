"""Turns on an uplink."""

from __future__ import annotations

import pytest

from swarmnet.protocol.pacing import MAX_TURN_S, Pacer


def test_messages_take_their_turns_at_a_part_of_the_bandwidth() -> None:
    pacer = Pacer(share=0.5)
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
