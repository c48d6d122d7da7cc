"""The carrier on py-libp2p: for platforms without hivemind's daemon.

py-libp2p lives in trio, we live in asyncio. So a thread of its own runs trio with a small
libp2p host (`libp2p_host`), and every libp2p stream becomes one end of a socket pair, whose
other end is an ordinary asyncio transport: `Channel` cannot tell it from any other carrier's.

    asyncio loop | thread "py-libp2p"
    Channel <-> transport <-> socket pair <-> pump <-> yamux <-> Noise <-> TCP

It speaks Noise and yamux over TCP, nothing else. hivemind's p2pd offers Noise unless started with
`-noise=false`, beside TLS (`-tls=1`) or without it, and the two meet whichever side dials: p2pd
must listen on TCP, not on QUIC alone, and its peers be reachable without a relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from swarmnet.errors import AddressError, SwarmnetError, TransportError, Unreachable
from swarmnet.identity import Identity
from swarmnet.protocol.dialing.addresses import to_tell
from swarmnet.transport.base import PROTOCOL_NAME, ByteStream
from swarmnet.transport.libp2p.interfaces import own_hosts
from swarmnet.transport.libp2p.listening import announced
from swarmnet.transport.libp2p.trio_thread import ThreadEnded, TrioThread

if TYPE_CHECKING:
    from swarmnet.transport.libp2p.host import Host

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""py-libp2p takes a second to import, more on a busy machine."""
OPEN_TIMEOUT_S = 30.0
"""For finding, dialling and negotiating; each step has a bound of its own, below this."""
CLOSE_TIMEOUT_S = 5.0
"""For the thread to end; a daemon thread that does not is left behind."""
MAX_KNOWN_PEERS = 16_384
MAX_ADDRESSES_PER_PEER = 16
MAX_ADDRESS_CHARS = 512

T = TypeVar("T")
ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]{1,253})/tcp/(?P<port>\d{1,5})"
    r"(?:/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{20,100}))?"
)


