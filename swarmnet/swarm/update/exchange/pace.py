"""How long an exchange may take, and when it gets the uplink.

Deadlines come from the duration of the last exchanges, or, while that is unknown, from the slowest
uplink. A slow peer must not be suspected, for its work would be lost; a dead one must not hold up a
stage. A newcomer may be primary of shards in its first exchange: what it has not measured yet it
takes from the records of the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from statistics import median_high

from swarmnet.protocol.membership.failure_detector import SUSPECT_S
from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.sync_modes import SyncPlan
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.looks import PROBE_TIMEOUT_S
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.swarm.update.exchange.coded import stage_bytes
from swarmnet.swarm.update.exchange.turns import LONGEST_UPLOAD_S, Turns

WAIT_FACTOR = 4.0
"""The deadline for contributions, over what a round's exchange took lately."""
EXCHANGE_SMOOTHING = 0.3
UPLOAD_SLACK = 3.0
"""Times what a stage's gradient takes the slowest uplink: results and samples go up it too."""
CLOSING_MICROBATCHES = 3
"""Of the slowest replica: so much work lies between the end of a round and its contributions."""
BESIDE_PART = 0.8
"""Of the length of a round: how long an exchange beside one may wait for contributions."""
BEHIND_PART = 0.5
"""Of the length of the rounds between two exchanges: how long one may wait, where replicas make
steps of their own."""


