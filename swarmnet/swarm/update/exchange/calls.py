"""The calls of one exchange to other replicas: pushes, ballots, sums and mirrored steps.

A push of a shard is one call: the gradient goes, the new parameters come back. What is to be sent
in the same turn of the event loop to the same peer shares a call, since a call costs the same
whatever it carries. What comes of a call is returned: `exchange` makes events of it.

Sums go to the backups while their primary waits for the norm of all stages. For an exchange its
uplink has little to send meanwhile, and a home link takes as long for the sums as all stages do for
the norm. The step that is mirrored then names its sum by a digest, in place of carrying it. That is
tried once: where the sum does not come, or the call breaks, the step carries it. A backup that has
let the time pass that a call for it has gets no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from swarmnet.errors import (
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    Redirect,
    Stale,
    SwarmnetError,
)
from swarmnet.methods.method import Method, ReplyT, RequestT
from swarmnet.methods.update import (
    BALLOT,
    GATHER,
    MIRROR,
    REDUCE,
    SUMS,
    BallotRequest,
    GatherRequest,
    MirrorReply,
    MirrorRequest,
    ReduceProgress,
    ReduceRequest,
    ShardReply,
    SumsRequest,
)
from swarmnet.protocol.membership.records import LEAVING
from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import exchange_turn
from swarmnet.protocol.update.exchange_progress import ExchangeProgress
from swarmnet.protocol.update.late_tokens import Late
from swarmnet.protocol.update.roster import Ballot
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import TOGETHER_S
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.coded import check_result, coded_bytes
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchange.proofs import Proofs
from swarmnet.swarm.update.optimizer_states import OptimizerStates
from swarmnet.wire import MAX_ARRAYS, Array, Message

log = logging.getLogger("swarmnet.averaging")

SHARED_CALL_S, MAX_SHARED_CALL_BYTES = 1.0, 16 << 20
"""Shards share a call as long as they go up this replica's link in such a time, and are not more
bytes: of too many, a primary that could step some would hear late."""
BESIDE_PART = 0.05
"""Of that, beside a round: a microbatch may wait behind such a call."""
USUAL_SHARED_CALL_BYTES = 4 << 20
"""The same while the link has not been measured."""
KEPT_SUMS = 2
"""Of a shard, at a backup: where it was summed again, the first may come last."""

Contribution = tuple[int, Array | None]
"""What a replica gives to the sum of a shard: the tokens behind it, and their gradient (none for no
tokens)."""
NOTHING: Contribution = (0, None)
Told = tuple[ShardReply, Array | None]
"""The answer of one shard; without values where they are those of the caller's own copy."""


@dataclass
class LongCalls:
    """Makes the calls of exchanges that take long: each ends with its callee, and has its time and
    its turn on the uplink."""

    gossip: Gossip
    replica: Replica
    pace: ExchangePace

    def room(self, exchange: int) -> int:
        """Bytes of several shards that travel together."""
        room = shared_call_bytes(self.gossip.own.upload_bytes_per_s)
        return int(room * BESIDE_PART) if self.replica.plan.is_delayed(exchange) else room

    async def turn(self, num_bytes: int) -> None:
        """As `ExchangePace.turn`."""
        await self.pace.turn(num_bytes)

    async def call(
        self,
        peer_id: str,
        method: Method[RequestT, ReplyT],
        message: Message[RequestT],
        on_progress: Callable[[Message[Any]], None] | None = None,
    ) -> Message[ReplyT]:
        """Has the time that a call for a shard may take. Raises as `Transport.call`."""
        waits = self.pace.waits()
        return await self.gossip.liveness.call_while_live(
            peer_id,
            method,
            message,
            timeout_s=waits.call_s,
            on_progress=on_progress,
            usual_s=waits.usual_s,
        )

    async def call_in_time(
        self, peer_id: str, method: Method[RequestT, ReplyT], message: Message[RequestT]
    ) -> Message[ReplyT]:
        """Has the time of a contribution: longer nobody waits for a backup, or for a promise, which
        takes no work, since the contributors wait too. Raises as `Transport.call`."""
        waits = self.pace.waits()
        return await self.gossip.liveness.call_while_live(
            peer_id,
            method,
            message,
            timeout_s=waits.contributions_due_s,
            usual_s=waits.usual_s,
        )


