"""`swarmnet local` with stand-ins for the peers and for the network."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.commands.local import run_local
from peer.options import LocalOptions
from swarmnet.errors import SwarmnetError, UserError
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.local.processes import kept_folder, remove_stale_folders
from swarmnet.runtime.local.swarm import first_arguments, joiner_arguments, seats_of
from swarmnet.runtime.observer import sample_token
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import RunSpec, load_spec
from swarmnet.training.arrays import from_numpy
from tests.peer.fakes import FakeObserver, fake_command

ROUNDS = 5
QUICK_STEPS = ((signal.SIGINT, 0.1), (signal.SIGTERM, 0.1), (signal.SIGKILL, 5.0))


@pytest.fixture
def spec() -> RunSpec:
    return start_run(default_spec_path(), rounds=ROUNDS).spec


@pytest.fixture(autouse=True)
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "temp"
    root.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(root))
    return root


def ready_pids(root: Path) -> list[int]:
    return [json.loads(ready.read_text())["pid"] for ready in root.glob("*/*.json")]


def options(**values: object) -> LocalOptions:
    return replace(LocalOptions(num_peers=3, rounds=ROUNDS, plain=True), **values)  # type: ignore[arg-type]


def run(tmp_path: Path, mode: str, observer: FakeObserver, **values: object) -> None:
    command = fake_command(tmp_path, mode)
    asyncio.run(run_local(options(**values), command=command, join=observer.join))


def test_a_run_ends_with_a_summary_a_sample_and_nothing_left(
    tmp_path: Path, temp_root: Path, spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = FakeObserver(spec, last_round=ROUNDS)
    metrics = tmp_path / "metrics.jsonl"
    run(tmp_path, "good", observer, metrics=metrics)
    out = capsys.readouterr().out
    assert "join it from this machine: swarmnet peer --join /fake/p2p/first" in out
    assert f"round {ROUNDS}/{ROUNDS}  loss 1.000" in out
    assert "8.000 -> 3.000" in out
    assert "def f():" in out
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [x["round"] for x in lines if x["event"] == "round"] == list(range(ROUNDS))
    assert observer.closed
    assert list(temp_root.glob("swarmnet-*")) == []


def test_a_peer_that_dies_is_reported_and_the_run_goes_on(
    tmp_path: Path, spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def all_reported() -> bool:
        told.append(capsys.readouterr().out)
        return all(f"peer-{n} (pid" in "".join(told) for n in (2, 3))

    class Patient(FakeObserver):
        async def wait_news(self, timeout_s: float) -> None:
            await super().wait_news(timeout_s)
            if all_reported():
                self._last_round = ROUNDS

    observer = Patient(spec, last_round=ROUNDS - 1)
    run(tmp_path, "one-dies", observer)
    out = "".join(told) + capsys.readouterr().out
    assert "ended with exit code 3; the run goes on" in out
    assert "peer-2: the last thing that I saw" in out
    assert "held-out bits per byte" in out


def test_when_every_peer_is_gone_the_run_is_a_failure_and_the_logs_stay(
    tmp_path: Path, temp_root: Path, spec: RunSpec
) -> None:
    observer = FakeObserver(spec, last_round=1)
    with pytest.raises(SwarmnetError, match="every peer has ended; their logs are in"):
        run(tmp_path, "all-die", observer)
    (folder,) = temp_root.glob("swarmnet-*")
    assert sorted(p.name for p in folder.glob("*.log")) == [f"peer-{n}.log" for n in (1, 2, 3)]
    assert not [p for p in folder.iterdir() if p.is_dir()]


def test_what_the_first_peer_found_wrong_is_the_error(tmp_path: Path, spec: RunSpec) -> None:
    observer = FakeObserver(spec, last_round=1)
    with pytest.raises(UserError, match=r"^port 1 is taken; choose another --port$"):
        run(tmp_path, "refuse", observer)
    with pytest.raises(UserError, match="peer-1 ended with exit code 1 before it listened"):
        run(tmp_path, "crash", observer)


def test_peers_may_save_before_they_are_ended_and_nothing_saved_is_lost(
    tmp_path: Path,
    temp_root: Path,
    spec: RunSpec,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("processes", "swarm"):
        monkeypatch.setattr(f"swarmnet.runtime.local.{module}.STOP_STEPS", QUICK_STEPS)
    monkeypatch.setattr("peer.commands.local.STOP_STEPS", QUICK_STEPS)
    with pytest.raises(SwarmnetError, match="the model was not written"):
        run(tmp_path, "saves", FakeObserver(spec, last_round=ROUNDS), out=tmp_path / "model")
    out = " ".join(capsys.readouterr().out.split())
    assert "waiting until the peers have saved the model" in out
    (kept,) = temp_root.glob("swarmnet-kept-*")
    assert len(list(kept.glob("*/checkpoints/x"))) == 3
    assert f"; what the peers saved is in {kept}".replace(" ", "") in out.replace(" ", "")
    assert remove_stale_folders(temp_root) == []


def test_a_swarm_that_cannot_speak_has_still_done_its_run(
    tmp_path: Path, spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "good", FakeObserver(spec, last_round=ROUNDS, sample=None))
    assert "no sample: nobody serves stage 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_stages", "num_peers", "expected"),
    [(2, 4, [1, 1, 1, 1]), (2, 1, [2]), (8, 3, [3, 3, 2]), (7, 4, [2, 2, 2, 1]), (1, 1, [1])],
)
def test_all_stages_are_served_by_few_peers(
    num_stages: int, num_peers: int, expected: list[int]
) -> None:
    assert seats_of(num_stages, num_peers) == expected


class Looking(FakeObserver):
    """Reads with which words the peers were started, when it joins."""

    def __init__(self, spec: RunSpec, temp_root: Path) -> None:
        super().__init__(spec, last_round=ROUNDS)
        self.started: list[list[str]] = []
        self._temp_root = temp_root

    async def join(self, *names: Any) -> FakeObserver:
        written = sorted(self._temp_root.glob("*/*.args"))
        self.started += [json.loads(path.read_text()) for path in written]
        return await super().join(*names)


def test_a_peer_serves_several_stages_where_there_are_few(
    tmp_path: Path, temp_root: Path, spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    looking = Looking(spec, temp_root)
    run(tmp_path, "good", looking, num_peers=1)
    (words,) = looking.started
    assert words[words.index("--stages") + 1] == "2"
    assert "starting 1 peer; one serves up to 2 stages" in capsys.readouterr().out


@pytest.mark.parametrize(("num_peers", "threads"), [(1, "4"), (3, "2")])
def test_each_stage_of_a_peer_has_ranks(
    tmp_path: Path,
    temp_root: Path,
    spec: RunSpec,
    monkeypatch: pytest.MonkeyPatch,
    num_peers: int,
    threads: str,
) -> None:
    """Every process that computes has its share of the cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    looking = Looking(spec, temp_root)
    run(tmp_path, "good", looking, num_peers=num_peers, tp=2)
    words = looking.started[0]
    given = {word: words[words.index(word) + 1] for word in ("--tp", "--threads")}
    assert given == {"--tp": "2", "--threads": threads}
    assert ("--stages" in words) == (num_peers == 1)


