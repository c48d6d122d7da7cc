"""Who is asked for a piece, and when another one is."""

from __future__ import annotations

import random

from swarmnet.protocol.least_rate import MAX_KNOWN, MAX_TRIED, PARTS_OF_FASTEST, LeastRate
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


def may_be_next(least: LeastRate, givers: str, *, is_first: bool = True, prefer: str = "") -> str:
    """The letters that name them."""
    rng = random.Random(3)
    found = {least.next_of(givers, rng, is_first=is_first, prefer=prefer) for _ in range(60)}
    return "".join(sorted(found))


def test_a_few_are_tried_and_then_those_that_are_fast_enough() -> None:
    least = LeastRate()
    assert may_be_next(least, "abcd") == "abcd"
    least.came("a", MB, 1.0)
    assert may_be_next(least, "abcd", prefer="a") == "bcd"
    assert may_be_next(least, "abcd", is_first=False) == "a", "beside one that is late"
    least.came("b", MB, 7.0)
    least.came("c", MB, 9.0)
    assert may_be_next(least, "abcd") == "ab"
    assert may_be_next(least, "abcd", prefer="b") == "b"
    assert may_be_next(least, "abcd", prefer="c") == "ab"
    assert may_be_next(least, "cd", is_first=False) == "d"


def test_those_that_were_asked_in_vain_come_last_until_they_give() -> None:
    least = LeastRate()
    for giver in "abc":
        least.came(giver, MB, 1.0)
    for giver in "aab":
        least.in_vain(giver)
    assert may_be_next(least, "abc") == "c"
    assert may_be_next(least, "ab") == "b"
    assert may_be_next(least, "a") == "a"
    least.came("a", MB, 1.0)
    assert may_be_next(least, "abc") == "ac"


def test_it_is_left_at_those_that_gave_where_many_have_nothing() -> None:
    least, givers = LeastRate(), [f"{n}" for n in range(100)]
    least.came("7", MB, 1.0)
    rng, num = random.Random(0), 0
    while (giver := least.next_of(givers, rng, is_first=True)) != "7":
        least.in_vain(giver)
        num += 1
    assert num == MAX_TRIED


def test_what_is_known_of_givers_is_bounded() -> None:
    least = LeastRate()
    for n in range(3 * MAX_KNOWN):
        least.came(str(n), MB, 1.0 + n)
        least.in_vain(str(-n))
    assert least.may_take_s(MB, 1) > 2 * MAX_KNOWN, "the first are forgotten"


def test_who_is_slow_is_left_for_one_that_may_be_faster() -> None:
    least = LeastRate()
    assert not least.is_left("slow", "b", MB, 1e6), "nobody has shown how fast it comes"
    least.came("fast", MB, 1.0)
    assert not least.is_left("slow", "b", MB, PARTS_OF_FASTEST)
    assert least.is_left("slow", "b", MB, PARTS_OF_FASTEST + 0.1)
    assert not least.is_left("slow", "", MB, 1e6), "it alone has it"
    assert not least.is_left("slow", "b")
    least.in_vain("slow")
    assert least.is_left("slow", "b")
    least.in_vain("b")
    assert not least.is_left("slow", "b", MB, 1e6), "the other one was slow too"
    assert not least.is_left("b", ["slow"], MB, 1e6)


def test_of_an_order_those_that_were_asked_in_vain_come_last() -> None:
    least = LeastRate()
    for giver in "bbc":
        least.in_vain(giver)
    assert least.in_order("bcda") == list("dacb")
    least.came("b", MB, 1.0)
    assert least.in_order("bcda") == list("bdac")


def test_how_fast_one_was_that_gave_what_was_not_right_is_no_measure() -> None:
    least = LeastRate()
    least.came("liar", MB, 0.001)
    least.came("honest", MB, 100.0)
    assert least.is_left("honest", "liar", MB, 5.0)
    least.forget("liar")
    assert not least.is_left("honest", "liar", MB, 5.0)
