"""Ownership of shards: which replicas are responsible for one, and who does what in an exchange.

Placement orders the replicas of a stage for each shard. The primary is the first live one that
*holds* the shard's optimizer state, as its record says since the beginning of the round; where none
holds it, the first live one, which then starts afresh. That is taken from the records once, when an
exchange begins here (`roster`), and is fixed from then on (`protocol.update.roster`).

A replica that comes to own a shard fetches its state during one round, follows it through that
round's update as a backup, and says that it holds it when the next round begins. Where an owner is
lost in the middle of a round, the next in order fetches the state at once, and says so at once,
but is no primary before the next round: rounds may be long, and a shard is in danger for seconds,
not for the rest of one. A replica drops state when others own the shard and all of them
say that they hold it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet.protocol.membership.partition import num_cuts
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record, bitmap
from swarmnet.protocol.membership.view import ALL
from swarmnet.protocol.moments import Since
from swarmnet.protocol.sync_modes import GOSSIP, SyncPlan
from swarmnet.protocol.timing import PATIENCE_S
from swarmnet.protocol.update.placement import (
    Placement,
    placed,
    short_of_owners,
    weights_from,
)
from swarmnet.protocol.update.roster import Roster, first_ballot
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica, follows_tied
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.members import ExchangeMembers
from swarmnet.swarm.update.optimizer_states import OptimizerStates

log = logging.getLogger("swarmnet.ownership")

CUT_WEIGHT = 1e-6
"""By this the weight of an owner shrinks for each replica of its stage that it cannot call, and
that of a root for each replica."""
OUT_OF_REACH_S = PATIENCE_S
"""So long, a replica that lacks a shard's state waits for a holder that is cut off from it: as a
rule, a relay joins them earlier (tests/swarm/membership/test_relaying.py)."""
REPAIR_EVERY_S = 5.0
"""Between two looks whether a shard has lost an owner in the middle of a round. So long, too, may
owners of shards that this replica holds and does not own take to say that they hold them; else it
is looked at again in the next round."""


@dataclass
class Ownership:
    """The shards of one replica's stage. What is called round here is the number of an exchange,
    as `Replica.current_exchange` gives it, unless it is said otherwise."""

    gossip: Gossip
    settings: RunSettings
    replica: Replica
    states: OptimizerStates
    members: ExchangeMembers
    tasks: Tasks
    """Where what runs beside its caller is started: whoever has these tasks ends them."""

    def __post_init__(self) -> None:
        self._has_all = False
        """The state of every shard that this replica owned at its last look was here."""
        self._looked_for_loss = Since()

    @property
    def plan(self) -> SyncPlan:
        """When the stage exchanges what."""
        return self.replica.plan

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
        weights = _fit(candidates, num_cuts(candidates))
        return placed(
            self.replica.index,
            self.replica.num_shards,
            tuple(weights.items()),
            self.settings.replication,
        )

    def _order(self, round_index: int, shard_index: int) -> tuple[str, ...]:
        """Who may be a shard's primary, the first choice first; those about to leave come last."""
        leaving = self.members.remembered("leaving", round_index, self._leaving)
        return (*self.placement(round_index).order(shard_index), *leaving)

    def _leaving(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        members = self.gossip.view.members(self.replica.index, now)
        return sorted(m.peer_id for m in members if m.state == LEAVING)

    def roots(self, stage_index: int) -> list[str]:
        """Peers of a stage in the order in which they stand in for its root. Roots are called by
        all stages, so one that cannot call everybody comes behind the others."""
        now, view = asyncio.get_running_loop().time(), self.gossip.view
        cuts = view.remembered(ALL, "cuts", now, lambda: num_cuts(view.replicas(ALL, now)))
        weights = _fit(self.members.candidates(stage_index, self.current), cuts)
        return list(placed(stage_index, 1, tuple(weights.items()), 1).order(0))

    def roster(self, round_index: int, shard_index: int) -> Roster:
        """The roles in the update of a shard, as the records of this moment say."""
        has_input = self.states.has_input(shard_index, round_index)
        name = ("holders", shard_index, self.gossip.own.holds, has_input)
        order, holders = self.members.remembered(
            name, round_index, lambda: self._ranked(round_index, shard_index)
        )
        own = self.gossip.own.peer_id
        if not holders and has_input and own in order:  # nobody has said so yet
            holders = (own,)
        first = holders[0] if holders else (order[0] if order else "")
        return Roster(
            first_ballot(first, is_holder=bool(holders)),
            tuple(dict.fromkeys((*holders, *order))),
            holders,
            tuple(self.followers(round_index, shard_index)),
            is_holder=has_input,
            may_lead=self.gossip.own.state in (ACTIVE, LEAVING),
            clips=self.settings.grad_clip_norm > 0
            and not self.plan.is_local
            and not follows_tied(self.replica, shard_index),
        )

    def _ranked(self, r: int, j: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Who may be the primary, and those of them that hold the state; in order."""
        order, own = self._order(r, j), self.gossip.own
        held = self.states.has_input(j, r) and own.holds_shard(j)

        def holds(peer_id: str) -> bool:
            if peer_id == own.peer_id:
                return held
            record = self.gossip.view.get(peer_id)
            behind = record is None or self.plan.parameter_version(record.round) < r - 1
            return record is not None and not behind and record.holds_shard(j)

        def is_fresh(peer_id: str) -> bool:
            record = own if peer_id == own.peer_id else self.gossip.view.get(peer_id)
            return record is not None and record.is_fresh(j)

        return order, tuple(sorted(filter(holds, order), key=is_fresh))

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

    def is_kept_elsewhere(self, round_index: int, shard_index: int, waited_s: float) -> bool:
        """The optimizer state of a shard that this replica lacks need not be lost, though nobody
        that it can call has it. A holder out of its reach, of whom there is news, takes part in the
        run; as long as that one is in the same exchange it may be cut off as much as this replica,
        and is waited for `OUT_OF_REACH_S`. Where no replica of another stage is heard of, it is
        this replica that is cut off from the run."""
        if not self.states.lacks(shard_index, round_index):
            return False
        view, now = self.gossip.view, asyncio.get_running_loop().time()
        others = (k for k in range(self.settings.num_stages) if k != self.replica.index)
        if not all(view.replicas(k, now) for k in others):
            return True
        return any(
            self.plan.parameter_version(m.round) > round_index or waited_s < OUT_OF_REACH_S
            for m in view.members(self.replica.index, now)
            if m.holds_shard(shard_index) and view.detector.is_lost(m.peer_id)
        )

    def is_settled(self, record: Record) -> bool:
        """A replica holds what it owns in the present exchange and nothing else, and has since its
        round began: as far as is known, it will say the same when the next one begins."""
        owned = self.placement(self.current).owned_by(record.peer_id)
        is_fresh = any(record.fresh)
        return not is_fresh and record.holds == bitmap(owned, self.replica.num_shards)

    # ---- owners come and go -----------------------------------------------------------------

    async def fetch_owned(self, r: int) -> None:
        """The state of shards that this replica has come to own, for exchange `r`."""
        own = self.gossip.own.peer_id
        mine = self.placement(r).owned_by(own)

        def is_mine(j: int) -> bool:
            return own in self.placement(max(r, self.current)).owners(j)

        await self.states.fetch_all(r, mine, self.holders, is_mine)
        self._tell_whether_all_are_here(r, mine)

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
        await self.gossip.changed.until(lambda: self._have_begun(others), REPAIR_EVERY_S)
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
        if self.plan.mode == GOSSIP or not self._looked_for_loss.is_due(now, REPAIR_EVERY_S):
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
        await self.states.fetch_all(r, shards, self.holders)
        own = self.gossip.own
        if self.replica.round != own.round or own.state != ACTIVE:
            return
        num_shards = self.replica.num_shards
        held = {j for j in range(num_shards) if own.holds_shard(j)}
        told = {j for j in shards if self.states.has_input(j, r) and self.holders(r, j)} - held
        if told:
            log.info("%d shards that had lost an owner were taken over", len(told))
            fresh = told | {j for j in held if own.is_fresh(j)}
            self.gossip.update(
                holds=bitmap(sorted(held | told), num_shards),
                fresh=bitmap(sorted(fresh), num_shards),
            )

    def _is_spare(self, j: int, owners: Sequence[str]) -> bool:
        """The shard's owners all have what this replica has of it, and another one makes its
        step."""
        holding = [self.gossip.view.get(p) for p in owners]
        return (
            bool(owners)
            and self._have_begun(owners)
            and all(o is not None and o.holds_shard(j) for o in holding)
            and self.roster(self.current, j).ballot.primary != self.gossip.own.peer_id
        )

    def _have_begun(self, peer_ids: Iterable[str]) -> bool:
        """What these hold is known of the present exchange's beginning, and not of the one before:
        who held a shard then need not have made the step since."""
        records = [self.gossip.view.get(p) for p in peer_ids]
        current, version = self.current, self.plan.parameter_version
        return all(o is not None and version(o.round) >= current for o in records)

    @property
    def owns_from_now(self) -> bool:
        """A replica that becomes active now counts as a possible owner in this very round: in the
        first one, otherwise whoever began a stage would have to update it alone."""
        return self.states.is_first(self.current)

    def _tell_whether_all_are_here(self, r: int, mine: Sequence[int]) -> None:
        had_all = self._has_all
        self._has_all = bool(mine) and all(self.states.has_input(j, r) for j in mine)
        if self._has_all and not had_all:
            log.info("has the optimizer state of the %d shards that it owns", len(mine))

    def holders(self, r: int, j: int) -> list[str]:
        view = self.gossip.view
        order = self._order(r, j)
        records = [(p, view.get(p)) for p in order if p != self.gossip.own.peer_id]
        return [p for p, record in records if record is not None and record.holds_shard(j)]


def _fit(candidates: Sequence[Record], cuts: Mapping[str, int]) -> dict[str, float]:
    """Weights of possible owners. Those who are cut from others (`num_cuts`) come behind those who
    are not, with whom everybody can exchange gradients."""
    weights = weights_from(candidates)
    return {p: w * CUT_WEIGHT ** cuts.get(p, 0) for p, w in weights.items()}