class PyLibp2pCarrier:
    """Byte streams between authenticated peers, over py-libp2p. Implements `base.Carrier`."""

    def __init__(
        self,
        identity: Identity,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        announce: Sequence[str] = (),
    ) -> None:
        """Listens on `host` and TCP `port` (0: any free one) from `start` on. `announce`: further
        multiaddrs at which others can dial this peer. Raises `WrongAddress` for one that is
        not to be announced."""
        self.peer_id = identity.peer_id
        self._seed = identity.seed
        self._listen = (host, port)
        self._announce = announced(announce, self.peer_id, host)
        self._told: tuple[str, ...] = ()
        self._known: dict[str, tuple[str, ...]] = {}
        self._streams: dict[asyncio.Transport, None] = {}
        self._thread: TrioThread | None = None
        self._host: Host | None = None
        self._accept: Callable[[ByteStream], None] | None = None
        self._accepting: dict[asyncio.Task[None], None] = {}

    async def start(self, accept: Callable[[ByteStream], None]) -> None:
        """Listens; from now on every incoming stream is handed to `accept`. Raises `AddressError`
        or `TransportError`."""
        self._accept = accept
        self._thread = TrioThread("py-libp2p")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._thread.start(self._serve)
        except BaseException as e:
            await self.close()
            if isinstance(e, TimeoutError):
                text = f"py-libp2p did not start in {START_TIMEOUT_S:.0f} s"
                raise TransportError(text) from None
            if isinstance(e, Exception) and not isinstance(e, SwarmnetError):
                raise TransportError(f"py-libp2p did not start: {e!r}") from e
            raise

    async def _serve(self, ready: Callable[[], None]) -> None:
        """The thread's life, in trio."""
        from swarmnet.transport.libp2p import imports as libp2p_import
        from swarmnet.transport.libp2p.host import Host

        libp2p_import.set_logging(logger.isEnabledFor(logging.DEBUG))
        self._host = Host(self._seed, self._on_stream_in_trio, self.addresses)
        if self._accept is not None:  # closed while all this was imported
            await self._host.run(*self._listen, ready)

    def addresses(self) -> list[str]:
        """Multiaddrs, with `/p2p/<peer id>`, that others can dial; announced ones first. Those of
        interfaces as they were at the start."""
        if not self._told and self._host is not None and self._host.addresses:
            self._told = tuple(to_tell(self._host.addresses, own_hosts()))
        own = [f"{address}/p2p/{self.peer_id}" for address in self._told]
        return list(dict.fromkeys([*self._announce, *own]))

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Remembers where a peer can be dialled. What this carrier cannot dial (QUIC, relays) or
        cannot read is skipped; the newest `MAX_KNOWN_PEERS` peers are kept. Where there are none,
        those known are forgotten."""
        if not addresses:
            self._known.pop(peer_id, None)
        found = [a for a in addresses if _match(a, peer_id)][:MAX_ADDRESSES_PER_PEER]
        if not found or peer_id == self.peer_id:
            return
        self._known.pop(peer_id, None)
        self._known[peer_id] = tuple(found)
        while len(self._known) > MAX_KNOWN_PEERS:
            del self._known[next(iter(self._known))]

    def forget(self, peer_id: str) -> None:
        """Nothing is known of a peer any more."""
        self._known.pop(peer_id, None)

    async def connect(self, address: str) -> str:
        """Connects to an address (`.../p2p/<peer id>`); returns the peer id. Raises `AddressError`
        or `Unreachable`."""
        match = _parse(address)
        peer_id = match["peer"]
        if not peer_id:
            raise AddressError(f"the address {address} lacks its end, /p2p/<peer id>")
        if peer_id == self.peer_id:
            raise AddressError(f"the address {address} is this peer's own")
        await self._in_trio(lambda host: host.connect(peer_id, [_endpoint(match)]))
        self.learn(peer_id, [address, *self._known.get(peer_id, ())])
        return peer_id

    async def open(self, peer_id: str, protocol: str = PROTOCOL_NAME) -> ByteStream:
        """Opens a stream to a peer, over the connection to it or a new one. Raises
        `Unreachable`."""
        matches = [_match(a, peer_id) for a in self._known.get(peer_id, ())]
        endpoints = [_endpoint(m) for m in matches if m]
        far, seen_at = await self._in_trio(
            lambda host: _open(host, peer_id, endpoints, protocol), lambda made: made[0].close()
        )
        return await self._wrap(peer_id, far, protocol, seen_at)

    async def drop(self, peer_id: str) -> None:
        with contextlib.suppress(SwarmnetError):
            await self._in_trio(lambda host: host.drop(peer_id))

    async def observed(self, peer_id: str) -> str:
        async def look(host: Host) -> str:
            return host.observed(peer_id)

        try:
            return await self._in_trio(look)
        except Unreachable:
            return ""

    async def close(self) -> None:
        """Closes every stream and connection and ends the thread, within `CLOSE_TIMEOUT_S`.
        Idempotent."""
        for task in list(self._accepting):
            task.cancel()
        for transport in list(self._streams):
            transport.close()
        self._accept = None
        if self._thread:
            if self._host:
                self._thread.soon(self._host.stop)
            if not await self._thread.join(CLOSE_TIMEOUT_S):
                logger.warning("py-libp2p's thread did not end in %.0f s", CLOSE_TIMEOUT_S)
        self._streams.clear()  # what was still unsent there failed with the other end

    async def _in_trio(
        self, work: Callable[[Host], Awaitable[T]], discard: Callable[[T], None] | None = None
    ) -> T:
        """Raises `Unreachable`."""
        thread, host = self._thread, self._host
        if thread is None or host is None or self._accept is None:
            raise Unreachable("this peer's network is not running")
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                return await thread.run(lambda: work(host), discard)
        except TimeoutError:
            raise Unreachable(f"no answer in {OPEN_TIMEOUT_S:.0f} s") from None
        except ThreadEnded:
            raise Unreachable("this peer's network was closed") from None
        except OSError as e:  # no more file descriptors, say
            raise Unreachable(f"cannot open a stream: {e}") from None

    def _on_stream_in_trio(self, remote: str, far: socket.socket, protocol: str) -> None:
        assert self._thread is not None
        seen_at = "" if self._host is None else self._host.observed(remote)
        if not self._thread.soon_in_loop(self._on_stream, remote, far, protocol, seen_at):
            far.close()

    def _on_stream(self, remote: str, far: socket.socket, protocol: str, seen_at: str) -> None:
        """An incoming stream, on the loop's thread."""
        if self._accept is None:
            far.close()
            return
        task = asyncio.ensure_future(self._hand_over(remote, far, protocol, seen_at))
        self._accepting[task] = None
        task.add_done_callback(lambda t: self._on_handed_over(t, far))

    def _on_handed_over(self, task: asyncio.Task[None], far: socket.socket) -> None:
        self._accepting.pop(task, None)
        if task.cancelled():  # perhaps before it ever ran
            far.close()

    async def _hand_over(
        self, remote: str, far: socket.socket, protocol: str, seen_at: str
    ) -> None:
        try:
            stream = await self._wrap(remote, far, protocol, seen_at)
        except (Unreachable, OSError) as e:
            logger.debug("an incoming stream ended early: %s", e)
            return
        if self._accept is None:
            stream.transport.abort()
        else:
            self._accept(stream)

    async def _wrap(
        self, remote: str, far: socket.socket, protocol: str, seen_at: str
    ) -> ByteStream:
        """The asyncio side of a bridge. Raises `Unreachable` where the stream is already over."""
        loop = asyncio.get_running_loop()
        early = _Early()
        try:
            if far.family == getattr(socket, "AF_UNIX", None):
                transport, _ = await loop.create_unix_connection(lambda: early, sock=far)
            else:
                transport, _ = await loop.create_connection(lambda: early, sock=far)
        except BaseException:
            far.close()
            raise
        if early.is_over:
            transport.abort()
            raise Unreachable(f"{remote} closed the stream at once")
        transport.pause_reading()
        self._forget_closed()
        self._streams[transport] = None
        return ByteStream(remote, transport, bytes(early.data), protocol=protocol, seen_at=seen_at)

    def _forget_closed(self) -> None:
        for transport in [t for t in self._streams if t.is_closing()]:
            del self._streams[transport]


