"""Machines with IPv4, with IPv6, and with both, in one run; network namespaces."""

from __future__ import annotations

import pytest

from peer.machine.limits import LIMITS_FILE
from tests.processes.networks.inside import doctor, start, world
from tests.processes.networks.internet import Internet
from tests.processes.running import SPARING, Command, Machine, tiny_run

pytestmark = pytest.mark.processes
EVERYWHERE = ("--host", "any", "--debug")


def three(net: Internet, running: Machine) -> tuple[Command, Command, Command, str]:
    """One with both, which serves no stage, one with IPv6 only, and one with IPv4 only, whose
    kernel has no IPv6. The last is the first one's address of IPv6."""
    spaces = [net.public("both", (4, 6)), net.public("six", (6,)), net.public("four")]
    spec = tiny_run(running.folder, rounds=100_000)
    (running.folder / "both").mkdir()
    (running.folder / "both" / LIMITS_FILE).write_text("paused = true\n")
    both = start(running, spaces[0], "both", "--spec", str(spec), "--port", "4001", *EVERYWHERE)
    running.until_ready(both)
    at_4, at_6 = (f"/ip{v}/{net.address_of(1, v)}/tcp/4001/p2p/{both.peer_id}" for v in (4, 6))
    join = (*EVERYWHERE, *SPARING, "--data", str(running.folder / "text.txt"))
    six = start(running, spaces[1], "six", "--join", at_6, "--stage", "0", *join)
    four = start(running, spaces[2], "four", "--join", at_4, "--stage", "1", *join)
    running.until_ready(six, four)
    return both, six, four, at_6


def test_who_has_ipv4_only_trains_with_who_has_ipv6_only_through_who_has_both() -> None:
    with world() as (net, running):
        both, six, four, at_6 = three(net, running)
        running.until(lambda: len(six.events("round")) >= 5 and len(four.events("round")) >= 5)
        # Who has both names an address of each kind to whoever wants to join, and one port.
        for version in (4, 6):
            assert f"/ip{version}/{net.address_of(1, version)}/tcp/4001/p2p/" in both.output()
        assert "listens on TCP ports 4001 and 4002" in both.output()
        # Nobody complains of what a machine does not have.
        for peer in (six, four):
            said = "\n".join(peer.errors()).lower()
            assert "ipv6" not in said, peer.describe()
            assert "family" not in said, peer.describe()
        found = doctor(running, net.spaces[-2], at_6)
        assert "every peer that has IPv6 reaches this machine" in found["who gets here"]["found"]
        assert "large messages come straight" in found["second port"]["found"]