@pytest.mark.parametrize(("given", "is_told"), [({}, True), ({"tp": 2}, False)], ids=str)
def test_a_way_of_ranks_without_ranks_is_told(
    tmp_path: Path,
    spec: RunSpec,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, Any],
    is_told: bool,
) -> None:
    """Where its person looks, which is no peer's log."""
    observer = FakeObserver(spec, last_round=ROUNDS)
    run(tmp_path, "good", observer, local="fsdp", device="cpu", **given)
    line = "--local fsdp has no effect: one device computes; --tp N makes N ranks"
    assert (line in capsys.readouterr().out) == is_told


def test_joiners_are_told_where_the_data_is_and_only_the_first_gets_the_spec(
    tmp_path: Path, spec: RunSpec
) -> None:
    text = default_spec_path().read_text().replace('["python-stdlib"]', '["/corpus", "b.txt"]')
    path = tmp_path / "run.toml"
    path.write_text(text)
    opts = options(spec=path)
    own = load_spec(path)
    first = first_arguments(opts)
    joiner = joiner_arguments(opts, own, "/fake")
    assert first[:4] == ["--spec", str(path), "--rounds", str(ROUNDS)]
    assert joiner[:6] == ["--join", "/fake", "--data", "/corpus", "--data", "b.txt"]
    assert "--data" not in joiner_arguments(opts, spec, "/fake")
    path.write_text(text.replace('tokenizer = "bytes"', 'tokenizer = "/t.json"'))
    joiner = joiner_arguments(opts, load_spec(path), "/fake")
    assert joiner[joiner.index("--tokenizer") + 1] == "/t.json"


