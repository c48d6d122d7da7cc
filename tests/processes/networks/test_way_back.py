"""A way that is back is used within a minute; network namespaces."""

from __future__ import annotations

import time
from typing import Any

import pytest

from peer.machine.limits import LIMITS_FILE
from swarmnet.protocol.timing import UPKEEP_S
from tests.processes.networks.inside import address_at, said, start, world
from tests.processes.networks.test_punching import bulky_run
from tests.processes.running import SPARING, tiny_run
from tests.processes.test_portable import ELSEWHERE

pytestmark = [pytest.mark.processes, pytest.mark.long]
OWN_HOSTS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, PRIVATE, BIND = 0x20000, 0x44000, 0x1000
if (
    libc.unshare(NEWNS)
    or libc.mount(b"none", b"/", None, PRIVATE, None)
    or libc.mount({hosts!r}.encode(), b"/etc/hosts", None, BIND, None)
):
    raise OSError(ctypes.get_errno(), "cannot have names of its own")
"""
"""For a process and its children: names are looked up in this file."""


@pytest.mark.parametrize("carrier", ["p2pd", "py-libp2p"])
def test_two_leave_the_relay_when_they_reach_each_other_again(carrier: str) -> None:
    """Small calls and large ones: the channel of libp2p, and the direct one."""
    with world() as (net, running):
        spaces = [net.public(name) for name in ("one", "two", "three")]
        net.cut(2, 3)
        spec = bulky_run(running.folder)
        (running.folder / "one").mkdir()
        (running.folder / "one" / LIMITS_FILE).write_text("paused = true\n")
        link = ("--transport", carrier, "--debug", "--host", "any")
        first = start(running, spaces[0], "one", "--spec", str(spec), *link)
        running.until_ready(first)
        join = ("--join", address_at(net, 1, first), *link, *SPARING)
        data = ("--data", str(running.folder / "text.txt"))
        two = start(running, spaces[1], "two", *join, "--stage", "0", *data)
        three = start(running, spaces[2], "three", *join, "--stage", "1", "--no-feed")
        running.until_ready(two, three)
        running.until(lambda: len(two.events("round")) >= 3)
        words = "is called without a relay again"
        assert not said(two, words)
        assert not said(three, words)
        lost = [len(peer.events("peer_lost")) for peer in (two, three)]
        net.join(2, 3)
        healed_at = time.monotonic()
        running.until(lambda: said(two, words) or said(three, words), UPKEEP_S)
        assert time.monotonic() - healed_at < UPKEEP_S
        done = len(two.events("round"))
        running.until(lambda: len(two.events("round")) > done + 5)
        assert [len(peer.events("peer_lost")) for peer in (two, three)] == lost


@pytest.mark.parametrize("elsewhere", [{}, ELSEWHERE], ids=["linux", "elsewhere"])
def test_a_network_of_the_house_that_is_back_is_used_again(elsewhere: dict[str, Any]) -> None:
    """Large messages go through it, then round it, and through it again; on Linux, and on systems
    whose kernel does not say how long a round trip takes."""
    with world() as (net, running):
        spaces = [net.public(name) for name in ("one", "two")]
        hosts = net.cable(spaces)
        spec = bulky_run(running.folder)
        link = ("--debug", "--host", "any")
        own = ("--spec", str(spec), "--stage", "0", *link)
        first = start(running, spaces[0], "one", *own, **elsewhere)
        running.until_ready(first)
        join = ("--join", address_at(net, 1, first), *link, *SPARING, "--no-feed")
        second = start(running, spaces[1], "two", *join, "--stage", "1", **elsewhere)
        running.until_ready(second)
        peers = (first, second)

        def told() -> int:
            return sum(
                said(peer, f"a faster way to {other.peer_id[-8:]}: {host}")
                for peer, other, host in zip(peers, peers[::-1], hosts[::-1], strict=True)
            )

        running.until(told, UPKEEP_S + 20)
        net.silence(spaces, "lan")
        before, done = told(), len(first.events("round"))
        running.until(lambda: len(first.events("round")) > done + 5)
        net.silence(spaces, "lan", ends=True)
        running.until(lambda: told() > before, UPKEEP_S)


@pytest.mark.parametrize("carrier", ["p2pd", "py-libp2p"])
@pytest.mark.parametrize("dies", ["one", "two"])
def test_who_is_back_after_a_crash_is_met_on_the_fast_link_again(carrier: str, dies: str) -> None:
    """Killed where two have a network of their own beside the slow way by which they have met."""
    with world() as (net, running):
        spaces = [net.public(name) for name in ("one", "two")]
        hosts = net.cable(spaces)
        spec = bulky_run(running.folder)
        data = ("--data", str(running.folder / "text.txt"))
        link = ("--transport", carrier, "--debug", "--host", "any", "--port", "4001")
        first = start(running, spaces[0], "one", "--spec", str(spec), "--stage", "0", *link)
        running.until_ready(first)
        at = [f"/ip4/{net.address_of(i)}/tcp/4001" for i in (1, 2)]
        join = ("--join", f"{at[0]}/p2p/{first.peer_id}", *link, *SPARING, *data)
        second = start(running, spaces[1], "two", *join, "--stage", "1")
        running.until_ready(second)
        peers = {"one": first, "two": second}
        stays = peers["two" if dies == "one" else "one"]

        def is_fast() -> bool:
            return all(net.linked(s, h, 4002) for s, h in zip(spaces, hosts, strict=True))

        running.until(is_fast, UPKEEP_S + 20)
        running.kill(peers[dies])
        (running.folder / f"{dies}.ready").unlink()
        running.until(lambda: not is_fast())
        number = 0 if dies == "one" else 1
        there = ("--join", f"{at[1 - number]}/p2p/{stays.peer_id}", *link, *SPARING, *data)
        back = start(running, spaces[number], dies, *there, "--stage", str(number))
        running.until_ready(back)
        running.until(is_fast, UPKEEP_S)
        done = len(stays.events("round"))
        running.until(lambda: len(stays.events("round")) > done + 5)


@pytest.mark.parametrize("carrier", ["p2pd", "py-libp2p"])
def test_a_name_that_leads_elsewhere_is_looked_up_again(carrier: str) -> None:
    """A home whose provider gives it another address: it cannot dial who is behind a router, and
    who is there knows nothing but its name."""
    with world() as (net, running):
        one, home = net.public("one"), net.behind_nat("home")
        hosts = running.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{net.address_of(1)} one.example\n")
        spec = tiny_run(running.folder, rounds=100_000)
        name = "/dns4/one.example/tcp/4001"
        link = ("--transport", carrier, "--debug", "--no-port-map", *SPARING)
        own = ("--spec", str(spec), "--stage", "0", "--port", "4001", "--announce", name)
        first = start(running, one, "one", *own, *link)
        running.until_ready(first)
        join = ("--join", f"{name}/p2p/{first.peer_id}", "--stage", "1", *link)
        data = ("--data", str(running.folder / "text.txt"))
        before = OWN_HOSTS.format(hosts=str(hosts))
        second = start(running, home, "home", *join, *data, before=before)
        running.until_ready(second)
        running.until(lambda: len(second.events("round")) >= 3)
        hosts.write_text(f"127.0.0.1 localhost\n{net.renumber(one)} one.example\n")
        done = len(second.events("round"))
        running.until(lambda: len(second.events("round")) > done + 5)
