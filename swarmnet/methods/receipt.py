"""What is signed of each microbatch: by its feeder, that it is its own; by each replica, what it
got and gave."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnet.methods.ranges import check_ids, check_indices
from swarmnet.wire import pack, unpack

HASH_BYTES = 32
MAX_STATEMENT_BYTES = 1024
MAX_SIGNATURE_BYTES = 64
SIGNED_AS = b"swarmnet receipt\n"
"""Before the statement, so that its signature is good for nothing else."""
LAUNCHED_AS = b"swarmnet launch\n"
"""The same before a `Launch`."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a feeder signs of a microbatch, and every stage sees with it: nobody else can have data
    computed in its name, nor other targets than it has sent."""

    run_id: str
    feeder: str
    round: int
    microbatch_id: int
    targets: bytes
    """Hash of targets and documents, as in a `Statement`."""

    @property
    def signed(self) -> bytes:
        """The bytes that are signed, by the feeder's machine."""
        return LAUNCHED_AS + pack(self)


@dataclass(frozen=True, slots=True)
class Statement:
    """Of one replica, about one microbatch. Hashes are SHA-256, see docs/protocol.md."""

    run_id: str
    peer_id: str
    """Of the replica."""
    round: int
    microbatch_id: int
    stage: int
    inputs: bytes
    """Hash of what came."""
    targets: bytes
    """Of targets and documents."""
    gradient: bytes
    """Of the gradient of the inputs; empty at stage 0."""
    loss_sum: float
    num_tokens: int
    beyond: bytes = b""
    """Hash of the statement of the replica of the next stage, which has the hashes of what went
    there and came back; empty at the last stage."""

    def __post_init__(self) -> None:
        check_ids((self.peer_id,), 1)
        check_indices(self.round, self.microbatch_id, self.stage, self.num_tokens)
        if not math.isfinite(self.loss_sum):
            raise ValueError("the loss is not finite")
        hashes = (self.inputs, self.targets, self.gradient, self.beyond)
        if any(len(h) not in (0, HASH_BYTES) for h in hashes):
            raise ValueError("a hash of another length")


@dataclass(frozen=True, slots=True)
class Receipt:
    """A statement and its signature."""

    statement: bytes
    """A packed `Statement`."""
    signature: bytes
    """Of `signed`, by the replica's machine."""

    def __post_init__(self) -> None:
        is_long = len(self.signature) > MAX_SIGNATURE_BYTES
        if is_long or len(self.statement) > MAX_STATEMENT_BYTES:
            raise ValueError("a receipt that is too long")

    @property
    def signed(self) -> bytes:
        """The bytes that are signed."""
        return SIGNED_AS + self.statement

    def read(self) -> Statement:
        """What it says. Raises `ProtocolViolation` where that is no statement."""
        return unpack(self.statement, Statement)


def packed(statement: Statement) -> bytes:
    """As it is signed."""
    return pack(statement)
