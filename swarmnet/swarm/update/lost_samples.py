"""Samples that were lost: a round counted them, and they are in no update of this stage.

A replica that takes part in an exchange learns the tokens behind its result (`averaging`). What the
round counted is in the feeders' records. The difference died with a replica, came too late, or was
refused. It is taken when the round has been over for `SETTLED_ROUNDS`: then the counters of all
feeders are here. One replica of the stage reports it, in its total `samples_lost`: the active one
with the lowest peer id that was there from the first of the exchange's rounds on. Only where that
one dies, or is suspected, in those very rounds may a loss be reported twice or not at all.

In mode `local` a sample counts as averaged when the own step that it is in was part of an exchange:
books are closed once an exchange, by the first shard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnet.protocol.membership.records import LEAVING
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.sync_modes import GOSSIP
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.timing import RETRY_S

log = logging.getLogger("swarmnet.lost_samples")

SETTLED_ROUNDS = 2
"""A feeder's record has the counters of a round for at least so many rounds more."""
KEPT_EXCHANGES = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """The books of one exchange at one stage. Tokens are exact; samples are too where every
    microbatch has the same number of tokens."""

    round: int
    stage: int
    counted_tokens: int
    averaged_tokens: int
    lost_samples: int


OnLoss = Callable[[Loss], None]


@dataclass
class LostSamples:
    """The books of one replica."""

    gossip: Gossip
    replica: Replica
    settings: RunSettings
    on_loss: OnLoss = lambda loss: None
    """Hears of all books that this peer closes for its stage, those without a loss too."""
    _next: int | None = None
    _counted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Samples and tokens by round."""
    _averaged: dict[int, int] = field(default_factory=dict)
    """Tokens by exchange."""

    def averaged(self, exchange: int, num_tokens: int) -> None:
        """An exchange is done: so many tokens are behind its result."""
        self._averaged[exchange] = num_tokens
        for old in sorted(self._averaged)[:-KEPT_EXCHANGES]:
            del self._averaged[old]

    def opened(self, round_index: int) -> None:
        """A round has begun here, or the run is over. Where there is no exchange of the whole
        stage, there are no books."""
        if self.replica.plan.mode == GOSSIP:
            return
        if self._next is None or self._next > round_index:
            self._next = round_index
        over = round_index >= self.replica.plan.rounds
        last = round_index - 1 if over else round_index - SETTLED_ROUNDS
        for r in range(max(self._next, last - KEPT_EXCHANGES), last + 1):
            self._close(r)
            self._next = r + 1

    def _close(self, r: int) -> None:
        now = asyncio.get_running_loop().time()
        state = progress.round_progress(self.gossip.view, r, now, self.settings.num_slots)
        samples = state.num_flights * self.settings.samples_per_microbatch
        self._counted[r] = (samples, state.tokens)
        plan = self.replica.plan
        if not plan.is_due(0, r):
            return
        window = plan.window(0, r)
        averaged = self._averaged.pop(r, None)
        known = all(q in self._counted for q in window)
        samples = sum(self._counted.get(q, (0, 0))[0] for q in window)
        tokens = sum(self._counted.get(q, (0, 0))[1] for q in window)
        for q in [q for q in self._counted if q <= r]:
            del self._counted[q]
        if averaged is None or not known or not self._tells(window, now):
            return
        tokens = max(tokens, averaged)  # what is averaged was counted: a record has yet to come
        lost = round(samples * (tokens - averaged) / tokens) if tokens else 0
        self.on_loss(Loss(r, self.replica.index, tokens, averaged, lost))
        if lost:
            self.gossip.add_total("samples_lost", lost)
            log.warning(
                "round %d: %d samples of stage %d are in no update", r, lost, self.replica.index
            )

    def _tells(self, window: range, now: float) -> bool:
        """Whether this peer reports for its stage. One of those does that were there from the first
        of these rounds on, else of those that joined in them."""
        own = self.gossip.own
        plan = self.replica.plan
        replicas = list(self.gossip.view.replicas(self.replica.index, now))
        # For the others, one that has just said that it leaves still counts.
        if own.state == LEAVING and now - self.gossip.own_record.state_since < RETRY_S:
            replicas.append(own)
        # A replica that has not come so far has lost touch, and will fetch the stage again.
        replicas = [m for m in replicas if m.round >= window.stop - 1]
        for latest in (window.start, window.stop):
            there = [m.peer_id for m in replicas if plan.parameter_version(m.active_from) <= latest]
            if there:
                return min(there) == own.peer_id
        return True
