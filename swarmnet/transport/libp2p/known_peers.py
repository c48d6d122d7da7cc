"""Where the daemon can dial other peers, and which of them it did not reach."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnet.errors import AddressError

MAX_KNOWN_PEERS = 16_384
MAX_ADDRESSES = 16
"""Of one peer."""


class KnownPeers:
    """Addresses by peer, and the peers that are away: of those that are not forgotten, the
    newest."""

    def __init__(self) -> None:
        self._addresses: dict[str, list[str]] = {}
        self._away: dict[str, None] = {}

    def addresses(self, peer_id: str) -> list[str]:
        """Multiaddrs without the peer id."""
        return self._addresses.get(peer_id, [])

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Addresses of a peer in place of those known; without effect where none is well formed,
        unless there are none."""
        if not addresses:
            self._addresses.pop(peer_id, None)
        bare = [without_peer(address, peer_id) for address in addresses[:MAX_ADDRESSES]]
        known = [address for address in bare if address]
        if not known:
            return
        self._addresses.pop(peer_id, None)
        if len(self._addresses) >= MAX_KNOWN_PEERS:
            del self._addresses[next(iter(self._addresses))]
        self._addresses[peer_id] = known

    def forget(self, peer_id: str) -> None:
        """A peer has been gone for long."""
        self._addresses.pop(peer_id, None)
        self._away.pop(peer_id, None)

    def is_away(self, peer_id: str) -> bool:
        """Did the daemon not reach the peer the last time? `knocking` says why that matters."""
        return peer_id in self._away

    def missed(self, peer_id: str) -> None:
        """The daemon did not reach a peer."""
        self._away[peer_id] = None
        while len(self._away) > MAX_KNOWN_PEERS:
            del self._away[next(iter(self._away))]

    def reached(self, peer_id: str) -> None:
        """The daemon has a connection to a peer."""
        self._away.pop(peer_id, None)


def check_multiaddr(address: str) -> None:
    """Raises `AddressError`."""
    from multiaddr import Multiaddr

    try:
        Multiaddr(address)
    except Exception:
        raise AddressError(
            f"{address[:200]} is no address; one looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo..."
        ) from None


def without_peer(address: str, peer_id: str) -> str:
    """What stands before `/p2p/<peer id>`; empty where the address is malformed or another's."""
    if not isinstance(address, str):
        return ""
    bare, _, named = address.rpartition("/p2p/")
    if not bare or named != peer_id:
        bare = address if f"/p2p/{peer_id}" not in address else ""
    try:
        check_multiaddr(bare)
    except AddressError:
        return ""
    return bare
