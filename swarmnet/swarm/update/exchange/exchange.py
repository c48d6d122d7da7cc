"""One exchange of a stage at one replica: what happens becomes events of each shard's update
(`protocol.update.shard_update`), and the commands of that are carried out.

Nothing is decided here. No ballots or rounds are compared: messages, time and the view go in, calls
(`calls`) and work on tensors (`shard_work`) come out."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarmnet.errors import (
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    Stale,
    SwarmnetError,
    TransportError,
    UserError,
)
from swarmnet.methods.update import MirrorRequest, ShardReply
from swarmnet.protocol.moments import Deadline, Since, Stalls
from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.exchange_progress import ExchangeProgress
from swarmnet.protocol.update.exchange_waits import Pauses, may_miss_members
from swarmnet.protocol.update.roster import HUNG, SUSPECT, Ballot, MemberStatus, still_known
from swarmnet.protocol.update.shard_state import FOLLOWING, HAS_RESULT, State
from swarmnet.protocol.update.shard_update import ShardUpdate
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica, decides_tied, follows_tied
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S, RETRY_S
from swarmnet.swarm.update.exchange.auditing import UpdateAudits
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.calls import (
    Contribution,
    ExchangeCalls,
    PushCall,
    Question,
    SumsHere,
    ballot_in,
    has_moved_on,
    has_not_begun,
    shard_in,
)
from swarmnet.swarm.update.exchange.late import LateContributions
from swarmnet.swarm.update.exchange.neighbours import Neighbours
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchange.proofs import Proofs
from swarmnet.swarm.update.exchange.shard_work import (
    Before,
    Came,
    NoResult,
    Put,
    Result,
    ShardWork,
    Total,
)
from swarmnet.swarm.update.exchange.speakers import Speakers
from swarmnet.swarm.update.exchange.tied_shards import TiedShards
from swarmnet.swarm.update.ownership import Ownership
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.averaging")

NotShown = Callable[[bool], str]
"""Why a result is none, by whether it leaves the parameters as they are; empty where it may be one.
On the worker."""
Work = Callable[[], Awaitable[list[on.Event]]]
"""What is done for a shard, in a task of its own. Returns what comes of it."""


class Behind(SwarmnetError):
    """The stage has moved on by more than one round: fetch its parameters instead."""


@dataclass
class PresentExchange:
    """The exchange that a replica is in, begun by whoever comes first: this replica, or a call of
    another one."""

    gossip: Gossip
    replica: Replica
    ownership: Ownership
    work: ShardWork
    books: Books
    pace: ExchangePace
    tied: TiedShards
    proofs: Proofs
    audits: UpdateAudits
    late: LateContributions
    speakers: Speakers
    tasks: Tasks

    def __post_init__(self) -> None:
        self._known: Exchange | None = None

    def known(self) -> Exchange | None:
        """The newest one that has begun here; None where it has been given up, or forgotten."""
        return self._known

    def now(self) -> Exchange:
        """The one whose input the present common parameters are."""
        current, known = self.replica.current_exchange, self._known
        if known is not None and known.number == current:
            return known
        self.end()
        self.speakers.begin(current)
        self._known = Exchange(
            current,
            self.gossip,
            self.replica,
            self.ownership,
            self.work,
            self.books,
            self.pace,
            self.tied,
            self.proofs,
            self.audits,
            self.late,
            self.speakers,
        )
        return self._known

    def end(self) -> None:
        """It is over here, or does not hold."""
        exchange, self._known = self._known, None
        self.speakers.end()
        if exchange is not None:
            exchange.sums.close()
            self.tasks.start(exchange.close())

    async def close(self) -> None:
        if self._known is not None:
            await self._known.close()


class Exchange:
    """Carries out one exchange, of all shards of one stage."""

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
        proofs: Proofs,
        audits: UpdateAudits,
        late: LateContributions,
        speakers: Speakers,
    ) -> None:
        self.number = number
        self._speakers = speakers
        self._late = late
        self._audits = audits
        self._proofs = proofs
        self._gossip = gossip
        self._ownership = ownership
        self._states = ownership.states
        self._work = work
        self._books = books
        self._pace = pace
        self._tasks = Tasks("exchange")
        self.progress = ExchangeProgress()
        self.sums = SumsHere()
        """For the steps that others' primaries have this replica make."""
        self._calls = ExchangeCalls(
            number,
            gossip,
            replica,
            ownership.states,
            pace,
            self.progress,
            proofs,
            books,
            self._tasks,
        )
        self._neighbours = Neighbours(gossip, replica)
        self._steps = Steps(number, replica, work, books, tied, self._neighbours, self._tasks)
        self._pauses = Pauses(RETRY_S, LOOK_LESS_S)
        self._timers: dict[bool, asyncio.TimerHandle] = {}
        """Of the pauses that are going on, by whether they are long."""
        self._machines: dict[int, ShardUpdate] = {}
        self._events: list[tuple[int, on.Event]] = []
        self._is_feeding = False
        self._is_flush_due = False
        self._stays_in_stage = False
        self._stalls = Stalls(gossip.liveness.stalled_s())
        self._members: dict[str, MemberStatus] = {}
        self._short_of = 0
        self._begun_at: float | None = None
        """When this replica closed its round, in seconds awake."""
        self._distrusted: set[str] = set()
        """Who gave parameters that no stage takes."""
        self._owing: set[str] = set()
        """Primaries whose results are waited for no more."""
        self._put: Put | None = None
        """Where results go; None before this replica has closed its round."""
        self._callers: dict[on.Call, asyncio.Future[do.Command]] = {}
        """Calls of other replicas, which wait for an answer."""
        self._num_callers = 0
        self._promises_due: dict[str, Deadline] = {}
        """By member that was asked in vain for a promise, in seconds awake: until when it may be
        asked again."""
        self._deadlines: dict[int, Deadline] = {}
        """By shard, in seconds awake, until when contributions are waited for."""
        self._expiring: set[int] = set()
        """Shards that have a task for that: few have any."""
        self._first_deadline: Deadline | None = None
        """Of the others; None where there is no timer for it."""
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._kept_since: dict[int, Since] = {}
        """By shard, since when, in seconds awake, the step waits for who has its state."""
        self.results: dict[int, Result] = {}
        """By shard, what is here."""
        self.done: dict[int, bool] = {}
        """Shards whose result has been put where it goes; whether the own contribution counts."""
        self.changed = Condition()
        self.failure: Exception | None = None
        """Why it cannot end here."""
        self._is_behind = False
        """The result of some shard cannot be had any more."""
        self.refresh()
        self._tasks.start(self._watch())

    async def close(self) -> None:
        """Ends what is under way. Calls that wait here end with `NotReady`."""
        for timer in (*self._timers.values(), self._deadline_timer):
            if timer is not None:
                timer.cancel()
        self._timers.clear()
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            if not caller.done():
                caller.set_exception(NotReady("the update was given up here"))
                caller.exception()  # whoever waits for it may be gone
        await self._tasks.close()

    # ---- the own part -----------------------------------------------------------------------

    def contribute(
        self, contributions: Mapping[int, Contribution], put: Put, *, stays_in_stage: bool
    ) -> None:
        """This replica has closed the round: contributions of its own to shards that are due, each
        once. `stays_in_stage`: what `put` takes can be read there (`Stage.coming_shard`)."""
        if self._put is None:
            self._put = put
            self._stays_in_stage = stays_in_stage
            self._begun_at = self._gossip.liveness.awake_s()
        self._calls.contribute(contributions)
        self.refresh()
        for head, shards in self._by_head(contributions).items():
            if head:
                self._tasks.start(self._give(head, shards))
            for j in shards:
                if not head:
                    num_tokens, gradient = contributions[j]
                    self.feed(j, on.Begun(num_tokens, gradient, self._calls.members.get(j, ())))
                if j in self.results:
                    self._tasks.start(self._finish(j))

    # ---- neighbours -------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """What this replica contributes later; where that fails, the exchange does."""

        async def guarded() -> None:
            try:
                await work
            except Exception as e:
                if not isinstance(e, SwarmnetError):
                    log.exception("round %d: no contribution", self.number)
                self.fail(e)

        self._tasks.start(guarded())

    def head(self, shard: int) -> str:
        """The neighbour that has the contributions of the household in its own, this replica
        perhaps; empty where there is none."""
        if not self._neighbours.are_any(self._members):
            return ""
        order = self._machine(shard).shard.roster.order
        return self._neighbours.head(shard, order, self._members)

    def _by_head(self, shards: Iterable[int]) -> dict[str, list[int]]:
        """By another one that is the head, or "" where that is this replica, or there is none."""
        own, found = self._gossip.own.peer_id, dict[str, list[int]]()
        for j in shards:
            head = self.head(j)
            found.setdefault("" if head == own else head, []).append(j)
        return found

    async def _give(self, head: str, shards: list[int]) -> None:
        """Gives a neighbour what this replica contributes. What that does not take, or perhaps
        has not got, goes to the primary."""
        given = [j for j in shards if self._calls.tokens[j] and j not in self.results]
        self._neighbours.gives(given)
        taken = {j for j in shards if not self._calls.tokens[j]}  # it has the result alone
        longest_s = self._pace.waits().gather_s
        for call in self._calls.in_calls(given):
            try:
                taken |= await self._calls.gather(head, call, longest_s)
            except SwarmnetError as e:
                log.debug("round %d: not given to %s: %s", self.number, head[-8:], e)
        for j in shards:
            if j not in self.results:
                self.feed(j, on.Begun(*self._calls.own[j], (), head if j in taken else ""))

    async def take(self, shard: int, sender: str, num_tokens: int, gradient: Array) -> bool:
        """A neighbour's contribution; whether it is in the own one."""
        if shard in self._calls.tokens or self.head(shard) != self._gossip.own.peer_id:
            return False
        return await self._neighbours.take(shard, sender, num_tokens, gradient)

    async def gathered(self, shard: int, contribution: Contribution) -> Contribution:
        """The own contribution, which is not coded, with those of the neighbours that come in
        time."""
        awake_s = self._gossip.liveness.awake_s
        end = Deadline.after(awake_s(), self._pace.waits().gather_s)
        while self._neighbours.awaited(shard, self._members) and shard not in self.results:
            left_s = end.left_s(awake_s())
            if not left_s:
                break
            await self._neighbours.changed.wait(min(left_s, LOOK_AGAIN_S))
        closed = await self._neighbours.close(shard, contribution, self._members)
        self._calls.members[shard], found = closed
        return found

    def is_over(self, shards: Iterable[int]) -> bool:
        """All results are where they go, or there is no hope."""
        return self.failure is not None or all(j in self.done for j in shards)

    def leads_any(self) -> bool:
        """A step is being made here, or may be."""
        return any(map(self.may_step, self._machines))

    def has_step(self) -> set[int]:
        """Shards whose step is made, here or elsewhere, and is known here."""
        kept = {State.COPIED, *HAS_RESULT}
        return {j for j, machine in self._machines.items() if machine.shard.state in kept}

    def may_step(self, shard: int) -> bool:
        """The optimizer state of a shard is in use."""
        machine = self._machines.get(shard)
        return machine is not None and machine.may_step

    def ballot(self, shard: int) -> Ballot:
        """By which this replica goes."""
        return self._machine(shard).shard.ballot

    @property
    def is_at_work(self) -> bool:
        """A call for a result is under way, or a step."""
        return self._calls.is_pushing or self.leads_any()

    # ---- events -----------------------------------------------------------------------------

    def feed(self, shard: int, event: on.Event) -> None:
        """Something has happened: what follows from it is done or begun when this returns, or by
        the caller of a `feed` that is under way."""
        self._events.append((shard, event))
        if self._is_feeding:
            return
        self._is_feeding = True
        if self._stalls.is_new(self._gossip.liveness.stalled_s()):
            # Before what happened before that, or meanwhile.
            self._events[:0] = [(j, on.StoodStill()) for j in self._machines]
        try:
            while self._events:
                j, next_event = self._events.pop(0)
                self._handle(j, self._machine(j), next_event)
        finally:
            self._is_feeding = False

    def _machine(self, shard: int) -> ShardUpdate:
        machine = self._machines.get(shard)
        if machine is None:
            roster = self._ownership.roster(self.number, shard)
            machine = ShardUpdate(self._gossip.own.peer_id, roster)
            self._machines[shard] = machine
            self._handle(shard, machine, on.Seen(self._members, self._short_of))
        return machine

    def _handle(self, shard: int, machine: ShardUpdate, event: on.Event) -> None:
        commands = machine.handle(event)
        self._speakers.follow(shard, machine.shard.ballot.primary)  # commands may ask for them
        for command in commands:
            self._carry_out(shard, command)

    async def answer(self, shard: int, make: Callable[[on.Call], on.Event]) -> do.Command:
        """What a call of another replica is answered with. `make(call)`: the event that it is.
        Raises `NotReady` where the exchange ends here first."""
        self._num_callers += 1
        call = self._num_callers
        future = self._callers[call] = asyncio.get_running_loop().create_future()
        try:
            event = make(call)
            if isinstance(event, on.Pushed):
                for contributor in (event.sender, *event.members):
                    self.progress.came(contributor)
                    # In the exchange before, it was slow and no more.
                    self._pace.durations.straggled(contributor)
                    if event.gradient is not None:
                        self._ownership.members.contributed(contributor, self.number)
            elif isinstance(event, on.Asked) and event.is_final:
                self._leads(event.sender)
            self.feed(shard, event)
            return await future
        finally:
            self._callers.pop(call, None)

    def refresh(self) -> None:
        """Looks at who lives, and what they have declared."""
        self._gossip.liveness.awake_s()  # after a stall of this process, no peer is silent
        members = self._ownership.members.statuses(self.number)
        for peer_id in self._distrusted:
            members.pop(peer_id, None)
        for peer_id in self._owing & members.keys():
            if members[peer_id].is_waited_for:
                members[peer_id] = replace(members[peer_id], life=HUNG)
        members = still_known(self._members, members)
        counted = self._counted(members)
        if (members, counted) == (self._members, self._short_of):
            return
        self._members = members
        self._short_of = counted
        back = self.progress.back(members)
        for j, machine in list(self._machines.items()):
            self.feed(j, on.Seen(members, counted, machine.shard.is_kept))
        # Who is back has the time again for what it was sending, when others heard nothing.
        for j in [j for j in self._deadlines if back.intersection(self._awaited(j))]:
            self._set_deadline(j)

    def _counted(self, members: Mapping[str, MemberStatus]) -> int:
        """Tokens that members have to contribute together, because somebody who holds some may not
        be known here yet; 0 where nobody is missed. So it is where a replica has died: they may
        have died with it."""
        has_own = any(self._calls.tokens.values())
        now = self._gossip.liveness.awake_s()
        may_miss = may_miss_members(
            self.number, self._begun_at, now, members.values(), has_own=has_own
        )
        if not may_miss or self._ownership.members.has_lost_one(self.number):
            return 0
        return self._books.counted_tokens(self.number)

    async def _watch(self) -> None:
        while True:
            await self._gossip.changed.wait(LOOK_AGAIN_S)
            self._look_for_hung()
            self.refresh()
            for j, machine in list(self._machines.items()):
                if machine.shard.state is State.CLIPPING:
                    self._look_for_state(j)

    def _look_for_state(self, j: int) -> None:
        """Of a shard that this replica is about to step: whether the state that it lacks is with
        another one that lives."""
        now, since = self._gossip.liveness.awake_s(), self._kept_since.get(j)
        waited_s = 0.0 if since is None else since.s(now)
        is_kept = self._ownership.is_kept_elsewhere(self.number, j, waited_s)
        if is_kept and since is None:
            log.info("round %d shard %d: who has its optimizer state is waited for", self.number, j)
            self._kept_since[j] = Since(now)
        if is_kept != self._machines[j].shard.is_kept:
            self.feed(j, on.Seen(self._members, self._short_of, is_kept))

    # ---- who gets nothing done --------------------------------------------------------------

    def _look_for_hung(self) -> None:
        shards = {j: machine.shard for j, machine in self._machines.items()}
        members, waits = self._ownership.members, self._pace.waits()
        primaries = {p for s in shards.values() for p in (s.ballot.primary, s.neighbour) if p}
        found = self.progress.hanging(
            shards,
            self._begun_at,
            self._gossip.liveness.awake_s(),
            members.behind(primaries, self.number),
            {p for p in primaries if members.has_begun(p, self.number)},
            waits.contributions_s,
            waits.sum_s,
        )
        for peer_id in found:
            self._hangs(peer_id)
        has_norm = self._books.norms.known(self.number) is not None
        asked = {p for s in shards.values() for p in (s.ballot.primary, s.neighbour)}
        longest_s = {p: self._result_s(p) for p in asked}
        for peer_id in self.progress.owing(
            shards, self._gossip.liveness.awake_s(), longest_s, has_norm=has_norm
        ):
            self._owes(peer_id)
        awake_s = self._gossip.liveness.awake_s()
        for peer_id in self.progress.holding_up(shards, awake_s, waits.sum_s + waits.lease_s):
            self._mute(peer_id)
        # All find a death within a lease, and then the next in order takes over.
        for j in self.progress.unled(shards, awake_s, waits.lease_s + waits.usual_s):
            self.feed(j, on.Unled())

    def _hangs(self, peer_id: str) -> None:
        """Nobody waits for the work of a peer here any more."""
        if self.progress.hangs(peer_id):
            log.info("round %d: %s lives and gets nothing done", self.number, peer_id[-8:])
            self._ownership.members.found_hung(peer_id, self.number)
            self.refresh()

    def _result_s(self, peer_id: str) -> float:
        """For the result of a primary that waits for nobody: not the same twice in a row."""
        waits = self._pace.waits()
        owed_last = self._ownership.members.owed_last(peer_id, self.number)
        return waits.contributions_s if owed_last else waits.result_s

    def _owes(self, peer_id: str) -> None:
        """It is as good as gone for this exchange, and does what else it does. One that has taken
        over may not get on because of others, so all are told of a first primary only."""
        if not self.progress.owes(peer_id):
            return
        log.info("round %d: %s lives and gives no result", self.number, peer_id[-8:])
        for machine in self._machines.values():
            if machine.shard.ballot.is_first and machine.shard.ballot.primary == peer_id:
                self._ownership.members.found_owing(peer_id, self.number)
                break
        self._owing.add(peer_id)
        self.refresh()

    def _look_who_owed(self, j: int, giver: str) -> None:
        """A result has come of another one than its primary (of none: it is the own copy). Where
        that owed it for half of the time, others have waited for all of it: whoever finds it
        a moment later says so too."""
        primary = self._machines[j].shard.ballot.primary
        is_first = self._machines[j].shard.ballot.is_first
        if not is_first or primary in (giver, self._gossip.own.peer_id):
            return
        now, longest_s = self._gossip.liveness.awake_s(), self._result_s(primary) / 2
        if self.progress.is_owed(j, primary, now, longest_s):
            self._ownership.members.found_owing(primary, self.number)

    def _silent(self, peer_id: str) -> None:
        """It has not answered in the time that an exchange takes, if that is known."""
        is_behind = self._ownership.members.behind([peer_id], self.number)
        if self._pace.waits().is_known and not is_behind:
            self._hangs(peer_id)

    def _mute(self, peer_id: str) -> None:
        """It has not answered a question in that time, which takes no work."""
        if self._pace.waits().is_known:
            self._hangs(peer_id)
            self._ownership.members.found_mute(peer_id)
            self.refresh()

    def _absent(self, j: int, peer_ids: Sequence[str]) -> None:
        """No contribution to a shard has come of these in time, to this primary by whose ballot
        they go: the next time it may be waited for in vain as well."""
        found, elsewhere = self._ownership.members, dict(self._machines[j].shard.claims)
        for peer_id in set(peer_ids) - elsewhere.keys() - set(found.behind(peer_ids, self.number)):
            found.found_absent(peer_id, self.number)
        self.refresh()

    def _leads(self, peer_id: str) -> None:
        """It takes over: it gets as long as the one before it."""
        if self.progress.leads(peer_id):
            self._ownership.members.works(peer_id)
            self.refresh()

    # ---- commands ---------------------------------------------------------------------------

    def _carry_out(self, j: int, command: do.Command) -> None:
        match command:
            case do.Push():
                self._calls.add_push(j, command)
                self._flush_soon()
            case do.GiveUpPush():
                self._calls.give_up_push(j)
            case do.Ask():
                self._calls.add_question(j, command)
                self._flush_soon()
            case do.Pause():
                self._pause(j)
            case do.SetDeadline():
                self._set_deadline(j)
            case do.SetGrace():
                self._tasks.start(self._end_grace(j))
            case do.LookInto(peer_id):
                self._gossip.liveness.probe(peer_id)
            case do.Adopt(result, is_own):
                self._adopt(j, result, is_own=is_own)
            case do.Spoiled():
                self._states.spoil(j, self.number)
                log.info("round %d shard %d: another primary's step holds", self.number, j)
            case do.Abandon():
                self._is_behind = True
                self._end_if_behind()
            case do.Sum() | do.FindNorm() | do.Step() | do.Repeat():
                self._begin_work(j, command)
                if isinstance(command, do.Sum) and command.absent and self._pace.waits().is_known:
                    self._absent(j, command.absent)
            case do.Mirror():
                before = self._steps.before(j)
                for backup in command.backups:
                    self._tasks.start(self._mirror(j, backup, command, before))
            case do.Pull():
                raise NotImplementedError("pairs meet in gossip_averaging")
            case _:
                future = self._callers.pop(command.call, None)
                if future is not None and not future.done():
                    future.set_result(command)

    def _flush_soon(self) -> None:
        """What is to be sent in this turn of the loop is sent together."""
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        for call in self._calls.due_pushes():
            call.begin(self._tasks.start(self._push(call)))
        for question in self._calls.due_questions():
            self._tasks.start(self._ask(question))

    # ---- pushes and results -----------------------------------------------------------------

    async def _push(self, call: PushCall) -> None:
        await self._make_push(call)
        self._end_if_behind()

    def _end_if_behind(self) -> None:
        """What is on its way to other primaries may count yet, with them."""
        if self._is_behind and not (self._calls.is_giving and self._ownership.takes_late):
            self.fail(Behind(f"the stage is further on than round {self.number}"))

    async def _make_push(self, call: PushCall) -> None:
        try:
            found = await self._calls.push(call)
        except SwarmnetError as e:
            log.debug("round %d at %s: %s", self.number, call.target[-8:], e)
            blamed = shard_in(e)
            for j in call.ballots:
                if blamed in call.ballots and j != blamed and self._calls.ends(call, j):
                    again = do.Push(call.target, call.ballots[j], call.with_gradient)
                    self._carry_out(j, again)  # it only shared the call
                else:
                    self._push_failed(call, j, e)
            return
        for j, (told, values) in found.items():
            if j not in call.wanted:
                continue
            try:
                result = await self._arrived(j, call.target, told, values)
                made = await self._maker(j, call.target, call.ballots[j], told, values)
            except Exception as e:
                if not isinstance(e, SwarmnetError):
                    log.exception("round %d shard %d: a result was not read", self.number, j)
                self._push_failed(call, j, e)
                continue
            if self._calls.ends(call, j):
                self.feed(j, on.ResultCame(call.target, result, call.ballots[j], made))

    def _push_failed(self, call: PushCall, shard: int, error: Exception) -> None:
        if not self._calls.ends(call, shard):
            return
        if isinstance(error, DeadlineExceeded):
            self._silent(call.target)
        if isinstance(error, TransportError):
            self._gossip.liveness.probe(call.target)
        denied = ballot_in(error, shard)
        if has_moved_on(self.number, error):
            self.feed(shard, on.MovedOn())
        elif denied is not None:
            self.feed(shard, on.Denied(call.target, denied, call.ballots[shard]))
        else:
            self.feed(shard, on.PushFailed(call.target))

    async def _arrived(self, j: int, sender: str, told: ShardReply, values: Array | None) -> Result:
        """Parameters from another replica, or the copy here. They are put where they go once they
        are adopted (`_finish`), not before: in some modes that is where the gradient lies, which
        another primary may ask for yet. Raises `ProtocolViolation` where they are of no use: their
        sender is dead for this exchange; `NotReady` where there is no copy."""
        shard = self._machines[j].shard
        copy: Result | None = shard.result if shard.state is State.COPIED else None
        if copy is not None and copy.rest is not None and not copy.is_audited:
            copy = None  # there is nothing to compare with
        counted = told.counted or told.is_late
        if values is None:
            if copy is None or copy.values is None or copy.parameters is None:
                raise NotReady("the copy was given up")  # and is not told of again
            result = replace(copy, counted=counted)
            values, parameters = copy.values, copy.parameters
        else:
            try:
                why_not = self._not_shown(j, sender, told, values)
                parameters = await self._work.checked(j, values, why_not)
            except ProtocolViolation as e:
                log.warning("round %d: of no use from %s: %s", self.number, sender[-8:], e)
                if isinstance(e, NoResult) and sender == shard.ballot.primary:
                    self._audits.told_falsely(sender, self.number, j)
                self._distrusted.add(sender)
                self.refresh()
                raise
            kept = parameters if self._put is not None else None
            if not counted and self._audits.is_signed_for(j):  # so the signatures were checked
                counted = self._proofs.names_own(told)
            result = Result(values, counted, parameters=kept)
        return result.arrived(
            Came(
                sender,
                told,
                values,
                parameters,
                copy,
                is_primary=sender == shard.ballot.primary,
                # Of what a neighbour has nothing bears this replica's signature.
                has_given=self._calls.tokens.get(j, 0) > 0 and j not in self._neighbours.given,
            )
        )

    def _not_shown(self, j: int, sender: str, told: ShardReply, values: Array) -> NotShown:
        """Whether what comes with a result shows that it is none: whoever makes a step has signed
        its sum, or leaves the parameters as they are."""
        if not self._audits.is_signed_for(j):
            return lambda is_unchanged: ""
        is_primary = sender == self._machines[j].shard.ballot.primary
        was_there = self._was_there(j, told)
        return lambda is_unchanged: self._proofs.not_shown(
            self.number,
            j,
            told,
            values,
            is_unchanged=is_unchanged,
            is_known=is_primary and was_there,
        )

    def _was_there(self, j: int, told: ShardReply) -> bool:
        """This replica is known to the primary that tells a result: a contribution of it is in
        that, as is told with it, or it served before. Who has just come may be unknown to one that
        was alone, and signed nothing."""
        has_given = self._calls.tokens.get(j, 0) > 0 and j not in self._neighbours.given
        began = self._work.plan.parameter_version(self._gossip.own.active_from)
        return (has_given and told.counted) or began < self.number

    async def _maker(
        self, j: int, sender: str, ballot: Ballot, told: ShardReply, values: Array | None
    ) -> Ballot | None:
        """Of a result, as `ResultCame` has it. `ballot`: that of the call which it answers."""
        if values is None or sender == ballot.primary:
            return None
        made = await self._proofs.maker(self.number, j, sender, told, values)
        if made is not None and made.primary == sender:
            line = "round %d shard %d: %s tells a result that bears no other signature"
            log.debug(line, self.number, j, sender[-8:])
        return made

    def _adopt(self, j: int, result: Result | None, *, is_own: bool) -> None:
        giver = ""
        if result is not None:
            came = result.adopt()
            if came is not None:
                giver = came.sender
                self._books.heard(self.number, j, came.told)
                if came.told.is_copy:
                    self._books.made_alike(j, came.sender)
                self._audits.came(self.number, j, came)
                if self._machines[j].shard.roster.clips:
                    summed = came.told.summed or self._proofs.sum_behind(self.number, j)
                    self._books.norms.adopted(self.number, j, summed)
            self.results[j] = result
        shard = self._machines[j].shard
        if members := self._calls.members.get(j):
            counted = self.results[j].counted
            if counted or (counted is None and shard.me in shard.senders):
                self._books.counts_too(self.number, j, members)
        if is_own and shard.roster.quorum:
            self._late.decided(self.number, j, shard.senders)
        if not is_own:
            self._look_who_owed(j, giver)
        self._steps.forget(j)
        self._calls.forget(j)
        self._work.adopted(self.number, j)
        if self._put is not None:
            self._tasks.start(self._finish(j))
        self._gossip.changed.notify_all()

    async def _finish(self, j: int) -> None:
        """Puts a result where it goes."""
        put, result = self._put, self.results[j]
        if put is None or j in self.done or j not in self._calls.tokens:
            return  # where the own contribution is still to come, it goes on then
        try:
            await self._work.complete(self.number, j, result)
            await self._work.put(j, result, put, is_in_stage=self._stays_in_stage)
        except Exception as e:
            if not isinstance(e, SwarmnetError):
                log.exception("round %d shard %d: a result was not put", self.number, j)
            self.fail(Behind(str(e) or type(e).__name__))
            return
        shard, counted = self._machines[j].shard, result.counted
        if counted is None:
            counted = shard.me in shard.senders
        self.done.setdefault(j, counted or not self._calls.tokens[j])
        self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """It cannot end here."""
        self.failure = self.failure or error
        self.changed.notify_all()

    # ---- ballots ----------------------------------------------------------------------------

    async def _ask(self, question: Question) -> None:
        member, is_final = question.member, question.is_final
        try:
            answers = await self._calls.ask(question)
        except SwarmnetError as e:  # it is asked again, as long as it lives
            log.debug("round %d: no answer of %s: %s", self.number, member[-8:], e)
            if isinstance(e, DeadlineExceeded) or (is_final and self._is_overdue(member)):
                self._mute(member)
            if isinstance(e, TransportError):
                self._gossip.liveness.probe(member)
            for j, asked in question.asked.items():
                if has_moved_on(self.number, e):
                    self.feed(j, on.MovedOn())
                elif is_final and has_not_begun(self.number, e):
                    # It follows nobody, and finds the result.
                    self.feed(j, on.Agreed(member, asked.ballot, is_final, asked.count))
            return
        self._promises_due.pop(member, None)
        for answer in answers:
            j, asked = answer.shard, answer.asked
            if answer.result is not None:
                await self._result_of(j, member, asked.ballot, *answer.result)
            elif answer.ballot == asked.ballot:
                self.feed(j, on.Agreed(member, asked.ballot, is_final, asked.count))
            else:
                self.feed(j, on.Denied(member, answer.ballot, asked.ballot, asked.count))

    def _is_overdue(self, member: str) -> bool:
        """A member that lives refuses its promise as long as a contribution may take."""
        now, wait_s = self._gossip.liveness.awake_s(), self._pace.waits().contributions_s
        return self._promises_due.setdefault(member, Deadline.after(now, wait_s)).is_over(now)

    async def _result_of(
        self, shard: int, member: str, ballot: Ballot, told: ShardReply, values: Array | None
    ) -> None:
        """`ballot`: that of the call which it answers."""
        try:
            result = await self._arrived(shard, member, told, values)
            made = await self._maker(shard, member, ballot, told, values)
        except SwarmnetError as e:
            log.warning("round %d: of no use from %s: %s", self.number, member[-8:], e)
        else:
            self.feed(shard, on.ResultCame(member, result, ballot, made))

    # ---- sums and steps ---------------------------------------------------------------------

    def _begin_work(self, j: int, command: do.Sum | do.FindNorm | do.Step | do.Repeat) -> None:
        self.progress.begins(j, command)
        if isinstance(command, do.FindNorm) and command.total is not None:
            summed: Total = command.total
            given = summed.gradient, summed.num_tokens
            self._calls.sum_ahead(j, *given, command.ballot, command.backups)
        if isinstance(command, do.Repeat):
            mirror, total, maker = command.step
            self._books.summed(self.number, j, self._audits.mirrored(mirror, maker, total))
        work = self._steps.work_for(j, command)
        self._tasks.start(self._guarded(j, command.attempt, work))
        if isinstance(command, do.Sum):
            self._look_for_state(j)

    async def _guarded(self, j: int, attempt: int, work: Work) -> None:
        """An error of the machine ends the attempt, not the exchange; one that its user has to see
        to ends the peer."""
        try:
            for event in await work():
                self.feed(j, event)
                result: Result | None = event.result if isinstance(event, on.Stepped) else None
                if result is not None and result.rest is not None and self._audits.draws():
                    # The worker makes it before it puts the primary's result.
                    self._tasks.start(self._complete(j, result.to_be_audited()))
        except UserError as e:
            self._states.fail(e)
            self.fail(e)
        except Exception as e:
            log.warning("round %d shard %d: no step here: %s", self.number, j, e)
            self.feed(j, on.StepFailed(attempt))

    async def _complete(self, j: int, copy: Result) -> None:
        """Makes the rest of a step that was followed, to be compared with the primary's."""
        try:
            await self._work.complete(self.number, j, copy)
        except SwarmnetError as e:
            log.debug("round %d shard %d is not audited: %s", self.number, j, e)

    async def _mirror(
        self, j: int, backup: str, command: do.Mirror, before: asyncio.Future[Before]
    ) -> None:
        """Has a backup make the step too."""
        total: Total | None = command.total
        assert total is not None  # there is nothing to mirror otherwise
        state = await before
        request = self._steps.mirror_request(j, total, command.ballot, state)
        given = total.gradient if state.result is None else state.result
        event: on.Event = on.Refused(backup, command.attempt)
        members = self._ownership.members
        if not members.copies(backup, self.number):
            self.feed(j, event)  # it gets the step all the same, and may show that it makes it
        if self.progress.is_follower(backup, j):
            try:
                digest = await self._calls.mirror(backup, request, given)
            except SwarmnetError as e:
                event = self._not_mirrored(j, backup, command, e)
            else:
                event = on.Confirmed(backup, command.attempt)
                members.copied(backup, self.number)
                if self._steps.is_newest(j, command.attempt):
                    self._books.copied(self.number, j, backup, digest)
        self.feed(j, event)

    def _not_mirrored(
        self, shard: int, backup: str, command: do.Mirror, error: SwarmnetError
    ) -> on.Event:
        log.debug("shard %d was not mirrored at %s: %s", shard, backup[-8:], error)
        if isinstance(error, DeadlineExceeded):  # its link is too slow: it fetches the state later
            members = self._ownership.members
            if self._pace.waits().is_known and not members.behind([backup], self.number):
                members.found_uncopied(backup, self.number)
        elif isinstance(error, TransportError):
            self._gossip.liveness.probe(backup)
            return on.MirrorFailed(backup, command.attempt)
        denied = ballot_in(error)
        if denied is None:
            return on.Refused(backup, command.attempt)
        self.feed(shard, on.Denied(backup, denied, command.ballot))
        return on.MirrorFailed(backup, command.attempt)  # it is asked again where this one goes on

    def stand_in(self, j: int, primary: str, total: Array, num_tokens: int) -> None:
        """As backup that has got the sum of a shard: its primary ought to tell other stages of its
        squares."""
        if self._machine(j).shard.roster.clips and not self._work.tells_results and num_tokens:
            self._tasks.start(self._stand_in(j, primary, total, num_tokens))

    async def _stand_in(self, j: int, primary: str, total: Array, num_tokens: int) -> None:
        members, norms = self._ownership.members, self._books.norms
        at_once = not members.speaks(primary, self.number)
        if not await norms.is_silent(self.number, at_once=at_once):
            return
        try:
            squares = await self._work.squares(j, total, num_tokens)
            await norms.stand_in(self.number, j, squares)
            if not at_once:
                members.found_unspoken(primary, self.number)
        except SwarmnetError as e:
            log.debug("round %d shard %d: no squares: %s", self.number, j, e)

    # ---- time -------------------------------------------------------------------------------

    def _pause(self, j: int) -> None:
        is_long = self._machines[j].shard.state is not FOLLOWING
        if not self._pauses.add(j, is_long=is_long):
            pause_s = self._pauses.begin_s(self._pace.waits().usual_s, is_long=is_long)
            loop = asyncio.get_running_loop()
            self._timers[is_long] = loop.call_later(pause_s, self._again, is_long)

    def _again(self, is_long: bool) -> None:
        del self._timers[is_long]
        for j in self._pauses.end(is_long=is_long):
            self.feed(j, on.Again())

    def _set_deadline(self, j: int) -> None:
        if self._put is None:
            return  # it runs from when this replica has closed its round
        is_new, now = j not in self._deadlines, self._gossip.liveness.awake_s()
        deadline = Deadline.after(now, self._pace.waits().contributions_s)
        self._deadlines[j] = deadline
        if is_new and self._ownership.members.behind(self._awaited(j), self.number):
            self._begin_expiry(j)
        elif j not in self._expiring:
            self._await_deadline(deadline)

    def _await_deadline(self, deadline: Deadline) -> None:
        """Most shards are gathered long before: so one timer is for all of them."""
        first = self._first_deadline
        if first is not None and first.first(deadline) is first:
            return
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        left_s = deadline.left_s(self._gossip.liveness.awake_s())
        loop = asyncio.get_running_loop()
        self._deadline_timer = loop.call_later(left_s, self._end_deadlines)
        self._first_deadline = deadline

    def _end_deadlines(self) -> None:
        now, self._first_deadline = self._gossip.liveness.awake_s(), None
        for j, deadline in list(self._deadlines.items()):
            if j in self._expiring:
                continue
            if not deadline.is_over(now):
                self._await_deadline(deadline)
            elif self._machines[j].shard.state is State.GATHERING:
                self._begin_expiry(j)
            else:
                del self._deadlines[j]

    def _begin_expiry(self, j: int) -> None:
        self._expiring.add(j)
        self._tasks.start(self._expire(j))

    async def _expire(self, j: int) -> None:
        """Waits for the deadline in time awake: after a stall of its own, this process has not read
        yet what came. Then for the leases of those that may be back, which sets it anew
        (`refresh`). It runs from when those that are waited for have left the exchange before, if
        that is before it."""
        if await self._until_begun(j):
            self._set_deadline(j)
        while True:
            if left_s := self._deadlines[j].left_s(self._gossip.liveness.awake_s()):
                await asyncio.sleep(left_s)
                continue  # it may have been set anew meanwhile, or this process stood still
            await self._gossip.liveness.look_into(self._awaited(j))
            self.refresh()
            while any(self._members[p].life == SUSPECT for p in self._awaited(j)):
                await self._gossip.changed.wait(LOOK_AGAIN_S)
                self.refresh()
            if self._deadlines[j].is_over(self._gossip.liveness.awake_s()):
                break
        del self._deadlines[j]
        self._expiring.discard(j)
        self.feed(j, on.DeadlinePassed())

    async def _until_begun(self, j: int) -> bool:
        """Beside rounds an exchange may end at one replica long before it does at others, which
        have nothing to give for the next one until they have left it: waits for those that are
        waited for, until the present deadline at most. Returns whether there was one."""
        has_waited, end = False, self._deadlines[j]
        while self._ownership.members.behind(self._awaited(j), self.number) and not end.is_over(
            self._gossip.liveness.awake_s()
        ):
            has_waited = True
            await self._gossip.changed.wait(LOOK_AGAIN_S)
        return has_waited

    async def _end_grace(self, j: int) -> None:
        """Waits beside a quorum, in time awake."""
        now, began = self._gossip.liveness.awake_s(), self._begun_at
        passed_s = 0.0 if began is None else Since(began).s(now)
        end = Deadline.after(now, self._pace.waits().grace_s(passed_s))
        while not end.is_over(now):
            await asyncio.sleep(end.left_s(now))
            now = self._gossip.liveness.awake_s()
        self.feed(j, on.GracePassed())

    def _awaited(self, j: int) -> list[str]:
        shard = self._machines[j].shard
        return shard.waits_for() if shard.state is State.GATHERING else []


