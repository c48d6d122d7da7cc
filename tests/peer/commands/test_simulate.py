"""`swarmnet simulate`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from peer.cli import run_command
from peer.commands import simulate
from peer.commands.simulate import scenario_of
from peer.options import SimulateOptions
from swarmnet.protocol.planning.exchange import exchanged_bytes
from swarmnet.simulation.scenario import Result, Scenario

SHORT = ["simulate", "--peers", "4", "--stages", "2", "--hours", "0.01", "--links", "fast"]


@pytest.fixture(scope="module", autouse=True)
def _one_history_is_simulated_once() -> Iterator[None]:
    """Many commands here differ only in what they print."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "simulate", once(simulate.simulate))
        yield


def once(simulate: Callable[..., Result]) -> Callable[..., Result]:
    """Of each scenario; the results cannot be changed."""
    known: list[tuple[Scenario, Result]] = []

    def remembered(scenario: Scenario, *rest: Any) -> Result:
        for before, result in known:
            if before == scenario:
                return result
        known.append((scenario, simulate(scenario, *rest)))
        return known[-1][1]

    return remembered


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


def test_updates_are_coded_as_a_run_of_the_mode_would_have_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for mode, given, used in (("", "", "int8"), ("gossip", "", "none"), ("gossip", "int8", "int8")):
        scenario = scenario_of(SimulateOptions(sync=mode, update_codec=given))
        assert scenario.sizes.update_codec == used
    assert run_command([*SHORT, "--update-codec", "topk"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("swarmnet: --update-codec topk with --sync delayed: codec")
    assert error.count("\n") == 1


def test_few_numbers_send_the_bytes_of_a_run() -> None:
    """With `[sync] topk_density` as with none, a peer sends in an exchange what `swarmnet plan`
    says, and the rounds go on."""
    sent: dict[float | None, float] = {}
    for density in (None, 0.05):
        options = SimulateOptions(
            peers=4,
            stages=1,
            hours=0.1,
            churn=0.0,
            links="fast",
            microbatches=4,
            sync="local",
            local_steps=2,
            update_codec="topk",
            topk_density=density,
        )
        scenario = scenario_of(options)
        sizes = replace(scenario.sizes, num_shards=8)
        # All are there before the first round ends: newcomers' downloads are no exchange.
        scenario = replace(scenario, sizes=sizes, start_s=1.0, warmup_s=0.0)
        result = simulate.simulate(scenario)
        assert result.rounds == 12
        size = sizes.num_shards * sizes.shard_parameters
        planned, _ = exchanged_bytes(size, 4, 2, "local", 2, sizes.update_codec)
        bulk = result.bytes_per_peer_s - result.control_bytes_per_peer_s
        sent[density] = bulk * result.virtual_s / result.rounds
        assert sent[density] == pytest.approx(planned, rel=0.1)
    assert sent[0.05] < 0.25 * sent[None]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--update-codec", "topk", "--topk-density", "0.2"], "topk_density is 0.5, or from 0.01"),
        (["--update-codec", "int8", "--topk-density", "0.05"], "topk_density goes with codec"),
        (["--topk-density", "0.05"], "topk_density goes with codec"),
    ],
)
def test_a_density_that_no_run_has_is_one_line(
    capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert run_command([*SHORT, "--sync", "local", *given]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"swarmnet: {' '.join(given)} with --sync local: {said}")
    assert error.count("\n") == 1


def test_a_plot_without_matplotlib_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_command([*SHORT, "--plot", str(tmp_path / "out.png")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install" in error


def test_a_plot_shows_what_was_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Texts in an SVG of matplotlib are paths with a comment each, that says what they spell."""
    path = tmp_path / "swarm.svg"
    assert run_command([*SHORT, "--plot", str(path)]) == 0
    printed = re.search(r"of that bound +([\d.]+) %", capsys.readouterr().out)
    assert printed is not None
    texts = re.findall(r"<!-- (.+?) -->", path.read_text())
    assert f"{printed[1]} % of the bound as they served" in texts
    for word in ("throughput", "max-flow bound, as they served", "bound of the best assignment"):
        assert word in texts
    assert "peers alive" in texts
    assert "recovery after a crash, s" in texts


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "swarm.png"
    assert run_command([*SHORT, "--plot", str(path)]) == 0
    pixels = imread(path)[..., :3]
    assert pixels.shape[0] > 300
    colored = pixels.max(axis=-1) - pixels.min(axis=-1) > 0.2
    assert 0.01 < colored.mean() < 0.5  # curves and bars


@pytest.mark.parametrize(
    ("name", "word"),
    [("out.xyz", ".png"), ("out", ".png"), ("no/such/out.png", "folder"), ("is.png", "name")],
)
def test_where_no_plot_can_be_drawn_nothing_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, word: str
) -> None:
    (tmp_path / "is.png").mkdir()
    assert run_command([*SHORT, "--plot", str(tmp_path / name)]) == 1
    out, error = capsys.readouterr()
    assert not out
    assert error.count("\n") == 1
    assert word in error


def test_links_are_mbit_and_ms(capsys: pytest.CaptureFixture[str]) -> None:
    """Half a megabit carries a sequence in a minute: nothing gets through in this time."""
    rates = []
    for links in ("1000/1", "0.5/400"):
        assert run_command([*SHORT[:-1], links, "--json", "--service", "0.5"]) == 0
        rates.append(json.loads(capsys.readouterr().out)["samples_per_s"])
    assert rates[0] > 0.5
    assert rates[1] == 0.0


@pytest.mark.parametrize("links", ["slow", "100", "100/50/1", "0/50", "100/-1", "nan/1"])
def test_links_that_are_none_are_named(capsys: pytest.CaptureFixture[str], links: str) -> None:
    assert run_command([*SHORT[:-1], links]) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--links {links}" in error


def test_coding_takes_the_time_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    bounds = []
    for speed in ("0", "1", "0.003"):
        assert run_command([*SHORT, "--json", "--service", "0.5", "--coding-speed", speed]) == 0
        bounds.append(json.loads(capsys.readouterr().out)["bound_per_s"])
    assert bounds[0] >= bounds[1] > 2 * bounds[2]


def test_a_gpu_codes_itself_and_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """A core that codes as fast beside the device takes nothing from it."""
    bounds = []
    for device in (
        ["gpu"],
        ["gpu", "--coding-speed", "1"],
        ["cpu"],
        ["cpu", "--coding-speed", "0"],
    ):
        assert run_command([*SHORT, "--json", "--service", "0.5", "--device", *device]) == 0
        bounds.append(json.loads(capsys.readouterr().out)["bound_per_s"])
    gpu, slow_gpu, cpu, free = bounds
    assert slow_gpu < gpu < cpu == free


def test_a_bad_trace_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at_s": 1, "action": "explode"}\n')
    assert run_command([*SHORT, "--trace", str(trace)]) == 1
    assert "line 1" in capsys.readouterr().err
