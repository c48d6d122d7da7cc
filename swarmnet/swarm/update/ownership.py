"""Members and owners of a stage's shards: who takes part in an exchange, which replicas are
responsible for a shard, and who does what in its update.

Placement orders the replicas of a stage for each shard. The primary is the first live one that
*holds* the shard's optimizer state, as its record says since the beginning of the round; where none
holds it, the first live one, which then starts afresh. That is taken from the records once, when an
exchange begins here (`roster`), and is fixed from then on (`protocol.update.roster`). The rules are
in `protocol.update.members` and `protocol.update.ownership`.

A replica that comes to own a shard fetches its state during one round, follows it through that
round's update as a backup, and says that it holds it when the next round begins. Where an owner is
lost in the middle of a round, the next in order fetches the state at once, and says so at once,
but is no primary before the next round: rounds may be long, and a shard is in danger for seconds,
not for the rest of one. A replica drops state when others own the shard and all of them
say that they hold it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarmnet.errors import DeadlineExceeded, SwarmnetError, UserError
from swarmnet.methods.state import FETCH_OPTIMIZER, FetchReply, FetchRequest
from swarmnet.plurals import counted
from swarmnet.protocol.codecs import NONE, row_bytes
from swarmnet.protocol.least_rate import LeastRate
from swarmnet.protocol.membership.reach import num_cuts
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record, bitmap
from swarmnet.protocol.membership.view import ALL
from swarmnet.protocol.moments import Since
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL
from swarmnet.protocol.update import members as taking_part
from swarmnet.protocol.update import ownership as rules
from swarmnet.protocol.update.members import Absent, Hung, Owed, Replaced, Rests
from swarmnet.protocol.update.placement import Placement, placed, short_of_owners
from swarmnet.protocol.update.roster import ALIVE, SUSPECT, MemberStatus, Roster
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica, follows_tied
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_LESS_S, SHARD_TIMEOUT_S
from swarmnet.swarm.update.optimizer_states import OptimizerStates
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.ownership")

MAX_ASKED = 1
"""Shards that a replica asks one holder for at a time. The holder sends one after the other as its
uplink has room, and state that waits there is of a round that is over when it comes: it would be
fetched again (tests/swarm/recovery/test_slow_join.py)."""
REPAIR_EVERY_S = 5.0
"""Between two looks whether a shard has lost an owner in the middle of a round. So long, too, may
owners of shards that this replica holds and does not own take to say that they hold them; else it
is looked at again in the next round."""

T = TypeVar("T")


@dataclass
class ExchangeMembers:
    """The replicas of one replica's stage (`protocol.update.members`). What is called round here is
    the number of an exchange, as `Replica.current_exchange` gives it."""

    gossip: Gossip
    replica: Replica

    def __post_init__(self) -> None:
        self._hung, self._absent = Hung(), Absent()
        self._uncopied = Rests()
        """Backups that did not make this primary's step in time."""
        self._owed = Owed()
        """Primaries that gave no result in time."""
        self._unspoken = Replaced()
        """Primaries that did not tell other stages of their sums, as their backup sees it."""

    def remembered(self, name: object, round_index: int, ask: Callable[[], T]) -> T:
        """The answer of `ask()` on the stage's records and a round: asked again when one of them
        has changed. Several questions a shard are asked in every exchange."""
        now = asyncio.get_running_loop().time()
        view, plan = self.gossip.view, self.replica.plan
        return view.remembered(self.replica.index, (name, round_index, plan), now, ask)

    def _here(self) -> Sequence[Record]:
        """Live members of this stage that are known."""
        now = asyncio.get_running_loop().time()
        return self.gossip.view.known(self.replica.index, now)

    def _gone(self) -> Sequence[Record]:
        """Members of this stage that have fallen silent."""
        return self.gossip.view.lost(self.replica.index, asyncio.get_running_loop().time())

    def candidates(self, stage_index: int, round_index: int) -> list[Record]:
        """As `protocol.update.members.candidates`."""
        members = self.gossip.view.known(stage_index, asyncio.get_running_loop().time())
        return taking_part.candidates(members, self.replica.plan, round_index)

    def num_shards(self, stage_index: int) -> int:
        """Shards of a stage, as the most of its known replicas say; 0 where there is none."""
        if stage_index == self.replica.index:
            return self.replica.num_shards
        now, view = asyncio.get_running_loop().time(), self.gossip.view
        return view.remembered(
            stage_index,
            "number of shards",
            now,
            lambda: taking_part.num_shards(view.known(stage_index, now)),
        )

    def contributors(self, round_index: int) -> list[Record]:
        """Live replicas of this stage that may have a gradient of the round."""
        lost = self.gossip.view.detector.is_lost
        return self.remembered(
            "contributors",
            round_index,
            lambda: [
                r
                for r in taking_part.with_gradient(self._here(), self.replica.plan, round_index)
                if not lost(r.peer_id)
            ],
        )

    def _lost(self, round_index: int) -> list[Record]:
        """The same of those that have fallen silent, and who is past the round already."""

        def asked() -> list[Record]:
            gone, plan = self._gone(), self.replica.plan
            contributors = taking_part.with_gradient(gone, plan, round_index)
            return [*contributors, *taking_part.past(gone, plan, round_index)]

        return self.remembered("lost members", round_index, asked)

    def has_lost_one(self, round_index: int) -> bool:
        """A replica of this stage died in a round, or when it had just finished it."""
        return any(
            self.replica.plan.parameter_version(m.round) >= round_index for m in self._gone()
        )

    def past(self, round_index: int) -> list[str]:
        """Replicas of this stage in reach that have finished a round, by peer id; this one
        excepted. None where only some of them say so."""
        lost, own = self.gossip.view.detector.is_lost, self.gossip.own.peer_id

        def found() -> list[str]:
            past = taking_part.shown_past(self._here(), self.replica.plan, round_index)
            return [m.peer_id for m in past if m.peer_id != own and not lost(m.peer_id)]

        return self.remembered("past", round_index, found)

    def statuses(self, round_index: int) -> dict[str, MemberStatus]:
        """The statuses of the other members of an exchange of the stage, by peer id."""
        liveness, view, plan = self.gossip.liveness, self.gossip.view, self.replica.plan
        found: dict[str, MemberStatus] = {}
        for record in self.contributors(round_index):
            found[record.peer_id] = taking_part.status(record, plan, round_index, ALIVE)
        lost, past = view.detector.is_lost, self.past(round_index)
        for record in taking_part.past(self._here(), plan, round_index):
            if not lost(record.peer_id):
                # Who says so alone has nothing to give, and may not have the result either.
                is_past = record.peer_id in past
                found[record.peer_id] = MemberStatus(ALIVE, None if is_past else 0, is_past)
        for record in self._lost(round_index):
            if record.peer_id not in found and liveness.is_suspect(record.peer_id):
                found[record.peer_id] = taking_part.status(record, plan, round_index, SUSPECT)
        found.pop(self.gossip.own.peer_id, None)
        self._hung.mark(found, view.get, plan, round_index)
        self._absent.mark(found, view.get, round_index)
        self._owed.forget(view.get)
        self._uncopied.forget(view.get)
        self._unspoken.forget(view.get)
        return found

    def has_begun(self, peer_id: str, round_index: int) -> bool:
        """A peer has closed a round, by its record."""
        return taking_part.has_begun(self.gossip.view.get(peer_id), round_index)

    def behind(self, peer_ids: Iterable[str], round_index: int) -> list[str]:
        """Those of these that are in the exchange before yet."""
        records = {p: self.gossip.view.get(p) for p in peer_ids}
        return taking_part.behind(records, self.replica.plan, round_index)

    def found_hung(self, peer_id: str, round_index: int) -> None:
        """As `Hung.found`, and so on."""
        self._hung.found(peer_id, round_index)

    def found_mute(self, peer_id: str) -> None:
        self._hung.found_mute(peer_id)

    def works(self, peer_id: str) -> None:
        self._hung.works(peer_id)

    def found_absent(self, peer_id: str, round_index: int) -> None:
        """As `Absent.found`, and so on."""
        self._absent.found(peer_id, round_index)

    def contributed(self, peer_id: str, round_index: int) -> None:
        """A contribution has come, in time or not."""
        self._absent.did(peer_id, round_index)

    def found_owing(self, peer_id: str, round_index: int) -> None:
        """A primary has been waited for in vain, as all are told."""
        self._owed.found(peer_id, round_index)
        self.gossip.update(owing=self._owed.words(round_index), urgent=True)

    def owed_last(self, peer_id: str, round_index: int) -> bool:
        """As `Owed.owed_last`."""
        return self._owed.owed_last(peer_id, round_index)

    def are_passed_over(self, stage_index: int, round_index: int) -> frozenset[str]:
        """As `protocol.update.members.passed_over`, of a stage."""
        now, view, plan = asyncio.get_running_loop().time(), self.gossip.view, self.replica.plan

        def found() -> frozenset[str]:
            there = self.candidates(stage_index, round_index)
            return taking_part.passed_over(there, round_index)

        name = ("passed over", round_index, plan)
        return view.remembered(stage_index, name, now, found)

    def found_unspoken(self, peer_id: str, round_index: int) -> None:
        """As backup, this replica has spoken for a primary."""
        self._unspoken.found(peer_id, round_index)

    def speaks(self, peer_id: str, round_index: int) -> bool:
        """A primary is waited for to speak."""
        return not self._unspoken.rests(peer_id, round_index)

    def found_uncopied(self, peer_id: str, round_index: int) -> None:
        """This primary has waited in vain for a backup."""
        self._uncopied.found(peer_id, round_index)

    def copied(self, peer_id: str, round_index: int) -> None:
        """A backup has made this primary's step, in time or not."""
        self._uncopied.did(peer_id, round_index)

    def copies(self, peer_id: str, round_index: int) -> bool:
        """A backup is waited for."""
        return not self._uncopied.rests(peer_id, round_index)


