"""Bodies of the methods that peers call on each other (`docs/protocol.md`, "Methods").

Every body is checked on arrival by `wire.convert`; ranges are checked here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from swarmnet.protocol.generation import MAX_TOKENS as MAX_TOKENS_OF_TEXT
from swarmnet.protocol.membership.records import MAX_LOSS
from swarmnet.protocol.update.roster import MAX_TERM
from swarmnet.swarm.batch import Documents, check_lengths
from swarmnet.swarm.ports import DATA_FILES, DATA_PART_BYTES
from swarmnet.wire import MAX_ARRAYS

MAX_PATH = 1024
MAX_RECORDS = 4096
MAX_RECORD_BYTES = 1 << 20
"""In any run."""
MAX_IDS = 65_536
MAX_ID_CHARS = 256
MAX_DIAL_BACK = 4
"""Addresses of one question."""
MAX_ADDRESS_CHARS = 512
MAX_PROBE_BYTES = 4 << 20
"""Of an answer about bandwidth."""
MAX_LINEAGE_BYTES, DIGEST_BYTES = 16, 8
MAX_SESSION_CHARS = 64
SHA256_CHARS = 64
MAX_STEP_TOKENS, MAX_TOKENS = 1 << 40, 1 << 48
"""Of a microbatch or of one replica's part of a round, and of a contribution to a shard: sums of
them stay far below what other messages carry."""
TRAIN, EVALUATE, LOGITS = "train", "evaluate", "logits"


def _ids(ids: tuple[str, ...], limit: int) -> None:
    if len(ids) > limit or any(not 0 < len(i) <= MAX_ID_CHARS for i in ids):
        raise ValueError("peer ids are too many or too long")


def _ballots(terms: tuple[int, ...], primary: str) -> None:
    if any(not 0 <= term <= MAX_TERM for term in terms) or len(primary) > MAX_ID_CHARS:
        raise ValueError("a ballot is out of range")


def _index(*numbers: int) -> None:
    if any(not 0 <= n < 2**63 for n in numbers):
        raise ValueError("a number is out of range")


def _loss(loss_sum: float, num_tokens: int) -> None:
    """Of one microbatch."""
    _index(num_tokens)
    if not math.isfinite(loss_sum):
        raise ValueError("the loss is not finite")
    if abs(loss_sum) > MAX_LOSS or num_tokens > MAX_STEP_TOKENS:
        raise ValueError("a loss or a number of tokens that cannot be")


def _norm(total: float) -> None:
    if not (total == -1.0 or (math.isfinite(total) and total >= 0)):
        raise ValueError("a sum of squares is out of range")


def _lineage(lineage: bytes) -> None:
    if len(lineage) > MAX_LINEAGE_BYTES:
        raise ValueError("a lineage is too long")


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

    def __post_init__(self) -> None:
        _ids((self.peer_id,), 1)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Some peer could not reach `peer_id`; holds while its record is not newer than the stamp."""

    peer_id: str
    incarnation: int
    version: int

    def __post_init__(self) -> None:
        _ids((self.peer_id,), 1)
        _index(self.incarnation, self.version)


@dataclass(frozen=True, slots=True)
class GossipRequest:
    """What the caller has: a stamp for each peer that it knows."""

    stamps: dict[str, tuple[int, int]]
    suspicions: tuple[Suspicion, ...] = ()

    def __post_init__(self) -> None:
        if len(self.stamps) > MAX_RECORDS or len(self.suspicions) > MAX_RECORDS:
            raise ValueError("too many stamps")


