"""A swarm finds itself again on networks as they are: addresses above 127, docker's bridge on every
machine, peers that come back elsewhere; network namespaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnet.protocol.recovery import RESTORE_PATIENCE_S
from tests.processes.networks.inside import world
from tests.processes.networks.internet import HOME_NET, PUBLIC_NET
from tests.processes.running import SWARMNET, Command, Machine, machine, tiny_run

pytestmark = pytest.mark.processes

TOGETHER_WITHIN_S = 60.0


def start(running: Machine, space: str, name: str, state: str, *arguments: str) -> Command:
    """A peer on a machine of the small internet, that says in the folder `ready` where it is.
    `state`: whose memory it has."""
    return running.start(
        name,
        "peer",
        "--plain",
        "--host",
        "0.0.0.0",
        "--threads",
        "1",
        "--state-dir",
        str(running.folder / state),
        "--ready-file",
        f"{running.folder}/ready/",
        "--metrics",
        str(running.folder / f"{name}.jsonl"),
        *arguments,
        command=("ip", "netns", "exec", space, *SWARMNET),
    )


def told(running: Machine, peer: Command) -> list[str]:
    """The addresses that a peer tells others, by the ready file of its process."""
    for path in (running.folder / "ready").glob("*.json"):
        ready = json.loads(path.read_text())
        if ready["pid"] == peer.pid:
            return list(ready["addresses"])
    assert peer.process.poll() is None, peer.describe()
    return []


def saved_by(running: Machine, state: str) -> list[tuple[str, ...]]:
    """The addresses of each peer that it remembers."""
    path = running.folder / state / "peers.json"
    peers = json.loads(path.read_text())["peers"] if path.exists() else {}
    return sorted(map(tuple, peers.values()))


def trains_with(
    running: Machine, peers: list[Command], number: int, within_s: float = TOGETHER_WITHIN_S
) -> None:
    """Each of them tells, from now on, of a round of so many peers."""
    seen = {peer.name: len(peer.events("round")) for peer in peers}

    def does(peer: Command) -> bool:
        assert peer.process.poll() is None, peer.describe()
        return any(e["peers"] == number for e in peer.events("round")[seen[peer.name] :])

    running.until(lambda: all(does(peer) for peer in peers), within_s)


@pytest.mark.parametrize("net", [pytest.param(PUBLIC_NET, marks=pytest.mark.long), HOME_NET])
def test_peers_come_back_elsewhere_and_the_swarm_is_one_again(net: str) -> None:
    with world(net) as (made, running):
        spaces = [made.public(name) for name in ("one", "two", "three", "four", "five")]
        for space in spaces:
            made.docker(space)
        spec = tiny_run(running.folder, rounds=1_000_000)
        data = ("--data", str(running.folder / "text.txt"))
        anybody = ("--join", f"@{running.folder}/ready", *data)
        first = start(running, spaces[0], "one", "one", "--spec", str(spec), "--stage", "0")
        running.until(lambda: told(running, first))
        second = start(running, spaces[1], "two", "two", *anybody, "--stage", "1")
        third = start(running, spaces[2], "three", "three", *anybody, "--stage", "1")
        running.until(lambda: told(running, second) and told(running, third))
        trains_with(running, [first, second, third], 3)

        # What is told, printed and saved leads to the machine, and to no other.
        for number, peer in enumerate((first, second, third), start=1):
            [address] = told(running, peer)
            assert address.startswith(f"/ip4/{made.address_of(number)}/tcp/")
            assert f"swarmnet peer --join {address}" in peer.output()
        others = sorted(tuple(told(running, peer)) for peer in (first, second))
        running.until(lambda: saved_by(running, "three") == others)

        # The first is dead, and another comes back at another address and port.
        old = told(running, first)
        running.kill(first)
        running.kill(third)
        third = start(running, spaces[3], "four", "three", "--join", old[0], *data, "--stage", "0")
        # It waits for the first one, which had that stage and did not say goodbye.
        trains_with(running, [second, third], 2, TOGETHER_WITHIN_S + RESTORE_PATIENCE_S)

        # The first comes back elsewhere too.
        first = start(running, spaces[4], "five", "one", "--spec", str(spec), "--stage", "0")
        trains_with(running, [first, second, third], 3)
        assert not any("begin-anew" in line for line in first.errors()), first.describe()
        assert not any("another run" in line for line in first.errors()), first.describe()


def test_addresses_that_change_under_way_are_told_and_found() -> None:
    """All but one, at once; the connections do not notice. The stages of the two that moved are
    nowhere else, so nothing goes on before they have met again."""
    with world(HOME_NET) as (made, running):
        spaces = [made.public(name) for name in ("one", "two", "three")]
        spec = tiny_run(running.folder, rounds=1_000_000, num_stages=3)
        first = start(running, spaces[0], "one", "one", "--spec", str(spec), "--stage", "0")
        running.until(lambda: told(running, first))
        join = ("--join", f"@{running.folder}/ready", "--data", str(running.folder / "text.txt"))
        peers = [first] + [
            start(running, space, name, name, *join, "--stage", str(stage))
            for space, name, stage in zip(spaces[1:], ("two", "three"), (1, 2), strict=True)
        ]
        trains_with(running, peers, 3)
        new = [made.renumber(space) for space in spaces[1:]]
        trains_with(running, peers, 3)
        for peer, address in zip(peers[1:], new, strict=True):
            running.until(lambda p=peer, a=address: any(a in at for at in told(running, p)))


def test_another_run_of_the_same_name_is_said(tmp_path: Path) -> None:
    with machine() as running:
        (running.folder / "ready").mkdir()
        for number, seed in enumerate((1, 2)):
            spec = tiny_run(running.folder, rounds=5, seed=seed, num_stages=1)
            peer = running.start_peer(f"peer-{number}", "--spec", str(spec), "--stage", "0")
            running.until_ready(peer)
        said = "another run named 'swarmnet run' is alive beside this one"
        running.until(lambda: any(said in line for line in peer.errors()))
        other = running.commands[0].address
        assert any(f"swarmnet peer --join {other}" in line for line in peer.errors())