class _Early(asyncio.Protocol):
    """Keeps what arrives before a channel takes over."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_over = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> None:
        self.is_over = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True


def _match(address: str, peer_id: str | None = None) -> re.Match[str] | None:
    """The parts of an address that TCP can dial; None for any other, or one of another peer."""
    match = ADDRESS.fullmatch(address) if len(address) <= MAX_ADDRESS_CHARS else None
    if match is None or not 0 < int(match["port"]) < 65_536:
        return None
    if match["kind"] in ("ip4", "ip6"):
        try:
            version = ipaddress.ip_address(match["host"]).version
        except ValueError:
            return None
        if f"ip{version}" != match["kind"]:
            return None
    return None if peer_id and match["peer"] not in (None, peer_id) else match


def _parse(address: str) -> re.Match[str]:
    """Raises `AddressError` for what TCP cannot dial."""
    match = _match(address)
    if match is None:
        raise AddressError(
            f"cannot dial {address[:MAX_ADDRESS_CHARS]!r}: this transport takes addresses such as "
            "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW..."
        )
    return match


def _endpoint(match: re.Match[str]) -> tuple[str, int]:
    return match["host"], int(match["port"])


async def _open(
    host: Host, peer_id: str, endpoints: Sequence[tuple[str, int]], protocol: str
) -> tuple[socket.socket, str]:
    """A stream's far end, and the multiaddr of its connection."""
    return await host.open(peer_id, endpoints, protocol), host.observed(peer_id)
