"""A stream of `/swarmnet/1` to a peer, over py-libp2p as it is (Noise, yamux, TCP, and trio), and a
direct connection; by the words of `docs/protocol.md`.

To be imported in a process without hivemind, whose protobuf messages have the same names. The
package files of py-libp2p import all of it, with libraries that
are not installed here, so empty packages stand in for three of them."""

from __future__ import annotations

import importlib.util
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import trio

HOLLOW = ("libp2p", "libp2p.transport", "libp2p.transport.quic")
for _name in HOLLOW:
    if _name not in sys.modules:
        _spec = importlib.util.find_spec(_name)
        if _spec is None:
            raise ModuleNotFoundError(f"No module named {_name!r}; make install has it")
        sys.modules[_name] = importlib.util.module_from_spec(_spec)

from libp2p.crypto.ed25519 import create_new_key_pair  # noqa: E402
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair  # noqa: E402
from libp2p.custom_types import TProtocol  # noqa: E402
from libp2p.io.abc import ReadWriteCloser  # noqa: E402
from libp2p.network.connection.raw_connection import RawConnection  # noqa: E402
from libp2p.peer.id import ID  # noqa: E402
from libp2p.protocol_muxer.multiselect_client import MultiselectClient  # noqa: E402
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator  # noqa: E402
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE  # noqa: E402
from libp2p.security.noise.transport import Transport as NoiseTransport  # noqa: E402
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX  # noqa: E402
from libp2p.stream_muxer.yamux.yamux import Yamux  # noqa: E402
from libp2p.transport.upgrader import TransportUpgrader  # noqa: E402
from multiaddr import Multiaddr  # noqa: E402

PROTOCOL = "/swarmnet/1"


class Tcp(ReadWriteCloser):
    """A TCP connection as py-libp2p takes one."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._received = b""

    async def read(self, n: int | None = None) -> bytes:
        assert n is not None
        while len(self._received) < n:
            more = await self._stream.receive_some()
            if not more:
                raise EOFError("the peer has closed the connection")
            self._received += more
        data, self._received = self._received[:n], self._received[n:]
        return data

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        host, port = self._stream.socket.getpeername()[:2]
        return host, port


@dataclass
class Libp2pStream:
    """A `channel.Stream`."""

    remote: str
    _stream: Any

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def read_some(self) -> bytes:
        return cast(bytes, await self._stream.read())


async def _select(protocol: str, stream: Any) -> None:
    communicator = MultiselectCommunicator(stream)
    client = MultiselectClient()
    await client.handshake(communicator)
    await client.try_select(communicator, TProtocol(protocol))


@asynccontextmanager
async def connected(address: str, seed: bytes) -> AsyncIterator[Yamux]:
    """A connection to `/ip4/HOST/tcp/PORT/p2p/ID`, made with the key of a 32-byte seed."""
    where = Multiaddr(address)
    host, port = where.value_for_protocol("ip4"), int(where.value_for_protocol("tcp"))
    remote = ID.from_string(where.value_for_protocol("p2p"))
    noise = NoiseTransport(create_new_key_pair(seed), create_noise_key_pair().private_key)
    upgrader = TransportUpgrader({NOISE: noise}, {})
    raw = RawConnection(Tcp(await trio.open_tcp_stream(host, port)), True)
    secure = await upgrader.upgrade_security(raw, True, remote)  # raises where it is another peer
    await _select(YAMUX, secure)
    muxer = Yamux(secure, remote, is_initiator=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.start)
        await muxer.event_started.wait()
        nursery.start_soon(_refuse_streams, muxer)
        try:
            yield muxer
        finally:
            nursery.cancel_scope.cancel()


async def _refuse_streams(muxer: Yamux) -> None:
    """The other side may open streams, for `/ipfs/id/1.0.0` say. None is needed."""
    while True:
        await (await muxer.accept_stream()).reset()


async def open_stream(muxer: Yamux) -> Libp2pStream:
    stream = await muxer.open_stream()
    await _select(PROTOCOL, stream)
    return Libp2pStream(str(muxer.peer_id), stream)


# ---- direct connections ---------------------------------------------------------------------

PREAMBLE = bytes.fromhex("73 77 61 72 6d 6e 65 74 2d 64 69 72 65 63 74 02")


@dataclass
class DirectStream:
    """A `channel.Stream`."""

    remote: str
    _stream: trio.SSLStream[trio.SocketStream]

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def read_some(self) -> bytes:
        data = bytes(await self._stream.receive_some())
        if not data:
            raise EOFError("the peer has closed the direct connection")
        return data


async def dial_directly(remote: str, ticket: dict[str, Any]) -> DirectStream:
    """`ticket`: the reply of that peer to `ticket`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = ticket["addresses"][0]
    stream = trio.SSLStream(await trio.open_tcp_stream(host, port), context)
    await stream.do_handshake()
    certificate = stream.getpeercert(binary_form=True)
    assert sha256(certificate).digest() == ticket["fingerprint"], "another certificate"
    await stream.send_all(PREAMBLE + ticket["token"])
    return DirectStream(remote, stream)
