"""A machine that serves as many stages as it can."""

from __future__ import annotations

import asyncio
import errno
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.errors import UserError
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.options import AUTO_STAGES, PeerOptions
from swarmnet.runtime.seats import SeatCount, Seats
from swarmnet.simulation.clock import run
from swarmnet.spec import load_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_model.toml"


Make = Callable[[int, AsyncExitStack], Awaitable[Any]]


class Serving:
    """A peer that serves until it is stopped, or fails."""

    def __init__(self, peer_id: str = "m", fails_after_s: float | None = None) -> None:
        self.replica = None if fails_after_s == 0.0 else object()
        self.gossip = SimpleNamespace(
            changed=SimpleNamespace(wait=asyncio.sleep), own=SimpleNamespace(peer_id=peer_id)
        )
        self.has_left = False
        self.unsaved = ""
        self._fails_after_s = fails_after_s
        self._stopped = asyncio.Event()

    async def run(self, neighbours: list[str]) -> None:
        if self._fails_after_s is not None:
            await asyncio.sleep(self._fails_after_s)
            raise OSError(errno.ENOSPC, "no space left on device")
        await self._stopped.wait()
        self.has_left = True

    def stop(self) -> None:
        self._stopped.set()


def test_a_state_that_is_on_no_disk_is_an_error_once_all_have_left() -> None:
    """None of the others is cut off by it."""

    async def scenario() -> None:
        first, further = Serving(), Serving("m/1")
        further.unsaved = "stage 1 ends unsaved"

        async def make(seat: int, parts: AsyncExitStack) -> Any:
            return further

        async def two(num_here: int) -> int:
            return 2

        seats = Seats(first, two, make, False)  # type: ignore[arg-type]
        running = asyncio.ensure_future(seats.run([]))
        await asyncio.sleep(10.0)
        seats.stop()
        with pytest.raises(UserError, match="stage 1 ends unsaved"):
            await running
        assert first.has_left
        assert further.has_left

    run(scenario())


async def make_nothing(seat: int, parts: AsyncExitStack) -> Any:
    raise OSError(errno.ENOSPC, "no space left on device")


async def make_without_stage(seat: int, parts: AsyncExitStack) -> Any:
    return Serving(f"m/{seat}", fails_after_s=0.0)


async def make_for_a_while(seat: int, parts: AsyncExitStack) -> Any:
    return Serving(f"m/{seat}", fails_after_s=20.0)


@pytest.mark.parametrize("make", [make_nothing, make_without_stage, make_for_a_while])
@pytest.mark.parametrize("changes", [True, False], ids=["--stages auto", "--stages 2"])
def test_a_further_stage_that_fails(changes: bool, make: Make) -> None:
    """By itself it is looked for again later, and the first goes on; where a person wants it, the
    machine ends with the reason."""
    tried: list[int] = []
    taken_apart: list[int] = []

    async def two(num_here: int) -> int:
        return 2

    async def trying(seat: int, parts: AsyncExitStack) -> Any:
        tried.append(seat)
        parts.callback(taken_apart.append, seat)
        return await make(seat, parts)

    async def scenario() -> None:
        first: Any = Serving()
        seats = Seats(first, two, trying, changes, random.Random(0))
        running = asyncio.ensure_future(seats.run([]))
        await asyncio.sleep(300.0)
        assert running.done() == (not changes)
        if changes:
            assert 2 < len(tried) < 9
            seats.stop()
            await running
            assert taken_apart == tried
            assert first.has_left
        else:
            with pytest.raises(OSError, match="no space"):
                running.result()

    run(scenario())


def test_a_run_s_spec_chooses_no_code_of_this_machine(tmp_path: Path) -> None:
    """Whoever counts the stages that there is room for builds the model too."""
    theirs = tmp_path / "theirs.py"
    theirs.write_text("raise SystemExit('their code has run')\n")
    spec = load_spec(EXAMPLE).with_builder(f"{theirs}:build")
    mine = f"{EXAMPLE.with_suffix('.py')}:build"
    options = PeerOptions(tmp_path, join=("x",), stages=AUTO_STAGES, builder=mine)
    first: Any = SimpleNamespace(
        gossip=SimpleNamespace(own=SimpleNamespace(peer_id="m")),
        view=View("m"),
        machine=SimpleNamespace(measure=lambda: 0.0, free_bytes=lambda: math.inf),
    )
    assert asyncio.run(SeatCount(spec, options, first, 1e9)(1)) == spec.pipeline.num_stages
