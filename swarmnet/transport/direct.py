"""Direct TLS 1.3 connections between peers that can reach each other.

A bulk transfer does not need libp2p's daemon between the two processes: kernel socket to kernel
socket, received straight into the arrays' memory, it takes a fraction of the CPU time. What libp2p
gives is the certainty of who is there. So a *ticket* is fetched over it: where the peer listens,
the fingerprint of its certificate (made at start, self-signed, never on disk), and a token that
is bound to the peer that asked, good once and for seconds. The client accepts that certificate
only, and says the token first; so each side knows the other as well as libp2p does, and the
stream is handed to the same `transport.calls.Channel`.

Peers choose the addresses in their tickets. So they pass by `transport.dial_filter`, loopback only
where the peer knows this machine's boot id (which it shows by a hash over the token and who asked),
and there is a pause after each failure (`protocol.upgrade.Attempts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import hashlib
import hmac
import logging
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from swarmnet.errors import AddressError, PortTaken, Unreachable
from swarmnet.methods.contact import MAX_HOST_CHARS, Ticket
from swarmnet.protocol.dialing.addresses import STAGGER_S
from swarmnet.protocol.dialing.zones import FIRST_PORT, MAX_PORT, host_from
from swarmnet.protocol.upgrade import TOKEN_BYTES, Tickets
from swarmnet.system import end_when_silent, machine_secret, secret_file
from swarmnet.transport.base import ByteStream
from swarmnet.transport.libp2p.interfaces import bound, listening_hosts
from swarmnet.transport.racing import race

log = logging.getLogger("swarmnet.transport")

PREAMBLE = b"swarmnet-direct\x02"
"""What a client says first; its token follows."""
WHENCE = b"swarmnet-whence\x02"
"""In its place: the client only wants to know from where its connection is seen to come."""
GREETING_BYTES = len(PREAMBLE) + TOKEN_BYTES
GREETING_TIMEOUT_S = 5.0
"""TLS handshake and greeting together."""
HOST_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
NAME = re.compile(r"[A-Za-z0-9_](?:[-.A-Za-z0-9_]*[A-Za-z0-9_])?\.?")
MAX_NAMES, MAX_ANSWERS = 2, 4
"""Of one ticket; of one name."""
LOOK_UP_S = 5.0
DIAL_TIMEOUT_S = 5.0
"""Of one address."""
MAX_GREETING = 64
"""Visitors that have not said their token yet; more wait in the kernel's queue."""
MAX_GREETING_EACH = 8
"""Of one IP address; more are turned away."""
BACKLOG = 128
DEAD_AFTER_S = 10
"""Sent bytes that the other side's kernel has not taken for so long end the connection."""
UNSENT_BYTES = 256 << 10
"""What the kernel holds of a stream beyond what is on its way. It holds megabytes otherwise, a
second and more of a home's uplink, of which nobody knows that they wait for it: neither `Turns`,
nor the measurement of the bandwidth (tests/transport/test_direct.py)."""
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 10, 5, 3
ACCEPT_PAUSE_S = 0.5
"""Rest after an accept that failed (no file descriptors left, as a rule)."""
TOLD_FOR_S = 10.0
"""How long the connection stands of who was told from where it comes: as long as a router is to
keep its port."""
VALID_DAYS = 3650
"""Of the certificate; nobody looks at it, the fingerprint counts."""


def port_after(port: int) -> int:
    """That at which a peer listens for direct connections where it listens at `port` for others; 0,
    any, where that is any or nobody dials the next one."""
    return port + 1 if port and FIRST_PORT <= port + 1 <= MAX_PORT else 0


def machine_proof(token: bytes, asker: str) -> bytes:
    """Shows to the peer that asked for a ticket, where that is on the same machine, that this
    process is there; to nobody else, so that nobody can show it as his own."""
    secret = machine_secret()
    if not secret:
        return b""
    said = secret + asker.encode()
    return hashlib.blake2b(said, key=token, digest_size=32, person=b"sw-machine").digest()


def is_here(ticket: Ticket, own_peer_id: str) -> bool:
    """Whether the peer that gave this one a ticket is on this machine."""
    proof = machine_proof(ticket.token, own_peer_id)
    return bool(proof) and hmac.compare_digest(proof, ticket.machine)


