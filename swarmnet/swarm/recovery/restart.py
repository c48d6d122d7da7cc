"""Going on from checkpoints, where every replica of a stage is gone.

`Recovery` does what `protocol.recovery` decides, for a peer that finds no replica of its stage.
Where replicas make steps of their own, each goes on with those that it saved itself, also where
others of its stage were there first (`Recovery.resume`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.errors import SwarmnetError, UserError
from swarmnet.plurals import counted
from swarmnet.ports import Saved, Snapshot, Unused
from swarmnet.protocol import recovery
from swarmnet.protocol.membership.records import ACTIVE, MAX_RESTORABLE, Record, Restorable, bitmap
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.sync_modes import GOSSIP
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.swarm.recovery.waiting_notice import WaitingNotice
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.swarm.update.exchange.shard_work import ShardWork
from swarmnet.swarm.update.exchanges import Exchanges

log = logging.getLogger("swarmnet.recovery")


@dataclass
class Recovery:
    """Goes on from checkpoints, this peer's own or others'."""

    gossip: Gossip
    num_stages: int
    disk: Disk | None = None
    begin_anew: bool = False
    """Where no replica is active, the run begins from its initial parameters, whatever checkpoints
    there are.
    Once only: not when this peer joins again."""
    reconnecting: Reconnecting | None = None
    """Looks for peers that were met before, which may be in a run that lives."""

    def __post_init__(self) -> None:
        self.restored: tuple[int, int] | None = None
        """(history, round) of the checkpoint that this peer has loaded."""
        self._wait_anew(begin_anew=self.begin_anew)
        self._damaged = bool(self.disk and self.disk.unreadable)
        """Something was saved here, and cannot be used."""
        self._offers = [_offer(s) for s in (self.disk.found if self.disk else ())][-MAX_RESTORABLE:]
        self._back: dict[int, str] = {}
        """By stage, a line that says how what is missing comes back, where it is on this machine
        and nobody has taken it over."""
        self._told_ahead = False
        self._may_resume = True
        """Nothing has come from elsewhere yet."""
        self._loaded_errors: tuple[int, bytes] | None = None
        """(history, digests) of the checkpoint whose coding errors this replica has, until it is
        known whether they hold."""
        self.notice = WaitingNotice(self.reconnecting)

    # ---- what this peer has -----------------------------------------------------------------

    def offers(self, stage: int | None = None) -> tuple[Restorable, ...]:
        """For the own record: the checkpoints of the chosen stage, or of all."""
        return tuple(o for o in self._offers if stage is None or o.stage == stage)

    def old_stage(self) -> int | None:
        """The stage that this peer should serve again, if any: its last one, unless that one is
        served and another is not."""
        now, view = asyncio.get_running_loop().time(), self.gossip.view
        stages = range(self.num_stages)
        served = [(bool(view.replicas(k, now)), bool(view.members(k, now))) for k in stages]
        return recovery.stage_of(self._offers, served)

    def found(self, saved: Sequence[Saved]) -> None:
        """What is on the disk now: the peer is about to join once more."""
        self._offers = [_offer(s) for s in saved][-MAX_RESTORABLE:]
        self.restored = None
        self._may_resume = True
        self._wait_anew(begin_anew=self._settling.begin_anew)

    def forget_loaded(self) -> None:
        """What was loaded is no longer what the replica has: it is in a round of the run."""
        self.restored = None
        self._may_resume = self._damaged = False
        self._wait_anew(begin_anew=False)

    def _wait_anew(self, *, begin_anew: bool) -> None:
        """What was waited for is over: the next time, in another stage or much later, others get
        the whole time again."""
        disk = self.disk
        looks_first = disk is not None and disk.is_any
        self._settling = recovery.Settling(
            begin_anew=begin_anew, looks=disk is not None, looks_first=looks_first
        )
        self._loading = recovery.Loading()
        self._empty_stage = recovery.EmptyStage()

    def opened(self, round_index: int, history: int) -> None:
        """The replica has become active in this round. What this machine has of later ones is not
        part of the run any more, and its owner hears of it."""
        lost = recovery.left_behind(self._offers, history, round_index)
        if lost is not None and not self._told_ahead:
            log.warning(
                "the run is in round %d, and this machine has a checkpoint of round %d that is not "
                "part of it any more; it stays on the disk until the run is as far: "
                "swarmnet export --round %d writes that model",
                round_index,
                lost,
                lost,
            )
        self._told_ahead = True

    async def settle_errors(self, replica: Replica, exchanges: Exchanges, history: int) -> None:
        """The replica is about to become active, in this history. What coding had lost when a
        checkpoint was made is part of the run that goes on from it. A run that went on meanwhile
        has been sent some of that since."""
        loaded, self._loaded_errors = self._loaded_errors, None
        if loaded is None:
            return
        now, own_id = asyncio.get_running_loop().time(), self.gossip.own.peer_id
        members = self.gossip.view.members(replica.index, now)
        others = any(m.state == ACTIVE and m.peer_id != own_id for m in members)
        went_on = others and loaded[0] >= history
        if went_on or replica.digests != loaded[1]:
            await exchanges.work.contributions_lost(range(replica.num_shards))

    # ---- histories --------------------------------------------------------------------------

    def history(self) -> int:
        """Of the run as it goes on now, by what the active replicas say."""
        live = self.gossip.view.live(asyncio.get_running_loop().time())
        return recovery.history_of(live, self.gossip.own.history)

    def new_history(self) -> int:
        """For a run that begins, or goes on from a checkpoint; above all that is known."""
        return recovery.new_history(self.gossip.view.records(), self.gossip.own.incarnation)

    # ---- going on ---------------------------------------------------------------------------

    async def attend(self, replica: Replica, exchanges: Exchanges) -> bool:
        """For a peer that finds no replica of its stage. True: it has opened a round
        (`replica.synced`), or there is something to wait for and it has waited a moment. False:
        there is nothing to go on from."""
        now = asyncio.get_running_loop().time()
        live = self._loading.waited_for(self.gossip.view.live(now))
        if recovery.is_running(live):
            return await self._attend_running(replica, exchanges, now)
        decision = self._settling.decide(live, self.num_stages, now)
        if isinstance(decision, recovery.Look):
            await self._take_over(replica.index, live)
            return True
        if isinstance(decision, recovery.Begin) and self._damaged and not self._settling.begin_anew:
            decision = recovery.Wait("the checkpoints of this machine cannot be read", True)
        if isinstance(decision, recovery.Begin):
            if self._settling.begin_anew:
                log.warning("the run begins from its initial parameters, as this peer was told to")
            if self.restored is not None:  # what was loaded did not suffice
                self._unload(())
            return False
        if isinstance(decision, recovery.Wait):
            if decision.reason:  # after those of that stage had the time to take it over
                for line in self._back.values():
                    log.warning("%s", line)
                self._back = {}
            self.notice.say(decision.reason, now, is_endless=decision.is_endless)
            await self.gossip.changed.wait(LOOK_AGAIN_S)
            return True
        await self._restore(decision.candidate, replica, exchanges, now)
        return True

    async def _restore(
        self, candidate: recovery.Candidate, replica: Replica, exchanges: Exchanges, now: float
    ) -> None:
        """No replica is active: loads the chosen round, and opens it when the others have it
        too."""
        if self._loading.choose(candidate, now):
            self.notice.put_off(now)
        key = candidate.key
        ours = self.offers(replica.index)
        mine = next((o for o in ours if (o.history, o.round) == key), None)
        if mine is not None and self.restored != key:
            if not await self._load(mine, mine.round, replica, exchanges):
                return
            self.gossip.update(
                round=replica.round,
                digests=replica.digests,
                holds=exchanges.states.holds(),
                urgent=True,
            )
        live = self.gossip.view.live(now)
        waits_for_all = replica.local is not None
        if mine is not None and self._loading.may_open(
            live, self.num_stages, waits_for_all=waits_for_all
        ):
            log.warning("stage %d: the run goes on from round %d", replica.index, candidate.round)
            self.gossip.update(history=self.new_history())
            await replica.transitions.open_round(candidate.round, is_whole=True)
            return
        self._loading.pass_time(live, now)
        self.notice.say(f"others are still loading round {candidate.round}", now)
        await self.gossip.changed.wait(LOOK_AGAIN_S)

    async def _attend_running(self, replica: Replica, exchanges: Exchanges, now: float) -> bool:
        """The run lives, but this stage has no replica."""
        view, stage = self.gossip.view, replica.index
        r = progress.newest_round(view, now)
        while isinstance(
            decision := self._empty_stage.decide(
                self.offers(stage), view.members(stage, now), r, now
            ),
            recovery.Look,
        ):
            await self._take_over(stage, view.members(stage, now))
        match decision:
            case recovery.Open(saved):
                if saved.round < r:
                    log.warning(
                        "stage %d had no replica left: it goes on from its checkpoint of round %d",
                        stage,
                        saved.round,
                    )
                    self.gossip.add_total("stage_restarted")
                await self._open(saved, r, replica, exchanges)
                return True
            case recovery.Wait():
                await self.gossip.changed.wait(LOOK_AGAIN_S)
                return True
        return False

    async def _take_over(self, stage: int, live: Sequence[Record]) -> None:
        """What of this stage is missing and lies on this machine in states that no peer uses counts
        as this peer's: it is the same owner's."""
        disk = self.disk
        if disk is None:
            return
        checkpoints = disk.checkpoints
        try:
            unused = await disk.worker.run(checkpoints.unused)
            found = recovery.candidates(live, self.num_stages)
            offers = [_offer(one.saved) for one in unused]
            wanted = recovery.to_take_over(offers, found, stage, newer=disk.is_any)
            parts = [(unused[i], shards) for i, shards in wanted]
            saved = await disk.worker.run(lambda: checkpoints.take_over(parts)) if parts else ()
        except (SwarmnetError, OSError) as e:
            log.warning("what other peers of this machine saved cannot be read: %s", e)
            return
        self._back = self._ways_back(unused, found[0]) if found else {}
        if not saved:
            return
        newest = {
            one.folder: (one.saved.round, shards)
            for one, shards in sorted(parts, key=lambda part: part[0].saved.round)
        }
        for folder, (r, shards) in newest.items():  # a line each, and not one for every round
            log.warning(
                "stage %d, round %d: no peer uses %s, so this one takes over what the run lacks "
                "and is there (optimizer state of %d of %s)",
                stage,
                r,
                folder,
                len(shards),
                counted(saved[-1].num_shards, "shard"),
            )
        taken = {(s.history, s.round): _offer(s) for s in saved}
        kept = [o for o in self._offers if (o.history, o.round) not in taken]
        both = sorted([*kept, *taken.values()], key=lambda o: (o.round, o.history))
        self._offers = both[-MAX_RESTORABLE:]
        self.gossip.update(restorable=self.offers(stage), urgent=True)

    def _ways_back(self, unused: Sequence[Unused], candidate: recovery.Candidate) -> dict[int, str]:
        """By stage of which this round lacks something that lies on this machine: how a peer brings
        it back."""
        missing = {*candidate.missing_stages, *(k for k, _ in candidate.missing_shards)}
        address = next(iter(self.gossip.transport.addresses()), "ADDRESS")
        found: dict[int, str] = {}
        for one in unused:
            is_of_round = (one.saved.history, one.saved.round) == candidate.key
            if is_of_round and one.saved.stage in missing:
                found.setdefault(
                    one.saved.stage,
                    f"stage {one.saved.stage} of round {candidate.round} is in {one.folder}, which "
                    f"no peer uses; this brings it back: swarmnet peer --state-dir {one.folder} "
                    f"--join {address}",
                )
        return found

    async def resume(
        self, replica: Replica, exchanges: Exchanges, donors: Sequence[Record]
    ) -> bool:
        """Where replicas make steps of their own, for a peer that has just been started, while
        others of its stage are active: goes on with the steps that it saved, where the others have
        had no exchange since. True: it has opened their round."""
        if replica.local is None or not self._may_resume:
            return False
        self._may_resume = False
        donor = max(donors, key=lambda d: (d.history, d.round))
        offer = recovery.for_running(self.offers(replica.index), donor.round)
        if offer is None or not _is_same(replica, offer.round, donor.round):
            return False
        key = (offer.history, offer.round)
        was_loaded = self.restored == key
        if replica.plan.mode == GOSSIP and not was_loaded and offer.history != donor.history:
            return False  # digests differ among replicas, and prove nothing
        if not was_loaded and not await self._load(offer, offer.round, replica, exchanges):
            return False
        if replica.plan.mode != GOSSIP and replica.digests != donor.digests:
            await exchanges.forget_state()
            return False
        await replica.transitions.open_round(donor.round, is_whole=True)
        self._loaded_errors = None  # there has been no exchange since: they hold
        if was_loaded or replica.plan.mode == GOSSIP:
            exchanges.states.restored(replica.optimizer.owned())
        else:  # others own the shards by now
            self.restored = None
            await exchanges.forget_state()
        log.info("stage %d: goes on with its own steps of round %d", replica.index, offer.round)
        return True

    async def _open(
        self, offer: Restorable, round_index: int, replica: Replica, exchanges: Exchanges
    ) -> None:
        key = (offer.history, offer.round)
        loaded = self.restored == key and replica.round == round_index
        if loaded or await self._load(offer, round_index, replica, exchanges):
            await replica.transitions.open_round(round_index, is_whole=True)

    async def _load(
        self, offer: Restorable, round_index: int, replica: Replica, exchanges: Exchanges
    ) -> bool:
        """Puts a checkpoint into the replica, which then is at the beginning of `round_index`, but
        not open. A checkpoint that cannot be loaded is no longer offered."""
        disk = self.disk
        assert disk is not None
        try:
            snapshot = await disk.worker.run(lambda: disk.checkpoints.load(offer.round))
            if snapshot.stage != replica.index:
                raise UserError(f"round {offer.round}: of stage {snapshot.stage} by now")
            await replica.worker.run(lambda: _put(snapshot, replica, exchanges.work))
        except (SwarmnetError, OSError) as e:
            log.warning("a checkpoint cannot be used: %s", e)
            self._offers = [o for o in self._offers if o != offer]
            self._damaged = True
            # Some of it may be in the replica already, in place of what was loaded before.
            await exchanges.forget_state()
            await exchanges.work.contributions_lost(range(replica.num_shards))
            self._unload(self.offers(replica.index))
            return False
        await replica.transitions.open_round(round_index, is_whole=False)
        exchanges.states.restored(sorted(snapshot.optimizer))
        await replica.measure_digests()
        self.restored = (snapshot.history, snapshot.round)
        self._loaded_errors = snapshot.history, replica.digests
        return True

    def _unload(self, offers: tuple[Restorable, ...]) -> None:
        """Nothing is loaded any more, and these are offered."""
        loaded = {"round": 0, "digests": b"", "holds": b""} if self.restored is not None else {}
        self.restored = None
        self.gossip.update(restorable=offers, urgent=True, **loaded)


def _put(snapshot: Snapshot, replica: Replica, work: ShardWork) -> None:
    """On the worker: the parameters beside the present ones, the moments in place of all others,
    and so what coding has lost. Moments first: those that do not fit are found before anything is
    put aside."""
    local = replica.local if snapshot.own_steps else None
    for j in replica.optimizer.owned():
        replica.optimizer.drop(j)
    for j, (values, arrays) in sorted(snapshot.optimizer.items()):
        replica.optimizer.load(j, values, arrays)
    work.load_errors(snapshot.errors)
    if local is not None:
        for j, own in enumerate(snapshot.own_steps):
            local.load(j, *own.moments)
    for j, parameters in enumerate(snapshot.parameters):
        replica.put_common(j, parameters)
    if local is not None:
        for j, own in enumerate(snapshot.own_steps):
            replica.stage.stage_parameters(j, own.parameters)
            local.tokens[j] = own.tokens


def _is_same(replica: Replica, before: int, now: int) -> bool:
    """Replicas that make steps of their own had no exchange between the beginnings of two
    rounds."""
    last = replica.plan.last_exchange
    return all(last(j, before) == last(j, now) for j in range(replica.num_shards))


def _offer(saved: Saved) -> Restorable:
    holds = bitmap(list(saved.held), saved.num_shards)
    return Restorable(saved.round, saved.stage, saved.num_shards, holds, saved.history)
