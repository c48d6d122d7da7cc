"""The schedule of exchanges between the replicas of a stage, by `[sync] mode`. Pure; every peer
computes the same.

`zero`: at the end of every round, before the next one begins. `delayed`: the exchange of round r
runs beside the microbatches of round r + 1, whose parameters therefore do not contain it (the
delayed parameter update of ZeRO-Offload, Ren et al. 2021). `auto` changes between these two.
`local` and `gossip`: a round ends with a step of each replica's own, and every `local_steps` rounds
replicas exchange their progress (DiLoCo, Douillard et al. 2023; NoLoCo, Kolehmainen et al. 2025).
With `fragments` groups of shards are exchanged in turn instead of all in one round (Streaming
DiLoCo, Douillard et al. 2025).

Every mode may begin with a *warm-up*: some rounds in which exchanges happen as soon as possible,
because parameters change fastest then, and an old gradient or a diverged model does most harm. In
the warm-up `delayed` and `auto` are `zero` (ZeRO-Offload too delays only after some steps), and
`local` and `gossip` exchange every shard in every round (post-local SGD, Lin et al. 2020).

An exchange has the number of the round whose gradient it sums. The *version* of a round is the
number of exchanges that its parameters contain: the parameters with which it begins are the input
of the exchange of that number.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median

ZERO, DELAYED, LOCAL, GOSSIP, AUTO = "zero", "delayed", "local", "gossip", "auto"
MAX_ROUND = 1 << 62
NO_END = MAX_ROUND
"""Length of a run that has no end: no round is as late, so that none of it is the last."""
LEAST_QUORUM = 2
"""Contributions with which an exchange goes on in mode `local`, at least. Who is late then counts
in a later one."""
MOST_LATE = 3
"""By so many exchanges a contribution counts later than its own, at most: so often may an upload
take the time between two. The books of an exchange that lacks tokens are open for as long."""
SLOW_PART = 0.25
"""In mode `local`, of the median weight: who has less leads behind all others. A round of own steps
waits for all results, and for no contribution of such a link."""


def least_quorum(majority: int, num_members: int) -> int:
    """Contributions that a quorum has at least. `majority`: as many as a rule of aggregation needs
    to find a wrong one among them, where there are so many."""
    return majority if num_members >= majority else LEAST_QUORUM


def least_to_lead(weights: Collection[float]) -> float:
    """The weight with which an owner leads like others in mode `local`; 0 where there are none."""
    return SLOW_PART * median(weights) if weights else 0.0


class RunEnd:
    """A round that the run ends with before its time, once its owner has said so: one fact of a
    process, for all in it that train or watch."""

    def __init__(self) -> None:
        self.round = NO_END

    @property
    def is_ordered(self) -> bool:
        """The owner has said so."""
        return self.round < NO_END

    def at(self, round_index: int) -> None:
        """Ends with this one."""
        self.round = round_index


@dataclass(frozen=True, slots=True)
class Switch:
    """In mode `auto`: the mode of exchanges from one round on, and the measurements behind it."""

    round: int
    mode: str
    """`zero` or `delayed`."""
    round_s: float
    """Seconds that a round is open."""
    exchange_s: float
    """Seconds of an exchange."""

    def __post_init__(self) -> None:
        if self.mode not in (ZERO, DELAYED) or not 0 <= self.round < MAX_ROUND:
            raise ValueError("a switch to no mode, or in no round")
        if any(not (math.isfinite(x) and x >= 0) for x in (self.round_s, self.exchange_s)):
            raise ValueError("a measurement of a switch is out of range")


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The exchanges of a run."""

    mode: str = ZERO
    rounds: int = 1
    """Length of the run, which ends with an exchange of all shards; `NO_END` where it does not."""
    local_steps: int = 1
    """Rounds between two exchanges of a shard, where replicas make steps of their own."""
    fragments: int = 1
    """Groups of shards that are exchanged in different rounds; at most `local_steps` differ."""
    switches: tuple[Switch, ...] = ()
    """Changes in mode `auto`, by ascending round; before them the mode is `zero`."""
    warmup_rounds: int = 0
    """Rounds of the warm-up, at the beginning of the run."""

    def __hash__(self) -> int:
        return hash(self.switches)  # the rest is the run's, and the same all the time

    @property
    def is_local(self) -> bool:
        """Replicas make steps of their own: their parameters differ between exchanges."""
        return self.mode in (LOCAL, GOSSIP)

    def parameter_version(self, round_index: int) -> int:
        """Exchanges behind the parameters with which a round begins."""
        late = round_index >= 1 and self.is_delayed(round_index - 1)
        return round_index - 1 if late else round_index

    def is_warmup(self, round_index: int) -> bool:
        """Whether a round belongs to the warm-up."""
        return round_index < self.warmup_rounds

    def steps_until_due(self, round_index: int) -> int:
        """Rounds from one exchange of a shard to the next, around a round."""
        return 1 if self.is_warmup(round_index) else self.local_steps

    def mode_at(self, round_index: int) -> str:
        """The mode of the exchange of a round."""
        if self.mode in (DELAYED, AUTO) and self.is_warmup(round_index):
            return ZERO
        if self.mode != AUTO:
            return self.mode
        return next((s.mode for s in reversed(self.switches) if s.round <= round_index), ZERO)

    def agrees(self, switches: tuple[Switch, ...], round_index: int) -> bool:
        """Whether with other changes of mode nothing would be different that is under way in this
        round, or open ahead: the exchanges of it and of those before."""
        other = replace(self, switches=switches)
        rounds = range(max(0, round_index - 2), round_index + 1)
        return all(self.mode_at(r) == other.mode_at(r) for r in rounds)

    def is_delayed(self, round_index: int) -> bool:
        """Whether the exchange of this round runs beside the next round; never for the last."""
        if self.mode not in (DELAYED, AUTO) or round_index >= self.rounds - 1:
            return False
        return self.mode_at(round_index) == DELAYED

    def next_owner_round(self, round_index: int) -> int:
        """The first round for which a replica that joins in this one may own shards: owners do not
        change any more in the exchange with which the round begins."""
        after = round_index + 1
        return (
            after
            if self.parameter_version(after) > self.parameter_version(round_index)
            else after + 1
        )

    def is_due(self, shard_index: int, round_index: int) -> bool:
        """Whether a shard is exchanged at the end of this round."""
        is_always = not self.is_local or self.is_warmup(round_index)
        if is_always or round_index >= self.rounds - 1:
            return True
        offset = shard_index % self.fragments * self.local_steps // self.fragments
        return (round_index + 1 + offset) % self.local_steps == 0

    def due(self, round_index: int, num_shards: int) -> list[int]:
        """The shards that are exchanged at the end of a round, ascending."""
        return [j for j in range(num_shards) if self.is_due(j, round_index)]

    def window(self, shard_index: int, exchange: int) -> range:
        """The rounds whose work is in an exchange of a shard."""
        if not self.is_local:
            return range(exchange, exchange + 1)
        return range(self.last_exchange(shard_index, exchange) + 1, exchange + 1)

    def exchanges_before(self, shard_index: int, exchange: int, most: int) -> list[int]:
        """The exchanges of a shard before one, the newest first; no more than `most`."""
        found: list[int] = []
        while len(found) < most and (exchange := self.last_exchange(shard_index, exchange)) >= 0:
            found.append(exchange)
        return found

    def last_exchange(self, shard_index: int, version: int) -> int:
        """The newest exchange of a shard among those before `version`; -1 for none yet. Two
        versions with the same answer begin with the same common state of the shard."""
        if not self.is_local:
            return version - 1
        oldest = max(0, version - self.local_steps)
        for r in range(version - 1, oldest - 1, -1):
            if self.is_due(shard_index, r):
                return r
        return -1