class _Straight(ssl.SSLObject):
    """One Python function less for each TLS record: uvloop asks for these three methods once for
    a connection, and gets those that they would call."""

    _sslobj: Any

    @property
    def read(self) -> Any:
        return self._sslobj.read

    @property
    def write(self) -> Any:
        return self._sslobj.write

    @property
    def pending(self) -> Any:
        return self._sslobj.pending


def _straighten(context: ssl.SSLContext) -> None:
    """Not where a Python's `ssl` is made in another way."""
    is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
    probe = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=is_server)
    if hasattr(probe, "_sslobj"):
        context.sslobject_class = _Straight


class Certificate:
    """A fresh key and its self-signed certificate, in memory only."""

    def __init__(self) -> None:
        key = Ed25519PrivateKey.generate()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarmnet")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .sign(key, None)
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        der = certificate.public_bytes(serialization.Encoding.DER)
        self.fingerprint = hashlib.sha256(der).digest()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # every connection has a token of its own: none is resumed
        with secret_file(secret + pem) as path:  # Python's ssl reads certificates from files only
            self.context.load_cert_chain(path)
        _straighten(self.context)


def client_context() -> ssl.SSLContext:
    """TLS 1.3 to a certificate that is known by its fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is compared after the handshake
    _straighten(context)
    return context


class _Waiting(asyncio.Protocol):
    """A connection that no channel has taken over yet."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "pause_reading")
        self.transport = transport  # type: ignore[assignment]
        self.transport.pause_reading()  # type: ignore[union-attr]

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class _Visitor(_Waiting):
    """Reads the greeting of who connected, and no byte of what is not for us to judge."""

    def __init__(self) -> None:
        super().__init__()
        self.received = bytearray()
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.received += data
        if len(self.received) >= GREETING_BYTES and not self.greeted.done():
            assert self.transport is not None
            self.transport.pause_reading()
            self.greeted.set_result(None)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionError("gone before its greeting"))
            self.greeted.exception()  # seen: nobody may be waiting any more


