"""Channels over socket pairs: what goes first, what is bounded, and what a bad peer costs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import uvloop

from swarmnet.errors import (
    Busy,
    ChannelClosed,
    DeadlineExceeded,
    NotReady,
    Unreachable,
    WrongVersion,
)
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.simulation.clock import run as run_in_virtual_time
from swarmnet.transport import open_channels
from swarmnet.transport.base import PROTOCOL_VERSIONS, ByteStream, Request
from swarmnet.transport.calls import channel, holdings, served, writer
from swarmnet.transport.calls.channel import PARTING_S
from swarmnet.transport.calls.hello import hello_head, offer
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.frames import (
    CANCEL,
    END,
    ERROR,
    HELLO,
    NOTIFY,
    PART_BYTES,
    PROGRESS,
    REPLY,
    REPLY_PART,
    REQUEST,
    REQUEST_PART,
    head_frame,
    part_frames,
)
from swarmnet.wire import Array, Message
from tests.transport.loopback import LoopbackCarrier, LoopbackHub, run
from tests.transport.streams import PATIENCE_S, identity
from tests.transport.test_frames import raw_frame, read

LOG = "swarmnet.transport"
LOWEST, HIGHEST = PROTOCOL_VERSIONS
HELLO_FRAME = head_frame(HELLO, 0, hello_head(offer(), "", ""))
OLD_HELLO = head_frame(HELLO, 0, {"v": 1, "r": "", "g": "swarmnet/0.1.0"})
"""The hello of swarmnet 0.1."""
LARGE = 24 << 20


async def echo(request: Request) -> Message:
    return request.message


def array(num_bytes: int) -> Array:
    return Array("uint8", (num_bytes,), bytes(num_bytes))


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await scenario

    run(main())


@contextlib.asynccontextmanager
async def peers(num: int = 2) -> AsyncIterator[list[ChannelTransport]]:
    hub = LoopbackHub()
    made = [ChannelTransport(hub.carrier(identity(n).peer_id)) for n in range(1, num + 1)]
    try:
        for one in made:
            one.handle("echo", echo)
            await one.start()
        yield made
    finally:
        for one in made:
            await one.close()


def carrier_of(transport: ChannelTransport) -> LoopbackCarrier:
    assert isinstance(transport.carrier, LoopbackCarrier)
    return transport.carrier


async def call(a: ChannelTransport, b: ChannelTransport, *arrays: Array, **kw: Any) -> Message:
    kw = {"timeout_s": PATIENCE_S, **kw}
    return await a.call(b.peer_id, "echo", Message(kw.pop("body", None), arrays), **kw)


class BadPeer:
    """A peer that writes what it likes."""

    def __init__(self, carrier: LoopbackCarrier, victim: ChannelTransport) -> None:
        self.peer_id = carrier.peer_id
        self._carrier = carrier
        self._victim = victim

    async def connect(self, hello: bytes = HELLO_FRAME) -> None:
        self.reader, self.writer = await self._carrier.raw(self._victim.peer_id)
        self.writer.write(hello)

    async def closed(self) -> bytes:
        """What the victim wrote until it closed the stream."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""

    def close(self) -> None:
        self.writer.close()


async def until_written(bad: BadPeer, answer: bytes) -> None:
    """Reads until the victim has written this."""
    seen = b""
    while answer not in seen:
        data = await bad.reader.read(4096)
        assert data
        seen += data


@contextlib.asynccontextmanager
async def bad_peer() -> AsyncIterator[tuple[BadPeer, ChannelTransport, ChannelTransport]]:
    """A bad peer, its victim, and an innocent one."""
    async with peers() as (victim, innocent):
        hub = carrier_of(victim).hub
        bad = BadPeer(hub.carrier(identity(66).peer_id), victim)
        await bad.connect()
        await call(innocent, victim)
        yield bad, victim, innocent
        assert (await call(innocent, victim, body="fine")).body == "fine"
        bad.close()