@dataclass(slots=True, eq=False)
class PushCall:
    """A push that is under way, of one shard or of several."""

    target: str
    ballots: dict[int, Ballot]
    with_gradient: bool
    wanted: set[int] = field(default_factory=set)
    """Shards whose answer still counts."""
    task: asyncio.Task[None] | None = None

    def begin(self, task: asyncio.Task[None]) -> None:
        """Notes the task that makes it."""
        self.task = task

    def drop(self, shard: int) -> None:
        """What it brings of a shard does not count; it ends where that was all."""
        self.wanted.discard(shard)
        if not self.wanted and self.task is not None:
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class Question:
    """Questions to one member, one a shard, that share a call."""

    member: str
    is_final: bool
    asked: dict[int, do.Ask]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a member about one shard."""

    shard: int
    asked: do.Ask
    ballot: Ballot
    """By which the member goes."""
    result: Told | None
    """Where it has it."""


class ExchangeCalls:
    """The own calls of one exchange at one replica."""

    def __init__(
        self,
        exchange: int,
        gossip: Gossip,
        replica: Replica,
        states: OptimizerStates,
        pace: ExchangePace,
        progress: ExchangeProgress,
        proofs: Proofs,
        books: Books,
        tasks: Tasks,
    ) -> None:
        self._exchange = exchange
        self._proofs = proofs
        self._books = books
        self._gossip = gossip
        self._replica = replica
        self._states = states
        self._progress = progress
        self._tasks = tasks
        self._calls = LongCalls(gossip, replica, pace)
        self._sums_ahead = SumsAhead(exchange, replica.index, self._calls, tasks)
        self.own: dict[int, Contribution] = {}
        """What this replica contributes, by shard, as long as it is needed."""
        self.tokens: dict[int, int] = {}
        """Behind it."""
        self.members: dict[int, tuple[str, ...]] = {}
        """By shard, the neighbours whose contributions are in it too, ascending."""
        self._pushes: dict[int, PushCall] = {}
        """By shard, the push whose answer counts."""
        self._turned: set[int] = set()
        """Shards whose gradient has had its turn on the uplink."""
        self._to_push: list[tuple[int, do.Push]] = []
        self._to_ask: list[tuple[int, do.Ask]] = []

    def contribute(self, contributions: Mapping[int, Contribution]) -> None:
        """This replica's contributions."""
        self.own.update(contributions)
        self.tokens.update((j, num_tokens) for j, (num_tokens, _) in contributions.items())
        self._proofs.gives(self._exchange, {j: g for j, (_, g) in contributions.items()})

    def forget(self, shard: int) -> None:
        """The shard has its result: its gradient is not needed any more."""
        self.own.pop(shard, None)
        self._proofs.has_given(self._exchange, shard)
        self._sums_ahead.forget(shard)

    # ---- what is to be sent -----------------------------------------------------------------

    def add_push(self, shard: int, command: do.Push) -> None:
        """With the other pushes of this turn of the loop."""
        self._to_push.append((shard, command))

    def add_question(self, shard: int, command: do.Ask) -> None:
        """With the other questions of this turn of the loop."""
        self._to_ask.append((shard, command))

    def due_pushes(self) -> list[PushCall]:
        """The calls that the pushes of this turn of the loop make, each to be made with `push`."""
        pushes, self._to_push = self._to_push, []
        calls = self._calls_for(pushes)
        for call in calls:
            self._pushes.update(dict.fromkeys(call.ballots, call))
            call.wanted.update(call.ballots)
        return calls

    def due_questions(self) -> list[Question]:
        """The calls that the questions of this turn make, each to be made with `ask`."""
        asks, self._to_ask = self._to_ask, []
        by_member: dict[tuple[str, bool], dict[int, do.Ask]] = {}
        for j, command in asks:
            for member in command.members:
                by_member.setdefault((member, command.is_final), {})[j] = command
        # They may all be answered with results.
        at_once = MAX_SHARED_CALL_BYTES // (4 * max(self._replica.stage.shard_sizes))
        at_once = max(1, min(MAX_ARRAYS, at_once))
        return [
            Question(member, is_final, {j: asked[j] for j in shards[k : k + at_once]})
            for (member, is_final), asked in by_member.items()
            for shards in [sorted(asked)]
            for k in range(0, len(shards), at_once)
        ]

    def _calls_for(self, pushes: Sequence[tuple[int, do.Push]]) -> list[PushCall]:
        """Beside a round what shares a call waits for room on the link together, and a replica that
        leaves wants to hear of each shard as early as can be."""
        is_alone = self._gossip.own.state == LEAVING
        calls: list[PushCall] = []
        open_: dict[str, tuple[PushCall, int]] = {}
        """By primary, a call that has room, and how much."""
        for j, command in pushes:
            num_bytes = coded_bytes(self._replica, j)
            if is_alone or not command.has_gradient:
                calls.append(PushCall(command.target, {j: command.ballot}, command.has_gradient))
                continue
            call, room = open_.get(command.target, (None, 0))
            if call is None or room < num_bytes or len(call.ballots) == MAX_ARRAYS:
                room = self._calls.room(self._exchange)
                call = PushCall(command.target, {}, True)
                calls.append(call)
            call.ballots[j] = command.ballot
            open_[command.target] = (call, room - num_bytes)
        return calls

    # ---- pushes -----------------------------------------------------------------------------

    @property
    def is_pushing(self) -> bool:
        """Some answer is waited for."""
        return bool(self._pushes)

    @property
    def is_giving(self) -> bool:
        """Some contribution is on its way."""
        return any(call.with_gradient for call in self._pushes.values())

    async def push(self, call: PushCall) -> dict[int, Told]:
        """Makes a push. Returns what is told of each shard; raises `SwarmnetError`."""
        shards = tuple(call.ballots)
        own = [self.own.get(j, NOTHING) if call.with_gradient else NOTHING for j in shards]
        given = {j: g for j, (_, g) in zip(shards, own, strict=True) if g is not None}
        tokens = {j: n for j, (n, _) in zip(shards, own, strict=True)}
        signatures = await self._proofs.sign(
            self._exchange, {j: (tokens[j], g) for j, g in given.items()}
        )
        # What is sent again, for its primary has died, goes at once: behind all others it would
        # come too late.
        num_bytes = sum(g.num_bytes for j, g in given.items() if j not in self._turned)
        self._turned.update(given)
        await self._calls.turn(num_bytes)
        terms = tuple(ballot.term for ballot in call.ballots.values())
        late, older = self._late_in(shards) if given else ((), ())
        primary = call.ballots[shards[0]].primary
        request = ReduceRequest(
            self._exchange,
            self._replica.index,
            shards,
            tuple(num_tokens for num_tokens, _ in own),
            terms,
            "" if primary == call.target else primary,
            is_whole=not self._replica.synced,
            follows=tuple(self._states.is_before(j, self._exchange) for j in shards),
            signatures=tuple(signatures.values()),
            late=late,
            older=older,
            members=self._members_in(given, shards),
        )
        message = Message(request, tuple(given.values()))
        reply = await self._calls.call(
            call.target, REDUCE, message, lambda told: self._heard(primary, told.body)
        )
        return self._results_in(shards, reply.body.shards, reply.arrays)

    def _members_in(
        self, given: Mapping[int, Array], shards: Sequence[int]
    ) -> tuple[tuple[str, ...], ...]:
        """By shard, whose contributions are in what is given; empty where there are none."""
        found = tuple(self.members.get(j, ()) if j in given else () for j in shards)
        return found if any(found) else ()

    def _late_in(self, shards: Sequence[int]) -> tuple[tuple[int, ...], tuple[Late, ...]]:
        """Of the own contributions to these, the tokens that were late in exchanges before, and how
        many of those were late for longer."""
        own = self._gossip.own.peer_id
        found = [self._books.brought(self._exchange, j, own) for j in shards]
        older = tuple(late[1:] for late in found)
        if not any(found):
            return (), ()
        return tuple(map(sum, found)), older if any(older) else ()

    def _heard(self, primary: str, told: ReduceProgress) -> None:
        """What a primary says before there is a result."""
        if told.has_step:
            self._progress.taken.add(told.shard)
            self._gossip.changed.notify_all()
        else:
            self._progress.has_sum(told.shard, primary)

    def give_up_push(self, shard: int) -> None:
        """What the push still brings does not count."""
        self._to_push = [item for item in self._to_push if item[0] != shard]
        call = self._pushes.pop(shard, None)
        if call is not None:
            call.drop(shard)

    def ends(self, call: PushCall, shard: int) -> bool:
        """Whether the answer to a push counts; there is none under way after it."""
        if self._pushes.get(shard) is not call:
            return False
        del self._pushes[shard]
        call.wanted.discard(shard)
        return True

    # ---- neighbours -------------------------------------------------------------------------

    def in_calls(self, shards: Iterable[int]) -> list[tuple[int, ...]]:
        """Shards whose contributions go to a neighbour, by the calls that take them there."""
        calls: list[list[int]] = []
        room = 0
        for j in shards:
            num_bytes = coded_bytes(self._replica, j)
            if not calls or num_bytes > room or len(calls[-1]) == MAX_ARRAYS:
                calls.append([])
                room = MAX_SHARED_CALL_BYTES
            calls[-1].append(j)
            room -= num_bytes
        return list(map(tuple, calls))

    async def gather(self, neighbour: str, shards: tuple[int, ...], longest_s: float) -> set[int]:
        """Gives a neighbour the own contributions to these. Returns those that it has in its own;
        raises `SwarmnetError`, and then it may have them too."""
        given = [self.own[j] for j in shards]
        tokens = tuple(num_tokens for num_tokens, _ in given)
        request = GatherRequest(self._exchange, self._replica.index, shards, tokens)
        arrays = tuple(gradient for _, gradient in given if gradient is not None)
        reply = await self._gossip.liveness.call_while_live(
            neighbour, GATHER, Message(request, arrays), timeout_s=longest_s
        )
        return set(shards).intersection(reply.body.shards)

    # ---- ballots ----------------------------------------------------------------------------

    async def ask(self, question: Question) -> list[Answer]:
        """Asks a member. Raises `SwarmnetError`."""
        asked = question.asked
        shards = tuple(asked)
        terms = tuple(command.ballot.term for command in asked.values())
        request = BallotRequest(
            self._exchange, self._replica.index, shards, terms, question.is_final
        )
        # A promise takes no work; before one is given, an exchange may have to begin.
        call = self._calls.call_in_time if question.is_final else self._calls.call
        reply = await call(question.member, BALLOT, Message(request))
        told = reply.body
        if len(told.terms) != len(shards):
            raise ProtocolViolation("not an answer for each shard")
        with_result = tuple(shards[i] for i in told.results)
        found = self._results_in(with_result, told.told, reply.arrays)
        return [
            Answer(j, asked[j], Ballot(term, primary), found.get(j))
            for j, term, primary in zip(shards, told.terms, told.primaries, strict=True)
        ]

    # ---- mirrored steps ---------------------------------------------------------------------

    def sum_ahead(
        self, shard: int, gradient: Array, num_tokens: int, ballot: Ballot, backups: Sequence[str]
    ) -> None:
        """These backups will be asked to make a step with the sum, when the norm is known."""
        followers = [p for p in backups if self._progress.is_follower(p, shard)]
        self._sums_ahead.give(shard, gradient, num_tokens, ballot, followers)

    async def mirror(self, backup: str, request: MirrorRequest, gradient: Array) -> bytes:
        """Has a backup make the step too. Returns the digest of what it has made; raises
        `SwarmnetError`."""
        reply = await self._mirrored(backup, request, gradient)
        return reply.body.digest

    async def _mirrored(
        self, backup: str, request: MirrorRequest, gradient: Array
    ) -> Message[MirrorReply]:
        ahead = self._sums_ahead.take(backup, request.shard, gradient)
        if ahead is not None:
            await ahead.began()  # the request is there first, and waits for the sum
            named = Message(replace(request, sum_digest=ahead.digest))
            asking = self._tasks.start(self._calls.call_in_time(backup, MIRROR, named))
            try:
                await asyncio.wait((asking, ahead.sent), return_when=asyncio.FIRST_COMPLETED)
                if asking.done() or ahead.has_come:
                    return await asking
            except NotReady as e:
                if not e.details.get("lacks_sum"):
                    raise
            finally:
                asking.cancel()
            if ahead.group.overdue is not None:
                raise ahead.group.overdue
        await self._calls.turn(gradient.num_bytes)
        return await self._calls.call_in_time(backup, MIRROR, Message(request, (gradient,)))

    def _results_in(
        self, shards: tuple[int, ...], told: tuple[ShardReply, ...], arrays: tuple[Array, ...]
    ) -> dict[int, Told]:
        num_given = sum(not reply.is_copy for reply in told)
        if len(told) != len(shards) or len(arrays) != num_given:
            raise ProtocolViolation(f"an answer of {len(told)} shards to a call for {len(shards)}")
        given, found = iter(arrays), dict[int, Told]()
        for j, reply in zip(shards, told, strict=True):
            values = None if reply.is_copy else next(given)
            if values is not None:
                check_result(self._replica, j, values)
            found[j] = reply, values
        return found


