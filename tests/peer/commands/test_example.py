"""`swarmnet example` writes what the documentation has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peer.cli import run_command
from peer.commands.example import EXAMPLES, FOLDER, examples_folder, write_example
from swarmnet.errors import UsageError, UserError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_written_and_nothing_is_written_over(name: str, tmp_path: Path) -> None:
    begin = write_example(name, tmp_path)
    written = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()}
    assert written == {Path(FOLDER, each) for each in EXAMPLES[name]}
    for path in written:
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()
    assert Path(begin.split()[-1]) in written
    assert write_example(name, tmp_path) == begin
    changed = tmp_path / FOLDER / EXAMPLES[name][-1]
    changed.write_text("mine")
    with pytest.raises(UserError, match="is there already, and differs; move it away"):
        write_example(name, tmp_path)
    assert changed.read_text() == "mine"


def test_an_example_has_the_files_that_it_names() -> None:
    for files in EXAMPLES.values():
        for each in files:
            named = re.findall(
                r"examples/([\w/]+\.(?:py|jsonl))", (ROOT / FOLDER / each).read_text()
            )
            assert set(named) <= set(files), each


def test_the_command_lists_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["example"]) == 0
    assert capsys.readouterr().out.split() == list(EXAMPLES)
    assert run_command(["example", "run"]) == 0
    assert capsys.readouterr().out == "swarmnet local --spec examples/run.toml\n"
    assert run_command(["example", "nothing"]) == 2
    assert "there is no example 'nothing'; there are: run, " in capsys.readouterr().err


def test_what_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(UserError, match="cannot write"):
        write_example("run", tmp_path)
    with pytest.raises(UsageError):
        write_example("../run", tmp_path)
    assert examples_folder() == ROOT / FOLDER
