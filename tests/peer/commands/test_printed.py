"""What commands print is what was written: brackets, on any terminal, and no command of others to
the terminal."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peer.cli import run_command, the_command
from peer.console import make_console, never_fail, without_controls
from peer.log import sum_up
from peer.observe.layout import Column
from peer.observe.report import report_peer
from peer.observe.screen import Screen, dashboard
from peer.observe.table import FittedTable, WholeTable
from swarmnet.observe.view_model import StageRow, ViewModel
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.trouble import LINES_AT_ONCE, SUM_UP_S
from swarmnet.simulation.clock import run as run_virtual
from tests.training.specs import small_spec

COMMAND: Any = the_command()
ROOT = Path(__file__).parents[3]
BRACKETS = re.compile(r"\[[^\]]*\]")


@pytest.mark.parametrize("name", ["", *sorted(COMMAND.commands)])
def test_help_has_every_bracket_that_was_written(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 1000)  # read where typer is imported
    command = COMMAND.commands[name] if name else COMMAND
    run_command([*([name] if name else []), "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    texts = [command.help, *(getattr(p, "help", None) for p in command.params)]
    written = [text.replace("\\[", "[") for text in texts if text]
    wanted = [mark for text in written for mark in BRACKETS.findall(" ".join(text.split()))]
    if name in ("export", "simulate"):
        assert wanted
    for mark in wanted:
        assert mark in printed


def test_brackets_in_what_is_printed_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_console().print("[lora] r of [/work/x] and [bold]")
    assert "[lora] r of [/work/x] and [bold]" in capsys.readouterr().out
    path = tmp_path / "[model]" / "[red]run.toml"
    assert run_command(["data", str(path)]) == 2
    assert f"cannot read {path}" in capsys.readouterr().err


STAGES = (StageRow(0, 2, 1, 3.5), StageRow(1, 0, 0, 0.0))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_any_encoding_shows_every_line(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    never_fail()
    screen = Screen(make_console())
    screen.say("über ■ \udcff")
    screen.draw(dashboard(small_spec(), model()))
    screen.say("swarmnet peer --join /ip4/203.0.113.7")
    out.flush()
    printed = out.buffer.getvalue().decode(encoding)
    assert "swarmnet peer --join /ip4/203.0.113.7" in printed
    assert ("■■□" if encoding == "utf-8" else "##o") in printed
    assert "nobody serves it" in printed
    assert ("ber ■" if encoding == "utf-8" else "ber \\u25a0") in printed


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("name", ["训练" * 30, "té" * 30, "e\u0301" * 40, "🏃" * 30, "\u202e" * 8])
def test_escapes_keep_to_the_width_of_the_terminal(name: str, encoding: str) -> None:
    """Of names that its encoding does not have: in a frame, and in both tables."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    console = make_console(width=40, out=out)
    console.print(dashboard(small_spec().model_copy(update={"name": name}), model()))
    console.print(FittedTable([Column("name", [name]), Column("n", ["1"])], folds="name"))
    console.print(WholeTable(["name", "n"], [[name, "1"]]))
    console.print(f"{name}: a llama, and the words of others after it")
    out.flush()
    lines = out.buffer.getvalue().decode(encoding).splitlines()
    assert max(map(cell_len, lines)) <= 40
    assert [line for line in lines if line.strip(" |").endswith((" 1", "|1"))][1:], "both tables"


def model() -> ViewModel:
    """Before the first round."""
    counts = dict.fromkeys(("round", "launched", "committed"), 0)
    unknown = dict.fromkeys(
        (
            "loss",
            "tokens_per_s",
            "held_out_round",
            "held_out_loss",
            "held_out_bits_per_byte",
        )
    )
    values: dict[str, Any] = {**counts, **unknown, "rounds": 5, "global_batch": 8, "done": False}
    return ViewModel(**values, stages=STAGES, peers=(), totals={})