def shared_call_bytes(upload_bytes_per_s: float) -> int:
    """Bytes of the gradients that share a call. `upload_bytes_per_s`: 0 while unknown."""
    if not upload_bytes_per_s:
        return USUAL_SHARED_CALL_BYTES
    return int(min(SHARED_CALL_S * upload_bytes_per_s, MAX_SHARED_CALL_BYTES))


def has_moved_on(exchange: int, error: Exception) -> bool:
    """An answer says that the stage cannot give the result of this exchange any more."""
    told = error.details.get("round") if isinstance(error, Stale) else None
    return exchange_turn.has_moved_on(exchange, told)


def has_not_begun(exchange: int, error: Exception) -> bool:
    """An answer says that the stage comes to this exchange later."""
    told = error.details.get("round") if isinstance(error, NotReady) else None
    return exchange_turn.has_not_begun(exchange, told)


def shard_in(error: Exception) -> int | None:
    """The one shard that the failure of a shared push is about; None where it is about all."""
    told = error.details.get("shard") if isinstance(error, Redirect) else None
    return told if isinstance(told, int) else None


def ballot_in(error: Exception, shard: int | None = None) -> Ballot | None:
    """The ballot by which another replica goes, as it says of this shard."""
    if not isinstance(error, Redirect):
        return None
    term, primary = error.details.get("term"), error.details.get("peer_id")
    if not (isinstance(term, int) and isinstance(primary, str) and 0 < len(primary) <= 256):
        return None
    if shard is not None and error.details.get("shard") != shard:
        return None
    return Ballot(term, primary)


