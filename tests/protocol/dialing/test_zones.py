"""Where an address lies, and whether it is dialled at the word of another peer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.dialing.zones import (
    FIRST_PORT,
    LOOPBACK,
    NOWHERE,
    PUBLIC,
    Here,
    Host,
    host_from,
    may_dial_address,
    target_of,
    zone_of,
)

CIRCUIT_END = "/p2p/RELAY/p2p-circuit/p2p/X"


def at(host: str, port: int | str = 4001) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


def host(text: str) -> Host:
    found = host_from(text)
    assert found is not None
    return found


AWAY = Here.at([at("200.5.5.11")])
HOME = Here.at([at("192.168.1.5")])
LOCAL = Here.at([at("127.0.0.1")])


@pytest.mark.parametrize(
    ("text", "zone"),
    [
        ("200.5.5.11", PUBLIC),
        ("2a01:4f8::1", PUBLIC),
        ("127.8.8.8", LOOPBACK),
        ("::1", LOOPBACK),
        ("::ffff:127.0.0.1", LOOPBACK),
        ("::ffff:10.0.0.1", "10.0.0.0/8"),
        ("64:ff9b::200.5.5.11", PUBLIC),
        ("64:ff9b::10.0.0.1", NOWHERE),
        ("2002:7f00:1::1", NOWHERE),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", NOWHERE),
        ("172.31.0.1", "172.16.0.0/12"),
        ("100.64.0.1", "100.64.0.0/10"),
        ("203.0.113.9", "203.0.113.0/24"),
        ("fd12:3456:789a:1::1", "fd12:3456:789a::/48"),
        ("169.254.169.254", NOWHERE),
        ("fe80::1", NOWHERE),
        ("224.0.0.1", NOWHERE),
        ("255.255.255.255", NOWHERE),
        ("240.0.0.1", NOWHERE),
        ("0.0.0.0", NOWHERE),
        ("::", NOWHERE),
        ("ff02::1", NOWHERE),
    ],
)
def test_each_address_lies_in_one_zone(text: str, zone: str) -> None:
    assert zone_of(host(text)) == zone


@pytest.mark.parametrize(
    "address",
    [
        "/dns4/peer.example/tcp/4001",
        "/ip4/peer.example/tcp/4001",
        "/ip4/200.5.5.11/tcp/65536",
        "/ip4/200.5.5.11/tcp/-1",
        "/ip4/200.5.5.11/tcp/٤٠٠١",
        "/ip4/200.5.5.11",
        "/ip6/200.5.5.11/tcp/4001",
        "/ip6/fe80::1%eth0/tcp/4001",
        "/ip4/0x7f000001/tcp/4001",
        "/unix/run/docker.sock/tcp/4001",
        "garbage",
        "",
    ],
)
def test_only_an_ip_address_with_a_port_leads_anywhere(address: str) -> None:
    assert target_of(address) is None
    assert not may_dial_address(address, None, AWAY)


def test_a_circuit_leads_to_its_relay() -> None:
    assert may_dial_address(at("200.5.5.12") + CIRCUIT_END, None, HOME)
    assert not may_dial_address(at("127.0.0.1") + CIRCUIT_END, None, HOME)


def test_ports_of_services_are_not_dialled() -> None:
    assert not may_dial_address(at("200.5.5.11", FIRST_PORT - 1), None, AWAY)
    assert may_dial_address(at("200.5.5.11", FIRST_PORT), None, AWAY)


@pytest.mark.parametrize("inside", ["127.0.0.1", "::1", "10.0.0.1", "192.168.1.1", "203.0.113.9"])
def test_who_is_elsewhere_has_nothing_dialled_on_this_machine_or_in_its_network(
    inside: str,
) -> None:
    assert not may_dial_address(at(inside), None, AWAY)
    for here in (AWAY, HOME, LOCAL):
        assert not may_dial_address(at(inside), host("200.5.5.12"), here)


def test_a_network_in_which_this_machine_is_itself_is_dialled() -> None:
    assert may_dial_address(at("192.168.7.7"), None, HOME)
    assert not may_dial_address(at("10.0.0.7"), None, HOME)
    assert may_dial_address(at("10.0.0.7"), None, Here.at([at("200.5.5.11")], ["10.9.0.1"]))
    assert may_dial_address(at("10.0.0.7"), host("10.1.2.3"), HOME), "where it is seen"
    docker = Here.at([at("172.18.0.2")])
    assert may_dial_address(at("172.18.0.3"), None, docker)
    own = Here.at([at("fd12:3456:789a::1")])
    assert may_dial_address(at("fd12:3456:789a:9::2"), None, own)
    assert not may_dial_address(at("fd00:3456:789a:9::2"), None, own)


def test_a_neighbour_with_a_public_address_of_ipv6_is_dialled_in_the_home_network() -> None:
    home = Here.at([at("192.168.7.5"), at("2a01:4f8:1:2::5")])
    beside, elsewhere = host("2a01:4f8:1:2::9"), host("2a01:4f8:1:3::9")
    assert may_dial_address(at("192.168.7.9"), beside, home)
    assert not may_dial_address(at("192.168.7.9"), elsewhere, home)
    assert not may_dial_address(at("127.0.0.1"), beside, home)
    assert not may_dial_address(at("10.0.0.9"), beside, home), "where neither is"


def test_loopback_is_dialled_for_peers_of_this_machine() -> None:
    here = at("127.0.0.1")
    assert may_dial_address(here, None, LOCAL), "a swarm of one machine"
    assert not may_dial_address(here, None, HOME)
    assert may_dial_address(here, host("127.0.0.1"), HOME)
    assert may_dial_address(here, host("192.168.1.5"), HOME), "from its own address"
    assert not may_dial_address(here, host("192.168.1.6"), HOME)
    assert may_dial_address(here, None, Here.at([at("192.168.1.5")], zones=[LOOPBACK])), "asked for"


def test_who_announces_another_address_does_not_live_on_loopback() -> None:
    for announced in (at("200.5.5.11"), "/dns4/peer.example/tcp/4001"):
        assert LOOPBACK not in Here.at([announced, at("127.0.0.1")]).zones


HOSTS = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(HOSTS, HOSTS, st.lists(HOSTS, max_size=3))
def test_what_is_not_public_is_dialled_only_where_this_machine_or_the_namer_is(
    named: str, seen: str, own: list[str]
) -> None:
    here = Here.at(map(at, own))
    zone = zone_of(host(named))
    if may_dial_address(at(named), host(seen), here) and zone not in (PUBLIC, LOOPBACK):
        assert zone in {*here.zones, zone_of(host(seen))}
