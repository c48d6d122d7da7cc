"""Every command that the project teaches can be typed as it is taught."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from peer.cli import app
from tests.docs.commands import PLACEHOLDER, ROOT, Taught, taught

NO_COMMANDS = {"relay", "the"}
"""Words after `swarmnet` in lines that are no commands: a constant of the protocol, a table."""
TAUGHT = taught()


def of(program: str) -> list[Taught]:
    return [each for each in TAUGHT if each.program == program]


def test_there_are_commands_of_all_kinds() -> None:
    assert len(of("swarmnet")) > 100
    assert len({each.words[0] for each in of("python")}) > 15
    assert {each.words for each in of("make")} >= {("demo",), ("install",), ("test",)}
    ours = [each.words for each in of("python") if each.where == "benchmarks/results/finetune.md"]
    assert ("benchmarks/finetune.py", "examples/finetune/run.toml", "losses.jsonl") in ours


def test_swarmnet_takes_what_is_taught() -> None:
    command: Any = typer.main.get_command(app)
    wrong = (line for each in of("swarmnet") for line in _refused(each, command.commands))
    assert list(wrong) == []


def _refused(each: Taught, commands: Mapping[str, Any]) -> Iterator[str]:
    """Why the program would not take a command. One in a sentence may lack a value."""
    name, *rest = each.words
    if name in NO_COMMANDS or PLACEHOLDER.fullmatch(name):
        return
    typed = f"{each.where}: swarmnet {' '.join(each.words)}"
    if name not in commands:
        yield f"{typed}: there is no such command"
        return
    try:
        commands[name].make_context(name, [word for word in rest if word != "--help"])
    except Exception as error:  # of the click that typer brings
        kinds = {"MissingParameter", "BadOptionUsage"}
        if each.has_placeholder:
            kinds.add("BadParameter")
        if type(error).__name__ not in kinds:
            yield f"{typed}: {error}"


def test_make_has_what_is_taught() -> None:
    goals = sorted({goal for each in of("make") for goal in each.words})
    done = subprocess.run(["make", "-n", *goals], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def faults(commands: list[list[str]], tmp_path: Path) -> list[str]:
    """As `commands` finds them, with nothing of the project installed but its two packages."""
    site = tmp_path / "site"
    site.mkdir()
    for package in ("swarmnet", "peer"):
        (site / package).symlink_to(ROOT / package)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "docs" / "commands.py")],
        input=json.dumps(commands),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_scripts_begin_as_they_are_taught(tmp_path: Path) -> None:
    """And find what they import of the project, also where they do so later."""
    commands = [[each.where, *each.words] for each in of("python")]
    assert faults(commands, tmp_path) == []


def test_what_is_wrong_with_a_script_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--size', type=int)\n"
        "parser.parse_args()\n"
        "from tests.oracles import reference\n"
        "from swarmnet.spec import NoSuchThing\n"
    )
    commands = [
        ["a", str(script), "--size", "x"],
        ["b", str(script), "--sise", "N"],
        ["c", str(script), "--size", "3"],
        ["d", "benchmarks/nothing.py"],
    ]
    found = faults(commands, tmp_path)
    for line, expected in zip(
        found,
        (
            "a: .* invalid int value: 'x'",
            "b: .* there is no --sise",
            "c: .* line 5: no module named 'tests'",
            "c: .* line 6: swarmnet.spec has no NoSuchThing",
            "d: .* there is no benchmarks/nothing.py",
        ),
        strict=True,
    ):
        assert re.match(expected, line), line
