"""What this machine's IP addresses are for: the operating system is asked."""

from __future__ import annotations

import socket

from swarmnet.protocol.dialing.addresses import OwnHosts, is_bridge

ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Of documentation (RFC 5737, RFC 3849). Nothing is sent there: a UDP socket that is connected only
asks for the route."""


def own_hosts() -> OwnHosts:
    """Takes a fraction of a millisecond; parts that cannot be found out are empty."""
    return OwnHosts(_default_hosts(), _bridge_hosts())


def outward_hosts() -> list[str]:
    """Every IP address of this machine by which others may reach it: none of loopback, and none of
    an interface that leads only to its own containers."""
    import psutil

    own = own_hosts()
    inside = set(own.bridges) - set(own.default)
    try:
        interfaces = psutil.net_if_addrs()
    except OSError:
        return list(own.default)
    return [
        entry.address
        for _, entries in sorted(interfaces.items())
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address not in inside
    ]


def _default_hosts() -> tuple[str, ...]:
    found = []
    for family, elsewhere in ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect((elsewhere, 9))
                found.append(str(asking.getsockname()[0]))
        except OSError:  # no route, or not this family
            continue
    return tuple(found)


def _bridge_hosts() -> tuple[str, ...]:
    import psutil

    try:
        interfaces = psutil.net_if_addrs()
    except OSError:
        return ()
    return tuple(
        entry.address
        for name, entries in sorted(interfaces.items())
        if is_bridge(name)
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    )
