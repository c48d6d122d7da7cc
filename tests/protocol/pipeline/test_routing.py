from __future__ import annotations

import random
from collections import Counter

import pytest

from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.pipeline import routing
from swarmnet.protocol.pipeline.routing import Router
from swarmnet.protocol.timing import PATIENCE_S
from tests.protocol.pipeline.queueing import Stage, bursts, closed_loop

SERVICE_S = {"a": 0.01, "b": 0.02, "c": 0.05, "d": 0.1}
CAPACITY = sum(1 / s for s in SERVICE_S.values())
SAMPLES = 8


def make_router(seed: int = 0, *, announce: bool = False) -> Router:
    router = Router(random.Random(seed), samples_per_call=SAMPLES if announce else None)
    router.update({p: SAMPLES / s if announce else 0.0 for p, s in SERVICE_S.items()}, 0.0)
    return router


def excess_of_share(stage: Stage) -> dict[str, float]:
    """Share of each replica over its share of the capacity, minus 1."""
    total = sum(stage.served.values())
    capacity = sum(1 / s for s in stage.service_s.values())
    return {
        p: stage.served.get(p, 0) * stage.service_s[p] * capacity / total - 1
        for p in stage.service_s
    }


def call(router: Router, now: float, took_s: float = 0.05, **kwargs: object) -> str:
    peer_id = router.pick(now, **kwargs)  # type: ignore[arg-type]
    assert peer_id is not None
    router.sent(peer_id, now)
    router.succeeded(peer_id, now + took_s, now)
    return peer_id


@pytest.mark.parametrize("in_flight", [8, 40])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_shares_follow_speeds_that_nobody_announced(in_flight: int, noise: float) -> None:
    stage = Stage(SERVICE_S, noise=noise)
    took_s = closed_loop([make_router()], stage, in_flight, num_calls=4000)
    assert max(map(abs, excess_of_share(stage).values())) < 0.1
    assert 4000 / took_s > 0.9 * CAPACITY


