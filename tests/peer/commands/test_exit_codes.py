"""With which code commands end, by the cause: 2 where only a person mends it, so that services
leave it alone, 1 where the same command may do another time."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import swarmnet.runtime.net as net
from peer.cli import EXIT_FAILED, EXIT_USAGE, run_command
from swarmnet.admission import Invite
from swarmnet.errors import PortTaken
from swarmnet.identity import Identity
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.state_dir import claimed_state_dir
from swarmnet.simulation.clock import run
from tests.processes.running import tiny_run

ROOT = Path(__file__).parents[3]
STRANGER = Identity.generate().peer_id
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"


class Place:
    """A folder, and what commands need in it."""

    def __init__(self, folder: Path, taken_port: int) -> None:
        self.folder = folder
        self.taken_port = taken_port
        self.good = tiny_run(folder)

    def __call__(self, command: str, **words: object) -> list[str]:
        filled = command.format(
            state=f"--state-dir {self.folder / 'state'} --host 127.0.0.1 --transport py-libp2p",
            join=f"peer --join {NOBODY} --patience 0",
            run=f"peer --spec {self.good}",
            **words,
        )
        return filled.split()

    def broken(self, old: str, new: str) -> Path:
        path = self.folder / "wrong.toml"
        path.write_text(self.good.read_text().replace(old, new))
        return path

    def closed(self, valid_s: float | None = None) -> list[str]:
        """A peer of a closed run, with an invite that holds for so long; None: without one."""
        owner = Identity.generate()
        path = self.folder / "closed.toml"
        security = f'[security]\nadmission = "invite"\nowner = "{owner.peer_id}"\n'
        path.write_text(f"{self.good.read_text()}\n{security}")
        words = self("peer --spec {spec} {state}", spec=path)
        if valid_s is None:
            return words
        spec = start_run(path).spec
        invite = Invite.issue(owner, spec.run_id, int(time.time() + valid_s))
        return [*words, "--invite", str(invite)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(net, "PORT_WAIT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield Place(tmp_path, other.getsockname()[1])


Command = Callable[[Place], list[str]]


def another_id(place: Place) -> list[str]:
    key = place.folder / "state" / "identity.key"
    key.parent.mkdir()
    key.write_bytes(b"no key")
    return place("{run} {state}")


ONLY_A_PERSON: dict[str, tuple[Command, str]] = {
    "a key of the spec is wrong": (
        lambda p: p("peer --spec {spec} {state}", spec=p.broken("hidden_size", "hiden_size")),
        "hiden_size",
    ),
    "the spec is no TOML": (
        lambda p: p("plan --spec {spec}", spec=p.broken("[model]", "[model")),
        "wrong.toml",
    ),
    "there is no spec": (lambda p: p("data nowhere.toml"), "nowhere.toml"),
    "no invite": (lambda p: p.closed(), "ask its owner for an invite"),
    "an invite that has ended": (lambda p: p.closed(-60.0), "expired"),
    "no file with an invite": (
        lambda p: [*p.closed(), "--invite", "nowhere"],
        "neither an invite",
    ),
    "a stage that the run lacks": (lambda p: p("{run} {state} --stage 7"), "stages 0 to 1"),
    "an address to join that is none": (
        lambda p: p("peer --join nonsense {state}"),
        "is no address of a peer",
    ),
    "another peer's address announced": (
        lambda p: p("{run} {state} --announce {address}", address=NOBODY),
        "names another peer",
    ),
    "a damaged identity": (another_id, "no Ed25519 key"),
    "a port that stays taken": (
        lambda p: p("{run} {state} --port {port}", port=p.taken_port),
        "is taken",
    ),
    "a direct port that stays taken": (
        lambda p: p("{run} {state} --direct-port {port}", port=p.taken_port),
        "--direct-port",
    ),
    "a page's port that stays taken": (
        lambda p: p("{join} {state} --dashboard {port}", port=p.taken_port),
        "choose another port",
    ),
}
ANOTHER_TIME: dict[str, tuple[Command, str]] = {
    "nobody answers": (lambda p: p("{join} {state}"), "refused"),
    "the data are not there": (
        lambda p: p(
            "peer --spec {spec} {state}", spec=tiny_run(p.folder, seed=2, data="/nowhere/at/all")
        ),
        "nowhere",
    ),
    "an address that this machine lacks": (
        lambda p: p("{run} {state} --host 203.0.113.77"),
        "203.0.113.77",
    ),
    "no folder for metrics": (lambda p: p("{run} {state} --metrics no/such/file"), "--metrics"),
}


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = run_command(words)
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("swarmnet: ") for line in lines) == 1, lines
    return code, lines[-1]


@pytest.mark.parametrize("cause", ONLY_A_PERSON)
def test_what_only_a_person_mends_ends_with_2(
    cause: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    command, words = ONLY_A_PERSON[cause]
    code, line = said(command(place), capsys)
    assert words in line
    assert code == EXIT_USAGE, line


@pytest.mark.parametrize("cause", ANOTHER_TIME)
def test_what_may_do_another_time_ends_with_1(
    cause: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    command, words = ANOTHER_TIME[cause]
    code, line = said(command(place), capsys)
    assert words in line
    assert code == EXIT_FAILED, line


def test_a_folder_in_use_is_free_another_time(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with claimed_state_dir(place.folder / "state"):
        code, line = said(place("{run} {state}"), capsys)
    assert "in use by another peer" in line
    assert code == EXIT_FAILED


def test_a_port_that_becomes_free_is_taken_then(caplog: pytest.LogCaptureFixture) -> None:
    """The last process of this peer may be about to end."""
    tries: list[int] = []

    async def listen() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise PortTaken("port 4001 is taken")
        return "it listens"

    assert run(net.once_free(listen)) == "it listens"
    assert caplog.text.count("port 4001 is taken; waiting 30 s for it") == 1


def test_a_port_is_waited_for_30_seconds() -> None:
    async def listen() -> str:
        raise PortTaken("port 4001 is taken")

    async def wait() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(PortTaken):
            await net.once_free(listen)
        return loop.time() - began

    assert 30.0 <= run(wait()) <= 31.0


def test_services_do_not_start_again_what_only_a_person_mends() -> None:
    unit = (ROOT / "docs" / "swarmnet.service").read_text()
    assert re.search(r"^Restart=on-failure$", unit, re.MULTILINE)
    assert re.search(rf"^RestartPreventExitStatus={EXIT_USAGE}$", unit, re.MULTILINE)
    composed: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    for service in composed["services"].values():
        policy, _, tries = service["restart"].partition(":")
        assert policy == "on-failure"
        assert 0 < int(tries) <= 20, "docker knows no exit codes: it gives up after so many"
