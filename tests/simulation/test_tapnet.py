"""Frames between namespaces: hosts of one house share its uplink and its downlink."""

from __future__ import annotations

import pytest

from benchmarks.tapnet import QUEUE_S, Link, Wires

RED, BLUE = (0, 1), (2, 3)
"""Hosts of two houses."""
HOUSES = (0, 0, 1, 1)
LINK = Link(delay_s=0.01, bits_per_s=8e6, down_bits_per_s=16e6)
"""A kilobyte takes 1 ms up and 0.5 ms down."""
FRAME_BYTES = 1000
UP_S, DOWN_S = 0.001, 0.0005
BROADCAST = b"\xff" * 6


def address(host: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, host])


def frame(source: int, target: int | None) -> bytes:
    """`target`: None for all."""
    to = BROADCAST if target is None else address(target)
    return (to + address(source) + b"\x08\x00").ljust(FRAME_BYTES, b"\0")


def introduced(link: Link = LINK) -> Wires:
    """All hosts have been heard, and nothing is under way."""
    wires = Wires(HOUSES, link)
    for host in (*RED, *BLUE):
        wires.send(host, frame(host, None), -10.0)
    assert len(list(wires.arrived(-1.0))) == 8, "of each to both of the other house"
    return wires


def when(wires: Wires) -> list[tuple[float, int]]:
    """When each frame that is under way arrives, and where."""
    found = []
    while (now := wires.next_at) is not None:
        found += [(pytest.approx(now), host) for host, _ in wires.arrived(now)]
    return found


def test_hosts_of_a_house_wait_for_each_other_at_its_uplink() -> None:
    wires = introduced()
    for source in RED:
        assert wires.send(source, frame(source, BLUE[source]), 0.0) == []
    first = UP_S + 0.01 + DOWN_S
    assert when(wires) == [(first, BLUE[0]), (first + UP_S, BLUE[1])]


def test_hosts_of_a_house_wait_for_each_other_at_its_downlink() -> None:
    """What comes from houses with uplinks of their own."""
    wires = Wires((0, 1, 2, 2), LINK)
    for host in range(4):
        wires.send(host, frame(host, None), -10.0)
    list(wires.arrived(-1.0))
    for source, target in ((0, 2), (1, 3)):
        wires.send(source, frame(source, target), 0.0)
    first = UP_S + 0.01 + DOWN_S
    assert when(wires) == [(first, 2), (first + DOWN_S, 3)]


def test_both_ways_of_a_house_are_its_own() -> None:
    wires = introduced()
    wires.send(RED[0], frame(RED[0], BLUE[0]), 0.0)
    wires.send(BLUE[0], frame(BLUE[0], RED[1]), 0.0)
    there = UP_S + 0.01 + DOWN_S
    assert when(wires) == [(there, BLUE[0]), (there, RED[1])]


def test_what_stays_in_a_house_crosses_nothing() -> None:
    wires = introduced()
    before = [c.crossed_bytes for c in wires.counters]
    assert wires.send(RED[0], frame(RED[0], RED[1]), 0.0) == [RED[1]]
    assert wires.next_at is None
    assert [c.crossed_bytes for c in wires.counters] == before
    assert wires.counters[RED[0]].sent_bytes == before[RED[0]] + FRAME_BYTES
    wires.send(RED[1], frame(RED[1], BLUE[0]), 0.0)
    assert when(wires) == [(UP_S + 0.01 + DOWN_S, BLUE[0])], "the uplink was free"


def test_a_frame_for_all_crosses_the_uplink_once() -> None:
    wires = introduced()
    before = wires.counters[RED[0]].crossed_bytes
    assert wires.send(RED[0], frame(RED[0], None), 0.0) == [RED[1]]
    assert sorted(host for _, host in when(wires)) == list(BLUE)
    assert wires.counters[RED[0]].crossed_bytes == before + FRAME_BYTES


@pytest.mark.parametrize("link", [Link(0.01, 8e6), Link(0.01, 0.0, down_bits_per_s=8e6)])
def test_what_would_wait_too_long_for_either_way_is_dropped(link: Link) -> None:
    wires = introduced(link)
    num = 2 * int(QUEUE_S / UP_S)
    for i in range(num):
        wires.send(RED[i % 2], frame(RED[i % 2], BLUE[0]), 0.0)
    arrived = when(wires)
    assert len(arrived) == pytest.approx(num / 2, abs=2)
    dropped = [wires.counters[host].dropped_frames for host in RED]
    assert sum(dropped) == num - len(arrived)
    assert all(dropped), "the queue is the house's"


def test_without_limit_and_delay_a_frame_is_there_at_once() -> None:
    wires = Wires(HOUSES, Link())
    assert wires.send(0, frame(0, None), 0.0) == [1, 2, 3]
    assert wires.send(2, frame(2, 0), 0.0) == [0]
    assert wires.next_at is None
