"""Who can be dialled, and through what NAT a peer goes out, by what others see."""

from __future__ import annotations

import pytest

from swarmnet.protocol.membership.reachability import (
    ENDPOINT_INDEPENDENT,
    NONE,
    SYMMETRIC,
    UNKNOWN,
    Sight,
    forwarded_addresses,
    host_and_port,
    is_reachable,
    kind_of_nat,
)

OWN = ["10.0.0.2"]


def sight(peer: str = "p", host: str = "5.5.5.5", port: int = 4001, reached: int = 0) -> Sight:
    return Sight(peer, host, port, (reached,) if reached else ())


@pytest.mark.parametrize(
    ("sights", "verdict"),
    [
        ([], None),
        ([sight()], False),
        ([sight(reached=4001)], True),
        ([sight(), sight("q", reached=4001)], False),
        ([sight(), sight("q", reached=4001), sight("r", reached=4001)], True),
        ([sight("neighbour", "10.0.0.2", reached=4001)], True),
        ([sight(), sight("neighbour", "10.0.0.2", reached=4001)], False),
        ([sight("here", "127.0.0.1", reached=4001)], True),
    ],
)
def test_a_neighbour_reaches_what_nobody_else_does(
    sights: list[Sight], verdict: bool | None
) -> None:
    assert is_reachable(sights) is verdict


@pytest.mark.parametrize(
    ("own", "sights", "kind"),
    [
        (OWN, [], UNKNOWN),
        (OWN, [sight()], UNKNOWN),
        (OWN, [sight(), sight()], UNKNOWN),
        (OWN, [sight("p"), sight("q")], ENDPOINT_INDEPENDENT),
        (OWN, [sight("p"), sight("q", port=4002)], SYMMETRIC),
        (OWN, [sight("p"), sight("q", host="5.5.5.6")], SYMMETRIC),
        (["5.5.5.5"], [sight()], NONE),
        (OWN, [sight(host="10.0.0.2")], NONE),
        (OWN, [sight("n", host="10.0.0.2"), sight("p"), sight("q")], ENDPOINT_INDEPENDENT),
    ],
)
def test_kinds_of_nat(own: list[str], sights: list[Sight], kind: str) -> None:
    assert kind_of_nat(own, sights) == kind


def test_a_forwarded_port_is_an_address_to_announce() -> None:
    own = ["/ip4/10.0.0.2/tcp/4001/p2p/X", "/ip4/127.0.0.1/tcp/4001/p2p/X"]
    assert forwarded_addresses(own, [sight(reached=4001)]) == ["/ip4/5.5.5.5/tcp/4001"]
    assert forwarded_addresses(own, [sight(host="10.0.0.2", reached=4001)]) == []
    assert forwarded_addresses(own, [sight()]) == []


@pytest.mark.parametrize(
    ("address", "pair"),
    [
        ("/ip4/5.5.5.5/tcp/4001/p2p/X", ("5.5.5.5", 4001)),
        ("/ip6/::1/tcp/1", ("::1", 1)),
        ("/ip4/5.5.5.5/udp/4001/quic-v1", ("5.5.5.5", 4001)),
        ("/ip4/5.5.5.5/tcp/4001/p2p/R/p2p-circuit/p2p/X", None),
        ("/dns4/example.org/tcp/4001", None),
        ("/ip4/5.5.5.5/tcp/x", None),
        ("", None),
    ],
)
def test_multiaddrs(address: str, pair: tuple[str, int] | None) -> None:
    assert host_and_port(address) == pair
