"""A transport of real parts: the carrier that is wanted, and direct connections beside it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import swarmnet.system as system
from swarmnet.errors import PortTaken, TransportError
from swarmnet.identity import Identity as Key
from swarmnet.identity import verify
from swarmnet.protocol.dialing.zones import CARRIER
from swarmnet.runtime.carriers import carrier_of, here
from swarmnet.runtime.options import TransportName
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.direct import DirectListener
from swarmnet.transport.libp2p.interfaces import (
    ANY_HOSTS,
    ANY_INTERFACE,
    outward_hosts,
    own_hosts,
)
from swarmnet.transport.mapping.nat_pmp import NatPmp
from swarmnet.transport.mapping.ports import PortMapping
from swarmnet.transport.mapping.router import Opened, Router, RouterError
from swarmnet.transport.mapping.upnp import Upnp
from swarmnet.version import __version__

log = logging.getLogger("swarmnet.net")

T = TypeVar("T")

AGENT = f"swarmnet/{__version__}"
PORT_WAIT_S = 30.0
"""A port that another process has is waited for so long: it may be that of this peer's own last
process, which is about to end."""
PORT_LOOK_S = 1.0
HANDED_OUT = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", CARRIER)
"""Blocks of the addresses that routers give out (RFC 1918, RFC 6598)."""


@dataclass(frozen=True, slots=True)
class KeySigner:
    """Signs with this peer's key, and checks anybody's signature by peer id."""

    key: Key

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data)

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        return verify(peer_id, data, signature)

    async def beside(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class Net:
    """A transport, and what the directory needs of its carrier."""

    transport: ChannelTransport
    p2p: Callable[[], Any] | None
    on_restart: Callable[[Callable[[], None]], None] | None


def port_mapping(transport: ChannelTransport, host: str) -> PortMapping | None:
    """The ports of a transport that listens at `host`, to be forwarded by this machine's router;
    None where it is behind none."""
    own = next((h for h in own_hosts().default if ":" not in h), "")
    if not own or host not in (own, *ANY_HOSTS, ANY_INTERFACE) or not is_behind_router(own):
        return None

    async def find() -> AsyncIterator[Router]:
        gateway = system.default_gateway()
        if gateway:
            yield NatPmp(gateway)
        try:
            yield await Upnp.find(own)
        except RouterError as e:
            log.debug("no router by UPnP: %s", e)

    def tell(opened: Sequence[Opened]) -> None:
        transport.forwarded([(o.port, o.host, o.outside) for o in opened])

    return PortMapping(transport.ports(), find, tell)


def is_behind_router(host: str) -> bool:
    """Whether an IPv4 address is one that a router gives out: a home's or a provider's."""
    address = ipaddress.IPv4Address(host)
    return any(address in ipaddress.ip_network(block) for block in HANDED_OUT)


async def once_free(listen: Callable[[], Awaitable[T]]) -> T:
    """What `listen` returns, called until the port that it wants is free. Raises `PortTaken` after
    `PORT_WAIT_S`, and what else it raises."""
    loop = asyncio.get_running_loop()
    end, is_told = loop.time() + PORT_WAIT_S, False
    while True:
        try:
            return await listen()
        except PortTaken as e:
            if loop.time() >= end:
                raise
            if not is_told:
                log.warning("%s; waiting %.0f s for it", e, PORT_WAIT_S)
                is_told = True
            await asyncio.sleep(PORT_LOOK_S)


async def open_net(
    name: TransportName,
    key: Key,
    *,
    host: str,
    port: int,
    announce: Sequence[str],
    direct: DirectListener | None = None,
    shares_port: bool = False,
) -> Net:
    """A started transport of the wanted kind. `direct`: where to listen for direct
    connections; None: none are made. `shares_port`: as of `P2pdCarrier`; the other
    carrier never does. Raises `AddressError`, `PortTaken` where a port is taken."""

    async def started(carrier: Any) -> ChannelTransport:
        transport = ChannelTransport(
            carrier, agent=AGENT, direct=direct, identity=key, interfaces=outward_hosts
        )
        await transport.start()
        return transport

    why = f"does not run on {here()}"
    if carrier_of(name) == "p2pd":
        from swarmnet.transport.libp2p.p2pd import P2pdCarrier

        daemon = P2pdCarrier(key, host=host, port=port, announce=announce, shares_port=shares_port)
        try:
            return Net(await started(daemon), lambda: daemon.p2p, daemon.on_restart)
        except TransportError as e:
            if name != "auto":
                raise
            why = f"does not start here ({e})"
    if name == "auto":
        log.warning("hivemind's network daemon %s: py-libp2p carries", why)
    from swarmnet.transport.libp2p.py_libp2p import PyLibp2pCarrier

    carrier = PyLibp2pCarrier(key, host=host, port=port, announce=announce)
    return Net(await started(carrier), None, None)
