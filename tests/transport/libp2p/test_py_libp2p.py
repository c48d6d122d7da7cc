"""The carrier on py-libp2p, alone and against hivemind's daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from swarmnet.errors import AddressError, PortTaken, Unreachable
from swarmnet.transport.base import PROTOCOL_NAME, ByteStream, Request
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.libp2p.interfaces import ANY_INTERFACE, listening_hosts
from swarmnet.transport.libp2p.p2pd import P2pdCarrier
from swarmnet.transport.libp2p.py_libp2p import MAX_KNOWN_PEERS, PyLibp2pCarrier
from swarmnet.wire import Array, Message
from tests.transport.streams import PATIENCE_S, Collector, Echo, identity

MEGABYTE = 1 << 20
ROOT = Path(__file__).parents[3]


@contextlib.asynccontextmanager
async def peer(
    number: int, accept: Callable[[ByteStream], object] = Echo, port: int = 0
) -> AsyncIterator[PyLibp2pCarrier]:
    carrier = PyLibp2pCarrier(identity(number), port=port)
    await carrier.start(lambda stream: accept(stream) and None)
    try:
        yield carrier
    finally:
        await carrier.close()


@contextlib.contextmanager
def echo_process(number: int, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A peer in another process, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.echo_process", str(number), str(port)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def noise(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


def sockets() -> int:
    """Open sockets of this process."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_bytes_go_both_ways_between_authenticated_peers(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    accepted: list[str] = []

    def accept(stream: ByteStream) -> Echo:
        accepted.append(stream.remote)
        return Echo(stream)

    async def main() -> None:
        async with peer(1) as a, peer(2, accept) as b:
            assert await a.connect(b.addresses()[0]) == b.peer_id
            stream = Collector(await a.open(b.peer_id))
            assert stream.remote == b.peer_id
            sent = noise(3 * MEGABYTE + 17)
            stream.transport.write(sent)
            assert await stream.receive(len(sent)) == sent
            assert accepted == [a.peer_id]

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_the_dialled_peer_opens_streams_on_the_same_connection() -> None:
    async def main() -> None:
        async with peer(1) as a, peer(2) as b:
            await a.connect(b.addresses()[0])
            first = Collector(await a.open(b.peer_id))
            stream = Collector(await b.open(a.peer_id))  # b knows no address of a
            assert (first.remote, stream.remote) == (b.peer_id, a.peer_id)
            stream.transport.write(b"hello")
            assert await stream.receive(5) == b"hello"

    asyncio.run(main())


def test_many_streams_opened_at_once_all_work() -> None:
    async def main() -> None:
        async with peer(1) as a, peer(2) as b:
            a.learn(b.peer_id, b.addresses())
            b.learn(a.peer_id, a.addresses())

            async def one(carrier: PyLibp2pCarrier, to: str, number: int) -> None:
                stream = Collector(await carrier.open(to))
                stream.transport.write(bytes([number]) * 1000)
                assert await stream.receive(1000) == bytes([number]) * 1000
                stream.transport.close()

            await asyncio.gather(
                *(one(a, b.peer_id, k) for k in range(20)),
                *(one(b, a.peer_id, k) for k in range(20)),
            )

    asyncio.run(main())


def test_a_reader_that_pauses_holds_back_the_writer_and_loses_nothing() -> None:
    async def main() -> None:
        accepted: asyncio.Queue[Collector] = asyncio.Queue()

        def accept(stream: ByteStream) -> None:
            accepted.put_nowait(Collector(stream, is_reading=False))

        async with peer(1) as a, peer(2, accept) as b:
            await a.connect(b.addresses()[0])
            writer = Collector(await a.open(b.peer_id))
            sent = noise(24 * MEGABYTE)  # more than window and buffers on the way
            writer.transport.write(sent)
            assert writer.is_full
            reader = await accepted.get()
            Collector(await a.open(b.peer_id))  # another stream gets through meanwhile
            await accepted.get()
            assert writer.is_full
            reader.transport.resume_reading()
            assert await reader.receive(len(sent)) == sent
            assert not writer.is_full

    asyncio.run(main())