# ---- order and bounds -------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_small_message_never_waits_behind_a_tensor(loop: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), peers() as (a, b):
            await call(a, b)
            finished: list[str] = []

            async def one(name: str, *arrays: Array) -> None:
                await call(a, b, *arrays)
                finished.append(name)

            large = [asyncio.create_task(one("large", array(LARGE))) for _ in range(3)]
            await asyncio.sleep(0)
            for number in range(5):
                await one(f"gossip {number}")
            assert finished == [f"gossip {n}" for n in range(5)]
            await asyncio.gather(*large)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_a_medium_message_does_not_wait_for_the_end_of_a_large_one() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):
            large = asyncio.create_task(call(a, b, array(LARGE)))
            await asyncio.sleep(0)
            await call(a, b, array(2 * PART_BYTES))
            assert not large.done()
            assert len((await large).arrays[0].data) == LARGE

    play(scenario())


def test_the_stream_is_not_filled_beyond_what_it_takes() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):
            await call(a, b)
            (out,) = carrier_of(a).transports
            (into,) = carrier_of(b).transports
            into.pause_reading()
            sending = asyncio.create_task(call(a, b, array(LARGE)))
            await asyncio.sleep(0)
            waiting_bytes = out.get_write_buffer_size()
            assert waiting_bytes < writer.WRITE_BUFFER_BYTES + 2 * PART_BYTES
            into.resume_reading()
            await sending

    play(scenario())


def test_a_peer_that_reads_nothing_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnet.transport.calls.outbox.MAX_SMALL_BYTES", 200_000)

    async def scenario() -> None:
        async with peers() as (a, b):
            await call(a, b)
            (into,) = carrier_of(b).transports
            into.pause_reading()
            for _ in range(10_000):
                a.notify(b.peer_id, "x", Message(bytes(1000)))
            assert a.traffic.sent_bytes["x"] < 5_000_000  # and of what waits most is dropped
            assert a.connected() == [b.peer_id]
            waiting = [asyncio.create_task(call(a, b, body=bytes(10_000))) for _ in range(300)]
            done, _ = await asyncio.wait(waiting)
            assert {type(t.exception()) for t in done} == {ChannelClosed}
            assert "does not read" in str(waiting[0].exception())

    play(scenario())


def test_more_open_calls_than_allowed_are_answered_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MAX_OPEN_CALLS", 3)

    async def scenario() -> None:
        async with peers() as (a, b):
            entered = asyncio.Semaphore(0)
            go = asyncio.Event()

            async def slow(request: Request) -> Message:
                entered.release()
                await go.wait()
                return Message()

            b.handle("slow", slow)
            open_calls = [
                asyncio.create_task(a.call(b.peer_id, "slow", Message(), timeout_s=PATIENCE_S))
                for _ in range(3)
            ]
            for _ in range(3):
                await entered.acquire()
            with pytest.raises(Busy) as caught:
                await call(a, b)
            assert caught.value.backlog_s == FIRST_PAUSE_S
            go.set()
            await asyncio.gather(*open_calls)
            await call(a, b)

    play(scenario())


def test_more_bytes_being_served_than_allowed_are_answered_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holdings, "MEMBER_BYTES", holdings.CALL_BYTES + 1000)

    async def scenario() -> None:
        async with peers() as (a, b):
            entered, go = asyncio.Event(), asyncio.Event()

            async def slow(request: Request) -> Message:
                entered.set()
                await go.wait()
                return Message()

            b.handle("slow", slow)
            message = Message(None, (array(900),))
            first = asyncio.create_task(a.call(b.peer_id, "slow", message, timeout_s=PATIENCE_S))
            await entered.wait()
            with pytest.raises(Busy):
                await call(a, b, array(200))
            go.set()
            await first
            await call(a, b, array(2000))  # alone, any size that the protocol allows

    play(scenario())


# ---- giving up --------------------------------------------------------------------------------


def test_a_request_given_up_half_sent_is_forgotten_and_the_channel_lives() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):
            await call(a, b)
            served = []

            async def serve(request: Request) -> Message:
                served.append(request)
                return Message()

            b.handle("serve", serve)
            (into,) = carrier_of(b).transports
            into.pause_reading()
            data = bytearray(LARGE)
            message = Message(None, (Array("uint8", (LARGE,), data),))
            with pytest.raises(DeadlineExceeded):
                await a.call(b.peer_id, "serve", message, timeout_s=0.05)
            data[:] = b"\xff" * LARGE  # the caller's memory is its own again
            into.resume_reading()
            assert (await call(a, b, body=1)).body == 1
            assert served == []
            assert a.channels.all()[0].is_open

    play(scenario())


