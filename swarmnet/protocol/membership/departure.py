"""Departure of a replica from its stage: what only it has is with others, or never will be.

The peer that leaves gathers what is inside it (`Inside`); what the others hold, their records
say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.timing import PATIENCE_S

MOVE_PATIENCE_S = PATIENCE_S
"""A moving peer waits so long for the end of its round, rather than hand its gradient over."""


@dataclass(frozen=True, slots=True)
class Inside:
    """Things that only a replica has."""

    round: int
    shards: Sequence[int] = ()
    """Those whose optimizer state is here."""
    num_in_flight: int = 0
    """Microbatches."""
    is_closing: bool = False
    """A round is being averaged, or it is being found out which microbatches count."""
    has_gradient: bool = False
    """One of a round that is open, its own or another replica's. One without tokens is zero: it is
    in nobody's way."""
    is_owing: bool = False
    """Work of it is not in the common parameters yet, though its round is over."""


def is_handed_over(
    inside: Inside,
    others: Sequence[Record],
    newcomers: Sequence[Record],
    *,
    num_rounds: int,
    alone: bool,
) -> bool:
    """No microbatch and no gradient is inside, and every shard held here is held elsewhere too; or
    no other peer is left in the stage, nor on the way to it. `others`: the other active ones;
    `alone`: the stage may be left without a replica."""
    if not others:
        return alone and not newcomers
    is_busy = inside.num_in_flight > 0 or inside.is_closing
    if is_busy or inside.has_gradient or inside.is_owing:
        return False
    if inside.round >= num_rounds:
        return True
    return all(
        any(o.holds_shard(j) and o.round >= inside.round for o in others) for j in inside.shards
    )


def heirs(members: Iterable[Record], own: str, round_index: int) -> list[str]:
    """Peers of a stage to which `own` may give the gradient of a round: they stay, and are in
    it."""
    return [
        m.peer_id
        for m in members
        if m.state == ACTIVE and m.round == round_index and not m.is_moving and m.peer_id != own
    ]


class MovePatience:
    """The time that a peer which is to move stays at work, once none of its gradients is on its way
    to the owners: until the newest round that had begun here is fed. The end of a long round is not
    waited for where microbatches pass quickly: another replica takes over what was learned here,
    and nothing is done while the last ones come back."""

    def __init__(self, newest_open: int) -> None:
        self.newest_open = newest_open
        self._end: Deadline | None = None

    def is_over(
        self, now: float, round_index: int, *, is_fed: bool, may_give: bool, passage_s: float
    ) -> bool:
        """`round_index`: of the replica; `is_fed`: of `newest_open`; `may_give`: its gradient is
        one that another replica takes; `passage_s`: how long microbatches take."""
        if round_index > self.newest_open or is_fed:
            return True
        if self._end is None:
            self._end = Deadline.after(now, MOVE_PATIENCE_S)
        return may_give and self._end.is_over(now) and passage_s <= assignment.LONG_PASSAGE_S
