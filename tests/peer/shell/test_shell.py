"""What a shell and `man` have of the commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peer.cli import EXIT_CODES, app, run_command
from peer.shell.completion import VARIABLE
from peer.shell.described import DescribedCommand, DescribedOption, described
from peer.shell.man import page

ROOT = Path(__file__).parents[3]
MACROS = {".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".I"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """`swarmnet`, for a shell to find."""
    path = tmp_path / "bin" / "swarmnet"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m peer "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("swarmnet comp", ["completion"]),
        ("swarmnet completion ", ["bash", "zsh", "fish"]),
        ("swarmnet peer --transport p", ["p2pd", "py-libp2p"]),
        ("swarmnet local --state", ["--state-dir"]),
    ],
)
def test_bash_completes(typed: str, expected: list[str], program: Path) -> None:
    script = """
        eval "$(swarmnet completion bash)"
        read -ra COMP_WORDS <<< "$1"
        [[ $1 == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        _swarmnet_completion swarmnet
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", typed],
        env=os.environ
        | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        cwd=program.parent,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{VARIABLE}=complete_{shell}" in script
    assert run_command(["completion", "tcsh"]) == 2
    assert "is not one of" in capsys.readouterr().err


def test_the_page_has_all_that_help_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["man"]) == 0
    text = capsys.readouterr().out
    plain = text.replace("\\-", "-")
    for command in described(app):
        of_command = plain.split(f".SS swarmnet {command.name}")[1].split(".SS")[0]
        for option in command.options:
            assert f".B {option.typed}\n" in of_command
    for code in EXIT_CODES:
        assert f".B {code}\n" in text.split(".SH EXIT STATUS")[1]


def test_no_text_is_a_macro() -> None:
    hostile = DescribedOption(
        ("--x",), ".SH", "'", "", ".so /etc/passwd \\fB\\n[x]", "It's", False, False
    )
    command = DescribedCommand("one", ("'br of a sentence.", ".PP"), (hostile,))
    text = page("A thing.", [command], {0: ".x"}, "1-2")
    for line in text.splitlines():
        if line[:1] in (".", "'"):
            assert line.split()[0] in MACROS, line
    assert not re.search(r"\\(?![e&\-(])", text), "an escape that is not ours"
    if shutil.which("groff"):
        shown = subprocess.run(
            ["groff", "-man", "-Tutf8", "-P-cbou", "-ww"],
            input=text,
            capture_output=True,
            text=True,
        )
        assert shown.stderr == ""
        assert ".so /etc/passwd \\fB\\n[x]" in shown.stdout
