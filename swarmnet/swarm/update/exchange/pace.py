"""How long an exchange may take, and when it gets the uplink.

The waits are decided in `protocol.update.exchange_waits`; here is what they go by. A newcomer may
be primary of shards in its first exchange: what it has not measured yet it takes from the records
of the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from swarmnet.protocol.leftovers import ROOM_S
from swarmnet.protocol.membership.failure_detector import PROBE_TIMEOUT_S, SUSPECT_S
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.update.exchange_waits import (
    BEHIND_PART,
    BESIDE_PART,
    CLOSING_MICROBATCHES,
    LONGEST_UPLOAD_S,
    ExchangeDurations,
    ExchangeWaits,
    turn_wait_s,
    upload_s,
)
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.swarm.update.exchange.coded import stage_bytes
from swarmnet.transport.base import Traffic


@dataclass(frozen=True, slots=True)
class StagePace:
    """What the records of a stage's members say of how long an exchange takes."""

    rates: list[float]
    """Of uplinks, bytes/s; those that are known."""
    samples_per_s: float
    """Of the slowest device; infinite where none is known."""
    open_s: float
    """How long the others' last round was open, by most of them; 0 where none says it."""
    exchange_s: float
    """How long their last exchange took, likewise."""


def _usual(values: Sequence[float]) -> float:
    known = [x for x in values if x > 0]
    return median_high(known) if known else 0.0


class ExchangePace:
    """Gives the exchanges of one replica's stage their waits and their turns on the uplink."""

    def __init__(
        self,
        traffic: Traffic,
        gossip: Gossip,
        settings: RunSettings,
        limits: WaitLimits,
        replica: Replica,
    ) -> None:
        self._gossip = gossip
        self._settings = settings
        self._limits = limits
        self._replica = replica
        self._turns = Turns(traffic)
        self._stage_bytes = stage_bytes(replica)
        self.durations = ExchangeDurations()

    def close(self) -> None:
        self._turns.close()

    # ---- time -------------------------------------------------------------------------------

    def waits(self) -> ExchangeWaits:
        """The waits of the present exchange, by what is known now."""
        plan, current = self._replica.plan, self._replica.current_exchange
        now, index = asyncio.get_running_loop().time(), self._replica.index
        told = self._gossip.view.remembered(index, "told of its pace", now, self._told)
        # A round is open for so long: of a newcomer's first one, it has seen the end only.
        open_s = max(self._replica.measured.open_s, told.open_s)
        work_s = self._settings.samples_per_microbatch / told.samples_per_s
        is_beside = plan.is_delayed(current)
        behind = plan.steps_until_due(current) if plan.is_local else 0
        return ExchangeWaits(
            self.durations.usual_s or told.exchange_s,
            upload_s(self._stage_bytes, told.rates),
            self._gossip.spread_s + CLOSING_MICROBATCHES * work_s,
            BESIDE_PART * open_s if is_beside else 0.0,
            BEHIND_PART * behind * open_s,
            self._limits.reduce_wait_min_s,
            self._limits.reduce_wait_s,
            self._limits.norm_wait_s,
            SUSPECT_S + PROBE_TIMEOUT_S,
        )

    def _told(self) -> StagePace:
        now = asyncio.get_running_loop().time()
        members = self._gossip.view.members(self._replica.index, now)
        others = [m for m in members if m.peer_id != self._gossip.own.peer_id]
        return StagePace(
            [r.upload_bytes_per_s for r in members if r.upload_bytes_per_s > 0],
            min((r.samples_per_s for r in members if r.samples_per_s > 0), default=math.inf),
            _usual([m.last_open_s for m in others]),
            # A single other may have exchanged with no replica yet, or with others than are here.
            _usual([m.last_exchange_s for m in others]) if len(others) >= 2 else 0.0,
        )

    # ---- the uplink -------------------------------------------------------------------------

    async def turn(self, num_bytes: int) -> None:
        """Beside a round, waits until the uplink has room beside the microbatches for a message of
        this size, which is to be sent at once then."""
        if num_bytes and self._replica.plan.is_delayed(self._replica.current_exchange):
            await self._turns.take(num_bytes, self._gossip.own.upload_bytes_per_s)


class Turns:
    """Gives out turns on one uplink, for the long messages that leave room for microbatches.

    An exchange that runs beside a round sends a stage's parameters several times, while
    microbatches use the same link. If all of its messages were sent at once, a microbatch would
    share the link with dozens of streams, or wait behind them in the modem's queue (bufferbloat,
    Gettys and Nichols 2011). So they are sent one after the other, the next one when the link has
    sent the one before and little waits for it. So the exchange takes all that microbatches leave
    of the link, and a microbatch waits behind one message at most. Where microbatches leave
    nothing, a message waits as long as it takes the link itself, and no longer: the exchange has
    half of the link then. All peers wait for the slowest, and gradients that were not sent are lost
    with their machine.

    First come, first served. A message is sent when its turn begins, and has the link for as long
    as it takes."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, num_bytes: int, rate: float) -> None:
        """Returns when the messages before this one have had their time, and what is urgent is gone
        or has had as much. `rate`: bytes/s of the uplink; 0 where that is unknown, and then nothing
        is held up."""
        if rate <= 0:
            return
        try:
            async with asyncio.timeout(LONGEST_UPLOAD_S):
                await self._lock.acquire()
        except TimeoutError:
            return
        takes_s = min(num_bytes / rate, LONGEST_UPLOAD_S)
        try:
            await self._until_room(rate, takes_s)
        except BaseException:
            self._lock.release()
            raise
        self._timer = asyncio.get_running_loop().call_later(takes_s, self._end)

    async def _until_room(self, rate: float, longest_s: float) -> None:
        loop = asyncio.get_running_loop()
        latest = Deadline.after(loop.time(), longest_s)
        while True:
            queued_bytes = self._traffic.queued_bytes()
            wait_s = turn_wait_s(queued_bytes, rate, latest, loop.time())
            if not wait_s:
                return
            await asyncio.sleep(min(max(wait_s, ROOM_S), LOOK_LESS_S))

    def _end(self) -> None:
        self._timer = None
        self._lock.release()

    def close(self) -> None:
        """Ends the present turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._end()
