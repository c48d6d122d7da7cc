"""Methods by which peers find a run, each other, and a way to each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import NoneType

from swarmnet.errors import ProtocolViolation
from swarmnet.methods.method import (
    LOOKS,
    MAX_PROBE_BYTES,
    PROBES,
    SMALL_BYTES,
    STRANGERS,
    Arrays,
    Caller,
    Method,
)
from swarmnet.protocol.upgrade import TOKEN_BYTES

MAX_DIAL_BACK = 4
"""Addresses of one question."""
MAX_ADDRESS_CHARS = 512
MAX_HOST_CHARS = 64
MAX_MEETING_WAIT_S = 5.0
MAX_ORDER_BYTES = 512
SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class SpecReply:
    """`spec`: canonical bytes of the run's spec, of which `run_id` is the hash."""

    run_id: str
    spec: bytes


@dataclass(frozen=True, slots=True)
class DialBackRequest:
    """Addresses of the caller, which wants to know whether it can be reached at their ports."""

    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.addresses) <= MAX_DIAL_BACK or any(
            not 0 < len(a) <= MAX_ADDRESS_CHARS for a in self.addresses
        ):
            raise ValueError("addresses are too many, too few or too long")


@dataclass(frozen=True, slots=True)
class DialBackReply:
    """What came of it."""

    reasons: tuple[str, ...]
    """For each address: empty where the caller was reached at its port, else always the same."""
    unix_s: float
    """The answering peer's clock."""
    host: str = ""
    """Where that was: the IP address from which the caller is seen to come."""

    def __post_init__(self) -> None:
        if len(self.host) > MAX_HOST_CHARS:
            raise ValueError("an impossible address")
        if len(self.reasons) > MAX_DIAL_BACK or not math.isfinite(self.unix_s):
            raise ValueError("reasons are too many, or a time is no time")


@dataclass(frozen=True, slots=True)
class BandwidthRequest:
    """Arrays that only take time, and how many bytes are wanted back."""

    reply_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.reply_bytes <= MAX_PROBE_BYTES:
            raise ValueError("more bytes than one answer may have")


@dataclass(frozen=True, slots=True)
class LookBackRequest:
    """The caller wants to know where it is seen to come from, and whether it can be dialled
    there."""

    ports: tuple[int, ...] = ()
    """On which it listens."""

    def __post_init__(self) -> None:
        if len(self.ports) > MAX_DIAL_BACK or any(not 0 < p < 1 << 16 for p in self.ports):
            raise ValueError("ports are too many or out of range")


@dataclass(frozen=True, slots=True)
class LookBackReply:
    """What is seen of the caller."""

    host: str
    port: int
    """Of its connection to the peer that answers."""
    reached: tuple[int, ...]
    """Of the ports asked about, at that host."""

    def __post_init__(self) -> None:
        if len(self.host) > 64 or not 0 <= self.port < 1 << 16:
            raise ValueError("an impossible address")
        if len(self.reached) > MAX_DIAL_BACK or any(not 0 < p < 1 << 16 for p in self.reached):
            raise ValueError("ports are too many or out of range")


@dataclass(frozen=True, slots=True)
class RelayGrant:
    """A place at a relay: others may call the asker through it."""

    addresses: tuple[str, ...]
    """Multiaddrs of the relay."""
    seconds: float
    """It ends so long after it was asked for last."""

    def __post_init__(self) -> None:
        if len(self.addresses) > 16 or any(len(a) > MAX_ADDRESS_CHARS for a in self.addresses):
            raise ValueError("addresses are too many or too long")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError("a time is no time")


@dataclass(frozen=True, slots=True)
class Ticket:
    """How to connect directly to the peer that gave it."""

    addresses: tuple[tuple[str, int], ...]
    """IP address and port, the best first."""
    fingerprint: bytes
    """SHA-256 of the certificate (DER)."""
    token: bytes
    machine: bytes = b""
    """Keyed hash of the machine's boot id; empty where it has none."""

    def __post_init__(self) -> None:
        if len(self.fingerprint) != 32 or len(self.token) != TOKEN_BYTES:
            raise ProtocolViolation("a ticket with a fingerprint or token of the wrong length")
        if len(self.machine) not in (0, 32) or len(self.addresses) > 64:
            raise ProtocolViolation("a ticket with too many addresses")
        for host, port in self.addresses:
            if len(host) > MAX_HOST_CHARS or not 0 < port < 1 << 16:
                raise ProtocolViolation("a ticket with an impossible address")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one of two peers that are about to dial each other at once is seen from outside, and
    its ticket for the other."""

    host: str
    port: int
    fingerprint: bytes
    token: bytes
    wait_s: float = 0.0
    """So long after its answer the callee dials: as long as that takes to the caller."""

    def __post_init__(self) -> None:
        if not 0 < len(self.host) <= MAX_HOST_CHARS or not 0 < self.port < 1 << 16:
            raise ValueError("an impossible address")
        if len(self.fingerprint) != 32 or len(self.token) != TOKEN_BYTES:
            raise ValueError("a fingerprint or token of the wrong length")
        if not (math.isfinite(self.wait_s) and 0 <= self.wait_s <= MAX_MEETING_WAIT_S):
            raise ValueError("a wait that is too long")


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The run's owner ends it. `order`: msgpack of `stop_order.StopOrder`; `signature`: by the
    owner's key."""

    order: bytes
    signature: bytes

    def __post_init__(self) -> None:
        if len(self.order) > MAX_ORDER_BYTES or len(self.signature) != SIGNATURE_BYTES:
            raise ValueError("an order or its signature has an impossible length")


SPEC = Method("spec", NoneType, SpecReply, Caller.ANYONE, quota=STRANGERS)
TICKET = Method("ticket", NoneType, Ticket, Caller.ANYONE, quota=STRANGERS)
PING = Method("ping", NoneType, NoneType, Caller.ANYONE, quota=STRANGERS)
DIAL_BACK = Method(
    "dial_back",
    DialBackRequest,
    DialBackReply,
    Caller.ANYONE,
    body_bytes=SMALL_BYTES,
    quota=PROBES,
)
BANDWIDTH = Method(
    "bandwidth",
    BandwidthRequest,
    NoneType,
    Caller.ANYONE,
    arrays=Arrays.PROBE,
    quota=PROBES,
)
LOOK_BACK = Method("look_back", LookBackRequest, LookBackReply, Caller.ANYONE, quota=LOOKS)
RELAY_RESERVE = Method("relay_reserve", NoneType, RelayGrant, Caller.ADMITTED)
MEET = Method("meet", Meeting, Meeting, Caller.ADMITTED, quota=LOOKS)
STOP = Method("stop", StopRequest, NoneType, Caller.RUN, quota=STRANGERS)
