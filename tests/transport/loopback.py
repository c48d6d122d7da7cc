"""A carrier within one process: each stream is a pair of connected sockets.

Unlike `transport.memory` it carries bytes: everything above it (frames, channels, calls) is the
real thing. What it cannot do is authenticate: a peer is who it says it is.

`run` runs such peers in virtual time: what one end writes the other can read at once, so that
time has to pass only when no socket has anything to say. A machine that stands still for a second
changes nothing.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarmnet.errors import AddressError, Unreachable
from swarmnet.transport.base import PROTOCOL_NAME, ByteStream

TICK_S = 1e-9
"""The clock moves by so much whenever it is read: asyncio keeps no order of timers that are due at
the same instant."""


class LoopbackLoop(asyncio.SelectorEventLoop):
    """The selector loop with a clock that starts at 0 and jumps to the next timer when no socket
    is ready. While something runs on a thread the clock stands."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_on_threads = 0
        super().__init__(Jumping(self))

    def time(self) -> float:
        self.now += TICK_S
        return self.now

    def run_in_executor(self, *args: Any) -> Any:  # type: ignore[override]
        future = super().run_in_executor(*args)
        self.num_on_threads += 1
        future.add_done_callback(self._done_on_thread)
        return future

    def _done_on_thread(self, _: object) -> None:
        self.num_on_threads -= 1


class Jumping(selectors.DefaultSelector):
    """Sets its loop's clock forward where it would wait."""

    def __init__(self, loop: LoopbackLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout is None or self._loop.num_on_threads:
            return ready or super().select(timeout)
        self._loop.now += max(timeout, 0.0)
        return ready


def run(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=LoopbackLoop) as runner:
        runner.run(main)


class LoopbackHub:
    """Where the carriers of one process find each other."""

    def __init__(self) -> None:
        self.carriers: dict[str, LoopbackCarrier] = {}
        self.apart: set[frozenset[str]] = set()
        """Pairs of which neither can dial the other."""

    def carrier(self, peer_id: str) -> LoopbackCarrier:
        """A new one; reachable once it is started."""
        return LoopbackCarrier(self, peer_id)


class LoopbackCarrier:
    """A `transport.base.Carrier`."""

    def __init__(self, hub: LoopbackHub, peer_id: str) -> None:
        self.peer_id = peer_id
        self.opened = 0
        """Streams that this side asked for."""
        self.hub = hub
        self.transports: list[asyncio.Transport] = []
        """This side's ends of the streams; some may have closed."""
        self._accept: Callable[[ByteStream], None] | None = None

    async def start(self, accept: Callable[[ByteStream], None]) -> None:
        self._accept = accept
        self.hub.carriers[self.peer_id] = self

    def addresses(self) -> list[str]:
        return [f"/loopback/p2p/{self.peer_id}"]

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        pass

    def forget(self, peer_id: str) -> None:
        pass

    async def connect(self, address: str) -> str:
        peer_id = address.rpartition("/p2p/")[2]
        if "/p2p/" not in address or not peer_id:
            raise AddressError(f"{address[:200]} does not end in /p2p/<peer id>")
        self._find(peer_id)
        return peer_id

    async def open(self, peer_id: str, protocol: str = PROTOCOL_NAME) -> ByteStream:
        self.opened += 1
        if frozenset((self.peer_id, peer_id)) in self.hub.apart:
            raise Unreachable(f"{peer_id[-8:]}: no answer in time")
        remote = self._find(peer_id)
        near, far = socket.socketpair()
        stream = ByteStream(peer_id, await self.wrap(near))
        remote.accept(ByteStream(self.peer_id, await remote.wrap(far), protocol=protocol))
        return stream

    async def drop(self, peer_id: str) -> None:
        pass

    async def observed(self, peer_id: str) -> str:
        return f"/loopback/p2p/{peer_id}"

    async def close(self) -> None:
        if self.hub.carriers.get(self.peer_id) is self:
            del self.hub.carriers[self.peer_id]
        for transport in self.transports:
            transport.abort()
        self.transports.clear()

    async def raw(self, peer_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The near end of a stream as reader and writer: for peers that do not keep to the
        protocol."""
        near, far = socket.socketpair()
        remote = self._find(peer_id)
        remote.accept(ByteStream(self.peer_id, await remote.wrap(far)))
        return await asyncio.open_connection(sock=near)

    def accept(self, stream: ByteStream) -> None:
        """A stream from another peer."""
        assert self._accept is not None
        self._accept(stream)

    def _find(self, peer_id: str) -> LoopbackCarrier:
        remote = self.hub.carriers.get(peer_id)
        if remote is None:
            raise Unreachable(f"{peer_id[-8:]}: connection refused: nothing listens there")
        return remote

    async def wrap(self, end: socket.socket) -> asyncio.Transport:
        """This side's end of a stream: the asyncio transport of a socket, reading paused."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=end)
        transport.pause_reading()
        self.transports = [t for t in self.transports if not t.is_closing()]
        self.transports.append(transport)
        return transport
