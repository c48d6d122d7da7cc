"""Methods by which the replicas make an update of gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import NoneType

from swarmnet.methods.method import LIST_BYTES, SMALL_BYTES, Arrays, Callee, Caller, Method
from swarmnet.methods.ranges import (
    DIGEST_BYTES,
    MAX_ID_CHARS,
    MAX_IDS,
    MAX_RECORDS,
    MAX_STEP_TOKENS,
    MAX_TOKENS,
    check_ids,
    check_indices,
    check_lineage,
)
from swarmnet.methods.receipt import HASH_BYTES
from swarmnet.methods.state import FetchReply, FetchRequest
from swarmnet.methods.update_proof import Proof
from swarmnet.protocol.update.late_tokens import Late, are_possible
from swarmnet.protocol.update.roster import MAX_TERM
from swarmnet.wire import MAX_ARRAYS, MAX_BODY_BYTES

MAX_NEIGHBOURS = 64
"""Peers of a household of which one has the contributions, at most."""


def _check_ballots(terms: tuple[int, ...], primary: str) -> None:
    if any(not 0 <= term <= MAX_TERM for term in terms) or len(primary) > MAX_ID_CHARS:
        raise ValueError("a ballot is out of range")


def _check_norm(total: float) -> None:
    if not (total == -1.0 or (math.isfinite(total) and total >= 0)):
        raise ValueError("a sum of squares is out of range")


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
    signatures: tuple[bytes, ...] = ()
    """Of each array, by the contributor (`update_proof.Contribution`)."""
    late: tuple[int, ...] = ()
    """By shard, how many of the tokens are of contributions that were late in exchanges before;
    empty where none is."""
    older: tuple[Late, ...] = ()
    """By shard, of these, those of the exchange before the last one, of that before it, and so on;
    empty where there are none."""
    members: tuple[tuple[str, ...], ...] = ()
    """By shard, the peers of the caller's household whose contributions are in its own, ascending;
    empty where there are none."""

    def __post_init__(self) -> None:
        num_shards = len(self.shards)
        if len(self.members) not in (0, num_shards):
            raise ValueError("not for each shard whose contributions it has")
        for members in self.members:
            check_ids(members, MAX_NEIGHBOURS)
        if len(self.signatures) > num_shards or any(
            len(s) > 2 * HASH_BYTES for s in self.signatures
        ):
            raise ValueError("signatures that are too many or too long")
        if len(self.follows) not in (0, num_shards):
            raise ValueError("not for each shard whether it is followed")
        if not 0 < num_shards == len(self.num_tokens) == len(self.terms) <= MAX_ARRAYS:
            raise ValueError("no shards, too many, or not tokens and a term for each")
        _check_ballots(self.terms, self.primary)
        if len(set(self.shards)) < len(self.shards):
            raise ValueError("a shard twice")
        check_indices(self.round, self.stage, *self.shards, *self.num_tokens, *self.late)
        if self.late and len(self.late) != num_shards:
            raise ValueError("not for each shard what was late")
        if len(self.older) not in (0, len(self.late)):
            raise ValueError("not for each shard what was late for longer")
        older = self.older or ((),) * len(self.late)
        if not all(map(are_possible, self.late, older, self.num_tokens)):
            raise ValueError("more tokens that were late than tokens")
        if max(self.num_tokens) > MAX_TOKENS:
            raise ValueError("more tokens than there can be")


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """Contributions to the gradients of shards, for a peer of the caller's household to have them
    in its own. Arrays: as of `reduce`."""

    round: int
    stage: int
    shards: tuple[int, ...]
    num_tokens: tuple[int, ...]
    """By shard."""

    def __post_init__(self) -> None:
        if not 0 < len(self.shards) == len(self.num_tokens) <= MAX_ARRAYS:
            raise ValueError("no shards, too many, or not tokens for each")
        if len(set(self.shards)) < len(self.shards):
            raise ValueError("a shard twice")
        check_indices(self.round, self.stage, *self.shards, *self.num_tokens)
        if not 0 < min(self.num_tokens) <= max(self.num_tokens) <= MAX_TOKENS:
            raise ValueError("no tokens, or more than there can be")


@dataclass(frozen=True, slots=True)
class GatherReply:
    """The contributions to these shards are in the callee's own. Nothing follows of the others."""

    shards: tuple[int, ...]

    def __post_init__(self) -> None:
        check_indices(*self.shards)
        if len(self.shards) > MAX_ARRAYS:
            raise ValueError("more shards than were asked for")


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
        _check_ballots((self.term,), "")
        check_indices(self.round, self.stage, self.shard, self.num_tokens)
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
        check_indices(self.round, self.stage, *self.shards)
        _check_ballots(self.terms, "")


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
            _check_ballots(self.terms, primary)


@dataclass(frozen=True, slots=True)
class ReduceProgress:
    """To a contributor, before the reply. One that is about to leave hears that the owners have
    made the step; one that has waited long, that the sum is made."""

    shard: int
    has_step: bool = True
    """False: the primary has the sum, and waits for the norm of other stages."""

    def __post_init__(self) -> None:
        check_indices(self.shard)


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
    proof: Proof | None = None
    """Of a `Stepped`: what was signed of the result."""
    summed: Proof | None = None
    """Of a `Summed`: what the primary whose step it is has signed of the sum."""
    late: int = 0
    """How many of the tokens are of contributions that were late in exchanges before."""
    is_late: bool = False
    """The contribution is not in the parameters: the callee brings it into the shard's next
    exchange."""
    older: Late = ()
    """Of the late ones, those of the exchange before the last one, and so on."""

    def __post_init__(self) -> None:
        if not -1 <= self.num_tokens < 2**62:
            raise ValueError("a number of tokens is out of range")
        if not are_possible(self.late, self.older, self.num_tokens):
            raise ValueError("more tokens that were late than tokens")
        _check_norm(self.norm)


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
        check_indices(self.round, self.stage, self.shard)


