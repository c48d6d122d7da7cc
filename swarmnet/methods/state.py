"""Methods by which a peer gets what another one has: files, data, parameters, optimizer state."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import NoneType
from typing import Any

from swarmnet.methods.method import DATA, FILES, SAVES, Callee, Caller, Method
from swarmnet.methods.ranges import MAX_IDS, check_indices, check_lineage
from swarmnet.ports import DATA_FILES, DATA_PART_BYTES
from swarmnet.protocol.membership.records import MAX_LOSS

SHA256_CHARS = 64


@dataclass(frozen=True, slots=True)
class DataSource:
    """One source of `DataSizes`."""

    fingerprint: str
    num_documents: int
    num_tokens: int
    num_bytes: int

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{32}", self.fingerprint):
            raise ValueError("a fingerprint that is none")
        if not 1 <= self.num_documents <= self.num_tokens < 2**48:
            raise ValueError("data of an impossible size")
        if not 0 <= self.num_bytes < 2**56:
            raise ValueError("data of an impossible size")


@dataclass(frozen=True, slots=True)
class DataSizes:
    """How much the run's data are, as tokens: of each source, in the order of the spec."""

    sources: tuple[DataSource, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.sources) <= MAX_IDS:
            raise ValueError("too many sources, or none")


@dataclass(frozen=True, slots=True)
class DataPartRequest:
    """A piece of a source's tokens. Reply: one uint8 array, of `length` at most."""

    source: int
    file: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        check_indices(self.source)
        check_indices(self.offset)
        if self.file not in DATA_FILES or not 1 <= self.length <= DATA_PART_BYTES:
            raise ValueError("a part that there cannot be")


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """Asks for the checkpoints that a peer has. `keep`: a round that is to be kept for a while, as
    the caller is fetching it; -1 for none."""

    keep: int = -1

    def __post_init__(self) -> None:
        if self.keep != -1:
            check_indices(self.keep)


@dataclass(frozen=True, slots=True)
class SavedRound:
    """A checkpoint: the round that begins with it, and a digest for each shard."""

    round: int
    history: int
    stage: int
    digests: bytes

    def __post_init__(self) -> None:
        check_indices(self.round, self.history, self.stage)


@dataclass(frozen=True, slots=True)
class SavedReply:
    """Checkpoints of a peer, and the held-out losses that it knows, by round. `kept`: the rounds
    that it keeps for those that fetch them."""

    rounds: tuple[SavedRound, ...]
    held_out: dict[int, float]
    kept: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_indices(*self.held_out, *self.kept)
        if not all(0 <= loss <= MAX_LOSS for loss in self.held_out.values()):
            raise ValueError("a loss is out of range")


@dataclass(frozen=True, slots=True)
class FileRequest:
    """Asks for a file of the run, from a byte on. `sha256`: hex."""

    sha256: str
    offset: int

    def __post_init__(self) -> None:
        check_indices(self.offset)
        if len(self.sha256) != SHA256_CHARS:
            raise ValueError("not a SHA-256")


@dataclass(frozen=True, slots=True)
class FileReply:
    """`size`: of the whole file, in bytes. The part is the array."""

    size: int

    def __post_init__(self) -> None:
        check_indices(self.size)


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks for a shard: parameters or optimizer state."""

    round: int
    stage: int
    shard: int
    is_urgent: bool = False
    """Of optimizer state: behind all else that the callee sends, it came too late before."""

    def __post_init__(self) -> None:
        check_indices(self.round, self.stage, self.shard)


@dataclass(frozen=True, slots=True)
class FetchReply:
    """`round`: the one that begins with this state. `values`: of `ports.Optimizer.export`."""

    round: int
    values: dict[str, Any]
    lineage: bytes = b""
    """As of `MirrorRequest`."""

    def __post_init__(self) -> None:
        check_lineage(self.lineage)


RUN_FILE = Method("run_file", FileRequest, FileReply, Caller.ANYONE, quota=FILES)
INITIAL_SHARD = Method("initial_shard", FetchRequest, FetchReply, Caller.ADMITTED)
DATA_SIZES = Method("data_sizes", NoneType, DataSizes, Caller.ADMITTED, quota=DATA)
DATA_PART = Method("data_part", DataPartRequest, NoneType, Caller.ADMITTED, quota=DATA)
SAVED = Method("saved", SavedRequest, SavedReply, Caller.ADMITTED, quota=SAVES)
SAVED_SHARD = Method("saved_shard", FetchRequest, FetchReply, Caller.ADMITTED)
FETCH_PARAMETERS = Method(
    "fetch_parameters", FetchRequest, FetchReply, Caller.ADMITTED, Callee.STAGE
)
FETCH_OPTIMIZER = Method("fetch_optimizer", FetchRequest, FetchReply, Caller.STAGE, Callee.SYNCED)
FETCH_MOMENTS = Method("fetch_moments", FetchRequest, FetchReply, Caller.STAGE, Callee.SYNCED)