class DirectListener:
    """Where other peers connect directly."""

    def __init__(self, host: str, port: int, *, is_wish: bool = False) -> None:
        """`host`: of the interface (`interfaces.ANY_INTERFACE`: at all addresses of this machine);
        `port`: 0 for any that is free. `is_wish`: any other will do where that port is taken."""
        self.port = port
        self.outside: dict[str, int] = {}
        """By IP address of a router that forwards the port, the number that it has there."""
        self._is_wish = is_wish
        self.tickets = Tickets(secrets.token_bytes)
        self._host = host
        self._hosts = listening_hosts(host)
        self._certificate = Certificate()
        self._accept: Callable[[ByteStream], None] = lambda stream: stream.transport.abort()
        self._listening: list[socket.socket] = []
        self._acceptors: list[asyncio.Task[None]] = []
        self._greeting: dict[asyncio.Task[None], str] = {}
        self._told: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self.client_context = client_context()

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of its certificate (DER)."""
        return self._certificate.fingerprint

    async def start(self, accept: Callable[[ByteStream], None]) -> None:
        """Every authenticated stream is handed to `accept`. Raises `AddressError`."""
        self._accept = accept
        listening: list[socket.socket] = []
        try:
            try:
                listening = bound(self._hosts, self.port)
            except OSError as e:
                if not self._is_wish or e.errno != errno.EADDRINUSE:
                    raise
                listening = bound(self._hosts, 0)
            for one in listening:
                one.setblocking(False)
                one.listen(BACKLOG)
                # Only now: two that listen shall not share a port, though one that dials may.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as e:
            for one in listening:
                one.close()
            kind = PortTaken if e.errno == errno.EADDRINUSE else AddressError
            raise kind(
                f"direct connections cannot listen on {self._host} port {self.port} "
                f"({e.strerror}); choose another --direct-port, or --no-direct"
            ) from None
        self._listening = listening
        self.port = listening[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        self._acceptors = [loop.create_task(self._accept_all(one)) for one in listening]

    async def close(self) -> None:
        """Idempotent."""
        tasks = [*self._greeting, *self._acceptors]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport, timer in self._told.items():
            timer.cancel()
            transport.abort()
        self._told.clear()
        for one in self._listening:
            one.close()
        self._listening.clear()

    def forwarded(self, outside: dict[str, int]) -> None:
        """Routers forward the port so: `outside`."""
        self.outside = outside

    @property
    def num_greeting(self) -> int:
        """Visitors that have not shown a ticket yet."""
        return len(self._greeting)

    def ticket(self, peer_id: str, addresses: Sequence[str]) -> Ticket:
        """For an authenticated peer. `addresses`: multiaddrs of this peer; their hosts are told."""
        token = self.tickets.issue(peer_id, asyncio.get_running_loop().time())
        hosts = dict.fromkeys(h for h in map(host_of, addresses) if h)
        hosts |= dict.fromkeys(self.outside)
        pairs = tuple((host, self.outside.get(host, self.port)) for host in hosts)[:64]
        return Ticket(pairs, self._certificate.fingerprint, token, machine_proof(token, peer_id))

    def dialling_socket(self, family: socket.AddressFamily) -> socket.socket:
        """One that goes out from the port at which this listens. Raises `OSError`."""
        own = next((one for one in self._listening if one.family == family), None)
        if own is None:
            raise OSError(errno.EADDRNOTAVAIL, "it does not listen for that kind of address")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(own.getsockname())
            _tune(sock)
        except OSError:
            sock.close()
            raise
        return sock

    def adopt(self, visitor: socket.socket) -> None:
        """Greets a visitor that was not accepted here: both have dialled."""
        self._begin(visitor, str(visitor.getpeername()[0]))

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._greeting) >= MAX_GREETING:
                await asyncio.wait((*self._greeting,), return_when=asyncio.FIRST_COMPLETED)
            try:
                visitor, address = await loop.sock_accept(listening)
            except OSError as e:
                log.warning("a direct connection could not be accepted: %s", e)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            host = str(address[0])
            if sum(h == host for h in self._greeting.values()) >= MAX_GREETING_EACH:
                visitor.close()
                continue
            self._begin(visitor, host)

    def _begin(self, visitor: socket.socket, host: str) -> None:
        task = asyncio.get_running_loop().create_task(self._greet(visitor))
        self._greeting[task] = host
        task.add_done_callback(lambda t: self._greeting.pop(t, None))

    async def _greet(self, sock: socket.socket) -> None:
        """TLS, then the token; whoever has none or is slow is cut off without a word."""
        loop = asyncio.get_running_loop()
        transport: asyncio.Transport | None = None
        visitor = _Visitor()
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                _tune(sock)
                transport, _ = await loop.connect_accepted_socket(
                    lambda: visitor,
                    sock,
                    ssl=self._certificate.context,
                    ssl_handshake_timeout=GREETING_TIMEOUT_S,
                )
                await visitor.greeted
            greeting, rest = bytes(visitor.received[:GREETING_BYTES]), visitor.received
            token = greeting[len(PREAMBLE) :]
            remote, wish = None, greeting[: len(PREAMBLE)]
            if wish in (PREAMBLE, WHENCE):
                remote = self.tickets.redeem(token, loop.time())
            if remote is None or transport.is_closing():
                log.info("a direct connection without a valid token was closed")
                transport.abort()
                return
            if wish == WHENCE:
                self._tell_whence(transport)
                return
            self._accept(ByteStream(remote, transport, bytes(rest[GREETING_BYTES:])))
        except (OSError, EOFError, TimeoutError) as e:  # ssl.SSLError is an OSError
            log.debug("a direct connection failed to greet: %r", e)
            _drop(transport, sock)
        except BaseException:
            _drop(transport, sock)
            raise

    def _tell_whence(self, transport: asyncio.Transport) -> None:
        """Reading is paused: nothing more is taken."""
        host, port = transport.get_extra_info("peername")[:2]
        transport.write(f"{host} {port}\n".encode())
        later = asyncio.get_running_loop().call_later
        self._told[transport] = later(TOLD_FOR_S, self._end_told, transport)

    def _end_told(self, transport: asyncio.Transport) -> None:
        del self._told[transport]
        transport.abort()


async def dial_direct(
    peer_id: str,
    ticket: Ticket,
    context: ssl.SSLContext,
    is_worth: Callable[[socket.socket, float], bool] = lambda connected, took_s: True,
) -> ByteStream:
    """A stream to the peer that gave the ticket. Its addresses are tried side by side, for the
    ticket is void before many have swallowed what is sent to them; the token is shown where the
    ticket's certificate was seen first, and nowhere else. `is_worth`: whether to go on with a
    connection, which took so many seconds to stand. Raises `Unreachable`."""
    reasons: list[str] = []
    loop = asyncio.get_running_loop()

    async def dial(host: str, port: int) -> ByteStream:
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                began = loop.time()
                sock = await _connected(host, port)
                if is_worth(sock, loop.time() - began):
                    return await authenticated(peer_id, sock, ticket, context)
                sock.close()
                raise ConnectionError("no faster than the way there is")
        except TimeoutError:
            reasons.append(f"{host} port {port}: no answer within {DIAL_TIMEOUT_S:.0f} s")
        except (OSError, EOFError) as e:
            reasons.append(f"{host} port {port}: {e}")
        raise Unreachable(reasons[-1])

    ways = [partial(dial, host, port) for host, port in ticket.addresses]
    if not ways:
        raise Unreachable("the ticket names no address that may be dialled")
    try:
        _, stream = await race(ways, [STAGGER_S] * (len(ways) - 1))
    except Unreachable:
        raise Unreachable("; ".join(reasons)) from None
    stream.transport.write(PREAMBLE + ticket.token)
    return stream


async def _connected(host: str, port: int) -> socket.socket:
    """Over TCP. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _tune(sock)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def authenticated(
    peer_id: str, sock: socket.socket, ticket: Ticket, context: ssl.SSLContext
) -> ByteStream:
    """TLS over a TCP connection, to whoever has the ticket's certificate: a client's stream, on
    which nothing is said yet. Raises `OSError` or `EOFError`, and closes the connection then."""
    transport: asyncio.Transport | None = None
    waiting = _Waiting()
    try:
        host, port = sock.getpeername()[:2]
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: waiting,
            sock=sock,
            ssl=context,
            server_hostname="",
            ssl_handshake_timeout=DIAL_TIMEOUT_S,
        )
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        found = hashlib.sha256(certificate).digest()
        if not hmac.compare_digest(found, ticket.fingerprint):
            raise ConnectionError("another certificate than the ticket's")
        if waiting.is_lost:
            raise ConnectionError("closed at once")
        kind = "ip6" if ":" in host else "ip4"
        return ByteStream(peer_id, transport, seen_at=f"/{kind}/{host}/tcp/{port}")
    except BaseException:
        _drop(transport, sock)
        raise


