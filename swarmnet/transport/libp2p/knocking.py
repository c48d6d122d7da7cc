"""Whether anybody listens at an address, and how far away, before more than that is dialled there.

After a failed dial libp2p's daemon refuses to dial that address again: for 5 s, and for longer with
the square of the number of failures, up to five minutes (go-libp2p, `p2p/net/swarm/swarm_dial.go`).
So whoever looks for a peer that is away would, through the daemon, find it minutes after it is
back. A TCP connection that is closed at once costs one round trip and counts for nothing there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from math import inf

import swarmnet.system as system
from swarmnet.protocol.timing import CONNECT_S

MAX_PORT = 65_535
HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
TRIES = 3
"""Knocks of which the shortest counts: this process is late for some of the answers."""


class Heard(Enum):
    """What who knocks hears; the value says it to a person."""

    OPEN = "something listens there"
    CLOSED = "connection refused: nothing listens there"
    SILENT = "no answer in time"
    NO_WAY = "no way leads there from here"
    NO_NAME = "the name does not resolve"

    @property
    def is_there(self) -> bool:
        """A machine has answered."""
        return self in (Heard.OPEN, Heard.CLOSED)


@dataclass(frozen=True, slots=True)
class Answer:
    """To one knock."""

    heard: Heard
    round_trip_s: float = inf
    """To a port that is open, as the kernel says it, or where that does not, as long as the
    connection took to stand."""


def tcp_target(address: str) -> tuple[str, int] | None:
    """Host and port of a plain TCP multiaddress; None for any other kind."""
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[1] not in HOSTS or parts[3] != "tcp":
        return None
    port = int(parts[4]) if parts[4].isdecimal() and len(parts[4]) <= 5 else MAX_PORT + 1
    return (parts[2], port) if port <= MAX_PORT else None


async def knock(addresses: Sequence[str]) -> Heard:
    """`OPEN` where one of them answers, or is of a kind that cannot be asked this way; else what is
    heard from the first."""
    targets = [tcp_target(address) for address in addresses]
    known = [target for target in targets if target is not None]
    if not targets or len(known) < len(targets):
        return Heard.OPEN
    tasks = [asyncio.get_running_loop().create_task(knock_at(*target)) for target in known]
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result().heard is Heard.OPEN for task in done):
                return Heard.OPEN
        return tasks[0].result().heard
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def knock_at(host: str, port: int) -> Answer:
    """At an IP address or a name, for `CONNECT_S` at most."""
    loop = asyncio.get_running_loop()
    heard = Heard.SILENT
    try:
        async with asyncio.timeout(CONNECT_S):
            try:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                return Answer(Heard.NO_NAME)
            for family, kind, number, _, address in found:
                began = loop.time()
                try:
                    with closing(socket.socket(family, kind, number)) as sock:
                        sock.setblocking(False)
                        await loop.sock_connect(sock, address)
                        said = system.round_trip_s(sock)
                        return Answer(Heard.OPEN, loop.time() - began if said is None else said)
                except OSError as e:
                    heard = _heard(e)
    except TimeoutError:
        return Answer(Heard.SILENT)
    return Answer(heard)


async def round_trip_to(host: str, port: int) -> float:
    """The shortest of `TRIES`; infinite where nothing listens there."""
    shortest_s = inf
    for _ in range(TRIES):
        answer = await knock_at(host, port)
        if answer.heard is not Heard.OPEN:
            break
        shortest_s = min(shortest_s, answer.round_trip_s)
    return shortest_s


def _heard(error: OSError) -> Heard:
    if isinstance(error, ConnectionRefusedError):
        return Heard.CLOSED
    return Heard.SILENT if isinstance(error, TimeoutError) else Heard.NO_WAY
