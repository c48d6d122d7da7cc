"""When a call is given up: replies that come slowly, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swarmnet.errors import DeadlineExceeded
from swarmnet.simulation.clock import run
from swarmnet.transport.base import ByteStream
from swarmnet.transport.calls.hello import hello_head, offer
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.frames import (
    HELLO,
    PART_BYTES,
    REPLY,
    REPLY_PART,
    head_frame,
    part_frames,
)
from swarmnet.wire import Array, Message
from tests.transport.loopback import LoopbackCarrier, LoopbackHub

TIMEOUT_S = 10.0
NUM_PARTS = 5
ARRAYS = (Array("uint8", (NUM_PARTS * PART_BYTES,), bytes(NUM_PARTS * PART_BYTES)),)


class Silent(asyncio.Transport):
    """A stream that takes everything."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass

    def write(self, data: Any) -> None:
        pass

    def writelines(self, list_of_data: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


class Carrier(LoopbackCarrier):
    """Opens streams to a peer that has said hello."""

    async def open(self, peer_id: str, protocol: str = "") -> ByteStream:
        return ByteStream(peer_id, Silent(), head_frame(HELLO, 0, hello_head(offer(), "", "")))


def feed(transport: ChannelTransport, data: bytes) -> None:
    """What the peer sends."""
    (channel,) = transport.channels.all()
    while data:
        buffer = channel.get_buffer(-1)
        num_bytes = min(len(buffer), len(data))
        buffer[:num_bytes] = data[:num_bytes]
        channel.buffer_updated(num_bytes)
        data = data[num_bytes:]


def play(scenario: Callable[[ChannelTransport, asyncio.Task[Message]], Any]) -> None:
    """With a call whose reply has begun to come."""

    async def main() -> None:
        transport = ChannelTransport(Carrier(LoopbackHub(), "own"))
        call = asyncio.create_task(transport.call("peer", "fetch", Message(), timeout_s=TIMEOUT_S))
        await asyncio.sleep(TIMEOUT_S * 0.75)
        feed(transport, head_frame(REPLY, 1, {"b": "shard"}, ARRAYS))
        await scenario(transport, call)
        await transport.close()

    run(main())


def parts() -> Iterator[bytes]:
    return map(bytes, part_frames(REPLY_PART, 1, ARRAYS))


def test_a_reply_whose_parts_keep_coming_is_waited_for() -> None:
    async def scenario(transport: ChannelTransport, call: asyncio.Task[Message]) -> None:
        feed(transport, next(coming := parts()))
        for part in coming:
            await asyncio.sleep(TIMEOUT_S * 0.75)
            feed(transport, part)
        assert (await call).body == "shard"

    play(scenario)


def test_a_reply_of_which_no_more_parts_come_is_not() -> None:
    async def scenario(transport: ChannelTransport, call: asyncio.Task[Message]) -> None:
        feed(transport, next(parts()))
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await call
        assert asyncio.get_running_loop().time() - began == pytest.approx(TIMEOUT_S)

    play(scenario)


def test_a_reply_that_trickles_keeps_nobody_waiting() -> None:
    async def scenario(transport: ChannelTransport, call: asyncio.Task[Message]) -> None:
        byte = Array("uint8", (1,), b"x")
        for _ in range(20):
            feed(transport, bytes(next(part_frames(REPLY_PART, 1, (byte, byte)))))
            await asyncio.sleep(TIMEOUT_S / 20)
        assert call.done()
        with pytest.raises(DeadlineExceeded):
            await call

    play(scenario)
