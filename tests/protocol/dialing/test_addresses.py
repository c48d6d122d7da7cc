"""Which address is told, and which is dialled, in what order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.protocol.dialing.addresses import (
    MAX_NAMED,
    STAGGER_S,
    OwnHosts,
    best_to_join,
    by_peer,
    in_turns,
    is_bridge,
    of_all,
    others_to_name,
    stagger_s,
    to_dial,
    to_tell,
)
from swarmnet.protocol.timing import ANSWER_S


def at(host: str, port: int = 4001) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


LOOPBACK, BRIDGE, LAN, VPN, PUBLIC = map(
    at, ("127.0.0.1", "172.17.0.1", "192.168.1.7", "10.8.0.2", "200.5.5.11")
)
OWN = OwnHosts(default=("192.168.1.7",), bridges=("172.17.0.1", "172.18.0.1"))


def test_what_is_told_is_ordered_by_use() -> None:
    """libp2p's order is that of the bytes: 10, 127, 172, 192, 200."""
    assert to_tell([VPN, LOOPBACK, BRIDGE, LAN, PUBLIC], OWN) == [PUBLIC, LAN, VPN]


def test_bridges_and_loopback_are_told_only_where_there_is_nothing_else() -> None:
    assert to_tell([LOOPBACK, BRIDGE], OWN) == [BRIDGE]
    assert to_tell([LOOPBACK], OWN) == [LOOPBACK]
    assert to_tell([at("fe80::1"), at("::1")], OWN) == [at("::1")]
    assert to_tell(["/dns4/peer.example/tcp/1", LOOPBACK], OWN) == ["/dns4/peer.example/tcp/1"]


def test_a_bridge_that_leads_to_the_world_is_an_interface_like_any_other() -> None:
    """A container, or a host whose card is in a bridge."""
    own = OwnHosts(default=("172.17.0.1",), bridges=("172.17.0.1",))
    assert to_tell([LOOPBACK, VPN, BRIDGE], own) == [BRIDGE, VPN]


def test_bridges_are_known_by_their_names() -> None:
    yes = ("docker0", "br-0123456789ab", "virbr0", "veth12ab", "docker_gwbridge", "podman1", "cni0")
    assert all(map(is_bridge, yes))
    assert not any(map(is_bridge, ("eth0", "br0", "br-lan", "wlan0", "wg0", "tailscale0")))


def test_loopback_is_dialled_on_the_own_machine_only() -> None:
    assert to_dial([LOOPBACK, LAN], own=[at("192.168.1.8")]) == [LAN]
    assert to_dial([LOOPBACK, LAN], own=[at("192.168.1.7", 9)]) == [LAN, LOOPBACK]
    assert to_dial([LOOPBACK], own=[LAN]) == [LOOPBACK], "it has no other"
    assert to_dial([LOOPBACK, LAN], own=[LOOPBACK]) == [LAN], "everybody has 127.0.0.1"


def test_who_is_to_use_an_address_hears_of_others_where_it_may_be_the_wrong_one() -> None:
    assert others_to_name([LAN, VPN, at("10.8.0.2", 5), LOOPBACK]) == [VPN]
    assert others_to_name([PUBLIC, LAN]) == []
    assert others_to_name([PUBLIC, at("2a01::1"), at("2a01::2"), LAN]) == [at("2a01::1")]
    assert others_to_name([at("2a01::1"), at("2a01::2"), LAN, VPN]) == [LAN], "who has IPv4 only"
    assert others_to_name([PUBLIC, LAN, at("fd00::1")]) == []
    assert others_to_name([LOOPBACK]) == others_to_name([]) == []


def test_at_most_three_addresses_are_named() -> None:
    many = [at(f"10.{i}.0.2") for i in range(8)]
    assert len(others_to_name(many)) == MAX_NAMED - 1
    circuit = f"{PUBLIC}/p2p/relay/p2p-circuit"
    peers = {
        "a": [LAN, LOOPBACK],
        "b": [LAN, circuit],
        "c": [LOOPBACK, PUBLIC, circuit],
        "d": [VPN, "/dns4/home.example.org/tcp/4001"],
        "e": [],
    }
    assert best_to_join(peers) == [
        f"{PUBLIC}/p2p/c",
        "/dns4/home.example.org/tcp/4001/p2p/d",
        f"{circuit}/p2p/b",
    ]
    assert best_to_join({"a": [LAN, LOOPBACK]}) == [f"{LAN}/p2p/a"]


def test_peers_take_turns() -> None:
    peers = {"a": [LAN, PUBLIC], "b": [f"{VPN}/p2p/b", LOOPBACK], "c": []}
    own = [at("192.168.1.8"), at("10.8.0.3")]
    assert of_all(peers, own, is_told=True) == [f"{LAN}/p2p/a", f"{VPN}/p2p/b", f"{PUBLIC}/p2p/a"]
    assert of_all(peers, [PUBLIC], is_told=True) == [f"{PUBLIC}/p2p/a"], (
        "where this machine is itself"
    )
    assert by_peer(of_all(peers, own, is_told=True)) == {
        "a": [f"{LAN}/p2p/a", f"{PUBLIC}/p2p/a"],
        "b": [f"{VPN}/p2p/b"],
    }


def test_starts_lie_as_far_apart_as_rfc_8305_says_unless_they_are_many() -> None:
    assert stagger_s(1) == stagger_s(20) == STAGGER_S
    assert 100 * stagger_s(100) <= ANSWER_S


HOSTS = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(st.lists(HOSTS.map(at)), st.lists(HOSTS, max_size=3), st.lists(HOSTS, max_size=3))
def test_the_order_loses_and_doubles_nothing(
    listening: list[str], default: list[str], bridges: list[str]
) -> None:
    told = to_tell(listening, OwnHosts(tuple(default), tuple(bridges)))
    assert set(told) <= set(listening)
    assert len(told) == len(set(told))
    assert to_tell(told, OwnHosts(tuple(default), tuple(bridges))) == told
    assert set(to_dial(told, listening)) <= set(told)
    assert bool(to_dial(told, listening)) == bool(told)


@given(st.lists(st.lists(st.text("abc", max_size=2), max_size=4), max_size=4))
def test_in_turns_has_everything_once(lists: list[list[str]]) -> None:
    turns = in_turns(lists)
    assert sorted(turns) == sorted({a for some in lists for a in some})


@pytest.mark.parametrize("garbage", ["garbage", "", "/", "/ip4/999.1.1.1/tcp/1", "/unix/x"])
def test_what_is_malformed_keeps_nobody_from_loopback(garbage: str) -> None:
    """A record of a peer that has nothing else may have it too."""
    here = "/ip4/127.0.0.1/tcp/4001"
    assert here in to_dial([garbage, here], ["/ip4/192.168.7.1/tcp/4001"])