def test_a_request_that_is_refused_half_sent_is_sent_no_further() -> None:
    async def scenario() -> None:
        async with bad_peer() as (bad, victim, _):
            message = Message(None, (array(LARGE),))
            calling = asyncio.create_task(
                victim.call(bad.peer_id, "m", message, timeout_s=PATIENCE_S)
            )
            await until_written(bad, b"\xa1m\xa1m")  # its head; the stream takes little more
            bad.writer.write(head_frame(ERROR, 1, {"e": ["not_ready", "no", {}]}))
            with pytest.raises(NotReady):
                await calling
            assert victim.traffic.queued_to(bad.peer_id) < LARGE // 2
            await until_written(bad, head_frame(CANCEL, 1, {}))

    play(scenario())


def test_a_reply_to_a_call_given_up_is_not_sent() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):
            entered, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def slow(request: Request) -> Message:
                entered.set()
                await go.wait()
                done.set()
                return Message(None, (array(LARGE),))

            b.handle("slow", slow)
            task = asyncio.create_task(a.call(b.peer_id, "slow", Message(), timeout_s=PATIENCE_S))
            await entered.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await call(a, b)  # the cancellation is there before this
            go.set()
            await done.wait()
            await call(a, b)
            assert b.traffic.sent_bytes.get("slow", 0) == 0

    play(scenario())


def test_a_reply_that_waits_for_others_is_not_sent_to_a_call_given_up() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):
            await call(a, b)
            asked, noted = asyncio.Semaphore(0), asyncio.Event()

            async def large(request: Request) -> Message:
                asked.release()
                return Message(None, (array(LARGE),))

            async def note(request: Request) -> Message:
                noted.set()
                return Message()

            b.handle("large", large)
            b.handle("note", note)
            (into,) = carrier_of(a).transports
            into.pause_reading()
            tasks = [
                asyncio.create_task(a.call(b.peer_id, "large", Message(), timeout_s=PATIENCE_S))
                for _ in range(3)
            ]
            for _ in tasks:
                await asked.acquire()
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
            a.notify(b.peer_id, "note", Message())  # the cancellations are there before this
            await noted.wait()
            assert b.traffic.queued_to(a.peer_id) < 2 * LARGE
            into.resume_reading()
            assert (await tasks[0]).arrays[0].num_bytes == LARGE

    play(scenario())


def test_what_a_peer_leaves_unread_does_not_keep_the_uplink_from_others() -> None:
    """Of a known uplink: what waits for a reader is queued to it alone."""

    async def scenario() -> None:
        async with peers(3) as (a, b, c):

            async def large(request: Request) -> Message:
                return Message(None, (array(LARGE),))

            a.handle("large", large)
            a.limit_upload(4.0 * LARGE)
            for _ in range(2):
                await c.call(a.peer_id, "large", Message(), timeout_s=PATIENCE_S)
            assert a.traffic.upload.known_bytes_per_s > 0
            assert a.traffic.queued_bytes() == 0
            await call(b, a)
            (into,) = carrier_of(b).transports
            into.pause_reading()
            asking = asyncio.create_task(
                b.call(a.peer_id, "large", Message(), timeout_s=PATIENCE_S)
            )
            while not a.traffic.queued_to(b.peer_id):  # noqa: ASYNC110 - what the test waits for
                await asyncio.sleep(0.001)
            while a.traffic.queued_bytes():  # noqa: ASYNC110 - what the test waits for
                await asyncio.sleep(0.01)
            assert a.traffic.queued_to(b.peer_id) > LARGE // 2
            rate = a.traffic.upload.known_bytes_per_s
            await c.call(a.peer_id, "large", Message(), timeout_s=PATIENCE_S)
            assert a.traffic.upload.known_bytes_per_s > rate / 4
            into.resume_reading()
            assert (await asking).arrays[0].num_bytes == LARGE

    play(scenario())


def test_a_reply_that_was_on_its_way_is_read_past() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):
            await call(a, b)
            (near,) = a.channels.all()

            async def large(request: Request) -> Message:
                return Message(None, (array(LARGE),))

            b.handle("large", large)
            heard = asyncio.Event()

            async def large_with_progress(request: Request) -> Message:
                request.progress(Message())
                return await large(request)

            b.handle("large", large_with_progress)
            task = asyncio.create_task(
                a.call(
                    b.peer_id,
                    "large",
                    Message(),
                    timeout_s=PATIENCE_S,
                    on_progress=lambda _: heard.set(),
                )
            )
            await heard.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await call(a, b, body=1)).body == 1
            await call(a, b, array(PART_BYTES))
            assert near.is_open

    play(scenario())


