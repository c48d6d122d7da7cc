from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peer.cli import app
from peer.machine.measured_layers import write_layers
from swarmnet.spec import load_spec, parse_spec
from swarmnet.training.memory.plan import MODES
from swarmnet.training.resolving import resolve

SPEC = Path(__file__).parents[3] / "peer" / "default.toml"


@pytest.fixture
def fp32(tmp_path: Path) -> Path:
    """The usual run, with updates in fp32."""
    return with_sync(tmp_path, 'mode = "zero"\ncodec = "none"')


def with_sync(folder: Path, lines: str) -> Path:
    path, text = folder / "run.toml", SPEC.read_text()
    assert 'mode = "zero"' in text
    path.write_text(text.replace('mode = "zero"', lines))
    return path


def test_the_table_has_a_row_a_stage_and_the_formula(fp32: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "--spec", str(fp32), "--replicas", "4"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    header = next(line.split() for line in lines if "params" in line)
    assert header == [
        "stage",
        "params",
        "weights",
        "grads",
        "optim.",
        "sync",
        "activ.",
        "total",
        "no",
        "ZeRO",
    ]
    tables = [lines.index(line) for line in lines if line.split()[:1] == ["stage"]]
    assert lines[tables[1]].split() == ["stage", "keep", "blocks", "recompute", "offload"]
    for start in tables:
        assert sum(line.split()[:1] in (["0"], ["1"]) for line in lines[start : start + 5]) == 2
    assert "x R / N = 12.00, with R = 2 owners of a shard and N = 4 replicas" in result.stdout
    modes = next(i for i, line in enumerate(lines) if line.split()[:1] == ["mode"])
    assert [line.split()[0] for line in lines[modes + 2 : modes + 6]] == list(MODES)
    assert all(len(line) <= 80 for line in lines[: modes + 6])


def test_for_programs(fp32: Path) -> None:
    command = ["plan", "--spec", str(fp32), "--replicas", "8", "--precision", "mixed", "--json"]
    result = CliRunner().invoke(app, command)
    plan = json.loads(result.stdout)
    assert plan["replicas"] == 8
    for stage in plan["stages"]:
        n = stage["num_parameters"]
        assert stage["unsharded"] == 16 * n
        assert stage["state"] == 2 * n + 2 * n + 12 * n * 2 / 8


@pytest.mark.parametrize(
    ("mode", "state", "sent"),
    [
        ("zero", 4 + 4 + 8 * 2 / 5, 4 * 2 * 4 / 5),
        ("delayed", 4 + 4 + 12 * 2 / 5 + 8 + 4, 4 * 2 * 4 / 5),
        ("auto", 4 + 4 + 12 * 2 / 5 + 8 + 4, 4 * 2 * 4 / 5),
        ("local", 4 + 4 + 8 + 4 + 4 * 2 / 5, 4 * 2 * 4 / 5 / 10),
        ("gossip", 4 + 4 + 8 + 4 + 4, 16 * 4 / 5 / 10),
    ],
)
def test_what_the_sync_modes_hold_and_send(
    tmp_path: Path, mode: str, state: float, sent: float
) -> None:
    spec = with_sync(tmp_path, f'mode = "{mode}"\nlocal_steps = 10\ncodec = "none"')
    command = ["plan", "--spec", str(spec), "--replicas", "5"]
    plan = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert plan["mode"] == mode
    for stage in plan["stages"]:
        n = stage["num_parameters"]
        assert stage["state"] == pytest.approx(state * n)
        assert stage["sent"] == pytest.approx(sent * n)
        if mode != "auto":
            assert stage["by_mode"][mode]["state"] == stage["state"]
            assert stage["by_mode"][mode]["sent_per_round"] == stage["sent"]
    assert f"= {state:.2f}, with R = 2" in CliRunner().invoke(app, command).stdout


@pytest.mark.parametrize("mode", ["zero", "gossip"])
def test_a_file_that_names_no_codec_is_planned_with_the_one_it_would_be_started_with(
    mode: str, tmp_path: Path
) -> None:
    plans = []
    for codec in ("", f'\ncodec = "{resolve_codec(mode)}"'):
        spec = with_sync(tmp_path, f'mode = "{mode}"{codec}')
        plans.append(
            json.loads(CliRunner().invoke(app, ["plan", "--spec", str(spec), "--json"]).stdout)
        )
    assert plans[0] == plans[1]
    assert plans[0]["stages"][0]["sent"] < 2.5 * plans[0]["stages"][0]["num_parameters"]


def resolve_codec(mode: str) -> str:
    spec = parse_spec(SPEC.read_text().replace('mode = "zero"', f'mode = "{mode}"'))
    return resolve(spec).sync.codec


def test_low_precision_and_the_policies(fp32: Path) -> None:
    command = ["plan", "--spec", str(fp32), "--replicas", "4", "--precision", "bf16", "--json"]
    plan = json.loads(CliRunner().invoke(app, command).stdout)
    assert plan["precision"] == "bf16"
    for stage in plan["stages"]:
        n = stage["num_parameters"]
        assert stage["state"] == (2 + 4 + 4 + 8 * 2 / 4) * n
        assert stage["by_policy"]["keep"] == stage["activations"]
        assert stage["by_policy"]["blocks"] < stage["by_policy"]["keep"]


def measure(path: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["plan", "--spec", str(path), "--measure", *more])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_measured_layers_are_cut_and_may_be_written_into_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = SPEC.read_text()
    path.write_text(text)
    entry = measure(path, "--device", "cpu").splitlines()[-1]
    layers = json.loads(entry.removeprefix("layers = "))
    assert len(layers) == 2
    assert sum(layers) == 7
    assert path.read_text() == text
    found = json.loads(measure(path, "--write", "--json"))
    assert all(seconds > 0 for seconds in found["layer_s"])
    assert found["slowest_stage_s"] <= found["present_slowest_stage_s"]
    assert load_spec(path).pipeline.layers == tuple(found["layers"])
    assert re.sub(r"(?m)^layers = .*\n", "", path.read_text()) == text, "the rest is as it was"


def test_a_cut_is_replaced_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SPEC.read_text().replace("num_stages = 2", "num_stages = 2\nlayers = [6, 1]"))
    assert "cut by its [pipeline] layers: [6, 1]" in measure(path)
    before = path.read_text()
    write_layers(path, [3, 4])
    assert path.read_text() == before.replace("[6, 1]", "[3, 4]")
    assert load_spec(path).pipeline.layers == (3, 4)