# ---- sums ahead ------------------------------------------------------------------------------


def digest_of(total: Array) -> bytes:
    """By which a mirrored step names a sum."""
    return xxhash.xxh3_64_digest(total.data)


@dataclass(eq=False)
class Group:
    """Sums that go to one backup in one message."""

    sums: dict[int, tuple[Array, int, Ballot]] = field(default_factory=dict)
    """By shard, with the tokens behind each."""
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    """It is being sent, or was."""
    there: set[int] = field(default_factory=set)
    """Shards whose sum the backup has."""
    overdue: DeadlineExceeded | None = None
    """It has not answered in time."""

    @property
    def num_bytes(self) -> int:
        return sum(total.num_bytes for total, _, _ in self.sums.values())

    def close(self) -> None:
        """It has been sent, or has failed: whoever waits for it looks whether it has come."""
        self.has_turn.set()
        self.sums = {}


@dataclass(frozen=True, slots=True, eq=False)
class OnItsWay:
    """The sum of a shard that goes to one backup."""

    shard: int
    total: Array
    digest: bytes
    group: Group
    sent: asyncio.Task[None]
    """The call that brings it."""

    async def began(self) -> None:
        """Waits until it is being sent."""
        await self.group.has_turn.wait()

    @property
    def has_come(self) -> bool:
        """The backup has it."""
        return self.shard in self.group.there


