"""Announcing that a round has begun at this replica, the join that comes before the first, and how
fast this machine is, or is likely to be, in a stage."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from statistics import fmean

from swarmnet.plurals import counted
from swarmnet.protocol.membership.failure_detector import PROBE_TIMEOUT_S
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING
from swarmnet.protocol.moments import Since
from swarmnet.protocol.pipeline import experts
from swarmnet.protocol.update.lost_samples import Loss
from swarmnet.swarm.machine import Machine
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery.checkpointing import Checkpointing
from swarmnet.swarm.recovery.restart import Recovery
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import RETRY_S
from swarmnet.swarm.update.exchanges import Exchanges
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")
lost_log = logging.getLogger("swarmnet.lost_samples")

MAX_FORETOLD = 64
"""A newcomer tells so many replicas of its stage before it begins, and waits as for a ping, twice,
for each of them."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """The run's history turned out to be named otherwise (see `Record.history`)."""

    before: int
    after: int


Happened = Loss | Renamed
"""What a peer is to know of the stage that it serves."""


@dataclass
class Speed:
    """The expected and the measured rate of this machine, beside what its other seats serve."""

    machine: Machine
    transport: Transport
    samples_per_microbatch: int
    product_flops_per_s: float = 0.0
    """Of products of matrices in an optimizer's step; 0: unknown, or there are none."""
    _expected_s: float = 0.0
    """Device seconds of a microbatch in a stage of middle cost; 0: unknown."""
    _busy_s: float = 0.0

    async def measure(self) -> None:
        """Measures the device, where nothing is known of it yet."""
        if not self._expected_s:
            self._expected_s = await self.machine.worker.run(self.machine.measure)
        measure = self.machine.measure_products
        if measure is not None and not self.product_flops_per_s:
            self.product_flops_per_s = await self.machine.worker.run(measure)

    def expected_rate(self, stage_index: int) -> float:
        """Samples/s of a stage beside those that the machine serves; 0 while unknown."""
        if not self._expected_s:
            return 0.0
        own_s = self._expected_s * self._relative_cost(stage_index)
        return self.samples_per_microbatch / (own_s + sum(self.machine.services.values()))

    def rate(self, replica: Replica) -> float:
        """Samples/s that the device could do of a stage, or the uplink carry: as measured, else as
        expected; 0 while unknown."""
        services = self.machine.services
        expected_s = self._expected_s * self._relative_cost(replica.index)
        services[replica.index] = replica.service_s or expected_s
        if not services[replica.index]:
            return 0.0
        link_s = self.transport.traffic.upload_s(replica.measured.sent_bytes)
        return self.samples_per_microbatch / max(sum(services.values()), link_s)

    def busy_since_opening(self, replica: Replica) -> float:
        """Seconds that the device has worked since the round before was opened."""
        before, self._busy_s = self._busy_s, replica.device.busy_s
        return max(0.0, self._busy_s - before) if replica.measured.open_s else 0.0

    def learn(self, replica: Replica) -> None:
        """Expects of the next stage what was measured in this one."""
        if replica.service_s:
            self._expected_s = replica.service_s / self._relative_cost(replica.index)

    def stopped(self, stage_index: int) -> None:
        """The device serves a stage no more."""
        self.machine.services.pop(stage_index, None)

    def _relative_cost(self, stage_index: int) -> float:
        """Of a stage, over that of a middle one."""
        costs = self.machine.stage_costs
        return costs[stage_index] / fmean(costs) if costs else 1.0