# ---- opening ----------------------------------------------------------------------------------


def test_callers_share_one_attempt_to_open() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):
            await asyncio.gather(*(call(a, b) for _ in range(20)))
            assert carrier_of(a).opened == 1
            await asyncio.gather(*(call(b, a) for _ in range(20)))
            assert carrier_of(b).opened == 0

    play(scenario())


def test_a_failed_attempt_is_remembered_for_a_moment() -> None:
    async def scenario() -> None:
        async with peers() as (a, _):
            missing = identity(9).peer_id
            for _ in range(20):
                with pytest.raises(Unreachable):
                    await a.call(missing, "echo", Message(), timeout_s=PATIENCE_S)
                a.notify(missing, "echo", Message())
            assert carrier_of(a).opened == 1

    play(scenario())


def test_both_sides_open_at_once_and_no_call_is_lost() -> None:
    async def scenario() -> None:
        for _ in range(20):
            async with peers() as (a, b):
                both = [
                    call(x, y, array(1000), body=n) for n in range(5) for x, y in ((a, b), (b, a))
                ]
                replies = await asyncio.gather(*both)
                assert [r.body for r in replies] == [n for n in range(5) for _ in range(2)]
                assert a.connected() == [b.peer_id]

    play(scenario())


def test_closing_while_opening_fails_the_call_and_not_its_caller() -> None:
    async def scenario() -> None:
        async with peers() as (a, _):
            opening = asyncio.Event()

            async def hangs(peer_id: str) -> ByteStream:
                opening.set()
                await asyncio.sleep(PATIENCE_S)
                raise AssertionError

            a.carrier.open = hangs  # type: ignore[method-assign]
            task = asyncio.create_task(a.call("b", "echo", Message(), timeout_s=PATIENCE_S))
            await opening.wait()
            await a.close()
            with pytest.raises(ChannelClosed):
                await task
            assert not task.cancelled()

    play(scenario())


def test_notes_for_a_peer_that_hangs_up_at_once_do_not_dial_it_again_and_again() -> None:
    async def scenario() -> None:
        async with peers() as (a, _):
            carrier = carrier_of(a)
            rude = carrier.hub.carrier(identity(5).peer_id)

            def hang_up(stream: ByteStream) -> None:
                stream.transport.write(HELLO_FRAME)
                stream.transport.close()

            await rude.start(hang_up)
            gone = asyncio.Event()
            a.on_disconnected(lambda peer_id: gone.set())
            a.notify(rude.peer_id, "echo", Message())
            await gone.wait()
            for _ in range(50):  # turns of the loop: time enough to dial again
                await asyncio.sleep(0)
            assert carrier.opened == 1
            await rude.close()

    play(scenario())


def test_a_request_that_comes_while_the_transport_closes_is_ended_too() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):
            begun, closing, late_begun, late_ended = (asyncio.Event() for _ in range(4))

            async def slow(request: Request) -> Message:
                begun.set()
                try:
                    await asyncio.sleep(PATIENCE_S)
                finally:
                    closing.set()
                    await late_begun.wait()
                return Message()

            async def late(request: Request) -> Message:
                late_begun.set()
                try:
                    await asyncio.sleep(PATIENCE_S)
                finally:
                    late_ended.set()
                return Message()

            b.handle("slow", slow)
            b.handle("late", late)
            calls_made = [
                asyncio.create_task(a.call(b.peer_id, "slow", Message(), timeout_s=PATIENCE_S))
            ]
            await begun.wait()
            closed = asyncio.create_task(b.close())
            await closing.wait()
            calls_made.append(
                asyncio.create_task(a.call(b.peer_id, "late", Message(), timeout_s=PATIENCE_S))
            )
            await closed
            assert late_ended.is_set()
            for outcome in await asyncio.gather(*calls_made, return_exceptions=True):
                assert isinstance(outcome, (ChannelClosed, NotReady))

    play(scenario())


