"""Which microbatches a round counted, from the files of all feeders."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peer.cli import app
from swarmnet.errors import UserError
from swarmnet.files import older
from swarmnet.runtime.counted import COUNTED_FILE, CountedMicrobatches, read_counted, read_shares


def feed(path: Path, history: int, rounds: dict[int, list[int]], run_id: str = "run") -> None:
    counted = CountedMicrobatches(path, run_id)
    for r, slots in rounds.items():
        for slot in slots:
            counted.slot_counted(history, r, slot)


def test_the_files_of_all_feeders_are_one_record(tmp_path: Path) -> None:
    feed(tmp_path / "a", 1, {0: [5, 3], 1: [7]})
    feed(tmp_path / "b", 1, {0: [4], 2: [9]})
    assert read_counted([tmp_path / "a", tmp_path / "b"]) == {0: [3, 4, 5], 1: [7], 2: [9]}


def test_the_command_prints_what_each_round_counted(tmp_path: Path) -> None:
    for name, rounds in (("a", {0: [2, 1], 1: [1]}), ("b", {0: [0, 1]})):
        (tmp_path / name).mkdir()
        feed(tmp_path / name / COUNTED_FILE, 1, rounds)
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    shown = CliRunner().invoke(app, ["counted", *folders])
    assert shown.stdout.splitlines() == [
        "round 0: 3 slots, counted more than once: 1 (2 times)",
        "round 1: 1 slot, not counted: 0",
    ]
    shown = CliRunner().invoke(app, ["counted", *folders, "--json"])
    assert [json.loads(line) for line in shown.stdout.splitlines()] == [
        {"round": 0, "slots": [0, 1, 1, 2]},
        {"round": 1, "slots": [1]},
    ]
    shown = CliRunner().invoke(app, ["counted", str(tmp_path)])
    assert shown.exit_code == 1
    assert "name a feeder's state folder" in shown.stderr


def test_who_computed_what_counted(tmp_path: Path) -> None:
    """By the paths that two feeders saw: seats are one machine, and rounds that are made again
    count as they were made last."""
    for name, history, rounds in (
        ("a", 1, {0: {7: ("x", "y"), 8: ("x/1", "y")}, 1: {9: ("x", "z")}}),
        ("b", 1, {0: {17: ("y", "z", "y", "y")}}),  # a path that is too long
        ("a", 5, {1: {21: ("y", "z"), 22: ("y", "z")}}),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        counted = CountedMicrobatches(tmp_path / name / COUNTED_FILE, "run", 4, num_stages=2)
        for r, paths in rounds.items():
            for slot in range(len(paths)):
                counted.slot_counted(history, r, slot)
            (first, *others) = paths.items()
            counted.round_counted(r, dict([first]))
            counted.round_counted(r, dict(others))  # when the peer leaves
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    shares = read_shares([tmp_path / "a" / COUNTED_FILE, tmp_path / "b" / COUNTED_FILE])
    assert {m: (s.samples, s.rounds) for m, s in shares.items()} == {
        "y": (4 * 5, 2),
        "z": (4 * 3, 2),
        "x": (4 * 2, 1),
    }
    assert all(0 <= s.seconds < 60 for s in shares.values())
    shown = CliRunner().invoke(app, ["counted", *folders, "--by-machine"])
    assert shown.stdout.splitlines() == [
        "y: 20 samples in 2 rounds, 0.0 hours",
        "z: 12 samples in 2 rounds, 0.0 hours",
        "x: 8 samples in 1 round, 0.0 hours",
    ]
    shown = CliRunner().invoke(app, ["counted", *folders, "--by-machine", "--json"])
    first = json.loads(shown.stdout.splitlines()[0])
    assert (first["machine"], first["samples"], first["rounds"]) == ("y", 20, 2)
    assert read_counted([tmp_path / "a" / COUNTED_FILE]) == {0: [0, 1], 1: [0, 1]}


def test_a_round_lasts_from_the_end_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    counted = CountedMicrobatches(tmp_path / "a", "run")
    for r in range(3):
        now[0] += 10.0
        counted.slot_counted(1, r, 0)
        now[0] += 5.0
        counted.round_counted(r, {r: ("x",)})
    now[0] += 3600.0
    again = CountedMicrobatches(tmp_path / "a", "run")  # hours later: nobody gave these
    again.slot_counted(1, 3, 0)
    now[0] += 5.0
    again.round_counted(3, {3: ("x",)})
    assert read_shares([tmp_path / "a"])["x"].seconds == 5.0 + 15.0 + 15.0 + 5.0


def test_a_run_that_went_on_from_an_older_round_voids_what_it_makes_again(tmp_path: Path) -> None:
    """Feeder b does not feed in the second life; its old entries are void all the same."""
    feed(tmp_path / "a", 1, {0: [1], 1: [2], 2: [3]})
    feed(tmp_path / "b", 1, {0: [11], 1: [12], 2: [13], 3: [14]})
    feed(tmp_path / "a", 5, {1: [21], 2: [22]})
    assert read_counted([tmp_path / "a", tmp_path / "b"]) == {0: [1, 11], 1: [21], 2: [22]}


def test_a_history_that_was_named_twice_is_one(tmp_path: Path) -> None:
    feed(tmp_path / "a", 1, {0: [1]})
    CountedMicrobatches(tmp_path / "a", "run").renamed(1, 2)
    feed(tmp_path / "b", 2, {0: [11], 1: [12]})
    assert read_counted([tmp_path / "a", tmp_path / "b"]) == {0: [1, 11], 1: [12]}


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    feed(tmp_path / "a", 1, {0: [1], 1: [2]})
    text = (tmp_path / "a").read_text()
    (tmp_path / "a").write_text(text[:-9])
    assert read_counted([tmp_path / "a"]) == {0: [1]}


def test_runs_are_told_apart(tmp_path: Path) -> None:
    feed(tmp_path / "a", 1, {0: [1]})
    feed(tmp_path / "a", 1, {0: [2]}, run_id="other")
    with pytest.raises(UserError, match="2 runs"):
        read_counted([tmp_path / "a"])
    assert read_counted([tmp_path / "a"], "other") == {0: [2]}


def test_a_disk_that_fails_does_not_stop_training(tmp_path: Path) -> None:
    feed(tmp_path / "no" / "such" / "folder", 1, {0: [1]})
    with pytest.raises(UserError, match="No such file"):
        read_counted([tmp_path / "no"])


def test_the_file_is_bounded_and_both_parts_are_read(tmp_path: Path) -> None:
    path = tmp_path / COUNTED_FILE
    counted = CountedMicrobatches(path, "run", max_bytes=1000)
    for r in range(100):
        counted.slot_counted(1, r, 3)
    sizes = [p.stat().st_size for p in (path, older(path))]
    assert all(0 < size <= 1000 for size in sizes)
    found = read_counted([path])
    assert list(found) == list(range(min(found), 100)), "the newest, without a gap"
    assert len(found) > 10


def test_a_folder_that_is_removed_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peer-1" / COUNTED_FILE
    path.parent.mkdir()
    counted = CountedMicrobatches(path, "run")
    counted.slot_counted(1, 0, 1)
    shutil.rmtree(path.parent)
    counted.slot_counted(1, 1, 1)
    assert read_counted([path]) == {1: [1]}
    assert not caplog.records


def test_a_disk_that_fills_and_empties_is_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted, real, is_full = CountedMicrobatches(tmp_path / "a", "run"), os.write, True

    def write(handle: int, data: bytes) -> int:
        if is_full and os.fstat(handle).st_ino == (tmp_path / "a").stat().st_ino:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)
    with caplog.at_level("WARNING", "swarmnet.peer"):
        for r in range(50):
            counted.slot_counted(1, r, 0)
        is_full = False
        counted.slot_counted(1, 50, 0)
        counted.slot_counted(1, 51, 0)
    monkeypatch.undo()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "No space left" in lines[0]
    assert lines[1].endswith("what counts is on record again")
    assert read_counted([tmp_path / "a"]) == {50: [0], 51: [0]}