class Steps:
    """Makes the sums and steps of one exchange: the commands of the table that work on tensors."""

    def __init__(
        self,
        exchange: int,
        replica: Replica,
        work: ShardWork,
        books: Books,
        tied: TiedShards,
        neighbours: Neighbours,
        tasks: Tasks,
    ) -> None:
        self._number = exchange
        self._neighbours = neighbours
        self._replica = replica
        self._work = work
        self._books = books
        self._tied = tied
        self._tasks = tasks
        self._attempts: dict[int, int] = {}
        """By shard, the newest sum that was begun here."""
        self._totals: dict[int, Total | None] = {}
        self._of_stage: dict[int, Total | None] = {}
        """Of tied shards that another stage makes the step on: what goes there."""
        self._scales: dict[int, float] = {}
        self._before: dict[int, asyncio.Future[Before]] = {}
        """By shard that is stepped here: the state before the step."""

    def forget(self, shard: int) -> None:
        """The shard has its result."""
        for known in (self._totals, self._of_stage, self._scales, self._before):
            known.pop(shard, None)

    def work_for(self, j: int, command: do.Sum | do.FindNorm | do.Step | do.Repeat) -> Work:
        """What a command has to be done, at once."""
        match command:
            case do.Sum():
                return functools.partial(self._sum, j, command)
            case do.FindNorm():
                return functools.partial(self._find_norm, j, command.attempt)
            case do.Step():
                before = self._before[j] = asyncio.get_running_loop().create_future()
                return functools.partial(self._step, j, command, before)
            case do.Repeat():
                return functools.partial(self._repeat, command.attempt, *command.step)

    def before(self, shard: int) -> asyncio.Future[Before]:
        """The state of a shard before the newest step on it, when it is there."""
        return self._before[shard]

    def is_newest(self, shard: int, attempt: int) -> bool:
        """No other sum has been begun since."""
        return self._attempts[shard] == attempt

    def mirror_request(
        self, shard: int, total: Total, ballot: Ballot, before: Before
    ) -> MirrorRequest:
        """What a backup needs beside the sum, for its step to be the same."""
        late = self._books.late_behind(self._number, shard)
        return MirrorRequest(
            self._number,
            self._replica.index,
            shard,
            before.scale,
            before.steps,
            total.num_tokens,
            self._books.norm(self._number),
            before.lineage,
            ballot.term,
            summed=before.summed,
            late=sum(late),
            older=late[1:],
        )

    async def _sum(self, j: int, command: do.Sum) -> list[on.Event]:
        self._books.summed(self._number, j, command.senders)
        if command.absent:
            names = ", ".join(p[-8:] for p in command.absent)
            log.info("round %d shard %d: went on without %s", self._number, j, names)
        if command.late:
            names = ", ".join(p[-8:] for p in command.late)
            log.info("round %d shard %d: late, for the next one: %s", self._number, j, names)
        self._attempts[j] = command.attempt
        is_whole = not decides_tied(self._replica, j)
        total = await self._work.total(self._number, j, command.parts, is_whole=is_whole)
        if not is_whole:
            total = await self._tied.add(self._number, j, total)
            total = None if total is None else await self._work.coded(self._number, j, total)
        if not self.is_newest(j, command.attempt):
            return []
        if follows_tied(self._replica, j):
            self._of_stage[j], total = total, None
        self._totals[j] = total
        self._scales.pop(j, None)
        return [on.Summed(total, command.attempt)]

    async def _find_norm(self, j: int, attempt: int) -> list[on.Event]:
        scale = await self._work.scale(self._number, j, self._totals[j])
        if self.is_newest(j, attempt):  # else another one has a sum of its own
            self._scales[j] = scale
        return [on.ClipKnown(attempt)]

    async def _step(
        self, j: int, command: do.Step, before: asyncio.Future[Before]
    ) -> list[on.Event]:
        total: Total | None = command.total
        if follows_tied(self._replica, j):
            followed = await self._follow(j, command)
            if followed is None:
                return [on.StepFailed(command.attempt), on.MovedOn()]
            result = followed
        elif total is None:
            term = command.ballot.term
            result = await self._work.leave_as_it_is(self._number, j, term)
        else:
            scale = self._scales.get(j)
            if scale is None:
                scale = await self._work.scale(self._number, j, total)
            term = command.ballot.term
            state = await self._work.before(self._number, j, scale, total, term)
            if self._work.tells_results:
                result, state = await self._work.step_first(self._number, j, total, state)
                _set(before, state)
            else:
                _set(before, state)
                result = await self._work.step(self._number, j, total, state)
        return [on.Stepped(result, command.attempt)]

    async def _follow(self, j: int, command: do.Step) -> Result | None:
        """The step that another stage makes; None where that stage is too far on."""
        total = self._of_stage.get(j)
        # This stage's norm is complete without the shard, and the other's step waits for that.
        norm = self._tasks.start(self._work.scale(self._number, j, None))
        try:
            told, values = await self._tied.result(self._number, j, command.ballot.term, total)
        except Stale:
            return None
        finally:
            norm.cancel()
        await self._work.checked(j, values)
        self._books.heard(self._number, j, told)
        self._books.stepped(self._number, j, 0 if total is None else total.num_tokens)
        return Result(values)

    async def _repeat(
        self, attempt: int, mirror: MirrorRequest, gradient: Array, maker: str
    ) -> list[on.Event]:
        result = await self._work.repeat(mirror, gradient, maker)
        if not result.counted and mirror.shard in self._neighbours.given:
            # It may be in that of a neighbour, as far as is known.
            result = replace(result, counted=True, is_whole=False)
        return [on.Stepped(result, attempt, result.is_whole)]


def _set(future: asyncio.Future[Before], state: Before) -> None:
    if not future.done():
        future.set_result(state)
