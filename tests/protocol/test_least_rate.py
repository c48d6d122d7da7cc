"""Who is asked for a piece, and when another one is."""

from __future__ import annotations

import random

from swarmnet.protocol.least_rate import MAX_KNOWN, PARTS_OF_FASTEST, LeastRate
from swarmnet.protocol.timing import CONNECT_S, PATIENCE_S

MB = 1 << 20


def test_a_piece_has_as_long_as_several_of_its_size_from_the_fastest() -> None:
    least = LeastRate()
    assert least.may_take_s(64 * MB, 1) == PATIENCE_S, "nothing is known"
    least.came("slow", MB, 10.0)
    least.came("fast", MB, 1.0)
    least.came("slow", MB, 100.0)
    assert least.may_take_s(16 * MB, 1) == PARTS_OF_FASTEST * 16.0
    assert least.may_take_s(16 * MB, 3) == 3 * PARTS_OF_FASTEST * 16.0
    assert least.may_take_s(1, 1) == CONNECT_S


def test_givers_of_several_pieces_at_a_time_are_not_left() -> None:
    """Eight shards at a time, of four givers whose uplinks differ by two."""
    least = LeastRate()
    for uplink in (1.0, 2.0):
        least.came(f"{uplink}", 16 * MB, 16.0 * 4 / uplink)
    assert least.may_take_s(16 * MB, 1) > 16.0 * 8


def test_who_makes_it_slower_step_by_step_gains_nothing() -> None:
    least = LeastRate()
    least.came("honest", MB, 1.0)
    for n in range(1, 50):
        least.came("liar", MB, 0.9 * PARTS_OF_FASTEST * n)
    assert least.may_take_s(MB, 1) == PARTS_OF_FASTEST


def test_those_that_were_asked_in_vain_come_last_until_they_give() -> None:
    rng, least = random.Random(3), LeastRate()
    givers = ["a", "b", "c", "d"]

    def may_be_next(*givers: str) -> set[str]:
        return {least.next_of(givers, rng) for _ in range(50)}

    assert may_be_next(*givers) == set(givers)
    least.in_vain("a")
    least.in_vain("a")
    least.in_vain("b")
    assert may_be_next(*givers) == {"c", "d"}
    least.came("d", MB, 1.0)
    assert may_be_next(*givers) == {"d"}, "it has given"
    assert may_be_next("a", "b", "c") == {"c"}
    assert may_be_next("a", "b") == {"b"}
    least.in_vain("d")
    assert may_be_next(*givers) == {"c", "d"}
    least.came("a", MB, 1.0)
    assert may_be_next(*givers) == {"a"}


def test_what_is_known_of_givers_is_bounded() -> None:
    least = LeastRate()
    for n in range(3 * MAX_KNOWN):
        least.came(str(n), MB, 1.0 + n)
        least.in_vain(str(-n))
    assert least.may_take_s(MB, 1) > 2 * MAX_KNOWN, "the first are forgotten"
