"""A way that is back is used within a minute; network namespaces."""

from __future__ import annotations

import time

import pytest

from peer.machine.limits import LIMITS_FILE
from swarmnet.protocol.timing import UPKEEP_S
from tests.processes.networks.inside import address_at, said, start, world
from tests.processes.networks.test_punching import bulky_run
from tests.processes.running import SPARING

pytestmark = [pytest.mark.processes, pytest.mark.long]


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


def test_a_network_of_the_house_that_is_back_is_used_again() -> None:
    """Large messages go through it, then round it, and through it again."""
    with world() as (net, running):
        spaces = [net.public(name) for name in ("one", "two")]
        hosts = net.cable(spaces)
        spec = bulky_run(running.folder)
        link = ("--debug", "--host", "any")
        first = start(running, spaces[0], "one", "--spec", str(spec), "--stage", "0", *link)
        running.until_ready(first)
        join = ("--join", address_at(net, 1, first), *link, *SPARING, "--no-feed")
        second = start(running, spaces[1], "two", *join, "--stage", "1")
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
