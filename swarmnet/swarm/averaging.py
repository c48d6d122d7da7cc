"""The update: every shard's gradient to its primary, one step there, new parameters to all.

A contributor's push of shard j is one call: the gradient goes, the new parameters come back. So
a push that fails is simply made again to the next owner, which finds the gradient still at
its contributors. The primary waits for every live contributor (with a deadline from what
earlier rounds took), sums in the order of peer ids, scales by tokens and the clip over all
stages, steps once, and before it answers has the backups make the same step (ZeRO, Rajbhandari
et al. 2020, with owners that may vanish).

Who is primary. Placement orders the replicas of a stage for each shard. The primary is the first
live one that *holds* the shard's optimizer state, as its record says since the beginning of the
round; where nobody holds it, the first live one, which then starts afresh. A replica that comes to
own a shard fetches its state during one round, follows it through that round's update as a backup,
and says that it holds it when the next round begins: the primary never changes in the middle of an
update, unless it dies. Where an owner is lost in the middle of a round, the next in order fetches
the state at once, and says so at once where that makes nobody else the primary: rounds may be long,
and a shard is in danger for seconds, not for the rest of one."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnet.errors import (
    NotReady,
    ProtocolViolation,
    Redirect,
    RemoteError,
    Stale,
    SwarmnetError,
    TransportError,
    UserError,
)
from swarmnet.protocol import progress
from swarmnet.protocol.pacing import BULK_SHARE, Pacer, share_beside
from swarmnet.protocol.placement import (
    Placement,
    comes_after_a_holder,
    placed,
    short_of_owners,
    weights_from,
)
from swarmnet.protocol.records import ACTIVE, JOINING, LEAVING, Record, bitmap
from swarmnet.protocol.robust import MEAN, MEDIAN_CLIP
from swarmnet.protocol.sync_modes import GOSSIP, SyncPlan
from swarmnet.swarm.aggregation import Aggregator, ContributionNorms, Part
from swarmnet.swarm.gossip import Gossip, Tasks
from swarmnet.swarm.live_calls import LiveCalls
from swarmnet.swarm.lost_samples import LostSamples, OnLoss
from swarmnet.swarm.messages import (
    FetchReply,
    FetchRequest,
    MirrorRequest,
    ReduceReply,
    ReduceRequest,
)
from swarmnet.swarm.news import News
from swarmnet.swarm.norms import Norms
from swarmnet.swarm.replica import Replica
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message, convert

log = logging.getLogger("swarmnet.averaging")

MAX_REDIRECTS = 64
RETRY_S = 0.05
LOOK_AGAIN_S = 0.5
LOOK_LESS, MAX_LOOK_S = 1.3, 5.0
"""Whether contributors are still live is looked at less often the longer it takes: by this factor,
up to so many seconds."""
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
PROBE_AFTER = 0.3
"""Part of the deadline after which those who have not contributed are probed."""
CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


BEHIND_ROUNDS = 2
"""A record that is older than so many rounds is not just late: its peer was cut off."""
RESTORE_WAIT_S = 10.0
"""How long an update waits for a replica that is about to become active with optimizer state that
nobody else has."""


SNAPSHOT_WAIT_S = 10.0
"""How long a step waits for the optimizer state before it to be copied for a checkpoint."""
REPAIR_EVERY_S = 5.0
"""Between two looks whether a shard has lost an owner in the middle of a round."""
DROP_WAIT_S = 5.0
"""How long owners of shards that this replica holds and does not own may take to say that they hold
them; else it is looked at again in the next round."""

T = TypeVar("T")
Pushed = tuple[int, Array | None]
"""A contribution to a shard: the tokens behind it, and their gradient (none for no tokens)."""


class Behind(SwarmnetError):
    """The stage has moved on by more than one round: fetch its parameters instead."""


class Diverged(SwarmnetError):
    """Others of the stage have another result of the same round, and theirs holds."""


@dataclass
class Contribution:
    """One replica's part of a shard's gradient."""

    num_tokens: int
    gradient: Array | None


@dataclass
class ShardUpdate:
    """A primary's work on one shard in one round."""

    round: int
    shard: int
    contributions: dict[str, Contribution] = field(default_factory=dict)
    closed: bool = False
    """The aggregate is being made; what comes now is too late."""
    parameters: Array | None = None
    """The result: the shard of round + 1."""
    awaited: int = 0
    """Contributions that there must be before it is worth looking whether all are there."""
    own: bool = False
    """The own replica has closed the round and contributed."""
    num_tokens: int = 0
    """Behind the aggregate."""
    news: News = field(default_factory=News)
    """Wakes the aggregation: another contribution."""
    done: News = field(default_factory=News)
    """Wakes the contributors that wait for the result: it is there, or there will be none."""


