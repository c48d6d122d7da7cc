"""Intervals of gossip, by the size of the swarm, and how news wakes the tasks of a peer."""

from __future__ import annotations

import asyncio

from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.news import News
from swarmnet.swarm.membership.pace import (
    PUSH_FANOUT,
    GossipPace,
    GossipSettings,
)
from swarmnet.swarm.timing import LOOK_LESS_S
from tests.swarm.membership.parts import now, record


def pace_of(size: int) -> GossipPace:
    view = View("a")
    for i in range(size):
        view.merge(record(f"p-{i}"), now())
    pace = GossipPace(GossipSettings(), view)
    pace.adapt(size)
    return pace


def test_in_a_small_swarm_news_spreads_at_once() -> None:
    async def scenario() -> None:
        pace = pace_of(PUSH_FANOUT)
        assert pace.is_small
        assert pace.spread_s == pace.publish_every_s == pace.tell_together_s == 0.0

    run(scenario())


def test_what_a_peer_says_in_a_second_does_not_grow_with_the_swarm() -> None:
    async def scenario() -> None:
        small, large = pace_of(100), pace_of(1000)
        assert large.interval_s == 10 * small.interval_s
        assert large.heartbeat_s == 10 * small.heartbeat_s
        assert large.spread_s > 10 * small.spread_s
        assert large.tell_together_s == LOOK_LESS_S >= small.tell_together_s > 0

    run(scenario())


def test_silence_is_measured_in_heartbeats() -> None:
    async def scenario() -> None:
        view, settings = View("a"), GossipSettings()
        pace = GossipPace(settings, view)
        pace.adapt(3)
        assert view.silence_s == settings.silence_s
        pace.adapt(1000)
        assert view.silence_s / pace.heartbeat_s == settings.silence_s / settings.heartbeat_s

    run(scenario())


def test_in_a_large_swarm_the_news_of_a_moment_wakes_once() -> None:
    async def scenario() -> None:
        for size, woken in ((PUSH_FANOUT, 5), (100, 1)):
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
