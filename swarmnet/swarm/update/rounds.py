"""Rounds at one replica: open, drained, settled, averaged, the next one.

There is no coordinator. A replica closes its round when its view says that the round is drained
(`protocol.pipeline.progress`), settles the microbatches that it was never told to count, takes part
in the update of its stage, and opens the next round. All do so at the same round number. The phases
that it passes through are the table in `protocol.update.replica_phase`."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from swarmnet.errors import Busy, NotReady, SwarmnetError, TransportError
from swarmnet.methods.microbatch import COMMITTED as ASK_COMMITTED
from swarmnet.methods.microbatch import Commit, CommittedReply, CommittedRequest
from swarmnet.plurals import counted
from swarmnet.ports import BACKWARD
from swarmnet.protocol.membership.failure_detector import ALIVE
from swarmnet.protocol.pipeline import orphans, progress
from swarmnet.protocol.pipeline.contests import Holders
from swarmnet.protocol.pipeline.ledger import COMMITTED, Entry
from swarmnet.protocol.pipeline.orphans import GoneFeeders, Question
from swarmnet.protocol.sync_modes import GOSSIP
from swarmnet.protocol.update import divergence, round_end
from swarmnet.protocol.update.lost_samples import LostSamples
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.feeder import Feeder
from swarmnet.swarm.pipeline.step import StepService
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S
from swarmnet.swarm.update.exchange.calls import Contribution
from swarmnet.swarm.update.exchanges import Diverged, Exchanges
from swarmnet.swarm.update.handover import Handover
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.rounds")


class Updates(Protocol):
    """Uses of a round's gradient: one class for each `[sync] mode`."""

    @property
    def is_owing(self) -> bool:
        """Work of this replica is not in the common parameters yet, though its round is over."""

    def is_ready_ahead(self, round_index: int) -> bool:
        """The parameters of the round after this one are here, and the microbatches of this one do
        not change them."""

    def attend(self) -> None:
        """Called while a round is open, often: sees to exchanges that run beside it."""

    def repair(self) -> None:
        """A part of `attend`, which is called too while the device is waited for: sees to shards
        that have lost an owner."""

    async def make(self, round_index: int, num_tokens: int) -> bool:
        """The round is over, `num_tokens` are behind the gradient: puts the parameters of the next
        round aside. True where these are whole, False where a newcomer lacks some. Raises
        `Behind`."""

    def finish_round(self, round_index: int) -> None:
        """The next round has been opened."""

    async def close(self) -> None:
        """Ends what is under way; the replica is about to stop, or to begin anew."""


@dataclass
class ZeroUpdates:
    """`[sync] mode = "zero"`: the exchange lies between two rounds."""

    replica: Replica
    exchanges: Exchanges
    handover: Handover
    is_owing = False

    def is_ready_ahead(self, round_index: int) -> bool:
        return False

    def attend(self) -> None:
        self.repair()

    def repair(self) -> None:
        if self.replica.synced:
            self.exchanges.ownership.repair(self.exchanges.current)

    async def make(self, round_index: int, num_tokens: int) -> bool:
        gradient = await self.replica.gradient() if num_tokens else ()
        tokens, shards = await self.handover.contribution(round_index, num_tokens, gradient)

        async def part(j: int) -> Contribution:
            return tokens, shards[j] if tokens else None

        await self.exchanges.make(part)
        return True

    def finish_round(self, round_index: int) -> None:
        replica = self.replica
        replica.counted(self.exchanges.books.samples_in(round_index, replica.samples))
        self.exchanges.finish_round(round_index)

    async def close(self) -> None:
        pass


