"""What peers that have not been let in can make this one hold: a few MiB, all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest

from swarmnet.errors import Busy, DeadlineExceeded, Refused
from swarmnet.transport import open_channels
from swarmnet.transport.base import Envelope, Request
from swarmnet.transport.calls import channel, replies, writer
from swarmnet.transport.calls.holdings import CALL_BYTES, STRANGER_BYTES, STRANGERS_BYTES
from swarmnet.transport.calls.replies import SMALL_UNREAD_BYTES, STRANGERS_UNREAD_BYTES
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.frames import (
    END,
    HEADER,
    HELLO,
    NOTIFY,
    PART_BYTES,
    REPLY,
    REQUEST,
    REQUEST_PART,
    frame_header,
    head_frame,
    part_frames,
)
from swarmnet.wire import Array, Message, convert
from tests.transport.streams import identity
from tests.transport.test_channel import BadPeer, call, carrier_of, peers, play

MIB = 1 << 20
NUM_PEERS, STREAMS_EACH = 12, 4


def announced(call_id: int, num_bytes: int, method: str = "take") -> bytes:
    """The head of a request whose arrays do not come."""
    packed = msgpack.packb({"m": method, "b": None, "a": [["uint8", [num_bytes]]]})
    return frame_header(REQUEST, call_id, packed) + packed


class Gate:
    """Lets in who is named; all others may make the calls that `refused` does not name."""

    def __init__(self, *members: str, refused: tuple[str, ...] = ()) -> None:
        self.members, self.refused = set(members), refused
        self.decoded = 0

    def knows(self, method: str) -> bool:
        return method != "unknown"

    def has_standing(self, machine: str) -> bool:
        return machine in self.members

    def check(self, envelope: Envelope) -> None:
        if envelope.method in self.refused and not self.has_standing(envelope.remote):
            raise Refused("not you")

    def enter(self, envelope: Envelope, body: Any) -> Any:
        self.check(envelope)
        self.decoded += 1
        return None


class Attack:
    """Many peers with several streams each, and the one that they attack."""

    def __init__(self, victim: ChannelTransport, innocent: ChannelTransport, gate: Gate) -> None:
        self.victim, self.innocent, self.gate = victim, innocent, gate
        self.streams: list[BadPeer] = []
        self.heard: list[int] = []
        self.num_given = 0

    async def open(self, num_peers: int = NUM_PEERS, each: int = STREAMS_EACH) -> None:
        hub = carrier_of(self.victim).hub
        for n in range(num_peers):
            for _ in range(each):
                bad = BadPeer(hub.carrier(identity(100 + n).peer_id), self.victim)
                await bad.connect()
                self.streams.append(bad)

    async def send(self, data: bytes) -> None:
        """The same from each stream; returns when the victim has read what it reads."""
        for bad in self.streams:
            bad.writer.write(data)
            with contextlib.suppress(ConnectionError):
                await bad.writer.drain()
        for _ in range(50):
            await asyncio.sleep(0.001)

    @property
    def strangers_bytes(self) -> int:
        return self.victim.channels.holdings.strangers_bytes

    @property
    def unread_bytes(self) -> int:
        return self.victim.channels.replies.strangers_bytes

    @property
    def num_open(self) -> int:
        """Channels of attackers that stand."""
        names = {bad.peer_id for bad in self.streams}
        return sum(c.remote in names for c in self.victim.channels.all())


@contextlib.asynccontextmanager
async def attack(*refused: str) -> AsyncIterator[Attack]:
    async with peers() as (victim, innocent):
        gate = Gate(innocent.peer_id, refused=refused)
        victim.guard(gate)
        made = Attack(victim, innocent, gate)
        never = asyncio.Event()

        async def take(request: Request) -> Message:
            made.heard.append(sum(a.num_bytes for a in request.message.arrays))
            return Message()

        async def wait(request: Request) -> Message:
            await never.wait()
            return Message()

        async def give(request: Request) -> Message:
            made.num_given += 1
            return Message(None, (Array("uint8", (MIB,), bytes(MIB)),))

        async def give_much(request: Request) -> Message:
            return Message(None, (Array("uint8", (4 * MIB,), bytes(4 * MIB)),))

        victim.handle("take", take)
        victim.handle("give", give)
        victim.handle("give_much", give_much)
        victim.handle("wait", wait)
        await call(innocent, victim)
        yield made
        await call(innocent, victim, Array("uint8", (8 * MIB,), bytes(8 * MIB)))
        for bad in made.streams:
            bad.close()
        for _ in range(20):
            await asyncio.sleep(0.001)
        running = sum(victim.handlers.num_running(bad.peer_id) for bad in made.streams)
        assert bool(made.strangers_bytes) == bool(running), "all is given back"


def test_arrays_that_never_come_take_a_few_mib_whoever_announces_them() -> None:
    async def scenario() -> None:
        async with attack() as a:
            await a.open()
            tracemalloc.start()
            data = b"".join(announced(n, 4 * MIB) for n in range(1, 40))
            await a.send(data + announced(50, 1 << 30))
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert 0 < a.strangers_bytes <= STRANGERS_BYTES
            assert held < STRANGERS_BYTES + 4 * MIB
            assert a.num_open == len(a.streams), "they did nothing that is forbidden"

    play(scenario())


def test_more_messages_begun_than_anyone_sends_cost_the_stream() -> None:
    async def scenario() -> None:
        async with attack() as a:
            await a.open(1, 1)
            await a.send(b"".join(announced(n, 10) for n in range(1, 200)))
            assert a.num_open == 0
            assert a.strangers_bytes == 0

    play(scenario())


def test_arrays_of_who_may_not_send_them_are_read_past_and_none_is_kept() -> None:
    async def scenario() -> None:
        async with attack("take") as a:
            await a.open(2, 2)
            part = frame_header(REQUEST_PART, 1, b"", bytes(PART_BYTES)) + bytes(PART_BYTES)
            await a.send(announced(1, 64 * MIB) + part)
            assert a.strangers_bytes == 0
            assert a.num_open == len(a.streams)
            whole = (Array("uint8", (1000,), bytes(1000)),)
            asked = head_frame(REQUEST, 2, {"m": "take", "b": None}, whole)
            await a.send(asked + b"".join(part_frames(REQUEST_PART, 2, whole)))
            assert (a.heard, a.gate.decoded) == ([], 1), "of the innocent peer's call"

    play(scenario())


def test_what_a_stranger_sends_whole_is_served() -> None:
    async def scenario() -> None:
        async with attack() as a:
            await a.open(1, 1)
            whole = (Array("uint8", (4 * MIB,), bytes(4 * MIB)),)
            asked = head_frame(REQUEST, 1, {"m": "take", "b": None}, whole)
            await a.send(asked + b"".join(part_frames(REQUEST_PART, 1, whole)))
            assert a.heard == [4 * MIB]
            assert a.strangers_bytes == 0

    play(scenario())


def test_heads_that_never_come_take_a_few_mib_or_cost_the_stream() -> None:
    async def scenario() -> None:
        async with attack() as a:
            await a.open()
            await a.send(frame_header(NOTIFY | END, 0, bytes(4 * MIB))[: HEADER.size] + b"\x00" * 9)
            assert 0 < a.strangers_bytes <= STRANGERS_BYTES
            assert a.num_open <= STRANGERS_BYTES // (4 * MIB)

    play(scenario())


def test_nothing_is_held_before_the_hello_nor_of_a_long_one() -> None:
    async def scenario() -> None:
        async with attack() as a:
            hub = carrier_of(a.victim).hub
            for n, kind in enumerate((REQUEST, REPLY, HELLO)):
                bad = BadPeer(hub.carrier(identity(100 + n).peer_id), a.victim)
                await bad.connect(frame_header(kind | END, 1, bytes(MIB))[: HEADER.size])
                a.streams.append(bad)
            await a.send(b"")
            assert a.num_open == 0
            assert a.strangers_bytes == 0

    play(scenario())


def test_calls_that_are_not_answered_take_a_few_mib() -> None:
    """In an open run a peer without a record may call, and its calls may have to wait."""

    async def scenario() -> None:
        async with attack() as a:
            await a.open()
            body = bytes(100_000)
            data = b"".join(head_frame(REQUEST, n, {"m": "wait", "b": body}) for n in range(1, 30))
            await a.send(data)
            num = sum(a.victim.handlers.num_running(bad.peer_id) for bad in a.streams)
            assert num > 0
            assert a.strangers_bytes <= STRANGERS_BYTES

    play(scenario())


def test_many_small_calls_that_are_not_answered_are_bounded_too() -> None:
    async def scenario() -> None:
        async with attack() as a:
            await a.open(4, 1)
            data = b"".join(head_frame(REQUEST, n, {"m": "wait"}) for n in range(1, 3000))
            await a.send(data)
            for bad in a.streams:
                num = a.victim.handlers.num_running(bad.peer_id)
                assert num <= STRANGER_BYTES // CALL_BYTES

    play(scenario())


def test_a_body_of_nested_lists_is_not_built_before_the_caller_is_checked() -> None:
    """4 MiB of them are 350 MiB of objects."""

    async def scenario() -> None:
        async with attack("take") as a:
            await a.open(1, 1)
            packed = b"\x82\xa1m\xa4take\xa1b\xdd\x00\x3f\x00\x00" + b"\x90" * 0x3F0000
            tracemalloc.start()
            await a.send(frame_header(REQUEST | END, 1, packed) + packed)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert a.gate.decoded == 1, "the innocent peer's call"
            assert peak < 24 * MIB
            assert a.num_open == 1

    play(scenario())


def test_what_does_not_come_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LEASE_S", 0.05)

    async def scenario() -> None:
        async with attack() as a:
            await a.open(1, 2)
            late, stuck = a.streams
            late.writer.write(announced(1, 3 * MIB))
            stuck.writer.write(frame_header(NOTIFY | END, 0, bytes(MIB))[: HEADER.size])
            await a.send(b"")
            for n in range(30):  # it is heard of all the time
                late.writer.write(head_frame(REQUEST, 2 + n, {"m": "take", "b": n}))
                await asyncio.sleep(0.01)
            assert a.strangers_bytes == 0
            assert a.num_open == 1, "of a head nothing can be read past"

    play(scenario())


def test_a_member_that_goes_on_sending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LEASE_S", 0.05)

    async def scenario() -> None:
        async with attack() as a:
            await a.open(1, 1)
            (slow,) = a.streams
            a.gate.members.add(slow.peer_id)
            whole = (Array("uint8", (2 * PART_BYTES,), bytes(2 * PART_BYTES)),)
            slow.writer.write(head_frame(REQUEST, 1, {"m": "take", "b": None}, whole))
            data = b"".join(part_frames(REQUEST_PART, 1, whole))
            for start in range(0, len(data), len(data) // 20):
                slow.writer.write(data[start : start + len(data) // 20])
                await asyncio.sleep(0.02)
            assert a.heard == [2 * PART_BYTES]
            slow.writer.write(announced(2, 3 * MIB))
            for _ in range(20):  # and now it is silent
                await asyncio.sleep(0.01)
            assert a.victim.channels.holdings.held_by(slow.peer_id) == 0

    play(scenario())


def test_a_reply_that_nobody_waits_for_any_more_takes_nothing() -> None:
    async def scenario() -> None:
        async with attack() as a:
            await a.open(1, 1)
            (bad,) = a.streams
            await a.send(b"")
            calling = asyncio.create_task(
                a.victim.call(bad.peer_id, "gossip", Message(), timeout_s=0.2)
            )
            await asyncio.sleep(0.05)
            packed = msgpack.packb({"b": None, "a": [["uint8", [4 * MIB]]]})
            bad.writer.write(frame_header(REPLY, 1, packed) + packed)
            await asyncio.sleep(0.05)
            assert a.strangers_bytes > 4 * MIB
            with pytest.raises(DeadlineExceeded):
                await calling
            assert a.strangers_bytes == 0

    play(scenario())


def test_a_reply_larger_than_a_stranger_may_send_fails_the_call() -> None:
    async def scenario() -> None:
        async with attack() as a:
            await a.open(1, 1)
            (bad,) = a.streams
            await a.send(b"")
            calling = asyncio.create_task(
                a.victim.call(bad.peer_id, "gossip", Message(), timeout_s=5.0)
            )
            await asyncio.sleep(0.05)
            packed = msgpack.packb({"b": None, "a": [["uint8", [1 << 30]]]})
            bad.writer.write(frame_header(REPLY, 1, packed) + packed)
            with pytest.raises(Busy):
                await calling
            assert a.strangers_bytes == 0

    play(scenario())


def test_replies_that_are_not_read_take_a_few_mib_whoever_asks() -> None:
    async def scenario() -> None:
        async with attack() as a:
            await a.open()
            tracemalloc.start()
            asked = b"".join(head_frame(REQUEST, n, {"m": "give"}) for n in range(1, 40))
            await a.send(asked)
            for _ in range(100):
                await asyncio.sleep(0.002)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            streams = NUM_PEERS * STREAMS_EACH
            most = STRANGERS_UNREAD_BYTES + streams * SMALL_UNREAD_BYTES
            assert 16 * MIB < a.unread_bytes <= most
            assert held < STRANGERS_UNREAD_BYTES + 16 * MIB, "the readers' buffers are counted too"
            assert a.num_given < 39 * streams // 4, "most was refused before it was made"
            assert a.victim.traffic.queued_bytes() == 0, "and the uplink is free"

    play(scenario())


def test_one_that_reads_gets_its_reply_while_others_fill_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "GIVES_WAY_AFTER_S", 0.05)

    async def scenario() -> None:
        async with attack() as a:
            await a.open()
            await a.send(b"".join(head_frame(REQUEST, n, {"m": "give"}) for n in range(1, 40)))
            assert a.unread_bytes > STRANGERS_UNREAD_BYTES - 4 * MIB
            await asyncio.sleep(0.1)
            hub = carrier_of(a.victim).hub
            reader = ChannelTransport(hub.carrier(identity(99).peer_id))
            await reader.start()
            for _ in range(5):
                got = await reader.call(a.victim.peer_id, "give_much", Message(), timeout_s=5.0)
                assert got.arrays[0].num_bytes == 4 * MIB
            await reader.close()

    play(scenario())


def test_a_stranger_that_reads_nothing_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "UNREAD_BY_STRANGER_S", 0.05)

    async def scenario() -> None:
        async with attack() as a:
            await a.open(3, 1)
            await a.send(b"".join(head_frame(REQUEST, n, {"m": "give"}) for n in range(1, 9)))
            await asyncio.sleep(0.2)
            assert a.num_open == 0
            assert a.unread_bytes == 0

    play(scenario())


def test_a_member_that_reads_nothing_loses_its_stream_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "UNREAD_BY_STRANGER_S", 0.05)
    monkeypatch.setattr(writer, "UNREAD_S", 0.5)

    async def scenario() -> None:
        async with attack() as a:
            await a.open(1, 1)
            (bad,) = a.streams
            a.gate.members.add(bad.peer_id)
            await a.send(b"".join(head_frame(REQUEST, n, {"m": "give"}) for n in range(1, 9)))
            await asyncio.sleep(0.2)
            assert (a.num_open, a.num_given) == (1, 8)
            await bad.reader.read(MIB)  # it reads a little
            await asyncio.sleep(0.6)
            assert a.num_open == 0

    play(scenario())


def test_errors_that_are_not_read_cost_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "STRANGER_BYTES", 64 << 10)

    async def scenario() -> None:
        async with attack("take") as a:
            await a.open(1, 1)
            for n in range(40):
                first = 1 + 500 * n
                asked = [head_frame(REQUEST, first + k, {"m": "take"}) for k in range(500)]
                await a.send(b"".join(asked))
                if not a.num_open:
                    break
            assert (a.num_open, a.unread_bytes) == (0, 0)

    play(scenario())


def test_channels_of_strangers_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_channels, "MAX_STRANGERS_CHANNELS", 6)

    async def scenario() -> None:
        async with attack() as a:
            await a.open(12, 1)
            await a.send(b"")
            assert a.num_open <= 6
            newest = {bad.peer_id for bad in a.streams[-4:]}
            assert newest <= {c.remote for c in a.victim.channels.all()}

    play(scenario())


def test_a_method_of_which_it_is_not_said_who_may_call_it_cannot_be_served() -> None:
    async def scenario() -> None:
        async with peers() as (one, other):
            one.guard(Gate())

            async def answer(request: Request) -> Message:
                return Message()

            with pytest.raises(ValueError, match="who may call unknown"):
                one.handle("unknown", answer)
            other.handle("unknown", answer)
            with pytest.raises(ValueError, match="who may call unknown"):
                other.guard(Gate())

    play(scenario())


def test_a_gate_hands_the_body_over_decoded() -> None:
    class Decoding(Gate):
        def enter(self, envelope: Envelope, body: Any) -> Any:
            return convert(body, list)

    async def scenario() -> None:
        async with peers() as (one, other):
            other.guard(Decoding())
            assert (await call(one, other, body=[1, 2])).body == [1, 2]
            with pytest.raises(Refused):
                await call(one, other, body={"a": 1})

    play(scenario())
