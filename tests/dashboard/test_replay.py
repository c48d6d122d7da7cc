"""A run is seen again from its metrics file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.observe.dashboard.hub import MAX_EVENTS_KEPT, MAX_ROUNDS_KEPT
from peer.observe.dashboard.replay import MAX_FRAMES, check_file, make_film
from peer.observe.metrics import MetricsFile
from peer.observe.report import Reporter
from swarmnet.errors import UserError
from swarmnet.observe.events import (
    Counted,
    Event,
    HeldOut,
    PeerJoined,
    PeerLost,
    RoundFinished,
    event_from_json,
)
from swarmnet.protocol.sync_modes import RunEnd
from tests.dashboard.making import feeder, replica, spec_of


def shown(film: dict[str, Any], until: int | None = None) -> dict[str, Any]:
    """What the page knows at the end (or after some frames)."""
    page: dict[str, Any] = {"model": {}, "peers": {}, "given": {}, "rounds": [], "events": []}
    for frame in film["frames"][:until]:
        page["model"] |= frame.get("model", {})
        page["peers"] |= frame.get("peers", {})
        page["given"] |= frame.get("given", {})
        for key in ("rounds", "events"):
            page[key] += frame.get(key, [])
    page["peers"] = {k: v for k, v in page["peers"].items() if v is not None}
    return page


class View:
    """What a reporter looks at."""

    own_peer_id = ""
    run_end = RunEnd()

    def __init__(self, *records: Any, dead: tuple[str, ...] = ()) -> None:
        self._records, self._dead = records, dead

    def records(self) -> list[Any]:
        return list(self._records)

    def live(self, now: float) -> list[Any]:
        return [r for r in self._records if r.peer_id not in self._dead]


def test_a_film_ends_where_the_run_did(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with MetricsFile(path) as metrics:
        reporter = Reporter(spec_of(2), "quiet", metrics)
        for r in range(30):
            dead = ("c",) if r > 20 else ()
            busy = {"last_open_s": 2.0, "last_busy_s": 1.5, "last_exchange_s": 0.5}
            b = replica("b", 1, r, totals={"samples_computed": r}, **busy)
            c = replica("c", 1, r, **busy)
            view: Any = View(feeder("a", r, 2.0, **busy), b, c, dead=dead)
            reporter.look(view, 5.0 * r, 1e9 + 5.0 * r)
    film = make_film(path)
    assert film["about"]["num_stages"] == 2
    page = shown(film)
    assert page["peers"]["c"]["state"] == "lost"
    assert page["given"]["b"]["samples_computed"] >= 26
    assert page["given"]["c"]["serving_s"] == 100.0, "until it was lost"
    assert page["peers"]["a"]["samples_per_s"] == 4.0
    assert page["model"]["stages"][1]["risk"] == "stage 1: one failure from loss"
    assert len(page["rounds"]) >= 27
    assert page["rounds"][-1][6:] == [1.5, 0.5, 0.5], "compute, exchange, waiting"
    assert [e["kind"] for e in page["events"]].count("peer_lost") == 1
    early = shown(film, len(film["frames"]) // 2)
    assert early["peers"]["c"]["live"]


def test_long_runs_make_short_films(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [RoundFinished(1e9 + r, r, 2.0, 8, 80, 1.0, 80.0, 3).to_json() for r in range(9000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    film = make_film(path)
    assert len(film["frames"]) <= MAX_FRAMES + 1
    assert shown(film)["rounds"][-1][0] == 9000


def test_a_run_that_was_short_beside_its_file_keeps_its_curves(tmp_path: Path) -> None:
    """All of it is one frame: a peer came back after a month."""
    path = tmp_path / "run.jsonl"
    num_rounds, month_s = 3 * MAX_ROUNDS_KEPT, 3e6
    events: list[Event] = [PeerJoined(1e9, f"p{n}", 0) for n in range(MAX_EVENTS_KEPT + 9)]
    for r in range(num_rounds):
        events.append(RoundFinished(1e9 + r / 100, r, 2.0, 8, 80, 0.01, 80.0, 3))
        events.append(HeldOut(1e9 + r / 100, r, 2.0, 3.0))
    events.append(PeerJoined(1e9 + month_s, "a", 0))
    path.write_text("".join(json.dumps(e.to_json()) + "\n" for e in events))
    first, last = make_film(path)["frames"]
    assert len(first["events"]) == MAX_EVENTS_KEPT
    assert last["events"][0]["peer"] == "a"
    for key, newest in (("rounds", num_rounds), ("held_out", num_rounds - 1)):
        told = [point[0] for point in first[key]]
        assert MAX_ROUNDS_KEPT // 4 < len(told) <= MAX_ROUNDS_KEPT
        assert told == sorted(told)
        assert told[0] <= 1, "the beginning of the curve"
        assert told[-1] == newest


def test_files_that_are_none_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        check_file(tmp_path / "missing")
    empty = tmp_path / "empty"
    empty.write_bytes(b"\x00\xff not json\n{}\n[1]\n")
    with pytest.raises(UserError, match="--metrics has written"):
        check_file(empty)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([])
)
KINDS = ("state", "round", "peer_joined", "peer_lost", "migrated", "rerouted", "held_out", "x")
KEYS = (
    "round",
    "loss",
    "tokens",
    "samples",
    "seconds",
    "tokens_per_s",
    "peers",
    "peer_id",
    "stage",
    "from_stage",
    "to_stage",
    "count",
    "clean",
    "about",
    "model",
    "bits_per_byte",
)


@settings(max_examples=300)
@example([("peer_joined", {"peer_id": "", "stage": 0, "to_stage": None})])
@example([("peer_joined", {"peer_id": "a", "stage": 1 << 40})])
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(KEYS), VALUES))))
def test_damaged_lines_do_no_harm(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, dict[str, Any]]]
) -> None:
    path = tmp_path_factory.mktemp("film") / "run.jsonl"
    whole = PeerJoined(5.0, "sound", 0)
    text = [json.dumps({"event": kind, "time_unix_s": 4.0, **rest}) for kind, rest in lines]
    path.write_text("\n".join([*text, json.dumps(whole.to_json()), '{"event": "peer_lo']))
    film = make_film(path)
    json.dumps(film)
    assert any(event["peer"] == "sound" for event in shown(film)["events"])


def test_events_survive_the_file() -> None:
    for event in (
        PeerLost(1.0, "a", 2, True),
        RoundFinished(2.0, 3, 1.5, 8, 80, 0.5, 160.0, 4),
        Counted(3.0, "shard_reset", "a", 2),
    ):
        assert event_from_json(json.loads(json.dumps(event.to_json()))) == event
