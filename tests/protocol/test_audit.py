"""What is computed again, and who is barred for it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.audit import (
    MAX_JUDGES,
    MAX_PEERS,
    MAX_WITHHELD,
    RATE,
    TOLERANCES,
    UPDATE_RATE,
    UPDATE_TOLERANCE,
    Conclusions,
    Draw,
    Jury,
    Part,
    Verdict,
    Withheld,
    is_same_update,
    is_within,
    unfair,
)
from swarmnet.protocol.codecs import BOUNDARY_CODECS
from swarmnet.protocol.update import robust

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


def test_of_a_machine_that_is_gone_stays_what_is_held_against_it() -> None:
    conclusions = Conclusions()
    conclusions.computed("honest", is_same=True)
    conclusions.passes_over("elsewhere")
    conclusions.computed("liar", is_same=False)
    jury = Jury(3, ("slanderer",), ("a", "b"))
    assert conclusions.concluded("honest", jury) is Verdict.SLANDERED
    for peer_id in ("honest", "elsewhere", "liar", "slanderer", "never seen"):
        conclusions.forget(peer_id)
    assert conclusions.of("honest").agreed == conclusions.of("elsewhere").unknown == 0
    assert conclusions.is_barred("liar")
    assert not conclusions.may_judge("slanderer")


def test_what_is_no_number_is_no_agreement() -> None:
    assert set(TOLERANCES) == set(BOUNDARY_CODECS)
    assert is_within(0.0, "none")
    assert not is_within(float("nan"), "none")
    assert not is_within(float("inf"), "none")


# ---- updates ------------------------------------------------------------------------------------


UPDATES = 50


def parts_of(squares: list[float], tokens: list[int], rule: str) -> list[Part]:
    """As an honest primary has them."""
    names = [f"p{i:02}" for i in range(len(tokens))]
    factors = dict.fromkeys(names, 1.0)
    if rule == robust.MEDIAN_CLIP:
        claims = dict(zip(names, tokens, strict=True))
        factors = robust.clip_factors(dict(zip(names, squares, strict=True)), claims)
    return [Part(n, n, factors[name]) for name, n in zip(names, tokens, strict=True)]


@pytest.mark.parametrize("num_backups", [1, 2])
def test_who_is_false_in_every_update_is_found_within_fifty(num_backups: int) -> None:
    """A primary of one shard, of whose sums each backup makes some again; an honest one beside
    it."""
    in_time = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        draws = [Draw.beside(rng, UPDATE_RATE), *[Draw(rng, UPDATE_RATE)] * (num_backups - 1)]
        conclusions = Conclusions()
        for _ in range(UPDATES):
            drawn = sum(draw.is_drawn() for draw in draws)
            for _ in range(drawn):
                is_same = is_same_update(rng.random() * UPDATE_TOLERANCE, 1.0)
                conclusions.computed("honest", is_same=is_same)
                conclusions.computed("false", is_same=is_same_update(0.2, 1.0))
        in_time += conclusions.is_barred("false")
        assert not conclusions.is_barred("honest")
    assert in_time >= 99


def test_draws_beside_others_leave_them_as_they_are() -> None:
    rng = random.Random(7)
    one, other = Draw.beside(rng, 0.5), Draw.beside(rng, 0.5)
    assert [one.is_drawn() for _ in range(99)] == [other.is_drawn() for _ in range(99)]
    assert rng.random() == random.Random(7).random()


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e6), st.integers(1, 10**6)), min_size=1, max_size=12),
    st.sampled_from(robust.RULES),
    st.floats(1e-6, 1.0),
)
def test_no_honest_sum_is_unfair(given_by: list[tuple[float, int]], rule: str, clip: float) -> None:
    tokens = [n for _, n in given_by]
    parts = parts_of([s for s, _ in given_by], tokens, rule)
    assert unfair(rule, parts, sum(tokens), clip / sum(tokens), clips=True) == ""
    assert unfair(rule, parts, sum(tokens), 1 / sum(tokens), clips=False) == ""


@given(st.lists(st.integers(1, 10**6), min_size=4, max_size=12), st.integers(1, 10**6))
def test_nor_is_one_in_which_claims_are_cut(claims: list[int], counted: int) -> None:
    names = {f"p{i}": n for i, n in enumerate(claims)}
    fair = robust.fair_tokens(names, counted)
    parts = [Part(n, fair[p], 1.0) for p, n in names.items()]
    total = sum(fair.values())
    assert unfair(robust.TRIMMED_MEAN, parts, total, 1 / total, clips=False) == ""


LARGE = [1.0, 1.0, 1.0, 1.0, 1e6]
"""Squares of contributions, of which the last is clipped."""
UNFAIR = {
    "a contribution counts a tenth": lambda p: [replace(p[0], factor=0.1), *p[1:]],
    "a contribution counts more": lambda p: [replace(p[0], factor=3.0), *p[1:]],
    "most are clipped": lambda p: [*(replace(x, factor=0.1) for x in p[:3]), *p[3:]],
    "one is turned round": lambda p: [replace(p[0], factor=-1.0), *p[1:]],
    "more tokens than were claimed": lambda p: [replace(p[0], num_tokens=20), *p[1:]],
    "tokens of one that is left out": lambda p: [replace(p[0], factor=0.0), *p[1:]],
}


@pytest.mark.parametrize("squares", [[1.0] * 5, LARGE], ids=["alike", "one large"])
@pytest.mark.parametrize("lie", UNFAIR)
def test_what_no_rule_gives_is_unfair(lie: str, squares: list[float]) -> None:
    parts = parts_of(squares, [10] * 5, robust.MEDIAN_CLIP)
    assert unfair(robust.MEDIAN_CLIP, parts, 50, 1 / 50, clips=False) == ""
    assert unfair(robust.MEDIAN_CLIP, UNFAIR[lie](parts), 50, 1 / 50, clips=False)


def test_a_step_is_neither_enlarged_nor_made_smaller_where_nothing_clips() -> None:
    parts = [Part(10, 10, 1.0)] * 3
    assert unfair(robust.MEAN, parts, 30, 2 / 30, clips=True)
    assert unfair(robust.MEAN, parts, 30, -1 / 30, clips=True)
    assert unfair(robust.MEAN, parts, 30, 0.5 / 30, clips=False)
    assert not unfair(robust.MEAN, parts, 30, 0.5 / 30, clips=True)
    assert unfair(robust.MEAN, [Part(10, 5, 1.0), *parts], 35, 1 / 35, clips=False)


def test_small_changes_of_large_parameters_may_differ_by_rounding() -> None:
    assert is_same_update(0.01, 1.0)
    assert not is_same_update(0.1, 1.0)
    assert is_same_update(0.1, 1.0, parameters=1e6)
    assert not is_same_update(float("nan"), 1.0)


def test_who_never_shows_what_it_has_signed_is_as_good_as_a_liar() -> None:
    withheld = Withheld()
    for i in range(10 * MAX_WITHHELD):  # now and then a link fails
        assert not withheld.is_too_often("honest", 0)
        if i % 3 == 2:
            withheld.shown("honest", 0)
    found = [withheld.is_too_often("p", 1) for _ in range(MAX_WITHHELD + 1)]
    assert found == [False] * MAX_WITHHELD + [True]
    assert not withheld.is_too_often("p", 0)
