"""Methods by which peers hear of each other's records."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType

from swarmnet.methods.method import STRANGERS, Caller, Method
from swarmnet.methods.ranges import MAX_RECORDS, check_ids, check_indices
from swarmnet.wire import MAX_BODY_BYTES

MAX_RECORD_BYTES = 1 << 20
"""In any run."""


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record as its peer signed it: msgpack of `protocol.membership.records.Record` and an
    Ed25519 signature."""

    payload: bytes
    signature: bytes

    def __post_init__(self) -> None:
        if len(self.payload) > MAX_RECORD_BYTES or len(self.signature) > 256:
            raise ValueError("a signed record is too long")


@dataclass(frozen=True, slots=True)
class Unreached:
    """The sender cannot reach `peer_id`, of which it hears through others."""

    peer_id: str
    by: str = ""
    """Who cannot reach it, where the sender passes on what that peer has told it."""

    def __post_init__(self) -> None:
        check_ids((self.peer_id, self.by) if self.by else (self.peer_id,), 2)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Some peer could not reach `peer_id`; holds while its record is not newer than the stamp."""

    peer_id: str
    incarnation: int
    version: int

    def __post_init__(self) -> None:
        check_ids((self.peer_id,), 1)
        check_indices(self.incarnation, self.version)


@dataclass(frozen=True, slots=True)
class GossipRequest:
    """What the caller has: a stamp for each peer that it knows."""

    stamps: dict[str, tuple[int, int]]
    suspicions: tuple[Suspicion, ...] = ()

    def __post_init__(self) -> None:
        if len(self.suspicions) > MAX_RECORDS:
            raise ValueError("too many suspicions")
        check_ids(tuple(self.stamps), MAX_RECORDS)


@dataclass(frozen=True, slots=True)
class Records:
    """Records that the other side lacks, and peers of which it has newer ones."""

    records: tuple[SignedRecord, ...] = ()
    wanted: tuple[str, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()

    def __post_init__(self) -> None:
        if max(len(self.records), len(self.suspicions)) > MAX_RECORDS:
            raise ValueError("too many records")
        check_ids(self.wanted, MAX_RECORDS)


GOSSIP = Method(
    "gossip", GossipRequest, Records, Caller.RUN, body_bytes=MAX_BODY_BYTES, quota=STRANGERS
)
RECORDS = Method(
    "records", Records, NoneType, Caller.RUN, body_bytes=MAX_BODY_BYTES, quota=STRANGERS
)
UNREACHED = Method("unreached", Unreached, NoneType, Caller.ADMITTED)