def test_cancelling_ends_the_children_and_says_what_happened_until_then(
    tmp_path: Path, temp_root: Path, spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = FakeObserver(spec, last_round=1)
    pids: list[int] = []

    async def scenario() -> None:
        command = fake_command(tmp_path, "good")
        task = asyncio.ensure_future(run_local(options(), command=command, join=observer.join))
        async with asyncio.timeout(20):
            while observer.version < 3:
                assert not task.done()
                await asyncio.sleep(0.02)
        pids.extend(ready_pids(temp_root))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert pids
    assert observer.closed
    assert list(temp_root.glob("swarmnet-*")) == []
    out = capsys.readouterr().out
    assert "samples lost" in out
    assert "the model writes" not in out
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_run_without_an_end_is_done_when_it_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else ends it, so nothing has failed."""
    endless = tmp_path / "run.toml"
    text = default_spec_path().read_text()
    endless.write_text(text.replace("rounds = 320", 'rounds = 0\nschedule = "constant"'))
    observer = FakeObserver(start_run(endless).spec, last_round=2)

    async def scenario() -> None:
        command, chosen = fake_command(tmp_path, "good"), options(spec=endless, rounds=None)
        task = asyncio.ensure_future(run_local(chosen, command=command, join=observer.join))
        async with asyncio.timeout(20):
            while observer.version < 4:
                assert not task.done()
                await asyncio.sleep(0.02)
        task.cancel()
        await task

    asyncio.run(scenario())
    assert observer.closed
    assert "samples lost" in capsys.readouterr().out


def test_a_sample_is_of_bytes_though_the_model_knows_more() -> None:
    logits = np.zeros((1, 2, 300), dtype=np.float32)
    logits[0, -1, 299], logits[0, -1, 65] = 1e4, 1e3
    assert sample_token(from_numpy(logits), random.Random(0), 256) == 65


def test_a_folder_of_ones_own_is_kept_and_found_again(
    tmp_path: Path, temp_root: Path, spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    metrics = tmp_path / "m.jsonl"
    for time in range(1, 3):
        observer = FakeObserver(spec, last_round=ROUNDS)
        with pytest.raises(SwarmnetError, match="nothing of the run is saved"):
            run(tmp_path, "again", observer, state_dir=folder, metrics=metrics)
        assert "saved: the same command begins anew" in " ".join(capsys.readouterr().out.split())
        assert (folder / "peer-1" / "starts").read_text() == "x" * time
        assert {p.name for p in folder.glob("peer-*.log")} == {f"peer-{k}.log" for k in (1, 2, 3)}
        rounds = [line for line in metrics.read_text().splitlines() if '"round"' in line]
        assert len([line for line in rounds if '"event": "round"' in line]) == time * ROUNDS
    assert list(temp_root.iterdir()) == []


def test_what_a_kept_run_has_not_saved_is_said(
    tmp_path: Path,
    spec: RunSpec,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = {"round": 3}
    monkeypatch.setattr(
        "swarmnet.runtime.exporting.models.newest_whole", lambda *_: newest["round"]
    )
    said: list[str] = []
    monkeypatch.setattr("peer.observe.screen.Screen.say", lambda _, line: said.append(line))
    observer = FakeObserver(spec, last_round=ROUNDS)
    run(tmp_path, "unsaved", observer, state_dir=tmp_path / "mine")
    assert said[-1] == (
        f"the run is in {tmp_path / 'mine'}, saved after round 3; the same command goes on with "
        "it (peer-1: stage 0 ends unsaved)"
    )


def test_whose_folder_it_is(tmp_path: Path, spec: RunSpec) -> None:
    folder = tmp_path / "mine"
    with (
        kept_folder(folder, spec.run_id),
        pytest.raises(UserError, match="in use by another swarmnet local"),
    ):
        run(tmp_path, "good", FakeObserver(spec, last_round=ROUNDS), state_dir=folder)
    (folder / "peer-1" / "checkpoints" / spec.run_id[:16]).mkdir(parents=True)
    with kept_folder(folder, spec.run_id):
        pass
    with pytest.raises(UserError, match="has checkpoints of another run"):
        run(tmp_path, "good", FakeObserver(spec, last_round=ROUNDS), state_dir=folder, seed=7)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot use --state-dir"):
        run(tmp_path, "good", FakeObserver(spec, last_round=1), state_dir=tmp_path / "file" / "x")
