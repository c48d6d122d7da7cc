"""Processes that compute together hang when none of them has worked for so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from swarmnet.system import ProcessorUse
from swarmnet.training.processes.standstill import Standstill, place_of

Uses = list[ProcessorUse | None]


def found_at(uses: Callable[[float], Uses], *, look_s: float = 0.5, at: int | None = 7) -> float:
    """When ranks are found to hang that have been at a call since 100 s; 1,000 for never."""
    standstill = Standstill(20.0)
    now = 95.0
    while now < 1_000.0:
        if standstill.see(now, at if now >= 100.0 else None, partial(uses, now)):
            return now
        now += look_s
    return 1_000.0


def waits(used_s: float = 3.0) -> ProcessorUse:
    return ProcessorUse(used_s, wants_more=False)


def wants(used_s: float = 3.0, sleeps: float = 0.0) -> ProcessorUse:
    return ProcessorUse(used_s, wants_more=True, ready={5: int(sleeps)})


def waits_for_disk() -> ProcessorUse:
    return ProcessorUse(3.0, wants_more=True, waits_for_disk=True)


def test_ranks_hang_when_none_has_worked_for_so_long() -> None:
    assert 120.0 < found_at(lambda _: [waits(), waits()]) < 121.5
    assert found_at(lambda _: [waits(), waits()], at=None) == 1_000.0
    # One of them works until it hangs too, or waits for a disk or for a processor.
    assert 319.0 < found_at(lambda now: [waits(), waits(min(now, 300.0))]) < 322.0
    assert 319.0 < found_at(lambda now: [waits(), wants() if now < 300.0 else waits()]) < 322.0
    assert found_at(lambda now: [waits(), wants()]) == 1_000.0
    assert 319.0 < found_at(lambda now: [waits_for_disk() if now < 300.0 else waits()]) < 322.0
    # Without much of a processor: it computes, or looks for others a hundred times a second.
    assert found_at(lambda now: [wants(sleeps=now)]) == 1_000.0
    assert 120.0 < found_at(lambda now: [waits(), wants(sleeps=100 * now)]) < 122.0
    # What it takes to look for others now and then is no work.
    assert 120.0 < found_at(lambda now: [waits(now / 200), waits(now / 200)]) < 121.5
    # A helper that ends has worked.
    assert 129.0 < found_at(lambda now: [waits(), waits(3.0 if now < 110.0 else 1.0)]) < 131.5
    # Nobody can see it: then it is left to the collective.
    assert found_at(lambda _: [waits(), None]) == 1_000.0


def test_time_in_which_nobody_looked_is_not_held_against_the_ranks() -> None:
    standstill = Standstill(20.0)
    assert not standstill.see(100.0, 7, lambda: [waits()])
    assert not standstill.see(100.5, 7, lambda: [waits()])
    for late in (4_000.0, 4_000.5, 4_005.0):  # it slept
        assert not standstill.see(late, 7, lambda: [waits()])


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