@dataclass(frozen=True, slots=True)
class Records:
    """Records that the other side lacks, and peers of which it has newer ones."""

    records: tuple[SignedRecord, ...] = ()
    wanted: tuple[str, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()

    def __post_init__(self) -> None:
        if max(len(self.records), len(self.suspicions)) > MAX_RECORDS:
            raise ValueError("too many records")
        _ids(self.wanted, MAX_RECORDS)


@dataclass(frozen=True, slots=True)
class SpecReply:
    """`spec`: canonical bytes of the run's spec, of which `run_id` is the hash."""

    run_id: str
    spec: bytes


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
        _index(self.source)
        _index(self.offset)
        if self.file not in DATA_FILES or not 1 <= self.length <= DATA_PART_BYTES:
            raise ValueError("a part that there cannot be")


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A microbatch enters a stage. Arrays: inputs, targets."""

    round: int
    microbatch_id: int
    stage: int
    feeder: str
    num_samples: int
    hint: tuple[str, ...] = ()
    """Replicas of the following stages that may know this microbatch already."""
    asked: bool = False
    """The caller chose this replica by its `admit`: it waits in a longer queue."""
    documents: Documents | None = None
    """As of `batch.Batch`; the same at every stage."""

    def __post_init__(self) -> None:
        check_lengths(self.documents or ())
        _index(self.round, self.microbatch_id, self.stage, self.num_samples)
        _ids((self.feeder,), 1)
        _ids(self.hint, MAX_PATH)


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """How long would this microbatch take here? Asked of a few replicas before a long activation
    is sent to one of them, and said to that one."""

    round: int
    microbatch_id: int
    stage: int
    comes: bool = False
    """It has been sent: a place is to be kept."""

    def __post_init__(self) -> None:
        _index(self.round, self.microbatch_id, self.stage)


@dataclass(frozen=True, slots=True)
class AdmitReply:
    """There is room."""

    wait_s: float
    """Until its work here would begin, seconds, and more for a replica with much in flight: the
    least is the best choice."""
    known: bool = False
    """It is here already: queued, under way, or done."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.wait_s) and self.wait_s >= 0):
            raise ValueError("a wait that is none")


@dataclass(frozen=True, slots=True)
class StepReply:
    """The microbatch came back. Arrays: the gradient of the inputs (none from stage 0)."""

    loss_sum: float
    num_tokens: int
    path: tuple[str, ...]
    """Replicas that it went through, the callee first."""

    def __post_init__(self) -> None:
        _ids(self.path, MAX_PATH)
        _loss(self.loss_sum, self.num_tokens)


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Where the microbatch went after the callee, as far as it knows yet."""

    path: tuple[str, ...]

    def __post_init__(self) -> None:
        _ids(self.path, MAX_PATH)


@dataclass(frozen=True, slots=True)
class Commit:
    """The feeder has the whole gradient of these microbatches. Runs down the path, one way, and
    from the feeder to all of it that is connected."""

    round: int
    microbatch_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _index(self.round)
        if len(self.microbatch_ids) > MAX_IDS:
            raise ValueError("too many microbatch ids")
        _index(*self.microbatch_ids)


@dataclass(frozen=True, slots=True)
class CommittedRequest:
    """Asks a feeder: which of these did you commit, with me on the path at this stage?"""

    round: int
    stage: int
    microbatch_ids: tuple[int, ...]
    is_over: bool = True
    """The asker's round is closed: what is in flight may not be committed any more."""

    def __post_init__(self) -> None:
        _index(self.round, self.stage, *self.microbatch_ids)
        if len(self.microbatch_ids) > MAX_IDS:
            raise ValueError("too many microbatch ids")


@dataclass(frozen=True, slots=True)
class CommittedReply:
    microbatch_ids: tuple[int, ...]
    """Those that count."""
    in_flight: tuple[int, ...] = ()
    """Those that may count yet; all others will never be committed on that path."""

    def __post_init__(self) -> None:
        if len(self.microbatch_ids) + len(self.in_flight) > MAX_IDS:
            raise ValueError("too many microbatch ids")


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Forward only, with whatever parameters the replicas have. Arrays: inputs[, targets]."""

    stage: int
    mode: str
    round: int = -1
    """Wanted round of the parameters; -1 for any."""
    documents: Documents | None = None
    """As of `StepRequest`."""

    def __post_init__(self) -> None:
        check_lengths(self.documents or ())
        _index(self.stage)
        if self.mode not in (EVALUATE, LOGITS):
            raise ValueError("unknown mode")


@dataclass(frozen=True, slots=True)
class InferReply:
    """EVALUATE: a loss. LOGITS: one array, the outputs of the last stage."""

    loss_sum: float = 0.0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        _loss(self.loss_sum, self.num_tokens)


@dataclass(frozen=True, slots=True)
class ReduceRequest:
    """Contributions to the gradients of shards, pushed to their primary. Arrays: of each shard the
    sum over the contributor's tokens, coded (none where these are 0)."""

    round: int
    stage: int
    shards: tuple[int, ...]
    num_tokens: tuple[int, ...]
    """By shard."""
    terms: tuple[int, ...]
    """By shard: of the ballot that the caller goes by (`protocol.update.roster`)."""
    primary: str = ""
    """Of these ballots; the callee where it is empty. Another one cannot be reached by the caller,
    which waits here for the result."""
    is_whole: bool = False
    """The caller lacks the present parameters: the answer is to be those that come, not their
    change."""
    follows: tuple[bool, ...] = ()
    """By shard, whether the caller has the optimizer state that its step begins with; empty where
    it does not say."""

    def __post_init__(self) -> None:
        num_shards = len(self.shards)
        if len(self.follows) not in (0, num_shards):
            raise ValueError("not for each shard whether it is followed")
        if not 0 < num_shards == len(self.num_tokens) == len(self.terms) <= MAX_ARRAYS:
            raise ValueError("no shards, too many, or not tokens and a term for each")
        _ballots(self.terms, self.primary)
        if len(set(self.shards)) < len(self.shards):
            raise ValueError("a shard twice")
        _index(self.round, self.stage, *self.shards, *self.num_tokens)
        if max(self.num_tokens) > MAX_TOKENS:
            raise ValueError("more tokens than there can be")


@dataclass(frozen=True, slots=True)
class TiedSum:
    """The last stage's sum of the gradients of a shard that the first stage holds too. Arrays: the
    sum (none where there are no tokens behind it)."""

    round: int
    stage: int
    """Of the caller."""
    shard: int
    num_tokens: int
    term: int
    """Of the ballot by which the caller is the primary."""
    digest: bytes
    """Of the shard's present parameters at the caller (8 bytes)."""

    def __post_init__(self) -> None:
        _ballots((self.term,), "")
        _index(self.round, self.stage, self.shard, self.num_tokens)
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError("not a digest of 8 bytes")
        if self.num_tokens > MAX_TOKENS:
            raise ValueError("more tokens than there can be")


@dataclass(frozen=True, slots=True)
class BallotRequest:
    """The caller takes over as primary of shards; or, where it is not `is_final`, asks whether that
    would be promised."""

    round: int
    stage: int
    shards: tuple[int, ...]
    terms: tuple[int, ...]
    is_final: bool

    def __post_init__(self) -> None:
        if not 0 < len(self.shards) == len(self.terms) <= MAX_ARRAYS:
            raise ValueError("no shards, too many, or not a term for each")
        if len(set(self.shards)) < len(self.shards):
            raise ValueError("a shard twice")
        _index(self.round, self.stage, *self.shards)
        _ballots(self.terms, "")


@dataclass(frozen=True, slots=True)
class BallotReply:
    """By shard of the request. Arrays: of the shards that have a result, the coded change or the
    parameters."""

    terms: tuple[int, ...]
    """Of the ballot that the callee goes by now: that of the request where it is promised."""
    primaries: tuple[str, ...]
    """Of the same ballots."""
    results: tuple[int, ...] = ()
    """Which of the shards, by their place in the request, have a result: what follows is told of
    these."""
    told: tuple[ShardReply, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.terms) == len(self.primaries) <= MAX_ARRAYS:
            raise ValueError("not a ballot for each shard")
        if len(self.results) != len(self.told) or len(set(self.results)) < len(self.results):
            raise ValueError("results and what is told of them do not match")
        if any(not 0 <= i < len(self.terms) for i in self.results):
            raise ValueError("a result of no shard")
        for primary in self.primaries:
            _ballots(self.terms, primary)


@dataclass(frozen=True, slots=True)
class ReduceProgress:
    """To a contributor, before the reply. One that is about to leave hears that the owners have
    made the step; one that has waited long, that the sum is made."""

    shard: int
    has_step: bool = True
    """False: the primary has the sum, and waits for the norm of other stages."""

    def __post_init__(self) -> None:
        _index(self.shard)


@dataclass(frozen=True, slots=True)
class ShardReply:
    """What a contributor is told of one shard."""

    round: int
    """The coming one: its parameters are those."""
    counted: bool
    """The contribution is in them; False where it came too late."""
    num_tokens: int = -1
    """Behind the step that they come from; -1 where that is not known."""
    norm: float = -1.0
    """What the reply to `norm` says of the round; -1 where that is not known."""
    is_copy: bool = False
    """The result is, to the bit, the one that the caller has made as backup: there is no array."""

    def __post_init__(self) -> None:
        if not -1 <= self.num_tokens < 2**62:
            raise ValueError("a number of tokens is out of range")
        _norm(self.norm)


@dataclass(frozen=True, slots=True)
class ReduceReply:
    """In the order of the request. Arrays: of each shard that is no copy, the result."""

    shards: tuple[ShardReply, ...]


@dataclass(frozen=True, slots=True)
class AdoptRequest:
    """From one that leaves in the middle of a round, to another replica of its stage. Arrays: the
    fp32 sum of a shard's gradient over its samples."""

    round: int
    stage: int
    shard: int

    def __post_init__(self) -> None:
        _index(self.round, self.stage, self.shard)


@dataclass(frozen=True, slots=True)
class AdoptedRequest:
    """After every shard: the samples are the callee's from now on."""

    round: int
    stage: int
    num_samples: int
    num_tokens: int

    def __post_init__(self) -> None:
        _index(self.round, self.stage, self.num_samples, self.num_tokens)
        if not 0 < self.num_tokens <= MAX_STEP_TOKENS or self.num_samples > MAX_STEP_TOKENS:
            raise ValueError("a gradient of nothing, or of more than there can be")


@dataclass(frozen=True, slots=True)
class MirrorRequest:
    """The primary's aggregate, for a backup to make the same step. Arrays: the fp32 gradient
    sum."""

    round: int
    stage: int
    shard: int
    scale: float
    steps: int
    """Steps that the optimizer state had seen before this one."""
    num_tokens: int = 0
    """Behind the sum."""
    norm: float = -1.0
    """What the reply to `norm` says of the round; -1 where that is not known."""
    lineage: bytes = b""
    """Of the state before this step; empty where that is not known."""
    term: int = 0
    """Of the primary's ballot."""
    sum_digest: bytes = b""
    """XXH3-64 of the sum, where that was sent ahead (`sums`): there is no array then."""

    def __post_init__(self) -> None:
        _index(self.round, self.stage, self.shard, self.steps, self.num_tokens)
        _ballots((self.term,), "")
        _lineage(self.sum_digest)
        _norm(self.norm)
        _lineage(self.lineage)
        if not math.isfinite(self.scale):
            raise ValueError("the scale is not finite")


@dataclass(frozen=True, slots=True)
class SumsRequest:
    """What the primary is about to make steps with, for a backup. Arrays: as of `mirror`, one for
    each shard."""

    round: int
    stage: int
    shards: tuple[int, ...]
    terms: tuple[int, ...]
    """Of the primary's ballots."""

    def __post_init__(self) -> None:
        _index(self.round, self.stage, *self.shards)
        _ballots(self.terms, "")
        if not len(set(self.shards)) == len(self.shards) == len(self.terms) <= MAX_ARRAYS:
            raise ValueError("shards and terms do not match")


@dataclass(frozen=True, slots=True)
class SumsReply:
    refused: tuple[int, ...]
    """Shards of which another ballot holds at the backup."""

    def __post_init__(self) -> None:
        _index(*self.refused)
        if len(self.refused) > MAX_ARRAYS:
            raise ValueError("more shards than were asked for")


@dataclass(frozen=True, slots=True)
class MirrorReply:
    """Of a backup that has made the step."""

    digest: bytes = b""
    """Of the result of it (`Result.digest`); empty where there is none."""

    def __post_init__(self) -> None:
        _lineage(self.digest)


@dataclass(frozen=True, slots=True)
class NormRequest:
    """Sums of squares of the mean gradient of shards, for the gradient norm over all stages."""

    round: int
    stage: int
    shards: tuple[int, ...]
    sums: tuple[float, ...]

    def __post_init__(self) -> None:
        _index(self.round, self.stage, *self.shards)
        if len(self.shards) != len(self.sums) or len(self.shards) > MAX_IDS:
            raise ValueError("shards and sums do not match")
        if any(not (math.isfinite(s) and s >= 0) for s in self.sums):
            raise ValueError("a sum of squares is not finite")


@dataclass(frozen=True, slots=True)
class NormReply:
    sum: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sum) and self.sum >= 0):
            raise ValueError("a sum of squares is not finite")


