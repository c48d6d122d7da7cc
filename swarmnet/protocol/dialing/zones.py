"""Which addresses that others name may be dialled, by where they lie. Pure.

A peer dials what records, tickets, relays, the directory and remembered peers say. Whoever can name
any address to it has it knock at the doors of its own machine, its home network or somebody else's.
So what others name is an IP address and a port from
`FIRST_PORT`. It is public, or lies in a *zone* in which this machine is itself: loopback, a private
block, or one of the blocks that are kept for documentation and measurements. Where the peer that
names it is seen to come from, it has to be there too. Nobody is dialled at link-local, multicast
and unspecified addresses, nor at those that hide another one in a tunnel.

What a person names (`--join`, an address in a file of this machine) is dialled as it is.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass

Host = ipaddress.IPv4Address | ipaddress.IPv6Address
Target = tuple[Host, int]
"""An IP address and a port of TCP or UDP."""

FIRST_PORT = 1024
"""No port below is dialled at the word of others: what listens there is no peer of a user's."""
MAX_PORT = 65_535
CIRCUIT = "/p2p-circuit"
NOWHERE, PUBLIC, LOOPBACK = "", "public", "loopback"
CARRIER = "100.64.0.0/10"
"""Behind the NAT of a provider, and many VPNs."""
BLOCKS = tuple(
    ipaddress.ip_network(block)
    for block in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        CARRIER,
        "192.0.2.0/24",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "198.18.0.0/15",
        "2001:db8::/32",
        "3fff::/20",
    )
)
"""Zones beside loopback and those of IPv6's private addresses."""
PRIVATE_6, PRIVATE_6_BITS = ipaddress.IPv6Network("fc00::/7"), 48
"""Each network of private IPv6 addresses has a random prefix (RFC 4193)."""
LINK_6_BITS = 64
"""The prefix of a link's IPv6 addresses, public ones too (RFC 4291)."""
PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
TUNNELS = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def host_from(text: str) -> Host | None:
    """The IP address of a text, in IPv4 where it is only written as one of IPv6; None where it is
    none, or means something on one interface only."""
    try:
        host = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(host, ipaddress.IPv6Address):
        if host.scope_id is not None:
            return None
        return host.ipv4_mapped or host
    return host


def zone_of(host: Host) -> str:
    """Where an address lies: `PUBLIC`, `LOOPBACK`, or a block's name; `NOWHERE` where no peer
    is."""
    if isinstance(host, ipaddress.IPv6Address) and host in NAT64:
        inside = ipaddress.IPv4Address(int(host) & 0xFFFFFFFF)
        return PUBLIC if zone_of(inside) == PUBLIC else NOWHERE
    if host.is_loopback:
        return LOOPBACK
    if host.is_link_local or host.is_multicast or host.is_unspecified:
        return NOWHERE
    for block in BLOCKS:
        if host in block:
            return str(block)
    if isinstance(host, ipaddress.IPv4Address):
        return PUBLIC if host.is_global else NOWHERE
    if host in PRIVATE_6:
        return str(ipaddress.ip_network((host, PRIVATE_6_BITS), strict=False))
    is_plain = host in PUBLIC_6 and not any(host in tunnel for tunnel in TUNNELS)
    return PUBLIC if is_plain and host.is_global else NOWHERE


def is_near(host: Host, here: Here) -> bool:
    """Whether an address is of a network in which this machine is itself, and no other one: behind
    the block of providers is the internet, or a VPN."""
    zone = zone_of(host)
    if zone in (NOWHERE, PUBLIC, CARRIER):
        return zone == PUBLIC and here.is_beside(host)
    return zone == LOOPBACK or zone in here.zones


def target_of(address: str) -> Target | None:
    """Where a multiaddr leads, and of a circuit that to its relay; None for any but an IP address
    with a port of TCP or UDP."""
    parts = address.partition(CIRCUIT)[0].split("/")
    if len(parts) < 5 or parts[0] or parts[3] not in ("tcp", "udp"):
        return None
    host = host_from(parts[2])
    try:
        version = ipaddress.ip_address(parts[2]).version if host is not None else 0
    except ValueError:
        return None
    if host is None or parts[1] != f"ip{version}":
        return None
    port = parts[4]
    if not (port.isascii() and port.isdecimal() and len(port) <= 5) or int(port) > MAX_PORT:
        return None
    return host, int(port)


@dataclass(frozen=True, slots=True)
class Here:
    """Where this machine is."""

    hosts: frozenset[Host] = frozenset()
    """Its own IP addresses, without loopback."""
    zones: frozenset[str] = frozenset()

    @classmethod
    def at(
        cls,
        told: Iterable[str],
        hosts: Iterable[str] = (),
        zones: Collection[str] = (),
    ) -> Here:
        """`told`: the multiaddrs that it publishes, of which those at loopback count only where it
        has no other to publish. `hosts`: further IP addresses of its interfaces. `zones`: further
        ones, in which a person has named an address."""
        targets = [target_of(address) for address in told if CIRCUIT not in address]
        own = {target[0] for target in targets if target is not None}
        outside = {host for host in map(host_from, hosts) if host is not None}
        is_local = None not in targets and all(host.is_loopback for host in own)
        own = {host for host in own | outside if not host.is_loopback}
        found = {zone_of(host) for host in own} | {*zones}
        if is_local and targets:
            found.add(LOOPBACK)
        return cls(frozenset(own), frozenset(found - {NOWHERE}))

    def has(self, host: Host) -> bool:
        """Whether it is an address of this machine."""
        return host.is_loopback or host in self.hosts

    def is_beside(self, host: Host) -> bool:
        """Whether a public address is one of this machine's own link: a neighbour in a home with
        IPv6 has one, beside a private one of IPv4."""
        if isinstance(host, ipaddress.IPv4Address):
            return False
        link = ipaddress.ip_network((host, LINK_6_BITS), strict=False)
        return any(own in link for own in self.hosts)


def may_dial(target: Target | None, seen: Host | None, here: Here) -> bool:
    """Whether an address is dialled that another peer names, which is `seen` to come from there;
    None where it is not known, for there was no connection to it yet."""
    if target is None or target[1] < FIRST_PORT:
        return False
    host, zone = target[0], zone_of(target[0])
    if zone in (NOWHERE, PUBLIC):
        return zone == PUBLIC
    is_ours = zone in here.zones or host in here.hosts
    if seen is None:
        return is_ours
    if here.has(seen):
        return zone == LOOPBACK or is_ours
    its_zone = zone_of(seen)
    if zone == LOOPBACK or (its_zone == PUBLIC and not here.is_beside(seen)):
        return False
    return is_ours or zone == its_zone


def may_dial_address(address: str, seen: Host | None, here: Here) -> bool:
    """`may_dial` of a multiaddr; of a circuit, that to its relay."""
    return may_dial(target_of(address), seen, here)


def may_dial_somewhere(address: str) -> bool:
    """Whether there may be machines that dial a multiaddr at the word of others."""
    target = target_of(address)
    return target is not None and target[1] >= FIRST_PORT and zone_of(target[0]) != NOWHERE
