"""Serves `generate`: tokens of a text go through the stage of this peer, beside its training."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from swarmnet.errors import Busy, NotReady, ProtocolViolation, Refused
from swarmnet.methods.microbatch import GENERATE, GenerateReply, GenerateRequest
from swarmnet.plurals import counted
from swarmnet.ports import OTHER, Generation
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.generation import DeviceTurn, Key, Parameters, Session, Sessions, Wish
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.reputation import Level, Reputation
from swarmnet.protocol.timing import CONNECT_S
from swarmnet.swarm.calls import serve
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.replica.serving import Serving
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message

T = TypeVar("T")

LAST_TURN, FIRST_TURN = 1 << 62, -1
"""Rounds before which, and after which, the device takes a pass for a text."""
OPEN_WAIT_S = CONNECT_S
"""For the round that is asked for to begin."""
FREE_PART = 0.5
"""Of the memory that is free, for one text and a copy of the parameters."""


class GenerateService:
    """The texts at the replica of this peer."""

    def __init__(
        self,
        transport: Transport,
        serving: Serving,
        resource_limits: ResourceLimits,
        free_bytes: Callable[[], float],
        reputation: Reputation,
    ) -> None:
        """
        Args:
            resource_limits: of the machine.
            free_bytes: of the device's memory, now.
            reputation: of callers.
        """
        self._serving = serving
        self._limits = resource_limits
        self._free_bytes = free_bytes
        self._reputation = reputation
        self._peer_id = transport.peer_id
        self._of: Replica | None = None
        """The replica that the sessions are of."""
        self._sessions = Sessions()
        self._opening: dict[Key, object] = {}
        """The calls that open sessions; of those with one name the last, until the text ends."""
        self._turn = DeviceTurn()
        self._going_first = asyncio.Lock()
        self._copying = asyncio.Lock()
        self._opened = asyncio.Event()
        serve(transport, GENERATE, self.on_generate)

    async def run(self) -> None:
        """Ends sessions that nobody goes on with; until cancelled."""
        while True:
            await self._opened.wait()
            while self._sessions.num_open:
                await asyncio.sleep(LOOK_LESS_S)
                self._look()
            self._opened.clear()

    def forget(self) -> None:
        """The stage is served here no more: nothing that is kept for texts holds on to it."""
        self._of = None
        self._sessions = Sessions()
        self._limits.hold_texts(self._peer_id, 0.0)

    async def on_generate(self, request: Request[GenerateRequest]) -> Message[GenerateReply]:
        """Opens a session, goes on with it, or ends it."""
        asked = request.message.body
        replica = self._serving.of(asked.stage)
        generation = replica.stage.generation
        if generation is None:
            raise Refused("this peer writes no texts: its model keeps no keys and values")
        key = (request.remote, asked.session)
        if self._of is not replica:  # those of another stage went with it
            self._of = replica
            self._sessions = Sessions(generation.max_tokens)
        if asked.ends:
            self._opening.pop(key, None)
            self._end(key)
            return Message(GenerateReply(replica.round, False))
        if asked.opens:
            await self._open(replica, generation, key, asked)
        return await self._extend(replica, generation, key, asked, request.message.arrays)

    # ---- inside -----------------------------------------------------------------------------

    async def _open(
        self, replica: Replica, generation: Generation, key: Key, asked: GenerateRequest
    ) -> None:
        if asked.max_tokens > generation.max_tokens:
            raise Refused(
                f"a text of this model has at most {counted(generation.max_tokens, 'token')}"
            )
        wish = Wish(asked.round, asked.max_tokens, asked.mixes)
        machine = machine_of(key[0])

        def begun() -> bool:
            return replica.synced and (asked.mixes or replica.round >= asked.round)

        call = self._opening[key] = object()
        try:
            if not await replica.changed.until(begun, OPEN_WAIT_S):
                raise NotReady(f"round {asked.round} has not begun here", round=replica.round)
            async with self._copying:
                self._check_wanted(replica, key, call)
                self._end(key)
                is_known = self._reputation.level(key[0]) >= Level.VOUCHED
                self._make_place(key, machine, is_known=is_known)
                cache_bytes = generation.token_bytes * wish.max_tokens + generation.text_bytes
                if not self._has_room(replica, cache_bytes):
                    raise Busy("no memory here for another text", backlog_s=FIRST_PAUSE_S)
                has_room = self._has_room(replica, cache_bytes + generation.copy_bytes)
                chosen = self._sessions.choose(
                    key, machine, wish, replica.round, has_room, is_known=is_known
                )
                if chosen is Parameters.COPIED:
                    copy = functools.partial(self._copy, replica, generation, wish.round)
                    await self._on_device(replica, copy)
                    try:
                        self._check_wanted(replica, key, call)
                    except NotReady:
                        generation.drop_copy()
                        raise
                now = asyncio.get_running_loop().time()
                self._sessions.open(
                    key, machine, wish, chosen, replica.round, now, is_known=is_known
                )
        finally:
            if self._opening.get(key) is call:
                del self._opening[key]
        self._hold(generation)
        self._opened.set()

    def _make_place(self, key: Key, machine: str, *, is_known: bool) -> None:
        now = asyncio.get_running_loop().time()
        slow = self._sessions.giving_way(key, machine, now, is_known=is_known)
        if slow is not None:
            self._end(slow.key)

    def _check_wanted(self, replica: Replica, key: Key, call: object) -> None:
        """While a call opens a session."""
        if self._of is not replica:
            raise NotReady("that stage is not served here any more")
        if self._opening.get(key) is not call:
            raise NotReady("this text has ended")

    def _copy(self, replica: Replica, generation: Generation, round_index: int) -> None:
        """On the device thread. A round that was open ahead may begin meanwhile."""
        changes = replica.transitions.changes
        if replica.round == round_index and changes % 2 == 0:
            generation.copy([replica.common_shard(j) for j in range(replica.num_shards)])
            if changes == replica.transitions.changes:
                return
            generation.drop_copy()
        raise NotReady(f"round {round_index} is over here", round=replica.round)

    async def _extend(
        self,
        replica: Replica,
        generation: Generation,
        key: Key,
        asked: GenerateRequest,
        arrays: tuple[Array, ...],
    ) -> Message:
        loop, sessions = asyncio.get_running_loop(), self._sessions
        if not arrays:
            return _reply(replica, sessions.keep(key, loop.time()))
        if len(arrays) > 1 or len(arrays[0].shape) < 2:
            raise ProtocolViolation("generate takes the tokens of one text, or an activation")
        count = arrays[0].shape[1]
        if count > generation.pass_tokens:
            raise ProtocolViolation(f"a pass has at most {generation.pass_tokens} tokens here")
        session = sessions.begin(key, asked.position, count, loop.time())

        def work() -> tuple[Array, ...]:
            """On the device thread. The text may end before its turn, and meanwhile."""
            if not sessions.is_open(session):
                raise NotReady("this text has ended")
            try:
                return generation.extend(
                    session,
                    arrays[0],
                    asked.position,
                    is_copied=session.is_copied,
                    num_logits=asked.num_logits,
                    exact=asked.exact,
                )
            finally:
                if not sessions.is_open(session):
                    generation.drop(session)

        try:
            made = await self._on_device(replica, work)
        except BaseException:
            if self._sessions.is_open(session):
                self._end(key)
            raise
        sessions.done(session, count, loop.time())
        return _reply(replica, session, made)

    async def _on_device(self, replica: Replica, work: Callable[[], T]) -> T:
        """Runs work for a text when the device has nothing else to do, and as soon as texts have
        had less of its time than they may."""
        once = _Once[T](work)
        tries = [asyncio.ensure_future(self._first(replica, once))]
        if self._going_first.locked() or self._turn.wait_s(asyncio.get_running_loop().time()):
            tries.append(asyncio.ensure_future(self._timed(replica, once, LAST_TURN)))
        try:
            done, _ = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
            return (await asyncio.gather(*done))[0]  # where both are done, they say the same
        finally:
            for each in tries:
                each.cancel()

    async def _first(self, replica: Replica, once: _Once[T]) -> T:
        """Goes before training. One pass at a time does so, and the next one waits for what that
        has cost: so the share is that of all texts."""
        loop = asyncio.get_running_loop()
        async with self._going_first:
            wait_s = self._turn.wait_s(loop.time())
            while wait_s:  # passes that found the device idle put it off
                await asyncio.sleep(wait_s)
                wait_s = self._turn.wait_s(loop.time())
            return await self._timed(replica, once, FIRST_TURN)

    async def _timed(self, replica: Replica, once: _Once[T], turn: int) -> T:
        result, worked_s = await replica.device.timed(OTHER, once, turn)
        self._turn.worked(worked_s, asyncio.get_running_loop().time())
        return result

    def _has_room(self, replica: Replica, num_bytes: float) -> bool:
        limits = self._limits
        if limits.is_memory_full:
            return False
        may_be = limits.room_bytes(replica.index) - limits.text_bytes
        return num_bytes <= min(may_be, FREE_PART * self._free_bytes())

    def _end(self, key: Key) -> None:
        """Forgets a session, and the copy where it was the last one with it."""
        replica, had_copy = self._of, self._sessions.copied_round is not None
        generation = None if replica is None else replica.stage.generation
        session = self._sessions.end(key)
        if generation is None or session is None:
            return
        generation.drop(session)
        if had_copy and self._sessions.copied_round is None:
            generation.drop_copy()
        self._hold(generation)

    def _hold(self, generation: Generation) -> None:
        """Counts what texts take of the machine's memory."""
        is_copied = self._sessions.copied_round is not None
        cached = generation.token_bytes * self._sessions.max_tokens
        cached += generation.text_bytes * self._sessions.num_open
        self._limits.hold_texts(self._peer_id, cached + is_copied * generation.copy_bytes)

    def _look(self) -> None:
        for key in self._sessions.expired(asyncio.get_running_loop().time()):
            self._end(key)


def _reply(replica: Replica, session: Session, made: tuple[Array, ...] = ()) -> Message:
    of_round = session.round if session.is_copied else replica.round
    return Message(GenerateReply(of_round, session.is_copied, exact=True), made)


class _Once(Generic[T]):
    """Work that stands in a queue twice, and is done where its turn comes first."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._made = Future[T]()

    def __call__(self) -> T:
        """What the work returns, or raises, each time."""
        work, self._work = self._work, None
        if work is not None:
            try:
                self._made.set_result(work())
            except BaseException as e:
                self._made.set_exception(e)
        return self._made.result()