def test_a_stream_ended_by_one_side_still_carries_the_answer() -> None:
    class Answer(Collector):
        def eof_received(self) -> bool:
            self.transport.write(bytes(self.received) + b" to you")
            self.transport.close()
            return True

    async def main() -> None:
        async with peer(1) as a, peer(2, Answer) as b:
            await a.connect(b.addresses()[0])
            stream = Collector(await a.open(b.peer_id))
            stream.transport.write(b"hello")
            stream.transport.write_eof()
            assert await stream.receive(12) == b"hello to you"
            await stream.ended()

    asyncio.run(main())


def test_closing_one_end_closes_the_other() -> None:
    async def main() -> None:
        accepted: asyncio.Queue[Collector] = asyncio.Queue()
        async with peer(1) as a, peer(2, lambda s: accepted.put_nowait(Collector(s))) as b:
            await a.connect(b.addresses()[0])
            stream = Collector(await a.open(b.peer_id))
            stream.transport.write(b"last words")
            stream.transport.close()
            remote = await accepted.get()
            await remote.ended()
            assert remote.received == b"last words"

    asyncio.run(main())


def test_what_was_written_before_close_arrives() -> None:
    async def main() -> None:
        accepted: asyncio.Queue[Collector] = asyncio.Queue()
        async with peer(2, lambda s: accepted.put_nowait(Collector(s))) as b:
            async with peer(1) as a:
                await a.connect(b.addresses()[0])
                stream = Collector(await a.open(b.peer_id))
                stream.transport.write(noise(MEGABYTE))
            remote = await accepted.get()
            await remote.ended()
            assert remote.received == noise(MEGABYTE)

    asyncio.run(main())


def test_close_leaves_no_thread_and_no_socket() -> None:
    async def main() -> None:
        before = sockets()
        async with peer(1) as a, peer(2) as b:
            await a.connect(b.addresses()[0])
            stream = Collector(await a.open(b.peer_id))
            stream.transport.write(b"x")
            await stream.receive(1)
        await a.close()  # again: nothing happens
        for _ in range(10):  # closed transports drop their sockets on the loop's next turns
            await asyncio.sleep(0)
        assert sockets() == before
        assert [t for t in threading.enumerate() if t.name == "py-libp2p"] == []
        with pytest.raises(Unreachable):
            await a.open(b.peer_id)

    asyncio.run(main())


def test_a_taken_port_is_named() -> None:
    async def main() -> None:
        async with peer(1) as a:
            port = int(a.addresses()[0].split("/")[4])
            with pytest.raises(AddressError, match=f"port {port} .* taken.*another port"):
                async with peer(2, port=port):
                    pass

    asyncio.run(main())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "hello",
        "/ip4/127.0.0.1",
        "/ip4/300.0.0.1/tcp/1/p2p/{peer}",
        "/ip6/127.0.0.1/tcp/1/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/0/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/70000/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/127.0.0.1/udp/4001/quic-v1/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/4001/p2p/{peer}/p2p-circuit/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/4001/p2p/not-a-peer-id",
        "/dns4/" + "x" * 1000 + "/tcp/4001/p2p/{peer}",
    ],
)
def test_an_address_that_cannot_be_dialled_is_refused_with_a_reason(address: str) -> None:
    async def main() -> None:
        async with peer(1) as a:
            with pytest.raises(AddressError, match="address"):
                await a.connect(address.format(peer=identity(2).peer_id))

    asyncio.run(main())


def test_an_address_on_which_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def main() -> None:
            async with peer(1) as a:
                with pytest.raises(Unreachable, match=f"port {port}: connection refused"):
                    await a.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity(2).peer_id}")
                with pytest.raises(Unreachable, match="no TCP address"):
                    await a.open(identity(2).peer_id)

        asyncio.run(main())


def test_another_identity_than_the_address_names() -> None:
    async def main() -> None:
        async with peer(1) as a, peer(2) as b:
            wrong = b.addresses()[0].replace(b.peer_id, identity(3).peer_id)
            with pytest.raises(Unreachable, match="another identity answered"):
                await a.connect(wrong)
            assert await a.connect(b.addresses()[0]) == b.peer_id

    asyncio.run(main())