@dataclass
class Rounds:
    """Drives one replica from round to round."""

    gossip: Gossip
    settings: RunSettings
    limits: WaitLimits
    replica: Replica
    steps: StepService
    updates: Updates
    feeder: Feeder | None
    lost: LostSamples

    def __post_init__(self) -> None:
        self._busy_s = 0.0
        self._finished: int | None = None
        """A round that is over here, while the others do not know yet that the next one has begun
        here."""
        self.replica.measured.serving(asyncio.get_running_loop().time())
        self._settling = asyncio.Lock()
        self._tasks = Tasks("rounds")
        self._is_closed = False
        self._gone = GoneFeeders()
        self._holders = Holders()

    async def until_next(self) -> bool:
        """Returns when the next round has begun here, for the caller to announce it (`announced`);
        False where the run has done its rounds. Raises `Behind` when this replica lost touch with
        its stage, `Diverged` when it has parameters that do not hold."""
        while self.replica.round < self.settings.rounds:
            r = self.replica.round
            self.updates.attend()
            self._look_for_holders(r)
            self._check_parameters(r)
            if not self.is_drained(r):
                if self._may_open_ahead(r):
                    await self._open_ahead()
                await self.gossip.changed.wait(LOOK_AGAIN_S)
                continue
            if await self.finish(r):
                return True
        return False

    async def _open_ahead(self) -> None:
        """Behind all that the worker has to do, which may take long."""
        opening = asyncio.get_running_loop().create_task(self.replica.transitions.open_ahead())
        try:
            while not opening.done():
                self.updates.repair()
                await asyncio.wait((opening,), timeout=LOOK_AGAIN_S)
            await opening
            self.gossip.changed.notify_all()  # the feeder may launch
        except MemoryError as e:
            log.warning("no memory for two rounds at a time, so they follow each other here: %s", e)
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

    def _may_open_ahead(self, r: int) -> bool:
        """All of the round is launched, or this replica has nothing more of it to launch while some
        of many other feeders have, and the next one's parameters are here."""
        replica, view, settings = self.replica, self.gossip.view, self.settings
        if not round_end.may_open_ahead(replica.phase, self.gossip.own, r, settings.rounds):
            return False
        if not (replica.stage.can_open_ahead and self.updates.is_ready_ahead(r)):
            return False
        if self.feeder is not None and self.feeder.leaves_to_others(r):
            return True
        now = asyncio.get_running_loop().time()
        return round_end.is_fed(view, replica.phase, r, now, settings.slots.of(r))

    def _look_for_holders(self, r: int) -> None:
        now, view = asyncio.get_running_loop().time(), self.gossip.view
        stages, num_slots = range(self.settings.num_stages), self.settings.slots.of(r)
        self._holders.look(r, progress.held(view, r, now, num_slots, stages), now)
        resting, are_unknown_resting = self._holders.resting(now)
        view.await_all_but(resting, is_unknown_heard=not are_unknown_resting)

    def _judge_commits(self, r: int, now: float) -> None:
        known, unknown = progress.committed_by(self.gossip.view, r, now)
        is_lost = self.lost.has_lost_most(r, self.replica.plan, now)
        self._holders.ended(known, unknown, now, is_lost=is_lost)

    def is_drained(self, r: int) -> bool:
        """True where the round is to be ended here (`round_end.is_over`)."""
        now, num_slots = asyncio.get_running_loop().time(), self.settings.slots.of(r)
        return round_end.is_over(self.gossip.view, self.replica.phase, r, now, num_slots)

    def _check_parameters(self, r: int) -> None:
        """After a partition, or where two began a run without knowing of each other, replicas may
        be in one round with different parameters; in mode `local`, with different common ones. In
        `gossip` they differ on purpose. Names are free, and anybody can repeat what others publish:
        so where any of the others are known, only those count (`View.known`)."""
        if self.replica.plan.mode == GOSSIP:
            return
        now = asyncio.get_running_loop().time()
        own = self.gossip.own
        if own.round != r:
            return
        view = self.gossip.view
        known = view.known(self.replica.index, now)
        others = [o for o in known if o.is_replica and o.peer_id != own.peer_id]
        winner = divergence.winner_over(own, others, view.agreement)
        if winner is not None:
            raise Diverged(
                f"{winner.peer_id[-8:]} began round {r} with other parameters, and those hold"
            )

    async def finish(self, r: int) -> bool:
        """Settles, averages, opens the next round. False where this replica lacks a part of its
        parameters: then there is nothing to announce."""
        replica = self.replica
        loop = asyncio.get_running_loop()
        replica.measured.closed(loop.time())
        now = loop.time()
        await replica.transitions.close_round()
        self.steps.drop_round(r)
        if replica.synced:
            await self._settle_at_last(r)
        num_tokens = replica.ledger.num_tokens(r) if replica.synced else 0
        replica.measured.settled(loop.time())
        synced = await self.updates.make(r, num_tokens)
        now = loop.time()
        replica.measured.averaged(now)
        self._judge_commits(r, now)
        state = progress.round_progress(self.gossip.view, r, now, self.settings.slots.of(r))
        replica.counted(state.committed * self.settings.samples_per_microbatch)
        await replica.transitions.open_round(r + 1, is_whole=synced)
        if synced:
            # Its digests are made beside the first passes: the feeder need not wait for them.
            self.gossip.changed.notify_all()
        self.updates.finish_round(r)
        self._finished = r
        if not synced:
            self.announced()
        return synced

    def announced(self) -> None:
        """The others know of the round that has begun here, where one has after another."""
        now = asyncio.get_running_loop().time()
        if self._finished is None:
            return
        device = self.replica.device
        times = self.replica.measured.opened(now)
        log.debug(
            "round %d: open for %.3f s, device at work for %.3f s; settled in %.3f s, averaged in "
            "%.3f s, the next one open after %.3f s",
            self._finished,
            times.open_s,
            device.busy_s - self._busy_s,
            times.settling_s,
            times.averaging_s,
            times.opening_s,
        )
        self._busy_s = device.busy_s
        self._finished = None

    # ---- orphans ----------------------------------------------------------------------------

    async def settle(self, r: int, *, is_over: bool = True) -> None:
        """Asks the feeders about microbatches that no commit came for; retracts those that do not
        count, so that no sample is counted twice at a stage. In a round that is not over here,
        those in flight may count yet, and stay."""
        # A task of its own: the caller may be cancelled, and what is out of the books must come
        # out of the gradient.
        await asyncio.shield(self._tasks.start(self._settle_alone(r, is_over)))

    def settle_early(self, r: int) -> None:
        """In the middle of a round: a feeder that has moved, say, has given up a flight that waits
        here for its commit, and keeps that of another feeder out."""
        if not self._is_closed and not self.is_settling and self.replica.takes(r):
            self._tasks.start(self._settle_soon(r))

    async def _settle_soon(self, r: int) -> None:
        try:
            await self._settle_alone(r, is_over=False)
        except SwarmnetError as e:  # it is asked for again
            log.debug("round %d: not settled in its middle: %s", r, e)

    async def _settle_at_last(self, r: int) -> None:
        """The round is over here; the device may have more to do than its queue holds."""
        while True:
            try:
                return await self.settle(r)
            except Busy:
                await asyncio.sleep(LOOK_AGAIN_S)

    @property
    def is_settling(self) -> bool:
        """Books and gradient may differ."""
        return self._settling.locked()

    async def close(self) -> None:
        """Ends what is under way: the replica is about to stop."""
        self._is_closed = True
        await self._tasks.close()

    async def _settle_alone(self, r: int, is_over: bool) -> None:
        async with self._settling:
            await self._settle(r, is_over)

    async def _settle(self, r: int, is_over: bool) -> None:
        ledger = self.replica.ledger
        pending = ledger.pending(r)
        by_feeder: dict[str, list[int]] = {}
        for entry in pending:
            by_feeder.setdefault(entry.feeder, []).append(entry.key[1])
        answers = await asyncio.gather(
            *(
                self._ask(f, CommittedRequest(r, self.replica.index, tuple(ids), is_over))
                for f, ids in by_feeder.items()
            )
        )
        counted = {i for answer in answers for i in answer.microbatch_ids}
        in_flight = {i for answer in answers for i in answer.in_flight}
        for entry in pending:
            key = entry.key
            if not is_over and not self.replica.takes(r):
                return  # it is over now, and asked about again; or it does not hold
            if ledger.get(key) is not entry or entry.state == COMMITTED:
                continue  # given away, or a commit came meanwhile
            match orphans.fate(key[1], counted, in_flight, is_over=is_over):
                case orphans.COUNTS:
                    self.steps.commit(Commit(r, (key[1],)), entry.feeder)
                case orphans.NEVER_COUNTS:
                    await self._retract(entry)

    async def _retract(self, entry: Entry) -> None:
        """Its gradient out of the buffer again."""
        key, replica = entry.key, self.replica

        def still_holds() -> None:
            if not replica.synced:
                raise NotReady("the gradient is of no use any more")

        # First here: a commit, or a caller, that comes now must not find it.
        replica.ledger.retracted(key)
        self.steps.flights.forget(key)
        try:
            await replica.device.run(
                BACKWARD, lambda: replica.stage.retract(key), key[0], still_holds
            )
        except Busy:
            replica.ledger.put_back(key[0], {key[1]: entry})
            raise
        except SwarmnetError:
            raise
        except Exception as e:  # of the device: the stage has made the whole sum one of no use
            log.warning("round %d: a microbatch could not be taken out: %s", key[0], e)
            return
        self.gossip.add_total("retracted")

    async def _ask(self, feeder: str, question: CommittedRequest) -> CommittedReply:
        """Which of these count, by the word of their feeder; none where it is gone."""
        own = self.gossip.own.peer_id
        if feeder == own:
            nothing = CommittedReply(())
            return nothing if self.feeder is None else self.feeder.committed(question, own)
        liveness, is_over = self.gossip.liveness, question.is_over
        asked = Question(
            liveness.awake_s(),
            self.limits.commit_question_s,
            is_over=is_over,
            look_again_s=LOOK_AGAIN_S,
        )
        while True:
            try:
                reply = await liveness.call_while_live(
                    feeder,
                    ASK_COMMITTED,
                    Message(question),
                    timeout_s=asked.left_s(liveness.awake_s()),
                )
                return reply.body
            except SwarmnetError as e:
                log.debug("feeder %s does not say what it committed: %s", feeder[-8:], e)
                # A channel that breaks is opened again: what counts is not retracted for that.
                may_answer = isinstance(e, TransportError | Busy)
            if asked.must_look(liveness.awake_s()):
                await liveness.look_into([feeder])
                asked.looked(liveness.awake_s(), LOOK_LESS_S)
            now, state = liveness.awake_s(), liveness.state_of(feeder)
            if not asked.goes_on(now, state, LOOK_LESS_S, may_answer=may_answer):
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        is_live = state is ALIVE
        if is_over and is_live:
            log.warning(
                "round %d: feeder %s lives and does not say what it counted; taken out: %s",
                question.round,
                feeder[-8:],
                counted(len(question.microbatch_ids), "microbatch"),
            )
        if is_over or self._gone.is_gone(feeder, is_live=is_live, is_known=self.gossip.view.get):
            return CommittedReply(())
        return CommittedReply((), question.microbatch_ids)
