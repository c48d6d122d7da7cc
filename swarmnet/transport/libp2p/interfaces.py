"""What this machine's IP addresses are for: the operating system is asked."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from swarmnet.protocol.dialing.addresses import OwnHosts, is_bridge

ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Of documentation (RFC 5737, RFC 3849). Nothing is sent there: a UDP socket that is connected only
asks for the route."""
ANY_INTERFACE = "any"
"""To listen at all interfaces, at IPv4 and IPv6 addresses where this machine has both."""
ANY_HOSTS = ("0.0.0.0", "::")
MAX_PORT_TRIES = 16
"""Ports that are tried until one is free in both families."""


def listening_hosts(host: str) -> tuple[str, ...]:
    """The IP addresses at which one listens that is to listen at `host`: itself, or those of all
    interfaces."""
    if host != ANY_INTERFACE:
        return (host,)
    found = []
    for every in ANY_HOSTS:
        try:
            _bound(every, 0).close()
        except OSError:  # a kernel or container without that family
            continue
        found.append(every)
    return tuple(found) or ANY_HOSTS[:1]


def bound(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """TCP sockets at the same port of these IP addresses; 0: any that is free at all of them.
    Raises `OSError`."""
    for tries_left in reversed(range(MAX_PORT_TRIES)):
        made: list[socket.socket] = []
        try:
            for host in hosts:
                made.append(_bound(host, made[0].getsockname()[1] if made else port))
            return made
        except OSError as e:
            for one in made:
                one.close()
            if port or not made or e.errno != errno.EADDRINUSE or not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def _bound(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two listen at one port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:  # IPv4 has a socket of its own
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
    except BaseException:
        made.close()
        raise
    return made


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
