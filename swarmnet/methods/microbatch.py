"""Methods by which a microbatch, or a text, goes through the stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import NoneType

from swarmnet.batch import Documents, check_lengths
from swarmnet.methods.method import LIST_BYTES, Arrays, Caller, Method
from swarmnet.methods.ranges import (
    MAX_IDS,
    MAX_STEP_SAMPLES,
    MAX_STEP_TOKENS,
    check_ids,
    check_indices,
)
from swarmnet.methods.receipt import MAX_SIGNATURE_BYTES, Receipt
from swarmnet.protocol.generation import LONGEST_TEXT
from swarmnet.protocol.membership.records import MAX_LOSS

MAX_PATH = 1024
MAX_SESSION_CHARS = 64
TRAIN, EVALUATE, LOGITS = "train", "evaluate", "logits"


def _check_loss(loss_sum: float, num_tokens: int) -> None:
    """Of one microbatch."""
    check_indices(num_tokens)
    if not math.isfinite(loss_sum):
        raise ValueError("the loss is not finite")
    if abs(loss_sum) > MAX_LOSS or num_tokens > MAX_STEP_TOKENS:
        raise ValueError("a loss or a number of tokens that cannot be")


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
    launch: bytes = b""
    """The feeder's signature of a `receipt.Launch`, which goes on from stage to stage."""

    def __post_init__(self) -> None:
        check_lengths(self.documents or ())
        check_indices(self.round, self.microbatch_id, self.stage, self.num_samples)
        if len(self.launch) > MAX_SIGNATURE_BYTES:
            raise ValueError("a signature that is too long")
        if self.num_samples > MAX_STEP_SAMPLES:
            raise ValueError("more samples than a microbatch can have")
        check_ids((self.feeder,), 1)
        check_ids(self.hint, MAX_PATH)


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
        check_indices(self.round, self.microbatch_id, self.stage)


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
    receipt: Receipt | None = None
    """Of the callee, for what it got and gives. A caller takes no reply without one."""

    def __post_init__(self) -> None:
        check_ids(self.path, MAX_PATH)
        _check_loss(self.loss_sum, self.num_tokens)


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Where the microbatch went after the callee, as far as it knows yet."""

    path: tuple[str, ...]

    def __post_init__(self) -> None:
        check_ids(self.path, MAX_PATH)


@dataclass(frozen=True, slots=True)
class Commit:
    """The feeder has the whole gradient of these microbatches. Runs down the path, one way, and
    from the feeder to all of it that is connected."""

    round: int
    microbatch_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        check_indices(self.round)
        if len(self.microbatch_ids) > MAX_IDS:
            raise ValueError("too many microbatch ids")
        check_indices(*self.microbatch_ids)


@dataclass(frozen=True, slots=True)
class CommittedRequest:
    """Asks a feeder: which of these did you commit, with me on the path at this stage?"""

    round: int
    stage: int
    microbatch_ids: tuple[int, ...]
    is_over: bool = True
    """The asker's round is closed: what is in flight may not be committed any more."""

    def __post_init__(self) -> None:
        check_indices(self.round, self.stage, *self.microbatch_ids)
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
        check_indices(self.stage)
        if self.mode not in (EVALUATE, LOGITS):
            raise ValueError("unknown mode")


@dataclass(frozen=True, slots=True)
class InferReply:
    """EVALUATE: a loss. LOGITS: one array, the outputs of the last stage."""

    loss_sum: float = 0.0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        _check_loss(self.loss_sum, self.num_tokens)


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
        check_indices(self.stage, self.position, self.num_logits, self.round, self.max_tokens)
        if not 0 < len(self.session) <= MAX_SESSION_CHARS:
            raise ValueError("a name of a session that is none")
        if self.opens and (self.ends or not 0 < self.max_tokens <= LONGEST_TEXT):
            raise ValueError(f"a text has 1 to {LONGEST_TEXT} tokens")


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
        check_indices(self.round)


STEP = Method(
    "step",
    StepRequest,
    StepReply,
    Caller.ADMITTED,
    body_bytes=LIST_BYTES,
    arrays=Arrays.MICROBATCH,
    progress=StepProgress,
)
ADMIT = Method("admit", AdmitRequest, AdmitReply, Caller.ADMITTED)
COMMIT = Method("commit", Commit, NoneType, Caller.ADMITTED, body_bytes=LIST_BYTES)
COMMITTED = Method(
    "committed", CommittedRequest, CommittedReply, Caller.ADMITTED, body_bytes=LIST_BYTES
)
INFER = Method(
    "infer",
    InferRequest,
    InferReply,
    Caller.ADMITTED,
    body_bytes=LIST_BYTES,
    arrays=Arrays.MICROBATCH,
    ends_with_caller=True,
)
GENERATE = Method(
    "generate", GenerateRequest, GenerateReply, Caller.ADMITTED, arrays=Arrays.MICROBATCH
)