def test_an_attempt_that_hangs_is_given_up() -> None:
    """In virtual time: nobody waits."""

    class Hanging(LoopbackCarrier):
        async def open(self, peer_id: str) -> ByteStream:
            await asyncio.sleep(3600)
            raise AssertionError

    async def main() -> None:
        a = ChannelTransport(Hanging(LoopbackHub(), "a"))
        await a.start()
        with pytest.raises(Unreachable, match="no answer within 10 s"):
            await a.call("b", "echo", Message(), timeout_s=60)
        with pytest.raises(DeadlineExceeded):
            await a.call("c", "echo", Message(), timeout_s=5)
        await a.close()

    run_in_virtual_time(main())


def test_a_peer_without_a_hello_is_dropped_and_so_is_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "HELLO_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with peers() as (a, b):
            hub = carrier_of(a).hub
            silent = hub.carrier(identity(5).peer_id)
            kept: list[ByteStream] = []
            await silent.start(kept.append)
            with pytest.raises(ChannelClosed, match="no hello in time"):
                await a.call(silent.peer_id, "echo", Message(), timeout_s=PATIENCE_S)
            bad = BadPeer(hub.carrier(identity(6).peer_id), b)
            await bad.connect(hello=b"")
            await bad.closed()
            bad.close()
            assert b.channels.all() == []

    play(scenario())


OTHER_VERSION = HIGHEST + 1
OTHER_HELLO = head_frame(HELLO, 0, {**hello_head(offer((OTHER_VERSION,) * 2), "", ""), "r": None})
"""Of a version that writes the rest of its hello in another way."""


