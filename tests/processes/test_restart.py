"""All peers of a run die at once; started again with their state folders, they go on."""

from __future__ import annotations

import shutil

import pytest

from tests.processes.running import Command, Machine, tiny_run

pytestmark = pytest.mark.processes
KILLED_AFTER, EVERY, MORE = 30, 5, 15


def rounds_of(peer: Command) -> list[int]:
    return [event["round"] for event in peer.events("round")]


def test_a_run_goes_on_after_all_of_it_died(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=100_000)
    checkpoints = ("--checkpoint-every", str(EVERY))
    first = running.start_peer(
        "peer-0", "--spec", str(path), "--stage", "0", "--debug", *checkpoints
    )
    running.until_ready(first)
    data = ("--data", str(running.folder / "text.txt"))

    def join(names: dict[str, str], address: str) -> list[Command]:
        """Joiners with the state folders that carry their names."""
        return [
            running.start_peer(
                name, "--join", address, *data, "--stage", stage, "--debug", *checkpoints
            )
            for name, stage in names.items()
        ]

    names = {"peer-1": "1", "peer-2": "0", "peer-3": "1"}
    peers = [first, *join(names, first.address)]
    running.until_all_are_in(peers, KILLED_AFTER)
    losses = [event["loss"] for event in first.events("round")]
    for peer in peers:
        peer.process.kill()
    for peer in peers:
        peer.process.wait()
    before = len(rounds_of(first))
    for peer in peers:
        (running.folder / f"{peer.name}.ready").unlink()

    again = running.start_peer(
        "peer-0", "--spec", str(path), "--stage", "0", "--debug", *checkpoints
    )
    running.until_ready(again)
    assert again.peer_id == first.peer_id, "the identity is in the state folder"
    peers = [again, *join(names, again.address)]
    running.until(lambda: len(rounds_of(again)) >= before + MORE)

    resumed = rounds_of(again)[before:]
    newest = rounds_of(first)[before - 1]
    assert newest - 3 * EVERY <= resumed[0] <= newest + EVERY, (newest, resumed[:3])
    after = [event["loss"] for event in again.events("round")][before:]
    assert max(after) < (losses[0] + min(losses)) / 2, "the loss goes on where it was"
    assert all(peer.process.poll() is None for peer in peers), running.describe()


def test_of_two_with_one_identity_the_elder_says_so_and_ends(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=100_000)
    peers = running.start_swarm(path, [("--stage", "1"), ("--stage", "1")])
    running.until_all_are_in(peers, 3)
    first, elder, other = peers
    shutil.copytree(elder.folder / elder.name, running.folder / "copy")
    data = ("--data", str(running.folder / "text.txt"))
    copy = running.start_peer("copy", "--join", first.address, *data, "--stage", "1")
    assert running.wait(elder) == 2, "a start anew does not mend it"
    line = elder.errors()[-1]
    assert "runs elsewhere" in line
    assert str(running.folder / elder.name) in line
    assert "/tcp/" in line, "where the other one is"
    seen = len(rounds_of(first))
    running.until(lambda: len(rounds_of(first)) >= seen + 5)
    assert all(p.process.poll() is None for p in (first, other, copy)), running.describe()
