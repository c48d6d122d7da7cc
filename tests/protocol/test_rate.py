"""Token buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.rate import RateLimiter


@given(
    st.lists(st.floats(0, 0.5), min_size=1, max_size=200),
    st.floats(0.5, 50),
    st.floats(1, 20),
)
def test_never_more_than_burst_and_rate_allow(
    gaps_s: list[float], per_s: float, burst: float
) -> None:
    limiter = RateLimiter(per_s, burst)
    now, taken = 0.0, 0
    for gap_s in gaps_s:
        now += gap_s
        taken += limiter.allows("p", now)
        assert taken <= burst + now * per_s + 1e-6


def test_who_keeps_to_the_rate_is_never_refused() -> None:
    limiter = RateLimiter(per_s=10, burst=1)
    assert all(limiter.allows("p", 0.1001 * n) for n in range(1000))


def test_remotes_do_not_pay_for_each_other() -> None:
    limiter = RateLimiter(per_s=1, burst=2)
    assert [limiter.allows("flood", 0.0) for _ in range(3)] == [True, True, False]
    assert limiter.allows("other", 0.0)


def test_a_clock_that_steps_back_gives_nothing_away() -> None:
    limiter = RateLimiter(per_s=1, burst=1)
    assert limiter.allows("p", 100.0)
    assert not limiter.allows("p", 50.0)
    assert not limiter.allows("p", 50.5)


def test_memory_is_bounded() -> None:
    limiter = RateLimiter(per_s=1, burst=1, max_keys=8)
    for n in range(100):
        limiter.allows(str(n), 0.0)
    newest = [str(n) for n in range(92, 100)]
    assert not any(limiter.allows(key, 0.0) for key in newest), "these are kept"
    assert limiter.allows("91", 0.0), "the bucket of an older key is a new one, and full"


def test_who_has_not_called_for_so_long_that_its_bucket_is_full_takes_no_memory() -> None:
    limiter = RateLimiter(per_s=2, burst=4)
    for n in range(100):
        assert limiter.allows(str(n), 0.0, 4.0)
    assert not limiter.allows("7", 1.9, 4.0), "it is not full yet"
    limiter.allows("new", 2.0)
    assert len(limiter) == 2, "those of whom something is known"
