"""Streams between two peers of which neither can dial the other, through a third that both can.

The third, the *relay*, joins two raw libp2p streams (protocol `/swarmnet/relay/1`): one that the
caller opened to it, and one that it opens to the callee over the connection that the callee keeps
to it. It forwards bytes and sees none of them: inside, the two speak TLS 1.3 with each other, and
each proves with its peer key who it is. The callee signs the fingerprint of its certificate, so
nobody can stand between; the caller signs the callee's challenge.

This stands in for libp2p's circuits, which hivemind's daemon reserves after three minutes only,
for relays that it was started with.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import struct
from collections.abc import Coroutine, Sequence
from typing import Any

import msgpack

from swarmnet.errors import AddressError, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet.identity import Identity, verify
from swarmnet.printable import printable
from swarmnet.protocol.relay_room import GreetingRoom, silent_circuit
from swarmnet.transport.base import RELAY_PROTOCOL, ByteStream, Carrier
from swarmnet.transport.dial_filter import DialFilter
from swarmnet.transport.direct import Certificate, client_context
from swarmnet.transport.open_channels import OpenChannels
from swarmnet.transport.racing import Way

log = logging.getLogger("swarmnet.transport")

CIRCUIT = "/p2p-circuit"
CIRCUIT_ADDRESS = re.compile(r"(.+/p2p/([^/]+))/p2p-circuit(?:/p2p/([^/]+))?")
HEAD = struct.Struct(">H")
MAX_HEAD_BYTES = 1024
HEAD_TIMEOUT_S = 8.0
"""For what is said before the bytes flow, and for the handshake."""
MAX_KNOWN = 16_384
"""Peers of which relays are remembered."""
MAX_RELAYS_EACH = 4
MAX_CIRCUITS, MAX_CIRCUITS_EACH = 128, 16
"""That a relay joins at a time; of one caller or callee."""
HALF_BUFFER_BYTES = 256 << 10
"""Read from one side of a circuit and not yet taken by the other."""
SIGNATURE_BYTES, NONCE_BYTES = 64, 32
CALLEE, CALLER = b"swarmnet relay 1: callee\0", b"swarmnet relay 1: caller\0"
RELAYED = "relay"
"""What forwarded bytes are counted under."""


def split_circuit(address: str) -> tuple[str, str, str] | None:
    """(the relay's address, its peer id, the callee's peer id or "") of a circuit address."""
    found = CIRCUIT_ADDRESS.fullmatch(address)
    return None if found is None else (found[1], found[2], found[3] or "")


def peer_behind(address: str) -> str:
    """The peer id at the end of a circuit address; empty where it is no such address. Raises
    `AddressError` where it does not say at whom it ends."""
    circuit = split_circuit(address)
    if circuit is not None and not circuit[2]:
        raise AddressError(f"{address[:200]} does not end in /p2p/<peer id>")
    return "" if circuit is None else circuit[2]


class Relays:
    """Circuits of one peer: those that it uses, and those that it joins for others."""

    def __init__(
        self,
        identity: Identity,
        carrier: Carrier,
        channels: OpenChannels,
        dial_filter: DialFilter,
    ) -> None:
        """`channels`: those that run through these circuits, too."""
        self.num_used = 0
        """Circuits that this peer is an end of, since its start."""
        self.num_joined = 0
        """Circuits between others that run through this peer now."""
        self._identity = identity
        self._carrier = carrier
        self._channels = channels
        self._filter = dial_filter
        self._certificate = Certificate()
        self._context = client_context()
        self._known: dict[str, dict[str, str]] = {}
        self._needed: dict[str, None] = {}
        self._callers: dict[str, None] = {}
        """Peers that have called this one through a relay, the latest last."""
        self._grants: dict[str, float] = {}
        self._circuits: dict[Circuit, None] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._greeting: GreetingRoom[asyncio.Task[Any]] = GreetingRoom()

    async def close(self) -> None:
        """Idempotent."""
        for circuit in list(self._circuits):
            circuit.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- who is behind which relay ----------------------------------------------------------

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Remembers the circuit addresses among `addresses`, in place of those known."""
        relays: dict[str, str] = {}
        for address in addresses:
            found = split_circuit(address)
            if found is None or found[2] not in ("", peer_id):
                continue
            if found[1] not in (peer_id, self._carrier.peer_id) and len(relays) < MAX_RELAYS_EACH:
                relays.setdefault(found[1], found[0])
        self._known.pop(peer_id, None)
        if relays:
            if len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[peer_id] = relays

    def forget_peer(self, peer_id: str) -> None:
        """A peer has been gone for long."""
        for known in (self._known, self._needed, self._callers):
            known.pop(peer_id, None)

    def knows(self, peer_id: str) -> bool:
        """Is a relay of a peer known?"""
        return peer_id in self._known

    def grant(self, peer_id: str, until_s: float) -> None:
        """Lets others call a peer through this one, until then on the loop's clock."""
        now = asyncio.get_running_loop().time()
        self._grants = {p: end for p, end in self._grants.items() if end > now}
        self._grants[peer_id] = until_s

    @property
    def num_greeting(self) -> int:
        """Streams of others that are not joined yet."""
        return len(self._greeting)

    @property
    def num_granted(self) -> int:
        """Peers that may be called through this one."""
        now = asyncio.get_running_loop().time()
        return sum(end > now for end in self._grants.values())

    def has_grant(self, peer_id: str) -> bool:
        """May a peer be called through this one?"""
        return self._grants.get(peer_id, 0.0) > asyncio.get_running_loop().time()

    # ---- the caller -------------------------------------------------------------------------

    def ways(self, peer_id: str) -> list[Way]:
        """How to open a stream to a peer through its relays, those first that are connected."""
        near = self._channels.connected()
        relays = self._known.get(peer_id, {})
        order = sorted(relays, key=lambda r: r not in near)
        return [lambda r=r: self._through(r, relays[r], peer_id) for r in order]  # type: ignore[misc]

    def is_needed(self, peer_id: str) -> bool:
        """Was a peer reached in no other way, lately?"""
        return peer_id in self._needed

    def carry(self, peer_id: str) -> bool:
        """Have this peer and another one last met through a relay?"""
        return peer_id in self._needed or peer_id in self._callers

    def opened(self, peer_id: str, *, through_relay: bool) -> None:
        """A stream to a peer was opened."""
        self._needed.pop(peer_id, None)
        self._callers.pop(peer_id, None)
        if through_relay:
            _note(self._needed, peer_id)

    async def _through(self, relay_id: str, address: str, peer_id: str) -> ByteStream:
        name = f"relay {relay_id[-8:]}"
        if relay_id not in self._channels.connected():
            if not self._filter.may_connect(peer_id, relay_id, address):
                raise Unreachable(f"{name}: it is not to be dialled where the peer says")
            await self._carrier.connect(address)
        stream = await self._carrier.open(relay_id, RELAY_PROTOCOL)
        transport: asyncio.Transport = stream.transport
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                talk = Talk(stream)
                talk.say({"to": peer_id})
                answer = await talk.hear()
                if answer.get("e") is not None:
                    raise Unreachable(f"{name}: {printable(str(answer['e'])[:200])}")
                visitor = Talk(None)
                transport = await self._tls(talk, visitor, server=False)
                certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
                print_ = hashlib.sha256(certificate or b"").digest()
                challenge = await visitor.read(NONCE_BYTES + SIGNATURE_BYTES)
                nonce, signature = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
                own = self._carrier.peer_id
                if not verify(peer_id, _claim(CALLEE, print_, nonce, own), signature):
                    raise ProtocolViolation("who answered is not who was called")
                transport.write(self._identity.sign(_claim(CALLER, print_, nonce, peer_id)))
                rest = visitor.rest()
        except BaseException as e:
            transport.abort()
            stream.transport.abort()
            if isinstance(e, ProtocolViolation | EOFError | OSError | TimeoutError):
                raise Unreachable(f"{name}: {str(e) or 'no answer in time'}") from None
            raise
        self.num_used += 1
        return ByteStream(peer_id, transport, rest, keep=(stream, talk), is_relayed=True)

    async def _tls(self, talk: Talk, visitor: Talk, *, server: bool) -> asyncio.Transport:
        """TLS inside a circuit."""
        context = self._certificate.context if server else self._context
        transport = await asyncio.get_running_loop().start_tls(
            talk.transport,
            visitor,
            context,
            server_side=server,
            server_hostname=None if server else "",
            ssl_handshake_timeout=HEAD_TIMEOUT_S,
        )
        if transport is None:
            raise ConnectionError("closed in the middle of the handshake")
        visitor.begin(transport)
        return transport

    # ---- the callee, and the relay ----------------------------------------------------------

    def accept(self, stream: ByteStream) -> None:
        """An incoming stream of the relay protocol."""
        if not self._greeting.has_room_for(stream.remote):
            stream.transport.abort()
            return
        ended = self._greeting.enter(self._start(self._greet(stream), stream), stream.remote)
        if ended is not None:
            ended.cancel()

    def _start(self, work: Coroutine[Any, Any, None], stream: ByteStream) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None

        def is_over(task: asyncio.Task[Any]) -> None:
            self._tasks.pop(task, None)
            self._greeting.leave(task)
            if task.cancelled():  # maybe before its first step
                stream.transport.abort()

        task.add_done_callback(is_over)
        return task

    async def _greet(self, stream: ByteStream) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(3 * HEAD_TIMEOUT_S):
                talk = Talk(stream)
                async with asyncio.timeout(HEAD_TIMEOUT_S):
                    head = await talk.hear()
                self._greeting.spoke(task)
                if isinstance(head.get("to"), str):
                    await self._join(talk, stream, head["to"])
                elif isinstance(head.get("from"), str):
                    await self._answer(talk, stream, head["from"])
                else:
                    raise ProtocolViolation("a relay stream for nothing")
        except (SwarmnetError, OSError, EOFError, TimeoutError) as e:
            log.debug("a relayed stream of %s failed: %r", stream.remote[-8:], e)
            stream.transport.abort()
        except BaseException:
            stream.transport.abort()
            raise

    async def _answer(self, talk: Talk, stream: ByteStream, caller: str) -> None:
        """Somebody calls this peer through the relay `stream.remote`."""
        talk.say({"ok": 1})
        visitor = Talk(None)
        transport = await self._tls(talk, visitor, server=True)
        try:
            nonce, print_ = secrets.token_bytes(NONCE_BYTES), self._certificate.fingerprint
            transport.write(nonce + self._identity.sign(_claim(CALLEE, print_, nonce, caller)))
            signature = await visitor.read(SIGNATURE_BYTES)
            if not verify(caller, _claim(CALLER, print_, nonce, self._carrier.peer_id), signature):
                raise ProtocolViolation("the caller is not who it says it is")
        except BaseException:
            transport.abort()
            raise
        self.num_used += 1
        _note(self._callers, caller)
        self._channels.accept(
            ByteStream(caller, transport, visitor.rest(), keep=(stream, talk), is_relayed=True)
        )

    async def _join(self, talk: Talk, stream: ByteStream, callee: str) -> None:
        """The caller `stream.remote` wants to be joined with a peer that is connected here."""
        why = self._why_not(stream.remote, callee)
        if not why:
            try:
                other = await self._carrier.open(callee, RELAY_PROTOCOL)
            except SwarmnetError as e:
                why = f"it is not connected to the relay any more ({e})"
        if why:
            talk.say({"e": why})
            stream.transport.close()
            return
        try:
            farther = Talk(other)
            farther.say({"from": stream.remote})
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                await farther.hear()
            rests = talk.rest(), farther.rest()  # before the circuit counts: either may be gone
            talk.say({"ok": 1})
            Circuit(self, stream, other).begin(*rests)
        except BaseException:
            other.transport.abort()
            raise

    def _why_not(self, caller: str, callee: str) -> str:
        if not self.has_grant(callee) or callee not in self._channels.connected():
            return "the relay keeps no place for it"
        ends = [end for circuit in self._circuits for end in circuit.ends]
        if len(self._circuits) >= MAX_CIRCUITS and not self._end_silent():
            return "the relay is full"
        if max(ends.count(caller), ends.count(callee)) >= MAX_CIRCUITS_EACH:
            return "too many circuits of one peer"
        return ""

    def _end_silent(self) -> bool:
        """Makes room for one more circuit; False where all are in use."""
        now = asyncio.get_running_loop().time()
        silent = silent_circuit({c: c.heard_at for c in self._circuits}, now)
        if silent is not None:
            silent.abort()
        return silent is not None

    def joined(self, circuit: Circuit) -> None:
        """A circuit began."""
        self._circuits[circuit] = None
        self.num_joined = len(self._circuits)

    def parted(self, circuit: Circuit) -> None:
        """A circuit is over."""
        self._circuits.pop(circuit, None)
        self.num_joined = len(self._circuits)

    def forwarded(self, num_bytes: int) -> bool:
        """Counts bytes of a circuit; False where the cap on the upload wants a pause."""
        self._channels.traffic.add_received(RELAYED, num_bytes)
        self._channels.traffic.add_sent(RELAYED, num_bytes)
        self._channels.pacer.sent(num_bytes)
        return self._channels.pacer.may_send()

    def pause(self, half: Half) -> None:
        """Goes on with a half when the cap on the upload allows."""
        self._channels.pacer.wait(half)

    def forget(self, half: Half) -> None:
        """It waits no more."""
        self._channels.pacer.forget(half)


