"""`peer.toml`: options in a file, checked as those of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peer import cli
from peer.cli import run_command
from peer.config import CONFIG_FILE
from swarmnet.runtime.state_dir import claimed_state_dir

FULL = """
join = ["/ip4/203.0.113.7/tcp/4001/p2p/x"]  # the first peer
max-upload-per-month = "300GB"
max_upload = "10Mbit"
pause-when-busy = false
no-relay = true
fetch-data = false
hours = ["22:00-07:00", "12:00-13:00"]
port = 4001
patience = 2.5
stages = 2
quiet = true
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What `swarmnet peer` was to serve."""
    found: list[Any] = []
    monkeypatch.setattr("peer.commands.peer.serve", lambda *given: found.append(given))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return found


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG_FILE
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    return path


def test_every_kind_of_option_is_read(started: list[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "x", FULL)
    assert run_command(["peer", "--config", str(path)]) == 0
    ((choices, limits, output),) = started
    assert choices.join == ("/ip4/203.0.113.7/tcp/4001/p2p/x",)
    assert (choices.port, choices.patience_s, choices.stages) == (4001, 2.5, "2")
    assert (choices.relay, choices.fetch_data, output.quiet) == (False, False, True)
    assert limits.max_upload_per_month == "300GB"
    assert limits.hours == ("22:00-07:00", "12:00-13:00")
    assert limits.pause_when_busy is False


def test_options_win(started: list[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "x", FULL)
    words = ["--join", "/a", "--port=5001", "--fetch-data", "--hours", "none"]
    assert run_command(["peer", "--config", str(path), *words]) == 0
    ((choices, limits, _),) = started
    assert (choices.join, choices.port, choices.fetch_data) == (("/a",), 5001, True)
    assert limits.hours == ("none",)
    assert limits.max_upload == "10Mbit"


def test_the_state_folder_has_one_by_default(started: list[Any], tmp_path: Path) -> None:
    write(tmp_path / "mine", 'join = "/mine"\n')
    assert run_command(["peer", "--state-dir", str(tmp_path / "mine")]) == 0
    first, second = tmp_path / "swarmnet" / "peer-1", tmp_path / "swarmnet" / "peer-2"
    write(second, 'join = ["/second"]\n')
    assert run_command(["peer", "--join", "/x"]) == 0
    with claimed_state_dir(first):
        assert run_command(["peer"]) == 0
    joined = [(choices.join, choices.state_dir) for choices, _, _ in started]
    assert joined == [
        (("/mine",), tmp_path / "mine"),
        (("/x",), None),
        (("/second",), second),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "'prot' is no option of `swarmnet peer`; did you mean port?"),
        ("port = 70000", "65535"),
        ("port = 'x'", "port: "),
        ("port = [1]", "port: one value, and no list"),
        ("port = true", "port: a text or a number"),
        ("join = [true]", "join: a text or a number, or a list"),
        ("quiet = 1", "quiet: it is true or false"),
        ("device = 'tpu'", "device: 'tpu' is not one of"),
        ("allowed-host = ['https://x']", "allowed-host: 'https://x' is no name of a host"),
        ("port = ", "is not TOML"),
        ("config = 'x'", "'config' is no option"),
        ("[limits]\nhours = []", "'limits' is no option"),
    ],
)
def test_what_is_wrong_is_a_line_that_names_the_file(
    text: str, message: str, started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "x", text)
    assert run_command(["peer", "--config", str(path), "--join", "/a"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"swarmnet: {path}")
    assert message in said
    assert said.count("\n") == 1
    assert started == []


def test_a_file_that_is_named_has_to_be_there(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["peer", "--config", str(tmp_path / "no.toml")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert run_command(["peer", "--config"]) == 2
    assert "requires an argument" in capsys.readouterr().err
    assert cli.EXIT_USAGE == 2
