"""Bytes by day and month, against what an owner allows."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.machine.bill import KEPT, Bill, Used, rounded, used_line, why_used_up
from swarmnet.protocol.resource_limits import OwnerLimits

GB = 10**9
MONTHLY = OwnerLimits(max_upload_per_month_bytes=300 * GB, max_download_per_day_bytes=20 * GB)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**9), st.integers(0, 10**9))))
def test_the_sums_of_the_present_day_and_month(steps: list[tuple[int, int, int]]) -> None:
    bill, today = Bill(), date(2026, 11, 28)
    told: list[tuple[date, int, int]] = []
    for days, sent, received in steps:
        today += timedelta(days)
        bill.add(today.isoformat(), sent, received)
        told.append((today, sent, received))
    here = [t for t in told if t[0] == today]
    month = [t for t in told if t[0].replace(day=1) == today.replace(day=1)]
    assert bill.today(today.isoformat()) == Used(sum(t[1] for t in here), sum(t[2] for t in here))
    assert bill.this_month(today.isoformat()) == Used(
        sum(t[1] for t in month), sum(t[2] for t in month)
    )
    assert Bill.from_json(bill.to_json()) == bill
    assert len(bill.days) <= KEPT


def test_a_clock_that_is_wrong_for_a_while_loses_no_count() -> None:
    bill = Bill()
    bill.add("2026-11-29", 5, 0)
    bill.add("1970-01-01", 1, 0)
    bill.add("2026-11-29", 5, 0)
    assert bill.this_month("2026-11-30") == Used(10, 0)


def test_why_and_how_much() -> None:
    bill = Bill()
    bill.add("2026-11-28", 200 * GB, 19 * GB)
    assert why_used_up(MONTHLY, bill, "2026-11-28") == ""
    assert used_line(MONTHLY, bill, "2026-11-28") == (
        "200GB of 300GB sent this month; 19GB of 20GB received today"
    )
    bill.add("2026-11-28", 0, GB)
    assert why_used_up(MONTHLY, bill, "2026-11-28") == (
        "it has received today what its owner allows, 20GB"
    )
    assert why_used_up(MONTHLY, bill, "2026-11-29") == "", "the next day"
    bill.add("2026-11-30", 95 * GB, 0)
    assert "sent this month" in why_used_up(MONTHLY, bill, "2026-11-30"), "some is left for gossip"
    assert why_used_up(MONTHLY, bill, "2026-12-01") == "", "the next month"
    assert (
        why_used_up(OwnerLimits(), bill, "2026-11-30") == used_line(OwnerLimits(), bill, "") == ""
    )


@pytest.mark.parametrize(
    "values",
    [
        None,
        {},
        {"days": {}, "months": []},
        {"days": {"2026-11-29": [1]}, "months": {}},
        {"days": {"2026-11-29": [1, -1]}, "months": {}},
        {"days": {"2026-11-29": [1, "1"]}, "months": {}},
        {"days": {"x": [1, 1]}, "months": {}},
    ],
)
def test_what_is_no_count_is_refused(values: object) -> None:
    with pytest.raises(ValueError, match=r"not a count|unpack"):
        Bill.from_json(values)


def test_amounts_have_a_few_digits() -> None:
    assert [rounded(n) for n in (0, 999, 12_345, 123_456_789_012)] == [
        "0B",
        "999B",
        "12.3kB",
        "123GB",
    ]
