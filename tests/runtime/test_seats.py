"""A machine that serves as many stages as it can."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.runtime.seats import Seats
from swarmnet.simulation.clock import run


class Serving:
    """A peer that serves until it is stopped."""

    def __init__(self) -> None:
        self.replica = object()
        self.gossip = SimpleNamespace(changed=SimpleNamespace(wait=asyncio.sleep))
        self.has_left = False
        self._stopped = asyncio.Event()

    async def run(self, neighbours: list[str]) -> None:
        await self._stopped.wait()
        self.has_left = True

    def stop(self) -> None:
        self._stopped.set()


@pytest.mark.parametrize("changes", [True, False], ids=["--stages auto", "--stages 2"])
def test_a_further_stage_that_does_not_begin(changes: bool) -> None:
    """By itself it is looked for again later, and the first goes on; where a person wants it, the
    machine ends with the reason."""
    tried = []

    async def two() -> int:
        return 2

    async def make(seat: int) -> Any:
        tried.append(seat)
        raise OSError(errno.ENOSPC, "no space left on device")

    async def scenario() -> None:
        first: Any = Serving()
        seats = Seats(first, two, make, changes)
        running = asyncio.ensure_future(seats.run([]))
        await asyncio.sleep(300.0)
        assert running.done() == (not changes)
        if changes:
            assert len(tried) > 2
            seats.stop()
            await running
            assert first.has_left
        else:
            with pytest.raises(OSError, match="no space"):
                running.result()

    run(scenario())