def test_something_that_is_not_libp2p_answers() -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, peer(1) as a:
            with pytest.raises(Unreachable, match="no libp2p handshake"):
                await a.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity(2).peer_id}")

    asyncio.run(main())


def test_garbage_on_the_port_disturbs_nobody() -> None:
    async def main() -> None:
        async with peer(1) as a, peer(2) as b:
            await a.connect(b.addresses()[0])
            stream = Collector(await a.open(b.peer_id))
            host, port = b.addresses()[0].split("/")[2:5:2]
            for garbage in (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, noise(100_000)):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(garbage)
                writer.write_eof()
                async with asyncio.timeout(PATIENCE_S):
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
                writer.close()
            stream.transport.write(b"still here")
            assert await stream.receive(10) == b"still here"

    asyncio.run(main())


def test_garbage_on_a_stream_costs_its_sender_the_stream_and_nobody_else() -> None:
    async def main() -> None:
        async def answer(request: Request) -> Message:
            return Message("well")

        server = ChannelTransport(PyLibp2pCarrier(identity(2)))
        client = ChannelTransport(PyLibp2pCarrier(identity(3)))
        server.handle("how", answer)
        await server.start()
        await client.start()
        try:
            async with peer(1) as hostile:
                await hostile.connect(server.addresses()[0])
                stream = Collector(await hostile.open(server.peer_id))
                stream.transport.write(noise(MEGABYTE))
                await stream.ended()
                await client.dial(server.addresses()[0])
                reply = await client.call(server.peer_id, "how", Message(), timeout_s=PATIENCE_S)
                assert reply.body == "well"
        finally:
            await client.close()
            await server.close()

    asyncio.run(main())


def test_learn_keeps_what_it_can_dial_and_no_more_than_its_bound() -> None:
    async def main() -> None:
        async with peer(1) as a, peer(2) as b:
            udp = f"/ip4/127.0.0.1/udp/1/quic-v1/p2p/{b.peer_id}"
            a.learn(b.peer_id, [udp, "nonsense", *b.addresses()])
            for number in range(MAX_KNOWN_PEERS - 1):
                a.learn(f"other {number}", ["/ip4/127.0.0.1/tcp/1"])
            stream = Collector(await a.open(b.peer_id))
            stream.transport.write(b"x")
            assert await stream.receive(1) == b"x"
        async with peer(1) as a, peer(2) as b:
            a.learn(b.peer_id, b.addresses())
            for number in range(MAX_KNOWN_PEERS):
                a.learn(f"other {number}", ["/ip4/127.0.0.1/tcp/1"])
            with pytest.raises(Unreachable, match="no TCP address"):
                await a.open(b.peer_id)

    asyncio.run(main())


def test_listening_everywhere_gives_addresses_that_can_be_dialled() -> None:
    async def main() -> None:
        everywhere = PyLibp2pCarrier(
            identity(2), host="0.0.0.0", announce=["/dns4/peer.example.org/tcp/4001"]
        )
        await everywhere.start(lambda stream: None)
        try:
            first, *rest = everywhere.addresses()
            assert first == f"/dns4/peer.example.org/tcp/4001/p2p/{everywhere.peer_id}"
            assert not any("0.0.0.0" in address for address in rest)
            async with peer(1) as a:
                assert await a.connect(rest[0]) == everywhere.peer_id
        finally:
            await everywhere.close()

    asyncio.run(main())


def test_it_listens_at_one_port_of_both_kinds_of_addresses() -> None:
    async def main() -> None:
        for host in ("127.0.0.1", "::1")[: len(listening_hosts(ANY_INTERFACE))]:
            both = PyLibp2pCarrier(identity(2), host=ANY_INTERFACE)
            await both.start(lambda stream: None)
            try:
                port = int(both.addresses()[0].split("/")[4])
                async with peer(1) as a:
                    at = f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"
                    assert await a.connect(f"{at}/p2p/{both.peer_id}") == both.peer_id
                with pytest.raises(PortTaken):
                    await PyLibp2pCarrier(identity(3), host=ANY_INTERFACE, port=port).start(print)
            finally:
                await both.close()

    asyncio.run(main())


def test_a_malformed_announced_address_is_refused() -> None:
    with pytest.raises(AddressError):
        PyLibp2pCarrier(identity(1), announce=["/ip4/127.0.0.1"])


