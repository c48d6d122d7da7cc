"""Trial passes: who is tried, how often, and what is a right answer."""

from __future__ import annotations

import math
import random

from swarmnet.protocol.pipeline.trials import MOST_OPEN, Trials, agrees

RNG = random.Random(1)


def test_few_are_tried_at_a_time_and_each_once() -> None:
    trials, names = Trials(), [f"p{i}" for i in range(10)]
    tried = []
    while (peer_id := trials.choose(names, 0.0, RNG)) is not None:
        trials.begin(peer_id, names)
        tried.append(peer_id)
    assert len(set(tried)) == len(tried) == MOST_OPEN
    trials.end(tried[0])
    assert trials.choose(names, 0.0, RNG) not in tried[1:]


def test_who_fails_rests_for_longer_each_time_and_others_come_first() -> None:
    trials, rests, now = Trials(), [], 0.0
    for _ in range(4):
        trials.begin("a", ["a"])
        trials.end("a")
        trials.failed("a", now)
        began = now
        while trials.choose(["a"], now, RNG) is None:
            now += 0.25
        rests.append(now - began)
        assert trials.choose(["a", "new"], now, RNG) == "new"
    assert rests == [1.0, 2.0, 4.0, 8.0]


def test_who_always_puts_it_off_comes_after_one_that_has_just_come() -> None:
    trials, names = Trials(), [f"liar-{i}" for i in range(20)]
    for name in names:
        trials.begin(name, names)
        trials.end(name)
        trials.refused(name)
    assert trials.choose([*names, "new"], 0.0, RNG) == "new"
    trials.refused("new")
    assert trials.choose(["liar-0"], 0.0, RNG) == "liar-0", "no pause"
    trials.refused("new")
    assert trials.choose([*names, "new"], 0.0, RNG) != "new"
    trials.begin("new", ["new"])
    assert trials.choose(["liar-1", "new"], 0.0, RNG) == "liar-1"


def test_those_that_are_gone_are_forgotten() -> None:
    trials = Trials()
    trials.begin("a", ["a", "b"])
    trials.end("a")
    trials.failed("a", 0.0)
    trials.begin("b", ["b"])
    trials.end("b")
    assert trials.choose(["a"], 0.0, RNG) == "a"


def test_a_right_answer_is_the_loss_that_is_known() -> None:
    assert agrees(100.0, 64, 100.0, 64)
    assert agrees(101.0, 64, 100.0, 64), "another precision"
    assert agrees(0.3, 64, 0.0, 64), "a loss near zero"
    assert not agrees(110.0, 64, 100.0, 64)
    assert not agrees(100.0, 63, 100.0, 64)
    assert not agrees(math.nan, 64, 100.0, 64)
    assert not agrees(-1e300, 64, 100.0, 64)