def test_who_dials_a_peer_of_another_version_hears_it(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with peers() as (a, _):
            hub = carrier_of(a).hub
            other = hub.carrier(identity(5).peer_id)
            await other.start(lambda stream: stream.transport.write(OTHER_HELLO))
            text = (
                f"protocol {OTHER_VERSION}; this program speaks {HIGHEST}: "
                "update this program, it is older"
            )
            with pytest.raises(WrongVersion, match=text):
                await a.dial(other.addresses()[0])
            with pytest.raises(WrongVersion, match=text):
                await a.call(other.peer_id, "echo", Message(), timeout_s=PATIENCE_S)
            assert a.connected() == []
            await other.close()

    with caplog.at_level(logging.WARNING, LOG):
        play(scenario())
    assert caplog.records == []


def test_who_parts_from_another_version_and_ends_leaves_it_the_time_to_read_why() -> None:
    async def scenario() -> None:
        async with peers() as (a, _):
            hub = carrier_of(a).hub
            other = hub.carrier(identity(5).peer_id)
            await other.start(lambda stream: stream.transport.write(OTHER_HELLO))
            with pytest.raises(WrongVersion):
                await a.dial(other.addresses()[0])
            loop = asyncio.get_running_loop()
            told_at = loop.time()
            await a.close()
            assert loop.time() - told_at >= PARTING_S
            assert a.channels.all() == []

    play(scenario())


@pytest.mark.parametrize(
    ("hello", "line"),
    [
        (OLD_HELLO, "1 (swarmnet/0.1.0); this program speaks 4: update the peer, it is older"),
        (OTHER_HELLO, "5; this program speaks 4: update this program, it is older"),
    ],
)
def test_who_is_dialled_by_a_peer_of_another_version_logs_it_once(
    hello: bytes, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with bad_peer() as (other, victim, _):
            for _ in range(2):  # it tries again
                other.close()
                await other.connect(hello)
                other.writer.write(head_frame(REQUEST, 1, {"m": "echo"}) + hello + hello[:5])
                said = await other.closed()
                assert said.startswith(HELLO_FRAME)  # so that it can say the same
                assert head_frame(REPLY, 1, {"b": None}) not in said
                assert victim.channels.may_attach(other.peer_id)  # old, not bad

    with caplog.at_level(logging.WARNING, LOG):
        play(scenario())
    (record,) = caplog.records
    assert record.getMessage().endswith(f" speaks protocol {line}")


def test_a_hello_says_under_the_old_key_what_an_old_peer_complains_of() -> None:
    async def scenario() -> None:
        async with bad_peer() as (old, victim, _):
            old.close()
            await old.connect(OLD_HELLO)
            (_, _, values, _), *_ = read(await old.closed()).done
            assert values["v"] == HIGHEST
            assert HIGHEST != 1
            assert victim.channels.features(old.peer_id) == frozenset()

    play(scenario())


def test_two_peers_use_the_highest_version_that_both_speak() -> None:
    async def scenario() -> None:
        async with bad_peer() as (other, victim, _):
            other.close()
            newer = offer((LOWEST - 1, HIGHEST + 5), ("x",))
            await other.connect(head_frame(HELLO, 0, hello_head(newer, "", "")))
            other.writer.write(head_frame(REQUEST, 1, {"m": "echo", "b": 5}))
            await until_written(other, head_frame(REPLY, 1, {"b": 5}))
            channels = [c for c in victim.channels.all() if c.remote == other.peer_id]
            assert [c.greeting.version for c in channels if c.is_open][-1:] == [HIGHEST]

    play(scenario())


def test_a_feature_that_only_one_side_has_is_not_used() -> None:
    async def scenario() -> None:
        hub = LoopbackHub()
        features = (("both", "only a"), ("only b", "both"), ())
        a, b, c = (
            ChannelTransport(hub.carrier(identity(n).peer_id), offered=offer(features=each))
            for n, each in enumerate(features, start=1)
        )
        for one in (a, b, c):
            one.handle("echo", echo)
            await one.start()
        assert a.channels.features(b.peer_id) == frozenset()
        for one, other, shared in ((a, b, {"both"}), (b, a, {"both"}), (a, c, set())):
            await call(one, other)
            assert one.channels.features(other.peer_id) == shared
            channel = one.channels.first(other.peer_id)
            assert channel is not None
            greeting = channel.greeting
            assert (greeting.version, greeting.features) == (HIGHEST, shared)
        assert c.channels.features(a.peer_id) == frozenset()
        assert c.channels.features(b.peer_id) == frozenset()
        for one in (a, b, c):
            await one.close()

    play(scenario())


def test_a_listener_that_fails_disturbs_nobody() -> None:
    async def scenario() -> None:
        async with peers() as (a, b):

            def broken(peer_id: str) -> None:
                raise ValueError("a bug")

            for register in (a.on_connected, a.on_disconnected, b.on_connected):
                register(broken)
            assert (await call(a, b, body=1)).body == 1

    play(scenario())


# ---- bad peers --------------------------------------------------------------------------------

PARTS = b"".join(part_frames(REQUEST_PART, 1, (array(10),)))
ANNOUNCED = head_frame(REQUEST, 1, {"m": "echo"}, (array(10),))
REQUEST_1 = head_frame(REQUEST, 1, {"m": "wait"})


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n      ",
        raw_frame(NOTIFY | END, 0, b"\xc1"),
        raw_frame(HELLO | END, 0, b"\x80"),
        head_frame(HELLO, 0, {"v": HIGHEST, "r": 7}),
        head_frame(HELLO, 0, {"v": HIGHEST, "r": "x" * 1000}),
        head_frame(HELLO, 0, {"v": HIGHEST, "r": "", "f": "all"}),
        head_frame(HELLO, 0, {"v": HIGHEST, "r": "", "f": ["one more"]}),
        head_frame(HELLO, 0, {"v": HIGHEST, "l": HIGHEST + 1, "r": ""}),
        head_frame(HELLO, 0, {"v": HIGHEST, "h": HIGHEST + 1, "r": ""}),
        OTHER_HELLO,
        head_frame(REQUEST, 1, {}),
        head_frame(REQUEST, 1, {"m": 7}),
        head_frame(REQUEST, 1, {"m": "x" * 1000}),
        head_frame(NOTIFY, 0, {}),
        REQUEST_1 + REQUEST_1,
        ANNOUNCED + ANNOUNCED,
        ANNOUNCED + REQUEST_1,
        REQUEST_1 + ANNOUNCED,
        raw_frame(REQUEST_PART | END, 1, b"", b"x"),
        ANNOUNCED + raw_frame(REQUEST_PART | END, 1, b"", b"x"),
        ANNOUNCED + raw_frame(REQUEST_PART, 1, b"", bytes(10)),
        ANNOUNCED + raw_frame(REQUEST_PART | END, 1, b"", bytes(11)),
        ANNOUNCED + PARTS[:-1] + b"\xff",
        ANNOUNCED + raw_frame(REPLY_PART | END, 1, b"", bytes(10)),
        head_frame(REPLY, 1, {}),
        head_frame(REPLY, 1, {}, (array(10),)),
        head_frame(PROGRESS, 1, {}),
        head_frame(ERROR, 1, {"e": ["busy", "", {}]}),
    ],
)
def test_garbage_costs_its_sender_the_stream_and_a_ban(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with bad_peer() as (bad, victim, _):
            never = asyncio.Event()

            async def wait(request: Request) -> Message:
                await never.wait()
                return Message()

            victim.handle("wait", wait)
            with caplog.at_level(logging.WARNING, LOG):
                bad.writer.write(garbage)
                await bad.closed()
            lines = [r.getMessage() for r in caplog.records]
            assert len(lines) == 1
            assert lines[0].startswith(f"{bad.peer_id[-8:]} broke the protocol (")
            bad.close()
            await bad.connect()  # banned
            assert await bad.closed() == b""
            with pytest.raises(Unreachable, match="broke the protocol"):
                await victim.call(bad.peer_id, "echo", Message(), timeout_s=PATIENCE_S)

    play(scenario())


def test_a_first_message_that_is_no_hello() -> None:
    async def scenario() -> None:
        async with bad_peer() as (bad, victim, _):
            bad.close()
            await bad.connect(hello=b"")
            bad.writer.write(head_frame(NOTIFY, 0, {"m": "echo"}))
            await bad.closed()
            assert not victim.channels.may_attach(bad.peer_id)

    play(scenario())


@pytest.mark.parametrize(
    "harmless",
    [
        head_frame(CANCEL, 7, {}),
        ANNOUNCED + head_frame(CANCEL, 1, {}) + ANNOUNCED + PARTS,
        head_frame(HELLO, 0, {**hello_head(offer(), "another run", ""), "unknown": 1}),
        head_frame(HELLO, 0, {"v": HIGHEST, "r": "another run"}),
        head_frame(NOTIFY, 0, {"m": "nobody listens", "b": [1]}),
    ],
)
def test_what_is_odd_but_allowed_costs_nothing(harmless: bytes) -> None:
    async def scenario() -> None:
        async with bad_peer() as (bad, _victim, _):
            bad.writer.write(harmless + head_frame(REQUEST, 9, {"m": "echo", "b": 5}))
            answer = head_frame(REPLY, 9, {"b": 5})
            await until_written(bad, answer)

    play(scenario())


def test_channels_of_one_peer_are_bounded() -> None:
    async def scenario() -> None:
        async with bad_peer() as (bad, victim, _):
            streams = []
            for _ in range(open_channels.MAX_CHANNELS + 3):
                await bad.connect()
                streams.append((bad.reader, bad.writer))
            of_bad = [c for c in victim.channels.all() if c.remote == bad.peer_id]
            assert len(of_bad) == open_channels.MAX_CHANNELS
            for _, writer in streams:
                writer.close()

    play(scenario())


def test_handlers_of_a_peer_are_bounded_over_all_its_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "MAX_OPEN_CALLS", 10)

    async def scenario() -> None:
        async with bad_peer() as (bad, victim, _):
            never = asyncio.Event()

            async def wait(request: Request) -> Message:
                await never.wait()
                return Message()

            victim.handle("wait", wait)
            for _ in range(5):
                bad.close()
                await bad.connect()
                bad.writer.write(b"".join(head_frame(REQUEST, n, {"m": "wait"}) for n in range(8)))
                bad.writer.write(head_frame(REQUEST, 99, {"m": "unknown"}))
                bad.writer.write_eof()
                await bad.closed()
            assert victim.handlers.num_running(bad.peer_id) <= 10
            assert {"unknown"}.isdisjoint(victim.traffic.received_bytes)

    play(scenario())


@pytest.mark.parametrize(
    "described",
    [None, [], ["busy"], ["busy", "x", []], [1, "x", {}], ["busy", "x", {1: 2}], "busy"],
)
def test_an_error_that_is_none_closes_the_channel(described: object) -> None:
    async def scenario() -> None:
        async with peers() as (a, _):
            hub = carrier_of(a).hub
            bad = hub.carrier(identity(7).peer_id)
            answer = HELLO_FRAME + head_frame(ERROR, 1, {"e": described})
            await bad.start(lambda s: s.transport.write(answer))
            with pytest.raises((ChannelClosed, Unreachable)):
                await a.call(bad.peer_id, "echo", Message(), timeout_s=PATIENCE_S)

    play(scenario())
