"""Peers that cannot reach each other: behind NAT, or on two sides of a cut; network namespaces."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from peer.machine.limits import LIMITS_FILE
from tests.processes.networks.inside import address_at, doctor, round_of, said, start, world
from tests.processes.networks.internet import Internet
from tests.processes.networks.test_punching import MET
from tests.processes.running import SPARING, Command, Machine, tiny_run

pytestmark = pytest.mark.processes


def test_peers_behind_nat_train_through_a_relay_and_survive_its_death() -> None:
    with world() as (net, running):
        check(net, running)


def test_two_replicas_that_cannot_reach_each_other_do_so_through_a_third() -> None:
    """All others reach both. Without relays their stage would wait for one of them, or go on
    without it, in every round."""
    with world() as (net, running):
        spaces = [net.public(name) for name in ("one", "two", "three", "four")]
        net.cut(2, 3)
        assert not net.reaches(spaces[1], net.address_of(3))
        assert net.reaches(spaces[1], net.address_of(1))
        spec = tiny_run(running.folder, rounds=50_000)
        first = start(running, spaces[0], "one", "--spec", str(spec), "--stage", "0")
        running.until_ready(first)
        address = address_at(net, 1, first)
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("relay", "behind"),
    [("p2pd", ("py-libp2p", "p2pd")), ("py-libp2p", ("p2pd", "py-libp2p"))],
    ids=["p2pd relays", "py-libp2p relays"],
)
def test_a_peer_relays_between_peers_of_both_carriers(relay: str, behind: tuple[str, str]) -> None:
    """One behind each router, which never meet: their routers show each peer another port."""
    with world() as (net, running):
        one = net.public("one")
        spaces = [net.behind_nat(name, is_symmetric=True) for name in ("left", "right")]
        assert not net.reaches(spaces[0], "10.2.0.2")
        spec = tiny_run(running.folder, rounds=100_000)
        (running.folder / "one").mkdir()
        (running.folder / "one" / LIMITS_FILE).write_text("paused = true\n")
        first = start(running, one, "one", "--spec", str(spec), "--transport", relay)
        running.until_ready(first)
        data = ("--data", str(running.folder / "text.txt"))
        join = ("--join", address_at(net, 1, first), *data, "--debug", *SPARING)
        peers = [
            start(running, space, carrier, *join, "--stage", str(i), "--transport", carrier)
            for i, (space, carrier) in enumerate(zip(spaces, behind, strict=True))
        ]
        running.until_ready(*peers)
        for peer in peers:
            running.until(lambda p=peer: said(p, "others reach this peer through it"))
            running.until(lambda p=peer: round_of(p) >= 5)
            assert not said(peer, MET), peer.describe()


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
    address = address_at(net, 1, first)
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
    for peer in (a, b):  # the routers drop the dials by which others find out
        running.until(lambda p=peer: said(p, "nobody can dial this peer"))
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
    assert "not reached at" in found["second port"]["found"]
    found = doctor(running, two, address)
    assert "none: peers see this machine at its own address" in found["NAT"]["found"]
    assert "not needed" in found["relay"]["found"]
    assert found["second port"]["level"] == "good"
    lost = len(a.events("peer_lost"))
    before = len(b.events("round"))
    running.kill(first)
    running.until(lambda: len(b.events("round")) >= before + 5)
    for peer in (a, b, second):
        assert peer.process.poll() is None, peer.describe()
    gone = [e["peer_id"] for e in a.events("peer_lost")[lost:]]
    assert gone in ([], [first.peer_id]), "the other relay takes over before anybody is missed"


STAGES = (0, 1, 0, 1, 0, 1)
ONE, OTHER = (0, 1, 2), (3, 4, 5)
FOUND_OUT_S = 30.0
SPAN_S = 45.0
KEPT = 0.8
TOGETHER = 20
"""Rounds by which peers that train as one may be apart, by what their logs say at one moment."""


def six_and_an_onlooker(net: Internet, running: Machine, *options: str) -> list[Command]:
    """The six; the onlooker's owner wants its machine for other things, so it serves no stage."""
    onlooker = net.public("onlooker")
    spaces = [net.public(f"m{i}") for i in range(len(STAGES))]
    (running.folder / "onlooker").mkdir()
    (running.folder / "onlooker" / LIMITS_FILE).write_text("paused = true\n")
    spec = tiny_run(running.folder, rounds=1_000_000)
    first = start(running, onlooker, "onlooker", "--spec", str(spec), *options)
    running.until_ready(first)
    address = address_at(net, 1, first)
    join = ("--join", address, "--data", str(running.folder / "text.txt"), "--debug", *options)
    peers = [
        start(running, space, f"m{i}", *join, "--stage", str(STAGES[i]))
        for i, space in enumerate(spaces)
    ]
    running.until_ready(*peers)
    running.until(lambda: min(map(round_of, peers)) >= 5)
    return peers


def cut_halves(net: Internet) -> None:
    for a in ONE:
        for b in OTHER:
            net.cut(a + 2, b + 2)  # the onlooker is number 1


def rates(peers: Sequence[Command]) -> list[float]:
    """Rounds a second of each half, over `SPAN_S`."""
    before = [round_of(p) for p in peers]
    time.sleep(SPAN_S)
    made = [round_of(p) - b for p, b in zip(peers, before, strict=True)]
    return [min(made[i] for i in half) / SPAN_S for half in (ONE, OTHER)]


@pytest.mark.long
def test_each_half_trains_as_if_the_onlooker_were_not_there() -> None:
    with world() as (net, running):
        peers = six_and_an_onlooker(net, running, "--no-relay")
        cut_halves(net)
        time.sleep(FOUND_OUT_S)
        connected = rates(peers)
        for b in OTHER:
            net.cut(1, b + 2)
        time.sleep(FOUND_OUT_S)
        alone = rates(peers)
        assert min(alone) > 0, "each half has every stage"
        for half in range(2):
            assert connected[half] >= KEPT * alone[half], (connected, alone)


@pytest.mark.long
def test_all_train_as_one_where_the_onlooker_relays() -> None:
    with world() as (net, running):
        peers = six_and_an_onlooker(net, running)
        cut_halves(net)
        words = "others reach this peer through it"
        running.until(lambda: any(said(p, words) for p in peers))
        time.sleep(FOUND_OUT_S)
        newest = max(map(round_of, peers))
        running.until(lambda: min(map(round_of, peers)) > newest + 5)
        made = list(map(round_of, peers))
        assert max(made) - min(made) <= TOGETHER, made
