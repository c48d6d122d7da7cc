"""A small libp2p host on trio, made of py-libp2p's parts.

From py-libp2p come the Noise handshake (and with it the authenticated peer id), the
negotiation of protocols, keys, peer ids and the identify message. Listening, dialling, the
table of connections and yamux are ours: py-libp2p 0.8.1's `Swarm` listens on ports that
others hold, tries one TCP address of a peer, refuses for a minute what failed once, and
gives up a slot for good with every incoming connection.

This module imports trio and libp2p (more than a second): import it where it is used.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import trio

from swarmnet.errors import AddressError, PortTaken, Unreachable, WrongProtocol
from swarmnet.transport.base import PROTOCOL_NAME, RELAY_PROTOCOL
from swarmnet.transport.libp2p import imports as p2p
from swarmnet.transport.libp2p.interfaces import bound, listening_hosts
from swarmnet.transport.libp2p.yamux import MAX_PAYLOAD_BYTES, Stream, StreamReset, Yamux
from swarmnet.transport.libp2p.yamux import PROTOCOL_ID as YAMUX

logger = logging.getLogger(__name__)

UPGRADE_TIMEOUT_S = 10.0
"""For the handshakes of a new connection."""
NEGOTIATE_TIMEOUT_S = 6.0
"""For agreeing on a stream's protocol."""
ADDRESS_TIMEOUT_S = 8.0
"""For one address of a peer, handshakes included."""
DIAL_STAGGER_S = 0.25
"""Before the next address of a peer is tried beside those that have not answered."""
HALF_CLOSE_S = 5.0
"""How long a stream that we ended may be left open by the peer."""
CLOSE_GRACE_S = 1.0
"""What was written before `close` may take this long to leave."""
BACKLOG = 128
MAX_CONNECTIONS = 4096
MAX_HANDSHAKES = 64
"""Incoming connections that have not yet proved who they are."""
MAX_CONNECTIONS_PER_PEER = 4
"""Then a new one replaces the oldest: a peer that restarts is not kept out by its past."""
READ_BYTES = 256 << 10
"""From a TCP connection, at once."""
MAX_READ_BYTES = 65_535
"""The longest message of Noise; nothing before the handshake is longer."""
PING_BYTES = 32
IDENTIFY_PROTOCOL = "/ipfs/id/1.0.0"
PING_PROTOCOL = "/ipfs/ping/1.0.0"
AGENT = "swarmnet/py-libp2p"
MAX_NEGOTIATION_BYTES = 1024
MAX_CAUSES = 32
DEAD_SOCKET = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)
DEAD = (StreamReset, *DEAD_SOCKET)


Endpoint = tuple[str, int]
"""Host (a name or a numeric address) and port, as TCP takes them."""


class BufferedTcp(p2p.ReadWriteCloser):
    """A TCP connection for py-libp2p: `read` gives exactly what is asked for. (py-libp2p gives up
    where 64 KiB come in more than 100 pieces, and reads two bytes of length before every message.)
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._position = 0

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes. Raises `EOFError` at the end."""
        if n is None or n > MAX_READ_BYTES:
            raise ValueError(f"a message of {n} bytes")
        while len(self._buffer) - self._position < n:
            del self._buffer[: self._position]
            self._position = 0
            data = await self._stream.receive_some(READ_BYTES)
            if not data:
                raise EOFError("the connection ended")
            self._buffer += data
        begin, self._position = self._position, self._position + n
        return bytes(memoryview(self._buffer)[begin : self._position])

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._stream.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        with contextlib.suppress(OSError):
            host, port = self._stream.socket.getpeername()[:2]
            return str(host), int(port)
        return None


@dataclass(eq=False, slots=True)
class Connection:
    """An authenticated connection to a peer."""

    peer_id: str
    yamux: Yamux
    remote: tuple[str, int] | None