@dataclass
class SumsAhead:
    """Gives the sums of one exchange to backups, as their primary."""

    exchange: int
    stage_index: int
    calls: LongCalls
    tasks: Tasks

    def __post_init__(self) -> None:
        self._open: dict[str, tuple[Group, asyncio.Task[None]]] = {}
        """By backup, what waits for other sums that are ready in a moment."""
        self._going: dict[tuple[str, int], OnItsWay] = {}

    def give(
        self, shard: int, total: Array, num_tokens: int, ballot: Ballot, backups: Iterable[str]
    ) -> None:
        """Sends the sum of a shard to these, each in its turn on the uplink."""
        named = list(backups)
        digest = digest_of(total) if named else b""  # what nobody gets may have no bytes yet
        for backup in named:
            group, sent = self._open.get(backup, (None, None))
            if group is None or sent is None or not self._has_room(group, total):
                group = Group()
                sent = self.tasks.start(self._give(backup, group))
                self._open[backup] = group, sent
            group.sums[shard] = total, num_tokens, ballot
            self._going[backup, shard] = OnItsWay(shard, total, digest, group, sent)

    def _has_room(self, group: Group, total: Array) -> bool:
        num_bytes, room = group.num_bytes + total.num_bytes, self.calls.room(self.exchange)
        return len(group.sums) < MAX_ARRAYS and num_bytes <= room

    async def _give(self, backup: str, group: Group) -> None:
        try:
            await asyncio.sleep(TOGETHER_S)
            if self._open.get(backup, (None, None))[0] is group:
                del self._open[backup]
            await self.calls.turn(group.num_bytes)
            group.has_turn.set()
            await self._send(backup, group)
        except SwarmnetError as e:
            log.debug("round %d: no sums ahead at %s: %s", self.exchange, backup[-8:], e)
            group.overdue = e if isinstance(e, DeadlineExceeded) else None
        finally:
            group.close()

    async def _send(self, backup: str, group: Group) -> None:
        shards = tuple(group.sums)
        totals, num_tokens, ballots = zip(*group.sums.values(), strict=True)
        terms = tuple(ballot.term for ballot in ballots)
        request = SumsRequest(self.exchange, self.stage_index, shards, terms, num_tokens)
        reply = await self.calls.call_in_time(backup, SUMS, Message(request, totals))
        group.there.update(set(shards).difference(reply.body.refused))

    def take(self, backup: str, shard: int, total: Array) -> OnItsWay | None:
        """The sum of a shard, where it was given for a backup; once."""
        going = self._going.pop((backup, shard), None)
        return going if going is not None and going.total is total else None

    def forget(self, shard: int) -> None:
        """The shard has its result."""
        for backup, j in list(self._going):
            if j == shard:
                del self._going[backup, j]


