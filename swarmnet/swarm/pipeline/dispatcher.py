"""The dispatcher: chooses a replica of a stage for a microbatch and calls it, and another one when
that fails or dies, or beside it when it is late. Where it pays, replicas are asked first when they
could begin (`admit`)."""

from __future__ import annotations

import asyncio
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
from swarmnet.methods.microbatch import (
    ADMIT,
    STEP,
    AdmitRequest,
    StepProgress,
    StepReply,
    StepRequest,
)
from swarmnet.protocol.audit import Conclusions
from swarmnet.protocol.membership.failure_detector import PROBE_PART
from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.pipeline import dispatching
from swarmnet.protocol.pipeline.admission import FullStages, shares_work
from swarmnet.protocol.pipeline.dispatching import LONGEST_CALL_S, Patience, Search
from swarmnet.protocol.pipeline.routing import Router
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.swarm.calls import call, notify, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.flights import Track
from swarmnet.swarm.pipeline.trials import TrialPasses
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S
from swarmnet.transport.base import Handler, Request
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.wiring")

ASKED = 8
"""So many replicas are asked for one microbatch."""
MAX_WAYS = 2
"""So many replicas have a microbatch of one caller at a time: the second one where the first is
late. Whichever answers first counts, and what the other has of it is retracted."""
ASKING_AT_A_TIME = 4
"""Microbatches for which one caller asks at a time. Many that ask at once all hear of the same free
replica; the next ones hear of what the first ones took."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A microbatch went through the next stages and came back."""

    peer_id: str
    reply: StepReply
    grad_inputs: Array | None
    is_first: bool
    """The replica had not been seen at work here before, while others had."""


Accept = Callable[[StepReply, tuple[Array, ...]], Array | None]
"""Takes the gradient from a reply. Raises `ProtocolViolation` where it is none."""


@dataclass(slots=True)
class _Hop:
    """One call of a microbatch to one replica."""

    peer_id: str
    sent_at: float
    depth: int
    """Stages behind the replica."""
    patience: Patience
    track: Track
    late: asyncio.Future[None]
    """Done when the replica has been silent for longer than such calls take."""
    beyond: tuple[str, ...] | None = None
    """Through whom it went from there, as far as the replica has told."""
    _scope: asyncio.Timeout | None = None

    def heard(self, note: Message[StepProgress]) -> None:
        """The replica tells through whom the microbatch goes from there."""
        path = note.body.path
        self.patience.heard(_now(), len(path))
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self.patience.look_at)
        if len(path) > self.depth:
            raise ProtocolViolation("a path through more stages than there are")
        self.beyond = path
        self.track.moved((self.peer_id, *path))

    def look(self) -> None:
        """The replica is to be asked about it, and may be late."""
        self.patience.look(_now())
        if self.patience.is_late and not self.late.done():
            self.late.set_result(None)

    async def wait(self, answer: asyncio.Task[Message]) -> bool:
        """True when the call is done, False when the replica is to be asked about it."""
        try:
            async with asyncio.timeout_at(self.patience.look_at) as self._scope:
                await asyncio.wait((answer,))
                return True
        except TimeoutError:
            return answer.done()
        finally:
            self._scope = None


@dataclass(frozen=True, slots=True)
class _Job:
    """A microbatch that is to go through the following stages."""

    request: StepRequest
    arrays: tuple[Array, ...]
    accept: Accept
    track: Track
    waits_here: bool
    search: Search


@dataclass(eq=False, slots=True)
class _Way:
    """A replica is chosen for a microbatch, and called."""

    late: asyncio.Future[None]
    """As of its hop."""
    task: asyncio.Task[Passed] = field(init=False)
    hop: _Hop | None = None


async def _until_done_or_late(ways: list[_Way]) -> None:
    waits: list[asyncio.Future[Any]] = [way.task for way in ways]
    if len(ways) < MAX_WAYS:
        waits += [way.late for way in ways if not way.late.done()]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


