"""Charts of a run in TensorBoard's files, as TensorBoard reads them."""

from __future__ import annotations

import builtins
import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UsageError, UserError
from swarmnet.observe import chart_clients
from swarmnet.observe.chart_clients import Client, OnThread, client_of
from swarmnet.observe.charts import Charts
from swarmnet.observe.events import HeldOut, PeerJoined, PeerLost, RoundFinished
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import load_spec
from tests.peer.observe.test_layout import MODEL

SPEC = load_spec(default_spec_path()).model_copy(update={"name": "训练 / one"})


def finished(round_index: int, loss: float) -> RoundFinished:
    return RoundFinished(float(round_index), round_index, loss, 8, 80, 2.0, 40.0, 4)


def read(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return found


def test_a_run_is_one_chart_over_restarts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for rounds, loss in ((range(10), 5.0), (range(6, 14), 4.0)):  # it went on from round 6
        charts = Charts(f"tensorboard:{tmp_path}", SPEC)
        charts.write([PeerJoined(0.5, "12D3KooWabcdefgh", 1)], MODEL)
        for r in rounds:
            charts.write([finished(r, loss)], MODEL)
        charts.write(
            [HeldOut(1.0, 6, 4.5, 2.0), PeerLost(2.0, "12D3KooWabcdefgh", 1, False)], MODEL
        )
        charts.close()
        charts.close()
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"训练-one-{SPEC.run_id[:8]}"
    found = read(folder)
    points = [(e.step, e.value) for e in found.Scalars("loss/training")]
    assert points == [(r, 5.0 if r < 6 else 4.0) for r in range(14)]
    assert [e.value for e in found.Scalars("loss/held out")] == [4.5]
    assert next(e.value for e in found.Scalars("stages/replicas of 1")) == 2.0
    assert {"run/peers", "run/tokens per s"} <= set(found.Tags()["scalars"])
    texts = found.Tensors("events/text_summary")
    assert [text.step for text in texts] == [0, 9, 6, 13], "who joined again stands where that was"
    assert b"peer abcdefgh was lost (stage 1)" in texts[-1].tensor_proto.string_val[0]


def test_what_happens_where_no_round_ends_is_written_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    charts = Charts(f"tensorboard:{tmp_path}", SPEC)
    charts.write([PeerJoined(0.5, "12D3KooWabcdefgh", 1)], MODEL)
    charts.close()
    (text,) = read(tmp_path / charts.name).Tensors("events/text_summary")
    assert b"joined" in text.tensor_proto.string_val[0]


def test_what_cannot_be_written_is_a_line_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    charts = Charts(f"tensorboard:{tmp_path / 'file'}", SPEC)
    for r in range(5):
        charts.write([finished(r, 5.0)], replace(MODEL))
    (tmp_path / "file").unlink()
    charts.write([finished(5, 5.0)], MODEL)
    charts.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "what happens now is not there" in lines[0]
    assert lines[1].endswith("is written again")
    assert [e.step for e in read(tmp_path / "file" / charts.name).Scalars("loss/training")] == [5]


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_of("") is None
    for wrong in ("x", "tensorboard", "tensorboard:", "wandb:", "nowhere:mine"):
        with pytest.raises(UsageError, match="write it as one of tensorboard:DIR, wandb:PROJECT"):
            client_of(wrong)
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith(("torch.utils.tensorboard", "wandb", "mlflow", "trackio")):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for kind in ("tensorboard", "wandb", "mlflow", "trackio"):
        with pytest.raises(UserError, match=rf"needs its library: pip install '?{kind}"):
            client_of(f"{kind}:x")


LOG_BLOCK, LOG_HEADER = 32_768, 7
FULL, LAST = 1, 4


def logged(data: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: a log of LevelDB, behind a header of its own."""
    at, record = LOG_HEADER, b""
    while at + LOG_HEADER <= len(data):
        left = LOG_BLOCK - at % LOG_BLOCK
        if left < LOG_HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + LOG_HEADER : at + LOG_HEADER + length]
        at += LOG_HEADER + length
        if kind in (FULL, LAST):
            yield record
            record = b""


STARTED = f"""
from swarmnet.observe import chart_clients
from swarmnet.observe.charts import Charts
from {__name__} import SPEC, drawn
chart_clients.CLOSE_S = 120.0  # all of it is wanted
"""


def drawn(charts: Charts, rounds: range) -> None:
    charts.write([finished(r, 5.0 - r / 10) for r in rounds], MODEL)
    charts.write([PeerLost(2.0, "12D3KooWabcdefgh", 1, False)], MODEL)
    charts.close()


def test_a_run_goes_on_in_the_same_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline: what would be sent is read from its files. Each start is a process, as of a peer:
    its library keeps much for as long as one lasts."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for rounds in (range(5), range(5, 9)):
        subprocess.run(
            [sys.executable, "-c", f"{STARTED}drawn(Charts('wandb:mine', SPEC), {rounds})"],
            check=True,
        )
    points, ids, lines, lost = [], set(), [], []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in logged(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id))
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "loss/training" in values:
                points.append((values["round"], values["loss/training"]))
            lines += [values["event"]] if "event" in values else []
            lost += [values["run/peers lost"]] if "run/peers lost" in values else []
    assert sorted(points) == [(r, 5.0 - r / 10) for r in range(9)]
    assert ids == {("mine", f"--one-{SPEC.run_id[:8]}")}
    assert len(lines) == 2
    assert "peer abcdefgh was lost (stage 1)" in lines[0]
    assert lost == [1.0, 1.0]


def test_a_run_goes_on_in_the_same_run_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = f"file:{tmp_path / 'store'}"
    for rounds in (range(3), range(3, 5)):
        drawn(Charts(f"mlflow:{where}", SPEC), rounds)
    client = tracking.MlflowClient(tracking_uri=where)
    experiment = client.get_experiment_by_name("swarmnet")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss/training")
    assert sorted((m.step, m.value) for m in history) == [(r, 5.0 - r / 10) for r in range(5)]
    assert "was lost (stage 1)" in run.data.tags["event 000"]
    assert "was lost (stage 1)" in run.data.tags["event 001"], "what was told before stays"
    assert run.data.tags["events"] == "2"
    assert run.info.status == "FINISHED"


def test_a_store_that_mlflow_does_not_have_here_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setattr(chart_clients, "find_spec", lambda _: None)
    for where in ("sqlite:////x.db", "postgresql+psycopg2://user:secret@host/runs"):
        with pytest.raises(UserError, match=r"needs its library: pip install mlflow$") as told:
            client_of(f"mlflow:{where}")
        assert "secret" not in str(told.value)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    for where in (f"file:{tmp_path}/runs", f"{tmp_path}/runs"):
        with pytest.raises(UserError, match=r"write mlflow:sqlite:///FILE or the address of a"):
            client_of(f"mlflow:{where}")
    assert client_of("mlflow:http://127.0.0.1:9") is not None


class Slow:
    """A client that fails until it is told otherwise."""

    fails = True
    has_worked = True

    def __init__(self) -> None:
        self.got: list[object] = []

    def scalars(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError("nobody answers")
        self.got.append(step)

    def line(self, step: int, unix_s: float, text: str) -> None:
        self.got.append(text)

    def close(self) -> None:
        self.got.append("closed")


def test_what_waits_for_a_network_holds_up_nobody_and_its_troubles_are_two_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, opened = Slow(), list[OnThread]()

    def opens(_: str, __: int | None) -> Client:
        opened.append(OnThread(lambda: slow))
        return opened[-1]

    monkeypatch.setitem(chart_clients.CLIENTS, "wandb", ("PROJECT", lambda _: opens))
    charts = Charts("wandb:mine", SPEC)
    for r in range(6):
        if r == 4:
            slow.fails = False
        charts.write([finished(r, 5.0)], MODEL)
        opened[-1]._thread.join(0.2 if slow.fails else 0.0)  # noqa: SLF001  it ends when it fails
        wait_until(lambda: opened[-1].has_worked or slow.fails)
    charts.close()
    assert slow.got[-1] == "closed"
    assert 5 in slow.got
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert "--log-to wandb:mine: nobody answers; what happens now is not there" in lines[0]
    assert lines[1].endswith("is written again")


def test_what_fails_at_the_end_is_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(
        chart_clients.CLIENTS, "wandb", ("PROJECT", lambda _: lambda *_: OnThread(Slow))
    )
    charts = Charts("wandb:mine", SPEC)
    charts.write([finished(0, 5.0)], MODEL)
    charts.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "--log-to wandb:mine: nobody answers; what happens now is not there"


def test_an_end_that_takes_too_long_is_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(chart_clients, "CLOSE_S", 0.05)
    monkeypatch.setattr(Slow, "close", lambda _: goes_on.wait(20.0))
    monkeypatch.setattr(Slow, "fails", False)
    monkeypatch.setitem(
        chart_clients.CLIENTS, "wandb", ("PROJECT", lambda _: lambda *_: OnThread(Slow))
    )
    charts = Charts("wandb:mine", SPEC)
    charts.write([finished(0, 5.0)], MODEL)
    charts.close()
    goes_on.set()
    (line,) = (record.getMessage() for record in caplog.records)
    assert "not all was sent within 0 s" in line


def wait_until(condition: Callable[[], bool]) -> None:
    """What another thread is about to do."""
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)
