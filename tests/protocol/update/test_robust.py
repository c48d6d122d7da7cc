from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.update.robust import (
    CLIP_TOLERANCE,
    MIN_CONTRIBUTORS,
    TOKEN_SLACK,
    clip_factors,
    fair_tokens,
    whole_count,
)

claims_of = st.dictionaries(st.text("abcdefgh", min_size=1), st.integers(1, 1000), min_size=1)


@given(claims_of, st.integers(0, 1000))
def test_claims_that_fit_stand(claims: dict[str, int], more: int) -> None:
    assert fair_tokens(claims, sum(claims.values()) + more) == claims
    assert fair_tokens(claims, 0) == claims


@given(claims_of, st.integers(1, 10_000))
def test_claims_are_cut_from_the_top_until_they_fit(claims: dict[str, int], counted: int) -> None:
    fair = fair_tokens(claims, counted)
    assert all(1 <= fair[p] <= claims[p] for p in claims)
    assert sum(fair.values()) <= max(TOKEN_SLACK * counted, len(claims))
    cut = [p for p in claims if fair[p] < claims[p]]
    assert all(fair[p] == max(fair.values()) for p in cut)


def test_a_claim_beyond_all_reason_weighs_little_more_than_the_others() -> None:
    claims = {f"p{i}": 100 for i in range(9)} | {"liar": 10**15}
    fair = fair_tokens(claims, 1000)
    assert [fair[f"p{i}"] for i in range(9)] == [100] * 9
    assert fair["liar"] == 350


def test_tokens_that_a_feeder_has_yet_to_tell_of_are_believed() -> None:
    """Of four microbatches three are known to be counted here, and all four were."""
    claims = {"a": 800, "b": 800, "c": 800, "d": 800}
    assert sum(fair_tokens(claims, 2400).values()) == 3000
    assert whole_count(2400, 3, 4) == 3200
    assert fair_tokens(claims, whole_count(2400, 3, 4)) == claims
    assert whole_count(0, 0, 4) == 0
    assert whole_count(3200, 4, 4) == 3200
    assert whole_count(4000, 5, 4) == 4000, "one counted twice"


def squares_of(norm_per_token: float, num_tokens: int) -> float:
    return (norm_per_token * num_tokens) ** 2


@given(
    st.lists(st.integers(1, 500), min_size=MIN_CONTRIBUTORS, max_size=20),
    st.floats(0.0, 10.0),
    st.floats(0.0, 10.0),
    st.randoms(use_true_random=False),
)
def test_honest_contributors_are_left_alone(
    loads: list[int], signal: float, noise: float, rng: object
) -> None:
    """Whatever their loads, and whichever of signal and noise prevails."""
    tokens = {f"p{i}": n for i, n in enumerate(loads)}
    squares = {}
    for p, n in tokens.items():
        norm = math.sqrt(signal**2 + noise**2 / n) * rng.uniform(0.8, 1.25)  # type: ignore[attr-defined]
        squares[p] = squares_of(norm, n)
    assert clip_factors(squares, tokens) == dict.fromkeys(tokens, 1.0)


@given(
    st.integers(3, 10),
    st.integers(1, 4),
    st.floats(CLIP_TOLERANCE * 1.01, 1e12),
    st.integers(1, 1000),
)
def test_the_larger_an_outlier_the_less_it_counts(
    num_honest: int, num_false: int, times: float, load: int
) -> None:
    num_false = min(num_false, num_honest)
    tokens = {f"p{i}": load for i in range(num_honest + num_false)}
    squares = {p: squares_of(1.0, load) for p in tokens}
    false = [f"p{num_honest + i}" for i in range(num_false)]
    for p in false:
        squares[p] = squares_of(times, load)
    if len(tokens) < MIN_CONTRIBUTORS:
        return
    factors = clip_factors(squares, tokens)
    norms = {p: factors[p] * math.sqrt(squares[p]) / load for p in tokens}
    honest = norms["p0"]
    for p in tokens:
        expected = honest / times if p in false else honest
        assert math.isclose(norms[p], expected, rel_tol=1e-9)
        assert (factors[p] < 1.0) == (p in false)
    # Did all point the same way, the step would be as long as without the outliers.
    assert math.isclose(sum(norms.values()) / len(norms), 1.0, rel_tol=1e-9)


def test_what_few_tokens_can_do_is_small() -> None:
    """Who claims few tokens may be noisier for each of them, and yet adds less in all."""
    tokens = {"a": 100, "b": 100, "c": 100, "liar": 1}
    squares = {p: squares_of(1.0, n) for p, n in tokens.items()}
    squares["liar"] = 1e20
    factors = clip_factors(squares, tokens)
    added = factors["liar"] / factors["a"] * 1e10
    assert added <= 10.0 + 1e-6  # sqrt(100) * sqrt(1), of 100 that an honest one adds


def test_no_majority_no_judgement() -> None:
    squares = {"a": 1.0, "b": 1.0, "c": 1e30}
    assert clip_factors(squares, dict.fromkeys(squares, 1)) == dict.fromkeys(squares, 1.0)


def test_all_zero() -> None:
    squares = dict.fromkeys("abcd", 0.0)
    assert clip_factors(squares, dict.fromkeys("abcd", 5)) == dict.fromkeys("abcd", 1.0)
    squares["d"] = 4.0
    assert clip_factors(squares, dict.fromkeys("abcd", 5))["d"] == 0.0