async def _until_most_answer(asks: list[asyncio.Task[Any]]) -> None:
    """Those that are silent when one has said that it has room are not waited for, and where none
    has room a little longer."""
    waiting, wait_s = set(asks), None
    while waiting:
        done, waiting = await asyncio.wait(
            waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            return
        has_room = any(isinstance(ask.result(), float) for ask in asks if ask.done())
        wait_s = LOOK_AGAIN_S if has_room else LOOK_LESS_S


@dataclass
class Dispatcher:
    """Calls to the replicas of stages, this peer's own among them: that is a link of zero
    length."""

    gossip: Gossip
    limits: WaitLimits
    num_stages: int
    samples_per_call: int
    rng: random.Random
    overlaps: bool = False
    """Replicas may work on the round after the one that their record names."""
    conclusions: Conclusions = field(default_factory=Conclusions)
    """Of audits; the view is told who has lied."""
    _own: dict[Method[Any, Any], Handler] = field(default_factory=dict)
    """This peer's handlers."""
    _routers: dict[int, Router] = field(default_factory=dict)
    """By stage."""
    _full: FullStages = field(default_factory=FullStages)
    _asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASKING_AT_A_TIME))

    def __post_init__(self) -> None:
        self.transport = self.gossip.transport
        own = self.gossip.own
        rng = random.Random(f"trials|{own.peer_id}|{own.incarnation}")
        self._trials = TrialPasses(self.gossip, rng)
        self._ways = Tasks("ways of microbatches")
        self.gossip.view.on_forgotten(self.conclusions.forget)

    async def close(self) -> None:
        """Ends what it has under way of its own accord."""
        await self._trials.close()
        await self._ways.close()

    def handle(self, method: Method[Any, Any], handler: Handler) -> None:
        """Serves a method of this peer's stage, to others and to itself."""
        serve(self.transport, method, handler)
        self._own[method] = handler

    def router(self, stage_index: int) -> Router:
        """The router to a stage, told of the replicas that are alive now."""
        if stage_index not in self._routers:
            self._routers[stage_index] = Router(
                random.Random(self.rng.random()),
                samples_per_call=self.samples_per_call,
            )
        router, now = self._routers[stage_index], _now()
        replicas = self.gossip.view.in_reach(stage_index, now)
        router.update({r.peer_id: r.samples_per_s for r in replicas}, now)
        return router

    def shares(self, stage_index: int, arrays: tuple[Array, ...] = ()) -> bool:
        """As `admission.shares_work`, of what this peer feeds."""
        upload_s = self.transport.traffic.upload_s(_num_bytes(arrays))
        return shares_work(upload_s, self.router(stage_index).usual_s)

    def blame(self, stage_index: int, peer_id: str) -> None:
        """A reply of this peer turned out to be unusable after all."""
        now = _now()
        self.router(stage_index).failed(peer_id, now, sent_at=now)
        self.gossip.add_total("rerouted")

    # ---- a microbatch -----------------------------------------------------------------------

    async def step(
        self,
        request: StepRequest,
        arrays: tuple[Array, ...],
        *,
        accept: Accept,
        track: Track,
        prefer_self: bool = False,
        waits_here: bool = False,
    ) -> Passed:
        """Sends a microbatch into `request.stage` and returns when its gradient is back.

        A `ProtocolViolation` that `accept` raises counts as a failure of the callee. `track` says
        where the microbatch is. `prefer_self`: the own replica does it where it can, unless the
        work is long and its way to others short, for then a free one does. `waits_here`: it may
        wait in a long queue of the own device. Raises `Stale` when the round is over, `NoRoute`
        when no replica did it in time, `Refused` when the arrays are to blame.
        """
        longest = Deadline.after(_now(), LONGEST_CALL_S)
        prefers_self = prefer_self and not self.shares(request.stage, arrays)
        search = Search(request.round, request.stage, request.hint, prefers_self, longest)
        job = _Job(request, arrays, accept, track, waits_here, search)
        ways: list[_Way] = []
        try:
            while True:
                are_late = len(ways) < MAX_WAYS and all(way.late.done() for way in ways)
                if not ways or (are_late and not longest.is_over(_now())):
                    ways.append(self._begin_way(job, ways))
                await _until_done_or_late(ways)
                for way in [w for w in ways if w.task.done()]:
                    ways.remove(way)
                    try:
                        passed = way.task.result()
                    except SwarmnetError as e:
                        if self._is_last_word(job, way, e, ways):
                            raise
                        continue
                    self._pass_over(request.stage, ways)
                    return passed
        finally:
            for way in ways:
                way.task.cancel()
            await asyncio.gather(*(way.task for way in ways), return_exceptions=True)

    def _pass_over(self, stage_index: int, ways: list[_Way]) -> None:
        """Another way came to its end first. Those that are late on trial may still answer, which
        counts as their work."""
        router = self._routers[stage_index]
        for way in ways[:]:
            hop = way.hop
            if hop is None or not hop.late.done():
                continue
            if router.is_on_its_word(hop.peer_id):
                router.passed_over(hop.peer_id, _now())
                hop.track = Track()
                ways.remove(way)

    def _is_last_word(self, job: _Job, way: _Way, error: SwarmnetError, others: list[_Way]) -> bool:
        """A way ended so. `others` are under way still."""
        if way.hop is None:
            return not others
        peer_id, search = way.hop.peer_id, job.search
        if search.is_last_word(peer_id, error, self.gossip.view, _now()):
            return True
        log.debug("stage %d at %s: %s", search.stage, peer_id[-8:], error)
        search.failed(peer_id, error, way.hop.beyond)
        return False

    def _begin_way(self, job: _Job, late: list[_Way]) -> _Way:
        """Another replica is to do it; beside those that are late, where there are such."""
        way, held = _Way(asyncio.get_running_loop().create_future()), []
        for hop in (w.hop for w in late if w.hop is not None):
            job.search.goes_on(hop.peer_id, hop.beyond)
            held.append(hop.peer_id)
        way.task = self._ways.start(self._go(job, way, held))
        return way

    async def _go(self, job: _Job, way: _Way, held: list[str]) -> Passed:
        """One way of a microbatch, not to those that have it already."""
        search, request = job.search, job.request
        asks = self._asks(request.stage, job.arrays)
        peer_id = None
        if not search.longest.is_over(_now()):
            peer_id = await self._choose(search, request, asks, held)
        if peer_id is None:
            text = f"no replica of stage {request.stage} took the microbatch: {search.last_error}"
            raise NoRoute(text)
        if held:
            self.gossip.add_total("rerouted")
        job.track.moved((peer_id,))
        asked = (search.prefers_self and job.waits_here) or asks
        body = replace(request, hint=search.hint[1:], asked=asked)
        way.hop = self._begin(peer_id, body, job.arrays, job.track, way.late)
        return await self._attempt(way.hop, Message(body, job.arrays), job.accept)

    async def _choose(
        self, search: Search, request: StepRequest, asks: bool, held: Collection[str]
    ) -> str | None:
        """None where no replica is to be had in time; where they are only full, by
        `search.longest`. `held`: who has it and is late. Then no other that is late gets it either:
        where a whole stage is slow, nothing is done twice."""
        stage, view = request.stage, self.gossip.view
        give_up = Deadline.after(_now(), self.limits.route_wait_s)
        prefer = search.preferred(self.gossip.own.peer_id if STEP in self._own else None)
        while True:
            router, now = self.router(stage), _now()
            slack = 0 if self.gossip.is_small and not self.overlaps else 1
            others = dispatching.unfit(
                view, stage, request.round, request.feeder, slack=slack, now=now
            )
            if held:
                others = [*others, *held, *router.late(now)]
            is_known = prefer is not None and router.is_ready(prefer, now, others)
            if asks and not is_known:
                async with self._asking:
                    peer_id = await self._ask_around(router, request, others)
                now = _now()
            else:
                peer_id = router.pick(now, prefer=prefer, exclude=others)
            if peer_id is not None:
                return peer_id
            end = search.longest if self._full.is_full(stage, now) else give_up
            if end.is_over(now):
                return None
            wait_s = dispatching.look_again_s(now, router.ready_at(now, others), LOOK_AGAIN_S)
            await self.gossip.changed.wait(wait_s)

    def _begin(
        self,
        peer_id: str,
        request: StepRequest,
        arrays: tuple[Array, ...],
        track: Track,
        late: asyncio.Future[None],
    ) -> _Hop:
        """A call goes out now."""
        router, traffic, now = self._routers[request.stage], self.transport.traffic, _now()
        router.sent(peer_id, now)
        is_own = peer_id == self.gossip.own.peer_id
        num_bytes = 0 if is_own else traffic.queued_bytes() + _num_bytes(arrays)
        depth = self.num_stages - 1 - request.stage
        patience = Patience.begin(
            now,
            router.deadline_s(peer_id),
            router.late_s(peer_id),
            depth=depth,
            probe_part=PROBE_PART,
            upload_s=traffic.upload_s(num_bytes),
        )
        return _Hop(peer_id, now, depth, patience, track, late)

    async def _attempt(self, hop: _Hop, message: Message[StepRequest], accept: Accept) -> Passed:
        """One call; its outcome is told to the router."""
        peer_id, stage = hop.peer_id, message.body.stage
        router = self._routers[stage]
        try:
            reply = await self._call_patiently(hop, message)
            body = reply.body
            if len(body.path) != hop.depth + 1 or body.path[0] != peer_id:
                raise ProtocolViolation("a step's reply with a path that it cannot have gone")
            grad_inputs = accept(body, reply.arrays)
        except Busy as e:
            router.busy(peer_id, _now(), e.backlog_s)
            self._full.turned_away(stage, e.backlog_s, _now())
            raise
        except (NotReady, Stale, NoRoute):
            router.busy(peer_id, _now(), LOOK_AGAIN_S)
            raise
        except Taken:
            router.abandoned(peer_id, _now())
            raise
        except (TransportError, RemoteError, ProtocolViolation) as e:
            router.failed(peer_id, _now(), hop.sent_at)
            self.gossip.add_total("rerouted")
            if isinstance(e, (TransportError, DeadlineExceeded)):
                self.gossip.liveness.probe(peer_id)
            raise
        except asyncio.CancelledError:
            if hop.late.done():  # another one has done it meanwhile
                router.failed(peer_id, _now(), hop.sent_at)
            else:
                router.abandoned(peer_id, _now())
            raise
        router.succeeded(peer_id, _now(), hop.sent_at)
        reputation = self.gossip.view.reputation
        is_first = reputation.is_proven and not reputation.works(peer_id)
        self.gossip.worked(peer_id)
        self._trials.came_back(message.body, message.arrays, body)
        return Passed(peer_id, body, grad_inputs, is_first)

    async def _call_patiently(self, hop: _Hop, message: Message[StepRequest]) -> Message[StepReply]:
        """Raises `DeadlineExceeded` where the callee is silent for longer than `Patience` has for
        it."""
        peer_id, patience, traffic = hop.peer_id, hop.patience, self.transport.traffic
        is_own = peer_id == self.gossip.own.peer_id
        answer = asyncio.get_running_loop().create_task(
            self.call(
                peer_id,
                STEP,
                message,
                timeout_s=LONGEST_CALL_S,
                on_progress=hop.heard,
                usual_s=math.inf,
            )
        )
        try:
            while not await hop.wait(answer):
                is_sent = is_own or not traffic.queued_to(peer_id)
                if is_sent or not traffic.queued_bytes():  # else the own uplink is late
                    hop.look()
                if is_sent:
                    has_it = await self._is_at_work(peer_id, message.body, patience.look_s)
                    stage, view = message.body.stage, self.gossip.view
                    is_only = dispatching.are_all(view, stage, (peer_id,), _now())
                    if patience.ends(has_it, _now(), is_only=is_only):
                        raise DeadlineExceeded(f"no answer for {patience.silence_s:.1f} s")
                patience.wait_more(_now())
            return answer.result()
        finally:
            if not answer.done():
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
            elif not answer.cancelled():
                answer.exception()  # seen, where no task waits for it any more

    # ---- asking before a microbatch is sent, and while it is at work there ------------------

    def _asks(self, stage_index: int, arrays: tuple[Array, ...]) -> bool:
        upload_s = self.transport.traffic.upload_s(_num_bytes(arrays))
        return self._full.asks(stage_index, upload_s, self.router(stage_index).usual_s, _now())

    async def _ask_around(
        self, router: Router, request: StepRequest, exclude: Collection[str]
    ) -> str | None:
        """Of a few replicas drawn at random, the one with the least work before the microbatch, by
        its own word; None where none has room. Raises `Stale` where the round is over for all that
        have an answer."""
        drawn = router.sample(_now(), ASKED, exclude=exclude)
        if not drawn:
            return None
        asked = AdmitRequest(request.round, request.microbatch_id, request.stage)
        asks = {p: self._ways.start(self._ask(router, p, asked)) for p in drawn}
        await _until_most_answer(list(asks.values()))
        for silent in (p for p, ask in asks.items() if not ask.done()):
            router.put_off(silent, _now(), LOOK_LESS_S)
        answers = [ask.result() if ask.done() else None for ask in asks.values()]
        told = zip(answers, drawn, strict=True)
        offers = [(wait_s, p) for wait_s, p in told if isinstance(wait_s, float)]
        if not offers:
            over = next((answer for answer in answers if isinstance(answer, Stale)), None)
            if over is not None:
                raise over
            return None
        peer_id = min(offers)[1]
        router.take(peer_id)
        if peer_id != self.gossip.own.peer_id:
            notify(self.transport, peer_id, ADMIT, Message(replace(asked, comes=True)))
        return peer_id

    async def _ask(self, router: Router, peer_id: str, asked: AdmitRequest) -> float | Stale | None:
        """What a replica says, or that the round is over there; None where it has no room, or no
        answer."""
        began_at = _now()
        try:
            reply = await self.call(peer_id, ADMIT, Message(asked), timeout_s=ANSWER_S)
            return float(reply.body.wait_s)
        except Busy as e:
            self._full.has_no_room(asked.stage, _now())
            router.put_off(peer_id, _now(), e.backlog_s)
        except Stale as e:
            theirs = e.details.get("round")
            router.put_off(peer_id, _now(), LOOK_AGAIN_S)
            if isinstance(theirs, int) and theirs > asked.round:
                return e
        except NotReady:
            router.put_off(peer_id, _now(), LOOK_AGAIN_S)
        except (TransportError, RemoteError, ProtocolViolation) as e:
            router.sent(peer_id, began_at)
            router.failed(peer_id, _now(), began_at)
            if isinstance(e, TransportError):
                self.gossip.liveness.probe(peer_id)
        return None

    async def _is_at_work(self, peer_id: str, request: StepRequest, silent_s: float) -> bool | None:
        """Does a callee that has been silent say that it has the microbatch? None where it says
        nothing."""
        asked = AdmitRequest(request.round, request.microbatch_id, request.stage)
        timeout_s, message = min(silent_s, ANSWER_S), Message(asked)
        try:
            if peer_id == self.gossip.own.peer_id:
                reply = await self._call_self(ADMIT, message)
            else:
                reply = await call(self.transport, peer_id, ADMIT, message, timeout_s=timeout_s)
            return reply.body.known
        except (TransportError, DeadlineExceeded):
            return None
        except (SwarmnetError, ProtocolViolation):
            return False

    # ---- calls ------------------------------------------------------------------------------

    async def call(
        self,
        peer_id: str,
        method: Method[RequestT, ReplyT],
        message: Message[RequestT],
        *,
        timeout_s: float,
        on_progress: Callable[[Message[Any]], None] | None = None,
        usual_s: float = 0.0,
    ) -> Message[ReplyT]:
        """As `LiveCalls.call`; a call of this peer itself has no end but its answer."""
        if peer_id == self.gossip.own.peer_id:
            return await self._call_self(method, message, on_progress)
        return await self.gossip.liveness.call_while_live(
            peer_id,
            method,
            message,
            timeout_s=timeout_s,
            on_progress=on_progress,
            usual_s=usual_s,
        )

    async def _call_self(
        self,
        method: Method[RequestT, ReplyT],
        message: Message[RequestT],
        on_progress: Callable[[Message[Any]], None] | None = None,
    ) -> Message[ReplyT]:
        """The own handler, as if it were a peer's."""
        if method not in self._own:
            raise NotReady("this peer serves no stage")
        own = self.gossip.own
        hears = on_progress or (lambda note: None)
        request = Request(own.peer_id, own.run_id, method.name, message, hears)
        try:
            return await self._own[method](request)
        except ProtocolViolation as e:  # as the transport tells it to another peer
            raise Refused(str(e)) from None
        except SwarmnetError:
            raise
        except Exception as e:
            log.exception("%s failed", method.name)
            raise RemoteError(f"{type(e).__name__}: {e}") from None


def _num_bytes(arrays: tuple[Array, ...]) -> int:
    return sum(a.num_bytes for a in arrays)


def _now() -> float:
    return asyncio.get_running_loop().time()
