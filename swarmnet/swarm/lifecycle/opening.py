"""Announcing that a round has begun at this replica, and the join that comes before the first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarmnet.protocol.membership.records import ACTIVE, JOINING
from swarmnet.swarm.lifecycle.speed import Speed
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.looks import PROBE_TIMEOUT_S
from swarmnet.swarm.recovery.checkpointing import Checkpointing
from swarmnet.swarm.recovery.restart import Recovery
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.averaging import Averaging

log = logging.getLogger("swarmnet.peer")

MAX_FORETOLD = 64
"""A newcomer tells so many replicas of its stage before it begins, and waits as for a ping, twice,
for each of them."""


class Openings:
    """Puts each round that opens here into the own record. It outlives the stages that a peer
    serves one after the other."""

    def __init__(
        self,
        gossip: Gossip,
        recovery: Recovery,
        checkpointing: Checkpointing | None,
        speed: Speed,
        tasks: Tasks,
        on_history: Callable[[int, int], None],
    ) -> None:
        """`on_history(old, new)` hears when the run's history turns out to be named otherwise.
        `tasks` run what goes on beside the round."""
        self._gossip = gossip
        self._recovery = recovery
        self._checkpointing = checkpointing
        self._speed = speed
        self._tasks = tasks
        self._on_history = on_history
        self._counted_history = 0
        """The history of the rounds that this peer has counted samples of."""

    async def opened(self, replica: Replica, averaging: Averaging) -> None:
        """A round has begun here: says so, with digests, and sees to the shards it owns."""
        await replica.measure_digests()
        own = self._gossip.own
        joined = own.state == JOINING
        history = self._recovery.history()
        if joined:
            await self._recovery.settle_errors(replica, averaging, history)
        changes = self._changes(replica, averaging, history)
        if not joined and history != own.history:
            self._on_history(own.history, history)
        if joined and history != self._counted_history:
            # Rounds of another history: they have nothing in common with these but their number.
            changes["counts"] = tuple(c for c in own.counts if c.round < replica.round)
        self._counted_history = history
        if joined:
            others = self._others(replica.index)
            await self._gossip.declare_join(others, PROBE_TIMEOUT_S, state=ACTIVE, **changes)
        state = self._gossip.own.state
        self._gossip.update(state=ACTIVE if state == JOINING else state, urgent=True, **changes)
        if replica.phase.is_declaring:
            replica.transitions.declared()
        averaging.lost.opened(replica.round)
        if joined:
            self._recovery.opened(replica.round, history)
        self._recovery.forget_loaded()
        if averaging.current == replica.round:  # else after the exchange that runs beside it
            averaging.ownership.tasks.start(self._own_shards(replica, averaging))
        if self._checkpointing is not None:
            self._tasks.start(self._checkpointing.opened(replica, averaging))
        if joined:
            log.info("stage %d: serving from round %d", replica.index, replica.round)

    def announce_rate(self, replica: Replica) -> None:
        """Newcomers, and peers that move, go by what is announced; a round may be long."""
        self._gossip.update(samples_per_s=self._speed.rate(replica))

    def _changes(self, replica: Replica, averaging: Averaging, history: int) -> dict[str, object]:
        """What the own record says of the round."""
        own = self._gossip.own
        rate, holds = self._speed.rate(replica), averaging.states.holds()
        active_from = own.active_from
        if own.state == JOINING:
            is_owner = (
                len(holds.strip(b"\0")) > 0
                or averaging.ownership.owns_from_now
                or self._recovery.restored is not None
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
            "last_busy_s": self._speed.busy_since_opening(replica),
            "last_exchange_s": averaging.pace.last_s if replica.measured.open_s else 0.0,
        }

    def _others(self, stage_index: int) -> list[str]:
        """The other replicas of a stage; some of them where these are many, and rounds are long."""
        now = asyncio.get_running_loop().time()
        members = [r.peer_id for r in self._gossip.view.members(stage_index, now)]
        others = [p for p in members if p != self._gossip.own.peer_id]
        if len(others) <= MAX_FORETOLD:
            return others
        return self._gossip.rng.sample(others, MAX_FORETOLD)

    async def _own_shards(self, replica: Replica, averaging: Averaging) -> None:
        """Sees to the shards that this replica owns; of those of the first round it says so."""
        r = replica.round
        await averaging.follow_owners()
        holds = averaging.states.holds()
        if r == 0 and replica.is_open(r) and self._gossip.own.holds != holds:
            self._gossip.update(holds=averaging.states.holds())
