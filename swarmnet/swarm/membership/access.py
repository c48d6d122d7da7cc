"""What a peer's signed record lets it do for its stage."""

from __future__ import annotations

from collections.abc import Mapping

from swarmnet.methods.method import Caller
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record

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
