"""The feeder: launches slots of a round, counts those that returned, and seals its part of it.

What it publishes is its part of the round's progress (`protocol.pipeline.progress`). A flight of a
slot is a microbatch with an id of its own (`protocol.slots`): no two flights have the
same, and a restarted feeder does not repeat itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmnet.errors import DataError, NoRoute, ProtocolViolation, Refused, Stale, Taken
from swarmnet.methods.microbatch import (
    COMMIT,
    COMMITTED,
    Commit,
    CommittedReply,
    CommittedRequest,
    StepReply,
    StepRequest,
)
from swarmnet.plurals import counted
from swarmnet.ports import Data
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import RoundCount
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.pipeline import feeding, progress
from swarmnet.protocol.pipeline.feeding import REST_S
from swarmnet.protocol.pipeline.launching import FeederView
from swarmnet.protocol.slots import SlotSet, flight_id, slot_of
from swarmnet.swarm.calls import notify, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.dispatcher import Dispatcher
from swarmnet.swarm.pipeline.fed_rounds import FedRound, FedRounds
from swarmnet.swarm.pipeline.flights import Track
from swarmnet.swarm.pipeline.held_out import HeldOutLoss
from swarmnet.swarm.pipeline.receipts import check_reply, hash_of, hash_of_targets, launch_of
from swarmnet.swarm.pipeline.step import StepService, check_tokens
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.feeder")

IDS_SIGNED_AS = b"swarmnet microbatch ids\n"
"""Its signature is the secret behind a feeder's microbatch ids, and is told to nobody."""


class Journal:
    """Where a feeder puts on record what counts; this one keeps nothing of it."""

    def slot_counted(self, history: int, round_index: int, slot: int) -> None:
        """A slot counts, as of now. `history`: of the run (see `Record.history`)."""

    def round_counted(self, round_index: int, paths: Mapping[int, tuple[str, ...]]) -> None:
        """Microbatches of this feeder that a round counted, with their paths: when it is over, and
        when this peer leaves, pauses or moves in the middle of it, then of the rest. By microbatch
        id, ascending."""

    def renamed(self, old: int, new: int) -> None:
        """The run's history turns out to have another name."""


