"""Which exchange happens when, who meets whom, and when mode `auto` changes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.sync_modes import AUTO, DELAYED, LOCAL, NO_END, ZERO, Switch, SyncPlan
from swarmnet.protocol.update.auto_mode import (
    AHEAD_ROUNDS,
    EXCHANGE_PART,
    IN_A_ROW,
    KEPT_SWITCHES,
    REST_ROUNDS,
    Adviser,
    Chooser,
    local_steps_for,
    merge,
    pace,
)
from swarmnet.protocol.update.pairing import partner

SHARDS = 12


@given(
    rounds=st.integers(1, 60),
    local_steps=st.integers(1, 20),
    fragments=st.integers(1, SHARDS),
    warmup_rounds=st.integers(0, 70),
)
def test_local_shards_are_exchanged_once_in_every_cycle_and_at_the_end(
    rounds: int, local_steps: int, fragments: int, warmup_rounds: int
) -> None:
    plan = SyncPlan(LOCAL, rounds, local_steps, fragments, warmup_rounds=warmup_rounds)
    for j in range(SHARDS):
        due = [r for r in range(rounds) if plan.is_due(j, r)]
        assert due[-1] == rounds - 1
        assert due[:warmup_rounds] == list(range(min(rounds, warmup_rounds)))
        assert all(b - a <= local_steps for a, b in itertools.pairwise(due))
        after = [r for r in due[:-1] if r >= warmup_rounds]
        assert all(b - a == local_steps for a, b in itertools.pairwise(after))
        for version in range(rounds + 1):
            before = [r for r in due if r < version]
            assert plan.last_exchange(j, version) == (before[-1] if before else -1)
        # Every round's work is in one exchange.
        assert [r for e in due for r in plan.window(j, e)] == list(range(rounds))


def test_no_round_of_a_run_without_an_end_is_its_last() -> None:
    local = SyncPlan(LOCAL, NO_END, local_steps=12, fragments=4)
    longer = SyncPlan(LOCAL, 10**6, local_steps=12, fragments=4)
    for r in (0, 11, 999, 9_999):
        assert local.due(r, SHARDS) == longer.due(r, SHARDS)
        assert SyncPlan(DELAYED, NO_END).is_delayed(r)
    assert not local.due(10**12 + 2, SHARDS), "its turn is in other rounds"


def test_fragments_spread_the_shards_over_the_cycle() -> None:
    plan = SyncPlan(LOCAL, rounds=100, local_steps=12, fragments=4)
    counts = [len(plan.due(r, SHARDS)) for r in range(12)]
    assert sorted(counts) == [0] * 8 + [3] * 4


@given(
    rounds=st.integers(1, 40),
    turns=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([ZERO, DELAYED])), max_size=4),
    warmup_rounds=st.integers(0, 50),
)
def test_versions_never_go_back_and_every_exchange_is_made(
    rounds: int, turns: list[tuple[int, str]], warmup_rounds: int
) -> None:
    switches = merge([Switch(r, mode, 1.0, 1.0) for r, mode in turns])
    for plan in (
        SyncPlan(AUTO, rounds, switches=switches, warmup_rounds=warmup_rounds),
        SyncPlan(ZERO, rounds, warmup_rounds=warmup_rounds),
        SyncPlan(DELAYED, rounds, warmup_rounds=warmup_rounds),
    ):
        assert not any(plan.is_delayed(r) for r in range(warmup_rounds))
        versions = [plan.parameter_version(r) for r in range(rounds + 1)]
        assert versions[0] == 0
        assert versions[-1] == rounds
        assert all(0 <= b - a <= 2 for a, b in itertools.pairwise(versions))
        assert all(r - 1 <= v <= r for r, v in enumerate(versions))
        for r in range(rounds):  # an owner to be comes in with an exchange of its own
            assert plan.parameter_version(plan.next_owner_round(r)) > plan.parameter_version(r)


@given(st.sets(st.text(min_size=1, max_size=4), min_size=1, max_size=9), st.integers(0, 99))
def test_partners_are_mutual(peers: set[str], round_index: int) -> None:
    members = sorted(peers)
    partners = {p: partner(p, members, 1, round_index) for p in members}
    alone = [p for p, other in partners.items() if other is None]
    assert len(alone) == len(members) % 2
    for p, other in partners.items():
        assert other != p
        assert other is None or partners[other] == p


def test_partners_change_from_round_to_round() -> None:
    peers = [f"peer-{i}" for i in range(8)]
    met = {partner("peer-0", peers, 0, r) for r in range(100)}
    assert met == set(peers[1:])


def test_a_slow_network_delays_exchanges_and_a_fast_one_brings_them_back() -> None:
    plan = SyncPlan(AUTO, rounds=1000)
    chooser = Chooser()
    modes = []
    for r in range(100):
        share = 0.5 if r < 40 else 0.02
        switch = chooser.decide(plan, r, 2.0, 2.0 * share)
        if switch is not None:
            assert switch.round == r + AHEAD_ROUNDS
            plan = SyncPlan(AUTO, 1000, switches=merge(plan.switches, [switch]))
            modes.append((r, switch.mode))
    assert modes == [(IN_A_ROW - 1, DELAYED), (40 + IN_A_ROW - 1, ZERO)]


def test_exchanges_are_delayed_from_the_end_of_the_warmup_on() -> None:
    plan = SyncPlan(AUTO, rounds=1000, warmup_rounds=30)
    chooser = Chooser()
    for r in range(100):
        switch = chooser.decide(plan, r, 2.0, 1.0)
        if switch is not None:
            plan = replace(plan, switches=merge(plan.switches, [switch]))
    assert [(s.round, s.mode) for s in plan.switches] == [(30, DELAYED)]
    assert [plan.is_delayed(r) for r in (0, 29, 30, 998)] == [False, False, True, True]
    assert SyncPlan(DELAYED, 1000, warmup_rounds=30).parameter_version(30) == 30


def test_between_the_thresholds_and_in_the_rest_nothing_changes() -> None:
    chooser = Chooser()
    delayed = SyncPlan(AUTO, 1000, switches=(Switch(20, DELAYED, 1.0, 1.0),))
    zero = SyncPlan(AUTO, 1000, switches=(Switch(20, ZERO, 1.0, 0.0),))
    for r in range(20, 200):
        assert chooser.decide(delayed, r, 1.0, 0.15) is None
        assert chooser.decide(zero, r, 1.0, 0.15) is None
    for r in range(20, 20 + REST_ROUNDS):
        assert Chooser(votes=99).decide(delayed, r, 1.0, 0.0) is None
    assert Chooser(votes=99).decide(delayed, 20 + REST_ROUNDS, 1.0, 0.0) is not None
    assert Chooser(votes=99).decide(SyncPlan(AUTO, 9), 3, 0.0, 0.0) is None  # nothing measured


@given(st.randoms(use_true_random=False))
def test_switches_merge_in_any_order(rng: random.Random) -> None:
    all_of_them = [
        Switch(rng.randrange(9), rng.choice((ZERO, DELAYED)), rng.random(), rng.random())
        for _ in range(rng.randrange(8))
    ]
    shuffled = rng.sample(all_of_them, len(all_of_them))
    merged = merge(all_of_them)
    assert merged == merge(shuffled[:3], shuffled[3:], shuffled[:2])
    assert [s.round for s in merged] == sorted({s.round for s in all_of_them})[-KEPT_SWITCHES:]


def test_who_waits_for_the_network_is_told_once() -> None:
    adviser = Adviser()
    shares = [0.5] * 5 + [2.0] * 20 + [1.0] * 5 + [2.0] * 10 + [0.5] + [2.0] * 10
    told = [(i, n) for i, s in enumerate(shares) if (n := adviser.steps(3.0, 3.0 * s))]
    assert [i for i, _ in told] == [5 + IN_A_ROW - 1, 41 + IN_A_ROW - 1]
    assert adviser.steps(0.0, 9.0) == 0  # nothing measured


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_so_many_own_steps_leave_exchanges_a_tenth_of_the_time(
    round_s: float, exchange_s: float
) -> None:
    steps = local_steps_for(round_s, exchange_s)
    assert exchange_s <= 1.001 * EXCHANGE_PART * (steps * round_s + exchange_s)
    fewer = steps - 1
    assert not fewer or exchange_s > 0.999 * EXCHANGE_PART * (fewer * round_s + exchange_s)


def test_the_slowest_stage_decides() -> None:
    def record(name: str, stage: int, round_s: float, exchange_s: float) -> Record:
        return Record(name, "run", 1, 1, ACTIVE, stage, round_s=round_s, exchange_s=exchange_s)

    records = [record(f"a{i}", 0, 2.0, 0.1) for i in range(3)]
    records += [record("b0", 1, 2.1, 0.9), record("b1", 1, 2.1, 0.7), record("b2", 1, 9.0, 99.0)]
    records.append(record("new", 1, 0.0, 50.0))
    assert pace(records) == (2.1, 0.9)
    assert pace([]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "values", [(0, "local", 1.0, 1.0), (-1, ZERO, 1.0, 1.0), (0, ZERO, float("nan"), 1.0)]
)
def test_an_impossible_switch_is_refused(values: tuple[int, str, float, float]) -> None:
    with pytest.raises(ValueError, match="switch"):
        Switch(*values)
