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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import NotReady, Stale, SwarmnetError
from swarmnet.methods.state import FETCH_OPTIMIZER, FetchReply, FetchRequest
from swarmnet.methods.update import OFFER
from swarmnet.plurals import counted
from swarmnet.ports import LocalSteps
from swarmnet.protocol.membership.records import MAX_RATE, Record
from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.pairing import OfferWait, is_out_of_touch, newest_round, partner_of
from swarmnet.protocol.update.roster import SUSPECT, MemberStatus, pair
from swarmnet.protocol.update.shard_update import ShardUpdate
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES
from swarmnet.swarm.update.exchanges import Behind, Exchanges
from swarmnet.swarm.update.local_updates import Moments, common_of, own_step
from swarmnet.swarm.update.state_sync import StateSync
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.gossip_averaging")

Offer = tuple[dict[str, Any], tuple[Array, ...]]
Offers = dict[int, Offer]
"""By shard."""

MAX_COPIES = 3
"""Downloads of a newcomer before it begins with what has become old on the way."""


@dataclass
class GossipAveraging:
    """Implements `swarm.update.rounds.Updates`."""

    gossip: Gossip
    limits: WaitLimits
    replica: Replica
    exchanges: Exchanges

    def __post_init__(self) -> None:
        self._meeting: Meeting | None = None
        """The one that is going on."""
        self._changed = Condition()
        self._copies = 0
        """Of donors that had moved on when they were complete."""
        self._serving = asyncio.Semaphore(self.limits.max_serving)
        self.moments = Moments(self.gossip, self.limits, self.replica)
        serve(self.gossip.transport, OFFER, self._on_offer)

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
        await self.exchanges.work.until_exported()
        self._check_in_touch(round_index)
        await own_step(replica, self.gossip, num_tokens, round_index)
        if replica.plan.is_due(0, round_index):
            await self._meet(round_index)
            self._forget_steps()
        self.exchanges.states.skip(range(replica.num_shards))
        return True

    def _check_in_touch(self, r: int) -> None:
        """Raises `Behind` where the stage has gone on without this replica."""
        newest = newest_round(self._members(), r)
        if is_out_of_touch(self.replica.plan, r, newest):
            raise Behind(f"the stage is in round {newest}, this replica in {r}")

    def _members(self) -> Sequence[Record]:
        now = asyncio.get_running_loop().time()
        return self.gossip.view.members(self.replica.index, now)

    def finish_round(self, round_index: int) -> None:
        self.exchanges.finish_round(round_index)

    async def close(self) -> None:
        self._meeting = None
        self._forget_steps()

    def _forget_steps(self) -> None:
        self.local.exchanged(range(self.replica.num_shards))

    # ---- meeting ----------------------------------------------------------------------------

    async def _meet(self, r: int) -> None:
        """The outer step, with the partner of this round where there is one."""
        partner = partner_of(self.gossip.own.peer_id, self._members(), self.replica.index, r)
        meeting = Meeting(r, partner, self.exchanges, self.limits.max_fetching)
        self._meeting = meeting
        self._changed.notify_all()
        try:
            await meeting.run(max(self.local.tokens, default=0))
        finally:
            self._meeting = None

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

    async def follow(self, sync: StateSync) -> None:
        """Becomes a copy of one donor, in the newest round."""
        replica = self.replica
        donor = sync.rng.choice(sync.donors())
        log.info("stage %d: %s to fetch", replica.index, counted(replica.num_shards, "shard"))
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
        is_old = is_out_of_touch(replica.plan, min(copied), newest)
        if is_old and self._copies < MAX_COPIES:
            log.info("the copy is of round %d, the stage in %d: once more", min(copied), newest)
            return
        self._copies = 0
        await replica.transitions.open_round(newest, is_whole=True)
        self.exchanges.states.restored(list(range(replica.num_shards)))
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
            self.gossip.transport,
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