def test_commands_go_on_where_the_locale_is_not_utf8(tmp_path: Path) -> None:
    """For real, once: a file with a name that the terminal does not have."""
    path = tmp_path / "läuft.toml"
    path.write_text('name = "läuft"\n', encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        [sys.executable, "-c", "from peer.cli import main; main()", "data", str(path)],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert b"l\\xe4uft.toml: [model] is missing" in ended.stderr or b"uft.toml" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_others_do_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202enothing"
    assert without_controls(evil) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202enothing"
    assert without_controls("two\nlines\tof text é") == "two\nlines\tof text é"
    Screen(Console()).say(evil)
    Screen(Console()).say("one\nswarmnet: all is well")
    spec = small_spec().model_copy(update={"name": evil})
    Screen(make_console()).draw(dashboard(spec, model()))
    assert run_command(["export", "--out", evil, "--state-dir", f"/no/{evil}"]) == 1
    said = capsys.readouterr()
    assert r"one\nswarmnet: all is well" in said.out, "a line is one line"
    for text in (said.out, said.err):
        assert "owned" in text
        assert not any(c in text for c in "\x1b\x07\x9b\u202e")


def test_json_is_the_same_on_every_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    make_console().print_json(json.dumps({"name": "läuft 😀"}), ensure_ascii=True)
    out.flush()
    printed = out.buffer.getvalue()
    assert json.loads(printed) == {"name": "läuft 😀"}


def test_nothing_printed_escapes_the_filter(capsys: pytest.CaptureFixture[str]) -> None:
    """In a table or a panel, and in a line of the log, which is one line."""
    evil = "a\x1b[2Jb\u202ec\u200b"
    table = Table(evil)
    table.add_row(Text(evil, "red"))
    make_console().print(Panel(table, title=Text(evil)))
    run_command(["export", "--out", "x", "--state-dir", "/no/such"])  # the log is a command's now
    logging.getLogger("swarmnet.peer").warning("%s", f"{evil}\nswarmnet: all is well")
    said = capsys.readouterr()
    assert r"a\x1b[2Jb\u202ec\u200b" in said.out
    assert said.out.count(r"a\x1b") == 3, "cells are cut where they are too wide"
    assert said.err.count("swarmnet: all is well") == 1
    assert r"\nswarmnet: all is well" in said.err
    assert not any(c in said.out + said.err for c in "\x1b\u202e\u200b")


def test_what_others_cause_again_and_again_fills_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["export", "--out", "x", "--state-dir", "/no/such"])  # the log is a command's now
    log = logging.getLogger("swarmnet.peer")
    for i in range(1000):
        log.warning("stranger %d broke the \x1bprotocol\n", i)
    log.warning("a line of its own")
    lines = capsys.readouterr().err.splitlines()
    told = sum("broke the" in line for line in lines)
    assert LINES_AT_ONCE <= told < 100
    assert "a line of its own" in lines[-1]
    sum_up(time.monotonic())
    assert not capsys.readouterr().err, "more of them may come"
    sum_up(time.monotonic() + SUM_UP_S)
    summed = capsys.readouterr().err
    assert f"broke the \\x1bprotocol\\n ({1000 - told} more in the last minute)" in summed
    sum_up(time.monotonic() + 2 * SUM_UP_S)
    assert not capsys.readouterr().err


def test_what_libraries_log_is_bounded_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a search that hivemind leaves behind is no line."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    run_command(["export", "--out", "x", "--state-dir", "/no/such"])  # the log is a command's now
    capsys.readouterr()

    async def leaves_one() -> None:
        asyncio.create_task(asyncio.Event().wait())  # noqa: RUF006
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(leaves_one())
    library = logging.getLogger("some.library")
    for i in range(1000):
        library.warning("something %d", i)
    lines = capsys.readouterr().err.splitlines()
    assert LINES_AT_ONCE <= len(lines) < 100
    assert all(line.startswith("some.library: something") for line in lines)
    sum_up(time.monotonic() + SUM_UP_S)
    assert f"({1000 - len(lines)} more in the last minute)" in capsys.readouterr().err


