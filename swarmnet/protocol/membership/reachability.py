"""Can others dial this peer, and through what kind of NAT does it go out? Pure.

Peers that it is connected with say what they see (`Sight`): the address that it comes from, and
whether a new connection to that address, at a port on which it listens, came about.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

NONE, ENDPOINT_INDEPENDENT, SYMMETRIC, UNKNOWN = "none", "endpoint-independent", "symmetric", ""
"""Kinds of NAT: by whether the port that others see depends on who they are (RFC 4787)."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What one peer sees."""

    peer_id: str
    host: str
    """IP address that the asker comes from."""
    port: int
    reached: tuple[int, ...]
    """Ports of the asker at which that peer reached it."""


def is_global(host: str) -> bool:
    """An address that is the same everywhere."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of a multiaddr of TCP or QUIC; None for any other, and for circuits."""
    parts = address.split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return None
    if parts[3] not in ("tcp", "udp") or not parts[4].isdecimal():
        return None
    return parts[2], int(parts[4])


def relevant(sights: Sequence[Sight]) -> list[Sight]:
    """Those of peers elsewhere, where there are any: a neighbour in the same house reaches what
    nobody else does."""
    outside = [s for s in sights if is_global(s.host)]
    return outside or list(sights)


def is_reachable(sights: Sequence[Sight]) -> bool | None:
    """By the word of most of them: one may lie. None while nobody has said anything."""
    judges = relevant(sights)
    return 2 * sum(bool(s.reached) for s in judges) > len(judges) if judges else None


def kind_of_nat(own_hosts: Sequence[str], sights: Sequence[Sight]) -> str:
    """From two or more sights; one suffices where there is no NAT."""
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
    """Multiaddrs (without peer id) at which this peer was reached and that it does not know of: a
    port that its router forwards."""
    known = {pair for pair in map(host_and_port, own) if pair is not None}
    found: dict[str, None] = {}
    for sight in relevant(sights):
        for port in sight.reached:
            if (sight.host, port) not in known:
                kind = "ip6" if ":" in sight.host else "ip4"
                found[f"/{kind}/{sight.host}/tcp/{port}"] = None
    return list(found)
