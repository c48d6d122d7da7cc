"""Processes that compute together hang when none of them has worked for so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from swarmnet.system import ProcessorUse, ThreadUse
from swarmnet.training.processes.standstill import Standstill, place_of

Uses = list[ProcessorUse | None]
CALLERS = {1, 2}


def found_at(uses: Callable[[float], Uses], *, look_s: float = 0.5, at: int | None = 7) -> float:
    """When ranks are found to hang that have been at a call since 100 s; 1,000 for never."""
    standstill = Standstill(20.0)
    now = 95.0
    while now < 1_000.0:
        if standstill.see(now, at if now >= 100.0 else None, partial(uses, now), CALLERS):
            return now
        now += look_s
    return 1_000.0


def of(number: int, used_s: float = 3.0, sleeps: float = 0.0, *, ready: bool = False) -> Uses:
    """A process with one thread."""
    return [ProcessorUse(used_s, ready, False, {number: ThreadUse(used_s, int(sleeps), ready)})]


def waits_for_disk() -> ProcessorUse:
    return ProcessorUse(3.0, wants_more=True, waits_for_disk=True)


def test_ranks_hang_when_none_has_worked_for_so_long() -> None:
    assert 120.0 < found_at(lambda _: of(1) + of(2)) < 122.0
    assert found_at(lambda _: of(1) + of(2), at=None) == 1_000.0
    # One of them works until it hangs too, by itself or with a library's thread, or waits.
    assert 319.0 < found_at(lambda now: of(1) + of(2, min(now, 300.0))) < 322.0
    assert 319.0 < found_at(lambda now: of(1) + of(5, min(now, 300.0))) < 322.0
    assert 319.0 < found_at(lambda now: of(1) + of(2, ready=now < 300.0)) < 322.0
    assert found_at(lambda _: of(1) + of(2, ready=True)) == 1_000.0
    assert 319.0 < found_at(lambda now: [waits_for_disk(), *of(1)] if now < 300 else of(1)) < 322.0
    # A tenth of a processor is what it gets between others, and it meets them all the time.
    assert found_at(lambda now: of(1, now / 10, 300 * now) + of(2)) == 1_000.0
    # What it takes to wait with a look now and then is no work.
    assert 120.0 < found_at(lambda now: of(1, now / 200) + of(2, now / 200)) < 122.0
    # A helper that ends has worked.
    assert 129.0 < found_at(lambda now: of(1) + (of(9) if now < 110.0 else [])) < 132.0
    # Nobody can see it: then it is left to the collective.
    assert found_at(lambda _: [*of(1), None]) == 1_000.0


def test_a_thread_that_only_looks_around_does_not_work_however_slow_the_machine_is() -> None:
    assert 120.0 < found_at(lambda now: of(5, 0.002 * now, 100 * now)) < 123.0
    assert 120.0 < found_at(lambda now: of(5, 0.05 * now, 100 * now)) < 123.0
    # Seen with a processor, or waiting for one, and asleep between.
    assert 120.0 < found_at(lambda now: of(5, 0.01 * now, 100 * now, ready=True)) < 123.0
    # On a machine that stands still for half of the time, in which nothing could be seen.
    assert 120.0 < found_at(lambda now: of(5, 3.0, now // 2, ready=int(now) % 2 == 0)) < 150.0
    # One that computes takes much of a processor between two sleeps.
    assert found_at(lambda now: of(5, 0.05 * now, 10 * now)) == 1_000.0


def test_time_in_which_nobody_looked_is_not_held_against_the_ranks() -> None:
    standstill = Standstill(20.0)
    assert not standstill.see(100.0, 7, lambda: of(1))
    assert not standstill.see(100.5, 7, lambda: of(1))
    for late in (4_000.0, 4_000.5, 4_005.0):  # it slept
        assert not standstill.see(late, 7, lambda: of(1))


def test_the_place_of_a_thread_is_in_our_code() -> None:
    may_end, is_there = threading.Event(), threading.Event()

    def waits_here() -> None:
        is_there.set()
        may_end.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    is_there.wait()
    try:
        assert place_of(thread).startswith("waits_here (test_standstill.py:")
    finally:
        may_end.set()
        thread.join()
    assert place_of(thread) == "its end"