def test_a_cut_that_does_not_fit_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for layers, words in (("[6, 2]", "add up to 8"), ("[7]", "num_stages is 2"), ("[7, 0]", "")):
        path.write_text(
            SPEC.read_text().replace("num_stages = 2", f"num_stages = 2\nlayers = {layers}")
        )
        result = CliRunner().invoke(app, ["plan", "--spec", str(path)])
        assert result.exit_code == 2
        assert words in str(result.output) + str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--spec", str(SPEC), "--write"], 2),
        (["--spec", "nowhere.toml"], 2),
        (["--spec", "x", "--replicas", "0"], 2),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], code: int) -> None:
    assert CliRunner().invoke(app, ["plan", *arguments]).exit_code == code


def test_more_microbatches_in_flight_take_more_memory() -> None:
    def activations(in_flight: int) -> list[float]:
        command = ["plan", "--spec", str(SPEC), "--in-flight", str(in_flight), "--json"]
        stages = json.loads(CliRunner().invoke(app, command).stdout)["stages"]
        return [stage["activations"] for stage in stages]

    one, two, four = activations(1), activations(2), activations(4)
    for a, b, d in list(zip(one, two, four, strict=True))[:-1]:
        assert b > a > 0
        assert d - a == pytest.approx(3 * (b - a))
    assert one[-1] == four[-1], "the last stage goes forward and backward in one"
