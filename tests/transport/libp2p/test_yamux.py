"""Yamux against itself and against a peer that breaks the rules, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from swarmnet.transport.libp2p import yamux
from swarmnet.transport.libp2p.yamux import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW_BYTES,
    MAX_INCOMING_STREAMS,
    MAX_PAYLOAD_BYTES,
    MAX_WAITING_CONTROL_FRAMES,
    NOISE_PLAINTEXT_BYTES,
    PING,
    PING_TIMEOUT_S,
    RECEIVE_WINDOW_BYTES,
    RST,
    SYN,
    WINDOW_UPDATE,
    StreamReset,
    Yamux,
)


class Pipe:
    """One end of a connection in memory. Gives what came in pieces of odd sizes."""

    def __init__(self, stream: trio.StapledStream, seed: int) -> None:
        self.largest_write = 0
        self._stream = stream
        self._random = random.Random(seed)

    async def read(self, n: int | None = None) -> bytes:
        size = n or self._random.choice((1, 7, 12, 13, 1000, 65_536))
        return bytes(await self._stream.receive_some(size))

    async def write(self, data: bytes) -> None:
        self.largest_write = max(self.largest_write, len(data))
        await self._stream.send_all(data)

    def abort(self) -> None:
        for half in (self._stream.send_stream, self._stream.receive_stream):
            half.close()  # type: ignore[attr-defined]


def in_trio(test: Callable[[], Awaitable[None]]) -> None:
    """Runs in virtual time: hours of silence cost nothing."""
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


def pair() -> tuple[Yamux, Yamux, Pipe]:
    ours, theirs = trio.testing.memory_stream_pair()
    pipes = Pipe(ours, 1), Pipe(theirs, 2)
    client = Yamux(pipes[0], True, pipes[0].abort)
    return client, Yamux(pipes[1], False, pipes[1].abort), pipes[0]


async def raw_peer(nursery: trio.Nursery) -> tuple[Yamux, Pipe]:
    """A server under test, and the bytes that a client of its exchanges with it."""
    ours, theirs = trio.testing.memory_stream_pair()
    server_pipe = Pipe(theirs, 2)
    server = Yamux(server_pipe, False, server_pipe.abort)
    nursery.start_soon(server.run)
    return server, Pipe(ours, 1)


async def frames(pipe: Pipe, kind: int, flags: int) -> tuple[int, int]:
    """Stream id and length of the next frame of a kind; others are skipped."""
    while True:
        header = b""
        while len(header) < HEADER.size:
            part = await pipe.read(HEADER.size - len(header))
            if not part:
                raise EOFError
            header += part
        _, got_kind, got_flags, stream_id, length = HEADER.unpack(header)
        if (got_kind, got_flags) == (kind, flags):
            return stream_id, length


async def is_cut_off(pipe: Pipe) -> bool:
    try:
        while await pipe.read(65_536):
            pass
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    return True


def test_bytes_go_both_ways_on_many_streams() -> None:
    async def echo(server: Yamux) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(answer, await server.accept_stream())

    async def answer(stream: yamux.Stream) -> None:
        while data := await stream.read():
            await stream.write(data)
        await stream.close()

    async def one(client: Yamux, seed: int) -> None:
        sent = random.Random(seed).randbytes(3 * RECEIVE_WINDOW_BYTES // 2 + seed)
        stream = await client.open_stream()
        got = bytearray()
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                await stream.write(sent)
                await stream.close()

            nursery.start_soon(write)
            while data := await stream.read():
                got += data
        assert got == sent

    async def test() -> None:
        client, server, pipe = pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            nursery.start_soon(server.run)
            async with trio.open_nursery() as users:
                users.start_soon(echo, server)
                for seed in range(5):
                    users.start_soon(one, client, seed)
            assert pipe.largest_write == NOISE_PLAINTEXT_BYTES
            client.end()

    in_trio(test)


def test_a_writer_waits_for_its_reader_and_for_no_other() -> None:
    async def test() -> None:
        client, server, _ = pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            nursery.start_soon(server.run)
            slow = await client.open_stream()
            written = trio.Event()

            async def write() -> None:
                await slow.write(bytes(2 * RECEIVE_WINDOW_BYTES))
                written.set()

            nursery.start_soon(write)
            reader = await server.accept_stream()
            await trio.sleep(3600)
            assert not written.is_set()
            quick = await client.open_stream()
            await quick.write(b"hello")
            assert await (await server.accept_stream()).read() == b"hello"
            num_bytes = 0
            while num_bytes < 2 * RECEIVE_WINDOW_BYTES:
                num_bytes += len(await reader.read())
            await written.wait()
            client.end()

    in_trio(test)


def test_a_reset_drops_what_is_unread_and_wakes_both_sides() -> None:
    async def test() -> None:
        client, server, _ = pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            nursery.start_soon(server.run)
            stream = await client.open_stream()
            await stream.write(b"never read")
            other = await server.accept_stream()
            await trio.testing.wait_all_tasks_blocked()
            stream.reset()
            with pytest.raises(StreamReset):
                await stream.read()
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(StreamReset):
                await other.read()
            with pytest.raises(StreamReset):
                await other.write(b"x")
            client.end()

    in_trio(test)


def test_what_arrived_before_the_connection_ended_can_be_read() -> None:
    async def test() -> None:
        client, server, _ = pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            nursery.start_soon(server.run)
            whole, torn = await client.open_stream(), await client.open_stream()
            await whole.write(b"last words")
            await whole.close()
            await torn.write(b"half a")
            first, second = await server.accept_stream(), await server.accept_stream()
            await trio.testing.wait_all_tasks_blocked()
            client.end()
            assert await first.read() == b"last words"
            assert await first.read() == b""
            assert await second.read() == b"half a"
            with pytest.raises(StreamReset):
                await second.read()
            with pytest.raises(trio.EndOfChannel):
                await server.accept_stream()
            with pytest.raises(StreamReset):
                await client.open_stream()

    in_trio(test)


def test_a_peer_that_falls_silent_is_dead_in_time() -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            server, pipe = await raw_peer(nursery)
            begin_s = trio.current_time()
            assert await is_cut_off(pipe)
            assert trio.current_time() - begin_s <= 2 * PING_TIMEOUT_S
            assert not server.is_alive

    in_trio(test)


def test_a_peer_that_answers_pings_lives_on() -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            server, pipe = await raw_peer(nursery)
            for _ in range(20):
                _, nonce = await frames(pipe, PING, SYN)
                await pipe.write(HEADER.pack(0, PING, ACK, 0, nonce))
            assert trio.current_time() > 2 * PING_TIMEOUT_S
            assert server.is_alive
            server.end()

    in_trio(test)


def test_pings_are_answered() -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            server, pipe = await raw_peer(nursery)
            await pipe.write(HEADER.pack(0, PING, SYN, 0, 77))
            assert await frames(pipe, PING, ACK) == (0, 77)
            server.end()

    in_trio(test)


def test_after_go_away_no_stream_is_opened_and_open_ones_live_on() -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            server, pipe = await raw_peer(nursery)
            stream = await server.open_stream()
            await pipe.write(HEADER.pack(0, GO_AWAY, 0, 0, 0))
            await pipe.write(HEADER.pack(0, DATA, 0, stream.stream_id, 3) + b"yes")
            assert await stream.read() == b"yes"
            with pytest.raises(StreamReset):
                await server.open_stream()
            server.end()

    in_trio(test)


def test_too_many_streams_are_reset() -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            server, pipe = await raw_peer(nursery)
            for number in range(MAX_INCOMING_STREAMS + 1):
                await pipe.write(HEADER.pack(0, WINDOW_UPDATE, SYN, 2 * number + 1, 0))
            refused, _ = await frames(pipe, WINDOW_UPDATE, RST)
            assert refused == 2 * MAX_INCOMING_STREAMS + 1
            await pipe.write(HEADER.pack(0, WINDOW_UPDATE, RST, 1, 0))
            await pipe.write(HEADER.pack(0, WINDOW_UPDATE, SYN, refused + 2, 0))
            assert (await frames(pipe, WINDOW_UPDATE, ACK))[0] == refused + 2
            server.end()

    in_trio(test)


def test_data_for_a_stream_that_is_gone_is_dropped() -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            server, pipe = await raw_peer(nursery)
            await pipe.write(HEADER.pack(0, DATA, FIN, 99, 5) + b"stray")
            await pipe.write(HEADER.pack(0, DATA, SYN | FIN, 1, 5) + b"hello")
            stream = await server.accept_stream()
            assert await stream.read() == b"hello"
            assert await stream.read() == b""
            server.end()

    in_trio(test)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(HEADER.pack(1, DATA, 0, 1, 0), id="version"),
        pytest.param(HEADER.pack(0, 9, 0, 1, 0), id="kind"),
        pytest.param(HEADER.pack(0, DATA, SYN, 1, RECEIVE_WINDOW_BYTES + 1), id="huge frame"),
        pytest.param(
            HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0)
            + (
                HEADER.pack(0, DATA, 0, 1, RECEIVE_WINDOW_BYTES // 2)
                + bytes(RECEIVE_WINDOW_BYTES // 2)
            )
            * 3,
            id="more than the window",
        ),
        pytest.param(HEADER.pack(0, WINDOW_UPDATE, SYN, 2, 0), id="our stream id"),
        pytest.param(HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0) * 2, id="opened twice"),
        pytest.param(
            HEADER.pack(0, PING, SYN, 0, 1) * (MAX_WAITING_CONTROL_FRAMES * 4), id="flood"
        ),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
    ],
)
def test_a_peer_that_breaks_the_rules_is_cut_off(garbage: bytes) -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            server, pipe = await raw_peer(nursery)
            with trio.move_on_after(1):
                await pipe.write(garbage)
            server_died_s = trio.current_time()
            assert await is_cut_off(pipe)
            assert not server.is_alive
            assert trio.current_time() - server_died_s < 1

    in_trio(test)


def test_windows_are_granted_when_a_stream_opens() -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            server, pipe = await raw_peer(nursery)
            stream = await server.open_stream()
            extra = RECEIVE_WINDOW_BYTES - INITIAL_WINDOW_BYTES
            assert await frames(pipe, WINDOW_UPDATE, SYN) == (stream.stream_id, extra)
            await pipe.write(HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0))
            assert await frames(pipe, WINDOW_UPDATE, ACK) == (1, extra)
            assert MAX_PAYLOAD_BYTES < INITIAL_WINDOW_BYTES
            server.end()

    in_trio(test)
