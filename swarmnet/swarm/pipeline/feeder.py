"""The feeder: starts microbatches, counts those that came back, and seals its part of a round.

Its counters are its part of the round's progress (`protocol.pipeline.progress`). A microbatch id
is a hash of (run, feeder, incarnation, round, n): no two feeders ever draw the same one, and a
restarted feeder does not repeat itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from swarmnet.errors import DataError, NoRoute, ProtocolViolation, Refused, Stale, SwarmnetError
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import ACTIVE, HeldOut, RoundCount
from swarmnet.protocol.pipeline import feeding, progress
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import (
    EVALUATE,
    Commit,
    CommittedReply,
    CommittedRequest,
    InferReply,
    InferRequest,
    StepReply,
    StepRequest,
)
from swarmnet.swarm.pipeline.infer import infer_through
from swarmnet.swarm.pipeline.step import StepService, check_tokens
from swarmnet.swarm.pipeline.wiring import Wiring
from swarmnet.swarm.ports import Data
from swarmnet.swarm.settings import Limits, RunSettings
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.replica import Replica
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message, convert

log = logging.getLogger("swarmnet.feeder")

LOOK_AGAIN_S, LOOK_LESS_S = 0.2, 1.0
"""The second in a large swarm."""
KEPT_COMMITS = 4
"""Rounds whose committed microbatches a feeder can still be asked about."""
MAX_REFUSED = 8
"""Microbatches that stage 0 refuses one after the other before a feeder takes its data for unusable
and rests."""
REST_S = 300.0


def microbatch_id(run_id: str, peer_id: str, incarnation: int, round_index: int, n: int) -> int:
    """63 bits that no other (run, feeder, incarnation, round, n) gives."""
    text = f"{run_id}|{peer_id}|{incarnation}|{round_index}|{n}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass
class RoundOfFeeder:
    """What a feeder did in one round."""

    round: int
    next_n: int = 0
    committed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Path of every microbatch that counts, by microbatch id."""
    refused: dict[int, set[tuple[int, str]]] = field(default_factory=dict)
    """Asked about while in flight by replicas of a stage whose round is closed: they will not count
    it. By microbatch."""
    in_flight: set[int] = field(default_factory=set)
    """Microbatch ids."""
    began_at: float = 0.0
    launched_at: float = 0.0
    """When it launched the newest one."""
    heard: int = 0
    """Samples that others have launched, and since when they have been so many."""
    heard_at: float = 0.0
    told: set[int] = field(default_factory=set)
    """Microbatches that `on_round` has heard of."""
    flights: Tasks = field(default_factory=lambda: Tasks("feeder"))

    def is_refused(self, the_id: int, path: tuple[str, ...]) -> bool:
        """By one of those that it went through: nobody else can keep it from being counted."""
        refusals = self.refused.pop(the_id, ())
        return any(s < len(path) and path[s] == asker for s, asker in refusals)


OnRound = Callable[[int, list[int]], None]
OnCommit = Callable[[int, int], None]