@dataclass
class Averaging:
    """The updates of one replica's stage."""

    transport: Transport
    gossip: Gossip
    settings: RunSettings
    limits: Limits
    replica: Replica
    on_loss: OnLoss = lambda loss: None

    def __post_init__(self) -> None:
        self.news = News()
        self.lost = LostSamples(self.gossip, self.replica, self.settings.global_batch, self.on_loss)
        self._tokens: dict[tuple[int, int], int] = {}
        """By exchange and shard, what is behind its result, as far as is known."""
        self._tasks = Tasks("averaging")
        self._updates: dict[tuple[int, int], ShardUpdate] = {}
        self._applied: dict[int, int] = {}
        self._mirrored: dict[tuple[int, int], Array] = {}
        self._mirroring: set[int] = set()
        self._failed: UserError | None = None
        """Why this machine cannot keep optimizer state; ends the peer."""
        self._primaries: dict[int, str] = {}
        """By shard that this replica follows as backup, who made its last step."""
        self._exchange_s = 0.0
        self._pacer = Pacer()
        self._calls = LiveCalls(self.transport, self.gossip, self._usual_s)
        self._following = asyncio.Lock()
        """State of shards is being fetched."""
        self._repair_at = -math.inf
        self._stage_bytes = 4 * sum(self.replica.stage.shard_sizes)
        self._serving = asyncio.Semaphore(self.limits.max_serving)
        self.last_exchange_s = 0.0
        self.flushed = False
        """The parameters of the round are those of its end already: the run's last exchange."""
        self.exporting = 0
        """Copies of optimizer state that are under way: no step meanwhile."""
        self.norms = Norms(
            self.transport,
            self.gossip,
            self.replica.index,
            self.settings.num_stages,
            self.replica.num_shards,
            self.roots,
            lambda: max(self.limits.norm_wait_s, self._beside_s()),
        )
        contributions = ContributionNorms(
            self.transport,
            self.gossip,
            self.replica.index,
            self.replica.num_shards,
            self.roots,
        )
        # Clipping by the median looks at a whole stage at a time: not where shards take turns.
        takes_turns = self.plan.is_local and self.plan.fragments > 1
        clips = self.settings.aggregation == MEDIAN_CLIP
        self.aggregator = Aggregator(
            MEAN if takes_turns and clips else self.settings.aggregation,
            self.replica.worker,
            self.replica.optimizer,
            self.gossip,
            contributions,
        )
        self.transport.handle("reduce", self._on_reduce)
        self.transport.handle("mirror", self._on_mirror)
        self.transport.handle("fetch_optimizer", self._on_fetch_optimizer)

    async def close(self) -> None:
        await self._tasks.close()
        await self.norms.close()
        await self.aggregator.norms.close()

    @property
    def plan(self) -> SyncPlan:
        """When the stage exchanges what."""
        return self.replica.plan

    @property
    def current(self) -> int:
        """The exchange whose input the present common parameters are."""
        r = self.replica.round
        return r if self.flushed else self.plan.version(r)

    # ---- who owns what ----------------------------------------------------------------------

    def candidates(self, stage_index: int, round_index: int) -> list[Record]:
        """Live replicas of a stage that count as possible owners in a round. One that was cut off
        and is rounds behind does not: it holds nothing of this round, and will fetch it again.
        Those that joined in this round count where all before them are gone."""
        now = asyncio.get_running_loop().time()
        there = [
            r
            for r in self.gossip.view.members(stage_index, now)
            if r.state == ACTIVE and self.plan.version(r.round) >= round_index - BEHIND_ROUNDS
        ]
        return [r for r in there if self.plan.version(r.active_from) <= round_index] or there

    def _remembered(self, name: object, round_index: int, ask: Callable[[], T]) -> T:
        """What `ask()` says of the stage's records and a round: asked again when one of them has
        changed. Several questions a shard are asked in every exchange."""
        now = asyncio.get_running_loop().time()
        view, plan = self.gossip.view, self.plan
        return view.remembered(self.replica.index, (name, round_index, plan), now, ask)

    def placement(self, round_index: int) -> Placement:
        """Owners of the shards of this stage, as far as is known now."""
        return self._remembered("placement", round_index, lambda: self._placement(round_index))

    def _placement(self, round_index: int) -> Placement:
        weights = weights_from(self.candidates(self.replica.index, round_index))
        return placed(
            self.replica.index,
            self.replica.num_shards,
            tuple(weights.items()),
            self.settings.replication,
        )

    def _order(self, round_index: int, shard_index: int) -> tuple[str, ...]:
        """Who may be a shard's primary, the first choice first; those about to leave come last."""
        leaving = self._remembered("leaving", round_index, self._leaving)
        return (*self.placement(round_index).order(shard_index), *leaving)

    def _leaving(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        members = self.gossip.view.members(self.replica.index, now)
        return sorted(m.peer_id for m in members if m.state == LEAVING)

    def roots(self, stage_index: int) -> list[str]:
        """Peers of a stage in the order in which they stand in for its root."""
        candidates = self.candidates(stage_index, self.current)
        weights = tuple(weights_from(candidates).items())
        return list(placed(stage_index, 1, weights, 1).order(0))

    def primary(self, round_index: int, shard_index: int) -> str | None:
        """The peer that aggregates a shard; None where no candidate is known."""
        follows = self._applied.get(shard_index, -2) >= round_index - 1
        name = ("primary", shard_index, follows, self.gossip.own.holds)
        return self._remembered(
            name, round_index, lambda: self._primary(round_index, shard_index, follows)
        )

    def _primary(self, round_index: int, shard_index: int, follows: bool) -> str | None:
        """`follows`: this replica has the state of the shard of the round's beginning, or a later
        one."""
        order = self._order(round_index, shard_index)
        view = self.gossip.view
        own = self.gossip.own.peer_id
        ahead = self._past(round_index)
        if ahead:  # the round is over there: its result exists, and no other must be made
            return ahead[sum(own.encode()) % len(ahead)]
        for peer_id in order:
            if peer_id == own:
                if follows and self.gossip.own.holds_shard(shard_index):
                    return own
                continue
            record = view.get(peer_id)
            behind = record is None or self.plan.version(record.round) < round_index - 1
            if record is not None and not behind and record.holds_shard(shard_index):
                return peer_id
        # Nobody says that it holds it: a backup that follows it already, else the first, afresh.
        if follows and own in order:
            return own
        return order[0] if order else None

    def _past(self, round_index: int) -> list[str]:
        """Live replicas of this stage that have finished a round, this one excepted."""
        now = asyncio.get_running_loop().time()
        return self._remembered(
            "past",
            round_index,
            lambda: [
                m.peer_id
                for m in self.gossip.view.members(self.replica.index, now)
                if self.plan.version(m.round) > round_index
                and m.state in (ACTIVE, LEAVING)
                and m.peer_id != self.gossip.own.peer_id
            ],
        )

    def start_fresh(self) -> None:
        """The first replica of a stage: it owns all, with empty state."""
        for j in range(self.replica.num_shards):
            self.replica.optimizer.create(j)
            self._applied[j] = self.current - 1

    def restored(self, shards: list[int]) -> None:
        """The replica went on from a checkpoint: it has the state of these shards only."""
        self._applied = dict.fromkeys(shards, self.current - 1)

    async def forget_state(self) -> None:
        """What this replica has of the optimizer belongs to parameters that do not hold: drops it,
        to fetch it from those whose parameters do."""
        optimizer = self.replica.optimizer

        def drop() -> None:
            for j in optimizer.owned():
                optimizer.drop(j)
            self._applied.clear()

        await self.replica.worker.run(drop)
        self._mirrored.clear()
        self._give_up(lambda key: True)
        self.news.tell()

    def follows(self, shard_index: int, round_index: int) -> bool:
        """The shard's state here is that of the beginning of the round. On the worker."""
        return self._applied.get(shard_index) == self.plan.version(round_index) - 1

    def holds(self) -> bytes:
        """For the own record: shards whose state is that of the beginning of this round."""
        held = [j for j, r in self._applied.items() if r >= self.current - 1]
        return bitmap(sorted(held), self.replica.num_shards)

    # ---- a replica's part -------------------------------------------------------------------

    async def update(
        self,
        part: Callable[[int], Awaitable[Pushed]],
        store: Callable[[int, Array], None] | None = None,
        due: Sequence[int] | None = None,
    ) -> None:
        """Averages the replica's gradient and puts the next round's parameters aside.

        `part`: the contribution to a shard; of no tokens for a joiner. `store`: where the results
        go, on the worker; the stage's coming parameters where it is left out. `due`: the shards
        that are exchanged; all of them where it is left out. Raises `Behind` where the stage has
        moved on by more than this round.
        """
        r = self.current
        put = store or self.replica.stage.stage_parameters
        loop = asyncio.get_running_loop()
        await self._until_restored(r)
        started = loop.time()
        self.news.tell()
        results: list[bool] = []

        async def one(j: int) -> None:
            num_tokens, gradient = await part(j)
            counted = await self._shard(r, j, num_tokens, gradient, put)
            results.append(counted or not num_tokens)

        # All at once: with clipping, no shard is done before every shard has been summed.
        shards = range(self.replica.num_shards) if due is None else due
        shards = _rotated(list(shards), self.gossip.own.peer_id)
        behind: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for j in shards:
                    group.create_task(one(j))
        except* (Behind, UserError) as several:  # what is raised in here would be a group again
            behind = several.exceptions[0]
        if behind is not None:
            raise behind
        if results and not all(results):
            self.gossip.add_total("late_shards", results.count(False))
        self._note_averaged(r, shards)
        took = self.last_exchange_s = loop.time() - started
        self.replica.exchanges.add(took)
        self._exchange_s += EXCHANGE_SMOOTHING * (took - self._exchange_s)

    def _note_averaged(self, r: int, shards: Sequence[int]) -> None:
        """For the books: what is behind every shard. Where shards take turns, the first one
        stands for all."""
        asked = [0] if self.plan.is_local else shards
        known = [self._tokens[(r, j)] for j in asked if (r, j) in self._tokens]
        if known and len(known) == len(asked):
            self.lost.averaged(r, min(known))

    async def _until_restored(self, r: int) -> None:
        """When a whole swarm goes on from checkpoints, its peers become active one after the other;
        the state that the last one brings is not to be taken for lost."""
        loop = asyncio.get_running_loop()
        end = loop.time() + RESTORE_WAIT_S
        while loop.time() < end and any(
            m.state == JOINING and m.restorable and m.round == r and m.digests
            for m in self.gossip.view.members(self.replica.index, loop.time())
        ):
            await self.gossip.news.wait(LOOK_AGAIN_S)

    async def _shard(
        self,
        r: int,
        j: int,
        num_tokens: int,
        gradient: Array | None,
        put: Callable[[int, Array], None],
    ) -> bool:
        """Gets the new parameters of one shard, wherever its primary is; True where counted."""
        redirected: str | None = None
        for attempt in range(MAX_REDIRECTS):
            if self._failed is not None:
                raise self._failed
            peer_id = redirected or self.primary(r, j)
            redirected = None
            try:
                if peer_id is None:
                    raise NotReady("no owner is known")
                if peer_id == self.gossip.own.peer_id:
                    parameters, counted = await self._own_shard(r, j, num_tokens, gradient)
                else:
                    if attempt == 0:
                        await self._turn(gradient, BULK_SHARE)
                    parameters, counted = await self._push(peer_id, r, j, num_tokens, gradient)
                await self.replica.worker.run(lambda p=parameters: put(j, p))  # type: ignore[misc]
                return counted
            except Redirect as e:
                target = e.details.get("peer_id")
                redirected = target if isinstance(target, str) and target != peer_id else None
            except Stale as e:
                theirs = e.details.get("round")
                if isinstance(theirs, int) and theirs > r + 1:
                    raise Behind(f"the stage is in round {theirs}, this replica in {r}") from None
            except (TransportError, ProtocolViolation, RemoteError) as e:
                log.debug("round %d shard %d at %s: %s", r, j, (peer_id or "?")[-8:], e)
                if peer_id is not None and isinstance(e, TransportError):
                    self.gossip.probe(peer_id)
            await self.gossip.news.wait(RETRY_S)
        raise Behind(f"shard {j} of round {r} was given by no owner")

    async def _push(
        self, peer_id: str, r: int, j: int, num_tokens: int, gradient: Array | None
    ) -> tuple[Array, bool]:
        request = ReduceRequest(r, self.replica.index, j, num_tokens)
        message = Message(request, () if gradient is None else (gradient,))
        reply = await self.call_while_live(peer_id, "reduce", message)
        body = convert(reply.body, ReduceReply)
        if len(reply.arrays) != 1:
            raise ProtocolViolation("a reply to reduce without parameters")
        if body.num_tokens >= 0:
            self._tokens[(r, j)] = body.num_tokens
        return reply.arrays[0], body.counted

    async def _turn(self, array: Array | None, share: float) -> None:
        """Beside a round, waits until the uplink has room beside the microbatches. Gradients go at
        the share that such exchanges have at most: all wait for the slowest, and what a machine has
        not sent is lost with it. One that has to be sent again, for its primary has died, goes at
        once: behind all others it would come too late."""
        if array is None or not self.plan.is_delayed(self.current):
            return
        now = asyncio.get_running_loop().time()
        rate = self.gossip.own.upload_bytes_per_s
        wait_s = self._pacer.wait_s(array.num_bytes, rate, now, share)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def _result_share(self) -> float:
        """Of the uplink, for results and the samples of backups, about as long as a gradient: they
        have more time, for nothing of them is lost with a machine."""
        rate = self.gossip.own.upload_bytes_per_s
        return share_beside(self._stage_bytes, rate, self.replica.open_s)

    async def call_while_live(self, peer_id: str, method: str, message: Message) -> Message:
        """A long call that is given up as soon as the callee is not taken for live any more.
        Raises as `Transport.call`."""
        timeout_s = 2 * self._longest_wait_s()
        return await self._calls.call(peer_id, method, message, timeout_s=timeout_s)

    def _usual_s(self) -> float:
        """Seconds that an exchange takes, by those before or by the slowest uplink."""
        return self._exchange_s or self._upload_s() / UPLOAD_SLACK

    async def _own_shard(
        self, r: int, j: int, num_tokens: int, gradient: Array | None
    ) -> tuple[Array, bool]:
        done = self._mirrored.get((r, j))
        if done is not None:  # as backup of a primary that died after its step
            return done, True
        update = self._update(r, j)
        update.own = True
        if gradient is not None and not update.closed:
            update.contributions[self.gossip.own.peer_id] = Contribution(num_tokens, gradient)
        update.news.tell()
        return await self._result(update), True

    # ---- a primary's part -------------------------------------------------------------------

    async def _on_reduce(self, request: Request) -> Message:
        self.gossip.check_run(request)
        push = convert(request.message.body, ReduceRequest)
        self._check_shard(push.stage, push.shard)
        self._check_member(request.remote)
        gradient = self._gradient_of(push, request.message.arrays)
        r = self.current
        closed_there = push.round == r == self.replica.round and not self.plan.is_delayed(r)
        if closed_there and self.replica.heard_over(r):
            self.gossip.news.tell()
        if push.round < r and push.round == self.plan.last_exchange(push.shard, r):
            # a straggler: the parameters of this round are what it lacks
            return self._answer(push, r, await self._copy(push.shard))
        if push.round != r:
            if push.round < r:
                raise Stale(f"round {push.round} is over here", round=r)
            if not await self.replica.news.until(
                lambda: self.current >= push.round, self.limits.enter_wait_s
            ):
                raise NotReady(f"round {push.round} has not begun here", round=self.current)
        key = (push.round, push.shard)
        if key in self._mirrored:
            return self._answer(push, push.round + 1, self._mirrored[key])
        update = self._update(*key)
        self._redirect_unless_mine(update)
        counted = not update.closed
        if counted and push.num_tokens:
            update.contributions[request.remote] = Contribution(push.num_tokens, gradient)
        elif counted:
            update.contributions.setdefault(request.remote, Contribution(0, None))
        if len(update.contributions) >= update.awaited:
            update.news.tell()
        parameters = await self._result(update)
        counted = counted or not push.num_tokens
        await self._turn(parameters, self._result_share())
        reply = ReduceReply(push.round + 1, counted, update.num_tokens)
        return Message(reply, (parameters,))

    def _answer(self, push: ReduceRequest, round_index: int, parameters: Array) -> Message:
        num_tokens = self._tokens.get((push.round, push.shard), -1)
        reply = ReduceReply(round_index, counted=False, num_tokens=num_tokens)
        return Message(reply, (parameters,))

    async def _copy(self, j: int) -> Array:
        """A shard of the present parameters that stays as it is while it is being sent."""
        shard = self.replica.common_shard(j)
        copied = await self.replica.worker.run(lambda: bytes(shard.data))
        return Array(shard.dtype, shard.shape, copied)

    def _check_shard(self, stage_index: int, shard_index: int) -> None:
        if stage_index != self.replica.index or shard_index >= self.replica.num_shards:
            raise NotReady(f"stage {stage_index} is not served here")
        if not self.replica.synced:
            raise NotReady("still joining")

    def _check_member(self, peer_id: str) -> None:
        """Only replicas of the stage, by their signed records, take part in its update."""
        record = self.gossip.view.get(peer_id)
        if record is None or record.stage != self.replica.index:
            raise NotReady(f"{peer_id[-8:]} is not known here as a replica of this stage")

    def _gradient_of(self, push: ReduceRequest, arrays: tuple[Array, ...]) -> Array | None:
        if push.num_tokens == 0:
            return None
        size = self.replica.stage.shard_sizes[push.shard]
        if len(arrays) != 1 or arrays[0].dtype != "float32" or arrays[0].shape != (size,):
            raise ProtocolViolation(f"a gradient of shard {push.shard} is {size} fp32 numbers")
        return arrays[0]

    def _update(self, r: int, j: int) -> ShardUpdate:
        """The update of a shard, begun by whoever comes first."""
        if (r, j) not in self._updates:
            update = self._updates[(r, j)] = ShardUpdate(r, j)
            self._tasks.start(self._aggregate(update))
        return self._updates[(r, j)]

    def _give_up(self, which: Callable[[tuple[int, int]], bool]) -> None:
        """Forgets updates, by round and shard; who waits for a result here asks elsewhere."""
        for key in [k for k in self._updates if which(k)]:
            self._updates.pop(key).done.tell()

    async def _result(self, update: ShardUpdate) -> Array:
        """The new parameters; raises `Redirect` when another peer turns out to be the primary."""
        while update.parameters is None:
            self._redirect_unless_mine(update)
            if self._updates.get((update.round, update.shard)) is not update:
                raise NotReady("the update was given up here")
            await update.done.wait()
        return update.parameters

    def _redirect_unless_mine(self, update: ShardUpdate) -> None:
        if update.closed:
            return
        primary = self.primary(update.round, update.shard)
        if primary is not None and primary != self.gossip.own.peer_id:
            raise Redirect("another peer is primary", peer_id=primary)

    async def _aggregate(self, update: ShardUpdate) -> None:
        """Waits for the contributions, then aggregates, steps and mirrors."""
        r, j = update.round, update.shard
        try:
            await self._gather(update)
            await self.news.until(lambda: j not in self._mirroring, self.limits.reduce_wait_s)
            if (r, j) in self._mirrored:  # the primary died after its step: this is its result
                update.parameters = self._mirrored[(r, j)]
                update.num_tokens = self._tokens[(r, j)]
                return
            if self.primary(r, j) != self.gossip.own.peer_id:
                return
            update.closed = True
            total, squares, num_tokens = await self._sum(update)
            update.num_tokens = num_tokens
            update.contributions.clear()
            if total is None:
                # Even an empty stage takes part in the norm, so that the others need not wait.
                await self._clip(r, j, 0.0)
                self._applied[j] = r
                update.parameters = await self._copy(j)
                self._tokens[(r, j)] = 0
                return
            clip = await self._clip(r, j, squares / num_tokens**2)
            if self._past(r):
                raise NotReady("the round was finished without this replica", round=r)
            await self._step_everywhere(update, total, clip / num_tokens)
        except Exception as e:
            update.parameters = None
            self._failed = e if isinstance(e, UserError) else self._failed
            raise
        finally:
            if update.parameters is None:
                self._updates.pop((r, j), None)
            update.done.tell()
            self.news.tell()

    async def _sum(self, update: ShardUpdate) -> tuple[Array | None, float, int]:
        """The aggregate of the contributions, its sum of squares, and the tokens behind it; None
        where there is nothing to sum."""
        parts = [
            Part(p, c.num_tokens, c.gradient)
            for p, c in sorted(update.contributions.items())
            if c.gradient is not None and c.num_tokens
        ]
        result = await self.aggregator(
            update.round, update.shard, parts, self._counted_tokens(update.round)
        )
        return result.total, result.squares, result.num_tokens

    def _counted_tokens(self, r: int) -> int:
        """Of the round, by the word of the feeders; 0 where contributions are of several rounds."""
        if self.plan.is_local:
            return 0
        now = asyncio.get_running_loop().time()
        return progress.round_progress(self.gossip.view, r, now, self.settings.global_batch).tokens

    async def _gather(self, update: ShardUpdate) -> None:
        """Waits until every live contributor has pushed, the deadline passed, or the shard is
        another's."""
        loop = asyncio.get_running_loop()
        limits = self.limits
        measured_s = max(WAIT_FACTOR * self._exchange_s, self._upload_s())
        longest_s = self._longest_wait_s()
        usual_s = min(measured_s + limits.reduce_wait_min_s + self._closing_s(), longest_s)
        # Where nothing is known yet, who is slow is not to be taken for stuck.
        wait_s = usual_s if measured_s else longest_s
        end: float | None = None
        probe_at: float | None = None
        look_s = LOOK_AGAIN_S
        while True:
            if self.primary(update.round, update.shard) != self.gossip.own.peer_id:
                return
            if update.own and end is None:
                end, look_s = loop.time() + wait_s, LOOK_AGAIN_S
                probe_at = loop.time() + PROBE_AFTER * usual_s
            missing = self._missing(update)
            if update.own and not missing:
                return
            update.awaited = len(update.contributions) + len(missing)
            if end is not None and loop.time() >= end:
                log.info(
                    "round %d shard %d: went on without %s",
                    update.round,
                    update.shard,
                    ", ".join(p[-8:] for p in missing),
                )
                return
            if probe_at is not None and loop.time() >= probe_at:
                probe_at = None
                for peer_id in missing:
                    self.gossip.probe(peer_id)
            left = look_s if end is None else min(look_s, end - loop.time())
            if not await update.news.wait(max(0.001, left)):
                look_s = min(LOOK_LESS * look_s, MAX_LOOK_S)

    def _upload_s(self) -> float:
        """What sending a gradient may take the slowest replica whose bandwidth is known, as it
        sends results too: some slack on twice the stage's bytes."""
        now = asyncio.get_running_loop().time()
        members = self.gossip.view.members(self.replica.index, now)
        rates = [r.upload_bytes_per_s for r in members if r.upload_bytes_per_s > 0]
        return UPLOAD_SLACK * self._stage_bytes / min(rates) if rates else 0.0

    def _closing_s(self) -> float:
        """Until the last replica has heard that a round is over, and its device has ended the work
        that was under way when it closed the round, settled it and opened the next one."""
        now = asyncio.get_running_loop().time()
        members = self.gossip.view.members(self.replica.index, now)
        slowest = min((r.samples_per_s for r in members if r.samples_per_s > 0), default=math.inf)
        work_s = self.settings.samples_per_microbatch / slowest
        return self.gossip.spread_s + CLOSING_MICROBATCHES * work_s

    def _longest_wait_s(self) -> float:
        return max(self.limits.reduce_wait_s, self._beside_s(), self._behind_s())

    def _behind_s(self) -> float:
        """The more rounds of own steps are behind an exchange, the more is lost with a slow one."""
        plan = self.plan
        steps = plan.steps_until_due(self.current)
        return BEHIND_PART * steps * self.replica.open_s if plan.is_local else 0.0

    def _beside_s(self) -> float:
        """An exchange that runs beside a round holds nobody up as long as it ends with it."""
        return BESIDE_PART * self.replica.open_s if self.plan.is_delayed(self.current) else 0.0

    def _missing(self, update: ShardUpdate) -> list[str]:
        """Live replicas that may have a gradient of this round and have not pushed it yet."""
        return [
            r.peer_id
            for r in self.candidates_any(update.round)
            if r.peer_id not in update.contributions and r.peer_id != self.gossip.own.peer_id
        ]

    def candidates_any(self, round_index: int) -> list[Record]:
        """Live replicas of this stage that are not past the round, nor so far behind (after a
        partition, say) that they cannot have a gradient of it."""
        now = asyncio.get_running_loop().time()
        return self._remembered(
            "any",
            round_index,
            lambda: [
                r
                for r in self.gossip.view.members(self.replica.index, now)
                if r.state in (ACTIVE, LEAVING)
                and -BEHIND_ROUNDS <= self.plan.version(r.round) - round_index <= 0
            ],
        )

    async def _clip(self, r: int, j: int, squares: float) -> float:
        """The factor by which the mean gradient is to be scaled. Raises `NotReady` as soon as the
        round turns out to be over elsewhere: its norm may never come."""
        limit = self.settings.grad_clip_norm
        if limit <= 0 or self.plan.is_local:  # replicas clip their own steps
            return 1.0
        adding = asyncio.ensure_future(self.norms.add(r, j, squares))
        try:
            while not adding.done():
                if self._past(r):
                    raise NotReady("the round was finished without this replica", round=r)
                await asyncio.wait((adding,), timeout=LOOK_AGAIN_S)
        finally:
            adding.cancel()
        norm = math.sqrt(adding.result())
        return min(1.0, limit / (norm + CLIP_EPSILON))

    async def _step_everywhere(self, update: ShardUpdate, total: Array, scale: float) -> None:
        """The step here and at the backups; the result is given out when all of them have it."""
        r, j = update.round, update.shard
        optimizer = self.replica.optimizer
        if optimizer.steps(j) < 0:
            await self.replica.worker.run(lambda: optimizer.create(j))
            if r > 0:
                self.gossip.add_total("shard_reset")
                log.warning("shard %d: every owner of its optimizer state was lost", j)
        before = self._primaries.pop(j, None)
        if before is not None and not self.gossip.view.is_live(
            before, asyncio.get_running_loop().time()
        ):
            self.gossip.add_total("shard_promoted")
        steps = optimizer.steps(j)
        request = MirrorRequest(r, self.replica.index, j, scale, steps, update.num_tokens)
        mirrors = [
            self._tasks.start(self._mirror(peer_id, request, total))
            for peer_id in self.placement(r).owners(j)
            if peer_id != self.gossip.own.peer_id
        ]
        parameters = await self._step(r, j, total, scale)
        await asyncio.gather(*mirrors)
        self._tokens[(r, j)] = update.num_tokens
        update.parameters = parameters

    async def _step(self, r: int, j: int, total: Array, scale: float) -> Array:
        replica = self.replica
        await self.until_exported()

        def work() -> Array:
            before = replica.common_shard(j)
            is_delayed = self.plan.is_delayed(r)
            after = replica.optimizer.step(j, before, total, scale, r, is_delayed)
            self._applied[j] = r
            return after

        return await replica.worker.run(work)

    async def until_exported(self) -> None:
        """Before a step, so that a copy of the state that is under way is of one round."""
        await self.news.until(lambda: not self.exporting, SNAPSHOT_WAIT_S)

    async def _mirror(self, peer_id: str, request: MirrorRequest, total: Array) -> None:
        try:
            await self._turn(total, self._result_share())
            await self.call_while_live(peer_id, "mirror", Message(request, (total,)))
        except SwarmnetError as e:  # it fetches the state later
            log.debug("shard %d was not mirrored at %s: %s", request.shard, peer_id[-8:], e)

    async def _on_mirror(self, request: Request) -> Message:
        """As backup: the same step as the primary's, bit for bit."""
        self.gossip.check_run(request)
        mirror = convert(request.message.body, MirrorRequest)
        replica = self.replica
        r, j = mirror.round, mirror.shard
        if not await replica.news.until(lambda: self.current >= r, self.limits.enter_wait_s):
            raise NotReady("the round has not begun here")
        self._check_shard(mirror.stage, j)
        self._check_member(request.remote)
        if self.current != r:
            raise Stale(f"round {r} is over here", round=self.current)
        total = self._gradient_of(
            ReduceRequest(r, mirror.stage, j, num_tokens=1), request.message.arrays
        )
        assert total is not None
        update = self._updates.get((r, j))
        if (r, j) in self._mirrored or j in self._mirroring or (update and update.closed):
            raise NotReady("this step was made here already")
        if replica.optimizer.steps(j) != mirror.steps or self._applied.get(j) != r - 1:
            raise NotReady("the state is not followed here")
        self._mirroring.add(j)
        try:
            parameters = await self._step(r, j, total, mirror.scale)
            self._tokens[(r, j)] = mirror.num_tokens
            self._mirrored[(r, j)] = parameters
            self._primaries[j] = request.remote
        finally:
            self._mirroring.discard(j)
            self.news.tell()
        return Message()

    # ---- owners come and go -----------------------------------------------------------------

    def skip(self, shards: Sequence[int]) -> None:
        """These are not exchanged in this round: their state is that of the next one too."""
        r = self.current
        for j in shards:
            if self._applied.get(j) == r - 1:
                self._applied[j] = r

    def finish_round(self, r: int) -> None:
        """Round `r` is over here: forgets its exchange."""
        self._give_up(lambda key: key[0] <= r)
        for key in [k for k in self._mirrored if k[0] <= r]:
            del self._mirrored[key]
        for key in [k for k in self._tokens if k[0] < r - BEHIND_ROUNDS]:
            del self._tokens[key]
        self.norms.finish_round(r)
        self.aggregator.norms.finish_round(r)
        self.news.tell()

    async def follow_owners(self, exchange: int | None = None) -> None:
        """Fetches the state of shards that this replica has come to own, drops that of shards which
        others own now. Early in a round, for its exchange; or for the `exchange` to come."""
        if self.plan.mode == GOSSIP:  # nothing is shared out: each replica has its own state
            return
        r = self.current if exchange is None else exchange
        placement = self.placement(r)
        own = self.gossip.own.peer_id
        mine = placement.owned_by(own)
        await self._fetch_all(r, mine)
        kept = set(mine)
        spare = {j: placement.owners(j) for j in sorted(self._applied) if j not in kept}
        if not spare:
            return
        others = {p: None for owners in spare.values() for p in owners}
        await self.gossip.news.until(lambda: self._have_begun(others), DROP_WAIT_S)
        dropped = [j for j, owners in spare.items() if self._is_spare(j, owners)]
        for j in dropped:
            self._applied.pop(j, None)
        if dropped:  # said at once: who would be pushed to because of it could only send them away
            left = [j for j in range(self.replica.num_shards) if self.gossip.own.holds_shard(j)]
            left = [j for j in left if j not in dropped]
            self.gossip.update(holds=bitmap(left, self.replica.num_shards))
        for j in dropped:
            await self.replica.worker.run(lambda j=j: self.replica.optimizer.drop(j))  # type: ignore[misc]

    async def _fetch_all(self, r: int, shards: Sequence[int]) -> None:
        """The state of those that this replica does not follow."""
        async with self._following:
            wanted = [j for j in shards if self._applied.get(j, -2) < r - 1]
            at_once = asyncio.Semaphore(self.limits.max_fetching)
            await asyncio.gather(*(self._fetch(r, j, at_once) for j in wanted))

    def repair(self, exchange: int) -> None:
        """While a round is open, called often: where a shard has lost an owner, the one that comes
        after it takes its place. `exchange`: the one to come; none may be under way."""
        now = asyncio.get_running_loop().time()
        if now < self._repair_at or self._following.locked() or self.plan.mode == GOSSIP:
            return
        self._repair_at = now + REPAIR_EVERY_S
        short = self._remembered("short", exchange, lambda: self._short(exchange))
        if short:
            self._tasks.start(self._take_over(exchange, short))

    def _short(self, r: int) -> list[int]:
        candidates = self.candidates(self.replica.index, r)
        return short_of_owners(self.placement(r), candidates, self.gossip.own.peer_id)

    async def _take_over(self, r: int, shards: Sequence[int]) -> None:
        """Fetches, and says what is held now where that does not change who is primary."""
        await self._fetch_all(r, shards)
        own = self.gossip.own
        if self.replica.round != own.round or own.state != ACTIVE:
            return
        placement, candidates = self.placement(r), self.candidates(self.replica.index, r)
        told = [
            j
            for j in shards
            if self._applied.get(j, -2) >= r - 1
            and comes_after_a_holder(placement, candidates, own.peer_id, j)
        ]
        held = [j for j in range(self.replica.num_shards) if own.holds_shard(j)]
        if set(told) - set(held):
            log.info("%d shards that had lost an owner were taken over", len(told))
            self.gossip.update(holds=bitmap(sorted({*told, *held}), self.replica.num_shards))

    def _is_spare(self, j: int, owners: Sequence[str]) -> bool:
        """The shard's owners all have what this replica has of it, and no step is made here."""
        r = self.current
        holding = [self.gossip.view.get(p) for p in owners]
        return (
            bool(owners)
            and self._have_begun(owners)
            and all(o is not None and o.holds_shard(j) for o in holding)
            and (r, j) not in self._updates
            and j not in self._mirroring
            and self.primary(r, j) != self.gossip.own.peer_id
        )

    def _have_begun(self, peer_ids: Iterable[str]) -> bool:
        """What these hold is known of the present exchange's beginning, and not of the one before:
        who held a shard then need not have made the step since."""
        records = [self.gossip.view.get(p) for p in peer_ids]
        now = self.current
        return all(o is not None and self.plan.version(o.round) >= now for o in records)

    async def _fetch(self, r: int, j: int, at_once: asyncio.Semaphore) -> None:
        """The optimizer state of one shard from a peer that holds it; tried again next round."""
        async with at_once:
            if self._is_first(r):
                await self._create(j)
                return
            for holder in self._holders(r, j):
                if self.plan.last_exchange(j, self.current) > self.plan.last_exchange(j, r):
                    return
                try:
                    reply = await self.transport.call(
                        holder,
                        "fetch_optimizer",
                        Message(FetchRequest(r, self.replica.index, j)),
                        timeout_s=self.limits.fetch_timeout_s,
                    )
                    body = convert(reply.body, FetchReply)
                    await self._load(j, body, reply.arrays)
                    return
                except UserError as e:
                    self._failed = e
                    return
                except SwarmnetError as e:
                    log.debug("optimizer shard %d from %s: %s", j, holder[-8:], e)

    def _is_first(self, r: int) -> bool:
        """No step of the run has been made yet, and none is about to be: the optimizer state of
        every shard is the initial one, so that nobody needs to fetch it."""
        if r or self.replica.round:
            return False
        now = asyncio.get_running_loop().time()
        return not progress.is_launched(self.gossip.view, 0, now, self.settings.global_batch)

    async def _create(self, j: int) -> None:
        def work() -> None:
            if j not in self._applied and self._is_first(self.current):
                self.replica.optimizer.create(j)
                self._applied[j] = self.current - 1

        await self.replica.worker.run(work)

    @property
    def owns_from_now(self) -> bool:
        """A replica that becomes active now counts as a possible owner in this very round: in the
        first one, otherwise whoever began a stage would have to update it alone."""
        return self._is_first(self.current)

    async def _load(self, j: int, body: FetchReply, arrays: tuple[Array, ...]) -> None:
        optimizer = self.replica.optimizer

        def work() -> None:
            if self._applied.get(j, -2) < body.round - 1:
                optimizer.load(j, body.values, arrays)
                last = self.plan.last_exchange(j, self.current)
                same = self.plan.last_exchange(j, body.round) == last
                self._applied[j] = max(body.round, self.current if same else 0) - 1

        await self.replica.worker.run(work)

    def _holders(self, r: int, j: int) -> list[str]:
        view = self.gossip.view
        order = self._order(r, j)
        records = [(p, view.get(p)) for p in order if p != self.gossip.own.peer_id]
        return [p for p, record in records if record is not None and record.holds_shard(j)]

    async def _on_fetch_optimizer(self, request: Request) -> Message:
        self.gossip.check_run(request)
        fetch = convert(request.message.body, FetchRequest)
        self._check_shard(fetch.stage, fetch.shard)
        j = fetch.shard
        optimizer = self.replica.optimizer
        async with self._serving:
            if self._applied.get(j, -2) < fetch.round - 1 or optimizer.steps(j) < 0:
                raise NotReady("the state of that shard is not held here")
            (values, arrays), applied = await self.replica.worker.run(
                lambda: (optimizer.export(j), self._applied[j])
            )
            return Message(FetchReply(applied + 1, values), arrays)


def _rotated(items: list[int], name: str) -> list[int]:
    """Each replica begins elsewhere, so that they do not all push to one primary first."""
    if not items:
        return items
    start = sum(name.encode()) % len(items)
    return items[start:] + items[:start]