@dataclass(frozen=True, slots=True)
class AdoptedRequest:
    """After every shard: the samples are the callee's from now on."""

    round: int
    stage: int
    num_samples: int
    num_tokens: int

    def __post_init__(self) -> None:
        check_indices(self.round, self.stage, self.num_samples, self.num_tokens)
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
    summed: Proof | None = None
    """Of a `Summed`: what the primary signs of the sum."""
    late: int = 0
    """How many of the tokens are of contributions that were late in exchanges before."""
    older: Late = ()
    """Of these, those of the exchange before the last one, and so on."""

    def __post_init__(self) -> None:
        check_indices(self.round, self.stage, self.shard, self.steps, self.num_tokens, self.late)
        if not are_possible(self.late, self.older, self.num_tokens):
            raise ValueError("more tokens that were late than tokens")
        _check_ballots((self.term,), "")
        check_lineage(self.sum_digest)
        _check_norm(self.norm)
        check_lineage(self.lineage)
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
    num_tokens: tuple[int, ...] = ()
    """Behind each; empty where that is not told."""

    def __post_init__(self) -> None:
        check_indices(self.round, self.stage, *self.shards, *self.num_tokens)
        _check_ballots(self.terms, "")
        if not len(set(self.shards)) == len(self.shards) == len(self.terms) <= MAX_ARRAYS:
            raise ValueError("shards and terms do not match")
        if len(self.num_tokens) not in (0, len(self.shards)):
            raise ValueError("shards and tokens do not match")


@dataclass(frozen=True, slots=True)
class SumsReply:
    refused: tuple[int, ...]
    """Shards of which another ballot holds at the backup."""

    def __post_init__(self) -> None:
        check_indices(*self.refused)
        if len(self.refused) > MAX_ARRAYS:
            raise ValueError("more shards than were asked for")


@dataclass(frozen=True, slots=True)
class MirrorReply:
    """Of a backup that has made the step."""

    digest: bytes = b""
    """Of the result of it (`Result.digest`); empty where there is none."""

    def __post_init__(self) -> None:
        check_lineage(self.digest)


@dataclass(frozen=True, slots=True)
class NormRequest:
    """Sums of squares of the mean gradient of shards, for the gradient norm over all stages."""

    round: int
    stage: int
    shards: tuple[int, ...]
    sums: tuple[float, ...]
    signature: bytes = b""
    """Of the caller, under its `Squares`; empty without shards."""
    summed: tuple[Proof, ...] = ()
    """Each a `Summed` of whoever has given the caller the result of a shard: that one's squares."""

    def __post_init__(self) -> None:
        check_indices(self.round, self.stage, *self.shards)
        if len(self.shards) != len(self.sums) or len(self.shards) > MAX_IDS:
            raise ValueError("shards and sums do not match")
        if len(self.signature) > 2 * HASH_BYTES:
            raise ValueError("a signature that is too long")
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
        check_indices(self.round, self.stage, *self.shards)
        check_ids(self.peers, MAX_RECORDS)
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
        check_ids(self.peers, MAX_RECORDS)
        if len(self.sums) != len(self.peers):
            raise ValueError("peers and sums do not match")
        if any(not (math.isfinite(s) and s >= 0) for s in self.sums):
            raise ValueError("a sum of squares is not finite")


REDUCE = Method(
    "reduce",
    ReduceRequest,
    ReduceReply,
    Caller.STAGE,
    Callee.SYNCED,
    body_bytes=SMALL_BYTES,
    arrays=Arrays.SHARDS,
    progress=ReduceProgress,
)
GATHER = Method(
    "gather",
    GatherRequest,
    GatherReply,
    Caller.WORKING,
    Callee.SYNCED,
    body_bytes=SMALL_BYTES,
    arrays=Arrays.SHARDS,
)
REDUCE_TIED = Method(
    "reduce_tied", TiedSum, ReduceReply, Caller.REPLICA, Callee.REPLICA, arrays=Arrays.SHARD
)
BALLOT = Method(
    "ballot", BallotRequest, BallotReply, Caller.WORKING, Callee.SYNCED, body_bytes=SMALL_BYTES
)
FOLLOWS = Method("follows", FetchRequest, NoneType, Caller.WORKING, Callee.SYNCED)
MIRROR = Method(
    "mirror",
    MirrorRequest,
    MirrorReply,
    Caller.WORKING,
    Callee.STAGE,
    body_bytes=SMALL_BYTES,
    arrays=Arrays.SHARD,
)
SUMS = Method(
    "sums",
    SumsRequest,
    SumsReply,
    Caller.WORKING,
    Callee.SYNCED,
    body_bytes=SMALL_BYTES,
    arrays=Arrays.SHARDS,
)
NORM = Method("norm", NormRequest, NormReply, Caller.REPLICA, Callee.REPLICA, body_bytes=LIST_BYTES)
CONTRIBUTIONS = Method(
    "contributions",
    ContributionsRequest,
    ContributionsReply,
    Caller.WORKING,
    Callee.STAGE,
    body_bytes=MAX_BODY_BYTES,
)
OFFER = Method("offer", FetchRequest, FetchReply, Caller.WORKING, Callee.SYNCED)
ADOPT = Method("adopt", AdoptRequest, NoneType, Caller.LEAVING, Callee.SYNCED, arrays=Arrays.SHARD)
ADOPTED = Method("adopted", AdoptedRequest, NoneType, Caller.LEAVING, Callee.SYNCED)
