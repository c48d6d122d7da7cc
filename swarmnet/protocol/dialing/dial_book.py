"""Where other peers can be dialled: what is known of each, and what is dialled of that now. Pure.

What others name is dialled where it may be (`zones`), and seldom enough: nobody makes this peer
search a machine for open ports, or send connection after connection to one that has nothing to do
with the run. What is dialled in vain costs the peer that named it, the host and the port. A dial
that finds the peer costs nothing, and so does any further one to the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address
from typing import TypeVar

from swarmnet.protocol.dialing.addresses import in_turns, to_dial
from swarmnet.protocol.dialing.zones import (
    Here,
    Host,
    Target,
    may_dial,
    target_of,
    zone_of,
)
from swarmnet.protocol.rate import RateLimiter

MAX_PEERS = 16_384
"""Of those that are not forgotten, the newest."""
MAX_ADDRESSES = 16
"""Of one peer."""
MAX_TARGETS = 4
"""Of one ticket."""
MAX_GIVEN = 64
"""Of one peer, that people have named."""
NAMER_PER_S, NAMER_BURST = 0.5, 64.0
"""Dials to places where a peer was not found yet, at the word of that peer."""
PORT_PER_S, PORT_BURST = 0.5, 8.0
"""Of one port of one host, at the word of all."""
HOST_PER_S, HOST_BURST = 2.0, 128.0
"""Of one host."""
LOOPBACK_HOST = IPv4Address("127.0.0.1")


T = TypeVar("T")


class DialBook:
    """Of one machine."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, ...]] = {}
        self._given: dict[str, dict[str, None]] = {}
        """What people have named, by peer."""
        self._seen: dict[str, Host] = {}
        """From where each peer is seen to come."""
        self._found: dict[str, Target] = {}
        """Where it was at the other end of a connection last; dialling it there costs nothing."""
        self._zones: dict[str, None] = {}
        """In which people have named addresses."""
        self._spent: dict[str, list[Target]] = {}
        """By peer, what was dialled at its word."""
        self._namers = RateLimiter(NAMER_PER_S, NAMER_BURST)
        self._ports = RateLimiter(PORT_PER_S, PORT_BURST)
        self._hosts = RateLimiter(HOST_PER_S, HOST_BURST)

    # ---- what is known ----------------------------------------------------------------------

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        """What a peer says, in place of what it has said before; without effect where it says
        nothing."""
        told = tuple(dict.fromkeys(_bare(a, peer_id) for a in addresses))[:MAX_ADDRESSES]
        if told:
            _put(self._told, peer_id, told)

    def given(self, peer_id: str, address: str) -> None:
        """A person has named an address of a peer: it is dialled as it is, and the run lives where
        it leads."""
        addresses = self._given.get(peer_id, {})
        addresses[_bare(address, peer_id)] = None
        while len(addresses) > MAX_GIVEN:
            del addresses[next(iter(addresses))]
        _put(self._given, peer_id, addresses)
        target = target_of(address)
        if target is not None:
            self._zones[zone_of(target[0])] = None

    def forget(self, peer_id: str) -> None:
        """A peer has been gone for long. What people have named stays."""
        for table in (self._told, self._seen, self._found, self._spent):
            table.pop(peer_id, None)

    def saw(self, peer_id: str, address: str) -> None:
        """A peer was found at the other end of a connection, which leads to this multiaddr."""
        target = target_of(address)
        if target is None:
            return
        _put(self._seen, peer_id, target[0])
        _put(self._found, peer_id, target)
        self.answered(peer_id, address)

    def answered(self, peer_id: str, address: str) -> None:
        """A dial to this multiaddr was answered by that peer, and costs nothing then."""
        target, spent = target_of(address), self._spent.get(peer_id, [])
        if target is not None and target in spent:
            spent.remove(target)
            self._namers.give(peer_id)
            self._ports.give(_name(target))
            self._hosts.give(str(target[0]))

    def here(self, told: Iterable[str], hosts: Iterable[str]) -> Here:
        """Where this machine is; see `Here.at`."""
        return Here.at(told, hosts, self._zones)

    # ---- what is dialled --------------------------------------------------------------------

    def dialled(self, peer_id: str, own: Sequence[str], here: Here, now: float) -> list[str]:
        """Where a peer is dialled now, in the order in which it is tried, without its id. `own`:
        the multiaddrs of this machine."""
        given = self._given.get(peer_id, {})
        may = [
            address
            for address in to_dial(self._told.get(peer_id, ()), own)
            if address in given or may_dial(target_of(address), self._seen.get(peer_id), here)
        ]
        told = [a for a in may if a in given or self._takes(peer_id, target_of(a), now)]
        return [*told, *(a for a in given if a not in told)]

    def targets(
        self,
        peer_id: str,
        named: Iterable[tuple[str, int]],
        here: Here,
        now: float,
        *,
        is_here: bool = False,
    ) -> list[Target]:
        """Of the hosts and ports that a peer names beside its addresses, those that are dialled
        now. `is_here`: it has shown that it is on this machine, where the shortest way comes
        first."""
        seen = LOOPBACK_HOST if is_here else self._seen.get(peer_id)
        may: dict[Target, None] = {}
        for host, port in named:
            target = target_of(f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}")
            if target is not None and may_dial(target, seen, here):
                may[target] = None
        order = sorted(may, key=lambda t: not t[0].is_loopback) if is_here else list(may)
        return [t for t in _in_families(order)[:MAX_TARGETS] if self._takes(peer_id, t, now)]

    def may_connect(self, namer: str, relay_id: str, address: str, here: Here, now: float) -> bool:
        """Whether a relay of a peer is dialled now at the address that this peer names."""
        if _bare(address, relay_id) in self._given.get(relay_id, {}):
            return True
        target = target_of(address)
        return may_dial(target, None, here) and self._takes(namer, target, now)

    def may_dial_back(self, asker: str, address: str, now: float) -> bool:
        """Whether a peer that asks for it is dialled there: where `at_seen_host` leads."""
        return self._takes(asker, target_of(address), now)

    def _takes(self, peer_id: str, target: Target | None, now: float) -> bool:
        """Counts one dial; False where there were too many."""
        if target is None:
            return False
        if target == self._found.get(peer_id):
            return True
        if not self._namers.allows(peer_id, now):
            return False
        if not self._ports.allows(_name(target), now):
            return False
        if not self._hosts.allows(str(target[0]), now):
            return False
        spent = [t for t in self._spent.get(peer_id, []) if t != target]
        _put(self._spent, peer_id, [*spent, target][-MAX_ADDRESSES:])
        return True


def at_seen_host(address: str, seen: str) -> str:
    """The multiaddr, without peer id, of the port of an address at the host of another, from which
    its peer is seen to come; empty where it is not dialled."""
    named, found = target_of(address), target_of(seen)
    if named is None or found is None:
        return ""
    here = Here.at([seen], [str(found[0])])
    if not may_dial((found[0], named[1]), found[0], here):
        return ""
    return f"/ip{found[0].version}/{found[0]}/tcp/{named[1]}"


def _in_families(targets: Sequence[Target]) -> list[Target]:
    """By turns of IPv4 and IPv6 (RFC 8305, section 4): of the first few not all may be of a kind
    that one side does not have."""
    kinds: dict[int, list[Target]] = {}
    for target in targets:
        kinds.setdefault(target[0].version, []).append(target)
    return in_turns(kinds.values())


def _name(target: Target) -> str:
    return f"{target[0]} {target[1]}"


def _bare(address: str, peer_id: str) -> str:
    return address.removesuffix(f"/p2p/{peer_id}")


def _put(table: dict[str, T], key: str, value: T) -> None:
    """The newest `MAX_PEERS` are kept."""
    table.pop(key, None)
    if len(table) >= MAX_PEERS:
        del table[next(iter(table))]
    table[key] = value