def _note(peers: dict[str, None], peer_id: str) -> None:
    """The latest `MAX_KNOWN` are kept."""
    peers.pop(peer_id, None)
    if len(peers) >= MAX_KNOWN:
        del peers[next(iter(peers))]
    peers[peer_id] = None


def _claim(role: bytes, fingerprint: bytes, nonce: bytes, other: str) -> bytes:
    """What one end signs for the other."""
    return role + fingerprint + nonce + other.encode()


class Talk(asyncio.Protocol):
    """Reads what is said before the bytes flow, and not a byte more than that from the stream."""

    def __init__(self, stream: ByteStream | None) -> None:
        self.transport: Any = None
        self._buffer = bytearray()
        self._changed = asyncio.Event()
        self._is_lost = False
        if stream is not None:
            self._buffer += stream.leftover
            self.transport = stream.transport
            self.transport.set_protocol(self)
            self.transport.resume_reading()

    def begin(self, transport: asyncio.Transport) -> None:
        """The transport, where there was none at first."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > MAX_HEAD_BYTES and self.transport is not None:
            self.transport.pause_reading()  # whoever takes over reads on
        self._changed.set()

    def eof_received(self) -> bool:
        self._is_lost = True
        self._changed.set()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._changed.set()

    async def read(self, num_bytes: int) -> bytes:
        """Raises `EOFError`."""
        while len(self._buffer) < num_bytes:
            if self._is_lost:
                raise EOFError("the stream ended")
            self._changed.clear()
            await self._changed.wait()
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data

    async def hear(self) -> dict[str, Any]:
        """Raises `ProtocolViolation` or `EOFError`."""
        (size,) = HEAD.unpack(await self.read(HEAD.size))
        if size > MAX_HEAD_BYTES:
            raise ProtocolViolation("the head of a relay stream is too long")
        data = await self.read(size)
        try:
            head = msgpack.unpackb(data, raw=False)
        except (ValueError, TypeError, msgpack.UnpackException) as e:
            raise ProtocolViolation(f"not msgpack: {str(e)[:100]}") from None
        if not isinstance(head, dict):
            raise ProtocolViolation("the head of a relay stream is no map")
        return head

    def say(self, head: dict[str, Any]) -> None:
        data = msgpack.packb(head)
        self.transport.write(HEAD.pack(len(data)) + data)

    def rest(self) -> bytes:
        """What came after; reading is paused for whoever takes over."""
        self.transport.pause_reading()
        if self._is_lost:
            raise EOFError("the stream ended")
        data = bytes(self._buffer)
        self._buffer.clear()
        return data


class Half(asyncio.Protocol):
    """One side of a circuit: what it reads, the other side writes."""

    def __init__(self, circuit: Circuit, transport: Any, keep: object) -> None:
        self.transport = transport
        self.other: Half = self
        self._circuit = circuit
        self._keep = keep
        self._is_full = False
        """The other side does not take more."""
        self._waits = False
        """For the cap on the upload."""

    def data_received(self, data: bytes) -> None:
        self._circuit.heard()
        may_go_on = self._circuit.relays.forwarded(len(data))
        self.other.transport.write(data)
        if not may_go_on and not self._waits:
            self._waits = True
            self.transport.pause_reading()
            self._circuit.relays.pause(self)

    def pump(self) -> None:
        """`pacing.Sender`"""
        self._waits = False
        self.go_on()

    def pause_writing(self) -> None:
        self.other.hold()

    def resume_writing(self) -> None:
        self.other.release()

    def hold(self) -> None:
        """The other side does not take more."""
        self._is_full = True
        self.transport.pause_reading()

    def release(self) -> None:
        """The other side takes more again."""
        self._is_full = False
        self.go_on()

    def go_on(self) -> None:
        """Reads on, unless something keeps this side waiting."""
        if not (self._is_full or self._waits or self.transport.is_closing()):
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._circuit.relays.forget(self)
        self._circuit.end()


class Circuit:
    """Two streams, joined."""

    def __init__(self, relays: Relays, near: ByteStream, far: ByteStream) -> None:
        self.relays = relays
        self.ends = (near.remote, far.remote)
        self._halves = tuple(Half(self, s.transport, s.keep) for s in (near, far))
        self._halves[0].other, self._halves[1].other = self._halves[1], self._halves[0]
        self.heard()
        relays.joined(self)

    def heard(self) -> None:
        """A byte has come, from either side."""
        self.heard_at = asyncio.get_running_loop().time()

    def begin(self, *rests: bytes) -> None:
        """Lets the bytes flow; `rests`: what was read too much of each side."""
        for half in self._halves:
            half.transport.set_write_buffer_limits(high=HALF_BUFFER_BYTES)
            half.transport.set_protocol(half)
        for half, rest in zip(self._halves, rests, strict=True):
            if rest:
                half.data_received(rest)
            if half.transport.is_closing() or half.other.transport.is_closing():
                return self.abort()
            half.go_on()
        return None

    def end(self) -> None:
        """One side is gone: the other gets what was written, then its end."""
        self.relays.parted(self)
        for half in self._halves:
            if not half.transport.is_closing():
                half.transport.close()

    def abort(self) -> None:
        """At once."""
        self.relays.parted(self)
        for half in self._halves:
            half.transport.abort()