class Host:
    """Listens, dials and bridges streams to sockets. Everything but `stop` runs in trio."""

    def __init__(
        self,
        seed: bytes,
        on_stream: Callable[[str, socket.socket, str], None],
        announced: Callable[[], list[str]],
    ) -> None:
        """`seed`: the 32 bytes of an Ed25519 private key. `on_stream(peer id, socket,
        protocol)`: for every incoming stream with `PROTOCOL_NAME` or `RELAY_PROTOCOL`; the socket
        is the callee's to close. `announced()`: the multiaddrs that identify tells others."""
        keys = p2p.create_new_key_pair(seed)
        self.peer_id = str(p2p.ID.from_pubkey(keys.public_key))
        self.addresses: list[str] = []
        """Where it listens, as multiaddrs; every address of the machine where that is all."""
        self._announced = announced
        self._public_key = keys.public_key.serialize()
        noise = p2p.NoiseTransport(keys, p2p.create_noise_key_pair().private_key)
        self._upgrader = p2p.TransportUpgrader({p2p.NOISE: noise}, {})
        self._muxer = _served(YAMUX)
        self._protocols = _served(PROTOCOL_NAME, RELAY_PROTOCOL, IDENTIFY_PROTOCOL, PING_PROTOCOL)
        self._on_stream = on_stream
        self._nursery: trio.Nursery | None = None
        self._connections: dict[str, list[Connection]] = {}
        self._num_connections = 0
        self._handshakes = trio.CapacityLimiter(MAX_HANDSHAKES)
        self._dialling: dict[str, trio.Lock] = {}
        self._sending: dict[int, trio.Event] = {}
        self._num_bridges = 0
        self._stopping = trio.Event()

    async def run(self, host: str, port: int, on_ready: Callable[[], None]) -> None:
        """Listens and serves until `stop`. Raises `AddressError` where it cannot listen."""
        listeners = _listen(host, port)
        self.addresses = [a for listener in listeners for a in _multiaddrs(listener)]
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for listener in listeners:
                nursery.start_soon(self._accept, listener)
            on_ready()
            await self._stopping.wait()
            for listener in listeners:
                listener.socket.close()
            await self._drain()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Ends `run`: no new streams, what was written may still leave, then all is closed."""
        self._stopping.set()

    async def _drain(self) -> None:
        with trio.move_on_after(CLOSE_GRACE_S):
            for event in list(self._sending.values()):
                await event.wait()
            async with trio.open_nursery() as nursery:
                for connection in self._all_connections():
                    nursery.start_soon(connection.yamux.go_away)
        for connection in self._all_connections():
            connection.yamux.end()

    def _all_connections(self) -> list[Connection]:
        return [c for connections in self._connections.values() for c in connections]

    async def connect(self, peer_id: str, endpoints: Sequence[Endpoint]) -> None:
        """Makes sure that there is a connection to a peer. Raises `Unreachable`."""
        await self._connection(peer_id, endpoints)

    async def open(
        self, peer_id: str, endpoints: Sequence[Endpoint], protocol: str = PROTOCOL_NAME
    ) -> socket.socket:
        """Opens a stream; returns the far end of its bridge. A connection that
        turns out to be dead is closed and dialled again, once. Raises `Unreachable`."""
        for connection in self._live(peer_id)[-1:]:
            try:
                return await self._open_on(connection, protocol)
            except (StreamReset, trio.TooSlowError) as e:
                logger.debug("the connection to %s was dead: %s", peer_id, e)
                connection.yamux.end()
        connection = await self._connection(peer_id, endpoints)
        try:
            return await self._open_on(connection, protocol)
        except (StreamReset, trio.TooSlowError) as e:
            connection.yamux.end()
            raise Unreachable(f"{peer_id} closed the new connection at once: {e}") from None

    def observed(self, peer_id: str) -> str:
        """The multiaddr that a connected peer comes from; empty where there is none."""
        for connection in reversed(self._live(peer_id)):
            if connection.remote is not None:
                host, port = connection.remote
                return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"
        return ""

    async def _open_on(self, connection: Connection, protocol: str) -> socket.socket:
        """Raises `StreamReset`, `trio.TooSlowError` or `Unreachable`."""
        with trio.fail_after(NEGOTIATE_TIMEOUT_S):
            stream = await connection.yamux.open_stream()
            try:
                await _select(protocol, stream)
            except p2p.ProtocolNotSupportedError:
                stream.reset()
                raise WrongProtocol(f"{connection.peer_id} does not speak {protocol}") from None
            except Exception as e:
                stream.reset()
                raise StreamReset(_reason(e)) from None
            except BaseException:
                stream.reset()
                raise
        return self._bridge(stream)

    # Connections

    async def drop(self, peer_id: str) -> None:
        """Ends every connection to a peer."""
        for connection in list(self._connections.get(peer_id, [])):
            connection.yamux.end()

    def _live(self, peer_id: str) -> list[Connection]:
        connections = self._connections.get(peer_id, [])
        return [c for c in connections if not c.yamux.is_going_away]

    async def _connection(self, peer_id: str, endpoints: Sequence[Endpoint]) -> Connection:
        lock = self._dialling.setdefault(peer_id, trio.Lock())
        try:
            async with lock:
                live = self._live(peer_id)
                return live[-1] if live else await self._dial(peer_id, endpoints)
        finally:
            if not lock.locked():
                self._dialling.pop(peer_id, None)

    async def _dial(self, peer_id: str, endpoints: Sequence[Endpoint]) -> Connection:
        """The first of the peer's addresses that answers; the next one is tried when one failed or
        has not answered for `DIAL_STAGGER_S`."""
        if not endpoints:
            raise Unreachable(f"no TCP address of {peer_id} is known")
        made: list[Connection] = []
        reasons: list[str] = []

        async def attempt(endpoint: Endpoint, failed: trio.Event) -> None:
            try:
                with trio.fail_after(ADDRESS_TIMEOUT_S):
                    made.append(await self._dial_one(peer_id, endpoint))
                attempts.cancel_scope.cancel()
            except Exception as e:
                reasons.append(f"{endpoint[0]} port {endpoint[1]}: {_reason(e)}")
                failed.set()

        async with trio.open_nursery() as attempts:
            for endpoint in endpoints:
                failed = trio.Event()
                attempts.start_soon(attempt, endpoint, failed)
                with trio.move_on_after(DIAL_STAGGER_S):
                    await failed.wait()
        if not made:
            raise Unreachable(f"{peer_id} does not answer ({'; '.join(reasons)[:500]})")
        for connection in made[1:]:
            connection.yamux.end()
        return made[0]

    async def _dial_one(self, peer_id: str, endpoint: Endpoint) -> Connection:
        stream = await trio.open_tcp_stream(*endpoint)
        tcp = BufferedTcp(stream)
        try:
            raw = p2p.RawConnection(tcp, True)
            secure = await self._upgrader.upgrade_security(raw, True, p2p.ID.from_string(peer_id))
            await _select(YAMUX, secure)
            return self._add(peer_id, secure, tcp, is_client=True)
        except BaseException:
            tcp.abort()
            raise

    async def _accept(self, listener: trio.SocketListener) -> None:
        assert self._nursery is not None
        while not self._stopping.is_set():
            try:
                stream = await listener.accept()
            except trio.ClosedResourceError:
                return
            except OSError as e:
                logger.warning("cannot accept a connection: %s", e)
                await trio.sleep(DIAL_STAGGER_S)
                continue
            tcp = BufferedTcp(stream)
            if self._handshakes.available_tokens and self._num_connections < MAX_CONNECTIONS:
                self._nursery.start_soon(self._upgrade_incoming, tcp)
            else:
                tcp.abort()

    async def _upgrade_incoming(self, tcp: BufferedTcp) -> None:
        try:
            async with self._handshakes:
                with trio.fail_after(UPGRADE_TIMEOUT_S):
                    raw = p2p.RawConnection(tcp, False)
                    secure = await self._upgrader.upgrade_security(raw, False)
                    await _negotiate(self._muxer, secure)
            peer_id = str(secure.get_remote_peer())
            self._add(peer_id, secure, tcp, is_client=False)
        except Exception as e:
            logger.debug("a connection from %s failed: %s", tcp.get_remote_address(), _reason(e))
            tcp.abort()
        except BaseException:
            tcp.abort()
            raise

    def _add(self, peer_id: str, secure: Any, tcp: BufferedTcp, is_client: bool) -> Connection:
        assert self._nursery is not None
        if self._stopping.is_set():
            raise Unreachable("this peer's network is closing")
        for oldest in self._live(peer_id)[: 1 - MAX_CONNECTIONS_PER_PEER]:
            oldest.yamux.end()
        connection = Connection(
            peer_id, Yamux(secure, is_client, tcp.abort), tcp.get_remote_address()
        )
        self._connections.setdefault(peer_id, []).append(connection)
        self._num_connections += 1
        self._nursery.start_soon(self._serve, connection)
        return connection

    async def _serve(self, connection: Connection) -> None:
        """Lives as long as the connection."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.yamux.run)
                with contextlib.suppress(trio.EndOfChannel):
                    while True:
                        stream = await connection.yamux.accept_stream()
                        nursery.start_soon(self._serve_stream, stream, connection)
        finally:
            connection.yamux.end()
            self._num_connections -= 1
            rest = [c for c in self._connections[connection.peer_id] if c is not connection]
            if rest:
                self._connections[connection.peer_id] = rest
            else:
                del self._connections[connection.peer_id]

    # Streams

    async def _serve_stream(self, stream: Stream, connection: Connection) -> None:
        try:
            with trio.fail_after(NEGOTIATE_TIMEOUT_S):
                protocol = await _negotiate(self._protocols, stream)
            if protocol in (PROTOCOL_NAME, RELAY_PROTOCOL):
                self._on_stream(connection.peer_id, self._bridge(stream), str(protocol))
            elif protocol == IDENTIFY_PROTOCOL:
                with trio.fail_after(NEGOTIATE_TIMEOUT_S):
                    await self._identify(stream, connection)
            else:
                await _echo(stream)
        except Exception as e:
            logger.debug("a stream from %s failed: %s", connection.peer_id, _reason(e))
            stream.reset()

    async def _identify(self, stream: Stream, connection: Connection) -> None:
        """https://github.com/libp2p/specs/blob/master/identify/README.md"""
        message = p2p.Identify(
            protocol_version="ipfs/0.1.0",
            agent_version=AGENT,
            public_key=self._public_key,
            listen_addrs=[p2p.Multiaddr(a).to_bytes() for a in self._announced()],
            protocols=[str(p) for p in self._protocols.get_protocols()],
        )
        if connection.remote:
            host, port = connection.remote
            kind = "ip6" if ":" in host else "ip4"
            message.observed_addr = p2p.Multiaddr(f"/{kind}/{host}/tcp/{port}").to_bytes()
        await stream.write(p2p.encode_varint_prefixed(message.SerializeToString()))
        await stream.close()

    def _bridge(self, stream: Stream) -> socket.socket:
        """Joins a stream and a socket; returns the socket's other end."""
        assert self._nursery is not None
        near, far = socket.socketpair()
        near.setblocking(False)
        self._nursery.start_soon(self._pump, stream, near)
        return far

    async def _pump(self, stream: Stream, near: socket.socket) -> None:
        """Lives as long as a bridge. However it ends, both sides are closed."""
        self._num_bridges += 1
        index = self._num_bridges
        sent = self._sending[index] = trio.Event()
        local = trio.SocketStream(trio.socket.from_stdlib_socket(near))
        try:
            with trio.CancelScope() as bridge:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_pump_out, stream, local, sent, bridge)
                    await _pump_in(stream, local, bridge)
        finally:
            sent.set()
            del self._sending[index]
            stream.reset()
            local.socket.close()


