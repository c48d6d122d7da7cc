"""Charts of a run in TensorBoard's files, as TensorBoard reads them."""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UsageError, UserError
from swarmnet.observe.charts import Charts, charts_folder
from swarmnet.observe.events import HeldOut, PeerLost, RoundFinished
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
        charts = Charts(tmp_path, SPEC)
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
    text = found.Tensors("events/text_summary")[-1]
    assert text.step == 13
    assert b"peer abcdefgh was lost (stage 1)" in text.tensor_proto.string_val[0]


def test_what_cannot_be_written_is_a_line_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    charts = Charts(tmp_path / "file", SPEC)
    for r in range(5):
        charts.write([finished(r, 5.0)], replace(MODEL))
    (tmp_path / "file").unlink()
    charts.write([finished(5, 5.0)], MODEL)
    charts.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "what happens now is not there" in lines[0]
    assert lines[1].endswith("is written again")
    assert [e.step for e in read(charts.folder).Scalars("loss/training")] == [5]


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert charts_folder("") is None
    for wrong in ("x", "tensorboard", "tensorboard:", "wandb:mine"):
        with pytest.raises(UsageError, match="write it as tensorboard:DIR"):
            charts_folder(wrong)
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"needs its library: pip install '?tensorboard"):
        charts_folder("tensorboard:/x")
