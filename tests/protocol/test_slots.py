"""A round's slots: which samples they hold, and sets of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.slots import (
    EMPTY,
    MAX_SLOTS,
    SlotPlan,
    SlotSet,
    all_slots,
    next_slot,
    permuted,
    sample_indices,
    share_of,
    slots_in,
)
from tests.protocol.making import mask_of

SLOTS = st.sets(st.integers(0, MAX_SLOTS - 1), max_size=40)


@given(st.integers(0, 2**53), st.integers(0, 2**40), st.integers(1, 300))
def test_each_sample_comes_once_an_epoch(seed: int, epoch: int, num_samples: int) -> None:
    found = [permuted(seed, epoch, p, num_samples) for p in range(num_samples)]
    assert sorted(found) == list(range(num_samples))


@given(
    st.integers(0, 2**32),
    st.integers(1, 50),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 4),
)
def test_the_slots_of_some_rounds_are_one_row(
    seed: int, num_samples: int, num_slots: int, samples_per_slot: int, first: int
) -> None:
    """Whatever the round begins with, samples go on where the last slot ended, also where rounds
    have grown."""
    plan = SlotPlan(((0, num_slots), (first + 1, num_slots + 3)))
    row = [
        i
        for r in range(first + 3)
        for slot in range(plan.of(r))
        for i in sample_indices(
            seed=seed,
            round_index=r,
            slot=slot,
            slots=plan,
            samples_per_slot=samples_per_slot,
            num_samples=num_samples,
        )
    ]
    whole = len(row) - len(row) % num_samples
    for start in range(0, whole, num_samples):
        assert sorted(row[start : start + num_samples]) == list(range(num_samples))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=4), st.integers(0, 60))
def test_a_plan_counts_the_slots_of_all_rounds(grows: list[tuple[int, int]], rounds: int) -> None:
    steps = [(0, 2)]
    for later, more in grows:
        steps.append((steps[-1][0] + later, steps[-1][1] + more))
    plan = SlotPlan(tuple(steps))
    each = [plan.of(r) for r in range(rounds)]
    assert all(n == max(n for first, n in steps if first <= r) for r, n in enumerate(each))
    assert plan.before(rounds) == sum(each)
    assert plan.rounds_of(sum(each)) == rounds
    assert plan.rounds_of(sum(each) + 1) == rounds + 1
    assert plan.most == steps[-1][1]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        (seed, epoch): tuple(permuted(seed, epoch, p, 1000) for p in range(1000))
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == len(orders)
    for order in orders.values():
        moved = sum(abs(a - i) for i, a in enumerate(order)) / len(order)
        assert 250 < moved < 420, "a third of the length, in a random order"
        assert sum(b == a + 1 for a, b in pairwise(order)) < 10


def test_data_without_an_end_only_grows() -> None:
    slot = {"seed": 3, "slots": SlotPlan(((0, 4),)), "samples_per_slot": 2, "num_samples": None}
    assert sample_indices(round_index=2, slot=1, **slot) == [18, 19]
    with pytest.raises(ValueError, match="without a sample"):
        sample_indices(round_index=0, slot=0, **{**slot, "num_samples": 0})


def test_an_order_never_changes() -> None:
    """Of released programs: who comes later trains on the same samples."""
    assert [permuted(1, 0, p, 10) for p in range(10)] == [5, 8, 9, 3, 1, 4, 6, 7, 0, 2]


@given(SLOTS, SLOTS)
def test_sets_of_slots(a: set[int], b: set[int]) -> None:
    one, other = SlotSet.of(mask_of(a)), SlotSet.of(mask_of(b))
    assert (list(one), len(one)) == (sorted(a), len(a))
    assert all((slot in one) == (slot in a) for slot in a | b)
    assert (one == other) == (a == b), "a set has one form"
    assert one.issubset(other) == (a <= b)
    assert SlotSet.of(one.mask | other.mask) == SlotSet.of(mask_of(a | b))
    assert SlotSet(one.first, one.bits) == one
    for slot in b:
        assert set(one.with_slot(slot)) == a | {slot}
        assert set(one.without(slot)) == a - {slot}


@pytest.mark.parametrize(
    ("first", "bits"),
    [(-1, b"\1"), (1, b""), (0, b"\0\1"), (0, b"\1\0"), (8192, b"\1"), (0, b"\1" * 8193)],
)
def test_what_is_no_set_of_slots(first: int, bits: bytes) -> None:
    with pytest.raises(ValueError, match="slot"):
        SlotSet(first, bits)


@given(st.integers(1, 300), st.integers(1, 20))
def test_shares_are_all_slots_once(num_slots: int, num_feeders: int) -> None:
    shares = [share_of(rank, num_feeders, num_slots) for rank in range(num_feeders)]
    assert [slot for share in shares for slot in share] == list(range(num_slots))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(SLOTS, st.integers(1, 20), st.integers(1, 2000))
def test_the_next_slot(missing: set[int], num_feeders: int, num_slots: int) -> None:
    missing = {slot % num_slots for slot in missing}
    mask = mask_of(missing)
    picked = []
    for rank in range(num_feeders):
        share = share_of(rank, num_feeders, num_slots)
        slot = next_slot(mask, share, rank, num_feeders)
        own = sorted(missing & set(share))
        if own:
            assert slot == own[0]
        elif missing:
            assert slot in missing
            picked.append(slot)
        else:
            assert slot is None
    if len(missing) >= num_feeders:
        assert len(set(picked)) == len(picked), "who knows the same does not launch the same"


def test_all() -> None:
    assert slots_in(all_slots(5)) == [0, 1, 2, 3, 4]
    assert list(EMPTY) == []
