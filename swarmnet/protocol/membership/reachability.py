"""Whether other peers can dial this one, and the kind of its NAT. Pure.

Connected peers report what they see (`Sight`): the address from which this peer's connections come,
and whether they could open a new connection to that address, at a port on which it listens.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

NONE, ENDPOINT_INDEPENDENT, SYMMETRIC, UNKNOWN = "none", "endpoint-independent", "symmetric", ""
"""Kinds of NAT, by whether the port that a remote peer sees depends on that peer (RFC 4787)."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The report of one peer."""

    peer_id: str
    host: str
    """IP address from which the asking peer's connection comes."""
    port: int
    reached: tuple[int, ...]
    """Ports at which the reporting peer reached the asking one."""


def is_global(host: str) -> bool:
    """True for an address that is valid everywhere."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int] | None:
    """IP address and port of a multiaddr of TCP or QUIC; None for any other, and for circuits."""
    parts = address.split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return None
    if parts[3] not in ("tcp", "udp") or not parts[4].isdecimal():
        return None
    return parts[2], int(parts[4])


def relevant(sights: Sequence[Sight]) -> list[Sight]:
    """The reports of peers outside the local network, where there are any: a neighbour in the same
    house reaches addresses that others cannot."""
    outside = [s for s in sights if is_global(s.host)]
    return outside or list(sights)


def is_reachable(sights: Sequence[Sight]) -> bool | None:
    """The majority of the reports, because one may lie; None without reports."""
    judges = relevant(sights)
    return 2 * sum(bool(s.reached) for s in judges) > len(judges) if judges else None


def kind_of_nat(own_hosts: Sequence[str], sights: Sequence[Sight]) -> str:
    """The kind of NAT, from two or more reports; one suffices where there is no NAT."""
    judges = relevant(sights)
    if not judges:
        return UNKNOWN
    if all(s.host in own_hosts for s in judges):
        return NONE
    if len({s.peer_id for s in judges}) < 2:
        return UNKNOWN
    same = len({(s.host, s.port) for s in judges}) == 1
    return ENDPOINT_INDEPENDENT if same else SYMMETRIC


def forwarded_addresses(own: Sequence[str], sights: Sequence[Sight]) -> list[str]:
    """Multiaddrs (without peer id) at which this peer was reached and that are not in `own`: ports
    that its router forwards."""
    known = {pair for pair in map(host_and_port, own) if pair is not None}
    found: dict[str, None] = {}
    for sight in relevant(sights):
        for port in sight.reached:
            if (sight.host, port) not in known:
                kind = "ip6" if ":" in sight.host else "ip4"
                found[f"/{kind}/{sight.host}/tcp/{port}"] = None
    return list(found)
