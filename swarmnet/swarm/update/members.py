"""Who takes part in an exchange of a stage, as the records say."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swarmnet.protocol.membership.records import ACTIVE, DIGEST_BYTES, LEAVING, Record
from swarmnet.protocol.sync_modes import SyncPlan
from swarmnet.protocol.update.roster import ALIVE, DEAD, HUNG, SUSPECT, Standing
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.timing import LOOK_AGAIN_S

BEHIND_ROUNDS = 2
"""A record that is older than so many rounds is not just late: its peer was cut off."""

T = TypeVar("T")


@dataclass
class ExchangeMembers:
    """The replicas of one replica's stage. What is called round here is the number of an exchange,
    as `Replica.current_exchange` gives it."""

    gossip: Gossip
    replica: Replica
    _hung: dict[str, int] = field(default_factory=dict)
    """Who lives and got nothing done, by peer, in which exchange."""
    _mute: set[str] = field(default_factory=set)
    """Those of them that do not even answer a question."""

    @property
    def plan(self) -> SyncPlan:
        """When the stage exchanges what."""
        return self.replica.plan

    def remembered(self, name: object, round_index: int, ask: Callable[[], T]) -> T:
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

    def num_shards(self, stage_index: int) -> int:
        """Shards of a stage, as the most of its replicas say; 0 where none is known."""
        if stage_index == self.replica.index:
            return self.replica.num_shards
        now, view = asyncio.get_running_loop().time(), self.gossip.view

        def counted() -> int:
            said = Counter(len(r.digests) // DIGEST_BYTES for r in view.members(stage_index, now))
            del said[0]  # one that joins
            return max(said, key=lambda n: (said[n], n), default=0)

        return view.remembered(stage_index, "number of shards", now, counted)

    def contributors(self, round_index: int) -> list[Record]:
        """Live replicas of this stage that may have a gradient of the round: not past it, nor too
        far behind for that (after a partition, say), nor newcomers of a later one."""
        now = asyncio.get_running_loop().time()
        lost = self.gossip.view.detector.is_lost
        return self.remembered(
            "contributors",
            round_index,
            lambda: [
                r
                for r in self._with_gradient(
                    round_index, self.gossip.view.members(self.replica.index, now)
                )
                if not lost(r.peer_id)
            ],
        )

    def _lost(self, round_index: int) -> list[Record]:
        """The same of those that have fallen silent, and who is past the round already."""
        view, now = self.gossip.view, asyncio.get_running_loop().time()

        def asked() -> list[Record]:
            lost = view.lost(self.replica.index, now)
            return [*self._with_gradient(round_index, lost), *self._past(round_index, lost)]

        return self.remembered("lost members", round_index, asked)

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

    def has_lost_one(self, round_index: int) -> bool:
        """A replica of this stage died in a round, or when it had just finished it."""
        now = asyncio.get_running_loop().time()
        lost = self.gossip.view.lost(self.replica.index, now)
        return any(self.plan.parameter_version(m.round) >= round_index for m in lost)

    def past(self, round_index: int) -> list[str]:
        """Replicas of this stage in reach that have finished a round, by peer id; this one
        excepted."""
        now = asyncio.get_running_loop().time()
        lost = self.gossip.view.detector.is_lost
        return self.remembered(
            "past",
            round_index,
            lambda: [
                m.peer_id
                for m in self._past(round_index, self.gossip.view.members(self.replica.index, now))
                if m.peer_id != self.gossip.own.peer_id and not lost(m.peer_id)
            ],
        )

    def _past(self, round_index: int, records: Iterable[Record]) -> list[Record]:
        return [
            r
            for r in records
            if r.state in (ACTIVE, LEAVING) and self.plan.parameter_version(r.round) > round_index
        ]

    def standings(self, round_index: int) -> dict[str, Standing]:
        """What is known of the other members of an exchange of the stage, by peer id."""
        liveness, own = self.gossip.liveness, self.gossip.own.peer_id
        found: dict[str, Standing] = {}
        for record in self.contributors(round_index):
            found[record.peer_id] = self._standing(record, round_index, ALIVE)
        for peer_id in self.past(round_index):
            found[peer_id] = Standing(ALIVE, is_past=True)
        for record in self._lost(round_index):
            if record.peer_id not in found and liveness.is_suspect(record.peer_id):
                found[record.peer_id] = self._standing(record, round_index, SUSPECT)
        found.pop(own, None)
        for peer_id in self._hung.keys() & found.keys():
            if self._is_hung(peer_id, found[peer_id]):
                life = DEAD if peer_id in self._mute else HUNG
                found[peer_id] = replace(found[peer_id], life=life)
        return found

    def has_begun(self, peer_id: str, round_index: int) -> bool:
        """A peer has closed a round, by its record."""
        record = self.gossip.view.get(peer_id)
        return record is not None and record.declared[0] >= round_index

    async def until_begun(
        self, peer_ids: Callable[[], list[str]], round_index: int, end_s: float
    ) -> bool:
        """Beside rounds an exchange may end at one replica long before it does at others, which
        have nothing to give for the next one until they have left it: waits for these, until
        `end_s` in seconds awake at most. Returns whether there was one."""
        has_waited = False
        while self.behind(peer_ids(), round_index) and self.gossip.awake_s() < end_s:
            has_waited = True
            await self.gossip.changed.wait(LOOK_AGAIN_S)
        return has_waited

    def behind(self, peer_ids: Iterable[str], round_index: int) -> list[str]:
        """Which of these are in the exchange before yet: with its result they would be in a later
        round, or, where the next exchange is not beside one, have begun that."""
        if not self.plan.is_delayed(round_index - 1):
            return []
        records = {p: self.gossip.view.get(p) for p in peer_ids}
        return [
            p
            for p, r in records.items()
            if r is not None
            and self.plan.parameter_version(r.round) < round_index
            and not self.has_begun(p, round_index)
        ]

    def found_hung(self, peer_id: str, round_index: int) -> None:
        """A peer lives and gets nothing done in an exchange: nobody waits for its work, in that one
        and those after it, until its record says that it has finished that one."""
        self._hung[peer_id] = round_index

    def found_mute(self, peer_id: str) -> None:
        """One that was found to hang does not answer a question either: it is as good as dead."""
        if peer_id in self._hung:
            self._mute.add(peer_id)

    def works(self, peer_id: str) -> None:
        """A peer that was found to hang leads an exchange now."""
        self._hung.pop(peer_id, None)
        self._mute.discard(peer_id)

    def _is_hung(self, peer_id: str, standing: Standing) -> bool:
        record = self.gossip.view.get(peer_id)
        is_past = standing.is_past or (
            record is not None and self.plan.parameter_version(record.round) > self._hung[peer_id]
        )
        if is_past:
            self.works(peer_id)
        return not is_past

    def _standing(self, record: Record, r: int, life: str) -> Standing:
        is_past = self.plan.parameter_version(record.round) > r
        exchange, tokens = record.declared
        return Standing(life, tokens if exchange == r else None, is_past)
