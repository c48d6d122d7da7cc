"""One exchange of a stage at one replica: what happens becomes events of each shard's update
(`protocol.update.shard_update`), and the commands of that are carried out.

Nothing is decided here. No ballots or rounds are compared: messages, time and the view go in, calls
and work on tensors come out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from swarmnet.errors import NotReady, ProtocolViolation, SwarmnetError
from swarmnet.methods.update import ReduceProgress, ShardReply
from swarmnet.protocol.membership.failure_detector import SUSPECT_S
from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import DEAD, SUSPECT, Ballot, Standing, still_known
from swarmnet.protocol.update.shard_facts import FOLLOWING, HAS_RESULT, State
from swarmnet.protocol.update.shard_update import ShardUpdate
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.outbox import Outbox, Part
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchange.pauses import Pauses
from swarmnet.swarm.update.exchange.progress import Progress
from swarmnet.swarm.update.exchange.shard_work import Put, Result, ShardWork
from swarmnet.swarm.update.exchange.steps import ExchangeSteps
from swarmnet.swarm.update.exchange.tied_shards import TiedShards
from swarmnet.swarm.update.ownership import Ownership
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.averaging")


class Behind(SwarmnetError):
    """The stage has moved on by more than one round: fetch its parameters instead."""


class Exchange:
    """Of all shards of one stage."""

    def __init__(
        self,
        number: int,
        gossip: Gossip,
        replica: Replica,
        ownership: Ownership,
        work: ShardWork,
        books: Books,
        pace: ExchangePace,
        tied: TiedShards,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change()`: a result is here, or on its way to be made."""
        self.number = number
        self._gossip = gossip
        self._replica = replica
        self._ownership = ownership
        self._work = work
        self._books = books
        self._pace = pace
        self._on_change = on_change
        self._tasks = Tasks("exchange")
        self.progress = Progress(number, ownership.members, pace, self.refresh)
        self._outbox = Outbox(
            number,
            gossip,
            replica,
            pace,
            self._tasks,
            self.feed,
            self._arrived,
            self._heard,
            self.progress.silent,
            self.progress.mute,
            lambda j: ownership.states.is_before(j, number),
            self.progress.is_follower,
        )
        self._steps = ExchangeSteps(
            number,
            replica,
            ownership.states,
            work,
            books,
            tied,
            self._outbox,
            self._tasks,
            self.feed,
            self.fail,
        )
        self._pauses = Pauses(pace.usual_s, self._again)
        self._machines: dict[int, ShardUpdate] = {}
        self._events: list[tuple[int, on.Event]] = []
        self._is_feeding = self._stays_in_stage = False
        self._stalled_s = gossip.liveness.stalled_s()
        self._members: dict[str, Standing] = {}
        self._short_of = self._num_calls = 0
        self._begun_at: float | None = None
        self._distrusted: set[str] = set()
        """Who gave parameters that no stage takes."""
        self._put: Put | None = None
        """Where results go; None before this replica has closed its round."""
        self._calls: dict[on.Call, asyncio.Future[do.Command]] = {}
        """Of other replicas, which wait for an answer."""
        self._deadlines: dict[int, float] = {}
        self._kept_since: dict[int, float] = {}
        """By shard, since when, in seconds awake, the step waits for who has its state."""
        self.results: dict[int, Result] = {}
        """By shard, what is here."""
        self.done: dict[int, bool] = {}
        """Shards whose result has been put where it goes; whether the own contribution counts."""
        self.taken: set[int] = set()
        """Shards whose owners have made the step, as this replica heard when about to leave."""
        self.changed = Condition()
        self.failure: Exception | None = None
        """Why it cannot end here."""
        self.refresh()
        self._tasks.start(self._watch())

    async def close(self) -> None:
        """Ends what is under way. Calls that wait here end with `NotReady`."""
        self._pauses.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(NotReady("the update was given up here"))
                call.exception()  # whoever waits for it may be gone
        await self._tasks.close()

    # ---- the own part -----------------------------------------------------------------------

    def contribute(self, parts: Mapping[int, Part], put: Put, *, stays_in_stage: bool) -> None:
        """This replica has closed the round: contributions of its own to shards that are due, each
        once. `stays_in_stage`: what `put` takes can be read there (`Stage.coming_shard`)."""
        if self._put is None:
            self._put = put
            self._stays_in_stage = stays_in_stage
            self._begun_at = self._gossip.awake_s()
        self._outbox.contribute(parts)
        self.refresh()
        for j, (num_tokens, gradient) in parts.items():
            self.feed(j, on.Begun(num_tokens, gradient))
            if j in self.results:
                self._tasks.start(self._finish(j))

    def is_over(self, shards: Iterable[int]) -> bool:
        """All results are where they go, or there is no hope."""
        return self.failure is not None or all(j in self.done for j in shards)

    def leads_any(self) -> bool:
        """A step is being made here, or may be."""
        return any(map(self.may_step, self._machines))

    def has_step(self) -> set[int]:
        """Shards whose step is made, here or elsewhere, and is known here."""
        kept = {State.COPIED, *HAS_RESULT}
        return {j for j, machine in self._machines.items() if machine.facts.state in kept}

    def may_step(self, shard: int) -> bool:
        """The optimizer state of a shard is in use."""
        machine = self._machines.get(shard)
        return machine is not None and machine.may_step

    # ---- events -----------------------------------------------------------------------------

    def feed(self, shard: int, event: on.Event) -> None:
        """Something has happened: what follows from it is done or begun when this returns, or by
        the caller of a `feed` that is under way."""
        self._events.append((shard, event))
        if self._is_feeding:
            return
        self._is_feeding = True
        stalled_s = self._gossip.liveness.stalled_s()
        if stalled_s > self._stalled_s:  # before what happened before that, or meanwhile
            self._stalled_s = stalled_s
            self._events[:0] = [(j, on.StoodStill()) for j in self._machines]
        try:
            while self._events:
                j, next_event = self._events.pop(0)
                for command in self._machine(j).handle(next_event):
                    self._carry_out(j, command)
        finally:
            self._is_feeding = False

    def _machine(self, shard: int) -> ShardUpdate:
        machine = self._machines.get(shard)
        if machine is None:
            roster = self._ownership.roster(self.number, shard)
            machine = ShardUpdate(self._gossip.own.peer_id, roster)
            self._machines[shard] = machine
            for command in machine.handle(on.Seen(self._members, self._short_of)):
                self._carry_out(shard, command)
        return machine

    def ballot(self, shard: int) -> Ballot:
        """By which this replica goes."""
        return self._machine(shard).facts.ballot

    @property
    def is_at_work(self) -> bool:
        """A call for a result is under way, or a step."""
        return self._outbox.is_pushing or self.leads_any()

    async def answer(self, shard: int, make: Callable[[on.Call], on.Event]) -> do.Command:
        """What a call of another replica is answered with. `make(call)`: the event that it is.
        Raises `NotReady` where the exchange ends here first."""
        self._num_calls += 1
        call = self._num_calls
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            event = make(call)
            if isinstance(event, on.Pushed):
                self.progress.came(event.sender)
            elif isinstance(event, on.Asked) and event.is_final:
                self.progress.leads(event.sender)
            self.feed(shard, event)
            return await future
        finally:
            self._calls.pop(call, None)

    def refresh(self) -> None:
        """Looks at who lives, and what they have declared."""
        self._gossip.awake_s()  # after a stall of this process, no peer is silent
        members = self._ownership.members.standings(self.number)
        for peer_id in self._distrusted:
            members.pop(peer_id, None)
        members = still_known(self._members, members)
        counted = self._counted(members)
        if (members, counted) == (self._members, self._short_of):
            return
        self._members = members
        self._short_of = counted
        if any(s.life == SUSPECT for s in members.values()):
            self.progress.waits()
        for j, machine in list(self._machines.items()):
            self.feed(j, on.Seen(members, counted, machine.facts.is_kept))

    def _look_for_state(self, j: int) -> None:
        """Of a shard that this replica is about to step: whether the state that it lacks is with
        another one that lives."""
        now = self._gossip.awake_s()
        waited_s = now - self._kept_since.get(j, now)
        is_kept = self._ownership.is_kept_elsewhere(self.number, j, waited_s)
        if is_kept:
            if j not in self._kept_since:
                log.info(
                    "round %d shard %d: who has its optimizer state is waited for", self.number, j
                )
            self._kept_since.setdefault(j, now)
        if is_kept != self._machines[j].facts.is_kept:
            self.feed(j, on.Seen(self._members, self._short_of, is_kept))

    def _counted(self, members: Mapping[str, Standing]) -> int:
        """Tokens that members have to contribute together, because somebody who holds some may not
        be known here yet: in the first round, when all join at once, or where nobody known has any.
        Not where a replica has died: they may have died with it. A peer that lives is heard of
        within the time that one which has fallen silent is waited for."""
        if self._begun_at is None or self._gossip.awake_s() > self._begun_at + SUSPECT_S:
            return 0
        has_some = any(self._outbox.tokens.values()) or any(
            s.declared for s in members.values() if s.life != DEAD
        )
        is_usual = self.number > 0 and has_some
        if is_usual or self._ownership.members.has_lost_one(self.number):
            return 0
        return self._books.counted_tokens(self.number)

    async def _watch(self) -> None:
        while True:
            await self._gossip.changed.wait(LOOK_AGAIN_S)
            facts = {j: machine.facts for j, machine in self._machines.items()}
            self.progress.look(facts, self._begun_at, self._gossip.awake_s())
            self.refresh()
            for j, machine in list(self._machines.items()):
                if machine.facts.state is State.CLIPPING:
                    self._look_for_state(j)

    # ---- commands ---------------------------------------------------------------------------

    def _carry_out(self, j: int, command: do.Command) -> None:
        match command:
            case do.Push():
                self._outbox.push(j, command)
            case do.GiveUpPush():
                self._outbox.give_up_push(j)
            case do.Ask():
                self._outbox.ask(j, command)
            case do.Pause():
                self._pauses.add(j, is_long=self._machines[j].facts.state is not FOLLOWING)
            case do.SetDeadline():
                self._set_deadline(j)
            case do.LookInto(peer_id):
                self._gossip.probe(peer_id)
            case do.Adopt(result, _):
                self._adopt(j, result)
            case do.Spoiled():
                self._ownership.states.spoil(j, self.number)
                log.info("round %d shard %d: another primary's step holds", self.number, j)
            case do.Abandon():
                self.fail(Behind(f"the stage is further on than round {self.number}"))
            case do.Sum() | do.FindNorm() | do.Step() | do.Mirror() | do.Repeat():
                self.progress.begins(j, command)
                self._steps.carry_out(j, command)
                if isinstance(command, do.Sum):
                    self._look_for_state(j)
            case do.Pull():
                raise NotImplementedError("pairs meet in gossip_averaging")
            case _:
                future = self._calls.pop(command.call, None)
                if future is not None and not future.done():
                    future.set_result(command)

    def _adopt(self, j: int, result: Result | None) -> None:
        if result is not None:
            self.results[j] = result
        self._steps.forget(j)
        self._outbox.forget(j)
        self._work.adopted(self.number, j)
        if self._put is not None:
            self._tasks.start(self._finish(j))
        self._on_change()

    async def _finish(self, j: int) -> None:
        """Puts a result where it goes."""
        put, result = self._put, self.results[j]
        if put is None or j in self.done or j not in self._outbox.tokens:
            return  # where the own contribution is still to come, it goes on then
        try:
            await self._work.put(j, result, put, is_in_stage=self._stays_in_stage)
        except Exception as e:
            if not isinstance(e, SwarmnetError):
                log.exception("round %d shard %d: a result was not put", self.number, j)
            self.fail(Behind(str(e) or type(e).__name__))
            return
        facts, counted = self._machines[j].facts, result.counted
        if counted is None:
            counted = facts.me in facts.senders
        self.done.setdefault(j, counted or not self._outbox.tokens[j])
        self.changed.notify_all()

    async def _arrived(self, j: int, sender: str, told: ShardReply, values: Array | None) -> Result:
        """Parameters from another replica, or the copy here. They are put where they go once they
        are adopted (`_finish`), not before: in some modes that is where the gradient lies, which
        another primary may ask for yet. Raises `ProtocolViolation` where they are of no use: their
        sender is dead for this exchange; `NotReady` where there is no copy."""
        if values is None:
            facts = self._machines[j].facts
            if facts.state is not State.COPIED or facts.result is None:
                raise NotReady("the copy was given up")  # and is not told of again
            result = replace(facts.result, counted=told.counted)
        else:
            try:
                parameters = await self._work.checked(j, values)
            except ProtocolViolation as e:
                log.warning("round %d: of no use from %s: %s", self.number, sender[-8:], e)
                self._distrusted.add(sender)
                self.refresh()
                raise
            kept = parameters if self._put is not None else None
            result = Result(values, told.counted, parameters=kept)
        self._books.heard(self.number, j, told)
        return result

    def _heard(self, primary: str, told: ReduceProgress) -> None:
        if told.has_step:
            self.taken.add(told.shard)
            self._on_change()
        else:
            self.progress.has_sum(told.shard, primary)

    def fail(self, error: Exception) -> None:
        """It cannot end here."""
        self.failure = self.failure or error
        self.changed.notify_all()

    # ---- time -------------------------------------------------------------------------------

    def _again(self, shards: list[int]) -> None:
        for j in shards:
            self.feed(j, on.Again())

    def _set_deadline(self, j: int) -> None:
        if self._put is None:
            return  # it runs from when this replica has closed its round
        _, wait_s = self._pace.contributions_s()
        end = self._gossip.awake_s() + wait_s
        is_new, self._deadlines[j] = j not in self._deadlines, end
        if is_new:
            self._tasks.start(self._expire(j))

    async def _expire(self, j: int) -> None:
        """Waits for the deadline in time awake: after a stall of its own, this process has not read
        yet what came. Then for the leases of those that may be back. It runs from when those that
        are waited for have left the exchange before, if that is before it."""
        members, end = self._ownership.members, self._deadlines[j]
        if await members.until_begun(lambda: self._awaited(j), self.number, end):
            self._set_deadline(j)
        while (left := self._deadlines[j] - self._gossip.awake_s()) > 0:
            await asyncio.sleep(left)
            if self._gossip.awake_s() < self._deadlines[j]:
                continue  # it was set anew meanwhile, or this process stood still
            await self._gossip.look_into(self._awaited(j))
            self.refresh()
            while any(self._members[p].life == SUSPECT for p in self._awaited(j)):
                await self._gossip.changed.wait(LOOK_AGAIN_S)
                self.refresh()
        del self._deadlines[j]
        self.feed(j, on.DeadlinePassed())

    def _awaited(self, j: int) -> list[str]:
        facts = self._machines[j].facts
        return facts.waits_for() if facts.state is State.GATHERING else []
