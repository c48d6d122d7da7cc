"""What a peer says of its upload bandwidth."""

from __future__ import annotations

import random

import pytest

from swarmnet.protocol.bandwidth import Rate, UploadMeter
from swarmnet.protocol.timing import UPKEEP_S

MB = 1 << 20


def send(
    meter: UploadMeter, link: str, num_bytes: int, rate: float, now: float, step: int = MB
) -> float:
    """A link that is saturated until it has sent so much; returns the time after it."""
    meter.began(link, now)
    while num_bytes > 0:
        now += step / rate
        num_bytes -= step
        meter.drained(link, step, now, ended=num_bytes <= 0)
    return now


def test_idle_time_is_not_slowness() -> None:
    meter, now = UploadMeter(), 0.0
    for _ in range(8):
        now = 100 + send(meter, "p", 8 * MB, 5e6, now)
    assert meter.total.bytes_per_s == pytest.approx(5e6)


def test_links_at_the_same_time_add_up() -> None:
    meter, now = UploadMeter(), 0.0
    for name in ("p", "q"):
        meter.began(name, now)
    for _ in range(64):
        now += 0.1
        for name in ("p", "q"):
            meter.drained(name, MB, now, ended=False)
    assert meter.total.bytes_per_s == pytest.approx(20 * MB)


def test_little_is_not_published() -> None:
    meter = UploadMeter()
    now = send(meter, "p", 8 * MB, 1e6, 0.0)
    assert meter.published(now) == 0
    now = send(meter, "p", 16 * MB, 1e6, now)
    assert meter.published(now) == 2.0**20  # in steps of a quarter of a doubling


def test_what_is_published_is_not_moved_by_noise() -> None:
    seed = 7
    rng = random.Random(seed)
    meter, now, said = UploadMeter(), 0.0, set()
    for _ in range(300):
        now = send(meter, "p", 8 * MB, 1.4e6 * 2 ** rng.uniform(-0.4, 0.4), now)
        said.add(meter.published(now))
    assert len(said - {0.0}) == 1, seed
    for _ in range(60):
        now = send(meter, "p", 8 * MB, 12e6, now)
    assert meter.published(now) == 2.0**23.5, seed


def test_it_changes_once_in_a_while_at_most() -> None:
    meter = UploadMeter()
    now = send(meter, "p", 64 * MB, 64e6, 0.0)
    first = meter.published(now)
    later = send(meter, "p", 640 * MB, 640e6, now)
    assert later - now < UPKEEP_S
    assert meter.published(later) == first
    assert meter.published(now + UPKEEP_S) > first


def test_one_that_reads_little_does_not_keep_the_uplink_busy() -> None:
    meter = UploadMeter()
    now = send(meter, "p", 64 * MB, 32e6, 0.0)
    meter.began("slow", now)
    meter.began("q", now)
    assert not meter.is_slow("slow", now), "nothing is known yet"
    for _ in range(4):
        now += 0.05
        meter.drained("q", MB, now, ended=False)
    meter.drained("q", MB, now, ended=True)
    now += 1.0
    meter.drained("slow", MB // 16, now, ended=False)
    assert meter.is_slow("slow", now)
    now = 50 + send(meter, "p", 16 * MB, 32e6, now + 50)
    meter.drained("slow", MB // 4, now, ended=False)
    assert meter.total.bytes_per_s == pytest.approx(32e6, rel=0.2), "idle time is no slowness"
    meter.drained("slow", 16 * MB, now + 1, ended=False)
    assert not meter.is_slow("slow", now + 1), "it reads again"


def test_one_that_reads_nothing_is_found_before_it_tells() -> None:
    meter = UploadMeter()
    now = send(meter, "p", 64 * MB, 32e6, 0.0)
    meter.began("slow", now)
    assert not meter.is_slow("slow", now + 0.1)
    assert meter.is_slow("slow", now + 1)
    now = send(meter, "p", 64 * MB, 32e6, now + 1000)
    assert meter.total.bytes_per_s == pytest.approx(32e6, rel=0.1)
    meter.drained("slow", 0, now, ended=True)
    assert not meter.is_slow("slow", now)


def test_links_that_share_a_slow_uplink_wait_for_it() -> None:
    meter = UploadMeter()
    now = send(meter, "p", 64 * MB, 0.5e6, 0.0)
    links = [str(k) for k in range(16)]
    for link in links:
        meter.began(link, now)
    for _ in range(20):
        now += 8.0
        for k, link in enumerate(links):  # shares that differ by four
            assert not meter.is_slow(link, now)
            meter.drained(link, MB // 8 if k % 4 else MB // 2, now, ended=False)
            assert not meter.is_slow(link, now)


def test_an_uplink_that_has_become_slow_is_believed_in_the_end() -> None:
    meter = UploadMeter()
    now = send(meter, "p", 64 * MB, 64e6, 0.0)
    meter.began("p", now)
    for _ in range(200):
        now += 1.0
        meter.drained("p", MB, now, ended=False)
    assert meter.total.bytes_per_s < 8 * MB
    assert not meter.is_slow("p", now)


def test_a_link_that_was_never_saturated_tells_nothing() -> None:
    meter = UploadMeter()
    send(meter, "p", 16 * MB, 1e6, 0.0)
    known = meter.total.bytes_per_s
    meter.drained("another", MB, 99.0, ended=True)
    assert meter.total.bytes_per_s == known


def test_a_link_that_takes_nothing_for_long_is_slow_and_no_error() -> None:
    rate = Rate()
    for _ in range(5):
        rate.add(0, 10.0)
    assert rate.bytes_per_s == 0
    rate.add(1 << 20, 10.0)
    assert rate.bytes_per_s == (1 << 20) / 60
