"""The update: every shard's gradient goes to its primary, one step is made there, all get the
result.

A contributor's push of shard j is one call: the gradient goes, the new parameters come back. A push
that fails is made again to the next owner, for the gradient is still at its contributor. Small
shards of one primary share a call, since a call costs the same whatever it carries; where that
fails each is pushed again alone. The primary waits for every live contributor (with a deadline from
the duration of earlier rounds), sums in the order of peer ids, scales by tokens and the clip over
all stages, steps once, and before it answers has the backups make the same step (ZeRO, Rajbhandari
et al. 2020, with owners that may vanish). `ownership` decides which replica owns what, and which
one is primary.

There is one result a shard. A primary may die when some have its result and others, even its
backups, have not. A replica that has a result gives it to those that ask, as primary or not, and
takes no further part in making another. A replica that becomes primary after such a death first
asks those that do not contribute whether they have it."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from swarmnet.protocol.membership.records import JOINING, LEAVING
from swarmnet.protocol.membership.seats import machine_of
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.update.robust import MEAN, MEDIAN_CLIP
from swarmnet.protocol.update.sync_modes import SyncPlan
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.failure_detection import STALL_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import (
    MirrorRequest,
    ReduceProgress,
    ReduceReply,
    ReduceRequest,
    ShardReply,
)
from swarmnet.swarm.recovery.lost_samples import LostSamples, OnLoss
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.aggregation import Aggregator, ContributionNorms, Part
from swarmnet.swarm.update.exchange_pace import ExchangePace
from swarmnet.swarm.update.live_calls import LiveCalls
from swarmnet.swarm.update.norms import Norms
from swarmnet.swarm.update.ownership import BEHIND_ROUNDS, Ownership, descended
from swarmnet.swarm.update.replica import Replica
from swarmnet.swarm.update.tied_shards import METHOD as TIED_METHOD
from swarmnet.swarm.update.tied_shards import OtherSum, TiedShards
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import MAX_ARRAYS, Array, Message, convert

log = logging.getLogger("swarmnet.averaging")

RETRY_S, MAX_RETRY_S = 0.05, 1.0
"""Before a shard's primary is looked for again: at first, and later on."""
RETRY_GROWTH = 1.5
LOOK_AGAIN_S = 0.5
LOOK_LESS, MAX_LOOK_S = 1.3, 5.0
"""Whether contributors are still live is looked at less often the longer it takes: by this factor,
up to so many seconds."""
PROBE_AFTER, PROBE_AFTER_S = 0.3, 1.0
"""Who has not contributed is probed after this part of what usual exchanges allow for, and not
sooner than after so many seconds."""
MAX_ASKED = 16
"""So many feeders are asked whether they live before an update goes on without a contribution."""
ANSWERED_S = 1.0
"""Who answers then, having been late for a contribution, gets so much more time."""
CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""
RESTORE_WAIT_S = 10.0
"""How long an update waits for a replica that is about to become active with optimizer state that
nobody else has."""
SNAPSHOT_WAIT_S = 10.0
"""How long a step waits for the optimizer state before it to be copied for a checkpoint."""
SHARED_CALL_S, MAX_SHARED_CALL_BYTES = 1.0, 16 << 20
"""Shards share a call as long as they go up this replica's link in such a time, and are not more
bytes: of too many, a primary that could step some would hear late."""
USUAL_SHARED_CALL_BYTES = 4 << 20
"""The same while the link has not been measured."""
Pushed = tuple[int, Array | None]
"""A contribution to a shard: the tokens behind it, and their gradient (none for no tokens)."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A shard was pushed before, with others, in vain."""

    began: float
    elsewhere: str | None = None
    """Who is its primary, by the word of who is not."""


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
    asked: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Those that are asked for the result that a dead primary may have given them."""
    num_tokens: int = 0
    """Behind the aggregate; -1 where another peer made it and did not say."""
    changed: Condition = field(default_factory=Condition)
    """Wakes the aggregation: another contribution."""
    other_sum: OtherSum | None = None
    """Of a tied shard, where this stage decides: what the other stage gives."""
    done: Condition = field(default_factory=Condition)
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
        self.changed = Condition()
        self.lost = LostSamples(self.gossip, self.replica, self.settings, self.on_loss)
        self._tokens: dict[tuple[int, int], int] = {}
        """By exchange and shard, what is behind its result, as far as is known."""
        self._counted: dict[int, int] = {}
        """In mode `local`, tokens that rounds counted, by the word of the feeders."""
        self._summed: dict[tuple[int, int], frozenset[str]] = {}
        """By exchange and shard, whose contributions are in a sum that was made here."""
        self._tasks = Tasks("averaging")
        self.ownership = Ownership(
            self.transport,
            self.gossip,
            self.settings,
            self.limits,
            self.replica,
            self._tasks,
            self._is_stepping,
        )
        self.pace = ExchangePace(
            self.gossip, self.settings, self.limits, self.replica, self.ownership
        )
        self._calls = LiveCalls(self.transport, self.gossip, self.pace.usual_s)
        self.tied = TiedShards(
            self.replica,
            self.gossip,
            self.settings.num_stages,
            self.ownership.roots,
            self.call_while_live,
        )
        self._updates: dict[tuple[int, int], ShardUpdate] = {}
        self._results: set[tuple[int, int]] = set()
        """By exchange and shard, which results are here: put aside, or in a round open ahead."""
        self._taken: set[tuple[int, int]] = set()
        """By exchange and shard, where the owners have made the step, as this replica was told when
        it was about to leave."""
        self._mirrored: dict[tuple[int, int], Array] = {}
        self._mirroring: set[int] = set()
        self._primaries: dict[int, str] = {}
        """By shard that this replica follows as backup, who made its last step."""
        self._in_vain: set[str] = set()
        """Who fell silent, and did not come back in the time that it was waited for: it is not
        waited for again before it has contributed."""
        self._is_usual = True
        """Nobody had to be waited for in the present exchange."""
        self.exporting = 0
        """Copies of optimizer state that are under way: no step meanwhile."""
        self.norms = Norms(
            self.transport,
            self.gossip,
            self.replica.index,
            self.settings.num_stages,
            self.replica.num_shards,
            self.ownership.roots,
            self.pace.norm_s,
            lambda: self.current,
        )
        contributions = ContributionNorms(
            self.transport,
            self.gossip,
            self.replica.index,
            self.replica.num_shards,
            self.ownership.roots,
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
        self.transport.handle("reduced", self._on_reduced)
        self.transport.handle(TIED_METHOD, self._on_reduce_tied)
        self.transport.handle("mirror", self._on_mirror)

    async def close(self) -> None:
        await self._tasks.close()
        self.pace.close()
        await self.norms.close()
        await self.aggregator.norms.close()

    @property
    def plan(self) -> SyncPlan:
        """When the stage exchanges what."""
        return self.replica.plan

    @property
    def current(self) -> int:
        """The exchange whose input the present common parameters are."""
        return self.replica.current_exchange

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
        await self._until_restored(r)
        started, has_others = self.gossip.awake_s(), len(self.ownership.contributors(r)) > 1
        self._is_usual = True
        self.changed.notify_all()
        results: list[bool] = []
        gave: list[bool] = []

        async def one(j: int, pushed: Pushed, tried: Tried | None = None) -> None:
            counted = await self._shard(r, j, *pushed, put, tried)
            results.append(counted or not pushed[0])

        async def together(peer_id: str | None, shards: list[int]) -> None:
            pushed = {j: await part(j) for j in shards}
            gave.extend(num_tokens > 0 for num_tokens, _ in pushed.values())
            if peer_id is None:
                return await one(shards[0], pushed[shards[0]])
            if self.ownership.failure is not None:
                raise self.ownership.failure
            began = self.gossip.awake_s()
            counted, elsewhere = await self._push_together(peer_id, r, pushed, put)
            results.extend(counted[j] or not pushed[j][0] for j in counted)
            for j in shards:
                if j not in counted:
                    tried = Tried(began, elsewhere.get(j))
                    group.create_task(one(j, pushed[j], tried))
            return None

        # All at once: with clipping, no shard is done before every shard has been summed.
        shards = range(self.replica.num_shards) if due is None else due
        shards = _rotated(list(shards), self.gossip.own.peer_id)
        behind: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for peer_id, several in self._calls_for(r, shards):
                    group.create_task(together(peer_id, several))
        except* (Behind, UserError) as several:  # what is raised in here would be a group again
            behind = several.exceptions[0]
        if behind is not None:
            raise behind
        if results and not all(results):
            self.gossip.add_total("late_shards", results.count(False))
        self._note_averaged(r, shards)
        took = self.gossip.awake_s() - started
        self.pace.took(took, is_usual=has_others and any(gave) and self._is_usual)
        self.replica.exchanges.add(took)

    def _note_averaged(self, r: int, shards: Sequence[int]) -> None:
        """For the books: what is behind every shard. Where shards take turns, the first one
        stands for all."""
        asked = [0] if self.plan.is_local else shards
        known = [self._tokens[(r, j)] for j in asked if (r, j) in self._tokens]
        if known and len(known) == len(asked):
            self.lost.averaged(r, min(known))

    def samples_in(self, r: int, committed: int) -> int:
        """How many of a round's committed samples are in its update, as a mean of all shards; all
        of them where that is not known."""
        known = [n for (of, _), n in self._tokens.items() if of == r]
        counted = self._counted_tokens(r)
        if not known or not counted:
            return committed
        return min(committed, round(committed * sum(known) / (len(known) * counted)))

    async def _until_restored(self, r: int) -> None:
        """When a whole swarm goes on from checkpoints, its peers become active one after the other;
        the state that the last one brings is not to be taken for lost."""
        loop = asyncio.get_running_loop()
        end = loop.time() + RESTORE_WAIT_S
        while loop.time() < end and any(
            m.state == JOINING and m.restorable and m.round == r and m.digests
            for m in self.gossip.view.members(self.replica.index, loop.time())
        ):
            await self.gossip.changed.wait(LOOK_AGAIN_S)

    async def _shard(
        self,
        r: int,
        j: int,
        num_tokens: int,
        gradient: Array | None,
        put: Callable[[int, Array], None],
        tried: Tried | None = None,
    ) -> bool:
        """Gets the new parameters of one shard, wherever its primary is; True where counted.
        `tried`: it was pushed before."""
        redirected = tried.elsewhere if tried else None
        awake_s = self.gossip.awake_s
        began, pause_s, is_first = tried.began if tried else awake_s(), RETRY_S, True
        false: set[str] = set()
        """Who gave parameters that no stage takes."""
        # Views of who is primary may differ for as long as news take to spread. Who gave up before
        # they agree would have no part in the update, and keep no promise as a primary either.
        while is_first or awake_s() - began < self.pace.call_s():
            if self.ownership.failure is not None:
                raise self.ownership.failure
            peer_id = redirected or self.ownership.primary(r, j)
            redirected = None
            try:
                if peer_id is None:
                    raise NotReady("no owner is known")
                if (r, j) in self._mirrored:  # whoever is primary by now: this is the result
                    parameters, counted = self._mirrored[(r, j)], True
                elif peer_id == self.gossip.own.peer_id:
                    parameters, counted = await self._own_shard(r, j, num_tokens, gradient)
                else:
                    if is_first and tried is None:
                        await self.pace.turn(gradient, r)
                    parameters, counted = await self._push(peer_id, r, j, num_tokens, gradient)
                try:
                    await self.replica.worker.run(lambda p=parameters: put(j, p))  # type: ignore[misc]
                except ProtocolViolation as e:
                    if peer_id is not None:
                        if peer_id not in false:
                            log.warning("round %d: of no use from %s: %s", r, peer_id[-8:], e)
                        false.add(peer_id)
                        redirected = self._owner_beside(r, j, false)
                    raise
                self._results.add((r, j))
                self._end_with(r, j, parameters)
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
            is_first = False
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_GROWTH * pause_s, MAX_RETRY_S)
        raise Behind(f"shard {j} of round {r} was given by no owner")

    def _owner_beside(self, r: int, j: int, false: Collection[str]) -> str | None:
        """One that may have the result too, for it has made the same step."""
        own = self.gossip.own.peer_id
        others = self.ownership.placement(r).owners(j)
        return next((p for p in others if p not in false and p != own), None)

    async def _push(
        self, peer_id: str, r: int, j: int, num_tokens: int, gradient: Array | None
    ) -> tuple[Array, bool]:
        found = await self._call_primary(peer_id, r, {j: (num_tokens, gradient)})
        told, parameters = found[j]
        return parameters, told.counted

    async def _push_together(
        self, peer_id: str, r: int, pushed: dict[int, Pushed], put: Callable[[int, Array], None]
    ) -> tuple[dict[int, bool], dict[int, str]]:
        """As `_shard`, for several that have one primary, once. Returns those whose parameters
        came, and whether they are counted; and whose primary is another peer, as this one says."""
        counted: dict[int, bool] = {}
        elsewhere: dict[int, str] = {}

        def store(found: dict[int, tuple[ShardReply, Array]]) -> None:
            for j, (told, parameters) in found.items():
                put(j, parameters)
                counted[j] = told.counted

        try:
            found = await self._call_primary(peer_id, r, pushed)
            await self.replica.worker.run(lambda: store(found))
        except (TransportError, ProtocolViolation, RemoteError) as e:
            log.debug("round %d, %d shards at %s: %s", r, len(pushed), peer_id[-8:], e)
            if isinstance(e, TransportError):
                self.gossip.probe(peer_id)
            if isinstance(e, Redirect):
                j, other = e.details.get("shard"), e.details.get("peer_id")
                if isinstance(j, int) and isinstance(other, str) and other != peer_id:
                    elsewhere[j] = other
        for j in counted:
            self._results.add((r, j))
            self._end_with(r, j, found[j][1])
        return counted, elsewhere

    async def _call_primary(
        self, peer_id: str, r: int, pushed: dict[int, Pushed]
    ) -> dict[int, tuple[ShardReply, Array]]:
        tokens = tuple(num_tokens for num_tokens, _ in pushed.values())
        request = ReduceRequest(r, self.replica.index, tuple(pushed), tokens)
        gradients = tuple(gradient for _, gradient in pushed.values() if gradient is not None)
        heard = functools.partial(self._heard_taken, r)
        message = Message(request, gradients)
        reply = await self.call_while_live(peer_id, "reduce", message, heard)
        found = self._parameters_of(reply, tuple(pushed))
        for j, (told, _) in found.items():
            self._heard(r, j, told)
        return found

    def _calls_for(self, r: int, shards: Sequence[int]) -> list[tuple[str | None, list[int]]]:
        """Shards that share a call, in this order, and to whom; None beside one that is looked
        after alone. Beside a round each waits for room on the link alone, and who leaves wants to
        hear of each as early as can be."""
        own, room_bytes = self.gossip.own, self._call_bytes()
        is_alone = own.state == LEAVING or self.plan.is_delayed(r)
        calls: list[tuple[str | None, list[int]]] = []
        open_: dict[str, tuple[list[int], int]] = {}
        """By primary, a call that has room, and how much."""
        for j in shards:
            primary = self.ownership.primary(r, j)
            num_bytes = 4 * self.replica.stage.shard_sizes[j]
            if primary is None or primary == own.peer_id or is_alone:
                calls.append((None, [j]))
                continue
            together, room = open_.get(primary, ([], 0))
            if not together or room < num_bytes or len(together) == MAX_ARRAYS:
                together, room = [], room_bytes
                calls.append((primary, together))
            together.append(j)
            open_[primary] = (together, room - num_bytes)
        return [(peer_id if len(several) > 1 else None, several) for peer_id, several in calls]

    def _call_bytes(self) -> int:
        rate = self.gossip.own.upload_bytes_per_s
        if not rate:
            return USUAL_SHARED_CALL_BYTES
        return int(min(SHARED_CALL_S * rate, MAX_SHARED_CALL_BYTES))

    def _heard_taken(self, r: int, message: Message) -> None:
        self._taken.add((r, convert(message.body, ReduceProgress).shard))
        self.changed.notify_all()
        self.gossip.changed.notify_all()

    def repair_beside(self) -> None:
        """As `Ownership.repair`, while an exchange is under way: its results may travel for long
        after the steps."""
        r = self.current
        self.ownership.repair(r + 1, {j for q, j in self._results if q == r})

    def needs_nothing_of(self, r: int) -> bool:
        """The owners of every shard have made the step of an exchange, and none is being made here:
        who leaves need not wait for the results."""
        done = self._taken | self._results
        return not self._updates and all((r, j) in done for j in range(self.replica.num_shards))

    def _parameters_of(
        self, reply: Message, asked: Sequence[int]
    ) -> dict[int, tuple[ShardReply, Array]]:
        """What a primary says of the shards."""
        told = convert(reply.body, ReduceReply).shards
        if not len(asked) == len(told) == len(reply.arrays):
            raise ProtocolViolation(f"an answer of {len(told)} shards to a call for {len(asked)}")
        for j, array in zip(asked, reply.arrays):
            self._check_shard("parameters", j, array)
        return dict(zip(asked, zip(told, reply.arrays)))

    async def call_while_live(
        self,
        peer_id: str,
        method: str,
        message: Message,
        on_progress: Callable[[Message], None] | None = None,
        timeout_s: float | None = None,
    ) -> Message:
        """A long call that is given up as soon as the callee is not live any more.
        Raises as `Transport.call`."""
        wait_s = self.pace.call_s() if timeout_s is None else timeout_s
        return await self._calls.call(
            peer_id, method, message, timeout_s=wait_s, on_progress=on_progress
        )

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
        update.changed.notify_all()
        parameters = await self._result(update)
        return parameters, self._told(r, j, self.gossip.own.peer_id).counted

    # ---- a primary's part -------------------------------------------------------------------

    async def _on_reduce(self, request: Request) -> Message:
        self.gossip.check_run(request)
        push = convert(request.message.body, ReduceRequest)
        for j in push.shards:
            self.replica.check_shard(push.stage, j)
        num_bytes = sum(4 * self.replica.stage.shard_sizes[j] for j in push.shards)
        if len(push.shards) > 1 and num_bytes > MAX_SHARED_CALL_BYTES:
            raise ProtocolViolation(f"shards of {num_bytes} bytes do not share a call")
        self._check_member(request.remote)
        gradients = self._gradients_of(push, request.message.arrays)
        work = [
            self._reduce(request, push.round, j, num_tokens, gradients.get(j))
            for j, num_tokens in zip(push.shards, push.num_tokens)
        ]
        results = await self._all_of(work) if len(work) > 1 else [await work[0]]
        reply = ReduceReply(tuple(told for told, _ in results))
        return Message(reply, tuple(parameters for _, parameters in results))

    async def _on_reduce_tied(self, request: Request) -> Message:
        """The other stage's sum of a tied shard; what it gets is this stage's result."""
        self.gossip.check_run(request)
        push, other = self.tied.read(request)
        j = push.shards[0]
        self.replica.check_shard(self.replica.index, j)
        told, parameters = await self._reduce(request, push.round, j, 0, None, other)
        return Message(ReduceReply((told,)), (parameters,))

    async def _all_of(
        self, work: Sequence[Coroutine[Any, Any, tuple[ShardReply, Array]]]
    ) -> list[tuple[ShardReply, Array]]:
        """Raises as soon as one fails: the primary that it ought to go to may wait for it."""
        tasks = [self._tasks.start(one) for one in work]
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
            raise NotReady("the stage is not served here any more") from None
        finally:
            for task in tasks:
                task.cancel()

    async def _reduce(
        self,
        request: Request,
        asked: int,
        j: int,
        num_tokens: int,
        gradient: Array | None,
        other: OtherSum | None = None,
    ) -> tuple[ShardReply, Array]:
        """One shard of exchange `asked` for one contributor. `other`: for another stage, whose sum
        it is, see `tied_shards`."""
        r, remote = self.current, request.remote
        self._in_vain.discard(remote)
        is_of_stage = other is None
        closed_there = asked == r == self.replica.round and not self.plan.is_delayed(r)
        closed_there = closed_there and is_of_stage
        if closed_there and self.replica.heard_over(r):
            self.gossip.changed.notify_all()
        if asked < r and asked == self.plan.last_exchange(j, r):
            # a straggler: the parameters of this round are what it lacks
            parameters = await self._copy(j)
            if self.current != r:  # the copy may be of two rounds
                raise Stale(f"round {r} is over here", round=self.current)
            return self._told(asked, j, remote, coming=r), parameters
        if asked != r:
            if asked < r:
                raise Stale(f"round {asked} is over here", round=r)
            if not await self.replica.changed.until(
                lambda: self.current >= asked, self.limits.enter_wait_s
            ):
                raise NotReady(f"round {asked} has not begun here", round=self.current)
        key = (asked, j)
        if key in self._mirrored:
            return self._told(asked, j, remote), self._mirrored[key]
        if self._was_given(*key):
            given = await self._given(*key)
            await self.pace.turn(given, asked, is_result=True)
            return self._told(asked, j, remote), given
        update = self._update(*key)
        self._redirect_unless_mine(update)
        if other is not None:
            update.other_sum = update.other_sum or other
            update.changed.notify_all()
        elif not update.closed and num_tokens:
            update.contributions[remote] = Contribution(num_tokens, gradient)
        elif not update.closed:
            update.contributions.setdefault(remote, Contribution(0, None))
        if len(update.contributions) >= update.awaited:
            update.changed.notify_all()
        parameters = await self._result(update)
        if self._is_leaving(remote):
            request.progress(Message(ReduceProgress(j)))
        await self.pace.turn(parameters, asked, is_result=True)
        return self._told(asked, j, remote), parameters

    def _is_leaving(self, peer_id: str) -> bool:
        record = self.gossip.view.get(peer_id)
        return record is not None and record.state == LEAVING

    def _told(self, r: int, j: int, remote: str, coming: int | None = None) -> ShardReply:
        """What a contributor is told of its result."""
        counted = remote in self._summed.get((r, j), ())
        num_tokens = self._tokens.get((r, j), -1)
        norm = self._norm(r)
        return ShardReply(r + 1 if coming is None else coming, counted, num_tokens, norm)

    def _norm(self, r: int) -> float:
        """For those that are told a result: what was taken here for the round's gradient norm."""
        known = self.norms.known(r)
        return -1.0 if known is None else known

    def _heard(self, r: int, j: int, told: ShardReply) -> None:
        """What came with a result."""
        if told.num_tokens >= 0:
            self._tokens[(r, j)] = told.num_tokens
        if told.norm >= 0:
            self.norms.heard(r, told.norm)

    async def _on_reduced(self, request: Request) -> Message:
        """To one that has become primary: the result of the one before, where it is here."""
        self.gossip.check_run(request)
        asked = convert(request.message.body, ReduceRequest)
        r, j = asked.round, asked.shards[0]
        if asked.stage != self.replica.index or j >= self.replica.num_shards:
            raise NotReady(f"stage {asked.stage} is not served here")
        self._check_member(request.remote)
        update = self._updates.get((r, j))
        if update is not None and update.parameters is not None:
            given = update.parameters
        elif self._was_given(r, j):
            given = await self._given(r, j)
        elif (r, j) in self._mirrored:
            given = self._mirrored[(r, j)]
        else:
            raise NotReady("the result is not here")
        return Message(ReduceReply((self._told(r, j, request.remote),)), (given,))

    def _was_given(self, r: int, j: int) -> bool:
        """The shard's result is here, and was not made here."""
        update = self._updates.get((r, j))
        return (r, j) in self._results and (update is None or not update.closed)

    async def _given(self, r: int, j: int) -> Array:
        """A copy of a result that is here. Raises `NotReady` where it is being moved."""

        def copied() -> Array | None:
            shard = self.replica.stage.coming_shard(j)
            return None if shard is None else _copied(shard)

        given = await self.replica.worker.run(copied)
        if given is None or (r, j) not in self._results:
            raise NotReady("a new round is being opened here")
        return given

    def _end_with(self, r: int, j: int, parameters: Array) -> None:
        """Another peer's result is the result of the update that others have asked for here."""
        update = self._updates.get((r, j))
        if update is None or update.closed or update.parameters is not None:
            return
        update.num_tokens = self._tokens.get((r, j), -1)
        update.parameters, update.closed = parameters, True
        update.contributions.clear()
        update.changed.notify_all()
        update.done.notify_all()

    async def _copy(self, j: int) -> Array:
        """A shard of the present parameters that stays as it is while it is being sent."""
        return await self.replica.worker.run(lambda: _copied(self.replica.common_shard(j)))

    def _check_member(self, peer_id: str) -> None:
        """Only replicas of the stage, by their signed records, take part in its update."""
        record = self.gossip.view.get(peer_id)
        if record is None or record.stage != self.replica.index:
            raise NotReady(f"{peer_id[-8:]} is not known here as a replica of this stage")

    def _gradients_of(self, push: ReduceRequest, arrays: tuple[Array, ...]) -> dict[int, Array]:
        shards = [j for j, num_tokens in zip(push.shards, push.num_tokens) if num_tokens]
        if len(arrays) != len(shards):
            raise ProtocolViolation(f"{len(arrays)} gradients of {len(shards)} shards")
        for j, array in zip(shards, arrays):
            self._check_shard("gradient", j, array)
        return dict(zip(shards, arrays))

    def _check_shard(self, what: str, j: int, array: Array) -> None:
        size = self.replica.stage.shard_sizes[j]
        if array.dtype != "float32" or array.shape != (size,):
            raise ProtocolViolation(f"{what} of shard {j}: {size} fp32 numbers are wanted")

    def _update(self, r: int, j: int) -> ShardUpdate:
        """The update of a shard, begun by whoever comes first."""
        if (r, j) not in self._updates:
            update = self._updates[(r, j)] = ShardUpdate(r, j)
            self._tasks.start(self._aggregate(update))
        return self._updates[(r, j)]

    def _is_stepping(self, j: int) -> bool:
        """A step on a shard is being made here in the present exchange, or may be."""
        return (self.current, j) in self._updates or j in self._mirroring

    def _give_up(self, which: Callable[[tuple[int, int]], bool]) -> None:
        """Forgets updates, by round and shard; who waits for a result here asks elsewhere."""
        for key in [k for k in self._updates if which(k)]:
            self._updates.pop(key).done.notify_all()

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
        primary = self.ownership.primary(update.round, update.shard)
        if primary is not None and primary != self.gossip.own.peer_id:
            raise Redirect("another peer is primary", peer_id=primary, shard=update.shard)

    async def _aggregate(self, update: ShardUpdate) -> None:
        """Waits for the contributions, then aggregates, steps and mirrors."""
        r, j = update.round, update.shard
        try:
            await self._gather(update)
            await self.changed.until(lambda: j not in self._mirroring, self.limits.reduce_wait_s)
            if update.parameters is not None:
                return
            if (r, j) in self._mirrored:  # the primary died after its step: this is its result
                update.parameters = self._mirrored[(r, j)]
                self._summed[(r, j)] = frozenset(update.contributions)  # as far as is known
                update.num_tokens = self._tokens[(r, j)]
                return
            if self.tied.decides(j):
                await self._await_other(update)
            is_primary = self.ownership.primary(r, j) == self.gossip.own.peer_id
            if update.parameters is not None or not is_primary:
                return
            update.closed, self._summed[(r, j)] = True, frozenset(update.contributions)
            total, squares, num_tokens = await self._sum(update)
            if self.tied.decides(j):
                total, squares, num_tokens = await self.tied.add(
                    total, num_tokens, update.other_sum
                )
            update.num_tokens = num_tokens
            update.contributions.clear()
            if self.tied.follows(j):
                await self._follow(update, total)
                return
            if total is None:
                # Even an empty stage takes part in the norm, so that the others need not wait.
                await self._clip(r, j, 0.0)
                await self._leave_as_it_is(update)
                return
            clip = await self._clip(r, j, squares / num_tokens**2)
            if self.ownership.past(r):
                raise NotReady("the round was finished without this replica", round=r)
            try:
                await self._step_everywhere(update, total, clip / num_tokens)
            except ProtocolViolation as e:  # at the backups too, with the same state
                log.warning("round %d: no step: %s", r, e)
                await self._leave_as_it_is(update)
        except Exception as e:
            update.parameters = None
            if isinstance(e, UserError):
                self.ownership.failure = e
            raise
        finally:
            if update.parameters is None:
                self._updates.pop((r, j), None)
            update.done.notify_all()
            self.changed.notify_all()

    async def _await_other(self, update: ShardUpdate) -> None:
        """Of a tied shard: until the other stage has given its sum."""
        awake_s = self.gossip.awake_s
        end = awake_s() + self.pace.norm_s()
        r, j = update.round, update.shard
        while update.other_sum is None and update.parameters is None:
            is_primary = self.ownership.primary(r, j) == self.gossip.own.peer_id
            if not is_primary or self.ownership.past(r):
                return
            if awake_s() >= end:
                self.gossip.add_total("tied_missed")
                log.warning("round %d: the last stage's part of shard %d did not arrive", r, j)
                return
            await update.changed.wait(LOOK_AGAIN_S)

    async def _follow(self, update: ShardUpdate, total: Array | None) -> None:
        """Of a tied shard whose step is the other stage's: takes its result."""
        r, j = update.round, update.shard
        # This stage's norm is complete without it, and the other's step waits for that.
        norm = self._tasks.start(self._clip(r, j, 0.0))
        try:
            if total is not None:
                await self.pace.turn(total, r)
            told, parameters = await self.tied.push(
                r, j, total, update.num_tokens, lambda: bool(self.ownership.past(r))
            )
        finally:
            norm.cancel()
        if told.norm >= 0:
            self.norms.heard(r, told.norm)
        self.ownership.stepped(j, r)
        self._tokens[(r, j)] = update.num_tokens
        update.parameters = parameters

    async def _leave_as_it_is(self, update: ShardUpdate) -> None:
        """There is no step to be made on a shard in this exchange."""
        r, j = update.round, update.shard
        self.ownership.stepped(j, r)
        self._tokens[(r, j)] = update.num_tokens = 0
        update.parameters = await self._copy(j)

    async def _sum(self, update: ShardUpdate) -> tuple[Array | None, float, int]:
        """The aggregate of the contributions, its sum of squares, and the tokens behind it; None
        where there is nothing to sum."""
        parts = [
            Part(p, c.num_tokens, c.gradient)
            for p, c in sorted(update.contributions.items())
            if c.gradient is not None and c.num_tokens
        ]
        result = await self.aggregator(
            update.round, update.shard, parts, self._counted_behind(update.round, update.shard)
        )
        return result.total, result.squares, result.num_tokens

    def _counted_tokens(self, r: int) -> int:
        """Of the round, by the word of the feeders; 0 where contributions are of several rounds."""
        if self.plan.is_local:
            return 0
        now = asyncio.get_running_loop().time()
        return progress.round_progress(self.gossip.view, r, now, self.settings.num_slots).tokens

    def note_counted(self, r: int) -> None:
        """Of a round that is over here, in mode `local`: its exchange may come rounds later."""
        now = asyncio.get_running_loop().time()
        state = progress.round_progress(self.gossip.view, r, now, self.settings.num_slots)
        self._counted[r] = state.tokens
        for old in [q for q in self._counted if q < r - 2 * self.plan.local_steps]:
            del self._counted[old]

    def _counted_behind(self, r: int, j: int) -> int:
        """Of all rounds whose work is in the exchange of a shard; 0 where this peer was not in all
        of them."""
        if not self.plan.is_local:
            return self._counted_tokens(r)
        known = [self._counted.get(q, 0) for q in self.plan.window(j, r)]
        return sum(known) if all(known) else 0

    async def _gather(self, update: ShardUpdate) -> None:
        """Waits until every live contributor has pushed, the deadline passed, or the shard is
        another's."""
        awake_s = self.gossip.awake_s  # after a stall of its own it has not read yet what came
        due_s, wait_s = self.pace.contributions_s()
        end: float | None = None
        latest = heard_by = math.inf
        probe_at: float | None = None
        were_looked_into = False
        look_s = LOOK_AGAIN_S
        while True:
            now = awake_s()
            if update.parameters is not None:
                return
            if self.ownership.primary(update.round, update.shard) != self.gossip.own.peer_id:
                return
            self.ownership.claim(update.round, update.shard)
            if update.own and end is None:
                end, look_s = now + wait_s, LOOK_AGAIN_S
                latest = end + 2 * STALL_S
                heard_by = now + self.limits.reduce_wait_min_s
                beyond_least_s = due_s - self.limits.reduce_wait_min_s
                probe_at = now + max(PROBE_AFTER_S, PROBE_AFTER * beyond_least_s)
            missing, stalled = self._missing(update), self._stalled(update)
            is_complete = update.own and not (missing or stalled)
            if is_complete and (now >= heard_by or not self._is_unheard_of(update)):
                return
            may_return = stalled or (missing and self.ownership.has_stalled_feeder(update.round))
            if end is not None and may_return:
                # They may come back; and then they need some time.
                longer = min(latest, now + self.limits.reduce_wait_min_s)
                if longer > end:
                    end, were_looked_into = longer, False
                self._is_usual = False
            update.awaited = len(update.contributions) + len(missing) + len(stalled)
            if missing and self._may_be_given(update):
                self._ask_for_result(update, missing)
            missing += stalled
            if end is not None and now >= end and not were_looked_into:
                were_looked_into = True
                # Who does not answer may have stalled a moment ago, and nobody knows yet.
                await self.gossip.look_into(self._awaited_of(update))
                end = min(latest, awake_s() + ANSWERED_S)  # who has just come back, gives now
                continue
            if end is not None and now >= end:
                if await self._was_given_to_one(update, missing):
                    return
                self._in_vain.update(stalled)
                log.info(
                    "round %d shard %d: went on without %s",
                    update.round,
                    update.shard,
                    ", ".join(p[-8:] for p in missing) or "those who have its samples",
                )
                return
            if probe_at is not None and now >= probe_at:
                probe_at = None
                for peer_id in missing:
                    self.gossip.probe(peer_id)
            left = look_s if end is None else min(look_s, end - now)
            if not await update.changed.wait(max(0.001, left)):
                look_s = min(LOOK_LESS * look_s, MAX_LOOK_S)

    def _may_be_given(self, update: ShardUpdate) -> bool:
        """A peer has died in this exchange that may have been the shard's primary."""
        r, j = update.round, update.shard
        return any(g.holds_shard(j) for g in self.ownership.gone(r))

    def _ask_for_result(self, update: ShardUpdate, peer_ids: Iterable[str]) -> None:
        """Asks those that have not been asked whether the dead primary gave them its result."""
        for peer_id in peer_ids:
            if peer_id not in update.asked:
                update.asked[peer_id] = self._tasks.start(self._fetch_result(update, peer_id))

    async def _was_given_to_one(self, update: ShardUpdate, peer_ids: Sequence[str]) -> bool:
        """Before a result is made without them: asks once more, and hears all answers."""
        if not self._may_be_given(update):
            return False
        await asyncio.gather(*update.asked.values())
        if update.parameters is None:
            update.asked.clear()
            self._ask_for_result(update, peer_ids)
            await asyncio.gather(*update.asked.values())
        return update.parameters is not None

    async def _fetch_result(self, update: ShardUpdate, peer_id: str) -> None:
        r, j = update.round, update.shard
        message = Message(ReduceRequest(r, self.replica.index, (j,), num_tokens=(0,)))
        try:
            reply = await self.call_while_live(peer_id, "reduced", message)
            told, parameters = self._parameters_of(reply, (j,))[j]
        except SwarmnetError as e:
            log.debug("round %d shard %d: %s has no result: %s", r, j, peer_id[-8:], e)
            return
        optimizer, worker = self.replica.optimizer, self.replica.worker
        if math.isfinite(await worker.run(lambda: optimizer.sum_of_squares(parameters))):
            self._heard(r, j, told)
            self._end_with(r, j, parameters)

    def _missing(self, update: ShardUpdate) -> list[str]:
        """Live replicas that may have a gradient of this round and have not pushed it yet."""
        return [
            r.peer_id
            for r in self.ownership.contributors(update.round)
            if r.peer_id not in update.contributions and r.peer_id != self.gossip.own.peer_id
        ]

    def _awaited_of(self, update: ShardUpdate) -> list[str]:
        """Who has not pushed a gradient, and feeders for whose word it may be waiting: of these
        only peers at hand, who can be told from the dead when they do not answer."""
        missing, own = self._missing(update), self.gossip.own.peer_id
        connected = set(self.transport.connected()) if missing else set()
        feeders = [
            f
            for f in self.ownership.feeders(update.round)
            if f not in (own, *missing) and machine_of(f) in connected
        ]
        return [*missing, *feeders[:MAX_ASKED]]

    def _is_unheard_of(self, update: ShardUpdate) -> bool:
        """Whoever has the round's samples: some were counted, nobody known here gave any (in the
        first round, when all join at once: not all of them), and nobody is known to have died with
        them."""
        r = update.round
        given = sum(c.num_tokens for c in update.contributions.values())
        if (given and r > 0) or self.ownership.gone(r):
            return False
        return self._counted_tokens(r) > given

    def _stalled(self, update: ShardUpdate) -> list[str]:
        """Likewise of those that are suspected, and may be back soon."""
        return [
            r.peer_id
            for r in self.ownership.stalled_contributors(update.round)
            if r.peer_id not in update.contributions and r.peer_id not in self._in_vain
        ]

    def _is_back(self, r: int, j: int) -> bool:
        """A sum made here is of no use: one that gave nothing to it is the shard's primary after
        all. It waits for the gradients, as this replica waits for its norm."""
        primary = self.ownership.primary(r, j)
        if primary is None or primary == self.gossip.own.peer_id:
            return False
        return primary not in self._summed[(r, j)]

    async def _clip(self, r: int, j: int, squares: float) -> float:
        """The factor by which the mean gradient is to be scaled. Raises `NotReady` as soon as the
        round turns out to be over elsewhere, its norm may never come, and where another peer is the
        primary after all."""
        limit = self.settings.grad_clip_norm
        if limit <= 0 or self.plan.is_local:  # replicas clip their own steps
            return 1.0
        adding = asyncio.ensure_future(self.norms.add(r, j, squares))
        try:
            while not adding.done():
                if self.ownership.past(r):
                    raise NotReady("the round was finished without this replica", round=r)
                if self._is_back(r, j):
                    raise NotReady("its primary was suspected wrongly", round=r)
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
        elif self.ownership.is_late(j, r):  # who had made the steps between died with them
            self.gossip.add_total("shard_stale")
            log.warning("shard %d: its last owner missed steps; moments go on without them", j)
        before = self._primaries.pop(j, None)
        if before is not None and not self.gossip.view.is_live(
            before, asyncio.get_running_loop().time()
        ):
            self.gossip.add_total("shard_promoted")
        steps, lineage = optimizer.steps(j), self.ownership.lineage(j)
        stage, num_tokens = self.replica.index, update.num_tokens
        request = MirrorRequest(r, stage, j, scale, steps, num_tokens, self._norm(r), lineage)
        mirrors = [
            self._tasks.start(self._mirror(peer_id, request, total))
            for peer_id in self.ownership.followers(r, j)
            if peer_id != self.gossip.own.peer_id
        ]
        parameters = await self._step(r, j, total, scale, lineage)
        await asyncio.gather(*mirrors)
        self._tokens[(r, j)] = update.num_tokens
        update.parameters = parameters

    async def _step(self, r: int, j: int, total: Array, scale: float, lineage: bytes) -> Array:
        """`lineage`: of the state before, at the primary."""
        replica = self.replica
        await self.until_exported()

        def work() -> Array:
            before = replica.common_shard(j)
            is_delayed = self.plan.is_delayed(r)
            after = replica.optimizer.step(j, before, total, scale, r, is_delayed)
            self.ownership.stepped(j, r, descended(lineage, r, total))
            return after

        return await replica.worker.run(work)

    async def until_exported(self) -> None:
        """Before a step, so that a copy of the state that is under way is of one round."""
        await self.changed.until(lambda: not self.exporting, SNAPSHOT_WAIT_S)

    async def _mirror(self, peer_id: str, request: MirrorRequest, total: Array) -> None:
        try:
            await self.pace.turn(total, request.round)
            # Longer than for a contribution nobody waits for a backup: the contributors wait too.
            wait_s, _ = self.pace.contributions_s()
            message = Message(request, (total,))
            await self.call_while_live(peer_id, "mirror", message, timeout_s=wait_s)
        except SwarmnetError as e:  # it fetches the state later
            log.debug("shard %d was not mirrored at %s: %s", request.shard, peer_id[-8:], e)

    async def _on_mirror(self, request: Request) -> Message:
        """As backup: the same step as the primary's, bit for bit."""
        self.gossip.check_run(request)
        mirror = convert(request.message.body, MirrorRequest)
        replica = self.replica
        r, j = mirror.round, mirror.shard
        if not await replica.changed.until(lambda: self.current >= r, self.limits.enter_wait_s):
            raise NotReady("the round has not begun here")
        self.replica.check_shard(mirror.stage, j)
        self._check_member(request.remote)
        if self.current != r:
            raise Stale(f"round {r} is over here", round=self.current)
        if len(request.message.arrays) != 1:
            raise ProtocolViolation("the gradient of one shard is one array")
        total = request.message.arrays[0]
        self._check_shard("gradient", j, total)
        update = self._updates.get((r, j))
        is_made = (r, j) in self._mirrored or (r, j) in self._results
        if is_made or j in self._mirroring or (update and update.closed):
            raise NotReady("this step was made here already")
        if replica.optimizer.steps(j) != mirror.steps or not self.ownership.is_before(j, r):
            raise NotReady("the state is not followed here")
        if not self.ownership.is_copy(j, mirror.lineage):  # fetched from the primary next time
            self.gossip.add_total("shard_unlike")
            raise NotReady("the state here has seen other gradients")
        self._mirroring.add(j)
        try:
            parameters = await self._step(r, j, total, mirror.scale, mirror.lineage)
            self._tokens[(r, j)] = mirror.num_tokens
            if mirror.norm >= 0:
                self.norms.heard(r, mirror.norm)
            self._mirrored[(r, j)] = parameters
            self._primaries[j] = request.remote
        finally:
            self._mirroring.discard(j)
            self.changed.notify_all()
        return Message()

    # ---- what does not hold any more --------------------------------------------------------

    def finish_round(self, r: int) -> None:
        """Round `r` is over here: forgets its exchange."""
        self._give_up(lambda key: key[0] <= r)
        for key in [k for k in self._mirrored if k[0] <= r]:
            del self._mirrored[key]
        self._results = {k for k in self._results if k[0] > r}
        self._taken = {k for k in self._taken if k[0] > r}
        for known in (self._tokens, self._summed):
            for key in [k for k in known if k[0] < r - BEHIND_ROUNDS]:
                del known[key]
        self.norms.finish_round(r)
        self.aggregator.norms.finish_round(r)
        self.changed.notify_all()

    async def forget_state(self) -> None:
        """What this replica has of the optimizer belongs to parameters that do not hold: drops it,
        to fetch it from those whose parameters do."""
        await self.ownership.forget_state()
        self._mirrored.clear()
        self.norms.forget()
        self.forget_results()
        self._give_up(lambda key: True)
        self.changed.notify_all()

    def forget_results(self) -> None:
        """What was put aside for the coming round does not hold."""
        self._results.clear()
        self._taken.clear()


def _copied(shard: Array) -> Array:
    return Array(shard.dtype, shard.shape, bytes(shard.data))


def _rotated(items: list[int], name: str) -> list[int]:
    """Each replica begins elsewhere, so that they do not all push to one primary first."""
    if not items:
        return items
    start = sum(name.encode()) % len(items)
    return items[start:] + items[:start]