@dataclass
class Ownership:
    """The shards of one replica's stage. What is called round here is the number of an exchange,
    as `Replica.current_exchange` gives it, unless it is said otherwise."""

    gossip: Gossip
    settings: RunSettings
    limits: WaitLimits
    replica: Replica
    states: OptimizerStates
    members: ExchangeMembers
    tasks: Tasks
    """Where what runs beside its caller is started: whoever has these tasks ends them."""

    def __post_init__(self) -> None:
        self._has_all = False
        """The state of every shard that this replica owned at its last look was here."""
        self._looked_for_loss = Since()
        self._coming: set[int] = set()
        """Shards whose state is on its way, which may take several rounds."""
        self._rates = LeastRate()
        """At which holders give state, in bytes of parameters a second."""

    @property
    def current(self) -> int:
        """The exchange whose input the present common parameters are."""
        return self.replica.current_exchange

    # ---- who owns what ----------------------------------------------------------------------

    def placement(self, round_index: int) -> Placement:
        """Owners of the shards of this stage, as far as is known now."""
        return self.members.remembered(
            "placement", round_index, lambda: self._placement(round_index)
        )

    def _placement(self, round_index: int) -> Placement:
        candidates = self.members.candidates(self.replica.index, round_index)
        weights = self._weights(candidates, self.replica.index)
        return placed(
            self.replica.index,
            self.replica.num_shards,
            tuple(weights.items()),
            self.settings.replication,
        )

    def _weights(self, candidates: Sequence[Record], stage_index: int) -> dict[str, float]:
        products = self.settings.products
        flops_per_byte = products[stage_index] if products else 0.0
        weights = rules.fit(candidates, num_cuts(candidates), flops_per_byte)
        return rules.without_slow(weights) if self.replica.plan.mode == LOCAL else weights

    def _order(self, round_index: int, shard_index: int) -> tuple[str, ...]:
        """Peers that may be a shard's primary, the first choice first; those about to leave come
        last."""
        leaving = self.members.remembered("leaving", round_index, self._leaving)
        return (*self.placement(round_index).order(shard_index), *leaving)

    def _leaving(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        known = self.gossip.view.known(self.replica.index, now)
        return sorted(m.peer_id for m in known if m.state == LEAVING)

    def roots(self, stage_index: int) -> list[str]:
        """Peers of a stage in the order in which they stand in for its root. Roots are called by
        all stages, so one that cannot call everybody comes behind the others."""
        now, view = asyncio.get_running_loop().time(), self.gossip.view
        cuts = view.remembered(ALL, "cuts", now, lambda: num_cuts(view.replicas(ALL, now)))
        weights = rules.fit(self.members.candidates(stage_index, self.current), cuts)
        return list(placed(stage_index, 1, tuple(weights.items()), 1).order(0))

    def leaders(self, stage_index: int, round_index: int, shard_index: int) -> tuple[str, ...]:
        """Known peers that may be the primary of a shard of any stage, as the records of this
        moment say, the first choice first. Who cannot be called comes last."""
        now, view, plan = asyncio.get_running_loop().time(), self.gossip.view, self.replica.plan
        own, is_lost = self.gossip.own.peer_id, view.detector.is_lost

        def ranked() -> tuple[str, ...]:
            if stage_index == self.replica.index:
                order, known = self._ranked(round_index, shard_index)
                is_barred = view.is_barred
                return tuple(sorted(dict.fromkeys((*known, *order)), key=is_barred))
            if shard_index >= self.members.num_shards(stage_index):
                return ()
            name = ("placement", round_index, plan)
            owners = view.remembered(stage_index, name, now, placement).order(shard_index)
            holders = rules.holders(
                owners, view.get, plan, round_index, shard_index, own=own, has_state=False
            )
            return (*holders, *owners)

        def placement() -> Placement:
            there = self.members.candidates(stage_index, round_index)
            weights = tuple(self._weights(there, stage_index).items())
            num_shards = self.members.num_shards(stage_index)
            return placed(stage_index, num_shards, weights, self.settings.replication)

        def found() -> tuple[str, ...]:
            known = dict.fromkeys(r.peer_id for r in view.known(stage_index, now))
            order = [p for p in dict.fromkeys((*ranked(), *known)) if p in known]
            passed_over = self.members.are_passed_over(stage_index, round_index)
            return tuple(sorted(order, key=lambda p: (is_lost(p), p in passed_over)))

        return view.remembered(stage_index, ("leaders", round_index, shard_index, plan), now, found)

    def _record(self, peer_id: str) -> Record | None:
        """The newest one of a peer; of this one, what it has not published yet too."""
        own = self.gossip.own
        return own if peer_id == own.peer_id else self.gossip.view.get(peer_id)

    def roster(self, round_index: int, shard_index: int) -> Roster:
        """The roles in the update of a shard, as the records of this moment say."""
        own, has_input = self.gossip.own, self.states.has_input(shard_index, round_index)
        order, known = self._ranked(round_index, shard_index)
        roster = rules.first_roster(
            order,
            known,
            rules.followers(self.placement(round_index), order, self._record, shard_index),
            own=own.peer_id,
            is_holder=has_input,
            may_lead=own.state in (ACTIVE, LEAVING),
            clips=self.settings.grad_clip_norm > 0
            and not self.replica.plan.is_local
            and not follows_tied(self.replica, shard_index),
            quorum=self._quorum(round_index),
        )
        passed_over = self.members.are_passed_over(self.replica.index, round_index)
        roster = rules.passing_over(roster, passed_over.__contains__)
        return rules.without(roster, self.gossip.view.is_barred)

    @property
    def takes_late(self) -> bool:
        """What is late in an exchange may count in another one."""
        return self.replica.plan.mode == LOCAL

    def _quorum(self, r: int) -> int:
        members = self.members.contributors(r)
        return rules.quorum(self.replica.plan, r, self.settings.aggregation, members)

    def _ranked(self, r: int, j: int) -> tuple[tuple[str, ...], Sequence[str]]:
        """Peers that may be the primary, and those of them that hold the state; in order."""
        own, has_input = self.gossip.own, self.states.has_input(j, r)

        def found() -> tuple[tuple[str, ...], Sequence[str]]:
            order, plan = self._order(r, j), self.replica.plan
            known = rules.holders(
                order, self._record, plan, r, j, own=own.peer_id, has_state=has_input
            )
            return order, rules.held(order, known, own=own.peer_id, is_holder=has_input)

        return self.members.remembered(("holders", j, own.holds, has_input), r, found)

    def is_kept_elsewhere(self, round_index: int, shard_index: int, waited_s: float) -> bool:
        """The optimizer state of a shard that this replica lacks need not be lost, though nobody
        that it can call has it. Where no replica of another stage is heard of, it is this replica
        that is cut off from the run."""
        if not self.states.lacks(shard_index, round_index):
            return False
        view, now = self.gossip.view, asyncio.get_running_loop().time()
        others = (k for k in range(self.settings.num_stages) if k != self.replica.index)
        if not all(view.replicas(k, now) for k in others):
            return True
        members = view.members(self.replica.index, now)
        lost = (m for m in members if view.detector.is_lost(m.peer_id))
        return rules.may_be_elsewhere(lost, self.replica.plan, round_index, shard_index, waited_s)

    def is_settled(self, record: Record) -> bool:
        """A replica will, as far as is known, hold what it does now when the next exchange
        begins."""
        owned = self.placement(self.current).owned_by(record.peer_id)
        return rules.is_settled(record, owned, self.replica.num_shards)

    # ---- owners come and go -----------------------------------------------------------------

    async def fetch_owned(self, r: int) -> None:
        """The state of shards that this replica has come to own, for exchange `r`."""
        mine = self.placement(r).owned_by(self.gossip.own.peer_id)
        await self._fetch_all(r, mine, only_owned=True)
        self._tell_whether_all_are_here(r, mine)

    async def _fetch_all(self, r: int, shards: Sequence[int], *, only_owned: bool = False) -> None:
        """The state of those shards that this replica does not follow, and that is not on its way
        already. That may take several rounds: of each shard the newest state is fetched, with
        `only_owned` if it is this replica's by then."""
        wanted = [j for j in shards if not self.states.has_input(j, r)]
        asked: dict[str, asyncio.Semaphore] = {}

        async def fetch(j: int) -> None:
            if j in self._coming:
                return
            self._coming.add(j)
            try:
                await self._fetch(r, j, asked, only_owned)
            finally:
                self._coming.discard(j)

        await asyncio.gather(*map(fetch, wanted))

    async def _fetch(
        self, r: int, j: int, asked: dict[str, asyncio.Semaphore], only_owned: bool
    ) -> None:
        """The optimizer state of one shard from a peer that holds it; tried again next round.
        `asked`: by holder."""
        states = self.states
        if self.is_first(r):
            await states.create(j)
            return
        num_forgotten = states.num_forgotten
        holders = self._in_order(r, j)
        for i, holder in enumerate(holders):
            others = [p for p in holders[i + 1 :] if p not in states.doubted]
            turn = asked.setdefault(holder, asyncio.Semaphore(MAX_ASKED))
            try:
                async with asyncio.timeout(self.limits.fetch_timeout_s):
                    await turn.acquire()
            except TimeoutError:
                continue  # it gives nothing, or others have enough to do with it
            try:
                newest = max(r, self.current)
                if states.has_input(j, newest) or (only_owned and not self._owns(newest, j)):
                    return
                if self._rates.is_left(holder, others):
                    continue  # it has shown that since this waited for its turn
                # Whose state has come once, and in vain, waits for nobody this time.
                request = FetchRequest(newest, self.replica.index, j, states.has_come(j))
                reply = await self._ask(holder, request, others)
                await states.load(j, reply.body, reply.arrays, num_forgotten, holder)
                return
            except DeadlineExceeded as e:
                self._rates.in_vain(holder)
                log.debug("optimizer shard %d from %s: %s", j, holder[-8:], e)
            except UserError as e:
                states.fail(e)
                return
            except SwarmnetError as e:
                log.debug("optimizer shard %d from %s: %s", j, holder[-8:], e)
            except (MemoryError, RuntimeError) as e:  # torch has none left, say
                log.warning("optimizer shard %d cannot be held here: %s", j, e)
                return
            finally:
                turn.release()

    def _in_order(self, r: int, j: int) -> list[str]:
        """The other holders of a shard, in the order in which they are asked for its state: last,
        who was silent or far slower than others when it was asked before; and after these, who has
        given another state."""
        doubted = self.states.doubted
        for peer_id in doubted:
            self._rates.forget(peer_id)
        return sorted(self._rates.in_order(self.holders(r, j)), key=doubted.__contains__)

    async def _ask(
        self, holder: str, request: FetchRequest, others: Sequence[str]
    ) -> Message[FetchReply]:
        """The state of a shard from one holder. Raises `DeadlineExceeded` where it is to be asked
        of one of the others instead, or does not come at all; and as `call_while_live`."""
        awake_s = self.gossip.liveness.awake_s
        num_bytes = row_bytes(NONE, self.replica.stage.shard_sizes[request.shard])
        began = Since(awake_s())
        asking = asyncio.ensure_future(
            self.gossip.liveness.call_while_live(
                holder, FETCH_OPTIMIZER, Message(request), timeout_s=SHARD_TIMEOUT_S
            )
        )
        try:
            while not asking.done():
                if self._rates.is_left(holder, others, num_bytes, began.s(awake_s())):
                    raise DeadlineExceeded("another one that holds it is faster")
                await asyncio.wait([asking], timeout=LOOK_LESS_S)
            reply = await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if holder not in self.states.doubted:
            self._rates.came(holder, num_bytes, began.s(awake_s()))
        return reply

    def _owns(self, r: int, j: int) -> bool:
        return self.gossip.own.peer_id in self.placement(r).owners(j)

    async def spare(self, r: int) -> list[int]:
        """Shards whose state is here, and at all of those that own them now. Not while an exchange
        begins somewhere: replicas that have seen other records would go by other primaries."""
        own = self.gossip.own.peer_id
        placement = self.placement(max(r, self.current))  # fetching may have taken several rounds
        kept = set(placement.owned_by(own))
        spare = {j: placement.owners(j) for j in self.states.here() if j not in kept}
        if not spare:
            return []
        others = {p: None for owners in spare.values() for p in owners}
        await self.gossip.changed.until(
            lambda: rules.have_begun(others, self._record, self.replica.plan, self.current),
            REPAIR_EVERY_S,
        )
        return [j for j, owners in spare.items() if self._is_spare(j, owners)]

    async def drop(self, shards: Sequence[int]) -> None:
        """Forgets the state of shards that others own."""
        if shards:  # said at once: who would be pushed to because of it could only send them away
            left = [j for j in range(self.replica.num_shards) if self.gossip.own.holds_shard(j)]
            left = [j for j in left if j not in shards]
            self.gossip.update(holds=bitmap(left, self.replica.num_shards))
        await self.states.drop(shards)

    def repair(self, exchange: int, among: Container[int] | None = None) -> None:
        """While a round is open, called often: where a shard has lost an owner, the one that comes
        after it takes its place. `exchange`: the one to come. While another is under way, only
        `among` the shards whose step in that one has been made."""
        now = asyncio.get_running_loop().time()
        if self.replica.plan.mode == GOSSIP or not self._looked_for_loss.is_due(
            now, REPAIR_EVERY_S
        ):
            return
        short = self.members.remembered("short", exchange, lambda: self._short(exchange))
        if among is not None:
            short = [j for j in short if j in among]
        if short:
            self.tasks.start(self._take_over(exchange, short))

    def _short(self, r: int) -> list[int]:
        candidates = self.members.candidates(self.replica.index, r)
        return short_of_owners(self.placement(r), candidates, self.gossip.own.peer_id)

    async def _take_over(self, r: int, shards: Sequence[int]) -> None:
        """Fetches, and says what is held now. That does not change who is the primary: this replica
        comes after all that held it when the round began."""
        await self._fetch_all(r, shards)
        own = self.gossip.own
        if self.replica.round != own.round or own.state != ACTIVE:
            return
        num_shards = self.replica.num_shards
        held = {j for j in range(num_shards) if own.holds_shard(j)}
        told = {j for j in shards if self.states.has_input(j, r) and self.holders(r, j)} - held
        if told:
            log.info("took over %s that had lost an owner", counted(len(told), "shard"))
            fresh = told | {j for j in held if own.is_fresh(j)}
            self.gossip.update(
                holds=bitmap(sorted(held | told), num_shards),
                fresh=bitmap(sorted(fresh), num_shards),
            )

    def _is_spare(self, j: int, owners: Sequence[str]) -> bool:
        """The shard's owners all have what this replica has of it, and another one makes its
        step."""
        current, own = self.current, self.gossip.own.peer_id
        is_spare = rules.is_spare(j, owners, self._record, self.replica.plan, current)
        return is_spare and self.roster(current, j).ballot.primary != own

    @property
    def owns_from_now(self) -> bool:
        """A replica that becomes active now counts as a possible owner in this very round: in the
        first one, otherwise whoever began a stage would have to update it alone."""
        return self.is_first(self.current)

    def is_first(self, r: int) -> bool:
        """No step of the run has been made yet, and none is about to be: the optimizer state of
        every shard is empty, so that nobody needs to fetch it."""
        if r or self.replica.round or self.settings.begins_with_moments:
            return False
        now = asyncio.get_running_loop().time()
        return not progress.is_launched(self.gossip.view, 0, now, self.settings.slots.of(0))

    def _tell_whether_all_are_here(self, r: int, mine: Sequence[int]) -> None:
        """Of a possible owner; where others have far better links it may own nothing."""
        had_all, is_candidate = self._has_all, self.gossip.own.peer_id in self.placement(r).weights
        self._has_all = is_candidate and all(self.states.has_input(j, r) for j in mine)
        if self._has_all and not had_all:
            log.info("has the optimizer state of what it owns: %s", counted(len(mine), "shard"))

    def holders(self, r: int, j: int) -> list[str]:
        """The other peers that hold the state of a shard, the first choice first."""
        own = self.gossip.own.peer_id
        records = [(p, self._record(p)) for p in self._order(r, j) if p != own]
        return [p for p, record in records if record is not None and record.holds_shard(j)]
