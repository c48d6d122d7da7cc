"""UPnP, by miniupnpc: of the same authors as the server that most routers have."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
from collections.abc import Callable
from typing import Any, TypeVar

from swarmnet.transport.mapping.router import LEASE_S, NAME, Opened, RouterError

SEARCH_MS = 2000
PORT_STEP, MAX_PORTS = 1009, 4
"""Ports outside that are tried one after the other, where others have those before."""
ONLY_FOR_EVER = "OnlyPermanentLeasesSupported"
TAKEN = "ConflictInMappingEntry"
RENEW_S = 2.0 * LEASE_S
"""One that knows no leases is asked anew all the same: it may have been switched off and on."""

T = TypeVar("T")


class Upnp:
    """A `router.Router`."""

    language = "UPnP"

    def __init__(self, found: Any) -> None:
        self._router = found
        self._outside: dict[int, int] = {}

    @classmethod
    async def find(cls, host: str) -> Upnp:
        """In the network in which this machine has that IP address. Raises `RouterError`."""
        if importlib.util.find_spec("miniupnpc") is None:
            raise RouterError("there is no miniupnpc here")

        def search() -> Any:
            import miniupnpc

            found = miniupnpc.UPnP(multicastif=host, discoverdelay=SEARCH_MS)
            found.discover()
            found.selectigd()
            if found.lanaddr != host:
                raise RouterError("another one than this network's")
            return found

        return cls(await _beside(search))

    async def open(self, port: int) -> Opened:
        host = await _beside(self._router.externalipaddress)
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise RouterError("it has no address outside") from None
        first = self._outside.get(port, port)
        for step in range(MAX_PORTS):
            outside = 1024 + (first - 1024 + step * PORT_STEP) % (65_536 - 1024)
            try:
                lease_s = await self._map(outside, port)
            except RouterError as e:
                if TAKEN not in str(e):
                    raise
                continue
            self._outside[port] = outside
            return Opened(port, host, outside, lease_s)
        raise RouterError("others have its ports")

    async def _map(self, outside: int, inside: int) -> float:
        """For how long."""
        add, own = self._router.addportmapping, self._router.lanaddr
        where = (outside, "TCP", own, inside, NAME, "")
        try:
            await _beside(lambda: add(*where, LEASE_S))
        except RouterError as e:
            if ONLY_FOR_EVER not in str(e):
                raise
            await _beside(lambda: add(*where, 0))
            return RENEW_S
        return float(LEASE_S)

    async def close(self, opened: Opened) -> None:
        await _beside(lambda: self._router.deleteportmapping(opened.outside, "TCP"))


async def _beside(work: Callable[[], T]) -> T:
    """The library blocks, and raises bare `Exception`s."""
    try:
        return await asyncio.to_thread(work)
    except RouterError:
        raise
    except Exception as e:
        raise RouterError(str(e)) from None
