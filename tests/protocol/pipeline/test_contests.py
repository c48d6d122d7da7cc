"""How long a flight keeps others of its slot out."""

from __future__ import annotations

from swarmnet.protocol.pipeline.contests import Contests
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