class Meeting:
    """Meets a partner once: the table of a shard's update with a pair as its roster
    (`protocol.update.roster.pair`), for all shards at once."""

    def __init__(
        self, round_index: int, partner: str | None, exchanges: Exchanges, max_fetching: int
    ) -> None:
        """`max_fetching`: shards that are asked for at a time."""
        self.round = round_index
        self._partner = partner
        self._exchanges = exchanges
        self._gossip = exchanges.gossip
        self._replica = exchanges.replica
        self._max_fetching = max_fetching
        self._wait = OfferWait(exchanges.pace.waits().call_s)
        own = self._gossip.own.peer_id
        self._machine = ShardUpdate(own, pair(own, partner))
        self._wanted = set(range(self._replica.num_shards))
        """Shards whose offer the partner has not asked for."""
        self._error: Exception | None = None
        self._over = Condition()
        self._tasks = Tasks("meeting")

    async def run(self, num_tokens: int) -> None:
        """Returns when the partner has what it needs or is gone, and the step is made: by it what
        is offered here changes."""
        try:
            self._refresh()
            self._feed(on.Begun(num_tokens, None))
            while not self._machine.is_over:
                if self._error is not None:
                    raise self._error
                await self._over.wait(LOOK_AGAIN_S)
                self._refresh()
        finally:
            await self._tasks.close()

    def asked(self, peer_id: str, shard: int) -> None:
        """A replica has been given the offer of a shard."""
        if peer_id == self._partner and shard in self._wanted:
            self._wanted.remove(shard)
            self._wait.asked(asyncio.get_running_loop().time())
            if not self._wanted:
                self._feed(on.Confirmed(peer_id, self._machine.shard.attempt))

    def _refresh(self) -> None:
        partner, liveness = self._partner, self._gossip.liveness
        members = {}
        if partner is not None and liveness.is_live(partner):
            members[partner] = MemberStatus()
        elif partner is not None and liveness.is_suspect(partner):
            members[partner] = MemberStatus(SUSPECT)
        self._feed(on.Seen(members))

    def _feed(self, event: on.Event) -> None:
        for command in self._machine.handle(event):
            match command:
                case do.Pull(target):
                    self._tasks.start(self._pull(target))
                case do.Sum(parts, _, _, attempt):
                    offers = parts[0][2] if parts else None
                    self._tasks.start(self._later(on.Summed(offers, attempt)))
                case do.Step(offers, _, attempt):
                    self._tasks.start(self._step(offers, attempt))
                case do.SetDeadline():
                    self._tasks.start(self._expire())
        self._over.notify_all()

    async def _later(self, event: on.Event) -> None:
        self._feed(event)

    async def _pull(self, target: str) -> None:
        offers = await self._offers_of(target)
        if offers:
            ballot = self._machine.shard.ballot
            self._feed(on.Pushed(None, target, ballot, 1, offers))
        else:
            self._feed(on.PushFailed(target))

    async def _step(self, offers: Offers | None, attempt: int) -> None:
        while self._machine.shard.awaited():
            await self._over.wait(LOOK_AGAIN_S)
        try:
            await self._make_step(offers or {})
        except Exception as e:  # of the device: it ends the round, as without a partner
            self._error = e
            self._over.notify_all()
            return
        self._feed(on.Stepped(True, attempt))

    async def _expire(self) -> None:
        loop, traffic = asyncio.get_running_loop(), self._gossip.transport.traffic
        self._wait.begin(loop.time())
        while not self._wait.is_over(loop.time()):
            await asyncio.sleep(LOOK_AGAIN_S)
            self._wait.look(loop.time(), is_sending=traffic.queued_bytes() > 0)
        self._feed(on.DeadlinePassed())

    # ---- offers and steps -------------------------------------------------------------------

    async def _offers_of(self, other: str) -> Offers:
        """What the partner offers of each shard, as far as it gives any."""
        offers: Offers = {}
        at_once = asyncio.Semaphore(self._max_fetching)
        shards = range(self._replica.num_shards)
        await asyncio.gather(*(self._ask(other, j, at_once, offers) for j in shards))
        return offers

    async def _ask(self, other: str, j: int, at_once: asyncio.Semaphore, offers: Offers) -> None:
        r = self.round
        async with at_once:
            try:
                message = Message(FetchRequest(r, self._replica.index, j))
                reply = await self._exchanges.calls.call(other, OFFER, message)
                offers[j] = (reply.body.values, reply.arrays)
            except SwarmnetError as e:
                log.debug("round %d shard %d: no offer of %s: %s", r, j, other[-8:], e)

    async def _make_step(self, offers: Offers) -> None:
        """The outer step."""
        replica, local = self._replica, self._replica.local
        assert local is not None
        if not offers and not any(local.tokens):
            return  # nothing new: momentum alone leads nowhere
        apart = total = 0.0
        for j in range(replica.num_shards):
            distance, norm = await replica.worker.run(
                lambda j=j: self._meet(local, j, offers.get(j))  # type: ignore[misc]
            )
            apart, total = apart + distance, total + norm
        if offers:
            self._gossip.add_total("late_shards", replica.num_shards - len(offers))
            spread = math.sqrt(apart / total) if total else 0.0
            self._gossip.update(spread=min(spread, MAX_RATE))  # an offer may be very far away

    def _meet(self, local: LocalSteps, j: int, offer: Offer | None) -> tuple[float, float]:
        """On the worker. An offer that does not fit is as none."""
        try:
            return local.meet(j, offer, self.round)
        except SwarmnetError as e:
            log.warning("shard %d: the partner's offer is refused: %s", j, e)
            return local.meet(j, None, self.round)


def _record(sync: StateSync, peer_id: str) -> Record | None:
    return next((d for d in sync.donors() if d.peer_id == peer_id), None)
