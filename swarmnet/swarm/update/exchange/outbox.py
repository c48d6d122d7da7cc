"""The calls of one exchange to other replicas: pushes, ballots and mirrored steps.

A push of a shard is one call: the gradient goes, the new parameters come back. What is to be sent
in the same turn of the event loop to the same peer shares a call, since a call costs the same
whatever it carries. What comes of a call are events for `protocol.update.shard_update`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarmnet.errors import (
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    Redirect,
    Stale,
    SwarmnetError,
    TransportError,
)
from swarmnet.methods.method import Method, ReplyT, RequestT
from swarmnet.methods.update import (
    BALLOT,
    MIRROR,
    REDUCE,
    BallotRequest,
    MirrorReply,
    MirrorRequest,
    ReduceProgress,
    ReduceRequest,
    ShardReply,
)
from swarmnet.protocol.membership.records import LEAVING
from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.exchange_turn import has_moved_on, has_not_begun
from swarmnet.protocol.update.roster import Ballot
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchange.coded import check_result, coded_bytes
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.exchange.sums_ahead import SumsAhead
from swarmnet.wire import MAX_ARRAYS, Array, Message

log = logging.getLogger("swarmnet.averaging")

SHARED_CALL_S, MAX_SHARED_CALL_BYTES = 1.0, 16 << 20
"""Shards share a call as long as they go up this replica's link in such a time, and are not more
bytes: of too many, a primary that could step some would hear late."""
BESIDE_PART = 0.05
"""Of that, beside a round: a microbatch may wait behind such a call."""
USUAL_SHARED_CALL_BYTES = 4 << 20
"""The same while the link has not been measured."""

Part = tuple[int, Array | None]
"""A contribution to a shard: the tokens behind it, and their gradient (none for no tokens)."""
Feed = Callable[[int, on.Event], None]
"""By shard, what has happened."""
Told = tuple[ShardReply, Array | None]
"""The answer of one shard; without values where they are those of the caller's own copy."""
Arrived = Callable[[int, str, ShardReply, Array | None], Awaitable[on.Handle]]
"""A result: shard, sender, and what came. Returns what it is kept as; raises `ProtocolViolation`
where the values are of no use, `NotReady` where there is no copy."""


@dataclass(slots=True, eq=False)
class PushCall:
    """A push that is under way, of one shard or of several."""

    target: str
    ballots: dict[int, Ballot]
    with_gradient: bool
    task: asyncio.Task[None] | None = None
    wanted: set[int] = field(default_factory=set)
    """Shards whose answer still counts."""


