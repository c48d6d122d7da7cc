"""Records for tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swarmnet.protocol.membership.records import ACTIVE, Record, RoundCount
from swarmnet.protocol.slots import SlotSet


def record(peer_id: str, version: int = 0, *, incarnation: int = 1, **fields: object) -> Record:
    fields = {"state": ACTIVE, "stage": 0, **fields}
    return Record(peer_id, "run", incarnation, version, **fields)  # type: ignore[arg-type]


def counted(
    round_index: int,
    launched: int = 0,
    committed: int = 0,
    sealed: bool = False,
    tokens: int = 0,
    loss_sum: float = 0.0,
    *,
    first: int = 0,
) -> RoundCount:
    """Of the slots from `first` on, so many launched, and the first of them committed."""
    return RoundCount(
        round_index,
        slots(first, launched),
        slots(first, committed),
        sealed,
        tokens,
        loss_sum,
    )


def with_count(record: Record, count: RoundCount) -> Record:
    """A record with the counters of one round replaced."""
    return replace(record, counts=record.counts_with(count))


def slots(first: int, num: int) -> SlotSet:
    return SlotSet.of(mask_of(range(first, first + num)))


def mask_of(slots: Iterable[int]) -> int:
    """The reverse of `slots_in`."""
    mask = 0
    for slot in slots:
        mask |= 1 << slot
    return mask
