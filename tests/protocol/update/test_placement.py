from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmnet.protocol.membership.records import Record, bitmap
from swarmnet.protocol.update.placement import (
    FAST_BYTES_PER_S,
    MAX_RATIO,
    Placement,
    owners,
    short_of_owners,
    weights_from,
)
from tests.protocol.making import record

NUM_SHARDS = 2000


def test_shares_are_proportional_to_weights() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 1.0}
    placement = Placement(0, NUM_SHARDS, weights, replication=1)
    for peer_id, weight in weights.items():
        share = len(placement.owned_by(peer_id)) / NUM_SHARDS
        assert share == pytest.approx(weight / 8, abs=0.04)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(1, 3), st.integers(0, 1000))
def test_a_join_moves_only_what_the_newcomer_gains(n: int, replication: int, stage: int) -> None:
    weights = {f"p{i}": float(2 ** (i % 3)) for i in range(n)}
    before = Placement(stage, 300, weights, replication)
    after = Placement(stage, 300, weights | {"new": 2.0}, replication)
    for j in range(300):
        gained = set(after.owners(j)) - set(before.owners(j))
        assert [p for p in owners(stage, j, after.weights) if p != "new"] == owners(
            stage, j, before.weights
        )
        assert gained <= {"new"}
        assert set(after.owners(j)) - set(before.owners(j)) <= {"new"}


@pytest.mark.parametrize("n", [4, 8, 16])
def test_one_of_n_moves_about_one_nth(n: int) -> None:
    weights = {f"p{i}": 1.0 for i in range(n)}
    before = Placement(0, NUM_SHARDS, weights, 1)
    del weights["p0"]
    after = Placement(0, NUM_SHARDS, weights, 1)
    moved = sum(before.primary(j) != after.primary(j) for j in range(NUM_SHARDS))
    assert moved == len(before.owned_by("p0"))
    assert moved / NUM_SHARDS == pytest.approx(1 / n, rel=0.3)


def test_owners_are_the_head_of_the_order() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 1.0}
    placement = Placement(3, 50, weights, replication=2)
    for j in range(50):
        assert set(placement.owners(j)) == set(owners(3, j, weights)[:2])
        assert placement.order(j)[2:] == tuple(owners(3, j, weights)[2:])
        assert placement.owners(j) == placement.order(j)[:2]
        assert placement.primary(j) == placement.order(j)[0]
    for peer_id in weights:
        assert placement.owned_by(peer_id) == [
            j for j in range(50) if peer_id in placement.owners(j)
        ]
    assert placement.owned_by("stranger") == []


@settings(max_examples=15, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([1.0, 2.0, 4.0]), min_size=1),
    st.integers(1, 64),
    st.integers(1, 4),
    st.integers(0, 100),
)
def test_owners_of_the_same_shards_share_them_out(
    weights: dict[str, float], num_shards: int, replication: int, stage: int
) -> None:
    placement = Placement(stage, num_shards, weights, replication)
    groups: dict[frozenset[str], list[str | None]] = {}
    for j in range(num_shards):
        owners_of = frozenset(placement.owners(j))
        groups.setdefault(owners_of, []).append(placement.primary(j))
    for group, primaries in groups.items():
        drawn = [
            owners(stage, j, weights)[0]
            for j in range(3000)
            if set(owners(stage, j, weights)[: len(group)]) == group
        ]
        for peer_id in group:
            fair = drawn.count(peer_id) / len(drawn) if drawn else 0.0
            spread = 5 * (fair * (1 - fair) / max(len(drawn), 1)) ** 0.5 + 5 / max(len(drawn), 1)
            off = abs(primaries.count(peer_id) - len(primaries) * fair)
            assert off <= 1 + len(primaries) * spread


def test_of_one_shard_a_group_the_first_is_drawn_by_weight() -> None:
    """Not the heaviest each time."""
    weights = {"a": 1.0, "b": 3.0}
    firsts = [Placement(stage, 1, weights, 2).primary(0) for stage in range(1000)]
    assert firsts.count("b") / 1000 == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_primaries_are_in_proportion_to_weights(replication: int) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 8.0, "d": 1.0, "e": 4.0}
    placement = Placement(0, NUM_SHARDS, weights, replication)
    primaries = [placement.primary(j) for j in range(NUM_SHARDS)]
    for peer_id, weight in weights.items():
        assert primaries.count(peer_id) / NUM_SHARDS == pytest.approx(weight / 16, abs=0.03)


def test_few_or_no_peers() -> None:
    assert Placement(0, 3, {"a": 1.0}, replication=2).owners(0) == ("a",)
    assert Placement(0, 3, {}, replication=2).owners(0) == ()
    assert Placement(0, 3, {}, replication=2).primary(0) is None


def test_stages_place_differently() -> None:
    weights = {f"p{i}": 1.0 for i in range(8)}
    orders = {tuple(owners(stage, 0, weights)) for stage in range(8)}
    assert len(orders) > 1


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        owners(0, 0, {"a": weight})