class Outbox:
    """Of one exchange."""

    def __init__(
        self,
        exchange: int,
        gossip: Gossip,
        replica: Replica,
        pace: ExchangePace,
        tasks: Tasks,
        feed: Feed,
        arrived: Arrived,
        on_progress: Callable[[str, ReduceProgress], None],
        on_silent: Callable[[str], None],
        on_mute: Callable[[str], None],
        follows: Callable[[int], bool],
        is_follower: Callable[[str, int], bool],
    ) -> None:
        """`on_progress(primary, told)` hears what comes before a result; `on_silent(peer_id)`, that
        a call was not answered in the time that it has; `on_mute(peer_id)`, that a question was
        not. `follows(shard)`: the optimizer state for the step is here; `is_follower(peer_id,
        shard)`: it is there, as far as is known."""
        self._exchange = exchange
        self._gossip = gossip
        self._replica = replica
        self._pace = pace
        self._tasks = tasks
        self._feed = feed
        self._arrived = arrived
        self._on_progress = on_progress
        self._on_silent = on_silent
        self._on_mute = on_mute
        self._follows = follows
        self._is_follower = is_follower
        self._sums_ahead = SumsAhead(
            exchange, replica.index, pace, self._shared_room, self._call_in_time, tasks
        )
        self.own: dict[int, Part] = {}
        """What this replica contributes, by shard, as long as it is needed."""
        self.tokens: dict[int, int] = {}
        """Behind it."""
        self._pushes: dict[int, PushCall] = {}
        """By shard, the push whose answer counts."""
        self._turned: set[int] = set()
        """Shards whose gradient has had its turn on the uplink."""
        self._to_push: list[tuple[int, do.Push]] = []
        self._to_ask: list[tuple[int, do.Ask]] = []
        self._is_due = False

    # ---- pushes -----------------------------------------------------------------------------

    def push(self, shard: int, command: do.Push) -> None:
        """With the other pushes of this turn of the loop."""
        self._to_push.append((shard, command))
        self._soon()

    def contribute(self, parts: Mapping[int, Part]) -> None:
        """This replica's contributions."""
        self.own.update(parts)
        self.tokens.update((j, num_tokens) for j, (num_tokens, _) in parts.items())

    def forget(self, shard: int) -> None:
        """The shard has its result: its gradient is not needed any more."""
        self.own.pop(shard, None)
        self._sums_ahead.forget(shard)

    def give_up_push(self, shard: int) -> None:
        """What the push still brings does not count."""
        self._to_push = [item for item in self._to_push if item[0] != shard]
        call = self._pushes.pop(shard, None)
        if call is not None:
            call.wanted.discard(shard)
            if not call.wanted and call.task is not None:
                call.task.cancel()

    @property
    def is_pushing(self) -> bool:
        """Some answer is waited for."""
        return bool(self._pushes)

    def _soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        pushes, self._to_push = self._to_push, []
        asks, self._to_ask = self._to_ask, []
        for call in self._calls_for(pushes):
            for j in call.ballots:
                self._pushes[j] = call
            call.wanted.update(call.ballots)
            call.task = self._tasks.start(self._push(call))
        asked: dict[tuple[str, bool], dict[int, do.Ask]] = {}
        for j, command in asks:
            for member in command.members:
                several = asked.setdefault((member, command.is_final), {})
                several[j] = command
        for (member, is_final), commands in asked.items():
            shards = sorted(commands)
            at_once = MAX_SHARED_CALL_BYTES // (4 * max(self._replica.stage.shard_sizes))
            at_once = max(1, min(MAX_ARRAYS, at_once))  # they may all be answered with results
            for k in range(0, len(shards), at_once):
                several = {j: commands[j] for j in shards[k : k + at_once]}
                self._tasks.start(self._ask(member, several, is_final))

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
                room = self._shared_room()
                call = PushCall(command.target, {}, True)
                calls.append(call)
            call.ballots[j] = command.ballot
            open_[command.target] = (call, room - num_bytes)
        return calls

    def _shared_room(self) -> int:
        """Bytes of several shards that travel together."""
        room = shared_call_bytes(self._gossip.own.upload_bytes_per_s)
        is_beside = self._replica.plan.is_delayed(self._exchange)
        return int(room * BESIDE_PART) if is_beside else room

    async def _push(self, call: PushCall) -> None:
        shards = tuple(call.ballots)
        try:
            found = await self._pushed(call, shards)
        except SwarmnetError as e:
            log.debug("round %d at %s: %s", self._exchange, call.target[-8:], e)
            told = e.details.get("shard") if isinstance(e, Redirect) else None
            is_of_one = isinstance(told, int) and told in call.ballots
            for j in shards:
                if is_of_one and j != told and self._ends(call, j):
                    self.push(j, do.Push(call.target, call.ballots[j], call.with_gradient))
                else:
                    self._push_failed(call, j, e)
            return
        for j, (told, values) in found.items():
            if j not in call.wanted:
                continue
            try:
                result = await self._arrived(j, call.target, told, values)
            except Exception as e:
                if not isinstance(e, SwarmnetError):
                    log.exception("round %d shard %d: a result was not read", self._exchange, j)
                self._push_failed(call, j, e)
                continue
            if self._ends(call, j):
                self._feed(j, on.ResultCame(call.target, result, call.ballots[j]))

    async def _pushed(self, call: PushCall, shards: tuple[int, ...]) -> dict[int, Told]:
        nothing: Part = (0, None)
        parts = [self.own.get(j, nothing) if call.with_gradient else nothing for j in shards]
        given = {j: g for j, (_, g) in zip(shards, parts, strict=True) if g is not None}
        # What is sent again, for its primary has died, goes at once: behind all others it would
        # come too late.
        num_bytes = sum(g.num_bytes for j, g in given.items() if j not in self._turned)
        self._turned.update(given)
        await self._pace.turn(num_bytes)
        terms = tuple(ballot.term for ballot in call.ballots.values())
        primary = call.ballots[shards[0]].primary
        request = ReduceRequest(
            self._exchange,
            self._replica.index,
            shards,
            tuple(num_tokens for num_tokens, _ in parts),
            terms,
            "" if primary == call.target else primary,
            is_whole=not self._replica.synced,
            follows=tuple(self._follows(j) for j in shards),
        )
        message = Message(request, tuple(given.values()))
        reply = await self._call(
            call.target,
            REDUCE,
            message,
            lambda told: self._on_progress(call.target, told.body),
        )
        return self._results_in(shards, reply.body.shards, reply.arrays)

    def _ends(self, call: PushCall, shard: int) -> bool:
        """Whether the answer to a push counts; there is none under way after it."""
        if self._pushes.get(shard) is not call:
            return False
        del self._pushes[shard]
        call.wanted.discard(shard)
        return True

    def _push_failed(self, call: PushCall, shard: int, error: Exception) -> None:
        if not self._ends(call, shard):
            return
        if isinstance(error, DeadlineExceeded):
            self._on_silent(call.target)
        if isinstance(error, TransportError):
            self._gossip.probe(call.target)
        if self._has_moved_on(error):
            self._feed(shard, on.MovedOn())
            return
        denied = _ballot_in(error, shard)
        if denied is not None:
            self._feed(shard, on.Denied(call.target, denied))
        else:
            self._feed(shard, on.PushFailed(call.target))

    # ---- ballots ----------------------------------------------------------------------------

    def ask(self, shard: int, command: do.Ask) -> None:
        """With the other questions of this turn of the loop."""
        self._to_ask.append((shard, command))
        self._soon()

    async def _ask(self, member: str, commands: dict[int, do.Ask], is_final: bool) -> None:
        shards = tuple(commands)
        terms = tuple(command.ballot.term for command in commands.values())
        request = BallotRequest(self._exchange, self._replica.index, shards, terms, is_final)
        try:
            # A promise takes no work; before one is given, an exchange may have to begin.
            wait_s, _ = self._pace.contributions_s()
            timeout_s = wait_s if is_final else None
            reply = await self._call(member, BALLOT, Message(request), timeout_s=timeout_s)
            told = reply.body
            if len(told.terms) != len(shards):
                raise ProtocolViolation("not an answer for each shard")
            with_result = tuple(shards[i] for i in told.results)
            found = self._results_in(with_result, told.told, reply.arrays)
        except SwarmnetError as e:  # it is asked again, as long as it lives
            log.debug("round %d: no answer of %s: %s", self._exchange, member[-8:], e)
            if isinstance(e, DeadlineExceeded):
                self._on_mute(member)
            if isinstance(e, TransportError):
                self._gossip.probe(member)
            for j, command in commands.items():
                if self._has_moved_on(e):
                    self._feed(j, on.MovedOn())
                elif is_final and self._has_not_begun(e):  # it follows nobody, and finds the result
                    self._feed(j, on.Agreed(member, command.ballot, is_final, command.count))
            return
        for j, term, primary in zip(shards, told.terms, told.primaries, strict=True):
            ballot, count = commands[j].ballot, commands[j].count
            if j in found:
                await self._result_of(j, member, ballot, *found[j])
            elif Ballot(term, primary) == ballot:
                self._feed(j, on.Agreed(member, ballot, is_final, count))
            else:
                self._feed(j, on.Denied(member, Ballot(term, primary)))

    async def _result_of(
        self, shard: int, member: str, ballot: Ballot, told: ShardReply, values: Array | None
    ) -> None:
        """`ballot`: that of the call which it answers."""
        try:
            result = await self._arrived(shard, member, told, values)
        except SwarmnetError as e:
            log.warning("round %d: of no use from %s: %s", self._exchange, member[-8:], e)
        else:
            self._feed(shard, on.ResultCame(member, result, ballot))

    # ---- mirrored steps ---------------------------------------------------------------------

    def sum_ahead(
        self, shard: int, gradient: Array, ballot: Ballot, backups: Sequence[str]
    ) -> None:
        """These backups will be asked to make a step with the sum, when the norm is known."""
        followers = [p for p in backups if self._is_follower(p, shard)]
        self._sums_ahead.give(shard, gradient, ballot, followers)

    async def mirror(
        self, backup: str, request: MirrorRequest, gradient: Array, attempt: int
    ) -> tuple[on.Event, bytes]:
        """Has a backup make the step too. Returns what comes of it, and the digest of what the
        backup has made."""
        event: on.Event = on.Refused(backup, attempt)
        digest = b""
        if not self._is_follower(backup, request.shard):
            return event, digest
        try:
            reply = await self._mirrored(backup, request, gradient)
            digest = reply.body.digest
            event = on.Confirmed(backup, attempt)
        except DeadlineExceeded as e:  # its link is too slow: it fetches the state later
            log.debug("shard %d was too long on its way to %s: %s", request.shard, backup[-8:], e)
            self._on_silent(backup)
        except TransportError as e:
            log.debug("shard %d has not reached %s: %s", request.shard, backup[-8:], e)
            self._gossip.probe(backup)
            event = on.MirrorFailed(backup, attempt)
        except SwarmnetError as e:  # it fetches the state later
            log.debug("shard %d was not mirrored at %s: %s", request.shard, backup[-8:], e)
            denied = _ballot_in(e)
            if denied is not None:
                event = on.Denied(backup, denied)
        return event, digest

    async def _mirrored(
        self, backup: str, request: MirrorRequest, gradient: Array
    ) -> Message[MirrorReply]:
        ahead = self._sums_ahead.take(backup, request.shard, gradient)
        if ahead is not None:
            await ahead.began()  # the request is there first, and waits for the sum
            named = Message(replace(request, sum_digest=ahead.digest))
            asking = self._tasks.start(self._call_in_time(backup, MIRROR, named))
            try:
                await asyncio.wait((asking, ahead.sent), return_when=asyncio.FIRST_COMPLETED)
                if asking.done() or ahead.has_come:
                    return await asking
            except NotReady as e:
                if not e.details.get("lacks_sum"):
                    raise
            finally:
                asking.cancel()
        await self._pace.turn(gradient.num_bytes)
        return await self._call_in_time(backup, MIRROR, Message(request, (gradient,)))

    # ---- calls ------------------------------------------------------------------------------

    async def _call_in_time(
        self, peer_id: str, method: Method[RequestT, ReplyT], message: Message[RequestT]
    ) -> Message[ReplyT]:
        """Longer than for a contribution nobody waits for a backup: the contributors wait too."""
        wait_s, _ = self._pace.contributions_s()
        return await self._call(peer_id, method, message, timeout_s=wait_s)

    async def _call(
        self,
        peer_id: str,
        method: Method[RequestT, ReplyT],
        message: Message[RequestT],
        on_progress: Callable[[Message[Any]], None] | None = None,
        timeout_s: float | None = None,
    ) -> Message[ReplyT]:
        """A long call that ends with its callee. Raises as `Transport.call`."""
        return await self._gossip.liveness.call_while_live(
            peer_id,
            method,
            message,
            timeout_s=self._pace.call_s() if timeout_s is None else timeout_s,
            on_progress=on_progress,
            usual_s=self._pace.usual_s(),
        )

    def _has_moved_on(self, error: Exception) -> bool:
        return isinstance(error, Stale) and has_moved_on(self._exchange, error.details.get("round"))

    def _has_not_begun(self, error: SwarmnetError) -> bool:
        return isinstance(error, NotReady) and has_not_begun(
            self._exchange, error.details.get("round")
        )

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


def _ballot_in(error: Exception, shard: int | None = None) -> Ballot | None:
    """By which another replica goes, as it says of this shard."""
    if not isinstance(error, Redirect):
        return None
    term, primary = error.details.get("term"), error.details.get("peer_id")
    if not (isinstance(term, int) and isinstance(primary, str) and 0 < len(primary) <= 256):
        return None
    if shard is not None and error.details.get("shard") != shard:
        return None
    return Ballot(term, primary)
