"""Messages written as fast as a stream takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from swarmnet.simulation.clock import run as run_virtual
from swarmnet.transport.base import Traffic
from swarmnet.transport.calls.outbox import MAX_NOTES, Outbox, Outgoing, Stalled, outgoing
from swarmnet.transport.calls.replies import ReplyRoom
from swarmnet.transport.calls.writer import BATCH_BYTES, Writer
from swarmnet.transport.frames import (
    BACKGROUND_PART_BYTES,
    NOTIFY,
    PART_BYTES,
    REPLY,
    REQUEST,
)
from swarmnet.transport.handlers import Handlers
from swarmnet.transport.pacing import Pacer
from swarmnet.wire import Array


class Stream:
    """A transport that takes everything, and says when it has enough."""

    def __init__(self) -> None:
        self.writes: list[int] = []
        self.buffered_bytes = 0
        self.on_write: Callable[[], None] = lambda: None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.buffered_bytes

    def writelines(self, buffers: list[bytes]) -> None:
        self.writes.append(sum(map(len, buffers)))
        self.on_write()


class World:
    def __init__(self) -> None:
        self.traffic, self.pacer, self.outbox, self.stream = Traffic(), Pacer(), Outbox(), Stream()
        self.replies = ReplyRoom(Handlers())
        self.writer = Writer(
            self.outbox, self.pacer, self.traffic, self.replies, "peer", is_direct=True
        )
        self.writer.begin(cast(Any, self.stream))

    def send(self, message: Outgoing) -> None:
        self.outbox.put(message)
        self.writer.pump()

    def note(self, message: Outgoing) -> None:
        self.outbox.put_note(message)
        self.writer.pump()


def small(kind: int = REPLY, size: int = 0) -> Outgoing:
    return outgoing(kind, 1, {"b": bytes(size)}, (), "small")


def large(size: int) -> Outgoing:
    return outgoing(REQUEST, 1, {}, (Array("uint8", (size,), bytes(size)),), "large")


def play(scenario: Callable[[World], None]) -> None:
    async def main() -> None:
        w = World()
        scenario(w)
        w.pacer.close()

    asyncio.run(main())


def test_what_is_sent_is_written_in_batches_and_counted() -> None:
    def scenario(w: World) -> None:
        w.send(small())
        w.send(large(3 * PART_BYTES))
        assert len(w.stream.writes) == 4  # the head goes with the first part
        assert min(w.stream.writes[1:]) > BATCH_BYTES
        assert w.traffic.direct_sent_bytes == sum(w.stream.writes)
        assert set(w.traffic.sent_bytes) == {"small", "large"}

    play(scenario)


def test_a_full_stream_gets_nothing_until_it_has_room() -> None:
    def scenario(w: World) -> None:
        w.stream.on_write = w.writer.pause
        w.send(large(2 * PART_BYTES))
        assert len(w.stream.writes) == 1
        assert w.writer.queued_bytes == PART_BYTES
        w.stream.on_write = lambda: None
        w.writer.resume()
        assert w.writer.queued_bytes == 0

    play(scenario)


def test_a_peer_that_reads_nothing_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnet.transport.calls.outbox.MAX_SMALL_BYTES", 2000)

    def scenario(w: World) -> None:
        w.writer.pause()
        for _ in range(MAX_NOTES + 9):
            w.note(small(NOTIFY))
        assert w.outbox.dropped_notes == 9
        w.send(small(size=1500))
        with pytest.raises(Stalled):
            w.send(small(size=1500))

    play(scenario)


def test_what_the_cap_does_not_allow_waits_for_its_turn() -> None:
    def scenario(w: World) -> None:
        w.pacer.limit(1000.0)
        w.pacer.sent(1_000_000)
        w.send(large(PART_BYTES))
        w.send(small())
        assert len(w.stream.writes) == 1
        assert set(w.traffic.sent_bytes) == {"small"}
        w.pacer.limit(None)
        assert w.writer.queued_bytes == 0

    play(scenario)


def test_a_message_withdrawn_and_what_waits_at_the_end_are_not_written() -> None:
    def scenario(w: World) -> None:
        w.writer.pause()
        message = large(PART_BYTES)
        w.send(message)
        assert not w.outbox.withdraw(message)
        w.send(large(PART_BYTES))
        w.writer.end()
        w.writer.end()
        w.writer.resume()
        assert w.stream.writes == []
        assert w.writer.queued_bytes == 0

    play(scenario)


def test_the_background_waits_for_room_on_the_uplink_and_counts_for_nobody() -> None:
    """The rate is that of the cap. What it waits behind may be another channel's."""

    async def main() -> None:
        w = World()
        rate = 10.0 * BACKGROUND_PART_BYTES
        w.pacer.limit(rate)
        w.pacer.sent(2 * BACKGROUND_PART_BYTES)
        size = 8 * BACKGROUND_PART_BYTES
        arrays = (Array("uint8", (size,), bytes(size)),)
        w.send(outgoing(REPLY, 1, {}, arrays, "behind", is_background=True))
        assert w.writer.queued_bytes == 0
        assert w.stream.writes == []
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(1.2)
        assert w.traffic.sent_bytes["behind"] > size
        assert not w.outbox.has_background
        assert max(w.stream.writes) < 2 * BACKGROUND_PART_BYTES, "a part a write"
        assert loop.time() > began
        w.pacer.close()

    run_virtual(main())


def test_under_a_cap_a_channel_sends_the_background_beside_its_own_bulk() -> None:
    async def main() -> None:
        w = World()
        w.pacer.limit(10.0 * BACKGROUND_PART_BYTES)
        size = 4 * BACKGROUND_PART_BYTES
        arrays = (Array("uint8", (size,), bytes(size)),)
        w.send(large(40 * PART_BYTES))
        w.send(outgoing(REPLY, 2, {}, arrays, "behind", is_background=True))
        await asyncio.sleep(5.0)
        assert w.writer.queued_bytes > 0
        assert not w.outbox.has_background
        w.pacer.close()

    run_virtual(main())
