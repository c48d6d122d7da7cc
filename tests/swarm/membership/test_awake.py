"""A clock that stands still while its process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from swarmnet.swarm.membership.awake_clock import STALL_S, TICK_S, AwakeClock

from swarmnet.simulation.clock import VirtualLoop, run


def _with_clock(use: Callable[[VirtualLoop, AwakeClock], object]) -> tuple[float, list[float]]:
    """The clock's time after `use`, 10 s of sleep and another `use`, from its start; and the
    stalls that it told."""
    stalls: list[float] = []

    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = AwakeClock(stalls.append)
        clock.start()
        began = clock.time()
        use(loop, clock)
        await asyncio.sleep(10.0)
        use(loop, clock)
        await asyncio.sleep(TICK_S)
        took = clock.time() - began
        clock.stop()
        return took

    return run(scenario()), stalls


def test_without_a_stall_it_is_the_time_of_the_loop() -> None:
    took, stalls = _with_clock(lambda loop, clock: None)
    assert took == pytest.approx(10.0 + TICK_S)
    assert stalls == []


def test_little_delays_are_no_stalls() -> None:
    took, stalls = _with_clock(lambda loop, clock: loop.stand_still(STALL_S / 2))
    assert stalls == []
    assert took >= 10.0 + TICK_S


def test_its_time_is_without_stalls_and_each_is_told_once() -> None:
    took, stalls = _with_clock(lambda loop, clock: loop.stand_still(30.0))
    assert len(stalls) == 2
    assert sum(stalls) == pytest.approx(60.0, abs=2 * TICK_S)
    assert took == pytest.approx(10.0, abs=4 * TICK_S)


def test_who_asks_first_after_a_stall_learns_of_it() -> None:
    def use(loop: VirtualLoop, clock: AwakeClock) -> None:
        before = clock.time()
        loop.stand_still(30.0)
        assert 0 <= clock.time() - before <= TICK_S
        assert 0 <= clock.time() - before <= TICK_S

    took, stalls = _with_clock(use)
    assert len(stalls) == 2
    assert took == pytest.approx(10.0, abs=4 * TICK_S)


def test_who_has_stopped_is_late_for_nothing() -> None:
    stalls: list[float] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        clock = AwakeClock(stalls.append)
        clock.start()
        clock.stop()
        began = loop.time()
        before = clock.time()
        await asyncio.sleep(60.0)
        assert clock.time() - before == pytest.approx(loop.time() - began)

    run(scenario())
    assert stalls == []
