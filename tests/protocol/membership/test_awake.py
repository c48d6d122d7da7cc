"""A clock that stands still while its process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarmnet.protocol.membership.failure_detector import (
    LATE_S,
    SILENCE_S,
    TICK_S,
    AwakeTime,
)
from swarmnet.simulation.clock import VirtualLoop, run
from swarmnet.swarm.membership.liveness import Liveness
from swarmnet.transport.memory import MemoryHub
from tests.swarm.membership.parts import acquainted


def _with_clock(use: Callable[[VirtualLoop, Liveness], object]) -> tuple[float, float]:
    """The time awake after `use`, 10 s of sleep and another `use`, from the clock's start; and for
    how long it found that the process stood still."""

    async def scenario() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        a, _ = acquainted(MemoryHub(), "a", "b")
        a.view.set_silence(20.0)
        liveness = a.liveness
        liveness.start()
        began = liveness.awake_s()
        use(loop, liveness)
        await asyncio.sleep(10.0)
        use(loop, liveness)
        await asyncio.sleep(TICK_S)
        took = liveness.awake_s() - began
        liveness.stop()
        return took, a.view.detector.clock.stalled_s

    return run(scenario())


def test_without_a_stall_it_is_the_time_of_the_loop() -> None:
    took, stalled_s = _with_clock(lambda loop, liveness: None)
    assert took == pytest.approx(10.0 + TICK_S)
    assert stalled_s == 0


@pytest.mark.parametrize(("stands_s", "said"), [(60.0, 2), (SILENCE_S, 0)])
def test_a_sleep_after_which_others_have_lost_it_is_told_once(
    stands_s: float, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    _with_clock(lambda loop, liveness: loop.stand_still(stands_s))
    lines = [x.getMessage() for x in caplog.records if "stood still" in x.getMessage()]
    assert [line.partition(" s: ")[2] for line in lines] == ["its peer comes back"] * said


def test_little_delays_are_no_stalls() -> None:
    took, stalled_s = _with_clock(lambda loop, liveness: loop.stand_still(LATE_S / 2))
    assert stalled_s == 0
    assert took >= 10.0 + TICK_S


def test_its_time_is_without_stalls() -> None:
    took, stalled_s = _with_clock(lambda loop, liveness: loop.stand_still(30.0))
    assert stalled_s == pytest.approx(60.0, abs=2 * TICK_S)
    assert took == pytest.approx(10.0, abs=4 * TICK_S)


def test_who_asks_first_after_a_stall_learns_of_it() -> None:
    def use(loop: VirtualLoop, liveness: Liveness) -> None:
        before = liveness.awake_s()
        loop.stand_still(30.0)
        assert liveness.is_live("b"), "it could not be heard"
        assert 0 <= liveness.awake_s() - before <= TICK_S
        assert 0 <= liveness.awake_s() - before <= TICK_S

    took, _ = _with_clock(use)
    assert took == pytest.approx(10.0, abs=4 * TICK_S)


def test_each_stall_is_returned_once() -> None:
    clock = AwakeTime()
    assert clock.stall(1000.0) == 0.0, "it does not tick"
    clock.tick(1000.0)
    assert clock.stall(1000.0 + TICK_S + LATE_S) == 0.0
    assert clock.stall(1000.0 + TICK_S + 20.0) == 20.0
    assert clock.stall(1000.0 + TICK_S + 20.0) == 0.0
    assert clock.time(2000.0) == 1980.0


def test_who_has_stopped_is_late_for_nothing() -> None:
    clock = AwakeTime()
    clock.tick(0.0)
    clock.stop()
    assert clock.stall(60.0) == 0.0
    assert clock.time(60.0) == 60.0
