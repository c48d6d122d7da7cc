"""Choosing and calling a replica of a stage, and another one when that fails or dies."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from swarmnet.errors import (
    Busy,
    DeadlineExceeded,
    NoRoute,
    NotReady,
    ProtocolViolation,
    Refused,
    RemoteError,
    Stale,
    SwarmnetError,
    Taken,
    TransportError,
)
from swarmnet.methods.method import Method, ReplyT, RequestT
from swarmnet.methods.microbatch import ADMIT, STEP, StepProgress, StepReply, StepRequest
from swarmnet.protocol.pipeline.routing import MIN_DEADLINE_S, Router
from swarmnet.protocol.timing import LEAST_WAIT_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.live_calls import PROBE_PART
from swarmnet.swarm.pipeline.asking import Asking
from swarmnet.swarm.pipeline.deadline import Deadline
from swarmnet.swarm.settings import Limits
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.transport.base import Handler, Request, Transport
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.wiring")

DEPTH_GRACE_S = 0.5
"""Added to a deadline for each stage behind the callee: the caller nearest to a silent peer notices
first. It protects the work of the stages between (tests/swarm/pipeline/test_path_hints.py)."""
LONGEST_CALL_S = 1200.0
"""However often a callee says that it is at work. It protects a microbatch from one that never ends
(tests/swarm/pipeline/test_room.py)."""
MAX_AHEAD = 2
"""So many replicas of a stage must say that a round is over where no record does."""
MAX_REFUSALS = 3
"""After so many replicas, or all that there are, have found the same arrays wrong, the fault is
theirs."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A microbatch went through the next stages and came back."""

    peer_id: str
    reply: StepReply
    grad_inputs: Array | None


Accept = Callable[[StepReply, tuple[Array, ...]], Array | None]


@dataclass
class Way:
    """One microbatch looks for a replica of the next stage."""

    request: StepRequest
    hint: tuple[str, ...]
    """Who may know it already, from that stage on."""
    prefer_self: bool
    refusers: dict[str, None] = field(default_factory=dict)
    """Who found its arrays wrong."""
    ahead: dict[str, None] = field(default_factory=dict)
    """For whom its round is over."""
    last_error: SwarmnetError | None = None


