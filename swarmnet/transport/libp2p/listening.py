"""The host and port at which a daemon listens, and what is wrong with them when it cannot."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnet.errors import AddressError, TransportError


class ListenAddress:
    """An IP address of this machine and a TCP port; 0: any free port, until the daemon has one."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    @property
    def port(self) -> int:
        return self._port

    @property
    def multiaddr(self) -> str:
        kind = "ip6" if ":" in self._host else "ip4"
        return f"/{kind}/{self._host}/tcp/{self._port}"

    def keep_port(self, listening: Sequence[str]) -> None:
        """Listens at the same port from now on; `listening`: the daemon's multiaddrs."""
        self._port = _tcp_port(listening) or self._port

    def failure(self, text: str) -> AddressError | TransportError:
        """Why a daemon did not start; `text`: what it printed last."""
        where = f"port {self._port} on {self._host}"
        if "address already in use" in text:
            return self._taken()
        if "permission denied" in text:
            return AddressError(f"{where} is not allowed to this user; choose a --port above 1023")
        if "cannot assign requested address" in text:
            problem = f"{self._host} is no address of this machine"
            return AddressError(f"{problem}; choose another --host")
        if "failed to parse multiaddr" in text:
            problem = f"{self._host} is no IP address to listen on"
            return AddressError(f"{problem}; choose another --host")
        if "failed to listen" in text:
            return AddressError(f"{where} cannot be used; choose another --host or --port")
        return TransportError(f"p2pd did not start: {text[-300:]}")

    def _taken(self) -> AddressError:
        return AddressError(
            f"port {self._port} on {self._host} is taken; choose another --port, "
            "or 0 for any that is free"
        )


def _tcp_port(addresses: Sequence[str]) -> int:
    for address in addresses:
        parts = address.split("/")
        if "tcp" in parts:
            return int(parts[parts.index("tcp") + 1])
    return 0
