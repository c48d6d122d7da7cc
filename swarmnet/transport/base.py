"""The transport port: calls between peers, whatever carries them.

`Transport` is what the swarm code sees. `Carrier` is what a network must offer for
`transport.channel.ChannelTransport` to make a `Transport` of it: duplex byte streams to
authenticated peers. So hivemind's p2pd, py-libp2p and direct TLS share one protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from swarmnet.protocol.bandwidth import UploadMeter
from swarmnet.protocol.histogram import Histogram
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.wire import BodyT, Message

PROTOCOL_VERSIONS = (4, 4)
"""The lowest and the highest version of the protocol that this program speaks."""
FEATURES: tuple[str, ...] = ()
"""Additions to that version which this program has, and which a peer can do without."""
PROTOCOL_NAME = "/swarmnet/1"
"""Of the streams that become channels. Its number is not the version's: peers of all versions open
such streams, so that the hello can tell them which versions the other side speaks."""
RELAY_PROTOCOL = "/swarmnet/relay/1"
"""Of the streams that `transport.relay` joins."""


@dataclass(slots=True)
class Request(Generic[BodyT]):
    """A call as its handler sees it."""

    remote: str
    """Peer id of the caller, authenticated by the carrier."""
    run_id: str
    """The run that the caller says it belongs to; empty before it knows one."""
    method: str
    message: Message[BodyT]
    progress: Callable[[Message], None]
    """Sends a progress message to the caller while the call is open. Never blocks or raises."""


Handler = Callable[[Request], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A request or a notification as it is known before its body is decoded, and before any of its
    arrays has come."""

    remote: str
    """As in `Request`, and the next two."""
    run_id: str
    method: str
    body_bytes: int
    """0 where the caller is on this machine, or in this process."""
    array_bytes: int


class Gate(Protocol):
    """Decides who may call what at one peer."""

    def knows(self, method: str) -> bool:
        """Is it said who may call this method?"""

    def has_standing(self, machine: str) -> bool:
        """Is there a peer on that machine which has been let into the run? All others together may
        make this one hold a few MiB."""

    def check(self, envelope: Envelope) -> None:
        """Raises a `RemoteError` or `ProtocolViolation` where the caller may not make this call
        now. Without effect, so that it may be asked before anything is kept of the call."""

    def enter(self, envelope: Envelope, body: Any) -> Any:
        """Checks once more, counts the call, decodes its body and checks that. Raises alike."""


@dataclass(slots=True)
class Traffic:
    """Bytes on the wire, frame headers included, by method."""

    sent_bytes: dict[str, int] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)
    direct_sent_bytes: int = 0
    """Of those sent, over direct connections."""
    direct_links: int = 0
    """Peers with a direct connection now."""
    upload: UploadMeter = field(default_factory=UploadMeter)
    call_s: dict[str, Histogram] = field(default_factory=dict)
    """How long calls took that were answered, by method."""
    failed_calls: dict[str, int] = field(default_factory=dict)
    """Calls that no peer answered, by method: cut off, or too late."""

    queued_bytes: Callable[[], int] = lambda: 0
    """Long messages that wait for the uplink: not the background, nor what is for strangers, nor
    what waits for a peer that does not read."""
    queued_to: Callable[[str], int] = lambda peer_id: 0
    """Long messages that are to be sent to a peer and that the network has not taken yet, for
    whatever reason; without the background."""

    def upload_s(self, num_bytes: int) -> float:
        """Seconds that so many bytes keep the uplink busy; 0 while its bandwidth is unknown."""
        rate = self.upload.total.bytes_per_s
        return num_bytes / rate if rate > 0 else 0.0

    def has_direct(self, num_peers: int) -> None:
        """So many peers have a direct connection now."""
        self.direct_links = num_peers

    def add_sent(self, method: str, num_bytes: int, *, is_direct: bool = False) -> None:
        self.direct_sent_bytes += num_bytes if is_direct else 0
        self.sent_bytes[method] = self.sent_bytes.get(method, 0) + num_bytes

    def add_call(self, method: str, seconds: float) -> None:
        if method not in self.call_s:
            self.call_s[method] = Histogram()
        self.call_s[method].add(seconds)

    def add_failed_call(self, method: str) -> None:
        self.failed_calls[method] = self.failed_calls.get(method, 0) + 1

    def add_received(self, method: str, num_bytes: int) -> None:
        self.received_bytes[method] = self.received_bytes.get(method, 0) + num_bytes