@dataclass(frozen=True, slots=True)
class ContributionsRequest:
    """Sums of squares of contributions to shards, for each contributor's norm over all shards."""

    round: int
    stage: int
    shards: tuple[int, ...]
    peers: tuple[str, ...]
    """Contributors, ascending."""
    sums: tuple[float, ...]
    """By shard, then by peer; 0 where a peer did not contribute to a shard."""

    def __post_init__(self) -> None:
        _index(self.round, self.stage, *self.shards)
        _ids(self.peers, MAX_RECORDS)
        if len(self.sums) != len(self.shards) * len(self.peers) or len(self.shards) > MAX_IDS:
            raise ValueError("shards, peers and sums do not match")
        if any(not (math.isfinite(s) and s >= 0) for s in self.sums):
            raise ValueError("a sum of squares is not finite")


@dataclass(frozen=True, slots=True)
class ContributionsReply:
    """Sums of squares over all shards of the stage, by contributor."""

    peers: tuple[str, ...]
    sums: tuple[float, ...]

    def __post_init__(self) -> None:
        _ids(self.peers, MAX_RECORDS)
        if len(self.sums) != len(self.peers):
            raise ValueError("peers and sums do not match")
        if any(not (math.isfinite(s) and s >= 0) for s in self.sums):
            raise ValueError("a sum of squares is not finite")


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """Asks for the checkpoints that a peer has. `keep`: a round that is to be kept for a while, as
    the caller is fetching it; -1 for none."""

    keep: int = -1

    def __post_init__(self) -> None:
        if self.keep != -1:
            _index(self.keep)