def test_every_process_places_alike() -> None:
    """Frozen values, and the same under any hash seed: peers of any build must agree."""
    weights = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}
    code = (
        "from swarmnet.protocol.update.placement import owners;"
        f"print([owners(1, j, {weights!r}) for j in range(20)])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert seen == {str([owners(1, j, weights) for j in range(20)])}
    assert ["".join(owners(1, j, weights)) for j in range(4)] == ["dbac", "bdac", "dacb", "bdac"]


def test_weights_ignore_noise_and_guess_the_unknown() -> None:
    found = [
        record("a", upload_bytes_per_s=1_000_000.0),
        record("b", upload_bytes_per_s=1_090_000.0),
        record("c", upload_bytes_per_s=8_000_000.0),
        record("d"),
    ]
    weights = weights_from(found)
    assert weights == {"a": 2.0**20, "b": 2.0**20, "c": 2.0**23, "d": 2.0**21}
    assert weights_from([replace(r, upload_bytes_per_s=0.0) for r in found[:2]]) == {
        "a": 1.0,
        "b": 1.0,
    }
    assert weights_from([]) == {}


rates_of = st.lists(st.floats(1e4, 1e9), min_size=2, max_size=24)


def weights_of(rates: list[float]) -> dict[str, float]:
    return weights_from(record(f"p{i}", upload_bytes_per_s=rate) for i, rate in enumerate(rates))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e6, 2e6, 4e6, 8e6]), min_size=2, max_size=10))
def test_owners_hold_in_proportion_to_their_measured_bandwidth(rates: list[float]) -> None:
    weights = weights_of(rates)
    placement = Placement(0, NUM_SHARDS, weights, replication=1)
    total = sum(weights.values())
    for peer_id, weight in weights.items():
        expected = weight / total
        spread = 5 * (expected * (1 - expected) / NUM_SHARDS) ** 0.5  # of a binomial
        assert abs(len(placement.owned_by(peer_id)) / NUM_SHARDS - expected) < spread


fast_rates = st.floats(FAST_BYTES_PER_S, 1e12)


@given(
    st.lists(st.floats(1e4, 1e9), max_size=6),
    st.lists(st.tuples(fast_rates, fast_rates), min_size=1, max_size=6),
)
def test_how_much_faster_than_fast_a_link_was_measured_moves_no_shard(
    others: list[float], fast: list[tuple[float, float]]
) -> None:
    before = weights_of([*others, *(rate for rate, _ in fast)])
    after = weights_of([*others, *(rate for _, rate in fast)])
    assert before == after
    assert len({before[f"p{len(others) + i}"] for i in range(len(fast))}) == 1


@given(rates_of)
def test_a_faster_peer_never_weighs_less(rates: list[float]) -> None:
    weights = weights_of(sorted(rates))
    ordered = [weights[f"p{i}"] for i in range(len(rates))]
    assert ordered == sorted(ordered)


any_rate = st.one_of(
    st.just(0.0),
    st.floats(4.0, 9.0).map(lambda exponent: 10.0**exponent),
)
"""Unknown, or from 10 kB/s to 1 GB/s."""


@settings(max_examples=25, deadline=None)
@given(st.lists(any_rate, min_size=3, max_size=12), st.integers(1, 3))
@example([0.0] * 5 + [1e8, 0.0, 1e4, 1e8], 1)
def test_who_comes_or_goes_moves_its_own_shards_and_little_more(
    rates: list[float], replication: int
) -> None:
    """Owners of a shard, before and after: who comes takes a place, and who goes is replaced. On
    average over who it is, that is 1/N of all. Others change places only for the bound of the
    fastest, and where some are not measured yet: these count as the mean of the others, which far
    apart links move far."""
    num_shards = 200
    every = Placement(0, num_shards, weights_of(rates), replication)
    own_moves = other_moves = 0
    for i, who in enumerate(every.weights):
        without = weights_from(
            record(f"p{k}", upload_bytes_per_s=r) for k, r in enumerate(rates) if k != i
        )
        fewer = Placement(0, num_shards, without, replication)
        for j in range(num_shards):
            own_moves += who in every.owners(j)
            changed = set(fewer.owners(j)) - set(every.owners(j))
            other_moves += max(0, len(changed) - (who in every.owners(j)))
    wanted = num_shards * min(replication, len(rates))
    assert own_moves <= wanted
    assert other_moves <= (0.5 if all(rates) else 1.0) * wanted


