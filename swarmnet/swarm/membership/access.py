"""Who may call what: one row for each method that a peer serves.

What is checked of a call, in this order, and nothing is kept of it before its end:

1. how large it is: its body and its arrays (`body_bytes`, `arrays`);
2. who calls (`caller`): the run that it says it is of, its invite where the run is closed, and what
   its signed record says of it. All of that is known from the first bytes of a call;
3. how often it calls (`quota`);
4. only now its body is decoded, to the one class that the method takes (`body`);
5. whether this peer serves the stage and has the shards that the body names (`callee`).

`callers.CallerChecks` enforces the table for every call, whatever carries it. A method without a
row cannot be served. What arrays a call must have exactly, and whether its round is open, is seen
by the handler.

What members, and the free identities of an open run, may do within these rules is not bounded yet:
a `Quota` with `of_members` set is the place for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.swarm import messages
from swarmnet.wire import MAX_BODY_BYTES


class Caller(Enum):
    """Who may call. Each value is what docs/protocol.md says."""

    ANYONE = "anyone"
    RUN = "of the run"
    ADMITTED = "admitted"
    STAGE = "replica of the stage, or joining it"
    WORKING = "replica of the stage"
    LEAVING = "leaving replica of the stage"
    REPLICA = "replica of the stage named"


class Callee(Enum):
    """What the called peer must be. Each value is what docs/protocol.md says."""

    ANY = "any"
    STAGE = "serves the stage"
    SYNCED = "serves the stage, joined"


class Arrays(Enum):
    """What arrays a call may have. Each value is what docs/protocol.md says."""

    NONE = "none"
    PROBE = "4 MiB"
    SHARD = "a shard"
    SHARDS = "a shard, or several up to 16 MiB"
    MICROBATCH = "a microbatch"


@dataclass(frozen=True, slots=True)
class Quota:
    """How often one peer may call. Methods with the same quota share it."""

    calls_per_s: float
    burst: float
    of_members: bool = False
    """Of peers whose record is known here too."""


STRANGERS = Quota(20.0, 200.0)
"""For questions that anyone may ask."""
PROBES = Quota(0.1, 6.0, of_members=True)
FILES = Quota(10.0, 100.0)
"""For parts of 1 MiB."""
DATA = Quota(8.0, 16.0, of_members=True)
"""For parts of 1 MiB: what a fetching peer takes of an uplink at most."""
LOOKS = Quota(0.05, 6.0, of_members=True)
"""For what costs the callee an own connection."""

TINY_BYTES, SMALL_BYTES, LIST_BYTES = 1 << 10, 128 << 10, 1 << 20
"""Of a body: a few numbers; a path; a number for each slot or shard."""
PROBE_BYTES = messages.MAX_PROBE_BYTES
SHARED_CALL_BYTES = 16 << 20
"""Of the gradients of several shards in one call."""


@dataclass(frozen=True, slots=True)
class Access:
    """One row."""

    caller: Caller
    body: type | None
    """None: there is nothing in it."""
    callee: Callee = Callee.ANY
    body_bytes: int = TINY_BYTES
    arrays: Arrays = Arrays.NONE
    quota: Quota | None = None
    """None: as often as a channel takes calls."""


ACCESS: Mapping[str, Access] = {
    "spec": Access(Caller.ANYONE, None, quota=STRANGERS),
    "ticket": Access(Caller.ANYONE, None, quota=STRANGERS),
    "ping": Access(Caller.ANYONE, None, quota=STRANGERS),
    "dial_back": Access(
        Caller.ANYONE, messages.DialBackRequest, body_bytes=SMALL_BYTES, quota=PROBES
    ),
    "bandwidth": Access(
        Caller.ANYONE, messages.BandwidthRequest, arrays=Arrays.PROBE, quota=PROBES
    ),
    "look_back": Access(Caller.ANYONE, messages.LookBackRequest, quota=LOOKS),
    "gossip": Access(
        Caller.RUN, messages.GossipRequest, body_bytes=MAX_BODY_BYTES, quota=STRANGERS
    ),
    "records": Access(Caller.RUN, messages.Records, body_bytes=MAX_BODY_BYTES, quota=STRANGERS),
    "run_file": Access(Caller.ANYONE, messages.FileRequest, quota=FILES),
    "unreached": Access(Caller.ADMITTED, messages.Unreached),
    "relay_reserve": Access(Caller.ADMITTED, None),
    "step": Access(
        Caller.ADMITTED,
        messages.StepRequest,
        body_bytes=LIST_BYTES,
        arrays=Arrays.MICROBATCH,
    ),
    "admit": Access(Caller.ADMITTED, messages.AdmitRequest),
    "commit": Access(Caller.ADMITTED, messages.Commit, body_bytes=LIST_BYTES),
    "committed": Access(Caller.ADMITTED, messages.CommittedRequest, body_bytes=LIST_BYTES),
    "infer": Access(
        Caller.ADMITTED, messages.InferRequest, body_bytes=LIST_BYTES, arrays=Arrays.MICROBATCH
    ),
    "generate": Access(Caller.ADMITTED, messages.GenerateRequest, arrays=Arrays.MICROBATCH),
    "initial_shard": Access(Caller.ADMITTED, messages.FetchRequest),
    "data_sizes": Access(Caller.ADMITTED, None, quota=DATA),
    "data_part": Access(Caller.ADMITTED, messages.DataPartRequest, quota=DATA),
    "saved": Access(Caller.ADMITTED, messages.SavedRequest),
    "saved_shard": Access(Caller.ADMITTED, messages.FetchRequest),
    "fetch_parameters": Access(Caller.ADMITTED, messages.FetchRequest, Callee.STAGE),
    "fetch_optimizer": Access(Caller.STAGE, messages.FetchRequest, Callee.SYNCED),
    "fetch_moments": Access(Caller.STAGE, messages.FetchRequest, Callee.SYNCED),
    "reduce": Access(
        Caller.STAGE,
        messages.ReduceRequest,
        Callee.SYNCED,
        body_bytes=SMALL_BYTES,
        arrays=Arrays.SHARDS,
    ),
    "reduce_tied": Access(Caller.REPLICA, messages.TiedSum, arrays=Arrays.SHARD),
    "ballot": Access(Caller.WORKING, messages.BallotRequest, Callee.SYNCED, body_bytes=SMALL_BYTES),
    "follows": Access(Caller.WORKING, messages.FetchRequest, Callee.STAGE),
    "mirror": Access(Caller.WORKING, messages.MirrorRequest, Callee.STAGE, arrays=Arrays.SHARD),
    "sums": Access(
        Caller.WORKING,
        messages.SumsRequest,
        Callee.STAGE,
        body_bytes=SMALL_BYTES,
        arrays=Arrays.SHARDS,
    ),
    "norm": Access(Caller.REPLICA, messages.NormRequest, body_bytes=LIST_BYTES),
    "contributions": Access(
        Caller.WORKING, messages.ContributionsRequest, Callee.STAGE, body_bytes=MAX_BODY_BYTES
    ),
    "offer": Access(Caller.WORKING, messages.FetchRequest, Callee.SYNCED),
    "adopt": Access(Caller.LEAVING, messages.AdoptRequest, Callee.SYNCED, arrays=Arrays.SHARD),
    "adopted": Access(Caller.LEAVING, messages.AdoptedRequest, Callee.SYNCED),
}

STATES_OF: Mapping[Caller, tuple[str, ...]] = {
    Caller.STAGE: (JOINING, ACTIVE, LEAVING),
    Caller.WORKING: (ACTIVE, LEAVING),
    Caller.LEAVING: (LEAVING,),
    Caller.REPLICA: (ACTIVE, LEAVING),
}
"""What the record of a caller that is a replica must say."""


def is_replica_of(record: Record | None, stage: int, caller: Caller) -> bool:
    """Whether a peer's record makes it such a replica of a stage."""
    return record is not None and record.stage == stage and record.state in STATES_OF[caller]


def may_contribute(record: Record | None, stage: int) -> bool:
    """Whether a peer may have a gradient of a stage. One that joins has none: it asks for the
    result alone."""
    return is_replica_of(record, stage, Caller.WORKING)


def shows_round(record: Record | None, stage: int, round_index: int) -> bool:
    """Whether a peer's calls may show that its stage has ended a round: it works on that stage, and
    its record says that it is in that round. Of one that joins, or is elsewhere, it means
    nothing."""
    return record is not None and may_contribute(record, stage) and record.round == round_index
