"""What a machine's owner lets a peer take: reading it, hours, hysteresis, the upload bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.resource_limits import (
    BUSY_ABOVE,
    BUSY_AFTER_S,
    MINUTES_A_DAY,
    QUIET_AFTER_S,
    QUIET_BELOW,
    BusyWatch,
    OwnerLimits,
    UploadBucket,
    is_open,
    parse_rate,
    parse_share,
    parse_size,
    parse_span,
    rate_text,
    rest_s,
    share_text,
    size_text,
    span_text,
    why_paused,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10Mbit", 1.25e6),
        ("10 Mbit/s", 1.25e6),
        ("10mbps", None),
        ("10mb", None),
        ("2MB", 2e6),
        ("2 MiB/s", 2 * 2**20),
        ("800kbits", 1e5),
        ("0.5Gbit", 62.5e6),
        ("10", None),
        ("10M", None),
        ("-1Mbit", None),
        ("1ib", None),
        ("", None),
    ],
)
def test_rates_are_read(text: str, bytes_per_s: float | None) -> None:
    if bytes_per_s is None:
        with pytest.raises(ValueError, match="a rate is written"):
            parse_rate(text)
    else:
        assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GB", 4e9), ("512MiB", 512 * 2**20), ("4 gb", 4e9), ("4Gbit", None), ("lots", None)],
)
def test_sizes_are_read(text: str, num_bytes: float | None) -> None:
    if num_bytes is None:
        with pytest.raises(ValueError, match="an amount is written"):
            parse_size(text)
    else:
        assert parse_size(text) == num_bytes


@given(
    st.floats(1e3, 1e12),
    st.floats(1.0, 1e15),
    st.floats(0.01, 1.0),
    st.integers(0, 1439),
    st.integers(0, 1439),
)
def test_what_is_written_is_read_as_the_same(
    rate: float, size: float, share: float, begin: int, end: int
) -> None:
    assert parse_rate(rate_text(rate)) == pytest.approx(rate, rel=1e-3)
    assert parse_size(size_text(size)) == pytest.approx(size, rel=1e-3)
    assert parse_share(share_text(share)) == pytest.approx(share, rel=1e-4)
    assert parse_span(span_text((begin, end))) == (begin, end)


@pytest.mark.parametrize("text", ["22-7", "25:00-01:00", "22:60-01:00", "24:30-01:00", "always"])
def test_hours_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"hours are written|no such time"):
        parse_span(text)


def test_hours_wrap_around_midnight_and_may_be_several() -> None:
    night, noon = parse_span("22:00-07:00"), parse_span("12:00-13:30")
    assert is_open((), 0)
    for minute in range(MINUTES_A_DAY):
        at_night = minute >= 22 * 60 or minute < 7 * 60
        at_noon = 12 * 60 <= minute < 13 * 60 + 30
        assert is_open((night,), minute) == at_night
        assert is_open((night, noon), minute) == (at_night or at_noon)
    assert is_open((parse_span("20:00-24:00"),), 23 * 60 + 59)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_upload_bytes_per_s": 10.0},
        {"max_memory_bytes": 0.0},
        {"max_device_share": 0.0},
        {"max_device_share": 1.1},
        {"hours": ((60, 60),)},
        {"hours": ((0, 1440),)},
    ],
)
def test_limits_that_cannot_be(limits: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^(max_upload|max_memory|max_device_share|hours): "):
        OwnerLimits(**limits)  # type: ignore[arg-type]


def test_the_reason_of_a_pause_is_the_owners_first() -> None:
    limits = OwnerLimits(hours=(parse_span("22:00-07:00"),), pause_when_busy=True)
    assert why_paused(limits, 23 * 60, is_busy=False) == ""
    assert why_paused(limits, 12 * 60, is_busy=False) == "it is outside its hours 22:00-07:00"
    assert why_paused(limits, 23 * 60, is_busy=True) == "the machine is in use"
    assert why_paused(replace(limits, pause_when_busy=False), 23 * 60, is_busy=True) == ""
    assert why_paused(replace(limits, paused=True), 12 * 60, True) == "its owner paused it"


def test_a_share_of_the_device_is_kept_by_resting() -> None:
    assert rest_s(0.3, None) == rest_s(0.3, 1.0) == 0.0
    for share in (0.1, 0.5, 0.9):
        assert 0.3 / (0.3 + rest_s(0.3, share)) == pytest.approx(share)


def test_a_moments_load_is_not_use_and_a_moments_quiet_no_end_of_it() -> None:
    watch, now = BusyWatch(), 0.0

    def look(others: float, for_s: float) -> bool:
        nonlocal now
        for _ in range(int(2 * for_s)):
            now += 0.5
            watch.observe(others, now)
        return watch.is_busy

    assert not look(0.9, BUSY_AFTER_S - 1)
    assert not look(0.0, 1)
    assert not look(0.9, BUSY_AFTER_S - 1)
    assert look(0.9, 3)
    assert look(QUIET_BELOW + 0.01, 10 * QUIET_AFTER_S), "between the two nothing changes"
    assert look(0.0, QUIET_AFTER_S - 1)
    assert look(BUSY_ABOVE, 1)
    assert look(0.0, QUIET_AFTER_S - 1)
    assert not look(0.0, 3)
    assert not look(BUSY_ABOVE - 0.01, 10 * BUSY_AFTER_S)


@given(st.lists(st.integers(1, 200_000), min_size=20, max_size=60), st.floats(1e4, 1e7))
def test_a_bucket_lets_through_its_rate_and_a_burst(sizes: list[int], rate: float) -> None:
    bucket, now = UploadBucket(), 5.0
    bucket.limit(rate, now)
    began = now
    for size in sizes:
        now += bucket.wait_s(now)
        bucket.spend(size, now)
    # Everything but the last piece is paid for, and never more than what is owed is waited for.
    assert now - began == pytest.approx(sum(sizes[:-1]) / rate, rel=1e-6, abs=1e-6)
    now += bucket.wait_s(now) + 100.0
    bucket.spend(int(rate * bucket.burst_s), now)
    assert bucket.wait_s(now) == pytest.approx(0.0, abs=1e-4), "a burst is all that is saved up"
    bucket.limit(None, now)
    bucket.spend(10**12, now)
    assert bucket.wait_s(now) == 0.0
