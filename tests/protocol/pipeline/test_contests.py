"""How long a flight keeps others of its slot out, and a feeder the round from its end."""

from __future__ import annotations

import pytest

from swarmnet.protocol.pipeline.contests import (
    MAX_RESTING,
    REST_TIMES,
    ROUNDS,
    UNKNOWN,
    Committed,
    Contests,
    Held,
    Holders,
)
from swarmnet.protocol.pipeline.reservations import DISTRUST_S, MAX_DISTRUSTED
from swarmnet.protocol.pipeline.routing import DEADLINE_FACTOR, FIRST_DEADLINE_S, MIN_DEADLINE_S


def test_a_flight_has_some_times_what_others_take() -> None:
    contests = Contests()
    assert contests.keeps_out("a", 0.0, 2.0, DEADLINE_FACTOR * 2.0)
    assert not contests.keeps_out("a", 0.0, 2.0, DEADLINE_FACTOR * 2.0 + 0.1)
    assert Contests().keeps_out("a", 0.0, 0.001, MIN_DEADLINE_S)
    assert Contests().keeps_out("a", 0.0, 0.0, FIRST_DEADLINE_S), "nothing has come back yet"
    assert not Contests().keeps_out("a", 0.0, 0.0, FIRST_DEADLINE_S + 0.1)


def test_whoever_let_it_pass_keeps_nobody_out_for_a_while() -> None:
    contests = Contests()
    assert not contests.keeps_out("a", 0.0, 1.0, 100.0)
    assert not contests.keeps_out("a", 100.0, 1.0, 100.0)
    assert contests.keeps_out("b", 100.0, 1.0, 100.0)
    then = 100.0 + DISTRUST_S
    assert contests.keeps_out("a", then, 1.0, then)


def test_few_are_remembered() -> None:
    contests = Contests()
    for n in range(MAX_DISTRUSTED + 1):
        contests.keeps_out(f"p{n}", 0.0, 1.0, 100.0)
    assert contests.keeps_out("p0", 100.0, 1.0, 100.0)
    assert not contests.keeps_out("p1", 100.0, 1.0, 100.0)


# ---- who holds rounds up ---------------------------------------------------------------------

ROUND_S, LOOK_S = 2.0, 0.1
NOBODY: tuple[frozenset[str], bool] = (frozenset(), False)
ONE = Held(3, frozenset({"liar"}))
UNKNOWN_ONES = Held(3, by_unknown=True)


def after_rounds(holders: Holders, num_rounds: int, now: float = 0.0) -> float:
    """Rounds go by; returns when the next one has begun."""
    for r in range(num_rounds):
        holders.look(r, Held(0), now)
        now += ROUND_S
    holders.look(num_rounds, Held(0), now)
    return now


def looks(holders: Holders, r: int, held: Held, begin: float, seconds: float) -> float:
    """Returns the first time after which somebody rests; infinity for none."""
    for n in range(round(seconds / LOOK_S)):
        now = begin + n * LOOK_S
        holders.look(r, held, now)
        if holders.resting(now) != NOBODY:
            return now - begin
    return float("inf")


def test_one_rests_after_some_times_what_a_round_takes() -> None:
    holders = Holders()
    begin = after_rounds(holders, ROUNDS)
    found_s = looks(holders, ROUNDS, ONE, begin, 60.0)
    assert found_s == pytest.approx(DEADLINE_FACTOR * ROUND_S, abs=3 * LOOK_S)
    at = begin + found_s
    assert holders.resting(at) == (frozenset({"liar"}), False)
    length_s = REST_TIMES * DEADLINE_FACTOR * ROUND_S
    assert holders.resting(at + 0.9 * length_s) != NOBODY
    assert holders.resting(at + 1.1 * length_s) == NOBODY


def test_before_rounds_are_known_to_take_some_time_all_have_long() -> None:
    holders = Holders()
    begin = after_rounds(holders, ROUNDS - 1)
    assert looks(holders, ROUNDS - 1, ONE, begin, 0.9 * FIRST_DEADLINE_S) == float("inf")