def host_of(address: str) -> str:
    """The IP address or name in a multiaddr; empty where there is none, or it is that of a
    relay."""
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in HOST_KINDS or "p2p-circuit" in parts:
        return ""
    return parts[2] if len(parts[2]) <= MAX_HOST_CHARS else ""


async def resolved(addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """A ticket's addresses with IP addresses in the place of names, of which `MAX_NAMES` are looked
    up, each time anew: they may lead elsewhere tomorrow. What a name leads to is dialled no sooner
    than what a peer says itself: it passes the same filter."""
    found: list[tuple[str, int]] = []
    left = MAX_NAMES
    for host, port in addresses:
        if host_from(host) is not None:
            found.append((host, port))
        elif NAME.fullmatch(host) and left:
            left -= 1
            found += await _look_up(host, port)
    return found


async def _look_up(name: str, port: int) -> list[tuple[str, int]]:
    try:
        async with asyncio.timeout(LOOK_UP_S):
            answers = await asyncio.get_running_loop().getaddrinfo(
                name, port, type=socket.SOCK_STREAM
            )
    except (OSError, UnicodeError):  # a `TimeoutError` is the first
        return []
    return [(str(answer[4][0]), port) for answer in answers[:MAX_ANSWERS]]


def _drop(transport: asyncio.Transport | None, sock: socket.socket) -> None:
    if transport is not None:
        transport.abort()
    else:
        with contextlib.suppress(OSError):
            sock.close()


def _tune(sock: socket.socket) -> None:
    """No waiting for more to send, no long queue in the kernel, and an end to connections whose
    other side is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_when_silent(
        sock, KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES, silent_s=DEAD_AFTER_S
    )
    unsent = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if unsent is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, unsent, UNSENT_BYTES)
