"""`swarmnet simulate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from peer.cli import run_command

SHORT = ["simulate", "--peers", "4", "--stages", "2", "--hours", "0.01", "--links", "fast"]


def test_it_prints_throughput_and_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(SHORT) == 0
    text = capsys.readouterr().out
    for word in ("throughput", "max-flow bound", "re-routes", "samples lost", "control traffic"):
        assert word in text


def test_json_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*SHORT, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    # In a run of seconds some of what is committed was computed before it is counted.
    assert 0 < values["samples_per_s"] <= 1.5 * values["bound_per_s"]


def test_a_sweep_counts_what_broke(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["simulate", "--sweep", "2", "--seed", "5"]) == 0
    assert "2 swarms, 0 broken invariants" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["local", "gossip"])
def test_a_sweep_of_another_mode(capsys: pytest.CaptureFixture[str], mode: str) -> None:
    assert run_command(["simulate", "--sweep", "2", "--seed", "7", "--sync", mode]) == 0
    assert "2 swarms, 0 broken invariants" in capsys.readouterr().out
    assert run_command([*SHORT, "--sync", mode, "--local-steps", "2"]) == 0
    assert "throughput" in capsys.readouterr().out


def test_a_plot_without_matplotlib_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_command([*SHORT, "--plot", str(tmp_path / "out.png")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install" in error


def test_a_bad_trace_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at_s": 1, "action": "explode"}\n')
    assert run_command([*SHORT, "--trace", str(trace)]) == 1
    assert "line 1" in capsys.readouterr().err
