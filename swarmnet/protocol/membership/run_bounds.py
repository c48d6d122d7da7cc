"""What the spec of a run leaves possible in a record: whoever says more says what cannot be.

These are the claims that need no evidence to be found false. What is possible, and false all the
same, is bounded where it is used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from swarmnet.plurals import counted
from swarmnet.protocol.membership.records import (
    ACTIVE,
    DIGEST_BYTES,
    LEAVING,
    MAX_COUNT,
    MAX_LOSS,
    MAX_SHARDS,
    HeldOut,
    Record,
)
from swarmnet.protocol.slots import ANY_SLOTS, SlotPlan
from swarmnet.protocol.sync_modes import MAX_ROUND

MAX_CLOCK_ERROR_MS = 100 * 365 * 86_400_000
"""Histories are named by clocks, which may be wrong by years. One that is further ahead would leave
no number above it."""
MAX_OVER_GUESSING = 100.0
"""The mean loss of a model, over that of guessing all tokens alike, at most: far above that of a
model whose training has failed."""


@dataclass(frozen=True, slots=True)
class RunBounds:
    """Of one run; without arguments of any run."""

    num_stages: int = MAX_SHARDS
    rounds: int = MAX_ROUND
    """Length of the run: no peer is in a later round."""
    slots: SlotPlan = ANY_SLOTS
    samples_per_slot: int = MAX_COUNT
    num_values: int = 0
    """Of a token, at most; 0 where the loss is not over tokens, or that is not known."""
    num_shards: tuple[int, ...] = ()
    """Of each stage; empty where that is not known."""

    @property
    def max_loss(self) -> float:
        """Nats per token, on held-out data."""
        return MAX_OVER_GUESSING * math.log(self.num_values) if self.num_values > 1 else MAX_LOSS

    @property
    def max_samples(self) -> int:
        """Of one round."""
        return self.slots.most * self.samples_per_slot

    def allows_loss(self, held_out: HeldOut) -> bool:
        """Whether held-out data can have that loss, at the beginning of that round."""
        least = 0.0 if self.num_values else -self.max_loss
        bits = 8 / math.log(2)  # a token stands for an eighth of a byte at least
        found = (held_out.loss, held_out.bits_per_byte / bits)
        return held_out.round <= self.rounds and all(least <= x <= self.max_loss for x in found)

    def allows_history(self, history: int, own_incarnation: int) -> bool:
        """Whether a history can have that name; `own_incarnation`: of who asks."""
        return history <= own_incarnation + MAX_CLOCK_ERROR_MS

    def impossible(self, record: Record, own_incarnation: int) -> str:
        """What a record says that cannot be, for people; empty where all of it can be.
        `own_incarnation`: of who asks, Unix milliseconds."""
        return next(self._impossible(record, own_incarnation), "")

    def _impossible(self, record: Record, own_incarnation: int) -> Iterator[str]:
        rounds, num_stages = self.rounds, self.num_stages
        if record.round > rounds:
            yield f"is in round {record.round} of {rounds}"
        for stage in (record.stage, record.moving_to, *(o.stage for o in record.restorable)):
            if stage >= num_stages:
                yield f"serves, or has saved, stage {stage} of {num_stages}"
        if record.samples > self.max_samples:
            yield (
                f"has {counted(record.samples, 'sample')} of a round, which has {self.max_samples}"
            )
        later = (
            *(c.round for c in record.counts),
            *(o.round for o in record.restorable),
            *(s.round for s in record.switches),
            record.declared[0],
        )
        if max(later) > rounds:
            yield f"knows of round {max(later)} of {rounds}"
        for count in record.counts:
            most = self.slots.of(count.round)
            if count.launched.mask >> most:
                yield f"has launched a slot beyond the {most} of round {count.round}"
        if record.held_out is not None and not self.allows_loss(record.held_out):
            yield f"has measured a loss of {record.held_out.loss:.3g} in {record.held_out.round}"
        for history in (record.history, *(o.history for o in record.restorable)):
            if not self.allows_history(history, own_incarnation):
                yield f"is in a run that began in {history} ms"
        yield from self._shards(record)

    def _shards(self, record: Record) -> Iterator[str]:
        """Of what it serves: before, it may have said something of another stage."""
        if not self.num_shards:
            return
        for offer in record.restorable:
            if offer.num_shards != self.num_shards[offer.stage]:
                yield f"has saved {counted(offer.num_shards, 'shard')} of stage {offer.stage}"
        if record.stage < 0 or record.state not in (ACTIVE, LEAVING):
            return
        num_shards = self.num_shards[record.stage]
        num_bytes = (num_shards + 7) // 8
        is_whole = len(record.digests) in (0, num_shards * DIGEST_BYTES)
        if not is_whole or len(record.holds) > num_bytes or len(record.fresh) > num_bytes:
            yield f"has other shards of stage {record.stage} than the {num_shards} that there are"


ANY_RUN = RunBounds()
"""Where the run is not known."""
