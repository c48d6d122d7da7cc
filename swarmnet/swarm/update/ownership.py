"""Ownership of shards: which replicas are responsible for one, and which optimizer state is here.

The primary. Placement orders the replicas of a stage for each shard. The primary is the first live
one that *holds* the shard's optimizer state, as its record says since the beginning of the round;
where none holds it, the first live one, which then starts afresh. A replica that comes to own a
shard fetches its state during one round, follows it through that round's update as a backup, and
says that it holds it when the next round begins: the primary never changes in the middle of an
update, unless it dies. Where an owner is lost in the middle of a round, the next in order fetches
the state at once, and says so at once where that makes no other replica the primary: rounds may be
long, and a shard is in danger for seconds, not for the rest of one.

The state here. A replica *follows* a shard while it has the state that the next step on it needs.
It drops that state when others own the shard and all of them say that they hold it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from swarmnet.errors import NotReady, SwarmnetError, UserError
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record, bitmap
from swarmnet.protocol.membership.view import ALL
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.update.placement import (
    Placement,
    comes_after_a_holder,
    placed,
    short_of_owners,
    weights_from,
)
from swarmnet.protocol.update.sync_modes import GOSSIP, SyncPlan
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import FetchReply, FetchRequest
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.replica import Replica
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message, convert

log = logging.getLogger("swarmnet.ownership")

BEHIND_ROUNDS = 2
"""A record that is older than so many rounds is not just late: its peer was cut off."""
REPAIR_EVERY_S = 5.0
"""Between two looks whether a shard has lost an owner in the middle of a round."""
DROP_WAIT_S = 5.0
"""How long owners of shards that this replica holds and does not own may take to say that they hold
them; else it is looked at again in the next round."""

NOTHING = -2
"""Instead of the exchange whose step the state of a shard is after: there is no state here."""

T = TypeVar("T")


@dataclass
class Ownership:
    """The shards of one replica's stage. What is called round here is the number of an exchange,
    as `Replica.current_exchange` gives it, unless it is said otherwise."""

    transport: Transport
    gossip: Gossip
    settings: RunSettings
    limits: Limits
    replica: Replica
    tasks: Tasks
    """Where what runs beside its caller is started: whoever has these tasks ends them."""
    is_stepping: Callable[[int], bool]
    """A step on a shard is being made here, or may be soon, in the present exchange."""

    def __post_init__(self) -> None:
        self.failure: UserError | None = None
        """Why this machine cannot keep optimizer state; ends the peer."""
        self._applied: dict[int, int] = {}
        """By shard, the exchange whose step its state here is after; -1 before the first."""
        self._lineages: dict[int, bytes] = {}
        """By shard, what its state here has come from, see `lineage`."""
        self._has_all = False
        """The state of every shard that this replica owned at its last look was here."""
        self._following = asyncio.Lock()
        """State of shards is being fetched."""
        self._repair_at = -math.inf
        self._serving = asyncio.Semaphore(self.limits.max_serving)
        self.transport.handle("fetch_optimizer", self._on_fetch_optimizer)

    @property
    def plan(self) -> SyncPlan:
        """When the stage exchanges what."""
        return self.replica.plan

    @property
    def current(self) -> int:
        """The exchange whose input the present common parameters are."""
        return self.replica.current_exchange

    # ---- what the records say ---------------------------------------------------------------

    def _remembered(self, name: object, round_index: int, ask: Callable[[], T]) -> T:
        """What `ask()` says of the stage's records and a round: asked again when one of them has
        changed. Several questions a shard are asked in every exchange."""
        now = asyncio.get_running_loop().time()
        view, plan = self.gossip.view, self.plan
        return view.remembered(self.replica.index, (name, round_index, plan), now, ask)

    def candidates(self, stage_index: int, round_index: int) -> list[Record]:
        """Live replicas of a stage that count as possible owners in a round. One that was cut off
        and is rounds behind does not: it holds nothing of this round, and will fetch it again.
        Those that joined in this round count where all before them are gone."""
        now = asyncio.get_running_loop().time()
        there = [
            r
            for r in self.gossip.view.members(stage_index, now)
            if r.state == ACTIVE
            and self.plan.parameter_version(r.round) >= round_index - BEHIND_ROUNDS
        ]
        return [
            r for r in there if self.plan.parameter_version(r.active_from) <= round_index
        ] or there

    def contributors(self, round_index: int) -> list[Record]:
        """Live replicas of this stage that may have a gradient of the round: not past it, nor too
        far behind for that (after a partition, say), nor newcomers of a later one."""
        now = asyncio.get_running_loop().time()
        return self._remembered(
            "contributors",
            round_index,
            lambda: self._with_gradient(
                round_index, self.gossip.view.members(self.replica.index, now)
            ),
        )

    def stalled_contributors(self, round_index: int) -> list[Record]:
        """The same of those that have fallen silent a moment ago, and may be back soon; and who is
        past the round already: the result is there."""
        view, now = self.gossip.view, asyncio.get_running_loop().time()

        def asked() -> list[Record]:
            lost = view.lost(self.replica.index, now)
            return [*self._with_gradient(round_index, lost), *self._past(round_index, lost)]

        lost = self._remembered("lost contributors", round_index, asked)
        return [r for r in lost if self.gossip.has_stalled(r.peer_id)]

    def _with_gradient(self, round_index: int, records: Iterable[Record]) -> list[Record]:
        newest = self.plan.next_owner_round(round_index)
        # Where replicas make steps of their own, the slowest may have several of them left to do.
        steps = self.plan.steps_until_due(round_index) if self.plan.is_local else 1
        oldest = round_index - max(BEHIND_ROUNDS, steps)
        return [
            r
            for r in records
            if r.state in (ACTIVE, LEAVING)
            and oldest <= self.plan.parameter_version(r.round) <= round_index
            and r.active_from <= newest
        ]

    def has_stalled_feeder(self, round_index: int) -> bool:
        """Somebody who counted samples of a round has fallen silent a moment ago: replicas that it
        has told nothing yet may wait for its answer."""
        view, now = self.gossip.view, asyncio.get_running_loop().time()
        lost = view.remembered(
            ALL,
            ("lost feeders", round_index),
            now,
            lambda: [p for p, _ in view.counters.by_peer(round_index) if not view.is_live(p, now)],
        )
        return any(map(self.gossip.has_stalled, lost))

    def feeders(self, round_index: int) -> list[str]:
        """Live peers that have counted samples of a round."""
        view, now = self.gossip.view, asyncio.get_running_loop().time()
        return [p for p, _ in view.counters.by_peer(round_index) if view.is_live(p, now)]

    def past(self, round_index: int) -> list[str]:
        """Live replicas of this stage that have finished a round, by peer id; this one excepted."""
        now = asyncio.get_running_loop().time()
        return self._remembered(
            "past",
            round_index,
            lambda: [
                m.peer_id
                for m in self._past(round_index, self.gossip.view.members(self.replica.index, now))
                if m.peer_id != self.gossip.own.peer_id
            ],
        )

    def _past(self, round_index: int, records: Iterable[Record]) -> list[Record]:
        return [
            r
            for r in records
            if r.state in (ACTIVE, LEAVING) and self.plan.parameter_version(r.round) > round_index
        ]

    def gone(self, round_index: int) -> list[Record]:
        """Replicas of this stage that died in a round, or when they had just finished it."""
        now = asyncio.get_running_loop().time()
        return self._remembered(
            "gone",
            round_index,
            lambda: [
                m
                for m in self.gossip.view.lost(self.replica.index, now)
                if self.plan.parameter_version(m.round) >= round_index
            ],
        )

    # ---- who owns what ----------------------------------------------------------------------

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
        has_input = self._has_input(shard_index, round_index)
        name = ("primary", shard_index, has_input, self.gossip.own.holds)
        return self._remembered(
            name, round_index, lambda: self._primary(round_index, shard_index, has_input)
        )

    def _primary(self, round_index: int, shard_index: int, has_input: bool) -> str | None:
        """`has_input`: as `_has_input` says of the shard and the round."""
        order = self._order(round_index, shard_index)
        view = self.gossip.view
        own = self.gossip.own.peer_id
        ahead = self.past(round_index)
        if ahead:  # the round is over there: its result exists, and no other must be made
            return ahead[sum(own.encode()) % len(ahead)]
        for peer_id in order:
            if peer_id == own:
                if has_input and self.gossip.own.holds_shard(shard_index):
                    return own
                continue
            record = view.get(peer_id)
            behind = record is None or self.plan.parameter_version(record.round) < round_index - 1
            if record is not None and not behind and record.holds_shard(shard_index):
                return peer_id
        # Nobody says that it holds it: who follows it (see `claim`), else the first, afresh.
        if has_input and own in order:
            return own
        return order[0] if order else None

    def claim(self, round_index: int, shard_index: int) -> None:
        """Says at once that this replica holds a shard where it is the primary although nobody
        holds it: another that follows it too would be so as well, and each would wait for the
        other's gradient. As soon as both have said it, their order decides. Not while the one that
        holds it may be back at any moment, and go on."""
        own = self.gossip.own
        if own.holds_shard(shard_index) or not self._has_input(shard_index, round_index):
            return
        lost = self.gossip.view.lost(self.replica.index, asyncio.get_running_loop().time())
        if any(r.holds_shard(shard_index) and self.gossip.has_stalled(r.peer_id) for r in lost):
            return
        held = [j for j in range(self.replica.num_shards) if own.holds_shard(j)]
        holds = bitmap(sorted({shard_index, *held}), self.replica.num_shards)
        self.gossip.update(holds=holds, urgent=True)

    # ---- what this replica has --------------------------------------------------------------

    def _has_input(self, shard_index: int, round_index: int) -> bool:
        """The state of the shard here is that of the round's beginning, or a later one."""
        return self._applied.get(shard_index, NOTHING) >= round_index - 1

    def is_before(self, shard_index: int, round_index: int) -> bool:
        """The state of the shard here is that before the step of the round: not a later one."""
        return self._applied.get(shard_index) == round_index - 1

    def is_late(self, shard_index: int, round_index: int) -> bool:
        """The state of the shard here lacks steps before that of the round."""
        return self._applied.get(shard_index, round_index) < round_index - 1

    def followers(self, round_index: int, shard_index: int) -> list[str]:
        """Who makes the step of a shard with its primary: its owners; and as long as some of them
        have not said that they hold it, the next in order that do, so that there are always
        `replication` that hold it."""
        own = self.gossip.own

        def holds(peer_id: str) -> bool:
            record = own if peer_id == own.peer_id else self.gossip.view.get(peer_id)
            return record is not None and record.holds_shard(shard_index)

        owners = self.placement(round_index).owners(shard_index)
        if all(map(holds, owners)):
            return list(owners)
        holders = [p for p in self._order(round_index, shard_index) if holds(p)]
        return list(dict.fromkeys([*owners, *holders[: self.settings.replication]]))

    def follows(self, shard_index: int, round_index: int) -> bool:
        """The shard's state here is that of the beginning of the round (no exchange, but a round of
        the run). On the worker."""
        return self.is_before(shard_index, self.plan.parameter_version(round_index))

    def holds(self) -> bytes:
        """For the own record: shards whose state is that of the beginning of this round."""
        held = [j for j in self._applied if self._has_input(j, self.current)]
        return bitmap(sorted(held), self.replica.num_shards)

    def lineage(self, shard_index: int) -> bytes:
        """A digest of the gradients that the state of the shard here has seen, one after the other.
        Two copies of as many steps need not be one: each side of a partition makes its own. Empty
        where it is not known: before the first step, and in a checkpoint."""
        return self._lineages.get(shard_index, b"")

    def is_copy(self, shard_index: int, lineage: bytes) -> bool:
        """The state of the shard here has seen the same gradients as one of this lineage, as far as
        is known."""
        own = self.lineage(shard_index)
        return not own or not lineage or own == lineage

    def stepped(self, shard_index: int, round_index: int, lineage: bytes | None = None) -> None:
        """The step of the round has been made on the shard's state, which is of this lineage now;
        or there was none to make."""
        self._applied[shard_index] = round_index
        if lineage is not None:
            self._lineages[shard_index] = lineage

    def skip(self, shards: Sequence[int]) -> None:
        """These are not exchanged in this round: their state is that of the next one too."""
        r = self.current
        for j in shards:
            if self.is_before(j, r):
                self.stepped(j, r)

    def start_fresh(self) -> None:
        """The first replica of a stage: it owns all, with empty state."""
        for j in range(self.replica.num_shards):
            self.replica.optimizer.create(j)
            self._applied[j] = self.current - 1
        self._lineages.clear()

    def restored(self, shards: list[int]) -> None:
        """The replica went on from a checkpoint: it has the state of these shards only."""
        self._applied = dict.fromkeys(shards, self.current - 1)
        self._lineages.clear()

    async def forget_state(self) -> None:
        """Drops the state of all shards."""
        optimizer = self.replica.optimizer

        def drop() -> None:
            for j in optimizer.owned():
                optimizer.drop(j)
            self._applied.clear()
            self._lineages.clear()

        await self.replica.worker.run(drop)

    # ---- owners come and go -----------------------------------------------------------------

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
        self._tell_whether_all_are_here(r, mine)
        kept = set(mine)
        spare = {j: placement.owners(j) for j in sorted(self._applied) if j not in kept}
        if not spare:
            return
        others = {p: None for owners in spare.values() for p in owners}
        await self.gossip.changed.until(lambda: self._have_begun(others), DROP_WAIT_S)
        dropped = [j for j, owners in spare.items() if self._is_spare(j, owners)]
        for j in dropped:
            self._applied.pop(j, None)
            self._lineages.pop(j, None)
        if dropped:  # said at once: who would be pushed to because of it could only send them away
            left = [j for j in range(self.replica.num_shards) if self.gossip.own.holds_shard(j)]
            left = [j for j in left if j not in dropped]
            self.gossip.update(holds=bitmap(left, self.replica.num_shards))
        for j in dropped:
            await self.replica.worker.run(lambda j=j: self.replica.optimizer.drop(j))  # type: ignore[misc]

    def repair(self, exchange: int, among: Container[int] | None = None) -> None:
        """While a round is open, called often: where a shard has lost an owner, the one that comes
        after it takes its place. `exchange`: the one to come. While another is under way, only
        `among` the shards whose step in that one has been made."""
        now = asyncio.get_running_loop().time()
        if now < self._repair_at or self._following.locked() or self.plan.mode == GOSSIP:
            return
        self._repair_at = now + REPAIR_EVERY_S
        short = self._remembered("short", exchange, lambda: self._short(exchange))
        if among is not None:
            short = [j for j in short if j in among]
        if short:
            self.tasks.start(self._take_over(exchange, short))

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
            if self._has_input(j, r) and comes_after_a_holder(placement, candidates, own.peer_id, j)
        ]
        held = [j for j in range(self.replica.num_shards) if own.holds_shard(j)]
        if set(told) - set(held):
            log.info("%d shards that had lost an owner were taken over", len(told))
            self.gossip.update(holds=bitmap(sorted({*told, *held}), self.replica.num_shards))

    def _is_spare(self, j: int, owners: Sequence[str]) -> bool:
        """The shard's owners all have what this replica has of it, and no step is made here."""
        holding = [self.gossip.view.get(p) for p in owners]
        return (
            bool(owners)
            and self._have_begun(owners)
            and all(o is not None and o.holds_shard(j) for o in holding)
            and not self.is_stepping(j)
            and self.primary(self.current, j) != self.gossip.own.peer_id
        )

    def _have_begun(self, peer_ids: Iterable[str]) -> bool:
        """What these hold is known of the present exchange's beginning, and not of the one before:
        who held a shard then need not have made the step since."""
        records = [self.gossip.view.get(p) for p in peer_ids]
        now = self.current
        return all(o is not None and self.plan.parameter_version(o.round) >= now for o in records)

    @property
    def owns_from_now(self) -> bool:
        """A replica that becomes active now counts as a possible owner in this very round: in the
        first one, otherwise whoever began a stage would have to update it alone."""
        return self._is_first(self.current)

    def _is_first(self, r: int) -> bool:
        """No step of the run has been made yet, and none is about to be: the optimizer state of
        every shard is the initial one, so that nobody needs to fetch it."""
        if r or self.replica.round:
            return False
        now = asyncio.get_running_loop().time()
        return not progress.is_launched(self.gossip.view, 0, now, self.settings.num_slots)

    def _tell_whether_all_are_here(self, r: int, mine: Sequence[int]) -> None:
        had_all = self._has_all
        self._has_all = bool(mine) and all(self._has_input(j, r) for j in mine)
        if self._has_all and not had_all:
            log.info("has the optimizer state of the %d shards that it owns", len(mine))

    # ---- state on its way -------------------------------------------------------------------

    async def _fetch_all(self, r: int, shards: Sequence[int]) -> None:
        """The state of those that this replica does not follow."""
        async with self._following:
            wanted = [j for j in shards if not self._has_input(j, r)]
            at_once = asyncio.Semaphore(self.limits.max_fetching)
            await asyncio.gather(*(self._fetch(r, j, at_once) for j in wanted))

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
                    self.failure = e
                    return
                except SwarmnetError as e:
                    log.debug("optimizer shard %d from %s: %s", j, holder[-8:], e)
                except (MemoryError, RuntimeError) as e:  # torch has none left, say
                    log.warning("optimizer shard %d cannot be held here: %s", j, e)
                    return

    def _holders(self, r: int, j: int) -> list[str]:
        view = self.gossip.view
        order = self._order(r, j)
        records = [(p, view.get(p)) for p in order if p != self.gossip.own.peer_id]
        return [p for p, record in records if record is not None and record.holds_shard(j)]

    async def _create(self, j: int) -> None:
        """For who has just seen that the run is in its first round: what is created then is the
        input of the round's step, even where the round is fed by the time that this is done."""

        def work() -> None:
            if j not in self._applied and not self.current:
                self.replica.optimizer.create(j)
                self._applied[j] = self.current - 1
                self._lineages.pop(j, None)

        await self.replica.worker.run(work)

    async def _load(self, j: int, body: FetchReply, arrays: tuple[Array, ...]) -> None:
        optimizer = self.replica.optimizer

        def work() -> None:
            if not self._has_input(j, body.round):
                optimizer.load(j, body.values, arrays)
                last = self.plan.last_exchange(j, self.current)
                same = self.plan.last_exchange(j, body.round) == last
                self._applied[j] = max(body.round, self.current if same else 0) - 1
                self._lineages[j] = body.lineage

        await self.replica.worker.run(work)

    async def _on_fetch_optimizer(self, request: Request) -> Message:
        fetch = convert(request.message.body, FetchRequest)
        j = fetch.shard
        optimizer = self.replica.optimizer
        async with self._serving:
            if not self._has_input(j, fetch.round) or optimizer.steps(j) < 0:
                raise NotReady("the state of that shard is not held here")
            (values, arrays), applied, lineage = await self.replica.worker.run(
                lambda: (optimizer.export(j), self._applied[j], self.lineage(j))
            )
            return Message(FetchReply(applied + 1, values, lineage), arrays)


def descended(lineage: bytes, round_index: int, gradient: Array) -> bytes:
    """The lineage of a shard's optimizer state after one more step."""
    digest = xxhash.xxh3_64_digest(gradient.data)
    return xxhash.xxh3_64_digest(lineage + round_index.to_bytes(8, "big") + digest)
