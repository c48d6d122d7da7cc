"""A closed run with real processes: who is invited trains, who is not is told why."""

from __future__ import annotations

import json
import re

import pytest

from peer.cli import run_command
from tests.observe.test_notices import serving
from tests.processes.running import Machine, tiny_run

pytestmark = pytest.mark.processes
ROUNDS = 12


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run_command(arguments) == 0
    return capsys.readouterr().out.strip()


def test_only_the_invited_train(running: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    key, spec = str(running.folder / "owner.key"), tiny_run(running.folder, rounds=ROUNDS)
    spec.write_text(f"{spec.read_text()}\n{printed(capsys, 'invite', '--key', key)}\n")
    invite = printed(capsys, "invite", "--key", key, "--spec", str(spec))
    first = running.start_peer("first", "--spec", str(spec), "--invite", invite, "--stage", "0")
    running.until_ready(first)
    stranger = running.start_peer("stranger", "--join", first.address)
    assert running.wait(stranger) == 2
    assert "ask its owner for an invite" in stranger.errors()[-1]
    assert not first.events("round"), "stage 1 has no replica: nothing can be trained yet"
    capsys.readouterr()
    assert run_command(["invite", "--key", key, "--join", first.address]) == 0
    said = capsys.readouterr()
    for_guest = said.out.strip()
    assert f"swarmnet peer --join {first.address} --invite INVITE" in said.err
    guest = running.start_peer("guest", "--join", first.address, "--invite", for_guest)
    running.until_round(first, ROUNDS)
    look = printed(capsys, "status", guest.address, "--json")
    assert guest.peer_id in look, "an observer may look without an invite"


def test_the_invited_have_a_text_written_while_peers_train(
    running: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    key, spec = str(running.folder / "owner.key"), tiny_run(running.folder, rounds=100_000)
    spec.write_text(f"{spec.read_text()}\n{printed(capsys, 'invite', '--key', key)}\n")
    invite = printed(capsys, "invite", "--key", key, "--spec", str(spec))
    invited = ("--invite", invite)
    first = running.start_peer("first", "--spec", str(spec), *invited, "--stage", "0")
    running.until_ready(first)
    second = running.start_peer("second", "--join", first.address, *invited, "--stage", "1")
    running.until_round(second, 3)
    asked = ("generate", "--join", second.address, "abc def", "--max-new-tokens", "12")
    stranger = running.start("stranger", *asked)
    assert running.wait(stranger) == 2, "only an invite helps"
    assert "you have shown no valid invite" in stranger.errors()[-1]
    assert len(stranger.errors()) == 1
    guest = running.start("guest", *asked, *invited)
    assert running.wait(guest) == 0, guest.describe()
    assert 1 < len(guest.output()) <= 13, "at most a character a token"
    assert guest.errors() == []


def test_the_owner_ends_a_run_for_everybody(
    running: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its peers, and the one who is sent messages, hear that it is over, and not that it stands
    still; who starts a peer again hears it too."""
    key, spec = str(running.folder / "owner.key"), tiny_run(running.folder, rounds=100_000)
    spec.write_text(f"{spec.read_text()}\n{printed(capsys, 'invite', '--key', key)}\n")
    invited = ("--invite", printed(capsys, "invite", "--key", key, "--spec", str(spec)))
    with serving() as server:
        started = ("--spec", str(spec), *invited, "--stage", "0", "--notify", server.url)
        first = running.start_peer("first", *started)
        running.until_ready(first)
        guest = running.start_peer("guest", "--join", first.address, *invited, "--stage", "1")
        running.until_round(guest, 3)
        said = printed(capsys, "stop", "--key", key, "--join", first.address)
        assert said.splitlines()[-1] == "all peers have left: the run is over"
        [last] = re.findall(r"ends with round (\d+): 2 of 2 peers", " ".join(said.split()))
        for peer in (first, guest):
            assert running.wait(peer) == 0, peer.describe()
            told = " ".join(peer.output().split())
            assert f"the run's owner has ended it after {last} rounds; this peer ends" in told
            assert "swarmnet state --remove" in told, "its checkpoints"
        assert f": ended by its owner after {last} rounds" in server.bodies[-1]
        assert not [text for text in server.bodies if "nothing has happened" in text]
    again = running.start_peer("first", *started[:4])
    assert running.wait(again) == 2
    assert f"has ended it with round {last}" in again.errors()[-1]


def test_the_doctor_asks_a_real_peer(running: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    first = running.start_peer("first", "--spec", str(tiny_run(running.folder)))
    running.until_ready(first)
    report = json.loads(printed(capsys, "doctor", "--join", first.address, "--json"))
    levels = {finding["check"]: finding["level"] for finding in report}
    for check in ("port", "the way out", "the way in", "clock", "bandwidth", "the run"):
        assert levels[check] == "good", report
