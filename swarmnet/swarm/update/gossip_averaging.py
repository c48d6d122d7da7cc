"""`[sync] mode = "gossip"`: own steps, and now and then an average with one random partner.

There is no group and no owner. Every `local_steps` rounds, and in every round of the warm-up,
replicas of a stage pair off (`protocol.update.pairing`). Each asks its partner for its *offer*
(parameters of its last meeting, change since then, moments of its own steps) and makes the outer
step of the pair for itself (NoLoCo, Kolehmainen et al. 2025). A replica that has no partner, or
loses it, steps alone. A meeting ends when both have the other's offer, or one of them is gone; each
makes its step then, for what it offers changes by it.

Replicas never become equal; random pairs and random routing keep them close. How far a replica was
from its partner when they met, relative to its parameters, is in its record (`spread`).

A newcomer takes everything from one donor: it begins as its copy. So does a replica that was cut
off for more than a meeting."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from swarmnet.errors import NotReady, Stale, SwarmnetError
from swarmnet.methods.state import FETCH_OPTIMIZER, FetchReply, FetchRequest
from swarmnet.methods.update import OFFER
from swarmnet.ports import LocalSteps
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, MAX_RATE, Record
from swarmnet.protocol.update.pairing import partner
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import Limits
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES
from swarmnet.swarm.update.averaging import Averaging, Behind
from swarmnet.swarm.update.local_updates import Moments, common_of, own_step
from swarmnet.swarm.update.meeting import Meeting, Offer, Offers
from swarmnet.swarm.update.members import BEHIND_ROUNDS
from swarmnet.swarm.update.rounds import Rounds
from swarmnet.swarm.update.state_sync import StateSync
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.gossip_averaging")

MAX_COPIES = 3
"""Downloads of a newcomer before it begins with what has become old on the way."""


@dataclass
class GossipAveraging:
    """Implements `swarm.update.rounds.Updates`."""

    transport: Transport
    gossip: Gossip
    limits: Limits
    replica: Replica
    averaging: Averaging

    def __post_init__(self) -> None:
        self._meeting: Meeting | None = None
        """The one that is going on."""
        self._changed = Condition()
        self._copies = 0
        """Of donors that had moved on when they were complete."""
        self._serving = asyncio.Semaphore(self.limits.max_serving)
        self.moments = Moments(self.transport, self.gossip, self.limits, self.replica)
        serve(self.transport, OFFER, self._on_offer)

    @property
    def local(self) -> LocalSteps:
        """The own steps."""
        assert self.replica.local is not None
        return self.replica.local

    @property
    def is_owing(self) -> bool:
        return any(self.local.tokens)

    def is_ready_ahead(self, round_index: int) -> bool:
        return False

    def attend(self) -> None:
        pass

    def repair(self) -> None:
        pass

    async def make(self, round_index: int, num_tokens: int) -> bool:
        replica = self.replica
        await self.averaging.work.until_exported()
        self._check_in_touch(round_index)
        await own_step(replica, self.gossip, num_tokens, round_index)
        if replica.plan.is_due(0, round_index):
            await self._meet(round_index)
            self._forget_tokens()
        self.averaging.states.skip(range(replica.num_shards))
        return True

    def _check_in_touch(self, r: int) -> None:
        """Raises `Behind` where others have had a whole meeting more than this replica: alone it
        would run through their rounds with old parameters, and pull back the replicas that it meets
        then."""
        now = asyncio.get_running_loop().time()
        members = self.gossip.view.members(self.replica.index, now)
        newest = max((m.round for m in members if m.state == ACTIVE), default=r)
        if newest - r > self._slack(newest):
            raise Behind(f"the stage is in round {newest}, this replica in {r}")

    def _slack(self, newest: int) -> int:
        """Rounds by which parameters may be older than those of others in the stage."""
        return max(BEHIND_ROUNDS, self.replica.plan.steps_until_due(newest))

    def finish_round(self, round_index: int) -> None:
        self.averaging.finish_round(round_index)

    async def close(self) -> None:
        self._meeting = None
        self._forget_tokens()

    def _forget_tokens(self) -> None:
        self.local.tokens = [0] * self.replica.num_shards

    # ---- meeting ----------------------------------------------------------------------------

    async def _meet(self, r: int) -> None:
        """The outer step, with the partner of this round where there is one."""
        meeting = Meeting(
            r,
            self.gossip,
            self._partner(r),
            self.replica.num_shards,
            lambda other: self._offers_of(other, r),
            lambda offers: self._make_step(offers, r),
            lambda: self.transport.traffic.queued_bytes() > 0,
            self.averaging.pace.waits().call_s,
        )
        self._meeting = meeting
        self._changed.notify_all()
        try:
            await meeting.run(max(self.local.tokens, default=0))
        finally:
            self._meeting = None

    async def _make_step(self, offers: Offers, r: int) -> None:
        if not offers and not self.is_owing:
            return  # nothing new: momentum alone leads nowhere
        apart = total = 0.0
        for j in range(self.replica.num_shards):
            distance, norm = await self.replica.worker.run(
                lambda j=j: self._step(j, offers.get(j), r)  # type: ignore[misc]
            )
            apart, total = apart + distance, total + norm
        if offers:
            self.gossip.add_total("late_shards", self.replica.num_shards - len(offers))
            spread = math.sqrt(apart / total) if total else 0.0
            self.gossip.update(spread=min(spread, MAX_RATE))  # an offer may be very far away

    def _step(self, j: int, offer: Offer | None, r: int) -> tuple[float, float]:
        """On the worker. An offer that does not fit is as none."""
        try:
            return self.local.meet(j, offer, r)
        except SwarmnetError as e:
            log.warning("shard %d: the partner's offer is refused: %s", j, e)
            return self.local.meet(j, None, r)

    def _partner(self, r: int) -> str | None:
        """By the replicas that are not past the round."""
        now = asyncio.get_running_loop().time()
        members = self.gossip.view.members(self.replica.index, now)
        others = [m.peer_id for m in members if m.state in (ACTIVE, LEAVING) and m.round <= r]
        return partner(self.gossip.own.peer_id, others, self.replica.index, r)

    async def _offers_of(self, other: str, r: int) -> Offers:
        offers: Offers = {}
        at_once = asyncio.Semaphore(self.limits.max_fetching)
        shards = range(self.replica.num_shards)
        await asyncio.gather(*(self._ask(other, r, j, at_once, offers) for j in shards))
        return offers

    async def _ask(
        self, other: str, r: int, j: int, at_once: asyncio.Semaphore, offers: Offers
    ) -> None:
        async with at_once:
            try:
                message = Message(FetchRequest(r, self.replica.index, j))
                reply = await self.averaging.call_while_live(other, OFFER, message)
                offers[j] = (reply.body.values, reply.arrays)
            except SwarmnetError as e:
                log.debug("round %d shard %d: no offer of %s: %s", r, j, other[-8:], e)

    async def _on_offer(self, request: Request[FetchRequest]) -> Message[FetchReply]:
        """A partner asks, in the same round."""
        fetch = request.message.body
        replica, r, j = self.replica, fetch.round, fetch.shard
        await self._changed.until(
            lambda: self._meeting is not None or replica.round > r, self.limits.enter_wait_s
        )
        meeting = self._meeting
        if meeting is None or meeting.round != r:
            if replica.round > r or meeting is not None:
                raise Stale("that meeting is over here", round=replica.round)
            raise NotReady(f"round {r} has not ended here", round=replica.round)
        async with self._serving:
            values, arrays = await replica.worker.run(lambda: self.local.offer(j))
        if self._meeting is not meeting:
            raise Stale("that meeting is over here", round=replica.round)
        meeting.asked(request.remote, j)
        return Message(FetchReply(r, values), arrays)

    # ---- newcomers --------------------------------------------------------------------------

    async def follow(self, sync: StateSync, rounds: Rounds) -> None:
        """Becomes a copy of one donor, in the newest round."""
        replica = self.replica
        donor = sync.rng.choice(sync.donors())
        log.info("stage %d: %d shards to fetch", replica.index, replica.num_shards)
        await self.moments.fetch(donor)
        at_once = asyncio.Semaphore(self.limits.max_fetching)
        copied = await asyncio.gather(
            *(self._copy(sync, donor.peer_id, j, at_once) for j in range(replica.num_shards))
        )
        donors = sync.donors()
        if min(copied) < 0 or not donors:
            await self.gossip.changed.wait(LOOK_AGAIN_S)
            return
        newest = max(d.round for d in donors)
        self._copies += 1
        if newest - min(copied) > self._slack(newest) and self._copies < MAX_COPIES:
            log.info("the copy is of round %d, the stage in %d: once more", min(copied), newest)
            return
        self._copies = 0
        await replica.transitions.open_round(newest, is_whole=True)
        self.averaging.states.restored(list(range(replica.num_shards)))
        await replica.measure_digests()

    async def _copy(
        self, sync: StateSync, donor_id: str, j: int, at_once: asyncio.Semaphore
    ) -> int:
        """Parameters and momentum of one shard; their round, or -1 where they are not to be had."""
        async with at_once:
            for _ in range(MAX_TRIES):
                donor = _record(sync, donor_id)
                if donor is None:
                    return -1
                try:
                    values = await common_of(sync, donor, j)
                    is_new = self.replica.plan.last_exchange(j, donor.round) < 0
                    momentum = None if is_new else await self._momentum(donor, j)
                    await self.replica.worker.run(
                        lambda v=values, m=momentum: self._put(j, v, m)  # type: ignore[misc]
                    )
                    return donor.round
                except SwarmnetError as e:
                    log.debug("shard %d from %s: %s", j, donor_id[-8:], e)
                    await self.gossip.changed.wait(LOOK_AGAIN_S)
            return -1

    async def _momentum(self, donor: Record, j: int) -> Offer:
        reply = await call(
            self.transport,
            donor.peer_id,
            FETCH_OPTIMIZER,
            Message(FetchRequest(max(donor.round - 1, 0), self.replica.index, j)),
            timeout_s=self.limits.fetch_timeout_s,
        )
        return reply.body.values, reply.arrays

    def _put(self, j: int, values: Array, momentum: Offer | None) -> None:
        """`momentum`: None before the first meeting."""
        self.replica.put_common(j, values)
        if momentum is None:
            self.replica.optimizer.create(j)
        else:
            self.replica.optimizer.load(j, *momentum)


def _record(sync: StateSync, peer_id: str) -> Record | None:
    return next((d for d in sync.donors() if d.peer_id == peer_id), None)
