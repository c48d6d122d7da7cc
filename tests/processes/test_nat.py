"""Peers behind NAT train with each other through a public one; network namespaces."""

from __future__ import annotations

import json
import os
import sys

import pytest

from peer.machine.limits import LIMITS_FILE
from tests.processes.internet import Internet, NoNamespaces, internet
from tests.processes.running import SPARING, Command, Machine, machine, tiny_run

pytestmark = pytest.mark.processes


ENTER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
with open("/run/netns/{space}") as found:
    if libc.setns(found.fileno(), 0):
        raise OSError(ctypes.get_errno(), "cannot enter {space}")
"""
"""As `ip netns exec`, for a process that is there already."""


def start(running: Machine, space: str, name: str, *arguments: str) -> Command:
    """A peer on a machine of the small internet."""
    return running.start_peer(
        name,
        "--host",
        "0.0.0.0",
        *arguments,
        before=ENTER.format(space=space),
    )


def test_peers_behind_nat_train_through_a_relay_and_survive_its_death() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.fail("network namespaces need Linux and root: run this test in a container as root")
    try:
        with internet() as net, machine() as running:
            check(net, running)
    except NoNamespaces as e:
        pytest.fail(f"this machine offers no network namespaces: {e}")


def test_two_replicas_that_cannot_reach_each_other_do_so_through_a_third() -> None:
    """All others reach both. Without relays their stage would wait for one of them, or go on
    without it, in every round."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.fail("network namespaces need Linux and root: run this test in a container as root")
    try:
        with internet() as net, machine() as running:
            spaces = [net.public(name) for name in ("one", "two", "three", "four")]
            net.cut(2, 3)
            assert not net.reaches(spaces[1], net.address_of(3))
            assert net.reaches(spaces[1], net.address_of(1))
            spec = tiny_run(running.folder, rounds=50_000)
            first = start(running, spaces[0], "one", "--spec", str(spec), "--stage", "0")
            running.until_ready(first)
            address = f"/ip4/{net.address_of(1)}/tcp/{first.address.split('/tcp/')[1]}"
            join = ("--join", address, "--data", str(running.folder / "text.txt"), "--debug")
            two = start(running, spaces[1], "two", *join, "--stage", "1")
            three = start(running, spaces[2], "three", *join, "--stage", "1")
            four = start(running, spaces[3], "four", *join, "--stage", "0")
            running.until_ready(two, three, four)
            # One of them suffices: a channel that is open serves both.
            words = "others reach this peer through it"
            running.until(lambda: said(two, words) or said(three, words))
            # Both are in the same rounds from now on.
            newest = max(round_of(peer) for peer in (two, three))
            for peer in (two, three):
                running.until(lambda p=peer: round_of(p) > newest + 50)
            assert abs(round_of(two) - round_of(three)) < 10
    except NoNamespaces as e:
        pytest.fail(f"this machine offers no network namespaces: {e}")


def round_of(peer: Command) -> int:
    """The newest that it has done itself, by its log."""
    done = [line.split("round ")[1].split(":")[0] for line in peer.errors() if "open for" in line]
    return int(done[-1]) if done else -1


def check(net: Internet, running: Machine) -> None:
    one, two = net.public("one"), net.public("two")
    left, right = net.behind_nat("left"), net.behind_nat("right")
    assert net.reaches(left, net.address_of(1))
    assert not net.reaches(one, "10.1.0.2")
    assert not net.reaches(left, "10.2.0.2")

    spec = tiny_run(running.folder, rounds=5000)
    # The public machines' owners want them for themselves: they stay in the swarm and relay, but
    # serve no stage. So whatever is trained passes from left to right and back.
    for name in ("one", "two"):
        (running.folder / name).mkdir()
        (running.folder / name / LIMITS_FILE).write_text("paused = true\n")
    first = start(running, one, "one", "--spec", str(spec))
    running.until_ready(first)
    address = f"/ip4/{net.address_of(1)}/tcp/{first.address.split('/tcp/')[1]}"
    join = ("--join", address)
    second = start(running, two, "two", *join)
    data = ("--data", str(running.folder / "text.txt"))
    a = start(running, left, "left", *join, "--stage", "0", *data, *SPARING)
    running.until_ready(a)
    running.until(lambda: said(a, "others reach this peer through it"))
    # The other is given nothing but the address of the first one, through the relay.
    through = ("--join", f"{address}/p2p-circuit/p2p/{a.peer_id}")
    b = start(running, right, "right", *through, "--stage", "1", "--no-feed", *SPARING)
    running.until_ready(second, b)
    running.until(lambda: len(a.events("round")) >= 5)
    for peer in (a, b):
        assert said(peer, "nobody can dial this peer") == 1, peer.describe()
    running.until(lambda: said(b, "others reach this peer through it") >= 2)
    assert not said(first, "nobody can dial this peer")
    found = doctor(running, left, address)
    assert found["NAT"]["level"] == "warning"
    assert "endpoint-independent" in found["NAT"]["found"]
    assert net.address_of(3) in found["NAT"]["found"]
    assert "--announce" in found["NAT"]["mend"]
    assert "give this machine a place" in found["relay"]["found"]
    assert found["the way in"]["level"] == "warning"
    found = doctor(running, two, address)
    assert "none: peers see this machine at its own address" in found["NAT"]["found"]
    assert "not needed" in found["relay"]["found"]
    lost = len(a.events("peer_lost"))
    before = len(b.events("round"))
    running.kill(first)
    running.until(lambda: len(b.events("round")) >= before + 5)
    for peer in (a, b, second):
        assert peer.process.poll() is None, peer.describe()
    gone = [e["peer_id"] for e in a.events("peer_lost")[lost:]]
    assert gone in ([], [first.peer_id]), "the other relay takes over before anybody is missed"


def doctor(running: Machine, space: str, address: str) -> dict[str, dict[str, str]]:
    """What `swarmnet doctor` says on a machine, by check."""
    inside = ENTER.format(space=space)
    command = running.start("doctor", "doctor", "--join", address, "--json", before=inside)
    assert running.wait(command, 120.0) == 0, command.describe()
    return {finding["check"]: finding for finding in json.loads(command.output())}


def said(peer: Command, words: str) -> int:
    """Lines of its log with these words."""
    return sum(words in line for line in peer.errors())