async def _pump_out(
    stream: Stream, local: trio.SocketStream, sent: trio.Event, bridge: trio.CancelScope
) -> None:
    """From the socket to the peer, then the stream's end. Sets `sent` when all is written."""
    try:
        while data := await local.receive_some(MAX_PAYLOAD_BYTES):
            await stream.write(data)
        await stream.close()
        bridge.deadline = trio.current_time() + HALF_CLOSE_S
    except DEAD:
        bridge.cancel()
    sent.set()


async def _pump_in(stream: Stream, local: trio.SocketStream, bridge: trio.CancelScope) -> None:
    """From the peer to the socket, then the socket's end. Where the socket was closed, what still
    comes is dropped, for a reset would overtake what was sent before."""
    try:
        while data := await stream.read():
            with contextlib.suppress(*DEAD_SOCKET):
                await local.send_all(data)
        with contextlib.suppress(*DEAD_SOCKET):
            await local.send_eof()
    except DEAD:
        bridge.cancel()


async def _echo(stream: Stream) -> None:
    """https://github.com/libp2p/specs/blob/master/ping/ping.md"""
    while data := await stream.read(PING_BYTES):
        await stream.write(data)
    await stream.close()


class _Negotiation:
    """What multistream-select reads and writes: short texts, whatever the peer announces."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        if n is None or n > MAX_NEGOTIATION_BYTES:
            raise ValueError(f"a protocol name of {n} bytes")
        return bytes(await self._stream.read(n))

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)


def _served(*protocols: str) -> p2p.Multiselect:
    return p2p.Multiselect(dict.fromkeys(map(p2p.TProtocol, protocols)))


async def _select(protocol: str, stream: Any) -> None:
    """Asks for one protocol. Raises `ProtocolNotSupportedError`, or anything where the stream or
    the connection breaks."""
    communicator = p2p.MultiselectCommunicator(cast(Any, _Negotiation(stream)))
    client = p2p.MultiselectClient()
    await client.handshake(communicator)
    await client.try_select(communicator, p2p.TProtocol(protocol))


async def _negotiate(protocols: p2p.Multiselect, stream: Any) -> str:
    """Lets the peer choose one of `protocols`."""
    communicator = p2p.MultiselectCommunicator(cast(Any, _Negotiation(stream)))
    protocol, _ = await protocols.negotiate(communicator)
    return str(protocol)


def _listen(host: str, port: int) -> list[trio.SocketListener]:
    """At the same port of each address. Raises `AddressError`."""
    made: list[socket.socket] = []
    try:
        made = bound(listening_hosts(host), port)
        for one in made:
            one.listen(BACKLOG)
        return [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in made]
    except OSError as e:
        for one in made:
            one.close()
        if e.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} of {host} is taken: stop what listens there, "
                "or choose another port (0: any free one)"
            ) from None
        raise AddressError(f"cannot listen on {host} port {port}: {_reason(e)}") from None


def _multiaddrs(listener: trio.SocketListener) -> list[str]:
    host, port = listener.socket.getsockname()[:2]
    version = 6 if ":" in host else 4
    is_any = ipaddress.ip_address(host).is_unspecified
    loopback = "::1" if version == 6 else "127.0.0.1"
    hosts = [*p2p.get_network_addrs(version), loopback] if is_any else [host]
    return [f"/ip{version}/{h}/tcp/{port}" for h in hosts]


def _reason(error: BaseException) -> str:
    """Why a connection failed, in a few words for a person."""
    for e in _causes(error):
        if isinstance(e, ConnectionRefusedError):
            return "connection refused"
        if isinstance(e, p2p.PeerIDMismatchesPubkey) or "Peer ID mismatch" in str(e):
            return "another identity answered"
        if isinstance(e, trio.TooSlowError):
            return "no answer in time"
        if isinstance(e, socket.gaierror):
            return "the name does not resolve"
        if isinstance(e, OSError) and e.errno:
            return os.strerror(e.errno).lower()
        if isinstance(e, p2p.ProtocolNotSupportedError):
            return "does not speak yamux"
    return f"no libp2p handshake ({type(error).__name__})"


def _causes(error: BaseException) -> list[BaseException]:
    """The error, what it was raised from, and the members of groups; at most `MAX_CAUSES`."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting and len(found) < MAX_CAUSES:
        e = waiting.pop(0)
        found.append(e)
        waiting += e.exceptions if isinstance(e, BaseExceptionGroup) else []
        waiting += [c for c in (e.__cause__, e.__context__) if c is not None]
    return found