@dataclass
class Openings:
    """Puts each round that opens here into the own record. It outlives the stages that a peer
    serves one after the other."""

    gossip: Gossip
    recovery: Recovery
    checkpointing: Checkpointing | None
    speed: Speed
    tasks: Tasks
    """These run what goes on beside the round."""
    _counted_history: int = 0
    """The history of the rounds that this peer has counted samples of."""

    async def opened(self, replica: Replica, exchanges: Exchanges) -> list[Happened]:
        """A round has begun here: says so, with digests, and sees to the shards it owns. Returns
        what the peer is to know of."""
        await replica.measure_digests()
        if computed := replica.ledger.take_finished():
            self.gossip.add_total("samples_computed", computed)
        routers = ((r.shares, r.dropped) for r in replica.stage.routed)
        self.gossip.set_totals(experts.told_totals(routers))
        own = self.gossip.own
        joined = own.state == JOINING
        history = self.recovery.history()
        if joined:
            await self.recovery.settle_errors(replica, exchanges, history)
        changes = self._changes(replica, exchanges, history)
        happened: list[Happened] = []
        if not joined and history != own.history:
            happened.append(Renamed(own.history, history))
        if joined and history != self._counted_history:
            # Rounds of another history: they have nothing in common with these but their number.
            changes["counts"] = tuple(c for c in own.counts if c.round < replica.round)
        self._counted_history = history
        if joined:
            others = self._others(replica.index)
            await self.gossip.declare_join(others, PROBE_TIMEOUT_S, state=ACTIVE, **changes)
        state = self.gossip.own.state
        self.gossip.update(state=ACTIVE if state == JOINING else state, urgent=True, **changes)
        if replica.phase.is_declaring:
            replica.transitions.declared()
        happened += self._close_books(replica, exchanges)
        if joined:
            self.recovery.opened(replica.round, history)
        self.recovery.forget_loaded()
        if exchanges.current == replica.round:  # else after the exchange that runs beside it
            exchanges.ownership.tasks.start(self._own_shards(replica, exchanges))
        if self.checkpointing is not None:
            self.tasks.start(self.checkpointing.opened(replica, exchanges))
        if joined:
            log.info("stage %d: serving from round %d", replica.index, replica.round)
        return happened

    def _close_books(self, replica: Replica, exchanges: Exchanges) -> list[Loss]:
        """Reports the samples that are in no update."""
        own, now = self.gossip.own, asyncio.get_running_loop().time()
        state_since = Since(self.gossip.own_record.state_since)
        has_just_left = own.state == LEAVING and not state_since.is_older(now, RETRY_S)
        losses = exchanges.lost.opened(
            replica.round, replica.plan, own, now, has_just_left=has_just_left
        )
        for loss in losses:
            if loss.lost_samples:
                self.gossip.add_total("samples_lost", loss.lost_samples)
                lost_log.warning(
                    "round %d: no update has %s of stage %d",
                    loss.round,
                    counted(loss.lost_samples, "sample"),
                    loss.stage,
                )
        return losses

    def announce_rate(self, replica: Replica) -> None:
        """Newcomers, and peers that move, go by what is announced; a round may be long."""
        self.gossip.update(samples_per_s=self.speed.rate(replica))

    def _changes(self, replica: Replica, exchanges: Exchanges, history: int) -> dict[str, object]:
        """What the own record says of the round."""
        own = self.gossip.own
        rate, holds = self.speed.rate(replica), exchanges.states.holds()
        active_from = own.active_from
        if own.state == JOINING:
            is_owner = (
                len(holds.strip(b"\0")) > 0
                or exchanges.ownership.owns_from_now
                or self.recovery.restored is not None
            )
            r = replica.round
            active_from = r if is_owner else replica.plan.next_owner_round(r)
        return {
            "stage": replica.index,
            "round": replica.round,
            "digests": replica.digests,
            "holds": holds,
            "fresh": b"",
            "active_from": active_from,
            "samples_per_s": rate,
            "queue_length": replica.device.num_waiting,
            "restorable": (),
            "history": history,
            "samples": replica.samples,
            "last_open_s": replica.measured.open_s,
            "last_busy_s": self.speed.busy_since_opening(replica),
            "last_exchange_s": exchanges.pace.durations.last_s if replica.measured.open_s else 0.0,
        }

    def _others(self, stage_index: int) -> list[str]:
        """The other replicas of a stage; some of them where these are many, and rounds are long."""
        now = asyncio.get_running_loop().time()
        members = [r.peer_id for r in self.gossip.view.members(stage_index, now)]
        others = [p for p in members if p != self.gossip.own.peer_id]
        if len(others) <= MAX_FORETOLD:
            return others
        return self.gossip.rng.sample(others, MAX_FORETOLD)

    async def _own_shards(self, replica: Replica, exchanges: Exchanges) -> None:
        """Sees to the shards that this replica owns; of those of the first round it says so."""
        r = replica.round
        await exchanges.follow_owners()
        holds = exchanges.states.holds()
        if r == 0 and replica.is_open(r) and self.gossip.own.holds != holds:
            self.gossip.update(holds=exchanges.states.holds())