class ExchangePace:
    """Deadlines and turns on the uplink for the exchanges of one replica's stage."""

    def __init__(
        self,
        gossip: Gossip,
        settings: RunSettings,
        limits: Limits,
        replica: Replica,
        turns: Turns,
    ) -> None:
        self._gossip = gossip
        self._settings = settings
        self._limits = limits
        self._replica = replica
        self._turns = turns
        self._exchange_s = 0.0
        self._stage_bytes = stage_bytes(replica)
        self._held: tuple[float, frozenset[str]] | None = None
        """What the last exchange took, where peers were waited for in vain, and for whom."""
        self.last_s = 0.0
        """What the last exchange took in which nobody was waited for in vain."""

    def close(self) -> None:
        self._turns.close()

    @property
    def _plan(self) -> SyncPlan:
        return self._replica.plan

    @property
    def _current(self) -> int:
        return self._replica.current_exchange

    # ---- time -------------------------------------------------------------------------------

    def took(self, seconds: float, *, is_usual: bool = True, missed: Collection[str] = ()) -> None:
        """An exchange is over. One with no other replica, or to which this one had nothing to give,
        says nothing of others (`is_usual` is False). (A clock that leaves out its own stalls may
        have gone back a little.)

        `missed`: who was waited for in vain. That wait is no measure of what an exchange takes: one
        that hangs would make each deadline longer than the one before. It is one where such a peer
        was late, and comes after all (`straggled`)."""
        seconds = max(0.0, seconds)
        self._held = (seconds, frozenset(missed)) if missed and is_usual else None
        if missed:
            return
        self.last_s = seconds
        if is_usual:
            self._measure(seconds)

    def straggled(self, peer_id: str) -> None:
        """A contribution of a peer has come after its exchange."""
        if self._held is not None and peer_id in self._held[1]:
            self._measure(self._held[0])
            self._held = None

    def _measure(self, seconds: float) -> None:
        self._exchange_s += EXCHANGE_SMOOTHING * (seconds - self._exchange_s)

    def usual_s(self) -> float:
        """Seconds that an exchange takes, by those before or by the slowest uplink; 0 while that
        is unknown."""
        return self._usual_exchange_s() or self._upload_s() / UPLOAD_SLACK

    def contributions_s(self) -> tuple[float, float]:
        """After the own contribution: when those of others should be there, and how long a primary
        waits for them. Where nothing is known yet, a slow peer must not be suspected."""
        measured_s = max(WAIT_FACTOR * self._usual_exchange_s(), self._upload_s())
        longest_s = self._longest_wait_s()
        due_s = measured_s + self._limits.reduce_wait_min_s + self._closing_s()
        due_s = min(due_s, longest_s)
        return due_s, due_s if measured_s else longest_s

    def sum_s(self) -> float:
        """Longest wait for the word that a sum is made, at a primary that lives: it waits for
        contributions from when it has closed the round itself, which may be as late as one, and
        after a death for leases and promises, as long as a norm may take. What links take says
        nothing of what machines take: a first exchange may be a slow one. A verdict that is wrong
        costs the moments of what the other owns (tests/swarm/update/test_replication.py)."""
        is_known = self.knows_exchanges
        wait_s = self.contributions_s()[1] if is_known else self._longest_wait_s()
        return 2 * wait_s + self.norm_s()

    @property
    def knows_exchanges(self) -> bool:
        """It is known how long an exchange takes, so that silence tells something."""
        return self._usual_exchange_s() > 0

    def norm_s(self) -> float:
        """Longest wait for the norm over all stages: until the last shard has been summed."""
        _, longest_s = self.contributions_s()  # where nothing is known yet, they are waited for
        longest_s += SUSPECT_S + PROBE_TIMEOUT_S  # for the leases of those that may be back
        return max(self._limits.norm_wait_s, longest_s, self._upload_s(), self._beside_s())

    def call_s(self) -> float:
        """Longest call for a shard, to a peer that lives."""
        return self.norm_s() + self._longest_wait_s() + self._upload_s()

    def _upload_s(self) -> float:
        """What sending a gradient may take the slowest replica whose bandwidth is known, as it
        sends results too: some slack on twice the stage's bytes."""
        now = asyncio.get_running_loop().time()
        members = self._gossip.view.members(self._replica.index, now)
        rates = [r.upload_bytes_per_s for r in members if r.upload_bytes_per_s > 0]
        upload_s = UPLOAD_SLACK * self._stage_bytes / min(rates) if rates else 0.0
        return min(upload_s, LONGEST_UPLOAD_S)

    def _closing_s(self) -> float:
        """Until the last replica has heard that a round is over, and its device has ended the work
        that was under way when it closed the round, settled it and opened the next one."""
        now = asyncio.get_running_loop().time()
        members = self._gossip.view.members(self._replica.index, now)
        slowest = min((r.samples_per_s for r in members if r.samples_per_s > 0), default=math.inf)
        work_s = self._settings.samples_per_microbatch / slowest
        return self._gossip.spread_s + CLOSING_MICROBATCHES * work_s

    def _longest_wait_s(self) -> float:
        lengths = (self._upload_s(), self._beside_s(), self._behind_s())
        return max(self._limits.reduce_wait_s, *lengths)

    def _behind_s(self) -> float:
        """The more rounds of own steps are behind an exchange, the more is lost with a slow one."""
        plan = self._plan
        steps = plan.steps_until_due(self._current)
        return BEHIND_PART * steps * self._usual_open_s() if plan.is_local else 0.0

    def _beside_s(self) -> float:
        """An exchange that runs beside a round delays no peer as long as it ends with it."""
        is_beside = self._plan.is_delayed(self._current)
        return BESIDE_PART * self._usual_open_s() if is_beside else 0.0

    def _usual_exchange_s(self) -> float:
        # A single other may have exchanged with no replica yet, or with others than are here now.
        return self._exchange_s or self._told(lambda record: record.last_exchange_s, least=2)

    def _usual_open_s(self) -> float:
        """A round is open for so long: of a newcomer's first one, it has seen the end only."""
        return max(self._replica.measured.open_s, self._told(lambda record: record.last_open_s))

    def _told(self, what: Callable[[Record], float], least: int = 1) -> float:
        """By most of the others of the stage; 0 where fewer than `least` are there, or none
        says anything."""
        now = asyncio.get_running_loop().time()
        members = self._gossip.view.members(self._replica.index, now)
        values = [what(m) for m in members if m.peer_id != self._gossip.own.peer_id]
        known = [x for x in values if x > 0]
        return median_high(known) if known and len(values) >= least else 0.0

    # ---- the uplink -------------------------------------------------------------------------

    async def turn(self, num_bytes: int) -> None:
        """Beside a round, waits until the uplink has room beside the microbatches for a message of
        this size, which is to be sent at once then."""
        if num_bytes and self._plan.is_delayed(self._current):
            await self._turns.take(num_bytes, self._gossip.own.upload_bytes_per_s)