@dataclass
class Feeder:
    """Feeds the own replica's round whenever the view says that this peer is a feeder."""

    gossip: Gossip
    dispatcher: Dispatcher
    steps: StepService
    settings: RunSettings
    limits: WaitLimits
    data: Data
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self) -> None:
        self.transport = self.gossip.transport
        self.num_completed = 0
        """Microbatches of its own that have counted."""
        self.rounds = FedRounds(self.settings.num_stages)
        self._held_out = HeldOutLoss(self.gossip, self.dispatcher, self.data, self.settings)
        self._rest = feeding.Rest()
        self._secret = self.gossip.signer.sign(IDS_SIGNED_AS)
        serve(self.transport, COMMITTED, self._on_committed)

    @property
    def num_in_flight(self) -> int:
        """Microbatches of its own that have not returned."""
        return sum(len(mine.in_flight) for mine in self.rounds)

    async def run(self, replica: Replica) -> None:
        """Feeds until cancelled."""
        try:
            while True:
                self._wake()
                for over in await self.rounds.end_others(replica.round):
                    self._record(over)
                    self._name_doubled(over.round)
                for r in (replica.round, replica.round + 1):
                    if replica.takes(r):
                        self._feed(replica, self.rounds.begin(r))
                for mine in self.rounds:
                    if not replica.takes(mine.round):  # perhaps fetched again: others go on
                        self._maybe_seal(mine, feeds=False)
                await self.gossip.changed.wait(
                    LOOK_AGAIN_S if self.gossip.is_small else LOOK_LESS_S
                )
        finally:
            await self.rounds.end_all()
            self.write_off()

    def leave(self) -> None:
        """This peer, or its stage, goes while rounds go on: tells what they have counted of its
        microbatches."""
        for mine in self.rounds.kept():
            self._record(mine)

    def leaves_to_others(self, round_index: int) -> bool:
        """Whether this peer, one of many feeders, has launched its part of a round, and what is
        missing is on its way: said of rounds that it has begun to feed."""
        mine = self.rounds.get_open(round_index)
        if mine is None:
            return False
        return self._now_known(round_index).leaves_to_others(mine.launches)

    def committed(self, question: CommittedRequest, asker: str) -> CommittedReply:
        """As `FedRounds.committed`."""
        return self.rounds.committed(question, asker)

    def write_off(self) -> None:
        """This peer feeds no more for now: what it launched and did not commit is lost, and counts
        as never launched, as if it were gone."""
        for count in self.gossip.own.counts:
            if not count.sealed:
                self.gossip.update_count(replace(count, launched=_counted(count), sealed=True))

    def _record(self, mine: FedRound) -> None:
        """What a round counted, as far as that is not on record yet."""
        paths = mine.news()
        if paths:
            self.journal.round_counted(mine.round, paths)

    def _name_doubled(self, r: int) -> None:
        """Says which slots of a round are in its update twice. Of the live feeders that counted one
        the first by id says so, else the first of all."""
        view, now = self.gossip.view, asyncio.get_running_loop().time()
        own = []
        for slot, by in progress.doubled(view, r, now).items():
            live = [p for p in by if view.is_live(p, now)] or assignment.feeders(view, now)
            if live[:1] == [self.gossip.own.peer_id]:
                own.append(slot)
        if own:
            self.gossip.add_total("slots_doubled", len(own))
            named = ", ".join(map(str, own))
            log.warning("round %d: slots that two feeders counted: %s", r, named)

    # ---- launching --------------------------------------------------------------------------

    def _feed(self, replica: Replica, mine: FedRound) -> None:
        feeds = self._now_known(mine.round).is_feeder()
        if feeds:
            self._held_out.measure_if_due(mine, is_ahead=mine.round > replica.round)
            self._launch(replica, mine)
        self._maybe_seal(mine, feeds)

    def _launch(self, replica: Replica, mine: FedRound) -> None:
        """Starts as many microbatches as the round still needs of this feeder. Those of a round
        ahead never keep one of the present round from its start."""
        before = [m for m in self.rounds if m.round < mine.round]
        if mine.round >= self.settings.end:
            return
        if any(self._next_slot(m) is not None for m in before):
            return
        older = sum(len(m.in_flight) for m in before)
        window = self._window(mine.round)
        window = min(window, older + len(mine.in_flight) + self._room(replica, mine.round))
        own = self.gossip.own
        while older + len(mine.in_flight) < window:
            slot = self._next_slot(mine)
            if slot is None:
                return
            count, n = self.gossip.own.count(mine.round), mine.next_number()
            the_id = flight_id(
                own.run_id, own.peer_id, own.incarnation, mine.round, n, slot, self._secret
            )
            mine.launched(the_id, asyncio.get_running_loop().time())
            launched = count.launched.with_slot(slot)
            self.gossip.update_count(replace(count, launched=launched, sealed=False))
            mine.flights.start(self._fly(replica, mine, the_id))

    def _now_known(self, round_index: int) -> FeederView:
        """What this peer may decide of a round by now."""
        gossip = self.gossip
        return FeederView(
            gossip.view,
            gossip.own,
            asyncio.get_running_loop().time(),
            gossip.spread_s,
            gossip.is_small,
            self.settings.slots.of(round_index),
        )

    def _next_slot(self, mine: FedRound) -> int | None:
        return self._now_known(mine.round).next_slot(mine.launches, self.limits.patience_s)

    def _window(self, round_index: int) -> int:
        """Microbatches that it keeps in flight."""
        if self.settings.max_in_flight:
            return self.settings.max_in_flight
        shares = self.dispatcher.shares(0)
        num_stages = self.settings.num_stages
        return self._now_known(round_index).window(num_stages, self.num_completed, shares=shares)

    def _room(self, replica: Replica, round_index: int) -> int:
        """Microbatches to launch now. Among many feeders, one whose own device or uplink has enough
        to do leaves the rest to others."""
        if replica.index != 0 or not self._serves_itself(round_index):
            return self._window(round_index)
        return feeding.send_window_room(
            self.limits.max_waiting_forwards * (2 if replica.service_s else 1),
            replica.device.num_waiting,
            queued_bytes=self.transport.traffic.queued_bytes(),
            sent_bytes=replica.measured.sent_bytes,
        )

    def _serves_itself(self, round_index: int) -> bool:
        return self._now_known(round_index).serves_itself(shares=self.dispatcher.shares(0))

    def _maybe_seal(self, mine: FedRound, feeds: bool) -> None:
        """Says that this feeder is done with the round, or that it is not after all."""
        if mine.round >= self.settings.end or not mine.has_begun:
            return
        now = asyncio.get_running_loop().time()
        count = self.gossip.own.count(mine.round)
        view, num_slots = self.gossip.view, self.settings.slots.of(mine.round)
        idle = not mine.in_flight and self._held_out.measuring is not mine
        sealed = idle and (not feeds or progress.is_launched(view, mine.round, now, num_slots))
        if sealed != count.sealed:
            # A feeder that feeds no more will not launch again what did not come back: others do.
            launched = count.launched if feeds else _counted(count)
            self.gossip.update_count(replace(count, launched=launched, sealed=sealed), urgent=True)

    # ---- one microbatch ---------------------------------------------------------------------

    async def _fly(self, replica: Replica, mine: FedRound, the_id: int) -> None:
        """One microbatch, there and back, tried until it counts or the round is over."""
        try:
            await self._try_until_it_counts(replica, mine, the_id)
        except (Refused, DataError, OSError) as e:
            self._given_up(mine, slot_of(the_id), e)
        except Exception as e:
            log.exception("round %d: a microbatch failed", mine.round)
            self._given_up(mine, slot_of(the_id), e)
        finally:
            mine.returned(the_id)
            self.gossip.changed.notify_all()

    async def _try_until_it_counts(self, replica: Replica, mine: FedRound, the_id: int) -> None:
        own, slot = self.gossip.own, slot_of(the_id)
        indices = self.settings.samples_of(mine.round, slot, self.data.num_samples)
        batch = self.data.microbatch(indices)
        request = StepRequest(
            round=mine.round,
            microbatch_id=the_id,
            stage=0,
            feeder=own.peer_id,
            num_samples=self.settings.samples_per_microbatch,
            documents=batch.documents,
        )
        track = Track()
        about = (mine.round, the_id, 0)
        hashes = hash_of(batch.inputs), hash_of_targets(batch.targets, batch.documents)
        said = launch_of(request, own.run_id, hashes[1])
        request = replace(request, launch=self.gossip.signer.sign(said.signed))

        def accept(reply: StepReply, returned: tuple[Array, ...]) -> None:
            _accept(reply, returned)
            check_tokens(reply, batch.targets)
            check_reply(reply, about, *hashes, is_hinted=False)

        while replica.round <= mine.round:
            try:
                passed = await self.dispatcher.step(
                    replace(request, hint=track.path),
                    batch.arrays,
                    accept=accept,
                    track=track,
                    prefer_self=self._does_own(replica, mine.round, batch.arrays),
                    waits_here=own.stage == 0 and self._serves_itself(mine.round),
                )
            except Stale as e:
                theirs = e.details.get("round")
                if isinstance(theirs, int) and theirs > mine.round:
                    if await self._is_over(replica, mine.round):
                        return  # the others finished the round without it: it never counts
                    track = Track()  # so one replica says: not there again
                elif await self._is_without_it(replica, mine, slot, theirs):
                    return
            except Taken as e:
                await self._meets_another(mine, slot, is_counted=e.details.get("counted") is True)
                return
            except NoRoute as e:
                log.info("round %d: a microbatch found no way: %s", mine.round, e)
                await self.gossip.changed.wait(LOOK_AGAIN_S)
            else:
                self._rest.accepted()
                assert passed.reply.receipt is not None
                self.steps.audits.returned(
                    request, (batch.inputs, batch.targets), passed, passed.reply.receipt
                )
                is_refused = mine.is_refused(the_id, passed.reply.path)
                view, now = self.gossip.view, asyncio.get_running_loop().time()
                if progress.is_committed_elsewhere(view, mine.round, slot, own.peer_id, now):
                    self._never_launched(mine, slot)
                elif not is_refused:
                    self._committed(mine, the_id, passed.reply)
                elif not await self._is_over(replica, mine.round):
                    self._never_launched(mine, slot)  # another flight takes its place
                return

    def _does_own(self, replica: Replica, round_index: int, arrays: Sequence[Array]) -> bool:
        num_bytes = sum(a.num_bytes for a in arrays)
        return self._now_known(round_index).does_own(
            wait_s=replica.device.num_waiting * replica.service_s,
            upload_s=self.transport.traffic.upload_s(num_bytes),
        )

    async def _is_without_it(
        self, replica: Replica, mine: FedRound, slot: int, theirs: object
    ) -> bool:
        """A replica that is in round `theirs` does not take the microbatch: whether the round ends
        without it."""
        await self.gossip.changed.wait(LOOK_AGAIN_S)
        if replica.is_closed(mine.round):
            return True
        if theirs == mine.round and replica.takes(mine.round):
            # Others have closed it, and wait for this peer's stage: they suspected a feeder, or
            # this one did, and there are enough microbatches without this one.
            await asyncio.sleep(LOOK_AGAIN_S)
            self._never_launched(mine, slot)
            return True
        # Not open, not closed: it is fetching the round's parameters, and opens it again. A flight
        # given up here would be launched and never committed.
        return False

    async def _is_over(self, replica: Replica, r: int) -> bool:
        """One replica says that a round is over: is it, by what this one knows, or hears within the
        time that news take? One alone must not end a round, nor keep it from its end."""
        loop, view = asyncio.get_running_loop(), self.gossip.view
        end = Deadline.after(loop.time(), max(LOOK_AGAIN_S, self.gossip.spread_s))
        while not (is_over := replica.is_closed(r) or view.is_past(r, loop.time())):
            if end.is_over(loop.time()):
                break
            await self.gossip.changed.wait(end.left_s(loop.time()))
        return is_over

    async def _meets_another(self, mine: FedRound, slot: int, *, is_counted: bool) -> None:
        """Another flight of the slot is where this one came, or was, and counts: this one does
        not. What it has left in gradients is retracted, since it is never committed."""
        log.info("round %d: slot %d is in flight twice; one flight ends", mine.round, slot)
        if is_counted:
            count = self.gossip.own.count(mine.round)
            settled = count.settled.with_slot(slot)
            self.gossip.update_count(replace(count, settled=settled), urgent=True)
            return
        # Not launched again before the other feeder's record has had the time to come.
        await asyncio.sleep(max(LOOK_AGAIN_S, self.gossip.spread_s))
        self._never_launched(mine, slot)

    def _never_launched(self, mine: FedRound, slot: int) -> None:
        """One microbatch less."""
        count = self.gossip.own.count(mine.round)
        if slot not in _counted(count):
            launched = count.launched.without(slot)
            self.gossip.update_count(replace(count, launched=launched), urgent=True)

    def _given_up(self, mine: FedRound, slot: int, why: Exception) -> None:
        """A microbatch that cannot be read, or that every replica finds wrong, is as never
        launched; after several in a row this peer rests, and others launch its part."""
        log.info("round %d: a flight of slot %d is given up: %s", mine.round, slot, why)
        self._never_launched(mine, slot)
        feeds = self.gossip.own.has_data
        if self._rest.refused(asyncio.get_running_loop().time(), feeds=feeds):
            log.warning(
                "this peer feeds no more for %.0f s: others refused the last %s that it launched "
                "(%s). Compare its data and tokenizer with the run's. It goes on serving.",
                REST_S,
                counted(self._rest.num_refused, "microbatch"),
                why,
            )
            self.gossip.update(has_data=False, urgent=True)

    def _wake(self) -> None:
        """After its rest, the feeder tries its data again."""
        if self._rest.ends(asyncio.get_running_loop().time()):
            self.gossip.update(has_data=True, urgent=True)

    def _committed(self, mine: FedRound, the_id: int, reply: StepReply) -> None:
        """The whole gradient is there: the microbatch counts, and its path hears so."""
        slot = slot_of(the_id)
        count = self.gossip.own.count(mine.round)
        counted = replace(
            count,
            launched=count.launched.with_slot(slot),  # forgotten where another history holds
            committed=count.committed.with_slot(slot),
            tokens=count.tokens + reply.num_tokens,
            loss_sum=count.loss_sum + reply.loss_sum,
        )
        mine.counts(the_id, reply.path)
        self.num_completed += 1
        self.journal.slot_counted(self.gossip.own.history, mine.round, slot)
        commit, own = Commit(mine.round, (the_id,)), self.gossip.own.peer_id
        # From one to the next it reaches all, but comes to the later ones after the news that the
        # round is over: where a channel is open, they hear it from here too, and before the news.
        near = self.transport.connected()
        for i, peer_id in enumerate(reply.path):
            if peer_id != own and (i == 0 or machine_of(peer_id) in near):
                notify(self.transport, peer_id, COMMIT, Message(commit))
        self.gossip.update_count(counted)
        if own in reply.path:
            self.steps.commit(commit, own)

    async def _on_committed(self, request: Request[CommittedRequest]) -> Message[CommittedReply]:
        """A replica asks about microbatches that it was never told to count."""
        question = request.message.body
        return Message(self.committed(question, request.remote))


def _counted(count: RoundCount) -> SlotSet:
    """Slots that need no flight of this feeder any more."""
    return SlotSet.of(count.committed.mask | count.settled.mask)


def _accept(reply: StepReply, arrays: tuple[Array, ...]) -> None:
    if arrays:
        raise ProtocolViolation("stage 0 returned a gradient of its inputs")
    if not reply.path:
        raise ProtocolViolation("a step's reply without its path")
