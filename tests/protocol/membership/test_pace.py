"""Intervals of gossip, by the size of the swarm, and when the own record is published."""

from __future__ import annotations

import random

from swarmnet.protocol.membership.pace import (
    PUSH_FANOUT,
    REFUTE_EVERY_S,
    GossipPace,
    GossipSettings,
    Publishing,
    Refutations,
    first_targets,
    partner,
    push_targets,
)
from swarmnet.protocol.membership.view import View
from tests.protocol.making import record

EVERY_S = 1.0


def pace_of(size: int) -> GossipPace:
    view = View("a")
    for i in range(size):
        view.merge(record(f"p-{i}"), 0.0)
    pace = GossipPace(GossipSettings(), view)
    pace.adapt(size)
    return pace


def test_in_a_small_swarm_news_spreads_at_once() -> None:
    pace = pace_of(PUSH_FANOUT)
    assert pace.is_small
    assert pace.spread_s == pace.publish_every_s == 0.0


def test_what_a_peer_says_in_a_second_does_not_grow_with_the_swarm() -> None:
    small, large = pace_of(100), pace_of(1000)
    assert large.interval_s == 10 * small.interval_s
    assert large.heartbeat_s == 10 * small.heartbeat_s
    assert large.spread_s > 10 * small.spread_s


def test_silence_is_measured_in_heartbeats() -> None:
    view, settings = View("a"), GossipSettings()
    pace = GossipPace(settings, view)
    pace.adapt(3)
    assert view.silence_s == settings.silence_s
    pace.adapt(1000)
    assert view.silence_s / pace.heartbeat_s == settings.silence_s / settings.heartbeat_s


def published(now: float = 10.0) -> Publishing:
    publishing = Publishing()
    publishing.published((1, 1), now)
    return publishing


def test_the_first_version_is_due_at_once() -> None:
    assert Publishing().is_due(0.0, EVERY_S)


def test_changes_are_collected_for_a_while() -> None:
    publishing = published()
    assert not publishing.is_due(100.0, EVERY_S), "nothing has changed"
    publishing.changed()
    assert publishing.has_news
    assert not publishing.is_due(10.5, EVERY_S)
    assert publishing.is_due(11.0, EVERY_S)
    publishing.published((1, 2), 11.0)
    assert publishing.stamp == (1, 2)
    assert not publishing.has_news


def test_a_version_that_is_old_is_followed_by_another() -> None:
    publishing = published()
    publishing.beat(10.5, EVERY_S)
    assert not publishing.has_news
    publishing.beat(11.0, EVERY_S)
    assert publishing.has_news


def test_nothing_follows_a_declared_join_before_it_is_over() -> None:
    publishing = published()
    publishing.hold()
    publishing.changed()
    assert not publishing.has_news
    publishing.release()
    assert publishing.has_news
    publishing.published((1, 2), 11.0)
    publishing.hold()
    publishing.release()
    assert publishing.has_news, "what was declared is not what is now"


def test_in_a_small_swarm_every_peer_is_told() -> None:
    view = View("a")
    for name in ("a", "b", "c"):
        view.merge(record(name), 0.0)
    assert push_targets(view, ["d"], 1, random.Random(0), 0.0) == ["b", "c", "d"]


def test_in_a_large_one_half_of_the_told_are_the_first_feeders() -> None:
    view = View("a")
    for i in range(3 * PUSH_FANOUT):
        feeds = i % 2 == 0
        view.merge(record(f"p-{i:02}", stage=0 if feeds else 1, has_data=feeds), 0.0)
    first = first_targets(view, PUSH_FANOUT, 0.0)
    assert first == [f"p-{i:02}" for i in range(0, PUSH_FANOUT, 2)]
    told = push_targets(view, [], PUSH_FANOUT, random.Random(0), 0.0)
    assert told[: len(first)] == first
    assert len(told) == len(set(told)) == PUSH_FANOUT
    assert "a" not in told


def test_a_partner_is_a_live_peer_in_reach_or_else_one_with_a_channel() -> None:
    view, rng = View("a"), random.Random(0)
    view.merge(record("a"), 0.0)
    assert partner(view, [], rng, 0.0) is None
    assert partner(view, ["a", "d"], rng, 0.0) == "d"
    view.merge(record("b"), 0.0)
    view.merge(record("c"), 0.0)
    view.reach.unanswered("c", (1, 0), 0.0)
    assert {partner(view, ["d"], rng, 0.0) for _ in range(20)} == {"b"}


def test_suspicions_that_come_close_together_have_one_answer() -> None:
    refutations, answers = Refutations(), []
    for i in range(1000):  # a hundred a second
        refutations.heard((1, i))
        stamp = refutations.due(i / 100)
        if stamp is not None:
            answers.append((i, stamp))
    assert answers[0] == (0, (1, 0)), "the first one at once"
    assert all(stamp == (1, i) for i, stamp in answers), "the newest version is refuted"
    assert len(answers) == 10.0 / REFUTE_EVERY_S
    refutations.heard((1, 7))
    assert refutations.due(100.0) == (1, 999), "what was not answered yet is"
    assert refutations.due(101.0) is None