@dataclass(frozen=True, slots=True)
class SavedRound:
    """A checkpoint: the round that begins with it, and a digest for each shard."""

    round: int
    history: int
    stage: int
    digests: bytes

    def __post_init__(self) -> None:
        _index(self.round, self.history, self.stage)


@dataclass(frozen=True, slots=True)
class SavedReply:
    """Checkpoints of a peer, and the held-out losses that it knows, by round. `kept`: the rounds
    that it keeps for those that fetch them."""

    rounds: tuple[SavedRound, ...]
    held_out: dict[int, float]
    kept: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _index(*self.held_out, *self.kept)
        if not all(0 <= loss <= MAX_LOSS for loss in self.held_out.values()):
            raise ValueError("a loss is out of range")


@dataclass(frozen=True, slots=True)
class FileRequest:
    """Asks for a file of the run, from a byte on. `sha256`: hex."""

    sha256: str
    offset: int

    def __post_init__(self) -> None:
        _index(self.offset)
        if len(self.sha256) != SHA256_CHARS:
            raise ValueError("not a SHA-256")


@dataclass(frozen=True, slots=True)
class FileReply:
    """`size`: of the whole file, in bytes. The part is the array."""

    size: int

    def __post_init__(self) -> None:
        _index(self.size)


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks for a shard: parameters or optimizer state."""

    round: int
    stage: int
    shard: int
    is_urgent: bool = False
    """Of optimizer state: behind all else that the callee sends, it came too late before."""

    def __post_init__(self) -> None:
        _index(self.round, self.stage, self.shard)


@dataclass(frozen=True, slots=True)
class FetchReply:
    """`round`: the one that begins with this state. `values`: of `ports.Optimizer.export`."""

    round: int
    values: dict[str, Any]
    lineage: bytes = b""
    """As of `MirrorRequest`."""

    def __post_init__(self) -> None:
        _lineage(self.lineage)


@dataclass(frozen=True, slots=True)
class DialBackRequest:
    """Addresses of the caller, which wants to know whether it can be reached there."""

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
    """For each address: empty where it was reached, else why not."""
    unix_s: float
    """The answering peer's clock."""

    def __post_init__(self) -> None:
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
class GenerateRequest:
    """Some tokens of a text go through one stage, whose replica keeps their keys and values.
    Arrays: the tokens, or what the stage before made of them; none to open a session, to keep or to
    end it."""

    stage: int
    session: str
    """Named by the caller."""
    position: int = 0
    """Tokens of the text before these."""
    num_logits: int = 0
    """The last stage gives only so many, the largest; 0: all."""
    opens: bool = False
    ends: bool = False
    round: int = 0
    """To open: of the parameters that are to make the whole text."""
    max_tokens: int = 0
    """To open: of the whole text."""
    mixes: bool = False
    """To open: where those parameters cannot be kept, the present ones will do."""
    exact: bool = False
    """Activations come and go in fp32, whatever the run's codec is."""

    def __post_init__(self) -> None:
        _index(self.stage, self.position, self.num_logits, self.round, self.max_tokens)
        if not 0 < len(self.session) <= MAX_SESSION_CHARS:
            raise ValueError("a name of a session that is none")
        if self.opens and (self.ends or not 0 < self.max_tokens <= MAX_TOKENS_OF_TEXT):
            raise ValueError(f"a text has 1 to {MAX_TOKENS_OF_TEXT} tokens")


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """Arrays: what the stage made of the tokens; of the last stage, for the last token alone, the
    logits (float32) and, where not all were asked for, which tokens' they are (int32)."""

    round: int
    """Of the parameters that did it."""
    is_copied: bool
    """The same parameters will make the rest of the text."""
    exact: bool = False
    """The callee knows what that means in a request."""

    def __post_init__(self) -> None:
        _index(self.round)
