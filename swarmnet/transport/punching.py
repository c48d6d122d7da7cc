"""A connection between two peers that are both behind routers.

A router lets in what answers something that went out. So both dial at once, each from the port at
which it listens for direct connections, to where the other's port is seen from outside. Each router
takes the other's packets for answers, and TCP makes one connection of the two dials (RFC 9293,
3.5; RFC 5382 asks routers to let that pass). The two agree on it over their channel through a relay
(`methods.contact.MEET`); who is the server of TLS follows from their ids.

Where the own port is seen, peers say that are dialled from it (`whence`). Where a router shows
another port to each of them it is a symmetric one, and this does not lead through it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import ProtocolViolation, Unreachable
from swarmnet.methods.contact import Ticket
from swarmnet.transport.direct import WHENCE, DirectListener, authenticated

ANSWER_BYTES = 64
ASK_S = 4.0
"""For a judge's answer."""
AGAIN_S = 0.1
"""Between two dials of one meeting: a router may refuse what came before its own side dialled."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Where the port for direct connections is seen by one peer."""

    host: str
    port: int
    transport: Any
    """Of the connection; while it stands, the router keeps the port."""


async def whence(
    listener: DirectListener, peer_id: str, ticket: Ticket, targets: Sequence[tuple[str, int]]
) -> Seen:
    """What the peer that gave a ticket sees. `targets`: of its addresses, those that are dialled.
    Raises `Unreachable` or `ProtocolViolation`."""
    if not targets:
        raise Unreachable("the ticket names no address that may be dialled")
    host, port = targets[0]
    try:
        async with asyncio.timeout(ASK_S):
            sock = await dial_from_port(listener, host, port)
            stream = await authenticated(peer_id, sock, ticket, listener.client_context)
    except (OSError, EOFError) as e:
        raise Unreachable(f"{host} port {port}: {e or 'no answer in time'}") from None
    answer = _Answer()
    transport: Any = stream.transport
    try:
        transport.set_protocol(answer)
        transport.write(WHENCE + ticket.token)
        transport.resume_reading()
        async with asyncio.timeout(ASK_S):
            text = await answer.text
        seen, _, number = text.partition(" ")
        if not number.isdecimal() or not 0 < int(number) < 1 << 16:
            raise ProtocolViolation("an impossible port")
        return Seen(str(ipaddress.ip_address(seen)), int(number), transport)
    except BaseException as e:
        transport.abort()
        if isinstance(e, ValueError):
            raise ProtocolViolation("an impossible address") from None
        if isinstance(e, EOFError | OSError):
            raise Unreachable(str(e) or "no answer in time") from None
        raise


class _Answer(asyncio.Protocol):
    """One line."""

    def __init__(self) -> None:
        self.text: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        line, end, _ = self._received.partition(b"\n")
        if self.text.done():
            return
        if end:
            self.text.set_result(line.decode("ascii", "replace"))
        elif len(line) > ANSWER_BYTES:
            self.text.set_exception(EOFError("too long an answer"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.text.done():
            self.text.set_exception(EOFError("no answer"))
            self.text.exception()  # seen: nobody may be waiting any more


async def dial_from_port(listener: DirectListener, host: str, port: int) -> socket.socket:
    """A TCP connection from the port at which this peer listens. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = listener.dialling_socket(family)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def dial_at_once(
    listener: DirectListener, host: str, port: int, for_s: float
) -> socket.socket:
    """The same to a peer that dials this one meanwhile, again and again for so long. Raises
    `Unreachable`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + for_s
    while True:
        try:
            async with asyncio.timeout_at(end):
                return await dial_from_port(listener, host, port)
        except OSError as e:  # a `TimeoutError` is one
            if loop.time() + AGAIN_S >= end:
                raise Unreachable(f"{host} port {port}: {e or 'no answer in time'}") from None
        await asyncio.sleep(AGAIN_S)
