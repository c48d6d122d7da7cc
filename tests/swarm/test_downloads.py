"""A piece comes from whom is done first, and a giver that trickles is left for another one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from swarmnet.errors import Busy, NotReady, Stale, SwarmnetError
from swarmnet.protocol.least_rate import PARTS_OF_FASTEST
from swarmnet.protocol.timing import PATIENCE_S
from swarmnet.simulation.clock import run
from swarmnet.swarm.downloads import Downloads

PIECE = 1 << 20
DAY_S = 86_400.0


class Givers:
    """How long each takes, or what it raises."""

    def __init__(self, **takes: float | SwarmnetError) -> None:
        self.takes = takes
        self.num_asked: Counter[str] = Counter()
        self.num_ended = 0

    async def ask(self, giver: str) -> str:
        self.num_asked[giver] += 1
        takes = self.takes[giver]
        if isinstance(takes, SwarmnetError):
            raise takes
        try:
            await asyncio.sleep(takes)
        except asyncio.CancelledError:
            self.num_ended += 1
            raise
        return f"by {giver}"

    async def pieces(self, num: int, seed: int = 0) -> list[str]:
        downloads = Downloads(random.Random(seed))
        return [(await downloads.piece(list(self.takes), self.ask, PIECE))[1] for _ in range(num)]


@pytest.mark.parametrize("seed", range(8))
def test_a_download_ends_in_time_however_many_givers_trickle(seed: int) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        givers = Givers(honest=1.0, **{f"liar-{n}": DAY_S for n in range(3)})
        pieces = await givers.pieces(40, seed)
        assert pieces == ["by honest"] * 40, seed
        late_s = 7 * PATIENCE_S + 3 * PARTS_OF_FASTEST
        assert loop.time() < 40 * 1.0 + late_s + 10, seed
        assert sum(givers.num_asked.values()) <= 40 + 6, seed
        assert givers.num_ended == sum(givers.num_asked.values()) - 40

    run(scenario())


def test_a_slow_link_with_honest_givers_ends_no_piece() -> None:
    """All take minutes; the first one goes on beside those that are asked after it."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        givers = Givers(a=300.0, b=320.0, c=310.0)
        await givers.pieces(1)
        assert loop.time() <= 320.0

    run(scenario())


def test_who_gives_nothing_is_passed_over_and_all_fail_only_together() -> None:
    async def scenario() -> None:
        givers = Givers(busy=Busy("no", backlog_s=1.0), dead=NotReady("no"), honest=0.1)
        assert await givers.pieces(20) == ["by honest"] * 20
        assert givers.num_asked["busy"] + givers.num_asked["dead"] <= 2
        del givers.takes["honest"]
        with pytest.raises((Busy, NotReady)):
            await givers.pieces(1)
        with pytest.raises(NotReady, match="nobody"):
            await Givers().pieces(1)

    run(scenario())


def test_one_that_was_busy_is_asked_again_beside_one_that_trickles() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        givers = Givers(honest=0.1, trickles=DAY_S)
        downloads = Downloads(random.Random(1))
        for _ in range(3):
            await downloads.piece(["honest"], givers.ask, PIECE)
        began = loop.time()
        givers.takes["honest"] = Busy("no", backlog_s=2.0)
        loop.call_later(5.0, givers.takes.update, {"honest": 0.1})
        assert await downloads.piece(list(givers.takes), givers.ask, PIECE) == (
            "honest",
            "by honest",
        )
        assert loop.time() < began + 10.0

    run(scenario())


def test_what_is_over_is_said_at_once() -> None:
    async def scenario() -> None:
        givers = Givers(a=Stale("over", round=3), b=Stale("over", round=3))
        with pytest.raises(Stale):
            await givers.pieces(1)
        assert sum(givers.num_asked.values()) == 1

    run(scenario())


def test_no_task_outlives_its_piece() -> None:
    async def scenario() -> None:
        givers = Givers(a=DAY_S, b=DAY_S)
        fetching = asyncio.ensure_future(givers.pieces(1))
        await asyncio.sleep(2 * PATIENCE_S)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        assert givers.num_ended == 2
        assert len(asyncio.all_tasks()) == 1

    run(scenario())
