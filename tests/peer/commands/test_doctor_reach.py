"""Who gets to a machine, in words, for each kind of network."""

from __future__ import annotations

import asyncio

import pytest

from peer.commands import doctor
from peer.commands.doctor_reach import (
    Standing,
    explain,
    explain_no_way,
    explain_second,
    standing,
)
from peer.commands.finding import GOOD, SKIPPED, WARNING
from swarmnet.protocol.membership.reachability import Sight
from swarmnet.transport.libp2p.knocking import Heard

HOME = Standing({"lo": ["127.0.0.1"], "eth0": ["192.168.1.7"]}, ["192.168.1.7"])
SERVER = Standing({"eth0": ["198.51.100.7"]}, ["198.51.100.7"])
CARRIER = Standing({"wwan0": ["100.72.3.4"]}, ["100.72.3.4"])
TAILSCALE = Standing({"eth0": ["192.168.1.7"], "tailscale0": ["100.101.102.103"]}, ["192.168.1.7"])
RENAMED = Standing({"eth0": ["192.168.1.7"], "mesh": ["100.101.102.103"]}, ["192.168.1.7"])
WIREGUARD = Standing({"eth0": ["192.168.1.7"], "wg0": ["10.8.0.2"]}, ["10.8.0.2"])
SIX = Standing({"eth0": ["2600::7", "fe80::1"]}, ["2600::7"])


def sights(host: str, *ports: int, reached: bool = True) -> list[Sight]:
    """What a peer sees for each of `ports`: from which the machine's connection comes."""
    return [
        Sight(f"judge-{i}", host, port, (4001,) if reached else (), True)
        for i, port in enumerate(ports or (4001, 4001))
    ]


@pytest.mark.parametrize(
    ("place", "seen", "level", "who", "mend"),
    [
        (SERVER, sights("8.8.8.8"), GOOD, "everybody reaches this machine at 8.8.8.8", ""),
        (HOME, sights("8.8.8.8"), GOOD, "everybody reaches", ""),
        (HOME, sights("192.168.1.7"), GOOD, "peers of the same network", "a peer elsewhere"),
        (SIX, sights("2600::7"), GOOD, "every peer that has IPv6", "one peer of the run has both"),
        (HOME, sights("2600::7"), GOOD, "every peer that has IPv6", "one peer of the run has both"),
        (TAILSCALE, sights("100.101.102.103"), GOOD, "the VPN on tailscale0", "in that VPN"),
        (RENAMED, sights("100.101.102.103"), GOOD, "the VPN on mesh", "in that VPN"),
        (WIREGUARD, sights("10.8.0.2"), GOOD, "the VPN on wg0", "in that VPN"),
        (
            TAILSCALE,
            sights("100.101.102.103", reached=False),
            WARNING,
            "and none gets in",
            "let TCP in on tailscale0",
        ),
        (
            CARRIER,
            sights("8.8.8.8", reached=False),
            WARNING,
            "the provider shares 8.8.8.8",
            "no forwarding of yours helps",
        ),
        (
            TAILSCALE,
            sights("8.8.8.8", reached=False),
            WARNING,
            "a router stands before this machine, at 8.8.8.8",
            "forward two TCP ports",
        ),
        (
            HOME,
            sights("8.8.8.8", 5000, 6000, reached=False),
            WARNING,
            "another port (symmetric)",
            "--announce /ip4/8.8.8.8/tcp/PORT",
        ),
        (
            HOME,
            sights("8.8.8.8", reached=False),
            WARNING,
            "where both sides' routers let two dials meet",
            "forward two TCP ports",
        ),
        (
            SERVER,
            sights("198.51.100.7", reached=False),
            WARNING,
            "a firewall keeps what comes to 198.51.100.7 out",
            "let two TCP ports in",
        ),
        (HOME, [], SKIPPED, "no peer says", "name another peer"),
    ],
)
def test_who_gets_here_and_what_would_make_it_better(
    place: Standing, seen: list[Sight], level: str, who: str, mend: str
) -> None:
    found = explain(place, seen)
    assert (found.level, who in found.found, mend in found.mend) == (level, True, True), found
    if "symmetric" in who:
        assert "symmetric" not in explain(place, seen, can_compare=False).found
    said = f"{found.found}. {found.mend}"
    assert said.count(". ") <= 2, "three sentences"


@pytest.mark.parametrize(
    ("is_reached", "is_here", "level", "said"),
    [
        (True, False, GOOD, "large messages come straight"),
        (True, True, GOOD, "only others can tell"),
        (False, False, WARNING, "not reached at 8.8.8.8 port 4002"),
    ],
)
def test_the_second_port_has_a_finding_of_its_own(
    is_reached: bool, is_here: bool, level: str, said: str
) -> None:
    found = explain_second(4002, "8.8.8.8", is_reached, is_here=is_here)
    assert (found.level, said in found.found) == (level, True)
    assert f"{found.found}. {found.mend}".count(". ") <= 2


def test_an_address_of_a_vpn_is_no_provider_s() -> None:
    assert CARRIER.carrier_host == "100.72.3.4"
    assert TAILSCALE.carrier_host == RENAMED.carrier_host == ""
    through = Standing({"tailscale0": ["100.101.102.103"]}, ["100.101.102.103"])
    assert through.carrier_host == "", "an exit node: the way out goes through the VPN"


def test_this_machine_knows_its_interfaces() -> None:
    assert "127.0.0.1" in {h for hosts in standing().interfaces.values() for h in hosts}


@pytest.mark.parametrize(
    ("heard", "found", "mend"),
    [
        ({}, "no peer answered", "check the address"),
        (
            {4001: Heard.SILENT, 443: Heard.CLOSED, 80: Heard.SILENT},
            "at port 443 and not at 4001",
            "--port 443",
        ),
        ({4001: Heard.SILENT, 80: Heard.OPEN}, "at port 80 and not at 4001", "--port 80"),
        (
            {4001: Heard.CLOSED, 443: Heard.OPEN, 80: Heard.OPEN},
            "nothing listens at port 4001",
            "still runs",
        ),
        (
            {4001: Heard.OPEN, 443: Heard.OPEN, 80: Heard.OPEN},
            "Something listens",
            "may be another peer's",
        ),
        ({4001: Heard.SILENT}, "says nothing", "that machine is on"),
    ],
)
def test_no_way_out_tells_which_end_is_closed(
    heard: dict[int, Heard], found: str, mend: str
) -> None:
    told = explain_no_way("no peer answered", "5.5.5.5", 4001, heard)
    assert found in told.found
    assert mend in told.mend
    assert (told.check, told.level) == ("the way out", "bad")
    assert f"{told.found}. {told.mend}".count(". ") <= 2


def test_a_peer_that_listens_at_a_port_of_the_web_is_told_apart() -> None:
    told = explain_no_way("no peer answered", "5.5.5.5", 443, {443: Heard.SILENT, 80: Heard.OPEN})
    assert "at port 80 and not at 443" in told.found


def test_ports_are_knocked_at() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        at = server.sockets[0].getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{at}/p2p/x"
        assert "Something listens" in (await doctor.look_out("no answer", [address])).found
        server.close()
        await server.wait_closed()
        told = await doctor.look_out("no answer", ["/unix/x", address])
        assert f"nothing listens at port {at}" in told.found
        assert "check the address" in (await doctor.look_out("no answer", [])).mend

    asyncio.run(main())