def test_who_gets_on_is_not_found() -> None:
    """Something is committed now and then, as where the last microbatches are slow."""
    holders = Holders()
    now = after_rounds(holders, ROUNDS)
    for n in range(20):
        held = Held(n, ONE.known)
        assert looks(holders, ROUNDS, held, now, 0.8 * DEADLINE_FACTOR * ROUND_S) == float("inf")
        now += 0.8 * DEADLINE_FACTOR * ROUND_S


def test_letting_go_for_a_moment_helps_nobody() -> None:
    holders = Holders()
    begin = after_rounds(holders, ROUNDS)
    for n in range(400):
        holders.look(ROUNDS, ONE if n % 4 else Held(3), begin + n * LOOK_S)
    assert "liar" in holders.resting(begin + 400 * LOOK_S)[0]


def test_each_rest_is_twice_as_long_as_the_one_before() -> None:
    holders, now = Holders(), 0.0
    for n in range(20):
        holders.found("liar", 1.0, now)
        length_s = REST_TIMES * 2.0 ** min(n, REST_TIMES)
        assert holders.resting(now + 0.99 * length_s) != NOBODY
        now += length_s
        assert holders.resting(now) == NOBODY


def test_those_that_do_not_count_have_one_part_of_all_time() -> None:
    """A little in each round; what they may hold up is forgiven, and no more."""

    def held_up(each_s: float) -> bool:
        holders = Holders()
        now = after_rounds(holders, ROUNDS)
        for r in range(ROUNDS, ROUNDS + 200):
            for n in range(round(ROUND_S / LOOK_S)):
                holders.look(r, UNKNOWN_ONES if n * LOOK_S < each_s else Held(3), now)
                now += LOOK_S
            if holders.resting(now) == (frozenset(), True):
                return True
        return False

    assert not held_up(0.9 * ROUND_S / REST_TIMES)
    assert held_up(2.5 * ROUND_S / REST_TIMES)


def test_held_up_rounds_do_not_make_rounds_usually_long() -> None:
    """Else who holds them up a little longer each time would never be found."""
    holders = Holders()
    now = after_rounds(holders, ROUNDS)
    for r in range(ROUNDS, ROUNDS + 50):
        for n in range(round(2.5 * ROUND_S / LOOK_S)):
            holders.look(r, ONE if n > 2 else Held(3), now)
            now += LOOK_S
    assert holders.usual_s == pytest.approx(ROUND_S)


def test_slots_with_too_few_tokens_or_in_no_sum_were_not_done() -> None:
    holders = Holders()
    now = after_rounds(holders, ROUNDS)
    holders.ended(Committed(6, 600), Committed(2, 110), now, is_lost=False)
    holders.ended(Committed(8, 800), Committed(), now, is_lost=True)
    assert holders.resting(now) == NOBODY
    holders.ended(Committed(6, 600), Committed(2, 90), now, is_lost=False)
    assert holders.resting(now) == (frozenset(), True)
    other = Holders()
    now = after_rounds(other, ROUNDS) + 1.0
    other.ended(Committed(), Committed(8, 800), now, is_lost=True)
    assert other.resting(now) == (frozenset(), True)


def test_a_machine_that_stood_still_blames_nobody() -> None:
    holders = Holders()
    begin = after_rounds(holders, ROUNDS)
    holders.look(ROUNDS, ONE, begin)
    holders.look(ROUNDS, ONE, begin + 1000.0)
    assert holders.resting(begin + 1000.0) == NOBODY


def test_few_rest_at_a_time() -> None:
    holders = Holders()
    for n in range(MAX_RESTING + 1):
        holders.found(f"p{n}", 1.0, 0.0)
    resting, _ = holders.resting(0.0)
    assert len(resting) == MAX_RESTING
    assert "p0" not in resting
    assert UNKNOWN not in resting
