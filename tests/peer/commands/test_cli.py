"""The command line: its options are frozen here, and so are exit codes and error lines."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import typer.main

from peer.cli import app, run_command
from peer.loop import Stopped
from swarmnet.errors import NotNow, SwarmnetError, UserError
from swarmnet.runtime.options import PeerOptions
from swarmnet.version import __version__

COMMANDS = {
    "peer": {
        "--config",
        "--spec",
        "--join",
        "--begin-anew",
        "--tokenizer",
        "--weights",
        "--stage",
        "--port",
        "--host",
        "--announce",
        "--transport",
        "--no-direct",
        "--direct-port",
        "--no-port-map",
        "--no-relay",
        "--state-dir",
        "--data",
        "--builder",
        "--no-feed",
        "--serve-data",
        "--fetch-data",
        "--threads",
        "--stages",
        "--tp",
        "--sequence-parallel",
        "--cp",
        "--ep",
        "--local",
        "--device",
        "--precision",
        "--activations",
        "--optimizer-memory",
        "--weights-memory",
        "--max-device-memory",
        "--compile",
        "--rounds",
        "--seed",
        "--metrics",
        "--log-to",
        "--notify",
        "--dashboard",
        "--dashboard-host",
        "--dashboard-join",
        "--allowed-host",
        "--exit-when-done",
        "--checkpoint-every",
        "--keep-checkpoints",
        "--plain",
        "--quiet",
        "--shared-log",
        "--debug",
        "--ready-file",
        "--parent-pid",
        "--invite",
        "--household",
        "--patience",
        "--health-file",
        "--metrics-port",
        "--metrics-host",
        "--max-upload",
        "--max-upload-per-month",
        "--max-upload-per-day",
        "--max-download-per-month",
        "--max-download-per-day",
        "--pause-on-battery",
        "--pause-on-metered",
        "--max-memory",
        "--max-device-share",
        "--hours",
        "--pause-when-busy",
    },
    "limits": {
        "--state-dir",
        "--max-upload",
        "--max-upload-per-month",
        "--max-upload-per-day",
        "--max-download-per-month",
        "--max-download-per-day",
        "--pause-on-battery",
        "--pause-on-metered",
        "--max-memory",
        "--max-device-share",
        "--hours",
        "--pause-when-busy",
        "--pause",
        "--debug",
    },
    "local": {
        "--out",
        "--state-dir",
        "--dtype",
        "--peers",
        "--spec",
        "--rounds",
        "--seed",
        "--metrics",
        "--log-to",
        "--notify",
        "--dashboard",
        "--dashboard-host",
        "--allowed-host",
        "--transport",
        "--no-direct",
        "--threads",
        "--tp",
        "--sequence-parallel",
        "--cp",
        "--ep",
        "--local",
        "--device",
        "--precision",
        "--activations",
        "--optimizer-memory",
        "--weights-memory",
        "--max-device-memory",
        "--compile",
        "--chaos",
        "--invite",
        "--plain",
        "--debug",
    },
    "completion": {"shell", "--debug"},
    "man": {"--debug"},
    "example": {"name", "--debug"},
    "data": {"spec", "--data", "--tokenizer", "--samples", "--json", "--debug"},
    "state": {"--state-dir", "--remove", "--keep", "--json", "--debug"},
    "counted": {"state_dirs", "--run-id", "--by-machine", "--json", "--debug"},
    "plan": {
        "--join",
        "--transport",
        "--invite",
        "--schedules",
        "--picture",
        "--machines",
        "--links",
        "--lora",
        "--choose",
        "--tokens",
        "--explain",
        "--spec",
        "--replicas",
        "--in-flight",
        "--cp",
        "--ep",
        "--tp",
        "--precision",
        "--measure",
        "--write",
        "--device",
        "--json",
        "--debug",
    },
    "simulate": {
        "--peers",
        "--stages",
        "--hours",
        "--churn",
        "--seed",
        "--speed-ratio",
        "--links",
        "--service",
        "--microbatches",
        "--sequences",
        "--codec",
        "--update-codec",
        "--topk-density",
        "--device",
        "--coding-speed",
        "--sync",
        "--local-steps",
        "--check-every",
        "--trace",
        "--sweep",
        "--replay",
        "--plot",
        "--json",
        "--debug",
    },
    "status": {"address", "--json", "--watch", "--transport", "--debug"},
    "dashboard": {
        "--join",
        "--replay",
        "--port",
        "--host",
        "--allowed-host",
        "--transport",
        "--debug",
    },
    "export": {
        "--out",
        "--join",
        "--state-dir",
        "--round",
        "--run-id",
        "--best",
        "--dtype",
        "--merge",
        "--weights",
        "--invite",
        "--transport",
        "--debug",
    },
    "doctor": {
        "--report",
        "--join",
        "--spec",
        "--device",
        "--precision",
        "--port",
        "--state-dir",
        "--transport",
        "--json",
        "--debug",
    },
    "invite": {
        "--key",
        "--spec",
        "--join",
        "--valid",
        "--peer",
        "--rounds",
        "--seed",
        "--transport",
        "--debug",
    },
}
"""Additions are welcome; a name that vanishes breaks somebody's script."""


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_options_of_each_command_are_frozen(command: str) -> None:
    group: Any = typer.main.get_command(app)
    names = {option for param in group.commands[command].params for option in param.opts}
    assert names - {"--help"} == COMMANDS[command]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("peer", 2, "give --spec FILE to start a run, or --join ADDR to join one"),
        ("peer --spec a --join b", 2, "give --spec FILE to start a run, or --join ADDR"),
        ("peer --join b --rounds 3", 2, "--rounds and --seed go with --spec"),
        ("peer --port 70000 --join b", 2, "--port"),
        ("local --peers 0", 2, "--peers"),
        ("dashboard --join b --allowed-host https://a.example/", 2, "is no name of a host"),
        ("plan --spec a --cp 2", 2, "--cp goes with --explain"),
        ("plan --spec a --ep 2", 2, "--ep goes with --explain"),
        ("plan --spec a --explain --cp 2 --ep 2", 2, "--cp does not go with --ep"),
        ("local --peres 3", 2, "No such option: --peres"),
        ("local --spec missing.toml", 2, "cannot read missing.toml: No such file"),
        ("local --metrics no/such/folder", 1, "cannot write --metrics no/such/folder"),
        ("status", 2, "Missing argument 'ADDR'"),
        ("status x --transport pigeon", 2, "'pigeon' is not one of"),
        ("nonsense", 2, "No such command 'nonsense'"),
    ],
)
def test_wrong_use_is_one_line_and_an_exit_code(
    line: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(line.split()) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("swarmnet: ")
    assert message in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("say it\notherwise"), "swarmnet: say it otherwise\n"),
        (NotNow("busy; try again"), "swarmnet: busy; try again\n"),
        (SwarmnetError("lost"), "swarmnet: lost (--debug shows where)\n"),
        (ValueError("x"), "swarmnet: ValueError: x (--debug shows where)\n"),
    ],
)
def test_errors_are_one_line_and_a_traceback_only_with_debug(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("peer.commands.status.show_status", fail)
    assert run_command(["status", "x"]) == 1
    assert capsys.readouterr().err == message
    assert run_command(["status", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_peer_is_started_with_its_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[PeerOptions] = []

    async def run_peer(options: PeerOptions, extras: object) -> None:
        seen.append(options)

    monkeypatch.setattr("swarmnet.runtime.run.run_peer", run_peer)
    line = f"peer --join a --join b --stage 1 --no-feed --state-dir {tmp_path} --data d --quiet"
    assert run_command(line.split()) == 0
    (options,) = seen
    assert options.join == ("a", "b")
    assert (options.stage, options.feed, options.data) == (1, False, ("d",))
    assert (options.state_dir, options.is_quiet) == (tmp_path, True)


def test_a_dashboard_whose_port_is_taken_starts_no_peer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet.runtime.net.PORT_WAIT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = f"peer --join a --state-dir {tmp_path} --dashboard {port}"
        assert run_command(line.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"cannot show the page on 127.0.0.1:{port}" in err
    assert "choose another port" in err


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"swarmnet {__version__}\n"


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from peer.cli import run_command; run_command(['peer', '--help']);"
        "heavy = {'torch', 'hivemind', 'uvloop', 'libp2p', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--join" in done.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("generate", "--join", "/ip4/x", "--serve", "8000"), 0),
        (("generate", "--join", "/ip4/x", "Once"), 1),
        (("status", "/ip4/x", "--watch"), 0),
        (("status", "/ip4/x"), 1),
        (("export", "--join", "/ip4/x", "--out", "y"), 1),
    ],
)
def test_ctrl_c_is_an_error_where_something_was_left_undone(
    words: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that lasts until it is stopped is done then."""

    def stopped(main: Coroutine[Any, Any, None], *_: Any) -> None:
        main.close()
        raise Stopped

    monkeypatch.setattr("peer.loop.run", stopped)
    assert run_command(words) == code


SIGNALLED = """
import asyncio, os, signal, sys
from peer.loop import Stopped, run

async def work(swallow):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("drained", flush=True)
        if not swallow:
            raise

try:
    run(work(sys.argv[2] == "swallow"))
except Stopped:
    print("stopped")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("mode", "printed"), [("swallow", "drained\n"), ("raise", "drained\nstopped\n")]
)
def test_a_signal_lets_a_command_drain(name: str, mode: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, name, mode], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