class SumsHere:
    """Keeps the newest sums of each shard of one exchange, as backup, that its primary has sent
    ahead."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[tuple[str, bytes], Array]] = {}
        """By shard; from whom, and the digest."""
        self._is_over = False
        self._ended: dict[int, int] = {}
        """By shard, how often it was said that none is waited for any more."""
        self._changed = Condition()

    def put(self, shard: int, sender: str, total: Array) -> None:
        """It has come."""
        known = self._sums.setdefault(shard, {})
        known[sender, digest_of(total)] = total
        if len(known) > KEPT_SUMS:
            del known[next(iter(known))]
        self._changed.notify_all()

    async def of(self, mirror: MirrorRequest, sender: str, wait_s: float) -> Array:
        """The sum that a mirrored step names; it may be on its way yet. Raises `NotReady` where it
        does not come in `wait_s`, or is waited for no more."""
        j, name = mirror.shard, (sender, mirror.sum_digest)
        ended = self._ended.get(j)

        def is_decided() -> bool:
            return self._is_over or self._ended.get(j) != ended or name in self._sums.get(j, {})

        await self._changed.until(is_decided, wait_s)
        total = self._sums.get(j, {}).pop(name, None)
        if total is None:
            raise NotReady("the sum that the step is made with has not come", lacks_sum=True)
        return total

    def end(self, shard: int) -> None:
        """None is waited for: a step has come that carries its sum."""
        self._ended[shard] = self._ended.get(shard, 0) + 1
        self._sums.pop(shard, None)
        self._changed.notify_all()

    def close(self) -> None:
        """The exchange is over here."""
        self._is_over = True
        self._sums = {}
        self._changed.notify_all()