@pytest.mark.parametrize("behind_s", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("in_flight", [8, 40, 120])
def test_a_long_way_behind_the_stage_does_not_level_the_shares(
    behind_s: float, in_flight: int
) -> None:
    stage = Stage(SERVICE_S, behind_s=behind_s, noise=0.2)
    closed_loop([make_router(announce=True)], stage, in_flight, num_calls=4000)
    assert max(map(abs, excess_of_share(stage).values())) < 0.1


@pytest.mark.parametrize("burst", [16, 64])
@pytest.mark.parametrize("behind_s", [0.0, 0.5])
def test_shares_of_bursts_do_not_oscillate(burst: int, behind_s: float) -> None:
    stage = Stage(SERVICE_S, behind_s=behind_s, noise=0.1)
    took_s = bursts(make_router(announce=True), stage, burst, num_bursts=60)
    assert max(map(abs, excess_of_share(stage).values())) < 0.1
    assert 60 * burst / (took_s - 60 * behind_s) > 0.8 * CAPACITY


def test_several_callers_share_a_stage() -> None:
    stage = Stage(SERVICE_S, noise=0.2)
    routers = [make_router(seed, announce=True) for seed in range(4)]
    took_s = closed_loop(routers, stage, in_flight=4, num_calls=4000)
    assert 4000 / took_s > 0.9 * CAPACITY


def test_who_announces_too_much_gets_little_more_than_it_can_do() -> None:
    stage = Stage(SERVICE_S, behind_s=0.2, noise=0.1)
    router = make_router(announce=True)
    lie = {p: SAMPLES / s for p, s in SERVICE_S.items()} | {"d": SAMPLES / SERVICE_S["a"]}
    router.update(lie, 0.0)
    closed_loop([router], stage, in_flight=60, num_calls=4000)
    assert excess_of_share(stage)["d"] < 0.3


def test_calls_interleave() -> None:
    router = Router(random.Random(1), samples_per_call=1)
    router.update({"fast": 20.0, "slow": 10.0}, 0.0)
    for i in range(6):
        call(router, float(i), 0.05)
    order = [call(router, 10.0 + i, 0.1 if i % 3 == 2 else 0.05) for i in range(30)]
    assert max(order[i : i + 4].count("slow") for i in range(26)) <= 2


def test_a_new_replica_is_tried_at_once_and_only_once() -> None:
    router = make_router()
    for i in range(50):
        call(router, float(i))
    router.update(dict.fromkeys([*SERVICE_S, "new"], 0.0), 50.0)
    picks = [router.pick(50.0) for _ in range(5)]
    assert picks[0] == "new"
    assert picks.count("new") <= 2


def test_forward_passes_alone_are_charged_apart_from_microbatches() -> None:
    """A feeder gives its own replica all that it feeds: this one owes the others nothing."""
    router = Router(random.Random(0))
    router.update({"own": 0.0, "other": 0.0}, 0.0)
    for i in range(100):
        assert call(router, i / 10, prefer="own") == "own"
    picked = [router.pick_to_infer(10.0) for _ in range(12)]
    assert picked.count("own") == picked.count("other") == 6
    assert router.pick(10.0) == "other", "nor are microbatches charged with passes"
    router.busy("own", 10.0, 60.0)
    assert [router.pick_to_infer(10.0, exclude=["other"]) for _ in range(2)] == ["own", "own"]
    router.sent("own", 10.0)
    router.failed("own", 10.0, 9.9)
    assert router.pick_to_infer(10.0, exclude=["other"]) is None
    assert {router.pick_to_infer(10.0) for _ in range(4)} == {"other"}


def test_forward_passes_alone_go_by_speed_and_a_newcomer_does_not_make_up_for_others() -> None:
    router = make_router(announce=True)
    for i in range(400):
        call(router, float(i))
    picks = Counter(router.pick_to_infer(400.0) for _ in range(400))
    fastest, slowest = min(SERVICE_S, key=SERVICE_S.get), max(SERVICE_S, key=SERVICE_S.get)  # type: ignore[arg-type]
    assert picks[fastest] > picks[slowest] > 0
    router.update(dict.fromkeys([*SERVICE_S, "new"], 0.0), 400.0)
    picks = Counter(router.pick_to_infer(400.0) for _ in range(40))
    assert 0 < picks["new"] < 20


def test_a_failed_replica_is_banned_and_the_ban_doubles() -> None:
    router = Router(random.Random(0))
    router.update({"a": 0.0}, 0.0)
    now, bans = 0.0, []
    for _ in range(8):
        assert router.pick(now) == "a"
        router.sent("a", now)
        router.failed("a", now, now)
        router.failed("a", now, now)  # failing together counts once
        assert router.pick_to_infer(now) is None, "not even for a forward pass"
        assert router.pick(now) is None
        ready_at = router.ready_at(now)
        assert ready_at is not None
        bans.append(ready_at - now)
        now = ready_at
    assert bans == [1, 2, 4, 8, 16, 30, 30, 30]
    call(router, now)
    router.failed("a", now, now)
    assert router.ready_at(now) == now + FIRST_PAUSE_S


def test_a_replica_that_comes_back_does_not_get_what_it_missed() -> None:
    router = Router(random.Random(0))
    router.update({"a": 0.0, "b": 0.0}, 0.0)
    for i in range(10):
        call(router, i / 10)
    router.failed("a", 1.0, 1.0)
    for i in range(100):
        assert call(router, 1.0 + i / 200) == "b"
    picks = [call(router, 10.0 + i) for i in range(10)]
    assert 4 <= picks.count("a") <= 6


def test_a_ban_survives_a_short_absence() -> None:
    router = Router(random.Random(0))
    router.update({"a": 0.0, "b": 0.0}, 0.0)
    router.failed("a", 0.0, 0.0)
    router.update({"b": 0.0}, 0.1)
    assert router.pick(0.1) == "b"
    router.update({"a": 0.0, "b": 0.0}, 0.2)
    assert router.pick_to_infer(0.2, exclude=["b"]) is None


def test_a_busy_replica_rests_for_about_its_backlog() -> None:
    router = Router(random.Random(0))
    router.update({"a": 0.0}, 0.0)
    router.sent("a", 0.0)
    router.busy("a", 0.0, 0.4)
    assert router.pick(0.2) is None
    assert router.pick_to_infer(0.2) == "a", "it is full, and not banned"
    assert router.pick(0.6) == "a"
    router.busy("a", 0.7, 0.0)
    assert router.pick(0.7 + routing.MIN_BUSY_S / 2) is None, "nor is it asked in a loop"
    router.busy("a", 1.0, 1e9)
    assert router.pick(1.0 + 1.3 * FIRST_PAUSE_S) == "a"


def test_exclusion_and_preference() -> None:
    router = make_router()
    assert router.pick(0.0, prefer="c") == "c"
    assert router.pick(0.0, exclude=["a", "b", "d"]) == "c"
    assert router.pick(0.0, exclude=list(SERVICE_S)) is None
    assert router.pick(0.0, exclude=["c"], prefer="c") != "c"
    router.failed("c", 0.0, 0.0)
    assert router.pick(0.0, prefer="c") != "c"
    assert router.pick(0.0, prefer="unknown") in ("a", "b", "d")


def test_no_replica() -> None:
    router = Router(random.Random(0))
    assert router.pick(0.0) is None
    assert router.ready_at(0.0) is None
    router.update({"a": 0.0}, 0.0)
    assert router.ready_at(3.0) == 3.0
    router.update({}, 4.0)
    assert router.ready_at(4.0) is None
    router.succeeded("a", 5.0, 4.0)
    router.failed("a", 5.0, 4.0)


def test_who_may_not_have_a_call_does_not_make_its_caller_look_again() -> None:
    """Else the caller looks a thousand times a second while one that may have it is busy."""
    router = Router(random.Random(0))
    router.update({"a": 0.0, "behind": 0.0}, 0.0)
    router.put_off("a", 0.0, 0.4)
    ready_at = router.ready_at(0.0, ["behind"])
    assert ready_at is not None
    assert router.pick(ready_at - 1e-6, exclude=["behind"]) is None
    assert router.pick(ready_at, exclude=["behind"]) == "a"
    assert router.ready_at(0.0) == 0.0
    assert router.ready_at(0.0, ["a", "behind"]) is None


def test_a_silent_peer_is_noticed_within_two_seconds() -> None:
    router = Router(random.Random(0))
    router.update({"a": 0.0}, 0.0)
    assert router.deadline_s("a") == routing.FIRST_DEADLINE_S
    rng = random.Random(0)
    for i in range(50):
        call(router, float(i), took_s=0.05 * rng.uniform(0.5, 2))
    assert routing.MIN_DEADLINE_S <= router.deadline_s("a") < 2.0


def test_the_deadline_follows_latency_queue_and_timeouts() -> None:
    router = Router(random.Random(0))
    router.update({"a": 0.0}, 0.0)
    for i in range(50):
        call(router, 10.0 * i, took_s=3.0)
    steady_s = router.deadline_s("a")
    assert 3.0 * 1.5 < steady_s < 15.0
    for _ in range(10):
        router.sent("a", 600.0)
    assert router.deadline_s("a") > 1.5 * steady_s
    for _ in range(10):
        router.abandoned("a", 601.0)
    router.sent("a", 700.0)
    router.failed("a", 700.0 + steady_s, 700.0)
    assert router.deadline_s("a") > steady_s


def test_a_timeout_costs_the_straggler_its_share() -> None:
    router = Router(random.Random(0))
    router.update({"a": 0.0, "b": 0.0}, 0.0)
    for i in range(40):
        call(router, float(i))
    router.sent("a", 40.0)
    router.failed("a", 42.0, 40.0)
    picks = [call(router, 50.0 + i) for i in range(20)]
    assert 0 < picks.count("a") < 8


def test_a_seed_replays() -> None:
    def history(seed: int) -> dict[str, int]:
        stage = Stage(SERVICE_S, noise=0.2)
        closed_loop([make_router(seed)], stage, 8, 500)
        return stage.served

    assert history(3) == history(3)


def test_what_a_newcomer_says_of_its_speed_does_not_make_it_the_cheapest() -> None:
    router = Router(random.Random(0))
    router.update({"a": 10.0, "b": 10.0}, 0.0)
    for now in range(10):
        for peer_id in ("a", "b"):
            router.sent(peer_id, float(now))
            router.succeeded(peer_id, now + 0.1, float(now))
    router.update({"a": 10.0, "b": 10.0, "new": 1e6}, 10.0)
    picks = Counter(router.pick(10.0) for _ in range(30))
    assert picks["new"] <= 12, picks


def with_newcomers(**kwargs: float) -> Router:
    """A router whose replicas a and b have answered ten calls each; and newcomers."""
    router = Router(random.Random(0))
    router.update({"a": 10.0, "b": 10.0}, 0.0)
    for now in range(10):
        for peer_id in ("a", "b"):
            router.take(peer_id)
            router.sent(peer_id, float(now))
            router.succeeded(peer_id, now + 0.1, float(now))
    router.update({"a": 10.0, "b": 10.0} | kwargs, 10.0)
    return router


def test_newcomers_are_tried_one_at_a_time_and_rest_where_one_is_late() -> None:
    router = with_newcomers(x=1e6, y=1e6)
    first = router.pick(10.0)
    assert first in ("x", "y")
    router.sent(first, 10.0)
    assert {router.pick(10.0) for _ in range(20)} <= {"a", "b"}
    assert router.late_s(first) == routing.MIN_DEADLINE_S
    assert router.deadline_s(first) == routing.FIRST_DEADLINE_S
    router.passed_over(first, 11.0)
    rested = 11.0 + PATIENCE_S
    assert {router.pick(rested - 0.1) for _ in range(20)} <= {"a", "b"}
    second = router.pick(rested)
    assert second in ("x", "y")
    assert second != first
    router.sent(second, rested)
    router.passed_over(second, rested + 1.0)
    assert {router.pick(rested + 2 * PATIENCE_S) for _ in range(20)} <= {"a", "b"}


def test_who_answers_late_in_the_end_is_on_trial_no_more() -> None:
    router = with_newcomers(x=1.0)
    assert router.pick(10.0) == "x"
    router.sent("x", 10.0)
    router.passed_over("x", 11.0)
    assert not router.is_ready("x", 15.0)
    router.succeeded("x", 15.0, 10.0)
    assert router.is_ready("x", 15.0)
    assert router.late_s("x") == router.deadline_s("x") > 5.0


def test_a_share_grows_with_what_was_answered() -> None:
    """A newcomer has one call more than it has answered, while others have room; so has one that
    has failed."""
    router, now = with_newcomers(x=1e6), 20.0

    def given() -> int:
        """Of eight calls at a time, which are all answered."""
        nonlocal now
        now += 10.0
        picks = []
        for _ in range(8):
            picks.append(router.pick(now) or "")
            router.sent(picks[-1], now)
        for peer_id in picks:
            router.succeeded(peer_id, now + 0.1, now)
        return picks.count("x")

    assert [given() for _ in range(3)] == [1, 2, 3]
    router.sent("x", now)
    router.failed("x", now + 1.0, now)
    assert given() == 1
