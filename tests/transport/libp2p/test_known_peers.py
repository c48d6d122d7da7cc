"""Addresses of other peers: what is kept, what is refused, and what is forgotten."""

from __future__ import annotations

import pytest

from swarmnet.errors import AddressError
from swarmnet.transport.libp2p import known_peers
from swarmnet.transport.libp2p.known_peers import KnownPeers, check_multiaddr
from tests.transport.streams import identity

PEER, OTHER = identity(1).peer_id, identity(2).peer_id
BARE = "/ip4/192.0.2.7/tcp/4001"


def test_malformed_addresses_are_left_out() -> None:
    known = KnownPeers()
    known.learn(PEER, ["garbage", "", f"{BARE}/p2p/{PEER}", BARE])
    assert known.addresses(PEER) == [BARE, BARE]


def test_what_says_nothing_makes_nothing_be_forgotten() -> None:
    known = KnownPeers()
    known.learn(PEER, [BARE])
    known.learn(PEER, ["garbage", ""])
    assert known.addresses(PEER) == [BARE]
    assert known.addresses(OTHER) == []


def test_a_peer_is_dialled_nowhere_where_there_are_no_addresses() -> None:
    known = KnownPeers()
    known.learn(PEER, [BARE])
    known.learn(PEER, [])
    assert known.addresses(PEER) == []


def test_peers_and_their_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_peers, "MAX_KNOWN_PEERS", 2)
    known = KnownPeers()
    for name in "abc":
        known.learn(name, [BARE] * 99)
        known.missed(name)
    assert [len(known.addresses(name)) for name in "abc"] == [0, *[known_peers.MAX_ADDRESSES] * 2]
    assert [known.is_away(name) for name in "abc"] == [False, True, True]


def test_a_peer_is_away_from_a_miss_until_it_is_reached() -> None:
    known = KnownPeers()
    assert not known.is_away(PEER)
    known.missed(PEER)
    assert known.is_away(PEER)
    known.reached(PEER)
    assert not known.is_away(PEER)


def test_an_address_is_a_multiaddr() -> None:
    check_multiaddr(BARE)
    with pytest.raises(AddressError, match="is no address"):
        check_multiaddr("192.0.2.7:4001")
