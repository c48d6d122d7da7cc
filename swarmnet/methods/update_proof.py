"""What replicas sign of an update, and the methods by which a part of updates is done again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import NoneType
from typing import TypeVar

from swarmnet.methods.audit import AUDITS
from swarmnet.methods.method import LIST_BYTES, SMALL_BYTES, Callee, Caller, Method
from swarmnet.methods.ranges import MAX_ID_CHARS, MAX_TOKENS, check_ids, check_indices
from swarmnet.methods.receipt import HASH_BYTES
from swarmnet.protocol.update.roster import MAX_TERM
from swarmnet.wire import pack, unpack

T = TypeVar("T")

SIGNED_AS = b"swarmnet update\n"
"""Before what is signed, so that a signature is good for nothing else. What it is about is said by
`kind`."""
TAG_BYTES = 8
MAX_PROOF_BYTES = 96 << 10
MAX_ENTRIES = 512
"""Contributors to a sum that is signed; one of more is not."""
CONTRIBUTION, SUM, STEP, SQUARES = "contribution", "sum", "step", "squares"


def _check_kind(kind: str, wanted: str) -> None:
    if kind != wanted:
        raise ValueError(f"a statement of another kind than {wanted}")


def _check_squares(*sums: float) -> None:
    if any(not (math.isfinite(s) and s >= 0) for s in sums):
        raise ValueError("a sum of squares is not finite")


def _check_hashes(*hashes: bytes) -> None:
    if any(len(h) not in (0, HASH_BYTES) for h in hashes):
        raise ValueError("a hash of another length")


@dataclass(frozen=True, slots=True)
class Contribution:
    """Of a contributor: what it pushes. Hashes are SHA-256, see docs/protocol.md."""

    run_id: str
    peer_id: str
    round: int
    stage: int
    shard: int
    num_tokens: int
    gradient: bytes
    """Hash of the array, as it is pushed."""
    kind: str = CONTRIBUTION

    def __post_init__(self) -> None:
        _check_kind(self.kind, CONTRIBUTION)

    @property
    def signed(self) -> bytes:
        """The bytes that are signed."""
        return SIGNED_AS + pack(self)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a primary says of one contribution to its sum."""

    peer_id: str
    claimed: int
    """Tokens, as the contributor has signed."""
    gradient: bytes
    signature: bytes
    """Of the contributor, under its `Contribution`."""
    num_tokens: int
    """That count."""
    factor: float
    """By which it was multiplied; 0 where it was left out."""

    def __post_init__(self) -> None:
        check_ids((self.peer_id,), 1)
        check_indices(self.claimed, self.num_tokens)
        if max(self.claimed, self.num_tokens) > MAX_TOKENS:
            raise ValueError("more tokens than there can be")
        _check_hashes(self.gradient)
        if len(self.signature) > 2 * HASH_BYTES or not math.isfinite(self.factor):
            raise ValueError("an entry that is none")


@dataclass(frozen=True, slots=True)
class Summed:
    """Of a primary, before its step: what it makes the step with."""

    run_id: str
    peer_id: str
    incarnation: int
    round: int
    stage: int
    shard: int
    term: int
    """Of its ballot."""
    entries: tuple[Entry, ...]
    """Ascending by peer."""
    total: bytes
    """Hash of the sum, as backups get it."""
    num_tokens: int
    scale: float
    steps: int
    """As of `MirrorRequest`."""
    squares: float = 0.0
    """Of the mean gradient: its part of the norm of all stages, as in `Squares`."""
    kind: str = SUM

    def __post_init__(self) -> None:
        _check_kind(self.kind, SUM)
        check_ids((self.peer_id,), 1)
        check_indices(self.round, self.stage, self.shard, self.steps, self.num_tokens)
        _check_hashes(self.total)
        names = [entry.peer_id for entry in self.entries]
        if names != sorted(set(names)) or len(names) > MAX_ENTRIES:
            raise ValueError("entries that are not ascending, or too many")
        if not 0 <= self.term <= MAX_TERM or not math.isfinite(self.scale):
            raise ValueError("a term or a scale is out of range")
        _check_squares(self.squares)


