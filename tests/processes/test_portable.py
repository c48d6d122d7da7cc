"""Peers without anything that only Linux has, hivemind's daemon and uvloop among it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.processes.running import SWARMNET, Command, Machine, tiny_run
from tests.training.memory.fake_device import COMPILER, build

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
    ranks = running.start_peer(
        "b", *join, "--stage", "1", "--tp", "2", "--device", "cpu", **ELSEWHERE
    )
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


def _trains_with(running: Machine, peers: list[Command], number: int) -> None:
    """Each tells, from now on, of a round of so many peers."""
    seen = {p.name: len(p.events("round")) for p in peers}

    def does(peer: Command) -> bool:
        assert peer.process.poll() is None, peer.describe()
        return any(e["peers"] == number for e in peer.events("round")[seen[peer.name] :])

    running.until(lambda: all(map(does, peers)))


@pytest.mark.long
def test_a_swarm_of_them_alone_finds_itself_again_by_what_it_remembers(running: Machine) -> None:
    """No DHT. Two die, and come back at other ports with nothing but the address of the dead."""
    path = tiny_run(running.folder, rounds=100_000)
    data = ("--data", str(running.folder / "text.txt"))
    slow = ("--max-device-share", "50%")
    begin = ("--spec", str(path), "--stage", "0", *slow)
    first = running.start_peer("a", *begin, **ELSEWHERE)
    running.until_ready(first)
    join = ("--join", first.address, *data, *slow)
    peers = [first]
    for name in ("b", "c"):
        peers.append(running.start_peer(name, *join, "--stage", "1", **ELSEWHERE))
    running.until_ready(*peers)
    _trains_with(running, peers, 3)
    _, second, third = peers
    for peer in (second, third):
        saved = running.folder / peer.name / "peers.json"
        running.until(lambda s=saved: s.exists() and len(json.loads(s.read_text())["peers"]) == 2)

    for peer in (first, third):
        running.kill(peer)
        (running.folder / f"{peer.name}.ready").unlink()
    third = running.start_peer("c", *join, "--stage", "1", **ELSEWHERE)
    first = running.start_peer("a", *begin, **ELSEWHERE)
    running.until_ready(first, third)
    _trains_with(running, [first, second, third], 3)
    assert not any("another run" in line for line in first.errors()), first.describe()


FAKE_DEVICE = """
import sys
if any("peer" in word for word in sys.orig_argv):
    from pathlib import Path
    from tests.training.memory.fake_device import install
    install(Path({library!r}))
"""


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="the fake device needs a C++ compiler")
def test_a_peer_with_another_accelerator_trains_beside_cpus(
    running: Machine, tmp_path: Path
) -> None:
    library = build(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(FAKE_DEVICE.format(library=str(library)))
    spec = tiny_run(running.folder, rounds=100_000)
    first = running.start_peer(
        "a",
        *("--spec", str(spec), "--stage", "0", "--debug"),
        command=SWARMNET,
        environment={"PYTHONPATH": _searched(tmp_path)},
    )
    running.until_ready(first)
    join = ("--join", first.address, "--data", str(running.folder / "text.txt"), "--debug")
    others = [running.start_peer(f"b{i}", *join, "--stage", str(i)) for i in range(2)]
    running.until_all_are_in([first, *others], 5)
    assert any("bf16 on fake:0" in line for line in first.errors()), first.describe()
    kinds = ("diverged", "retracted", "samples_lost")
    assert not [e for kind in kinds for p in (first, *others) for e in p.events(kind)]


def _searched(folder: Path) -> str:
    """A `PYTHONPATH` with that folder first."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH"), root])])


def test_local_runs_where_hivemind_and_uvloop_are_not_installed(
    running: Machine, tmp_path: Path
) -> None:
    """A start of its own, and one for each peer."""
    hidden = "import sys; sys.modules.update(hivemind=None, uvloop=None)"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    path = tiny_run(running.folder, rounds=5, num_stages=1)
    local = running.start(
        "local",
        *("local", "--plain", "--peers", "2", "--spec", str(path)),
        command=SWARMNET,
        environment={"PYTHONPATH": _searched(tmp_path), "SWARMNET_PORTABLE": "1"},
    )
    assert running.wait(local) == 0, local.describe()
    assert sum("py-libp2p carries" in line for line in local.errors()) == 1, local.describe()