@pytest.mark.processes
def test_a_killed_peer_is_noticed_and_dialled_again_when_it_is_back() -> None:
    async def main() -> None:
        async with peer(1) as a:
            with echo_process(2) as (process, address):
                await a.connect(address)
                stream = Collector(await a.open(identity(2).peer_id))
                stream.transport.write(b"x")
                assert await stream.receive(1) == b"x"
                process.send_signal(signal.SIGKILL)
                await stream.ended()
                with pytest.raises(Unreachable):
                    await a.open(identity(2).peer_id)
            with echo_process(2, port=int(address.split("/")[4])):
                stream = Collector(await a.open(identity(2).peer_id))
                stream.transport.write(b"back")
                assert await stream.receive(4) == b"back"

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.parametrize("dialler", ["py-libp2p", "p2pd"])
def test_calls_go_both_ways_between_py_libp2p_and_p2pd(dialler: str) -> None:
    sent = noise(8 * MEGABYTE)

    async def echo(request: Request) -> Message:
        return Message(request.remote, request.message.arrays)

    async def call(caller: ChannelTransport, callee: ChannelTransport) -> None:
        array = Array("uint8", (len(sent),), sent)
        reply = await caller.call(
            callee.peer_id, "echo", Message(arrays=(array,)), timeout_s=PATIENCE_S
        )
        assert reply.body == caller.peer_id
        assert bytes(reply.arrays[0].data) == sent

    async def main() -> None:
        ours = ChannelTransport(PyLibp2pCarrier(identity(1)))
        theirs = ChannelTransport(P2pdCarrier(identity(2)))
        try:
            for transport in (ours, theirs):
                transport.handle("echo", echo)
                await transport.start()
            first, second = (ours, theirs) if dialler == "py-libp2p" else (theirs, ours)
            assert await first.dial(second.addresses()[0]) == second.peer_id
            await call(first, second)
            await call(second, first)  # over the channel that the other opened
            await asyncio.gather(*(call(a, b) for a, b in [(first, second), (second, first)] * 3))
        finally:
            await ours.close()
            await theirs.close()

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("dialler", ["py-libp2p", "p2pd"])
def test_each_side_opens_streams_whoever_dialled_and_whatever_p2pd_offers(
    tls: bool, dialler: str
) -> None:
    from hivemind.p2p import P2P, PeerID
    from multiaddr import Multiaddr

    sent = noise(MEGABYTE)

    async def echo(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(MEGABYTE):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def main() -> None:
        daemon = await P2P.create(
            tls=tls, nat_port_map=False, auto_nat=False, use_relay=False, dht_mode="client"
        )
        try:
            async with peer(1) as ours, asyncio.timeout(PATIENCE_S):
                if dialler == "py-libp2p":
                    await ours.connect(str((await daemon.get_visible_maddrs())[0]))
                else:
                    address = Multiaddr(ours.addresses()[0].split("/p2p/")[0])
                    client = daemon._client  # noqa: SLF001  hivemind has no public way to dial
                    await client.connect(PeerID.from_base58(ours.peer_id), [address])
                with pytest.raises(Unreachable, match="does not speak /swarmnet/1"):
                    await ours.open(str(daemon.peer_id))

                await daemon.add_binary_stream_handler(PROTOCOL_NAME, echo)
                stream = Collector(await ours.open(str(daemon.peer_id)))
                stream.transport.write(sent)
                assert await stream.receive(len(sent)) == sent

                _, reader, writer = await daemon.call_binary_stream_handler(
                    PeerID.from_base58(ours.peer_id), PROTOCOL_NAME
                )
                writer.write(sent)
                assert await reader.readexactly(len(sent)) == sent
                writer.close()
        finally:
            await daemon.shutdown()

    asyncio.run(main())


def test_a_start_that_is_given_up_leaves_nothing_behind() -> None:
    async def main() -> None:
        before = sockets()
        carrier = PyLibp2pCarrier(identity(1))
        task = asyncio.create_task(carrier.start(lambda stream: None))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [t for t in threading.enumerate() if t.name == "py-libp2p"] == []
        assert sockets() == before

    asyncio.run(main())
