"""Bounds of what a peer may say of itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarmnet.methods.records import MAX_RECORD_BYTES
from swarmnet.protocol.membership.records import (
    ACTIVE,
    DIGEST_BYTES,
    KEPT_ROUNDS,
    MAX_ADDRESSES,
    MAX_COUNT,
    MAX_CREDENTIAL_BYTES,
    MAX_LOSS_SUM,
    MAX_OWING,
    MAX_RATE,
    MAX_RESTORABLE,
    MAX_STRIKES,
    MAX_SWITCHES,
    MAX_TEXT,
    MAX_UNREACHED,
    HeldOut,
    Owing,
    Record,
    Restorable,
    RoundCount,
    record_bytes,
)
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline.progress import round_progress
from swarmnet.protocol.slots import MAX_SLOTS, SlotSet, all_slots
from swarmnet.protocol.sync_modes import Switch
from swarmnet.wire import pack


@pytest.mark.parametrize(
    "said",
    [
        {"committed": SlotSet.of(1)},
        {"launched": SlotSet.of(5), "committed": SlotSet.of(1), "settled": SlotSet.of(2)},
        {"tokens": MAX_COUNT},
        {"loss_sum": 2 * MAX_LOSS_SUM},
        {"loss_sum": math.nan},
        {"loss_sum": -math.inf},
    ],
)
def test_a_count_beyond_all_bounds_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"of a round|round's|committed"):
        RoundCount(0, **said)


@pytest.mark.parametrize("value", [2 * MAX_RATE, math.inf, math.nan, -1.0])
@pytest.mark.parametrize("name", ["samples_per_s", "exchange_s", "last_open_s", "spread"])
def test_a_rate_beyond_all_bounds_is_refused(name: str, value: float) -> None:
    rate: Any = {name: value}
    with pytest.raises(ValueError, match="rate"):
        Record("a", "run", 1, 1, **rate)


def test_what_many_say_at_most_adds_up_to_what_one_may_say() -> None:
    view = View("me")
    every = SlotSet.of(all_slots(MAX_SLOTS))
    most = RoundCount(0, every, every, True, MAX_COUNT - 1, MAX_LOSS_SUM)
    for i in range(100):
        view.merge(Record(f"p{i}", "run", 1, 1, state=ACTIVE, counts=(most,)), 0.0)
    state = round_progress(view, 0, 0.0, 64)
    assert state.committed == 64
    assert state.tokens < 2**62
    assert math.isfinite(state.loss_sum)


def test_who_owes_a_result_is_named_within_bounds() -> None:
    for since, until, name in ((3, 2, "x"), (-1, 2, "x"), (0, 2**62, "x"), (0, 1, "")):
        with pytest.raises(ValueError, match=r"passed over|too long"):
            Owing(name, since, until)
    with pytest.raises(ValueError, match="owe"):
        Record("a", "run", 1, 1, owing=(Owing("x", 1, 2),) * (MAX_OWING + 1))


@pytest.mark.parametrize("unreached", [("x",) * (MAX_UNREACHED + 1), ("x" * (MAX_TEXT + 1),)])
def test_too_many_or_too_long_ids_are_refused(unreached: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="cannot reach"):
        Record("a", "run", 1, 1, unreached=unreached)


@pytest.mark.parametrize(("num_shards", "num_slots"), [(1, 1), (9, 100), (4096, 65_536)])
def test_the_largest_record_of_a_run_fits_its_limit(num_shards: int, num_slots: int) -> None:
    every = SlotSet.of(all_slots(num_slots))
    holds, long = bytes((num_shards + 7) // 8), "x" * MAX_TEXT
    count = RoundCount(2**61, every, every, True, MAX_COUNT - 1, MAX_LOSS_SUM, every)
    largest = Record(
        long,
        long,
        2**61,
        2**61,
        state=ACTIVE,
        addresses=("x" * 2 * MAX_TEXT,) * MAX_ADDRESSES,
        counts=(count,) * KEPT_ROUNDS,
        digests=bytes(DIGEST_BYTES * num_shards),
        holds=holds,
        totals={f"{i:064d}": 2**61 for i in range(64)},
        strikes={f"{i:0{MAX_TEXT}d}": 2**61 for i in range(MAX_STRIKES)},
        agent=long,
        paused=long,
        restorable=(Restorable(2**61, 1, num_shards, holds, 2**61),) * MAX_RESTORABLE,
        credential=bytes(MAX_CREDENTIAL_BYTES),
        held_out=HeldOut(2**61, 1.5, 2.5),
        unreached=(long,) * MAX_UNREACHED,
        owing=(Owing(long, 2**61, 2**61),) * MAX_OWING,
        switches=tuple(Switch(2**61 + i, "delayed", 1.5, 2.5) for i in range(MAX_SWITCHES)),
    )
    assert len(pack(largest)) <= record_bytes(num_shards, num_slots) <= MAX_RECORD_BYTES
