"""`swarmnet plan --schedules`: a table, and a picture that can be read."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from peer.cli import app
from swarmnet.runtime.options import default_spec_path

MACHINES = ("--machines", "16GB-cpu*4", "--links", "10Gbit,0.1ms")
SVG = "{http://www.w3.org/2000/svg}"


def run_file(folder: Path, batch: int) -> Path:
    path, text = folder / "run.toml", default_spec_path().read_text()
    text = text.replace("num_stages = 2", "num_stages = 4\nlayers = [2, 2, 2, 1]")
    path.write_text(text.replace("global_batch = 32", f"global_batch = {batch}"))
    return path


def test_a_row_a_schedule_and_the_first_formulas(tmp_path: Path) -> None:
    command = ["plan", "--spec", str(run_file(tmp_path, 64)), "--schedules", *MACHINES]
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert (found["stages"], found["microbatches"]) == (4, 8)
    rows = {row["name"]: row for row in found["schedules"]}
    assert len(rows) == 12
    assert rows["GPipe"]["peak_activations"] == 8
    assert rows["1F1B"]["peak_activations"] == 4
    assert rows["naive"]["tokens_per_s"] < rows["GPipe"]["tokens_per_s"]
    assert rows["ZB-H1"]["bubble"] < rows["1F1B"]["bubble"]
    assert rows["Chimera"]["weight_versions"] == 2
    assert rows["PipeDream-2BW"]["bubble"] < rows["1F1B"]["bubble"]
    assert rows["own order"]["round_s"] < rows["GPipe"]["round_s"], "backward passes come first"
    assert rows["own order, split"]["round_s"] < 0.95 * rows["own order"]["round_s"]
    assert 4 <= rows["own order"]["peak_activations"] <= 8
    told = CliRunner().invoke(app, command).stdout
    assert all(name in told for name in rows)


def test_a_schedule_that_cannot_be_says_why(tmp_path: Path) -> None:
    command = ["plan", "--spec", str(run_file(tmp_path, 40)), "--schedules", *MACHINES, "--json"]
    rows = json.loads(CliRunner().invoke(app, command).stdout)["schedules"]
    assert any("even number" in row.get("why_not", "") for row in rows)


def test_the_picture_has_a_lane_a_stage_and_every_pass(tmp_path: Path) -> None:
    picture = tmp_path / "schedules.svg"
    command = ["plan", "--spec", str(run_file(tmp_path, 64)), *MACHINES]
    result = CliRunner().invoke(app, [*command, "--picture", str(picture)])
    assert result.exit_code == 0
    root = ElementTree.parse(picture).getroot()
    lanes = [x for x in root.iter(f"{SVG}text") if (x.text or "").startswith("stage ")]
    assert len(lanes) == 4 * 12
    passes = [x.text or "" for x in root.iter(f"{SVG}title")]
    whole = 8 * 4 * 2  # a forward and a backward pass of each microbatch at each stage
    assert sum("part" in x for x in passes) > 12 * whole
    widths = [float(x.attrib["width"]) for x in root.iter(f"{SVG}rect")]
    assert min(widths) > 0


@pytest.mark.parametrize("where", ["missing/x.svg"])
def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, where: str) -> None:
    command = ["plan", "--spec", str(run_file(tmp_path, 64)), *MACHINES]
    result = CliRunner().invoke(app, [*command, "--picture", str(tmp_path / where)])
    assert result.exit_code == 2
    assert "cannot be written" in result.output
