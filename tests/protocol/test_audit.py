"""What is computed again, and who is barred for it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.audit import (
    MAX_JUDGES,
    MAX_PEERS,
    RATE,
    TOLERANCES,
    Conclusions,
    Draw,
    Jury,
    Verdict,
    is_within,
)
from swarmnet.protocol.codecs import BOUNDARY_CODECS

SEEDS = 100
WITHIN = 3_000
"""Microbatches of a liar."""


def heard(size: int, differs: int, agrees: int) -> Jury:
    jury = Jury(size)
    for i in range(differs):
        jury = jury.heard(f"d{i}", is_same=False)
    for i in range(agrees):
        jury = jury.heard(f"a{i}", is_same=True)
    return jury


def audit(
    conclusions: Conclusions,
    draw: Draw,
    replicas: list[str],
    audited: str,
    *,
    is_wrong: bool,
    hostile: frozenset[str],
) -> Verdict:
    """One audit. Hostile judges say the contrary of what is."""
    may = [p for p in replicas if conclusions.may_judge(p)]
    judges = draw.judges(may, audited)
    jury = Jury(len(judges))
    for judge in judges:
        jury = jury.heard(judge, is_same=is_wrong == (judge in hostile))
        if jury.verdict is not Verdict.OPEN:
            break
    return conclusions.concluded(audited, jury)


@pytest.mark.parametrize("num_replicas", [3, 8, 30])
def test_who_corrupts_one_in_ten_is_barred_in_time_and_nobody_else(num_replicas: int) -> None:
    """Four callers share its microbatches, as they share those of the honest ones."""
    in_time = 0
    replicas = [f"p{i}" for i in range(num_replicas)]
    liar, hostile = "p0", frozenset({"p0"})
    for seed in range(SEEDS):
        rng = random.Random(seed)
        callers = [(Conclusions(), Draw(random.Random(rng.random()))) for _ in range(4)]
        for _ in range(WITHIN):
            for audited in ("p0", "p1", "p2"):
                conclusions, draw = rng.choice(callers)
                is_wrong = audited == liar and rng.random() < 0.1
                if draw.is_drawn():
                    audit(conclusions, draw, replicas, audited, is_wrong=is_wrong, hostile=hostile)
        in_time += any(c.is_barred(liar) for c, _ in callers)
        assert not any(c.is_barred(p) for c, _ in callers for p in replicas[1:]), seed
    assert in_time >= 99


@pytest.mark.parametrize(("num_replicas", "num_hostile"), [(3, 1), (8, 3), (9, 4), (40, 8)])
def test_slandering_judges_bar_no_honest_peer(num_replicas: int, num_hostile: int) -> None:
    """Those fewer than half of what may be drawn say of everybody that he lies."""
    replicas = [f"p{i}" for i in range(num_replicas)]
    hostile = frozenset(replicas[:num_hostile])
    barred = 0
    for seed in range(SEEDS):
        draw, conclusions = Draw(random.Random(seed)), Conclusions()
        for i in range(1000):
            audited = replicas[num_hostile + i % (num_replicas - num_hostile)]
            audit(conclusions, draw, replicas, audited, is_wrong=False, hostile=hostile)
        barred += any(conclusions.is_barred(p) for p in replicas[num_hostile:])
        if num_hostile + 1 <= min(MAX_JUDGES, num_replicas - 1) / 2:
            assert not any(conclusions.may_judge(p) for p in hostile)
    assert barred == 0


def test_the_draw_takes_its_part_and_differs_from_seed_to_seed() -> None:
    first = [Draw(random.Random(seed)).is_drawn() for seed in range(20_000)]
    draw = Draw(random.Random(0))
    for drawn in (first, [draw.is_drawn() for _ in range(20_000)]):
        assert 0.8 * RATE < sum(drawn) / 20_000 < 1.2 * RATE


def test_no_seat_of_the_audited_machine_judges() -> None:
    draw = Draw(random.Random(0))
    assert set(draw.judges(["a", "a/1", "b", "b/3"], "a/2")) == {"b", "b/3"}
    assert len(draw.judges([f"p{i}" for i in range(50)], "a")) == MAX_JUDGES


def test_two_replicas_cannot_tell_who_lies() -> None:
    assert heard(1, 1, 0).verdict is Verdict.OPEN
    assert heard(2, 2, 0).verdict is Verdict.LIED
    assert heard(2, 1, 1).verdict is Verdict.SLANDERED
    assert heard(2, 1, 0).verdict is Verdict.OPEN
    assert heard(2, 1, 0).missed().verdict is Verdict.OPEN
    assert heard(3, 2, 1).verdict is Verdict.OPEN


@given(st.integers(0, 2 * MAX_JUDGES), st.integers(0, MAX_JUDGES), st.integers(0, MAX_JUDGES))
def test_a_verdict_is_that_of_a_majority(size: int, differs: int, agrees: int) -> None:
    if differs + agrees > size:
        return
    verdict = heard(size, differs, agrees).verdict
    if verdict is Verdict.LIED:  # whatever those say that were not asked
        assert differs > size - differs + 1
    if verdict is Verdict.SLANDERED:
        assert agrees + 1 > size - agrees
    if verdict is Verdict.AGREES:
        assert not differs


def test_what_is_known_is_bounded_and_liars_are_kept() -> None:
    conclusions = Conclusions()
    conclusions.computed("liar", is_same=False)
    for i in range(2 * MAX_PEERS):
        conclusions.computed(f"p{i}", is_same=True)
    assert conclusions.is_barred("liar")
    assert conclusions.of("p0").agreed == 0
    assert conclusions.of(f"p{2 * MAX_PEERS - 1}").agreed == 1


def test_what_is_no_number_is_no_agreement() -> None:
    assert set(TOLERANCES) == set(BOUNDARY_CODECS)
    assert is_within(0.0, "none")
    assert not is_within(float("nan"), "none")
    assert not is_within(float("inf"), "none")