@dataclass(frozen=True, slots=True)
class Squares:
    """Of who speaks for shards: the sums of squares of their mean gradients, for the norm of all
    stages."""

    run_id: str
    peer_id: str
    incarnation: int
    round: int
    stage: int
    shards: tuple[int, ...]
    sums: tuple[float, ...]
    kind: str = SQUARES

    def __post_init__(self) -> None:
        _check_kind(self.kind, SQUARES)
        check_ids((self.peer_id,), 1)
        check_indices(self.round, self.stage, *self.shards)
        if len(self.shards) != len(self.sums):
            raise ValueError("shards and sums do not match")
        _check_squares(*self.sums)


@dataclass(frozen=True, slots=True)
class Stepped:
    """Of who has made a step, with its result."""

    run_id: str
    peer_id: str
    incarnation: int
    round: int
    stage: int
    shard: int
    term: int
    total: bytes
    """Hash of the packed `Summed`; empty where there is none."""
    result: bytes
    """Hash of the result."""
    tags: tuple[bytes, ...] = ()
    """Of each entry of the sum, in order: the first bytes of the hash of the packed
    `Contribution`."""
    kind: str = STEP

    def __post_init__(self) -> None:
        _check_kind(self.kind, STEP)
        check_ids((self.peer_id,), 1)
        check_indices(self.round, self.stage, self.shard)
        _check_hashes(self.total, self.result)
        if len(self.tags) > MAX_ENTRIES or any(len(tag) != TAG_BYTES for tag in self.tags):
            raise ValueError("tags that are none")
        if not 0 <= self.term <= MAX_TERM:
            raise ValueError("a term is out of range")

    @property
    def about(self) -> tuple[str, str, int, int, int, int, int]:
        """Of two with the same, one is a lie unless they are equal."""
        where = self.round, self.stage, self.shard
        return self.run_id, self.peer_id, self.incarnation, *where, self.term


@dataclass(frozen=True, slots=True)
class Proof:
    """A statement and its signature."""

    statement: bytes
    """A packed `Summed`, `Stepped` or `Squares`."""
    signature: bytes

    def __post_init__(self) -> None:
        if len(self.statement) > MAX_PROOF_BYTES or len(self.signature) > 2 * HASH_BYTES:
            raise ValueError("a proof that is too long")

    @property
    def signed(self) -> bytes:
        """The bytes that are signed."""
        return SIGNED_AS + self.statement

    def read(self, cls: type[T]) -> T:
        """What it says. Raises `ProtocolViolation` where that is no such statement."""
        return unpack(self.statement, cls)


@dataclass(frozen=True, slots=True)
class GivenRequest:
    """What was contributed to the sum of a shard, and is in this one?"""

    stage: int
    peer_id: str
    """Of the contributor; empty for the sum itself, which who has found a lie gives."""
    summed: Proof

    def __post_init__(self) -> None:
        check_indices(self.stage)
        if len(self.peer_id) > MAX_ID_CHARS:
            raise ValueError("a peer id that is too long")


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """What did the primary sign when it gave you the result of a shard?"""

    round: int
    stage: int
    """Of the callee."""
    shard: int
    peer_id: str = ""
    """Who has spoken for the shard, of the caller's stage: what has it signed of its squares? Where
    it is empty, the question is the first one."""

    def __post_init__(self) -> None:
        check_indices(self.round, self.stage, self.shard)
        if len(self.peer_id) > MAX_ID_CHARS:
            raise ValueError("a peer id that is too long")


@dataclass(frozen=True, slots=True)
class ProofReply:
    stepped: Proof | None = None
    squares: Proof | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A primary has lied. Its own signed words are the evidence: a sum that is not that of its
    contributions (`summed`; whoever says so gives the arrays, see `given`); a result that does not
    follow from its sum (`summed` and one of `stepped`); two results (two of `stepped`); or other
    squares than those of its sum (`summed` and `squares`)."""

    stage: int
    """Of the callee."""
    summed: Proof | None = None
    stepped: tuple[Proof, ...] = ()
    squares: Proof | None = None

    def __post_init__(self) -> None:
        check_indices(self.stage)
        if len(self.stepped) > 2:
            raise ValueError("more results than two")


GIVEN = Method(
    "given",
    GivenRequest,
    NoneType,
    Caller.WORKING,
    Callee.STAGE,
    body_bytes=SMALL_BYTES,
    quota=AUDITS,
)
PROOF = Method("proof", ProofRequest, ProofReply, Caller.WORKING, Callee.STAGE, quota=AUDITS)
FINDING = Method(
    "finding",
    Finding,
    NoneType,
    Caller.WORKING,
    Callee.STAGE,
    body_bytes=LIST_BYTES,
    quota=AUDITS,
)