class Transport(Protocol):
    """Calls to and from other peers."""

    peer_id: str
    traffic: Traffic

    def addresses(self) -> list[str]:
        """Multiaddrs (with `/p2p/<peer id>`) that others can dial."""

    def set_run(self, run_id: str) -> None:
        """Says to every present and future channel which run this peer belongs to."""

    def handle(self, method: str, handler: Handler, *, ends_with_caller: bool = False) -> None:
        """Serves `method`. An exception that is a `RemoteError` goes to the caller as it is, a
        `ProtocolViolation` as `Refused`, any other is logged here and goes as a `RemoteError`.
        `ends_with_caller`: the handler is cancelled when its caller waits no more, or is gone."""

    def guard(self, gate: Gate) -> None:
        """Asks `gate` about every call from now on. Raises `ValueError` where a method is served,
        now or later, that it does not know."""

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Remembers where a peer can be dialled."""

    def forget(self, peer_id: str) -> None:
        """A peer has been gone for long: what others have said of its machine is kept no more, as
        soon as there is no channel to that. What people have named stays."""

    async def dial(self, address: str, timeout_s: float = ANSWER_S) -> str:
        """Opens a channel to an address (`.../p2p/<peer id>`); returns the peer id. Raises
        `AddressError`, `Unreachable`, `DeadlineExceeded` or `WrongVersion`."""

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
    ) -> Message:
        """Calls a peer over the persistent channel to it, opened when there is none. `timeout_s`:
        for the reply, or for each further part of it: what is arriving is not asked for again.
        Raises `TransportError`, `RemoteError` or `ProtocolViolation`. A cancelled call is cancelled
        at the callee only as far as its channel is concerned: the handler runs on, its reply is
        dropped."""

    async def dial_back(self, asker: str, address: str, timeout_s: float) -> str:
        """Opens a channel to the peer of an address, at the port of that address and the host from
        which the connected peer `asker` is seen to come, and nowhere else. Returns that host, or
        raises as `dial`."""

    async def drop(self, peer_id: str) -> None:
        """Lets go of every connection to a peer: the next call makes a new one. For a peer that
        answers nothing, whose connections have not closed: of one whose address has changed they
        stay open for most of a minute, and lead nowhere. Never raises."""

    def ban(self, peer_id: str, reason: str) -> None:
        """The machine of a peer has broken the protocol by what it said: every connection to it
        ends, and for a growing time there is no other, whichever side opens it. Without effect for
        the own machine. Never raises."""

    def notify(self, peer_id: str, method: str, message: Message) -> None:
        """One-way and best effort: never blocks, never raises."""

    def connected(self) -> list[str]:
        """Peers with an open channel now."""

    def on_connected(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` when the first channel to a peer opened."""

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` at once when the last channel to a machine closed: all peers there
        are out of reach, each of its seats too."""

    async def close(self) -> None:
        """Closes every channel and the carrier. Idempotent."""


@dataclass(slots=True)
class ByteStream:
    """A duplex byte stream to an authenticated peer: a connected asyncio transport, reading
    paused, whose protocol `Channel` will replace; `leftover` was read already."""

    remote: str
    transport: asyncio.Transport
    leftover: bytes = b""
    keep: object = None
    """Whatever must live as long as the stream does."""
    protocol: str = PROTOCOL_NAME
    seen_at: str = ""
    """The multiaddr to which its connection leads; empty where unknown."""
    is_relayed: bool = False
    """It goes through a third peer."""


class Carrier(Protocol):
    """Byte streams between authenticated peers."""

    peer_id: str

    async def start(self, accept: Callable[[ByteStream], None]) -> None:
        """Starts; from now on every incoming stream is handed to `accept`. Raises `AddressError`
        (port taken, address malformed) or `TransportError`."""

    def addresses(self) -> list[str]: ...

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Where a peer is dialled from now on; nowhere, where there are none. Without effect where
        none is well formed."""

    def forget(self, peer_id: str) -> None:
        """Nothing is known of a peer any more."""

    async def connect(self, address: str) -> str:
        """Connects to an address; returns the peer id. Raises `AddressError` or `Unreachable`."""

    async def open(self, peer_id: str, protocol: str = PROTOCOL_NAME) -> ByteStream:
        """Opens a stream to a peer. Raises `Unreachable`."""

    async def drop(self, peer_id: str) -> None:
        """Ends the connections to a peer. Never raises."""

    async def observed(self, peer_id: str) -> str:
        """The multiaddr that a connected peer is seen to come from; empty where unknown."""

    async def close(self) -> None: ...
