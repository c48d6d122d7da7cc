"""Limits that are changed while real peers train: pauses, the upload cap, the device's share."""

from __future__ import annotations

import json

import pytest

from tests.processes.running import Command, Machine, machine, tiny_run

pytestmark = pytest.mark.processes


def limits(running: Machine, of: Command, *arguments: str) -> str:
    """Runs `swarmnet limits` for a peer; returns what it prints."""
    command = running.start(
        "limits", "limits", "--state-dir", str(running.folder / of.name), *arguments
    )
    assert running.wait(command, 60.0) == 0, command.describe()
    return command.output()


def test_a_volunteer_pauses_and_comes_back_while_the_run_goes_on() -> None:
    with machine() as running:
        spec = tiny_run(running.folder, rounds=5000)
        first, _, guest = running.start_swarm(
            spec,
            [
                ("--stage", "1"),
                (
                    "--stage",
                    "0",
                    "--max-upload",
                    "50Mbit",
                    "--max-device-share",
                    "50%",
                    "--max-memory",
                    "8GB",
                ),
            ],
        )
        running.until(lambda: len(first.events("round")) >= 3)
        told = "limits: upload 50Mbit; memory 8GB; device 50% of the time"
        running.until(lambda: told in guest.output())  # it listens before it prints
        printed = limits(running, guest, "--pause")
        assert "device 50% of the time; paused" in printed
        running.until(lambda: first.events("peer_paused"))
        (event,) = first.events("peer_paused")
        assert event["peer_id"] == guest.peer_id
        assert event["reason"] == "its owner paused it"
        before = len(first.events("round"))
        running.until(lambda: len(first.events("round")) >= before + 3)
        assert guest.process.poll() is None
        running.until(lambda: any("paused because" in line for line in guest.errors()))
        status = running.start("status", "status", first.address, "--json")
        assert running.wait(status, 60.0) == 0, status.describe()
        shown = {p["peer_id"]: p for p in json.loads(status.output())["peers"]}[guest.peer_id]
        assert (shown["state"], shown["paused"], shown["stage"]) == ("paused", event["reason"], -1)
        (running.folder / guest.name / "limits.toml").write_text("max_upload = 'plenty'\n")
        running.until(lambda: any("limits stay as they were" in e for e in guest.errors()))
        (running.folder / guest.name / "limits.toml").unlink()
        assert "no limits" in limits(running, guest)
        running.until(lambda: first.events("peer_resumed"))
        before = len(first.events("round"))
        running.until(lambda: len(first.events("round")) >= before + 3)
        assert not first.events("peer_lost")
        running.interrupt(guest)
        assert running.wait(guest) == 0


def test_a_peer_that_has_no_memory_for_any_stage_says_so_and_ends() -> None:
    with machine() as running:
        spec = tiny_run(running.folder)
        peer = running.start_peer("peer-0", "--spec", str(spec), "--max-memory", "20MB")
        assert running.wait(peer) == 1
        (line,) = peer.errors()
        assert line.startswith("swarmnet: stage 0 takes ")
        assert "allows 19 MiB (20MB); allow more" in line
