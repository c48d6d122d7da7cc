"""What passes have freed goes back to the system when the device is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from swarmnet.runtime.machine import IDLE_LOOK_S, free_when_idle
from swarmnet.simulation.clock import run as run_virtual


class Device:
    """At work in spells, each from one point in time to another, on a piece a second."""

    def __init__(self, spells: Sequence[tuple[float, float]], piece_s: float = 1.0) -> None:
        self.spells = spells
        self.piece_s = piece_s
        self.freed_at: list[float] = []

    @property
    def busy_s(self) -> float:
        """Of the pieces that are done."""
        now = asyncio.get_running_loop().time()
        worked = [max(0.0, min(now, end) - start) for start, end in self.spells]
        return sum(s // self.piece_s * self.piece_s for s in worked)

    @property
    def num_waiting(self) -> int:
        now = asyncio.get_running_loop().time()
        return sum(start <= now < end for start, end in self.spells)


@pytest.mark.parametrize(
    ("spells", "times"),
    [
        ([], 0),
        ([(0.0, 15.0)], 1),
        ([(0.0, 15.0), (100.0, 101.0), (300.0, 900.0)], 3),
        ([(start, start + 5.0) for start in range(0, 600, 10)], 1),
        ([(0.0, 900.0)], 0),
    ],
)
def test_once_after_each_spell_of_work(spells: list[tuple[float, float]], times: int) -> None:
    async def main() -> None:
        loop, device = asyncio.get_running_loop(), Device(spells)

        async def free() -> None:
            assert not device.num_waiting
            device.freed_at.append(loop.time())

        task = loop.create_task(free_when_idle(device, free))
        await asyncio.sleep(890.0 if spells == [(0.0, 900.0)] else 1000.0)
        task.cancel()
        ends = [end for _, end in spells]
        assert len(device.freed_at) == times
        for at in device.freed_at:
            assert IDLE_LOOK_S <= at - max(e for e in ends if e <= at) <= 2 * IDLE_LOOK_S

    run_virtual(main())


def test_a_piece_that_runs_for_long_is_no_idleness() -> None:
    async def main() -> None:
        loop, device = asyncio.get_running_loop(), Device([(0.0, 20.0), (20.0, 500.0)], 20.0)

        async def free() -> None:
            device.freed_at.append(loop.time())

        task = loop.create_task(free_when_idle(device, free))
        await asyncio.sleep(499.0)
        assert device.freed_at == []
        await asyncio.sleep(100.0)
        assert len(device.freed_at) == 1
        task.cancel()

    run_virtual(main())