@given(rates_of, st.floats(0.98, 1.02), st.randoms(use_true_random=False))
def test_small_changes_of_a_measurement_mostly_move_nothing(
    rates: list[float], factor: float, rng: object
) -> None:
    """Only at the border between two powers of two can they, and then by that one step."""
    i = rng.randrange(len(rates))  # type: ignore[attr-defined]
    changed = [r * factor if k == i else r for k, r in enumerate(rates)]
    before, after = weights_of(rates), weights_of(changed)
    assert 0.5 <= after[f"p{i}"] / before[f"p{i}"] <= 2.0
    rounded = [round(math.log2(r)) for r in (rates[i], changed[i])]
    if rounded[0] == rounded[1]:
        assert after == before


@given(rates_of)
def test_no_link_takes_all(rates: list[float]) -> None:
    weights = weights_of([*rates, 1e15])
    ordered = sorted(weights.values())
    assert ordered[-1] <= MAX_RATIO * sum(ordered[:-1]) / len(ordered[:-1])
    assert ordered[0] > 0


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.integers(1, 3), st.data())
def test_after_deaths_every_shard_gets_its_owners_back(
    n: int, replication: int, data: st.DataObject
) -> None:
    """Whoever is short of a shard takes it over: then each has its owners again, if anybody is
    left who can give it away."""
    num_shards = 16
    names = [f"p{i}" for i in range(n)]
    before = Placement(0, num_shards, dict.fromkeys(names, 1.0), replication)
    living = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    after = Placement(0, num_shards, dict.fromkeys(living, 1.0), replication)

    def holding(held: dict[str, list[int]]) -> list[Record]:
        return [record(p, holds=bitmap(held[p], num_shards)) for p in living]

    held = {p: before.owned_by(p) for p in living}
    records = holding(held)
    taken = {p: short_of_owners(after, records, p) for p in living}
    repaired = {p: sorted({*held[p], *taken[p]}) for p in living}
    for j in range(num_shards):
        now = [p for p in after.order(j) if j in repaired[p]]
        assert now == list(after.owners(j))
        assert not any(short_of_owners(after, holding(repaired), p) for p in living)


def test_who_is_no_candidate_takes_nothing_over() -> None:
    placement = Placement(0, 4, {"a": 1.0, "b": 1.0}, 1)
    assert short_of_owners(placement, [record("a", holds=bitmap([], 4))], "b") == []


PRODUCTS = 2e5
"""FLOPs of Muon's steps on matrices of 4,096 x 14,336, for each byte of int4."""
CPU_FLOPS, GPU_FLOPS = 5e10, 3e13


def machine(name: str, flops: float, rate: float = 4e6) -> Record:
    return record(name, upload_bytes_per_s=rate, product_flops_per_s=flops)


def test_a_cpu_beside_a_gpu_leads_fewer_matrices() -> None:
    """With as fast a link, and with a faster one."""
    for rate in (4e6, 16e6):
        found = [machine("cpu", CPU_FLOPS, rate), machine("gpu", GPU_FLOPS)]
        led = {}
        for flops_per_byte in (0.0, PRODUCTS):
            placement = Placement(0, NUM_SHARDS, weights_from(found, flops_per_byte), 2)
            led[flops_per_byte] = sum(placement.primary(j) == "cpu" for j in range(NUM_SHARDS))
        assert led[0.0] >= NUM_SHARDS // 2 - 1
        assert led[PRODUCTS] < NUM_SHARDS / 8


def test_the_time_of_products_and_that_of_sending_are_added() -> None:
    found = [machine("cpu", CPU_FLOPS), *(machine(f"gpu{i}", GPU_FLOPS) for i in range(4))]
    weights = weights_from(found, PRODUCTS)
    speed = 2.0**36  # the nearest to that of the CPU
    assert weights["cpu"] == pytest.approx(1 / (2.0**-22 + PRODUCTS / speed / 4))
    assert weights["gpu0"] == pytest.approx(2.0**22, rel=0.01)
    assert weights_from(found) == {r.peer_id: 2.0**22 for r in found}
    unknown = [replace(r, upload_bytes_per_s=0.0) for r in found]
    fast = [replace(r, upload_bytes_per_s=FAST_BYTES_PER_S) for r in found]
    assert weights_from(unknown, PRODUCTS) == weights_from(fast, PRODUCTS)


@given(st.floats(0.9, 1.1), st.floats(0.9, 1.1))
def test_noise_of_measurements_moves_no_matrix(a: float, b: float) -> None:
    found = [machine("cpu", 2.0**36 * a, 2.0**22 * b), machine("gpu", 2.0**45 * b, 2.0**24 * a)]
    usual = [machine("cpu", 2.0**36, 2.0**22), machine("gpu", 2.0**45, 2.0**24)]
    assert weights_from(found, PRODUCTS) == weights_from(usual, PRODUCTS)


def test_beside_one_that_does_not_say_how_fast_it_multiplies_links_count_alone() -> None:
    """That one may be of a version that knows no other weights."""
    found = [machine("cpu", CPU_FLOPS), machine("gpu", GPU_FLOPS), machine("old", 0.0)]
    assert weights_from(found, PRODUCTS) == weights_from(found)
