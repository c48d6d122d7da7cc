"""NAT-PMP (RFC 6886): a few bytes over UDP to the machine's gateway. No library of it is kept."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct

from swarmnet.transport.mapping.router import LEASE_S, Opened, RouterError

PORT = 5351
FIRST_WAIT_S, TRIES = 0.25, 4
"""For an answer, then twice as long each time; RFC 6886, section 3.1, with fewer tries."""
ANSWER = 128
"""Is added to the number of a request in its answer."""
HOST, TCP = 0, 2
"""Requests: the router's address outside, and a TCP port."""
HEAD = struct.Struct(">BBHI")
"""Version, number, result, seconds since the router's start."""
ASKED = struct.Struct(">BBHHHI")
"""Version, number, reserved, port inside, port outside, seconds."""
MAPPED = struct.Struct(">HHI")
MAX_ANSWER_BYTES = 64
REASONS = {
    1: "it speaks another version",
    2: "it is told not to (see its page)",
    3: "it has no address outside",
    4: "it has no room for more",
    5: "it does not know the request",
}


class NatPmp:
    """A `router.Router`."""

    language = "NAT-PMP"

    def __init__(self, gateway: str, port: int = PORT) -> None:
        self._gateway = (gateway, port)

    async def open(self, port: int) -> Opened:
        told = await self._ask(struct.pack(">BB", 0, HOST), HOST, 4)
        host = str(ipaddress.IPv4Address(told))
        inside, outside, lease_s = await self._map(port, port, LEASE_S)
        if inside != port or not outside or not lease_s:
            raise RouterError("it answers nonsense")
        return Opened(port, host, outside, float(lease_s))

    async def close(self, opened: Opened) -> None:
        await self._map(opened.port, 0, 0)

    async def _map(self, inside: int, outside: int, lease_s: int) -> tuple[int, int, int]:
        asked = ASKED.pack(0, TCP, 0, inside, outside, lease_s)
        return MAPPED.unpack(await self._ask(asked, TCP, MAPPED.size))

    async def _ask(self, request: bytes, number: int, num_bytes: int) -> bytes:
        """What follows the head of the answer. Raises `RouterError`."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            try:
                asking.connect(self._gateway)  # nobody else's answers come in
                for attempt in range(TRIES):
                    asking.send(request)
                    try:
                        async with asyncio.timeout(FIRST_WAIT_S * 2**attempt):
                            while True:
                                said = await loop.sock_recv(asking, MAX_ANSWER_BYTES)
                                answer = _answer(said, number, num_bytes)
                                if answer is not None:
                                    return answer
                    except TimeoutError:
                        continue
            except OSError as e:
                raise RouterError(e.strerror or str(e)) from None
        raise RouterError("no answer")


def _answer(said: bytes, number: int, num_bytes: int) -> bytes | None:
    """None for what answers something else. Raises `RouterError`."""
    if len(said) < HEAD.size:
        return None
    version, kind, result, _ = HEAD.unpack_from(said)
    if version or kind != number + ANSWER:
        return None
    if result:
        raise RouterError(REASONS.get(result, f"result {result}"))
    return said[HEAD.size :] if len(said) == HEAD.size + num_bytes else None
