"""Asking replicas before an activation is sent to one (`admit`), and while it is at work there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace

from swarmnet.errors import (
    Busy,
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    RemoteError,
    Stale,
    SwarmnetError,
    TransportError,
)
from swarmnet.methods.microbatch import ADMIT, AdmitReply, AdmitRequest, StepRequest
from swarmnet.protocol.pipeline.routing import Router
from swarmnet.protocol.timing import ANSWER_S, PATIENCE_S
from swarmnet.swarm.calls import call, notify
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.transport.base import Transport
from swarmnet.wire import Message

ASK_S = 0.2
"""Replicas are asked first when they could begin where sending the arrays takes longer than
this (tests/swarm/pipeline/test_room.py)..."""
ASK_WORK_S = 1.0
"""...or the work for it does, at a usual one of them. Both protect callers from sending work to a
replica that is full (tests/swarm/pipeline/test_room.py)..."""
CROWDED_S = PATIENCE_S
"""...and for so long at a stage that has turned away a call which did not ask, where its wait would
have been longer than `ASK_S` too. So long after a replica has said that it has no room, its stage
is not suspected either."""
ASKED = 8
"""...so many of them."""
ASKING_AT_A_TIME = 4
"""Microbatches for which one caller asks at a time. Many that ask at once all hear of the same free
replica; the next ones hear of what the first ones took."""


@dataclass
class Asking:
    """The questions of one caller, and what it knows of full stages."""

    transport: Transport
    gossip: Gossip
    ask_self: Callable[[Message[AdmitRequest]], Awaitable[Message[AdmitReply]]]
    """The own replica, in the same words."""
    _turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASKING_AT_A_TIME))
    _crowded: dict[int, float] = field(default_factory=dict)
    """By stage, until when it counts as crowded."""
    _full: dict[int, float] = field(default_factory=dict)
    """By stage, when a replica said last that it had no room."""

    def pays(self, stage_index: int, num_bytes: int, work_s: float | None) -> bool:
        """Where the arrays' way or the work (`work_s`, None while unknown) takes far longer than
        asking, it pays to ask several replicas first: callers that guess send bursts to some and
        nothing to others, and none finds out that it is full only when the activation has gone up
        the link for nothing. So it does where queues are long: callers that have asked fill
        them."""
        now = asyncio.get_running_loop().time()
        if work_s is not None and work_s > ASK_WORK_S:
            return True
        is_slow = self.transport.traffic.upload_s(num_bytes) > ASK_S
        return is_slow or now < self._crowded.get(stage_index, now)

    def shares(self, num_bytes: int, work_s: float | None) -> bool:
        """A peer's own data may be another replica's first work as well as its own: the way there
        is nothing beside the work."""
        is_far = self.transport.traffic.upload_s(num_bytes) > ASK_S
        return work_s is not None and work_s > ASK_WORK_S and not is_far

    def is_full(self, stage_index: int) -> bool:
        """Replicas of a stage live, and have no room: they will."""
        now = asyncio.get_running_loop().time()
        return now - self._full.get(stage_index, -math.inf) < CROWDED_S

    def turned_away(self, stage_index: int, backlog_s: float) -> None:
        """A replica of a stage had no room for a call that came without asking."""
        self._full[stage_index] = asyncio.get_running_loop().time()
        if backlog_s >= ASK_S:
            self._crowded[stage_index] = asyncio.get_running_loop().time() + CROWDED_S

    async def around(
        self, router: Router, request: StepRequest, exclude: Collection[str]
    ) -> str | None:
        """Of a few replicas drawn at random, the one with the least work before the microbatch, by
        its own word; None where none has room. Raises `Stale` where the round is over for all that
        have an answer."""
        async with self._turn:
            return await self._around(router, request, exclude)

    async def _around(
        self, router: Router, request: StepRequest, exclude: Collection[str]
    ) -> str | None:
        loop = asyncio.get_running_loop()
        drawn = router.sample(loop.time(), ASKED, exclude=exclude)
        asked = AdmitRequest(request.round, request.microbatch_id, request.stage)
        answers = await asyncio.gather(*(self._ask(router, p, asked) for p in drawn))
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
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            if peer_id == self.gossip.own.peer_id:
                reply = await self.ask_self(Message(asked))
            else:
                reply = await self.gossip.liveness.call_while_live(
                    peer_id, ADMIT, Message(asked), timeout_s=ANSWER_S
                )
            return float(reply.body.wait_s)
        except Busy as e:
            self._full[asked.stage] = loop.time()
            router.put_off(peer_id, loop.time(), e.backlog_s)
        except Stale as e:
            theirs = e.details.get("round")
            router.put_off(peer_id, loop.time(), LOOK_AGAIN_S)
            if isinstance(theirs, int) and theirs > asked.round:
                return e
        except NotReady:
            router.put_off(peer_id, loop.time(), LOOK_AGAIN_S)
        except (TransportError, RemoteError, ProtocolViolation) as e:
            router.sent(peer_id, start)
            router.failed(peer_id, loop.time(), loop.time() - start)
            if isinstance(e, TransportError):
                self.gossip.probe(peer_id)
        return None

    async def is_at_work(self, peer_id: str, request: StepRequest, silent_s: float) -> bool | None:
        """Does a callee that has been silent say that it has the microbatch? None where it says
        nothing."""
        asked = AdmitRequest(request.round, request.microbatch_id, request.stage)
        timeout_s, message = min(silent_s, ANSWER_S), Message(asked)
        try:
            if peer_id == self.gossip.own.peer_id:
                reply = await self.ask_self(message)
            else:
                reply = await call(self.transport, peer_id, ADMIT, message, timeout_s=timeout_s)
            return reply.body.known
        except (TransportError, DeadlineExceeded):
            return None
        except (SwarmnetError, ProtocolViolation):
            return False
