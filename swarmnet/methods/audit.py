"""Methods by which the work of replicas is computed again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnet.batch import Documents, check_lengths
from swarmnet.methods.method import LIST_BYTES, Arrays, Caller, Method, Quota
from swarmnet.methods.ranges import check_indices
from swarmnet.methods.receipt import Receipt

AUDITS = Quota(4.0, 64.0, of_members=True)
"""For what costs the callee a pass, or the arrays of a microbatch."""


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """What did you get and give for this microbatch?"""

    round: int
    microbatch_id: int
    stage: int

    def __post_init__(self) -> None:
        check_indices(self.round, self.microbatch_id, self.stage)


@dataclass(frozen=True, slots=True)
class EvidenceReply:
    """Arrays: the inputs, the gradient of the inputs."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class RecomputeRequest:
    """Compute a microbatch of another replica again. Arrays: inputs, targets; but at stage 0 the
    gradient of the inputs; but at the last stage outputs and their gradient."""

    stage: int
    receipt: Receipt
    """Of that replica."""
    beyond: Receipt | None = None
    """Of the replica of the next stage; None at the last one."""
    documents: Documents | None = None
    """As of `StepRequest`."""

    def __post_init__(self) -> None:
        check_lengths(self.documents or ())
        check_indices(self.stage)


@dataclass(frozen=True, slots=True)
class RecomputeReply:
    """What came of it."""

    difference: float
    """The largest one, relative, of all that the replica gave; infinity for what cannot be
    compared."""

    def __post_init__(self) -> None:
        if math.isnan(self.difference) or self.difference < 0:
            raise ValueError("a difference that is none")


EVIDENCE = Method("evidence", EvidenceRequest, EvidenceReply, Caller.ADMITTED, quota=AUDITS)
RECOMPUTE = Method(
    "recompute",
    RecomputeRequest,
    RecomputeReply,
    Caller.ADMITTED,
    body_bytes=LIST_BYTES,
    arrays=Arrays.MICROBATCH,
    quota=AUDITS,
    ends_with_caller=True,
)
