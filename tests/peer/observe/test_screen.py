"""What people and programs are shown."""

from __future__ import annotations

import io
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from peer.commands.status import show_status, watch_status
from peer.observe.dashboard.replay import make_film
from peer.observe.metrics import MetricsFile
from peer.observe.report import Reporter
from peer.observe.screen import PeerConsole, Screen, dashboard
from peer.options import StatusOptions
from swarmnet.errors import UserError
from swarmnet.files import older
from swarmnet.observe.events import HeldOut, PeerJoined, RoundFinished
from swarmnet.observe.monitor import RunMonitor
from swarmnet.observe.text import sentence, size
from swarmnet.observe.view_model import ViewModel
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.resource_limits import told_totals
from swarmnet.runtime.options import default_spec_path
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.spec import RunSpec, load_spec
from tests.peer import pictures
from tests.peer.fakes import FakeObserver

SPEC = load_spec(default_spec_path())
ROUND = RoundFinished(5.0, 2, 3.25, 8, 80, 2.0, 40.0, 4)


def model_of(spec: RunSpec, *records: Record, rounds: int = 10) -> ViewModel:
    monitor = RunMonitor(
        num_stages=2,
        global_batch=spec.pipeline.global_batch,
        samples_per_slot=spec.pipeline.microbatch,
        rounds=rounds,
    )
    monitor.observe(records, [r.peer_id for r in records], 0.0, 0.0)
    return monitor.view_model()


def record(peer_id: str, stage: int) -> Record:
    return Record(peer_id, SPEC.run_id, 1, 1, state=ACTIVE, stage=stage)


def test_without_a_terminal_there_is_one_plain_line_an_event() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=40)) as screen:
        assert not screen.is_live
        screen.show(SPEC, model_of(SPEC, record("a", 0)), [ROUND])
        screen.show(SPEC, model_of(SPEC, record("a", 0)), [])
    assert out.getvalue().splitlines() == [
        "round 3/10  loss 3.250  40 tokens/s  4 peers",
        "replicas by stage: 1 0",
    ]


def test_a_terminal_shows_coverage_progress_and_peers() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, force_terminal=True, width=100)) as screen:
        assert screen.is_live
        screen.show(SPEC, model_of(SPEC, record("Qm[red]lookalike", 0)), [ROUND])
    drawn = out.getvalue()
    for expected in ("stage 0", "nobody serves it", "global batch", "ookalike", "1 of 10"):
        assert expected in drawn
    assert "loss 3.250" not in drawn.split("nobody")[0], "rounds are not also said as lines"


def test_the_picture_in_the_pages_is_what_a_terminal_shows() -> None:
    """`python -m tests.peer.pictures` draws it anew."""
    assert pictures.local() == pictures.LOCAL.read_text()


def test_where_a_run_has_no_end_none_is_shown() -> None:
    plain, live = io.StringIO(), io.StringIO()
    model = model_of(SPEC, record("a", 0), rounds=0)
    with Screen(Console(file=plain, width=60)) as screen:
        screen.show(SPEC, model, [ROUND])
    assert plain.getvalue().splitlines()[0] == "round 3  loss 3.250  40 tokens/s  4 peers"
    with Screen(Console(file=live, force_terminal=True, width=100)) as screen:
        screen.show(SPEC, model, [])
    assert "without an end" in live.getvalue()
    assert "1 of" not in live.getvalue()


class Broken(io.StringIO):
    """Like a pipe that nobody reads, or a full disk. Python tells of one when it is flushed."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error: OSError | None = None
        self.later = error

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left on device"), OSError(5, "I/O error")]
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_who_cannot_print_says_so_once_and_goes_on(
    error: OSError, is_terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own_stderr, out = sys.stderr, Broken(error)
    with (
        caplog.at_level(logging.WARNING, logger="swarmnet.peer"),
        Screen(PeerConsole(file=out, force_terminal=is_terminal)) as screen,
    ):
        out.error = out.later
        for _ in range(3):
            screen.say("a line")
            screen.show(SPEC, model_of(SPEC, record("a", 0)), [ROUND])
            screen.draw("a table")
        assert sys.stderr is own_stderr, "what is logged goes to a screen that is gone"
    assert len([r for r in caplog.records if "nothing more is printed" in r.message]) == 1


def test_on_a_disk_that_fills_and_empties_it_goes_on_printing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a peer, and of `swarmnet local`; other commands fail."""
    out = Broken(OSError(28, "No space left on device"))
    monkeypatch.setattr(sys, "stdout", out)
    with (
        caplog.at_level(logging.WARNING, logger="swarmnet.peer"),
        Reporter(SPEC).screen as screen,
    ):
        for _ in range(2):
            screen.say("before")
            out.error = out.later
            for _ in range(100):
                screen.say("meanwhile")
            out.error = None
        screen.say("after")
    printed = out.getvalue().splitlines()
    assert printed == ["before", "before", "after"]
    says = [record.getMessage() for record in caplog.records]
    assert len(says) == 4
    assert all("no room for what is printed" in line for line in says[::2])
    assert says[1] == says[3] == "there is room for what is printed again"


