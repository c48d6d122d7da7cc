"""Peers without anything that only Linux has, hivemind's daemon and uvloop among it."""

from __future__ import annotations

import pytest

from tests.processes.running import Machine, tiny_run

pytestmark = pytest.mark.processes
ELSEWHERE = {
    "environment": {"SWARMNET_PORTABLE": "1"},
    "before": "from swarmnet import system; system.PORTABLE = True",
}
"""Of a peer, and of its ranks."""


def test_they_train_with_others_and_go_on_after_deaths_and_restarts(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=100_000)
    data = ("--data", str(running.folder / "text.txt"))
    slow = ("--max-device-share", "50%", "--debug")
    first = running.start_peer("a", "--spec", str(path), "--stage", "0", *slow, **ELSEWHERE)
    running.until_ready(first)
    join = ("--join", first.address, *data, *slow)
    ranks = running.start_peer("b", *join, "--stage", "1", "--tp", "2", **ELSEWHERE)
    third = running.start_peer("c", *join, "--stage", "1")
    fourth = running.start_peer("d", *join, "--stage", "0")
    running.until_all_are_in([first, ranks, third, fourth], 3)
    assert any("py-libp2p carries" in line for line in first.errors())
    assert not any("py-libp2p carries" in line for line in third.errors())

    running.kill(first)
    seen = len(fourth.events("round"))
    running.until(lambda: len(fourth.events("round")) >= seen + 3)
    (running.folder / "a.ready").unlink()
    again = running.start_peer("a", "--join", fourth.address, *data, *slow, **ELSEWHERE)
    running.until_ready(again)
    assert again.peer_id == first.peer_id
    running.until(lambda: any("has the optimizer state" in line for line in again.errors()))

    for peer in (ranks, again):
        running.interrupt(peer)
    assert [running.wait(peer) for peer in (ranks, again)] == [0, 0], running.describe()