@dataclass
class Wiring:
    """Calls to the replicas of other stages."""

    transport: Transport
    gossip: Gossip
    limits: Limits
    num_stages: int
    samples_per_call: int
    rng: random.Random
    overlaps: bool = False
    """Replicas may work on the round after the one that their record names."""
    local: dict[Method[Any, Any], Handler] = field(default_factory=dict)
    """The own handlers: a peer that serves the next stage itself is a link of zero length."""
    _routers: dict[int, Router] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._asking = Asking(
            self.transport, self.gossip, lambda m: self.call_self(ADMIT, m, lambda _: None)
        )

    def router(self, stage_index: int) -> Router:
        """The router to a stage, told of the replicas that are alive now."""
        if stage_index not in self._routers:
            self._routers[stage_index] = Router(
                random.Random(self.rng.random()),
                samples_per_call=self.samples_per_call,
            )
        router = self._routers[stage_index]
        now = asyncio.get_running_loop().time()
        replicas = self.gossip.view.in_reach(stage_index, now)
        router.update({r.peer_id: r.samples_per_s for r in replicas}, now)
        return router

    async def step(
        self,
        request: StepRequest,
        arrays: tuple[Array, ...],
        *,
        accept: Accept,
        on_path: Callable[[tuple[str, ...]], None],
        prefer_self: bool = False,
        waits_here: bool = False,
    ) -> Passed:
        """Sends a microbatch into `request.stage` and returns when its gradient is back.

        `accept` checks a reply's arrays; a `ProtocolViolation` that it raises counts as a failure
        of the callee. `on_path` hears where the microbatch is. `prefer_self`: the own replica does
        it where it can, unless the work is long and its way to others short, for then a free
        one does. `waits_here`: it may wait in a long queue of the own device. Raises `Stale` when
        the round is over, `NoRoute` when no replica did it in time, `Refused` when the arrays are
        to blame.
        """
        loop = asyncio.get_running_loop()
        way = Way(request, request.hint, prefer_self and not self.shares(request.stage, arrays))
        longest = loop.time() + LONGEST_CALL_S
        while loop.time() < longest:
            asks = self._asks(request.stage, arrays)
            peer_id = await self._choose(way, longest, asks)
            if peer_id is None:
                break
            on_path((peer_id,))
            body = replace(
                request, hint=way.hint[1:], asked=(way.prefer_self and waits_here) or asks
            )
            beyond: list[tuple[str, ...]] = []
            depth = self.num_stages - 1 - request.stage
            heard = functools.partial(_heard, beyond, peer_id, depth, on_path)
            try:
                return await self._attempt(peer_id, Message(body, arrays), accept, heard)
            except SwarmnetError as e:
                if self._is_last_word(way, peer_id, e):
                    raise
                way.last_error = e
                log.debug("stage %d at %s: %s", request.stage, peer_id[-8:], e)
            if beyond:  # what lies beyond the dead callee need not be done again
                way.hint = (peer_id, *beyond[-1])
            way.prefer_self = False
        raise NoRoute(f"no replica of stage {request.stage} took the microbatch: {way.last_error}")

    def _is_last_word(self, way: Way, peer_id: str, error: SwarmnetError) -> bool:
        """Whether no other replica need be asked after this answer."""
        request = way.request
        if isinstance(error, Stale):
            theirs = error.details.get("round")
            if not isinstance(theirs, int) or theirs == request.round:
                return True
            if theirs < request.round:
                return False
            way.ahead[peer_id] = None
            return len(way.ahead) >= MAX_AHEAD or self._is_over(request, way.ahead)
        if isinstance(error, Refused):
            way.refusers[peer_id] = None
            refusers = way.refusers
            return self.is_refused(request.stage, refusers)
        return isinstance(error, Taken)

    def is_refused(self, stage_index: int, refusers: Collection[str]) -> bool:
        """Several replicas have found arrays wrong, or there is none left that might find them
        right."""
        return len(refusers) >= MAX_REFUSALS or self._are_all(stage_index, refusers)

    def _are_all(self, stage_index: int, peer_ids: Collection[str]) -> bool:
        """There is no other live replica."""
        now = asyncio.get_running_loop().time()
        return all(r.peer_id in peer_ids for r in self.gossip.view.in_reach(stage_index, now))

    def _is_over(self, request: StepRequest, ahead: Collection[str]) -> bool:
        """Records show it too, or there is no other replica to ask."""
        now = asyncio.get_running_loop().time()
        is_past = self.gossip.view.is_past(request.round, now)
        return is_past or self._are_all(request.stage, ahead)

    async def _choose(self, way: Way, longest: float, asks: bool) -> str | None:
        """None where no replica is to be had in time; where they are only full, by `longest`."""
        loop, request = asyncio.get_running_loop(), way.request
        give_up = loop.time() + self.limits.route_wait_s
        prefer = way.hint[0] if way.hint else None
        if way.prefer_self and STEP in self.local:
            prefer = self.gossip.own.peer_id
        while True:
            router = self.router(request.stage)
            now = loop.time()
            others = self._unfit(request, now)
            is_known = prefer is not None and router.is_ready(prefer, now, others)
            if asks and not is_known:
                peer_id = await self._asking.around(router, request, others)
                now = loop.time()
            else:
                peer_id = router.pick(now, prefer=prefer, exclude=others)
            if peer_id is not None:
                return peer_id
            if now >= (longest if self._asking.is_full(request.stage) else give_up):
                return None
            ready_at = router.ready_at(now)
            wait_s = LOOK_AGAIN_S if ready_at is None else min(LOOK_AGAIN_S, ready_at - now)
            await self.gossip.changed.wait(max(LEAST_WAIT_S, wait_s))

    def _unfit(self, request: StepRequest, now: float) -> list[str]:
        """Replicas that have not opened the round yet, and those that the feeder cannot reach: it
        could not tell them that the microbatch counts. As long as there is some other: where none
        has opened it, those that are nearest to it are asked, and will. In a large swarm, where it
        takes a while until it is known of all that they have opened a round, those one round behind
        are asked: the call itself tells them that the round before is over."""
        slack = 0 if self.gossip.is_small and not self.overlaps else 1
        view = self.gossip.view
        replicas = view.in_reach(request.stage, now)
        newest = max((r.round for r in replicas), default=0)
        wanted = min(newest, request.round - slack)
        unfit = [r.peer_id for r in replicas if r.round < wanted]
        cut = [r.peer_id for r in replicas if view.reach.are_cut(request.feeder, r.peer_id)]
        if len({*unfit, *cut}) < len(replicas):
            return [*unfit, *cut]
        return cut if newest < request.round - slack and len(cut) < len(replicas) else unfit

    async def _attempt(
        self,
        peer_id: str,
        message: Message[StepRequest],
        accept: Accept,
        on_progress: Callable[[Message[StepProgress]], None],
    ) -> Passed:
        """One call; its outcome is told to the router."""
        router = self._routers[message.body.stage]
        loop = asyncio.get_running_loop()
        start = loop.time()
        router.sent(peer_id, start)
        try:
            depth = self.num_stages - 1 - message.body.stage
            deadline_s = router.deadline_s(peer_id)
            silence_s = deadline_s + DEPTH_GRACE_S * depth
            look_s = min(silence_s, max(MIN_DEADLINE_S, PROBE_PART * deadline_s))
            reply = await self._call(peer_id, message, silence_s, look_s, on_progress)
            body = reply.body
            if len(body.path) != depth + 1 or body.path[0] != peer_id:
                raise ProtocolViolation("a step's reply with a path that it cannot have gone")
            grad_inputs = accept(body, reply.arrays)
        except Busy as e:
            router.busy(peer_id, loop.time(), e.backlog_s)
            self._asking.turned_away(message.body.stage, e.backlog_s)
            raise
        except (NotReady, Stale, NoRoute):
            router.busy(peer_id, loop.time(), LOOK_AGAIN_S)
            raise
        except Taken:
            router.abandoned(peer_id, loop.time())
            raise
        except (TransportError, RemoteError, ProtocolViolation) as e:
            router.failed(peer_id, loop.time(), loop.time() - start)
            self.gossip.add_total("rerouted")
            if isinstance(e, (TransportError, DeadlineExceeded)):
                self.gossip.probe(peer_id)
            raise
        except asyncio.CancelledError:
            router.abandoned(peer_id, loop.time())
            raise
        router.succeeded(peer_id, loop.time(), loop.time() - start)
        return Passed(peer_id, body, grad_inputs)

    def _asks(self, stage_index: int, arrays: tuple[Array, ...]) -> bool:
        return self._asking.pays(stage_index, _num_bytes(arrays), self.router(stage_index).usual_s)

    def shares(self, stage_index: int, arrays: tuple[Array, ...] = ()) -> bool:
        """Whether any free replica does the first work for what this peer feeds."""
        return self._asking.shares(_num_bytes(arrays), self.router(stage_index).usual_s)

    async def _call(
        self,
        peer_id: str,
        message: Message[StepRequest],
        silence_s: float,
        look_s: float,
        on_progress: Callable[[Message[StepProgress]], None],
    ) -> Message[StepReply]:
        """Raises `DeadlineExceeded` when neither a reply nor progress came for `silence_s` and the
        callee, asked, does not say that it has the microbatch: one that re-routes, or is slower
        than it used to be, gets the time for it. After each `look_s` it is asked too: a callee that
        then says nothing at all is not waited for."""
        loop = asyncio.get_running_loop()
        is_own = peer_id == self.gossip.own.peer_id
        traffic = self.transport.traffic
        num_bytes = 0 if is_own else traffic.queued_bytes() + _num_bytes(message.arrays)
        silent_since = loop.time() + traffic.upload_s(num_bytes)
        patience = Deadline(silent_since + look_s)

        def heard(progress: Message[StepProgress]) -> None:
            nonlocal silent_since
            silent_since = loop.time()
            patience.until(silent_since + look_s)
            on_progress(progress)

        call = loop.create_task(
            self.call_self(STEP, message, heard)
            if is_own
            else self.gossip.liveness.call_while_live(
                peer_id,
                STEP,
                message,
                timeout_s=LONGEST_CALL_S,
                on_progress=heard,
                usual_s=math.inf,
            )
        )
        try:
            while not await patience.wait(call):
                if is_own or not traffic.queued_bytes():  # all of it is sent
                    has_it = await self._asking.is_at_work(peer_id, message.body, look_s)
                    is_late = loop.time() >= silent_since + silence_s
                    if has_it is None or (is_late and not has_it):
                        raise DeadlineExceeded(f"no answer for {silence_s:.1f} s")
                    if is_late:
                        silent_since = loop.time()
                patience.until(loop.time() + look_s)
            return call.result()
        finally:
            if not call.done():
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            elif not call.cancelled():
                call.exception()  # seen, where no task waits for it any more

    async def call_self(
        self,
        method: Method[RequestT, ReplyT],
        message: Message[RequestT],
        on_progress: Callable[[Message[Any]], None],
    ) -> Message[ReplyT]:
        """The own handler, as if it were a peer's."""
        if method not in self.local:
            raise NotReady("this peer serves no stage")
        own = self.gossip.own
        request = Request(own.peer_id, own.run_id, method.name, message, on_progress)
        try:
            return await self.local[method](request)
        except ProtocolViolation as e:  # as the transport tells it to another peer
            raise Refused(str(e)) from None
        except SwarmnetError:
            raise
        except Exception as e:
            log.exception("%s failed", method.name)
            raise RemoteError(f"{type(e).__name__}: {e}") from None

    def blame(self, stage_index: int, peer_id: str) -> None:
        """A reply of this peer turned out to be unusable after all."""
        now = asyncio.get_running_loop().time()
        self.router(stage_index).failed(peer_id, now, 0.0)
        self.gossip.add_total("rerouted")


def _heard(
    beyond: list[tuple[str, ...]],
    callee: str,
    depth: int,
    on_path: Callable[[tuple[str, ...]], None],
    message: Message[StepProgress],
) -> None:
    """A callee tells through whom the microbatch goes from there; `depth`: stages behind it."""
    path = message.body.path
    if len(path) > depth:
        raise ProtocolViolation("a path through more stages than there are")
    beyond.append(path)
    on_path((callee, *path))


def _num_bytes(arrays: tuple[Array, ...]) -> int:
    return sum(a.num_bytes for a in arrays)
