"""Two peers behind routers of their own that drop what nobody inside has asked for."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from peer.machine.limits import LIMITS_FILE
from tests.processes.networks.inside import address_at, said, start, world
from tests.processes.networks.internet import Internet
from tests.processes.running import SPARING, Command, Machine, tiny_run

pytestmark = pytest.mark.processes
MET = "both routers let the two through"
DIRECT_WITHIN_S = 10.0
"""After the first round, which went through a relay."""


def bulky_run(folder: Path) -> Path:
    """Its activations are worth a direct connection."""
    path = tiny_run(folder, rounds=100_000)
    text = path.read_text()
    for old, new in (
        ("hidden_size = 32", "hidden_size = 128"),
        ("max_position_embeddings = 16", "max_position_embeddings = 64"),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def two_behind(
    net: Internet, running: Machine, *more: str, is_symmetric: bool = False
) -> tuple[Command, Command]:
    """Two that train through relays; two on public machines relay, and serve no stage."""
    one, two = net.public("one"), net.public("two")
    left, right = net.behind_nat("left"), net.behind_nat("right", is_symmetric=is_symmetric)
    spec = bulky_run(running.folder)
    for name in ("one", "two"):
        (running.folder / name).mkdir()
        (running.folder / name / LIMITS_FILE).write_text("paused = true\n")
    first = start(running, one, "one", "--spec", str(spec), "--debug", *more)
    running.until_ready(first)
    address = address_at(net, 1, first)
    join = ("--join", address, "--debug", *more)
    second = start(running, two, "two", *join)
    data = ("--data", str(running.folder / "text.txt"))
    a = start(running, left, "left", *join, "--stage", "0", *data, *SPARING)
    b = start(running, right, "right", *join, "--stage", "1", "--no-feed", *SPARING)
    running.until_ready(second, a, b)
    running.until(lambda: bool(a.events("round")))
    return a, b


def at_s(peer: Command, words: str) -> float:
    """Unix seconds of the first line of its log with these words."""
    line = next(line for line in peer.errors() if words in line)
    stamp = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")
    return stamp.timestamp()


@pytest.mark.parametrize("carrier", ["p2pd", pytest.param("py-libp2p", marks=pytest.mark.long)])
def test_two_behind_routers_get_a_direct_path_and_train_through_a_relay_until_then(
    carrier: str,
) -> None:
    with world() as (net, running):
        a, b = two_behind(net, running, "--transport", carrier)
        began_s = a.events("round")[0]["time_unix_s"]
        running.until(lambda: said(a, MET) and said(b, MET))
        assert max(at_s(peer, MET) for peer in (a, b)) - began_s < DIRECT_WITHIN_S
        done = len(a.events("round"))
        running.until(lambda: len(a.events("round")) > done + 5)


@pytest.mark.long
def test_two_behind_firewalls_of_ipv6_meet_too() -> None:
    """There is no NAT with IPv6, and a home's router drops what nobody has asked for all the
    same."""
    with world() as (net, running):
        one = net.public("one", (6,))
        left, right = net.behind_firewall("left"), net.behind_firewall("right")
        spec = bulky_run(running.folder)
        (running.folder / "one").mkdir()
        (running.folder / "one" / LIMITS_FILE).write_text("paused = true\n")
        link = ("--debug", "--host", "any")
        first = start(running, one, "one", "--spec", str(spec), "--port", "4001", *link)
        running.until_ready(first)
        address = f"/ip6/{net.address_of(1, 6)}/tcp/4001/p2p/{first.peer_id}"
        join = ("--join", address, *SPARING, *link)
        data = ("--port", "4001", "--data", str(running.folder / "text.txt"))
        a = start(running, left, "left", *join, "--stage", "0", *data)
        more = ("--port", "4001", "--no-feed")
        b = start(running, right, "right", *join, "--stage", "1", *more)
        running.until_ready(a, b)
        running.until(lambda: said(a, MET) and said(b, MET))
        assert not net.connects(left, net.host_behind("right"), 4001)
        assert not net.connects(one, net.host_behind("left"), 4001)


@pytest.mark.long
def test_behind_a_symmetric_router_training_stays_on_the_relay() -> None:
    with world() as (net, running):
        a, b = two_behind(net, running, is_symmetric=True)
        words = "no way through the routers"
        running.until(lambda: said(a, words) or said(b, words))
        assert said(b, "each peer sees another port") or said(a, "no way through")
        done = len(a.events("round"))
        running.until(lambda: len(a.events("round")) > done + 5)
        assert not said(a, MET)
        assert not said(b, MET)
