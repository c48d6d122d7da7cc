"""How news wakes the tasks of a peer that wait for a change."""

from __future__ import annotations

import asyncio

from swarmnet.protocol.membership.pace import PUSH_FANOUT, GossipPace, GossipSettings
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.records import News
from swarmnet.swarm.timing import LOOK_LESS_S
from tests.swarm.membership.parts import now, record


def pace_of(size: int) -> GossipPace:
    view = View("a")
    for i in range(size):
        view.merge(record(f"p-{i}"), now())
    pace = GossipPace(GossipSettings(), view)
    pace.adapt(size)
    return pace


def test_in_a_large_swarm_the_news_of_a_moment_wakes_once() -> None:
    async def scenario() -> None:
        for size, woken in ((PUSH_FANOUT, 5), (100, 1), (1000, 1)):
            pace = pace_of(size)
            news, count = News(pace), 0

            async def wait(news: News = news) -> None:
                nonlocal count
                while True:
                    await news.changed.wait()
                    count += 1

            waiting = asyncio.ensure_future(wait())
            for _ in range(5):
                await asyncio.sleep(0.001)
                news.tell()
            await asyncio.sleep(2 * LOOK_LESS_S)
            assert count == woken
            news.tell()
            news.close()
            waiting.cancel()

    run(scenario())