def test_what_is_left_of_an_owners_month_is_shown() -> None:
    console = Console(file=io.StringIO(), width=100)
    totals = told_totals([("sent this month", 120_000_000_000, 300e9)])
    model = model_of(SPEC, replace(record("a" * 20, 0), totals=totals), record("b" * 20, 1))
    console.print(dashboard(SPEC, model))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ": 120.0 GB of 300.0 GB sent this month, 180.0 GB left" in shown
    assert shown.count("left") == 1, "the other one has no bounds"


def test_how_far_replicas_are_apart_is_shown() -> None:
    out = io.StringIO()
    apart = [replace(record(name, 0), spread=spread) for name, spread in (("a", 0.01), ("b", 0.02))]
    with Screen(Console(file=out, force_terminal=True, width=100)) as screen:
        screen.show(SPEC, model_of(SPEC, *apart), [])
    assert "2.00% between replicas that met last" in out.getvalue()
    assert sentence(replace(ROUND, spread=0.02), 10).endswith("spread 2.00%")
    assert sentence(replace(ROUND, peers=1), 10).endswith("  1 peer")


def test_a_quiet_screen_says_only_what_it_is_told_to() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, force_terminal=True), "quiet") as screen:
        screen.show(SPEC, model_of(SPEC, record("a", 0)), [ROUND])
        screen.say("swarmnet peer --join [a]")
    assert out.getvalue() == "swarmnet peer --join [a]\n"


def test_sentences_and_sizes() -> None:
    assert sentence(PeerJoined(0.0, "12D3KooWabcdefgh/2", 1), 10) == (
        "peer abcdefgh/2 joined (stage 1)"
    )
    assert sentence(PeerJoined(0.0, "12D3KooWabcdefgh", -1), 10) == (
        "peer abcdefgh joined (no stage yet)"
    )
    assert sentence(HeldOut(0.0, 10, 2.0, 2.885), 10) == (
        "held-out loss after 10 rounds: 2.000, 2.885 bits per byte"
    )
    assert [size(n) for n in (12, 1500, 2_000_000)] == ["12 B", "1.5 kB", "2.0 MB"]


def test_metrics_are_flushed_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write([ROUND])
        assert json.loads(path.read_text()) == ROUND.to_json()
    with MetricsFile(path, append=True) as metrics:
        metrics.write([ROUND])
    assert len(path.read_text().splitlines()) == 2
    with MetricsFile(path) as metrics:
        metrics.write([])
    assert path.read_text() == ""


def test_a_metrics_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write --metrics .*: Is a directory"):
        MetricsFile(tmp_path)
    with (
        pytest.raises(UserError, match="No space left on device"),
        MetricsFile(Path("/dev/full")) as metrics,
    ):
        metrics.write([ROUND])


@pytest.mark.parametrize("as_json", [False, True])
def test_status_is_one_look(as_json: bool) -> None:
    observer = FakeObserver(SPEC, last_round=3)
    out = io.StringIO()
    console = Console(file=out, width=100)
    run_virtual(
        show_status(
            StatusOptions("/fake/p2p/first", as_json), console, join=observer.join, look_s=0.5
        )
    )
    assert observer.closed
    if as_json:
        values = json.loads(out.getvalue())
        assert values["run_id"] == SPEC.run_id
        assert (values["round"], values["uncovered"]) == (3, [])
        assert values["loss"] == 3.0
    else:
        assert SPEC.name in out.getvalue()
        assert "stage 1" in out.getvalue()


def test_status_can_keep_looking() -> None:
    observer = FakeObserver(SPEC, last_round=3)
    out = io.StringIO()
    run_virtual(
        watch_status(
            StatusOptions("/fake/p2p/first"),
            Console(file=out, width=100),
            join=observer.join,
            look_s=0.5,
        )
    )
    assert observer.closed
    assert "stage 1" in out.getvalue()


def test_a_full_disk_is_a_line_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    view, path = View("a"), tmp_path / "m.jsonl"
    path.symlink_to("/dev/full")
    with MetricsFile(path, append=True) as metrics, Reporter(SPEC, "plain", metrics) as reporter:
        for now in range(2):
            view.merge(record(f"peer-{now}", now), float(now))
            reporter.look(view, float(now), float(now))
        metrics.close()
        path.unlink()
        view.merge(record("peer-2", 1), 2.0)
        reporter.look(view, 2.0, 2.0)
        reporter.look(view, 40.0, 40.0)
    said = [r.getMessage() for r in caplog.records if "m.jsonl" in r.getMessage()]
    assert len(said) == 2
    assert "No space left" in said[0]
    assert said[1] == f"--metrics {path} is written again"
    assert "peer-2" in path.read_text()
    assert "replicas by stage: 1 1" in capsys.readouterr().out


def test_a_metrics_file_is_bounded_and_its_replay_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsFile(path, max_bytes=2000) as metrics:
        for r in range(14):
            metrics.write([replace(ROUND, round=r, time_unix_s=float(r))])
    assert older(path).stat().st_size <= 2000
    rounds = [row[0] for frame in make_film(path)["frames"] for row in frame.get("rounds", [])]
    assert rounds == list(range(1, 15))