FORBIDDEN = {
    "print",
    "typer.echo",
    "typer.secho",
    "sys.stdout.write",
    "sys.stderr.write",
    "traceback.print_exc",
    "traceback.print_exception",
    "traceback.print_stack",
    "Console",
}
"""Ways to a terminal that filter nothing; `peer.console` and `peer.log` have others for them."""
ALLOWED = {"peer/console.py", "peer/log.py"}


def ways_out(text: str) -> set[str]:
    """Names of `FORBIDDEN` that a module uses, called or given away."""
    tree = ast.parse(text)
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return FORBIDDEN & (used | called | (named & {"print"}))


def test_all_that_is_printed_goes_through_the_filter() -> None:
    """Text of others reaches a terminal by no other way, whoever adds a command."""
    found = {
        str(path.relative_to(ROOT)): ways
        for package in ("peer", "swarmnet")
        for path in sorted((ROOT / package).rglob("*.py"))
        if (ways := ways_out(path.read_text()))
    }
    assert {path: ways for path, ways in found.items() if path not in ALLOWED} == {}
    assert set(found) <= ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "print('x')",
        "def f(say=print): say('x')",
        "import sys\nsys.stdout.write('x')",
        "import traceback\ntraceback.print_exc()",
        "typer.echo('x')",
        "Console(file=out).print('x')",
    ],
)
def test_other_ways_are_found(text: str) -> None:
    assert ways_out(text)


WAYS_OUT = """
import asyncio, logging, sys, threading, warnings
sys.argv = ["swarmnet", "export", "--out", EVIL, "--state-dir", "/no/such", "--debug"]
from peer import cli
EVIL_ERROR = ValueError(EVIL)

class Bad:
    def __del__(self):
        raise EVIL_ERROR

def run(*_, **__):
    logging.getLogger("swarmnet.peer").error("log %s", EVIL)
    logging.getLogger("asyncio").error("library %s", EVIL)
    warnings.warn(EVIL)
    Bad()
    def fail():
        raise EVIL_ERROR
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    raise EVIL_ERROR

from swarmnet.runtime.exporting import models
models.export_checkpoints = run
cli.main()
"""


def test_no_way_to_the_terminal_is_raw() -> None:
    """A log, one of a library, a warning, an error in a thread, one that nobody can catch, and a
    traceback: for real, once, at a terminal that has Latin letters only."""
    evil = "\x1b]0;owned\x07\u202e训练"
    ended = subprocess.run(
        [sys.executable, "-c", f"EVIL = {evil!a}\n{WAYS_OUT}"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "LC_ALL": "C"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    said = (ended.stdout + ended.stderr).decode("latin-1")
    assert ended.returncode == 1, said
    for way in ("log ", "library ", "Warning: ", "exception in Thread", "__del__", "Traceback"):
        assert way in said, said
    assert said.count("owned") >= 6
    assert not any(c in said for c in "\x1b\x07\u202e")
    assert "\\u8bad\\u7ec3" in said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_run_of_any_name_says_how_to_join_it(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    never_fail()
    address = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWabcdefgh"
    running = SimpleNamespace(
        options=SimpleNamespace(exit_when_done=True),
        spec=small_spec().model_copy(update={"name": "训练"}),
        addresses=[address],
        transport=SimpleNamespace(ports=lambda: [4001]),
        view=View("12D3KooWabcdefgh"),
    )
    keeper = SimpleNamespace(line="")

    async def reported() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await report_peer(running, "plain", None, None, keeper)  # type: ignore[arg-type]

    run_virtual(reported())
    out.flush()
    lines = out.buffer.getvalue().decode(encoding).splitlines()
    assert f"swarmnet peer --join {address}" in lines
    name = "训练" if encoding == "utf-8" else "\\u8bad\\u7ec3"
    assert lines[0].startswith(name)
