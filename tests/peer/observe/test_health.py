"""When a peer calls itself healthy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.observe.health import STANDS_STILL_S, USUAL_ROUNDS, RoundsSeen, judge_health
from peer.observe.report import Reporter, speaks_for_all
from peer.options import ScreenName
from swarmnet.observe.events import PeerJoined
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import load_spec

ROUNDS = 100


def record(name: str, stage: int, state: str = ACTIVE) -> Record:
    return Record(name, "r" * 32, 1, 1, state=state, stage=stage)


OWN = record("own", 0)


def judged(live: list[Record], seen: RoundsSeen, now: float, own: Record = OWN) -> str:
    return judge_health(own, live, 3, ROUNDS, seen, now)


def test_a_run_that_lacks_a_stage_is_not_healthy_for_any_of_its_peers() -> None:
    seen = RoundsSeen(0.0)
    whole = [OWN, record("a", 1), record("b", 2)]
    assert judged(whole, seen, 1.0) == ""
    assert judged(whole[:2], seen, 1.0) == "nobody serves stage 2"
    assert judged([OWN, record("a", 1, JOINING)], seen, 1.0) == "nobody serves stage 1, 2"
    paused = replace(OWN, paused="by its owner")
    assert judged([], seen, 1.0, paused) == ""


def test_three_minutes_without_a_round_are_too_long_but_where_rounds_are_longer() -> None:
    whole = [OWN, record("a", 1), record("b", 2)]
    seen = RoundsSeen(0.0)
    assert judged(whole, seen, STANDS_STILL_S - 1) == ""
    assert judged(whole, seen, STANDS_STILL_S) == "no round has ended for 180 s"
    for number, now in ((4, 10.0), (5, 110.0), (6, 210.0), (7, 310.0)):
        seen.see(number, now)
    assert seen.longest_s == 100.0
    assert judged(whole, seen, 310.0 + USUAL_ROUNDS * 100.0 - 1) == ""
    assert judged(whole, seen, 310.0 + USUAL_ROUNDS * 100.0) == "no round has ended for 300 s"
    seen.see(ROUNDS, 311.0)
    assert judged(whole, seen, 1e6) == "", "the run is over"


@given(st.lists(st.tuples(st.integers(-1, 20), st.floats(0.0, 1000.0)), max_size=20))
def test_whatever_is_seen_an_old_run_stands_still(steps: list[tuple[int, float]]) -> None:
    seen, now = RoundsSeen(0.0), 0.0
    for number, pause in steps:
        now += pause
        seen.see(number, now)
    assert not seen.stands_still(seen.began_at)
    longest_s = now  # of any round; one more second, for what addition rounds off
    assert seen.stands_still(seen.began_at + max(STANDS_STILL_S, USUAL_ROUNDS * longest_s) + 1)


def test_one_of_those_that_share_a_log_speaks_for_all() -> None:
    names = ["a", "b", "c"]
    for living in (names, names[1:], names[2:]):
        speakers = []
        for name in living:
            view = View(name)
            for other in living:
                view.merge(record(other, 0), 0.0)
            if speaks_for_all(view, 0.0):
                speakers.append(name)
            view.merge(replace(record(living[0], 0, LEAVING), version=2), 1.0)
            assert speaks_for_all(view, 1.0) == (name in living[1:2]), "one that leaves does not"
        assert speakers == living[:1]


def test_who_has_not_met_the_run_yet_does_not_speak_of_it() -> None:
    """Where no stage has a replica, one of those that come speaks all the same."""
    newcomer, views = replace(record("a", -1), state=JOINING), {}
    for own in ("a", "b", "c"):
        views[own] = View(own)
        views[own].merge(newcomer, 0.0)
        for name in ("b", "c") if own != "a" else ():
            views[own].merge(replace(record(name, 0), state=JOINING), 0.0)
    assert [own for own, view in views.items() if speaks_for_all(view, 0.0)] == ["b"]


@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_a_peer_prints_neither_that_it_is_there_nor_that_it_knows_of_nobody(
    mode: ScreenName, capsys: pytest.CaptureFixture[str]
) -> None:
    view = View("a")
    with Reporter(load_spec(default_spec_path()), mode) as reporter:
        view.merge(replace(record("a", -1), state=JOINING), 0.0)
        assert [type(e) for e in reporter.look(view, 0.0, 0.0)] == [PeerJoined], "for files"
        assert not capsys.readouterr().out
        view.merge(replace(record("a", 0), version=2), 0.0)
        view.merge(replace(record("b", -1), state=JOINING), 0.0)
        reporter.look(view, 1.0, 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["peer b joined (no stage yet)", "replicas by stage: 1 0"]


@pytest.mark.parametrize(("own", "prints"), [("a", True), ("b", False)])
def test_in_a_shared_log_only_one_prints_the_round(
    own: str, prints: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = load_spec(default_spec_path())
    view = View(own)
    for name in ("a", "b"):
        view.merge(record(name, 0), 0.0)
    with Reporter(spec, "shared") as reporter:
        assert reporter.look(view, 0.0, 0.0), "what happens is told to files all the same"
    assert ("replicas by stage" in capsys.readouterr().out) == prints
