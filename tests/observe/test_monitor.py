"""What an onlooker tells of a run, from the records alone."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from peer.commands.local import summary_table
from swarmnet.observe import monitor as monitor_module
from swarmnet.observe.events import (
    ContributionDropped,
    Counted,
    Event,
    Migrated,
    PeerJoined,
    PeerLost,
    RoundFinished,
    SyncMode,
)
from swarmnet.observe.monitor import MAX_FORGOTTEN, MAX_TOTALS, RunMonitor, newest_held_out
from swarmnet.observe.text import sentence
from swarmnet.protocol.membership.assignment import measurers, measurers_among
from swarmnet.protocol.membership.records import (
    ACTIVE,
    JOINING,
    KEPT_ROUNDS,
    LEFT,
    OBSERVING,
    HeldOut,
    Record,
    RoundCount,
)
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.pipeline import experts
from swarmnet.protocol.resource_limits import told_totals
from swarmnet.protocol.sync_modes import Switch
from tests.protocol.making import counted

GLOBAL_BATCH = 8
TOKENS_PER_SAMPLE = 10


def record(peer_id: str, stage: int = 0, **values: Any) -> Record:
    defaults: dict[str, Any] = {"incarnation": 1, "version": 1, "state": ACTIVE}
    return Record(peer_id, "run", **(defaults | {"stage": stage} | values))


def count(
    round_index: int, committed: int, launched: int | None = None, first: int = 0
) -> RoundCount:
    return counted(
        round_index,
        committed if launched is None else launched,
        committed,
        first=first,
        tokens=committed * TOKENS_PER_SAMPLE,
        loss_sum=committed * TOKENS_PER_SAMPLE * 2.0,
    )


class Onlooker:
    """A monitor and a clock that advances a second a look."""

    def __init__(
        self, *, num_stages: int = 2, rounds: int = 100, ramp: tuple[tuple[int, int], ...] = ()
    ) -> None:
        self.monitor = RunMonitor(
            num_stages=num_stages,
            global_batch=GLOBAL_BATCH,
            samples_per_slot=1,
            rounds=rounds,
            batch_ramp=ramp,
        )
        self.now = 0.0

    def look(self, *records: Record, dead: Sequence[str] = ()) -> list[Event]:
        self.now += 1.0
        live = [r.peer_id for r in records if r.peer_id not in dead]
        return self.monitor.observe(records, live, self.now, 1e9 + self.now)

    def rounds(self, *records: Record) -> list[int]:
        return [e.round for e in self.look(*records) if isinstance(e, RoundFinished)]


def test_a_round_is_told_once_when_committed_and_left_behind() -> None:
    onlooker = Onlooker()
    a, b = record("a", 0), record("b", 1)
    assert onlooker.rounds(a, b) == []
    a = replace(a, counts=(count(0, 4),))
    assert onlooker.rounds(a, b) == []
    b = replace(b, counts=(count(0, 4, first=4),))
    assert onlooker.rounds(a, b) == [], "committed, but nobody has made the update yet"
    b = replace(b, round=1)
    assert onlooker.rounds(a, b) == [0]
    a = replace(a, round=1)
    assert onlooker.rounds(a, b) == []


def test_a_round_is_as_large_as_the_batch_has_grown() -> None:
    onlooker = Onlooker(num_stages=1, ramp=((0, 4), (1, GLOBAL_BATCH)))
    a = record("a", counts=(count(0, 4),))
    onlooker.look(a)
    assert onlooker.monitor.view_model().global_batch == 4
    a = replace(a, round=1, counts=(count(0, 4), count(1, 4)))
    assert onlooker.rounds(a) == [0]
    assert onlooker.monitor.view_model().global_batch == GLOBAL_BATCH
    a = replace(a, round=2)
    assert onlooker.rounds(a) == [], "half of it is committed"
    a = replace(a, counts=(count(0, 4), count(1, 8)))
    assert onlooker.rounds(a) == [1]


def test_the_last_round_is_told_where_all_leave_at_once_after_it() -> None:
    onlooker = Onlooker(rounds=1)
    a, b = record("a", 0, counts=(count(0, 8),)), record("b", 1)
    assert onlooker.rounds(a, b) == []
    a, b = (replace(r, round=1, stage=-1, state=LEFT) for r in (a, b))
    assert onlooker.rounds(a, b) == [0]
    assert onlooker.monitor.all_told


def test_a_run_without_an_end_is_never_done() -> None:
    onlooker, begin = Onlooker(num_stages=1, rounds=0), 10**9
    a = record("a", 0, round=begin, counts=(count(begin, 8),))
    assert onlooker.rounds(a) == []
    assert onlooker.rounds(replace(a, round=begin + 1)) == [begin]
    model = onlooker.monitor.view_model()
    assert (model.round, model.rounds, model.done) == (begin + 1, 0, False)
    assert not onlooker.monitor.all_told


def test_what_others_did_before_this_onlooker_came_is_no_news() -> None:
    """A newcomer sees itself first, and hears of the others later."""
    onlooker = Onlooker()
    own = record("a", 0, started_unix_s=1e9)
    onlooker.look(own)
    old = record("b", 1, started_unix_s=1e9 - 600, totals={"rerouted": 7}, strikes={"x": 1})
    young = record("c", 1, started_unix_s=1e9 + 2, totals={"rerouted": 2})
    assert onlooker.look(own, old) == [PeerJoined(1e9 + 2, "b", 1)]
    assert Counted(1e9 + 3, "rerouted", "c", 2) in onlooker.look(own, old, young)
    old = replace(old, totals={"rerouted": 9}, strikes={"x": 2})
    assert [e for e in onlooker.look(own, old, young) if isinstance(e, Counted)] == [
        Counted(1e9 + 4, "rerouted", "b", 2)
    ]


def test_a_round_waits_for_the_counts_that_are_still_on_their_way() -> None:
    onlooker = Onlooker()
    a, b = record("a", 0, counts=(count(0, 4),)), record("b", 1)
    onlooker.look(a, b)
    b = replace(b, round=1)
    assert onlooker.rounds(a, b) == []
    assert onlooker.rounds(replace(a, counts=(count(0, 8),)), b) == [0]


def test_the_line_of_a_round_has_the_fields_of_the_contract() -> None:
    onlooker = Onlooker()
    a, b = record("a", 0, counts=(count(0, 2, launched=8),)), record("b", 1)
    observer = record("o", -1, state=OBSERVING)
    onlooker.look(a, b, observer)
    (event,) = onlooker.look(replace(a, round=1, counts=(count(0, 8),)), b, observer)
    assert json.loads(json.dumps(event.to_json())) == {
        "event": "round",
        "round": 0,
        "loss": 2.0,
        "samples": 8,
        "tokens": 80,
        "seconds": 1.0,
        "tokens_per_s": 80.0,
        "peers": 2,
        "time_unix_s": 1e9 + 2,
    }


def test_a_round_tells_how_far_replicas_are_apart() -> None:
    onlooker = Onlooker()
    a, b = record("a", 0, counts=(count(0, 2, launched=8),)), record("b", 1)
    onlooker.look(a, b)
    (event,) = onlooker.look(replace(a, round=1, counts=(count(0, 8),), spread=0.25), b)
    assert event.to_json()["spread"] == 0.25


def test_rounds_told_together_share_the_time() -> None:
    onlooker = Onlooker()
    onlooker.look(record("a", counts=(count(0, 2),)))
    events = onlooker.look(record("a", round=2, counts=(count(0, 8), count(1, 8))))
    assert [(e.round, e.seconds) for e in events if isinstance(e, RoundFinished)] == [
        (0, 0.5),
        (1, 0.5),
    ]


def test_who_comes_late_tells_the_rounds_that_the_records_still_have() -> None:
    onlooker = Onlooker()
    counts = tuple(count(r, 8) for r in range(36, 40))
    events = onlooker.look(record("a", 0, round=40, counts=counts), record("b", 1, round=40))
    told = [e for e in events if isinstance(e, RoundFinished)]
    assert [e.round for e in told] == [36, 37, 38, 39]
    assert all(e.seconds == 0 and e.tokens_per_s == 0 for e in told)


def test_who_was_away_goes_on_with_what_is_known_and_never_repeats() -> None:
    onlooker = Onlooker()
    assert onlooker.rounds(record("a", round=1, counts=(count(0, 8),))) == [0]
    counts = tuple(count(r, 8) for r in range(17, 21))
    assert onlooker.rounds(record("a", round=21, counts=counts)) == [17, 18, 19, 20]
    assert onlooker.rounds(record("a", round=21, counts=counts)) == []


def test_a_round_whose_counts_died_is_told_with_what_was_seen() -> None:
    onlooker = Onlooker()
    a, b = record("a", 0, counts=(count(0, 4),)), record("b", 1)
    onlooker.look(a, b)
    later = tuple(count(r, 8) for r in range(2, 6))
    events = onlooker.look(a, replace(b, round=6, counts=later), dead=["a"])
    told = [(e.round, e.samples) for e in events if isinstance(e, RoundFinished)]
    assert told == [(0, 4), (2, 8), (3, 8), (4, 8), (5, 8)]


def test_a_lie_about_the_round_costs_nothing() -> None:
    onlooker = Onlooker(rounds=10)
    onlooker.look(record("a", counts=(count(0, 2),)))
    assert onlooker.rounds(record("a", round=2**61, counts=(count(2**60, 8),))) == [0]
    assert onlooker.monitor.view_model().round == 10


def test_a_restarted_feeder_adds_to_what_it_committed_before() -> None:
    onlooker = Onlooker()
    b = record("b", 1)
    onlooker.look(record("a", counts=(count(0, 4),)), b)
    again = record("a", incarnation=2, counts=(count(0, 4, first=4),))
    assert onlooker.rounds(again, replace(b, round=1)) == [0]


def test_who_left_is_told_with_the_stage_that_it_served() -> None:
    onlooker = Onlooker()
    onlooker.look(record("a", 1))
    gone = record("a", -1, state=LEFT)
    assert onlooker.look(gone) == [PeerLost(1e9 + 2, "a", 1, clean=True)]


def test_peers_come_go_and_come_back() -> None:
    onlooker = Onlooker()
    a, b = record("a", 0), record("b", 1, state=JOINING)
    assert onlooker.look(a, b) == [PeerJoined(1e9 + 1, "a", 0), PeerJoined(1e9 + 1, "b", 1)]
    assert onlooker.look(a, b, dead=["b"]) == [PeerLost(1e9 + 2, "b", 1, clean=False)]
    assert onlooker.look(a, b) == [PeerJoined(1e9 + 3, "b", 1)]
    assert onlooker.look(a, replace(b, state=LEFT)) == [PeerLost(1e9 + 4, "b", 1, clean=True)]
    assert onlooker.look(a) == []
    assert onlooker.look() == [PeerLost(1e9 + 6, "a", 0, clean=False)]


def test_only_a_change_of_the_stage_that_was_served_is_a_migration() -> None:
    onlooker = Onlooker()
    onlooker.look(record("a", 0, state=JOINING))
    assert onlooker.look(record("a", 1, state=ACTIVE)) == []
    assert onlooker.look(record("a", 0, state=JOINING)) == []
    assert onlooker.look(record("a", 0, state=ACTIVE)) == [Migrated(1e9 + 4, "a", 1, 0)]
    assert onlooker.look(record("a", 1, state=ACTIVE, incarnation=2)) == []


def test_growing_counters_become_events_but_not_the_past() -> None:
    onlooker = Onlooker()
    a = record("a", totals={"rerouted": 5, "sent_bytes": 100})
    assert not [e for e in onlooker.look(a) if isinstance(e, Counted)]
    a = replace(a, totals={"rerouted": 7, "shard_reset": 1, "sent_bytes": 300})
    assert onlooker.look(a) == [
        Counted(1e9 + 2, "rerouted", "a", 2),
        Counted(1e9 + 2, "shard_reset", "a", 1),
    ]
    assert onlooker.look(a) == []
    restarted = replace(a, incarnation=2, totals={"rerouted": 1})
    assert onlooker.look(restarted) == [Counted(1e9 + 4, "rerouted", "a", 1)]
    assert onlooker.monitor.view_model().totals["rerouted"] == 8


def test_who_comes_back_after_it_was_forgotten_counts_once() -> None:
    """A machine that slept for longer than its record was kept is the same process."""
    onlooker = Onlooker()
    a = record("a", totals={"rerouted": 5, "sent_bytes": 100})
    onlooker.look(a)
    a = replace(a, totals={"rerouted": 7, "sent_bytes": 300}, strikes={"x": 1})
    onlooker.look(a)
    assert onlooker.look() == [PeerLost(1e9 + 3, "a", 0, clean=False)]
    assert onlooker.look(a) == [PeerJoined(1e9 + 4, "a", 0)]
    assert onlooker.monitor.view_model().totals == {"rerouted": 7, "sent_bytes": 300}
    onlooker.look()
    a = replace(a, totals={"rerouted": 8, "sent_bytes": 310}, strikes={"x": 3})
    assert onlooker.look(a) == [
        PeerJoined(1e9 + 6, "a", 0),
        ContributionDropped(1e9 + 6, "x", 2, "a"),
        Counted(1e9 + 6, "rerouted", "a", 1),
    ]
    onlooker.look()
    restarted = replace(a, incarnation=2, totals={"rerouted": 2}, strikes={})
    assert Counted(1e9 + 8, "rerouted", "a", 2) in onlooker.look(restarted)
    assert onlooker.monitor.view_model().totals["rerouted"] == 10


def test_those_that_have_left_take_no_place_of_those_that_may_come_back() -> None:
    onlooker = Onlooker()
    onlooker.look()
    sleeper = record("sleeper", totals={"rerouted": 1})
    onlooker.look(sleeper)
    onlooker.look()
    for n in range(MAX_FORGOTTEN + 1):
        visitor = record(f"p{n}", totals={"rerouted": 1})
        onlooker.look(visitor)
        onlooker.look(replace(visitor, state=LEFT))
        onlooker.look()
    onlooker.look(sleeper)
    assert onlooker.monitor.view_model().totals["rerouted"] == MAX_FORGOTTEN + 2


def test_what_is_kept_of_the_forgotten_is_bounded() -> None:
    onlooker = Onlooker()
    for n in range(MAX_FORGOTTEN + 1):
        onlooker.look(record(f"p{n}", totals={"rerouted": 1}))
    onlooker.look()
    onlooker.look(record(f"p{MAX_FORGOTTEN}", totals={"rerouted": 1}))
    assert onlooker.monitor.view_model().totals["rerouted"] == MAX_FORGOTTEN + 1
    onlooker.look(record("p0", totals={"rerouted": 1}))
    assert onlooker.monitor.view_model().totals["rerouted"] == MAX_FORGOTTEN + 2


def test_a_counted_event_has_its_name_in_the_metrics() -> None:
    values = Counted(2.0, "checkpoint_saved", "a", 3).to_json()
    assert values == {"event": "checkpoint_saved", "peer_id": "a", "count": 3, "time_unix_s": 2.0}


def test_event_names_are_those_of_the_contract() -> None:
    from swarmnet.observe import events

    names = {Counted(0.0, what, "a", 1).to_json()["event"] for what in events.COUNTED.values()}
    names |= {PeerJoined(0.0, "a", 1).name, PeerLost(0.0, "a", 1, True).name}
    names.add(Migrated(0.0, "a", 1, 0).name)
    names.add(ContributionDropped(0.0, "a", 1, "b").name)
    assert names == {
        "peer_joined",
        "peer_lost",
        "rerouted",
        "migrated",
        "shard_promoted",
        "shard_reset",
        "samples_lost",
        "slots_doubled",
        "diverged",
        "retracted",
        "checkpoint_saved",
        "checkpoints_failed",
        "checkpoints_resumed",
        "contributions_clipped",
        "contribution_dropped",
    }


def test_strikes_name_the_sender() -> None:
    onlooker = Onlooker()
    a = record("a", strikes={"x": 1})
    onlooker.look(a)
    a = replace(a, strikes={"x": 3, "y": 1})
    assert onlooker.look(a) == [
        ContributionDropped(1e9 + 2, "x", 2, "a"),
        ContributionDropped(1e9 + 2, "y", 1, "a"),
    ]
    assert onlooker.look(a) == []


def test_the_held_out_curve_is_told_once_a_round() -> None:
    onlooker = Onlooker(num_stages=1, rounds=2)
    first = HeldOut(0, 5.5, 8.0)
    assert [e.name for e in onlooker.look(record("a", has_data=True, held_out=first))][
        -1
    ] == "held_out"
    assert onlooker.look(record("a", has_data=True, held_out=first)) == []
    last = record(
        "a",
        round=2,
        has_data=True,
        held_out=HeldOut(2, 2.0, 2.9),
        counts=(count(0, 8), count(1, 8)),
    )
    onlooker.look(last)
    summary = onlooker.monitor.summary()
    assert summary.held_out_first is not None
    assert summary.held_out_last is not None
    assert summary.held_out_first.bits_per_byte == 8.0
    assert summary.held_out_last.bits_per_byte == 2.9
    assert summary.rounds == 2
    assert onlooker.monitor.all_told


def test_only_feeders_have_a_turn_to_measure_the_last_parameters() -> None:
    """Nobody launches anything with these, so that only the turn tells who has measured."""
    rounds, last = 8, HeldOut(8, 2.0, 2.9)
    others = [record(p, 1, round=rounds, has_data=True) for p in "bcdefgh"]
    measured = record("a", 0, round=rounds, has_data=True, held_out=last)
    assert newest_held_out([measured, *others], [measured, *others], rounds) == last
    for among in ((measured, *others), others):
        view = View("o", silence_s=1e9)
        for one in among:
            view.merge(one, 0.0)
        assert measurers_among(among) == measurers(view, 0.0)


def test_a_false_round_hides_no_held_out_loss() -> None:
    onlooker = Onlooker(num_stages=1, rounds=2)
    liar = record("liar", held_out=HeldOut(2**61, 0.1, 0.1), has_data=True)
    onlooker.look(record("a", held_out=HeldOut(0, 3.0, 4.0), has_data=True), liar)
    model = onlooker.monitor.view_model()
    assert (model.held_out_round, model.held_out_loss) == (0, 3.0)
    assert newest_held_out([liar], [liar], 2) is None


def test_done_means_every_stage_has_made_the_last_update() -> None:
    onlooker = Onlooker(num_stages=2, rounds=1)
    a, b = record("a", 0, round=1, counts=(count(0, 8),)), record("b", 1, round=0)
    onlooker.look(a, b)
    assert not onlooker.monitor.done
    onlooker.look(a, replace(b, round=1))
    assert onlooker.monitor.done
    assert onlooker.monitor.all_told


def test_a_run_that_its_owner_ends_is_done_with_that_round() -> None:
    """No last measurement is waited for, and nobody has to have made more."""
    onlooker, view, now = Onlooker(num_stages=2, rounds=100), View("o", silence_s=10.0), 0.0

    def look(*records: Record) -> None:
        for one in records:
            view.merge(one, now)
        onlooker.monitor.look(view, now, 1e9 + now)

    a, b = record("a", 0, round=2, counts=(count(1, 8),)), record("b", 1, round=2)
    look(a, b)
    view.run_end.at(3)
    look()
    model = onlooker.monitor.view_model()
    assert (model.done, model.ends_with, model.end) == (False, 3, 3)
    look(replace(a, version=2, round=3, counts=(count(2, 8),)), replace(b, version=2, round=3))
    model = onlooker.monitor.view_model()
    assert (model.done, model.round, model.rounds, model.ends_with) == (True, 3, 100, 3)
    assert onlooker.monitor.all_told


def test_a_run_that_is_ended_before_it_comes_to_the_round_is_done_when_all_have_left() -> None:
    onlooker, view = Onlooker(num_stages=2), View("o", silence_s=10.0)
    view.run_end.at(50)
    onlooker.monitor.look(view, 0.0, 1e9)
    assert not onlooker.monitor.done, "nothing is known of it yet"
    view.merge(record("a", 0, round=2), 0.0)
    onlooker.monitor.look(view, 0.0, 1e9)
    assert not onlooker.monitor.done
    view.merge(record("a", -1, version=2, round=2, state=LEFT), 1.0)
    onlooker.monitor.look(view, 1.0, 1e9 + 1)
    assert onlooker.monitor.done
    assert onlooker.monitor.all_told
    without_order = Onlooker(num_stages=2)
    without_order.look(record("a", 0, round=2))
    without_order.look(record("a", -1, version=2, round=2, state=LEFT))
    assert not without_order.monitor.done


def test_what_a_machine_gave_is_summed_over_its_starts_and_stays_when_it_is_gone() -> None:
    onlooker = Onlooker(num_stages=1)

    def gave(samples: int, **values: Any) -> Record:
        totals = {"samples_computed": samples, "sent_bytes": 10 * samples, "received_bytes": 1}
        return record("a", totals=totals, **values)

    def rows() -> list[tuple[str, int, int, int, float]]:
        given = onlooker.monitor.view_model().given
        return [
            (g.machine, g.samples_computed, g.sent_bytes, g.received_bytes, g.serving_s)
            for g in given
        ]

    onlooker.look(gave(5), record("o", -1, state=OBSERVING, totals={"samples_computed": 9}))
    assert rows() == [("a", 5, 50, 1, 0.0)], "who looks gives nothing"
    onlooker.look(gave(8, version=2))
    onlooker.look(gave(8, version=2), dead=["a"])
    assert rows() == [("a", 8, 80, 1, 1.0)]
    onlooker.look(gave(2, incarnation=2))
    assert rows() == [("a", 10, 100, 2, 2.0)], "a restart begins at zero"
    seat = record("a/1", totals={"samples_computed": 4}, state=JOINING)
    onlooker.look(gave(2, incarnation=2), seat)
    assert rows() == [("a", 14, 100, 2, 3.0)], "one machine serves for a second"
    for _ in range(3):
        onlooker.look(record("b"))
    assert [row[:2] for row in rows()] == [("a", 14), ("b", 0)], "it is gone, and known"


def test_of_many_machines_those_are_known_that_computed_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor_module, "MAX_GIVEN", 3)
    onlooker = Onlooker(num_stages=1)
    for i in range(6):
        onlooker.look(record(f"p{i}", totals={"samples_computed": 10 - i}))
    found = [g.machine for g in onlooker.monitor.view_model().given]
    assert found == ["p0", "p1", "p5"]


def test_the_view_model_shows_coverage_progress_and_peers() -> None:
    onlooker = Onlooker(num_stages=3)
    onlooker.look(
        record("b", 1, state=JOINING),
        record("a", 0, round=3, samples_per_s=2.0, counts=(count(3, 2, launched=6),)),
        record("c", 0, round=3, samples_per_s=1.0, counts=(count(3, 1, launched=2, first=6),)),
        record("o", -1, state=OBSERVING),
    )
    model = onlooker.monitor.view_model()
    assert (model.round, model.committed, model.launched) == (3, 3, 8)
    assert [(s.num_replicas, s.num_joining, s.samples_per_s) for s in model.stages] == [
        (2, 0, 3.0),
        (0, 1, 0.0),
        (0, 0, 0.0),
    ]
    assert model.uncovered == (1, 2)
    assert [row.peer_id for row in model.peers] == ["a", "c", "b"]
    assert json.loads(json.dumps(model.to_json()))["num_live"] == 3


def test_the_summary_tells_what_faults_have_cost() -> None:
    onlooker = Onlooker(num_stages=1)
    onlooker.look(record("a", round=1))
    totals = {"shard_reset": 14, "stage_restarted": 1, "moved": 2, "samples_lost": 8}
    onlooker.look(record("a", round=2, totals=totals))
    shown = Console(width=80, file=io.StringIO())
    shown.print(summary_table(onlooker.monitor.summary()))
    assert isinstance(shown.file, io.StringIO)
    rows = dict(line.rsplit(maxsplit=1) for line in shown.file.getvalue().splitlines())
    told = {name.strip(): value for name, value in rows.items()}
    assert told["optimizer shards reset"] == "14"
    assert told["stages begun afresh"] == "1"
    assert told["moves to another stage"] == "2"
    assert told["samples lost"] == "8"


def test_bytes_per_token_count_what_was_watched_only() -> None:
    onlooker = Onlooker(num_stages=1)
    onlooker.look(record("a", round=1, totals={"sent_bytes": 1000}, counts=(count(0, 8),)))
    onlooker.look(record("a", round=2, totals={"sent_bytes": 1160}, counts=(count(1, 8),)))
    assert onlooker.monitor.summary().bytes_per_token == 2.0
    old = record("b", started_unix_s=1e9 - 600, totals={"sent_bytes": 5000})  # heard of late
    onlooker.look(record("a", round=2, totals={"sent_bytes": 1160}), old)
    assert onlooker.monitor.summary().bytes_per_token == 2.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=40))
def test_every_round_is_told_once_and_in_order_however_views_arrive(
    looks: list[tuple[int, int]],
) -> None:
    """A feeder and a replica advance; the onlooker sees their records at different times, never
    more than `KEPT_ROUNDS` rounds apart."""
    onlooker = Onlooker(num_stages=1, rounds=1000)
    told: list[int] = []
    fed = made = 0
    for ahead, steps in looks:
        made = max(made, min(fed, made + ahead))
        fed = min(fed + steps, made + KEPT_ROUNDS)
        counts = tuple(count(r, 8) for r in range(max(0, fed - KEPT_ROUNDS), fed))
        told += onlooker.rounds(
            record("feeder", 0, state=JOINING, counts=counts), record("replica", 0, round=made)
        )
    assert told == list(range(made))


def test_what_mode_auto_has_decided_is_told_once() -> None:
    onlooker = Onlooker()
    switch = Switch(4, "delayed", 2.0, 0.5)
    own, other = record("a", 0, switches=(switch,)), record("b", 1, switches=(switch,))
    events = onlooker.look(own, other)
    (told,) = [e for e in events if isinstance(e, SyncMode)]
    assert (told.round, told.mode, told.round_s, told.exchange_s) == (4, "delayed", 2.0, 0.5)
    assert not [e for e in onlooker.look(own, other) if isinstance(e, SyncMode)]
    assert sentence(told, 100) == (
        "sync: delayed from round 5 on (an exchange takes 0.50 s, a round 2.00 s)"
    )


def test_a_round_without_any_loss_is_passed_over() -> None:
    """None of its targets has a loss: there is nothing to tell, and the next rounds come."""
    onlooker = Onlooker()
    onlooker.look(record("a", 0), record("b", 1))
    silent = replace(count(0, GLOBAL_BATCH), tokens=0, loss_sum=0.0)
    a = record("a", 0, counts=(silent,), round=1)
    assert onlooker.rounds(a, record("b", 1)) == []
    a = replace(a, counts=(silent, count(1, GLOBAL_BATCH)), round=2)
    assert onlooker.rounds(a, record("b", 1, round=2)) == [1]


def test_a_run_that_hangs_on_one_feeder_says_so() -> None:
    onlooker = Onlooker()
    feeder, other = record("feeder", has_data=True), record("other", 1)

    def risk(*records: Record) -> str:
        onlooker.look(*records)
        return onlooker.monitor.view_model().data_risk

    assert risk(feeder, other) == (
        "the run hangs on feeder, its only feeder: restart it with --serve-data, or give another "
        "peer the data (--data)"
    )
    gives = replace(feeder, version=2, serves_data=True)
    assert risk(gives, other).endswith(
        "start another peer with --fetch-data, which gets the data from it"
    )
    assert risk(gives, replace(other, version=2, has_data=True)) == ""
    assert risk(gives, replace(other, version=3, has_data=True, state=JOINING)) != ""
    assert risk(gives, replace(other, version=4, has_data=False)) != ""
    assert risk(replace(gives, version=3, has_data=False), replace(other, version=5)) == ""


def test_a_run_that_is_done_hangs_on_nobody() -> None:
    onlooker = Onlooker()
    onlooker.look(record("a", 0, has_data=True, round=100), record("b", 1, round=100))
    assert onlooker.monitor.view_model().done
    assert onlooker.monitor.view_model().data_risk == ""


def test_totals_with_names_without_end_are_not_kept_and_real_ones_are() -> None:
    onlooker, totals = Onlooker(), {"sent_bytes": 5, "rerouted": 1}
    for look in range(50):
        made = {f"made-{look}-{n}": 1 for n in range(50)}
        onlooker.look(record("a", version=look, totals=made))
    onlooker.look(record("a", version=99, totals=totals))
    found = onlooker.monitor.view_model().totals
    assert len(found) <= MAX_TOTALS + len(totals)
    assert {name: found[name] for name in totals} == totals


def test_what_owners_allow_is_told_of_each_peer_and_summed_up_of_none() -> None:
    onlooker = Onlooker()
    totals = told_totals([("sent this month", 120, 300.0)])
    onlooker.look(record("a", totals={**totals, "sent_bytes": 7}), record("b", stage=1))
    model = onlooker.monitor.view_model()
    assert [p.allowances for p in model.peers] == [(("sent this month", 120, 300),), ()]
    assert model.totals == {"sent_bytes": 7}


def test_routers_are_told_of_each_peer_and_summed_up_of_none() -> None:
    onlooker = Onlooker()
    told = experts.told_totals([((0.25,) * 4, 0.0), ((0.7, 0.1, 0.1, 0.1), 0.125), ((), 0.0)])
    onlooker.look(record("a", totals={**told, "sent_bytes": 7}), record("b", stage=1))
    model = onlooker.monitor.view_model()
    assert [(p.busiest_expert, p.expert_drops) for p in model.peers] == [(2.8, 0.125), (0.0, 0.0)]
    assert model.totals == {"sent_bytes": 7}
