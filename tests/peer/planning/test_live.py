"""`swarmnet plan --join` beside a swarm of records."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from peer.cli import app
from peer.options import PlanOptions
from peer.planning.live import show_live
from swarmnet.errors import SpecError, UsageError, UserError
from swarmnet.protocol.membership.records import Record
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import RunSpec, load_spec
from tests.peer.fakes import FakeObserver, run_records

ADDRESS = "/fake/p2p/first"
LAYERS = 7
"""Of the usual run: an embedding, four decoder layers, a norm, a head."""


class Seen(FakeObserver):
    """Records of two replicas a stage, as they are given."""

    def __init__(self, spec: RunSpec, changes: Sequence[dict[str, object]]) -> None:
        super().__init__(spec, last_round=3)
        self._changes = changes

    def _see(self) -> None:
        now = asyncio.get_running_loop().time()
        self.version += 1
        for number, change in enumerate(self._changes):
            stage = number % self.spec.pipeline.num_stages
            record: Record = run_records(self.spec, 3, self.version)[stage]
            values = {"peer_id": f"peer-{number}", **change}
            self.view.merge(replace(record, **values), now)  # type: ignore[arg-type]


def known(rate: float, **more: object) -> dict[str, object]:
    return {"samples_per_s": rate, "upload_bytes_per_s": 1e9, "last_open_s": 2.0, **more}


def run_file(folder: Path, layers: Sequence[int] = (), stages: int = 2) -> Path:
    path, text = folder / "run.toml", default_spec_path().read_text()
    cut = f"layers = {list(layers)}\n" if layers else ""
    path.write_text(text.replace("num_stages = 2\n", f"num_stages = {stages}\n{cut}"))
    return path


def shown(observer: FakeObserver, **values: object) -> str:
    options = PlanOptions(join=(ADDRESS,), **{"links": "1Gbit,1ms"} | values)  # type: ignore[arg-type]
    out = io.StringIO()
    console = Console(file=out, width=200)
    asyncio.run(show_live(options, console, join=observer.join, look_s=0.0))
    assert observer.closed
    return out.getvalue()


def test_a_swarm_that_is_even_wants_no_other_cut(tmp_path: Path) -> None:
    spec = load_spec(run_file(tmp_path, stages=1))
    lines = shown(Seen(spec, [known(20.0)] * 4)).splitlines()
    assert "1 stage x 4 replicas" in lines[0]
    assert "2,048 tokens/s as its last rounds were" in lines[0], "32 samples of 128 in 2 s"
    assert lines[1].startswith("one more machine of middle speed: about ")
    assert any(x.startswith("without peer-") for x in lines)
    assert any("no other cut" in x for x in lines), lines


def test_a_lopsided_cut_is_changed_by_two_commands(tmp_path: Path) -> None:
    path = run_file(tmp_path, (LAYERS - 1, 1))
    observer = Seen(load_spec(path), [known(20.0), known(2000.0)] * 2)
    found = json.loads(shown(observer, as_json=True, spec=path, write=True))
    other = found["other"]
    assert sum(other["layers"]) == LAYERS
    assert other["tokens_per_s"] > found["tokens_per_s"]
    assert other["commands"] == [
        f"swarmnet plan --join {ADDRESS} --spec {path} --write",
        f"swarmnet peer --spec {path}",
    ]
    after = load_spec(path)
    assert list(after.pipeline.layers) == other["layers"]
    assert after.pipeline.num_stages == len(other["layers"])
    assert observer.spec.run_id.startswith(after.model.continues)
    assert after.model.continues


def test_nothing_is_written_where_nothing_would_pay(tmp_path: Path) -> None:
    path = run_file(tmp_path, stages=1)
    before = path.read_text()
    observer = Seen(load_spec(path), [known(50.0)] * 4)
    with pytest.raises(SpecError, match="nothing is written"):
        shown(observer, spec=path, write=True)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([known(0.0)] * 4, "no machine says how fast"),
        ([known(1.0)], "stage 1 has no replica"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    tmp_path: Path, changes: Sequence[dict[str, object]], words: str
) -> None:
    observer = Seen(load_spec(run_file(tmp_path)), changes)
    with pytest.raises(UsageError, match=words) as refused:
        shown(observer)
    assert "\n" not in str(refused.value)


def test_records_do_not_say_who_shares_a_link(tmp_path: Path) -> None:
    observer = Seen(load_spec(run_file(tmp_path)), [known(1.0)] * 4)
    with pytest.raises(UsageError, match="leave ,house= out") as refused:
        shown(observer, links="20Mbit/100Mbit,30ms,house=2")
    assert "\n" not in str(refused.value)


def test_a_liar_does_not_move_the_answer(tmp_path: Path) -> None:
    spec = load_spec(run_file(tmp_path))
    honest = json.loads(shown(Seen(spec, [known(50.0)] * 4), as_json=True))
    lies = known(1e15, upload_bytes_per_s=1e15, last_open_s=1e15)
    found = json.loads(shown(Seen(spec, [*[known(50.0)] * 3, lies]), as_json=True))
    assert found["tokens_per_s"] == pytest.approx(honest["tokens_per_s"])
    assert any("taken for ten times" in note for note in found["notes"])


def test_another_file_is_refused(tmp_path: Path) -> None:
    spec = load_spec(run_file(tmp_path))
    other = tmp_path / "other.toml"
    other.write_text(
        run_file(tmp_path).read_text().replace("global_batch = 32", "global_batch = 64")
    )
    with pytest.raises(UserError, match="another run"):
        shown(Seen(spec, [known(50.0)] * 4), spec=other)


@pytest.mark.parametrize(
    "more", [(), ("--join", ADDRESS, "--machines", "rtx4090"), ("--join", ADDRESS, "--measure")]
)
def test_what_does_not_go_together(more: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["plan", *more])
    assert result.exit_code == 2
    assert "--join" in result.output
