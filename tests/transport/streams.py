"""Shared by tests of carriers: what stands in for a channel, and identities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnet.identity import Identity
from swarmnet.transport.base import ByteStream

PATIENCE_S = 30.0
"""How long a test waits for what must happen."""


def identity(number: int) -> Identity:
    """The same number gives the same identity."""
    return Identity(number.to_bytes(32, "big"))


class Collector(asyncio.Protocol):
    """Takes over a stream and keeps what arrives."""

    def __init__(self, stream: ByteStream, is_reading: bool = True) -> None:
        self.remote = stream.remote
        self.transport = stream.transport
        self._keep = stream.keep
        self.received = bytearray(stream.leftover)
        self.is_ended = False
        self.is_lost = False
        self.is_full = False
        self._changed = asyncio.Event()
        self.transport.set_protocol(self)
        if is_reading:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._changed.set()

    def eof_received(self) -> bool:
        self.is_ended = True
        self._changed.set()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._changed.set()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def receive(self, num_bytes: int) -> bytes:
        """The next `num_bytes` bytes."""
        await self.until(lambda: len(self.received) >= num_bytes)
        data = bytes(self.received[:num_bytes])
        del self.received[:num_bytes]
        return data

    async def ended(self) -> None:
        """Until the other side has closed or is gone."""
        await self.until(lambda: self.is_ended or self.is_lost)


class Echo(Collector):
    """Sends back what arrives, and ends when the other side ends."""

    def __init__(self, stream: ByteStream) -> None:
        super().__init__(stream)
        if stream.leftover:
            self.transport.write(stream.leftover)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def eof_received(self) -> bool:
        return False
