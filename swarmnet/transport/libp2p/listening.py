"""The host and port at which a peer listens, and those at which it says that others find it."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence

from swarmnet.errors import AddressError, PortTaken, TransportError, WrongAddress
from swarmnet.protocol.dialing.addresses import full_address
from swarmnet.protocol.dialing.zones import LOOPBACK, NOWHERE, host_from, zone_of
from swarmnet.transport.libp2p.interfaces import ANY_INTERFACE, bound, listening_hosts

ANNOUNCED = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]{1,253})"
    r"(?:/tcp/(?P<port>[0-9]{1,5}))?(?:/p2p/(?P<peer>\w{1,128}))?/?"
)
NAME = re.compile(r"(?:[A-Za-z0-9_](?:[-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?\.?)+")
MAX_SHOWN_CHARS = 128


class ListenAddress:
    """An IP address of this machine, or all (`interfaces.ANY_INTERFACE`), and a TCP port; 0: any
    free port, until the daemon has one."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._hosts = listening_hosts(host)
        self._port = port
        self._is_any_port = port == 0

    @property
    def port(self) -> int:
        return self._port

    @property
    def multiaddrs(self) -> list[str]:
        """One of each family where it listens at all."""
        pairs = [("ip6" if ":" in host else "ip4", host) for host in self._hosts]
        return [f"/{kind}/{host}/tcp/{self._port}" for kind, host in pairs]

    def claim(self) -> None:
        """Before each start of the daemon. It takes a port of its own in each family where any will
        do, and is content with one family where the other's port is taken; so one that is free in
        both is chosen here. Raises `PortTaken`, `TransportError` where it was free a moment ago."""
        if len(self._hosts) < 2:
            return
        try:
            made = bound(self._hosts, self._port)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise self._taken() from None
            return  # the daemon says what is wrong
        self._port = made[0].getsockname()[1]
        for one in made:
            one.close()

    def keep_port(self, listening: Sequence[str]) -> None:
        """Listens at the same port from now on; `listening`: the daemon's multiaddrs."""
        self._port = _tcp_port(listening) or self._port
        self._is_any_port = False

    def failure(self, text: str) -> AddressError | TransportError:
        """Why a daemon did not start; `text`: what it printed last."""
        where = self._where
        if "address already in use" in text:
            return self._taken()
        if "permission denied" in text:
            return WrongAddress(f"{where} is not allowed to this user; choose a --port above 1023")
        if "cannot assign requested address" in text:
            problem = f"{self._host} is no address of this machine"
            return AddressError(f"{problem}; choose another --host")
        if "failed to parse multiaddr" in text:
            problem = f"{self._host} is no IP address to listen on"
            return WrongAddress(f"{problem}; choose another --host")
        if "failed to listen" in text:
            return AddressError(f"{where} cannot be used; choose another --host or --port")
        return TransportError(f"p2pd did not start: {text[-300:]}")

    @property
    def _where(self) -> str:
        return f"port {self._port}" + (f" on {self._host}" if self._host != ANY_INTERFACE else "")

    def _taken(self) -> PortTaken | TransportError:
        if self._is_any_port:
            port, self._port = self._port, 0
            return TransportError(f"port {port} was free and is taken")
        return PortTaken(
            f"{self._where} is taken; choose another --port, or 0 for any that is free"
        )


def _tcp_port(addresses: Sequence[str]) -> int:
    for address in addresses:
        parts = address.split("/")
        if "tcp" in parts:
            return int(parts[parts.index("tcp") + 1])
    return 0


def announced(addresses: Sequence[str], peer_id: str, host: str) -> tuple[str, ...]:
    """What a person says of where others find this peer, with its id at the end; it listens at
    `host`. Raises `WrongAddress` for what nobody could find it by."""
    return tuple(_announced(address, peer_id, host) for address in addresses)


def _announced(address: str, peer_id: str, listens_at: str) -> str:
    match = ANNOUNCED.fullmatch(address)

    def wrong(problem: str) -> WrongAddress:
        return WrongAddress(
            f"--announce {address[:MAX_SHOWN_CHARS]!r} {problem}; one looks like "
            "/ip4/203.0.113.7/tcp/4001"
        )

    if match is None:
        raise wrong("is no address at which a peer listens")
    if match["peer"] not in (None, peer_id):
        raise wrong("names another peer: leave /p2p/ and what follows out")
    if match["port"] is None or not 0 < int(match["port"]) < 65_536:
        raise wrong("has no port")
    kind, host = match["kind"], host_from(match["host"])
    if kind.startswith("dns"):
        if host is not None or NAME.fullmatch(match["host"]) is None:
            raise wrong(f"has no name of a machine after /{kind}/")
    elif host is None or (":" in match["host"]) != (kind == "ip6"):
        raise wrong(f"has no IP address of that kind after /{kind}/")
    elif zone_of(host) == NOWHERE:
        raise wrong("has an address of no machine: nobody would dial it")
    elif zone_of(host) == LOOPBACK and _zone_of_text(listens_at) != LOOPBACK:
        raise wrong("leads each other machine to itself")
    return full_address(address.rstrip("/").partition("/p2p/")[0], peer_id)


def _zone_of_text(host: str) -> str:
    """`zone_of`, `NOWHERE` for what is no IP address."""
    found = host_from(host)
    return NOWHERE if found is None else zone_of(found)