@dataclass
class Feeder:
    """Feeds the own replica's round whenever the view says that this peer is a feeder."""

    transport: Transport
    gossip: Gossip
    wiring: Wiring
    steps: StepService
    settings: RunSettings
    limits: Limits
    data: Data
    on_round: OnRound = lambda round_index, ids: None
    """Hears the ids of the microbatches that a round counted: when it is over, and when this peer
    leaves, pauses or moves in the middle of it, then of the rest."""
    on_commit: OnCommit = lambda round_index, the_id: None
    """Hears the id of each microbatch as soon as it counts."""

    def __post_init__(self) -> None:
        self._rounds: dict[int, RoundOfFeeder] = {}
        self._open: list[RoundOfFeeder] = []
        """That are fed: the present one, and the next where that is open ahead."""
        self._evaluated = -1
        self._evaluating = False
        self._refused = 0
        self._num_completed = 0
        """Microbatches of its own that have counted."""
        self._rests_until = 0.0
        self.transport.handle("committed", self._on_committed)

    async def run(self, replica: Replica) -> None:
        """Feeds until cancelled."""
        try:
            while True:
                self.gossip.awake_s()  # after a stall of one's own, nobody is silent
                self._wake()
                await self._close_rounds(replica)
                for r in (replica.round, replica.round + 1):
                    if replica.takes(r):
                        self._feed(replica, self._round(r))
                for mine in self._open:
                    if not replica.takes(mine.round):  # perhaps fetched again: others go on
                        self._maybe_seal(mine, feeds=False)
                await self.gossip.changed.wait(
                    LOOK_AGAIN_S if self.gossip.is_small else LOOK_LESS_S
                )
        finally:
            for mine in self._open:
                await mine.flights.close()
            self._open.clear()
            self.write_off()

    def _round(self, r: int) -> RoundOfFeeder:
        """The books of a round that is open."""
        mine = self._rounds.setdefault(r, RoundOfFeeder(r))
        if mine not in self._open:
            mine.began_at = asyncio.get_running_loop().time()
            self._open.append(mine)
            for old in [k for k in self._rounds if k <= r - KEPT_COMMITS]:
                del self._rounds[old]
        return mine

    async def _close_rounds(self, replica: Replica) -> None:
        """Ends what still flies of rounds that are over, or whose beginning here was taken back."""
        for mine in [m for m in self._open if m.round not in (replica.round, replica.round + 1)]:
            self._open.remove(mine)
            await mine.flights.close()
            if mine.round < replica.round:
                self._tell(mine)

    def leave(self) -> None:
        """This peer, or its stage, goes while rounds go on: tells what they have counted of its
        microbatches."""
        for mine in self._rounds.values():
            self._tell(mine)

    def _tell(self, mine: RoundOfFeeder) -> None:
        new = sorted(mine.committed.keys() - mine.told)
        if new:
            mine.told.update(new)
            self.on_round(mine.round, new)

    def _feed(self, replica: Replica, mine: RoundOfFeeder) -> None:
        feeds = self._is_feeder()
        if feeds:
            if mine.round == replica.round:
                self._maybe_evaluate(replica, mine.flights)
            self._launch(replica, mine)
        self._maybe_seal(mine, feeds)

    def _is_feeder(self) -> bool:
        now = asyncio.get_running_loop().time()
        own = self.gossip.own
        return own.state == ACTIVE and own.peer_id in assignment.feeders(self.gossip.view, now)

    # ---- launching --------------------------------------------------------------------------

    def _launch(self, replica: Replica, mine: RoundOfFeeder) -> None:
        """Starts as many microbatches as the round still needs of this feeder. Those of a round
        ahead never keep one of the present round on the ground."""
        before = [m for m in self._open if m.round < mine.round]
        if mine.round >= self.settings.rounds or any(self._may_launch(m) for m in before):
            return
        older = sum(len(m.in_flight) for m in before)
        window = min(self._window(), older + len(mine.in_flight) + self._room(replica))
        own = self.gossip.own
        while older + len(mine.in_flight) < window and self._may_launch(mine):
            count = self.gossip.own.count(mine.round)
            n, mine.next_n = mine.next_n, mine.next_n + 1
            the_id = microbatch_id(own.run_id, own.peer_id, own.incarnation, mine.round, n)
            mine.in_flight.add(the_id)
            mine.launched_at = asyncio.get_running_loop().time()
            launched = count.launched + self.settings.samples_per_microbatch
            self.gossip.update_count(replace(count, launched=launched, sealed=False))
            mine.flights.start(self._fly(replica, mine, the_id))

    def _window(self) -> int:
        """Microbatches that this feeder keeps in flight."""
        if self.settings.max_in_flight:
            return self.settings.max_in_flight
        now = asyncio.get_running_loop().time()
        view = self.gossip.view
        replicas = sum(len(view.replicas(s, now)) for s in range(self.settings.num_stages))
        feeders = max(1, len(assignment.feeders(view, now)))
        is_small = self.gossip.is_small
        part = 1.0 / feeders if is_small else self._part(feeders, now)
        a_round = -(-self.settings.global_batch // self.settings.samples_per_microbatch)
        asks = self.wiring.shares(0)
        most = feeding.window(replicas, part, a_round, is_small=is_small, asks=asks)
        return feeding.slow_start(most, replicas, part, self._num_completed)

    def _part(self, num_feeders: int, now: float) -> float:
        view, own = self.gossip.view, self.gossip.own
        if own.stage != 0 or self.wiring.shares(0):
            return 1.0 / num_feeders
        rates = view.remembered(
            0,
            "rates of feeders",
            now,
            lambda: [r.samples_per_s for r in view.replicas(0, now) if r.has_data],
        )
        return feeding.part_of_feeder(own.samples_per_s, rates)

    def _serves_itself(self) -> bool:
        """In a large swarm in which most replicas of stage 0 feed, each works on its own data,
        unless the work is so long that whoever is free does it."""
        if self.wiring.shares(0):
            return False
        now = asyncio.get_running_loop().time()
        view = self.gossip.view
        first = len(view.replicas(0, now))
        return not self.gossip.is_small and 2 * len(assignment.feeders(view, now)) > first

    def _room(self, replica: Replica) -> int:
        """Microbatches to launch now. Among many feeders, one whose own device or uplink has enough
        to do leaves the rest to others."""
        most = self.limits.max_waiting_forwards * (2 if replica.service_s else 1)
        if replica.index != 0 or not self._serves_itself():
            return self._window()
        return feeding.send_window_room(
            most,
            replica.device.num_waiting,
            queued_bytes=self.transport.traffic.queued_bytes(),
            sent_bytes=replica.sent_bytes,
        )

    def _may_launch(self, mine: RoundOfFeeder) -> bool:
        round_index = mine.round
        now = asyncio.get_running_loop().time()
        view, batch = self.gossip.view, self.settings.global_batch
        own, feeders = self.gossip.own, assignment.feeders(self.gossip.view, now)
        own_launched = own.count(round_index).launched
        launched_by_others = view.counters.launched_at_most(round_index) - own_launched
        if launched_by_others != mine.heard:
            mine.heard, mine.heard_at = launched_by_others, now
        if own.peer_id not in feeders or progress.is_launched(view, round_index, now, batch):
            return False
        quota = self._quota(feeders)
        if own_launched < quota:
            return True
        launched = progress.round_progress(view, round_index, now, batch).launched
        if len(feeders) > progress.FEW_FEEDERS:
            return self._may_help(mine, feeders, own_launched, launched, now)
        return progress.may_launch(
            own_launched=own_launched,
            quota=quota,
            launched=launched,
            global_batch=batch,
            quiet_s=now - max(mine.heard_at, mine.launched_at),
            patience_s=self.limits.patience_s,
        )

    def _quota(self, feeders: Sequence[str]) -> int:
        settings, rank = self.settings, feeders.index(self.gossip.own.peer_id)
        return progress.quota(
            rank, len(feeders), settings.global_batch, settings.samples_per_microbatch
        )

    def _may_help(
        self,
        mine: RoundOfFeeder,
        feeders: Sequence[str],
        own_launched: int,
        launched: int,
        now: float,
    ) -> bool:
        return progress.may_help(
            own_launched=own_launched,
            launched=launched,
            global_batch=self.settings.global_batch,
            age_s=now - mine.began_at,
            spread_s=self.gossip.spread_s,
            quiet_s=now - max(mine.heard_at, mine.launched_at),
            rank=feeders.index(self.gossip.own.peer_id),
            num_feeders=len(feeders),
            samples_per_microbatch=self.settings.samples_per_microbatch,
        )

    def leaves_to_others(self, round_index: int) -> bool:
        """This peer, one of many feeders, has launched its part of a round, and what is missing is
        on its way: said of rounds that it has begun to feed."""
        now = asyncio.get_running_loop().time()
        feeders = assignment.feeders(self.gossip.view, now)
        mine = next((m for m in self._open if m.round == round_index), None)
        if mine is None or len(feeders) <= progress.FEW_FEEDERS or not self._is_feeder():
            return False
        own_launched = self.gossip.own.count(round_index).launched
        if own_launched < self._quota(feeders):
            return False
        state = progress.round_progress(
            self.gossip.view, round_index, now, self.settings.global_batch
        )
        return not self._may_help(mine, feeders, own_launched, state.launched, now)

    def _maybe_seal(self, mine: RoundOfFeeder, feeds: bool) -> None:
        """Says that this feeder is done with the round, or that it is not after all."""
        if mine.round >= self.settings.rounds or not mine.next_n:
            return
        now = asyncio.get_running_loop().time()
        count = self.gossip.own.count(mine.round)
        view, batch = self.gossip.view, self.settings.global_batch
        idle = not mine.in_flight and not self._evaluating
        sealed = idle and (not feeds or progress.is_launched(view, mine.round, now, batch))
        if sealed != count.sealed:
            # Who feeds no more will not launch again what did not come back: others do.
            launched = count.launched if feeds else count.committed
            self.gossip.update_count(replace(count, launched=launched, sealed=sealed), urgent=True)

    def write_off(self) -> None:
        """This peer feeds no more for now: what it launched and did not commit is lost, and counts
        as never launched, as if it were gone."""
        for count in self.gossip.own.counts:
            if not count.sealed:
                self.gossip.update_count(replace(count, launched=count.committed, sealed=True))

    # ---- one microbatch ---------------------------------------------------------------------

    async def _fly(self, replica: Replica, mine: RoundOfFeeder, the_id: int) -> None:
        """One microbatch, there and back, tried until it counts or the round is over."""
        own = self.gossip.own
        request = StepRequest(
            round=mine.round,
            microbatch_id=the_id,
            stage=0,
            feeder=own.peer_id,
            num_samples=self.settings.samples_per_microbatch,
        )
        path: tuple[str, ...] = ()

        def on_path(now_at: tuple[str, ...]) -> None:
            nonlocal path
            path = now_at

        def accept(reply: StepReply, returned: tuple[Array, ...]) -> None:
            _accept(reply, returned)
            check_tokens(reply, arrays[1])

        try:
            arrays = self.data.microbatch(the_id)
            while replica.round <= mine.round:
                try:
                    passed = await self.wiring.step(
                        replace(request, hint=path),
                        arrays,
                        accept=accept,
                        on_path=on_path,
                        prefer_self=own.stage == 0,
                        waits_here=own.stage == 0 and self._serves_itself(),
                    )
                except Stale as e:
                    theirs = e.details.get("round")
                    if isinstance(theirs, int) and theirs > mine.round:
                        if await self._is_over(replica, mine.round):
                            return  # the others finished the round without it: it never counts
                        path = ()  # so one replica says: not there again
                        continue
                    await self.gossip.changed.wait(LOOK_AGAIN_S)
                    if replica.is_closed(mine.round):
                        return
                    if theirs == mine.round and replica.takes(mine.round):
                        # Others have closed it, and wait for this peer's stage: they took a feeder
                        # for dead, or this one did, and there are enough without this one.
                        await asyncio.sleep(LOOK_AGAIN_S)
                        self._never_launched(mine)
                        return
                    # Not open, not closed: it is fetching the round's parameters, and opens it
                    # again. A flight given up here would be launched and never committed.
                except NoRoute as e:
                    log.info("round %d: a microbatch found no way: %s", mine.round, e)
                    await self.gossip.changed.wait(LOOK_AGAIN_S)
                else:
                    self._refused = 0
                    if not mine.is_refused(the_id, passed.reply.path):
                        self._committed(mine, the_id, passed.reply)
                    elif not await self._is_over(replica, mine.round):
                        self._never_launched(mine)  # another takes its place
                    return
        except (Refused, DataError, OSError) as e:
            self._given_up(mine, e)
        except Exception as e:
            log.exception("round %d: a microbatch failed", mine.round)
            self._given_up(mine, e)
        finally:
            mine.in_flight.discard(the_id)
            self.gossip.changed.notify_all()

    async def _is_over(self, replica: Replica, r: int) -> bool:
        """One replica says that a round is over: is it, by what this one knows, or hears within the
        time that news take? One alone must not end a round, nor keep it from its end."""
        loop, view = asyncio.get_running_loop(), self.gossip.view
        end = loop.time() + max(LOOK_AGAIN_S, self.gossip.spread_s)
        while not (is_over := replica.is_closed(r) or view.is_past(r, loop.time())):
            left = end - loop.time()
            if left <= 0:
                break
            await self.gossip.changed.wait(left)
        return is_over

    def _never_launched(self, mine: RoundOfFeeder) -> None:
        """One microbatch less."""
        count = self.gossip.own.count(mine.round)
        launched = max(count.committed, count.launched - self.settings.samples_per_microbatch)
        self.gossip.update_count(replace(count, launched=launched), urgent=True)

    def _given_up(self, mine: RoundOfFeeder, why: Exception) -> None:
        """A microbatch that cannot be read, or that every replica finds wrong, is as never
        launched; after several in a row this peer rests, and others launch its part."""
        log.info("round %d: a microbatch is given up: %s", mine.round, why)
        self._never_launched(mine)
        self._refused += 1
        if self._refused >= MAX_REFUSED and self.gossip.own.has_data:
            log.warning(
                "this peer feeds no more for %.0f s: its last %d microbatches were refused (%s). "
                "Compare its data and tokenizer with the run's. It goes on serving.",
                REST_S,
                self._refused,
                why,
            )
            self.gossip.update(has_data=False, urgent=True)
            self._rests_until = asyncio.get_running_loop().time() + REST_S

    def _wake(self) -> None:
        """After its rest, the feeder tries its data again."""
        if self._rests_until and asyncio.get_running_loop().time() >= self._rests_until:
            self._refused, self._rests_until = 0, 0.0
            self.gossip.update(has_data=True, urgent=True)

    def _committed(self, mine: RoundOfFeeder, the_id: int, reply: StepReply) -> None:
        """The whole gradient is there: the microbatch counts, and its path hears so."""
        mine.committed[the_id] = reply.path
        self._num_completed += 1
        self.on_commit(mine.round, the_id)
        count = self.gossip.own.count(mine.round)
        self.gossip.update_count(
            RoundCount(
                round=count.round,
                launched=count.launched,
                committed=count.committed + self.settings.samples_per_microbatch,
                sealed=count.sealed,
                tokens=count.tokens + reply.num_tokens,
                loss_sum=count.loss_sum + reply.loss_sum,
            )
        )
        commit = Commit(mine.round, (the_id,))
        if reply.path[0] == self.gossip.own.peer_id:
            self.steps.commit(commit, self.gossip.own.peer_id)
        else:
            self.transport.notify(reply.path[0], "commit", Message(commit))

    async def _on_committed(self, request: Request) -> Message:
        """A replica asks about microbatches that it was never told to count."""
        self.gossip.check_run(request)
        question = convert(request.message.body, CommittedRequest)
        return Message(self.committed(question, request.remote))

    def committed(self, question: CommittedRequest, asker: str) -> CommittedReply:
        """Those that count with `asker` on their path at the stage of the question, and those that
        may yet. Where the asker's round is closed, what is in flight is never committed."""
        mine = self._rounds.get(question.round)
        if mine is None:
            return CommittedReply(())
        counted, in_flight = [], []
        for the_id in question.microbatch_ids:
            path = mine.committed.get(the_id)
            if path is not None:
                if question.stage < len(path) and path[question.stage] == asker:
                    counted.append(the_id)
            elif the_id in mine.in_flight and question.is_over:
                refusals = mine.refused.setdefault(the_id, set())
                if question.stage < self.settings.num_stages:
                    refusals.add((question.stage, asker))
            elif the_id in mine.in_flight:
                in_flight.append(the_id)
        return CommittedReply(tuple(counted), tuple(in_flight))

    def committed_paths(self) -> dict[int, dict[int, tuple[str, ...]]]:
        """By round (the newest `KEPT_COMMITS`), the path of every microbatch that counts."""
        return {r: mine.committed for r, mine in self._rounds.items()}

    # ---- held-out data ----------------------------------------------------------------------

    def _maybe_evaluate(self, replica: Replica, flights: Tasks) -> None:
        """The first of the feeders measures the loss on held-out data every so often, unless one
        that was first before it has. The round waits for it, and it ends with the round."""
        r = replica.round
        every = self.settings.evaluate_every
        due = r >= self.settings.rounds or (every > 0 and r % every == 0)
        if not due or self._evaluated >= r or self._evaluating or not self.data.num_held_out:
            return
        now = asyncio.get_running_loop().time()
        view = self.gossip.view
        if any(p.held_out is not None and p.held_out.round == r for p in view.live(now)):
            return
        covered = all(view.replicas(s, now) for s in range(self.settings.num_stages))
        if covered and assignment.feeders(view, now)[0] == self.gossip.own.peer_id:
            self._evaluating = True
            flights.start(self._evaluate(r))

    async def _evaluate(self, r: int) -> None:
        loss_sum, num_tokens = 0.0, 0
        try:
            for index in range(self.data.num_held_out):
                infer = InferRequest(stage=0, mode=EVALUATE, round=r)
                reply = await infer_through(self.wiring, infer, self.data.held_out(index))
                body = convert(reply.body, InferReply)
                loss_sum += body.loss_sum
                num_tokens += body.num_tokens
            if num_tokens:
                loss = loss_sum / num_tokens
                bits = bits_per_byte(loss, self.data.bytes_per_token)
                self.gossip.update(held_out=HeldOut(r, loss, bits), urgent=True)
        except SwarmnetError as e:
            log.info("round %d: the held-out loss was not measured: %s", r, e)
        finally:
            self._evaluating = False
            self._evaluated = r
            self.gossip.changed.notify_all()


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Loss in nats per token as bits per byte of text; 0 where the data is not text."""
    return loss / 0.6931471805599453 / bytes_per_token if bytes_per_token else 0.0


def _accept(reply: StepReply, arrays: tuple[Array, ...]) -> None:
    if arrays:
        raise ProtocolViolation("stage 0 returned a gradient of its inputs")
    if not reply.path:
        raise ProtocolViolation("a step's reply without its path")
