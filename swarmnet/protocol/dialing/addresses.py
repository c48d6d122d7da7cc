"""The choice and the order of a machine's addresses, to publish and to dial. Pure.

A machine listens at all its addresses, and libp2p lists them in the order of their bytes: loopback
and the bridge of docker, which every such machine has, come before most home addresses. Published
addresses are ordered by usefulness, and addresses that are useless to others are left out. A
dialling peer tries them in that order, one more every `STAGGER_S` seconds, and the first that
answers wins (RFC 8305, "happy eyeballs").
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from swarmnet.protocol.dialing.zones import CIRCUIT, Here, Host, may_dial_address
from swarmnet.protocol.timing import ANSWER_S

MAX_NAMED = 3
"""Addresses that a person is told, to join by."""
STAGGER_S = 0.25
"""Between the starts of two attempts (RFC 8305, section 5). It protects peers from dials that the
one before makes needless (tests/protocol/dialing/test_addresses.py)."""
BRIDGE = re.compile(
    r"(docker|docker_gwbridge|podman|cni|cilium|flannel|lxcbr|lxdbr|virbr|vmnet|vboxnet|veth)\w*$"
    r"|br-[0-9a-f]{12}$"
)
"""Names of interfaces between a machine and its own containers or virtual machines."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OwnHosts:
    """What a machine knows about its IP addresses."""

    default: tuple[str, ...] = ()
    """Source addresses of the default route, one of each family (IPv4, IPv6)."""
    bridges: tuple[str, ...] = ()
    """Addresses of interfaces to its own containers and virtual machines."""


def is_bridge(interface: str) -> bool:
    """True where an interface of this name leads only to the machine's own containers."""
    return BRIDGE.match(interface) is not None


def host_of(address: str) -> Host | None:
    """The IP address of a multiaddr; None where it has none, and for circuits."""
    parts = address.split("/", 4)
    if len(parts) < 4 or parts[1] not in ("ip4", "ip6") or CIRCUIT in address:
        return None
    try:
        return ipaddress.ip_address(parts[2])
    except ValueError:
        return None


def is_loopback(address: str) -> bool:
    """True for a multiaddr with a loopback address."""
    host = host_of(address)
    return host is not None and host.is_loopback


def is_public(address: str) -> bool:
    """True for a multiaddr whose IP address is valid everywhere."""
    host = host_of(address)
    return host is not None and host.is_global


def to_tell(listening: Iterable[str], own: OwnHosts) -> list[str]:
    """The addresses that a machine publishes, of those at which it listens: public ones first, then
    those of the default route, then other private ones. Bridges are published only where there is
    nothing else, loopback addresses only where there is no bridge either."""
    default = {ipaddress.ip_address(h) for h in own.default}
    bridges = {ipaddress.ip_address(h) for h in own.bridges} - default

    def rank(address: str) -> int:
        host = host_of(address)
        if host is None or host.is_global:
            return 0
        if host.is_loopback:
            return 4
        return 1 if host in default else 3 if host in bridges else 2

    usable = [a for a in dict.fromkeys(listening) if not _is_useless(host_of(a))]
    usable.sort(key=rank)
    for worst in (2, 3):
        if told := [a for a in usable if rank(a) <= worst]:
            return told
    return usable


def _is_useless(host: Host | None) -> bool:
    """Link-local addresses need the name of an interface, and mean nothing on other machines."""
    return host is not None and (host.is_link_local or host.is_unspecified or host.is_multicast)


def to_dial(addresses: Iterable[str], own: Iterable[str]) -> list[str]:
    """The addresses of a peer that may lead to it from a machine with the addresses `own`, in their
    order. A loopback address leads every machine to itself. It is tried last, where the peer is on
    this machine (they share an address), and where the peer has no other address."""
    known = list(dict.fromkeys(addresses))
    if not any(map(_leads_out, known)):
        return known
    outside = [a for a in known if not is_loopback(a)]
    here = {host for host in map(host_of, own) if host is not None and not host.is_loopback}
    if any(host_of(a) in here for a in outside):
        return [*outside, *(a for a in known if is_loopback(a))]
    return outside


def _leads_out(address: str) -> bool:
    """True for an address that may lead off this machine; False for a malformed one."""
    host = host_of(address)
    return address.startswith("/dns") if host is None else not host.is_loopback


def others_to_name(addresses: Sequence[str]) -> list[str]:
    """Addresses that may be the right ones instead of the first, which users are told to use: one
    of each other host, where the first is private, `MAX_NAMED` with it. Beside a public one the
    best of the other kind, where that is public too or the first is of IPv6: not everybody has
    both."""
    first = host_of(addresses[0]) if addresses else None
    if first is None:
        return []
    seen, others = {first}, []
    for address in addresses[1:]:
        host = host_of(address)
        if host is None or host in seen or host.is_loopback:
            continue
        seen.add(host)
        is_useful = host.is_global or first.version == 6
        if not first.is_global or (host.version != first.version and is_useful):
            others.append(address)
    return others[: MAX_NAMED - 1] if not first.is_global else others[:1]


def best_to_join(peers: Mapping[str, Sequence[str]]) -> list[str]:
    """Where a newcomer tries to join, `MAX_NAMED` at most: of each peer its best address, public
    ones and names before those through a relay, and both before private ones."""
    best = [
        min((full_address(a, peer_id) for a in addresses), key=_farness)
        for peer_id, addresses in peers.items()
        if addresses
    ]
    return sorted(best, key=_farness)[:MAX_NAMED]


def _farness(address: str) -> int:
    """How few newcomers get there."""
    if CIRCUIT in address:
        return 1
    if is_public(address) or host_of(address) is None:
        return 0
    return 3 if is_loopback(address) else 2


def in_turns(lists: Iterable[Sequence[T]]) -> list[T]:
    """The first of each list, then the second of each, and so on, without duplicates."""
    turns = zip_longest(*lists)
    return list(dict.fromkeys(a for turn in turns for a in turn if a is not None))


def of_all(
    peers: Mapping[str, Sequence[str]], own: Iterable[str], *, is_told: bool = False
) -> list[str]:
    """The addresses of several peers in dialling order, each with its id at its end. `is_told`:
    others name them, so only those that may be dialled (`zones`) from a machine that publishes the
    addresses `own`."""
    published = list(own)
    here = Here.at(published)
    return in_turns(
        [
            full_address(a, peer_id)
            for a in to_dial(addresses, published)
            if not is_told or may_dial_address(a, None, here)
        ]
        for peer_id, addresses in peers.items()
    )


def full_address(address: str, peer_id: str) -> str:
    """The address with `/p2p/<peer id>` at its end."""
    end = f"/p2p/{peer_id}"
    return address if address.endswith(end) else address + end


def peer_of(address: str) -> str:
    """The peer id at the end of an address; empty where it has none."""
    return address.rpartition("/p2p/")[2] if "/p2p/" in address else ""


def by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Addresses by the peer id at their end, in their order; those without are left out."""
    found: dict[str, list[str]] = {}
    for address in addresses:
        if peer_id := peer_of(address):
            found.setdefault(peer_id, []).append(address)
    return found


def stagger_s(number: int) -> float:
    """Seconds between the starts of this number of attempts, which all begin within `ANSWER_S`."""
    return min(STAGGER_S, ANSWER_S / max(1, number))
