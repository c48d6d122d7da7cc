"""The life of a microbatch at one replica: forward, the next stage, backward.

A call is keyed by (round, microbatch id). Who calls with a key that is already here joins the
flight instead of flying again, and a key that is done is answered from its receipt until
the commit. A flight belongs to the replica, not to its caller: when the caller's channel
breaks, the flight goes on, and becomes an orphan that `swarm.update.rounds` settles.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnet.errors import Busy, NotReady, ProtocolViolation, Stale, SwarmnetError
from swarmnet.protocol.membership.records import LEAVING, LEFT, Record
from swarmnet.protocol.pipeline.ledger import COMMITTED, RUNNING
from swarmnet.protocol.pipeline.reservations import Reservations
from swarmnet.protocol.pipeline.service_time import BACKWARD_PART, FORWARD_PART
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.messages import (
    LOGITS,
    AdmitReply,
    AdmitRequest,
    Commit,
    InferReply,
    InferRequest,
    StepProgress,
    StepReply,
    StepRequest,
)
from swarmnet.swarm.pipeline.wiring import Wiring
from swarmnet.swarm.ports import BACKWARD, FORWARD, OTHER, LossResult, StepKey
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import Limits
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.replica import Replica
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message, convert

log = logging.getLogger("swarmnet.step")

ANNOUNCE_CHANGE = 0.2
"""By what part a service time must change to be announced again in the middle of a round."""
IN_HAND_PART = 0.03
"""How much the work for the microbatches that are inside a replica weighs against that which waits
before its device."""
LEAST_IN_HAND = 0.1
"""Counted for a replica that has none, so that of two idle ones the faster one is chosen."""
UNKNOWN_SERVICE_S = 1.0
"""What a replica that has not worked yet says of itself when it has no room."""
PASSAGE_SMOOTHING = 0.1
FURTHER_S = 5.0
"""How long callers are not told that a microbatch has come further on a way that they know."""
INFER_TIMEOUT_S = 60.0
MAX_INFERRING, INFER_BACKLOG_S = 64, 1.0
"""Forward passes that wait for the device at a time, far fewer than all work that may."""
MAX_TOKENS_PER_TARGET = 16
"""What a custom model counts as tokens need not be one for each number of its targets."""


@dataclass
class Flight:
    """A microbatch inside this replica, or its receipt."""

    task: asyncio.Task[Message]
    feeder: str = ""
    began: float = 0.0
    path: tuple[str, ...] = ()
    """Where it went after here, as far as is known."""
    listeners: list[Callable[[Message], None]] = field(default_factory=list)

    is_doomed: bool = False
    """Its feeder is gone: it will never count."""
    is_beyond: bool = False
    """It is with the following stages; nothing is done for it here."""
    _later: asyncio.TimerHandle | None = None

    def doom(self) -> None:
        """No more work is begun for it. What is in the gradient already is taken out when the round
        ends."""
        self.is_doomed = True
        if self.is_beyond:
            self.task.cancel()

    def check(self) -> None:
        """Raises `NotReady` where it is doomed."""
        if self.is_doomed:
            raise NotReady("the feeder of the microbatch is gone")

    def moved(self, path: tuple[str, ...]) -> None:
        """Tells every caller where the microbatch is: at once where it goes another way, or begins
        to go one; a little later where it has only come further, for by then it may have come
        further still."""
        before, self.path = self.path, path
        if before and path[: len(before)] == before:
            if self._later is None:
                loop = asyncio.get_running_loop()
                self._later = loop.call_later(FURTHER_S, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        self.silence()
        for tell in self.listeners:
            tell(Message(StepProgress(self.path)))

    def silence(self) -> None:
        """It is home: where it was is of no interest any more."""
        if self._later is not None:
            self._later.cancel()
            self._later = None


@dataclass
class StepService:
    """Serves `step`, `commit` and `infer` for the stage of this peer."""

    transport: Transport
    gossip: Gossip
    wiring: Wiring
    limits: Limits
    replica: Replica | None = None
    resource_limits: ResourceLimits = field(default_factory=ResourceLimits)
    on_measured: Callable[[Replica], None] = lambda replica: None
    """Hears when a replica turns out to be faster or slower than what was said of it last."""

    def __post_init__(self) -> None:
        self._flights: dict[StepKey, Flight] = {}
        self._inferring = 0
        self._entering: set[StepKey] = set()
        """Microbatches that were let in a moment ago, and are not in the device's queue yet."""
        self._tasks = Tasks("step")
        self.transport.handle("step", self.on_step)
        self.transport.handle("admit", self._on_admit)
        self.transport.handle("commit", self._on_commit)
        self.transport.handle("infer", self._on_infer)
        self.wiring.local.update(
            {"step": self.on_step, "admit": self._on_admit, "infer": self._on_infer}
        )
        self.gossip.on_suspected(self._feeder_lost)
        self.gossip.records.on_news(self._maybe_left)
        # One caller never has all places: others get through whatever it does.
        self._places = Reservations(max(1, self.limits.max_waiting_forwards - 1))
        self._passage_s = 0.0
        self._announced_s = 0.0

    async def close(self) -> None:
        await self._tasks.close()

    # ---- step -------------------------------------------------------------------------------

    async def on_step(self, request: Request) -> Message:
        """One microbatch: returns its `StepReply` when its gradient is back."""
        self.gossip.check_run(request)
        step = convert(request.message.body, StepRequest)
        replica = self._serving(step.stage)
        inputs, targets = _two(request.message.arrays)
        replica.stage.check(inputs, targets)
        self._learn(replica, step.round, request.remote)
        await replica.enter(step.round, self.limits.enter_wait_s)
        key = (step.round, step.microbatch_id)
        flight = self._flights.get(key)
        if flight is None:
            if replica.ledger.get(key) is not None:  # a late call, of somebody it passed by
                raise Stale("the microbatch was committed here already", round=replica.round)
            self._places.take(request.remote, key, asyncio.get_running_loop().time())
            if self._is_lost(step.feeder):
                raise NotReady("the feeder of the microbatch is gone")
            self._admit(replica, step.round, announced=step.asked)
            replica.ledger.begin(
                key, caller=request.remote, feeder=step.feeder, num_samples=step.num_samples
            )
            self._entering.add(key)
            task = self._tasks.start(self._fly(replica, step, inputs, targets))
            task.add_done_callback(lambda _: self._entering.discard(key))
            flight = self._flights[key] = Flight(
                task, step.feeder, asyncio.get_running_loop().time()
            )
        else:
            entry = replica.ledger.get(key)
            if entry is not None:
                entry.add_caller(request.remote)
            if flight.path:
                request.progress(Message(StepProgress(flight.path)))
        flight.listeners.append(request.progress)
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled():
                raise NotReady("the microbatch was given up here") from None
            raise
        finally:
            flight.listeners.remove(request.progress)
            if not flight.listeners or flight.task.done():
                flight.silence()

    async def _on_admit(self, request: Request) -> Message:
        """Says how long a microbatch would take here, and keeps a place for one that is coming."""
        self.gossip.check_run(request)
        asked = convert(request.message.body, AdmitRequest)
        replica = self._serving(asked.stage)
        key = (asked.round, asked.microbatch_id)
        if asked.round < replica.round:
            raise Stale(f"round {asked.round} is over here", round=replica.round)
        if key in self._flights or replica.ledger.get(key) is not None:
            return Message(AdmitReply(0.0, known=True))
        now = asyncio.get_running_loop().time()
        if not self._places.has(request.remote, key, now):
            self._admit(replica, asked.round, announced=True)
            if asked.comes and self._is_replica(request.remote):
                self._places.keep(request.remote, key, now)
        return Message(AdmitReply(self._wait_s(replica, asked.round)))

    def _wait_s(self, replica: Replica, round_index: int) -> float:
        """Seconds until work on one more microbatch would begin here, behind what waits for the
        device or for the uplink, whichever takes longer; and a part of the work for all that this
        replica has in its hands, for that comes back.

        Not until it would be *done*: then slow devices would stand idle beside short queues of fast
        ones, and twice as many microbatches would have to be in flight to keep all of them at
        work. Only of a round's last ones, when the next one has work for everybody, nothing counts
        but when they are home."""
        traffic = self.transport.traffic
        waiting = self._num_waiting(replica, round_index)
        device_s = waiting * replica.service_s / 2  # a piece of work is half a microbatch
        link_s = traffic.upload_s(traffic.queued_bytes())
        each_s = max(replica.service_s, traffic.upload_s(replica.sent_bytes))
        if replica.ahead and round_index == replica.round:
            return max(device_s, link_s) + each_s
        # Of two that could begin at once, the faster one.
        in_hand = max(self.num_flying, LEAST_IN_HAND)
        return max(device_s, link_s) + IN_HAND_PART * in_hand * each_s

    def _learn(self, replica: Replica, asked: int, caller: str) -> None:
        """What another replica asks for tells how far it is: it works on the next round when this
        one is over, or, where rounds may be opened ahead, when all of this one is launched."""
        r = replica.round
        if asked not in (r + 1, r + 2) or not self._is_replica(caller):
            return
        overlaps = replica.plan.is_delayed(r)
        if asked == r + 1 and overlaps:
            is_news = replica.heard_launched(r)
        else:
            is_news = (asked == r + 1 or overlaps) and replica.heard_over(r)
        if is_news:
            self.gossip.changed.notify_all()

    def _is_replica(self, peer_id: str) -> bool:
        record = self.gossip.view.get(peer_id)
        return record is not None and record.is_replica

    def _serving(self, stage_index: int) -> Replica:
        if self.replica is None or self.replica.index != stage_index:
            raise NotReady(f"stage {stage_index} is not served here")
        return self.replica

    def _admit(self, replica: Replica, round_index: int, *, announced: bool) -> None:
        """Raises `Busy` where the queue is full, `NotReady` where this peer is about to leave."""
        if self.gossip.own.state == LEAVING or round_index <= replica.given:
            raise NotReady("this peer is leaving")
        waiting = self._num_waiting(replica, round_index)
        # A place is free when one forward or one backward is done: half a microbatch.
        limits = self.limits
        # Who does not know yet how fast it is must not be trusted with many.
        room = limits.max_waiting_forwards
        if announced and replica.service_s > 0:
            in_time = int(2 * limits.max_waiting_s / replica.service_s)
            room = max(room, min(limits.max_waiting_announced, in_time))
        over = waiting + 1 - room
        most = min(limits.max_open_steps, replica.stage.max_in_flight)
        if round_index > replica.round:  # the present round always has room to come to its end
            most = max(1, most // 2)
        if waiting >= room or self.num_flying >= most:
            usual_s = replica.service_s or UNKNOWN_SERVICE_S
            raise Busy("the queue is full", backlog_s=over * usual_s / 2)
        if not self.resource_limits.has_room(replica.index, self.num_flying):
            raise Busy("no memory for more", backlog_s=replica.service_s)

    def _num_waiting(self, replica: Replica, round_index: int) -> int:
        """Pieces of work before the device, or on their way there. What is of the next round goes
        after this one's last microbatches, and keeps none out."""
        now = asyncio.get_running_loop().time()
        queued = replica.device.waiting_until(round_index)
        return queued + self._places.count(now) + len(self._entering)

    @property
    def num_flying(self) -> int:
        """Microbatches that are inside this replica now."""
        return len(self._tasks)

    def passage_s(self) -> float:
        """How long a microbatch is inside this replica, with its way through the stages after it:
        usually, or that of the oldest here now where that is more."""
        now = asyncio.get_running_loop().time()
        began = [f.began for f in self._flights.values() if not f.task.done()]
        return max(self._passage_s, now - min(began, default=now))

    async def _fly(
        self, replica: Replica, step: StepRequest, inputs: Array, targets: Array
    ) -> Message:
        key = (step.round, step.microbatch_id)
        flight = self._flights[key]
        self._entering.discard(key)  # from here to the device's queue nothing waits
        try:
            if replica.index == replica.stage.num_stages - 1:
                reply, grad_inputs = await self._last(replica, flight, key, inputs, targets)
                next_peer = None
            else:
                reply, grad_inputs, next_peer = await self._through(
                    replica, flight, step, inputs, targets
                )
        except BaseException:
            replica.ledger.failed(key)
            replica.stage.forget(key)
            self._flights.pop(key, None)
            raise
        replica.ledger.done(key, num_tokens=reply.num_tokens, next_peer=next_peer)
        took = asyncio.get_running_loop().time() - flight.began
        usual = self._passage_s or took
        self._passage_s = usual + PASSAGE_SMOOTHING * (took - usual)
        entry = replica.ledger.get(key)
        if entry is not None and entry.state == COMMITTED:
            self._forward_commit(replica, key, next_peer)
        return Message(reply, () if grad_inputs is None else (grad_inputs,))

    async def _last(
        self, replica: Replica, flight: Flight, key: StepKey, inputs: Array, targets: Array
    ) -> tuple[StepReply, Array | None]:
        stage = replica.stage
        result: LossResult = await replica.run(
            FORWARD, key, 1.0, lambda: stage.forward_backward(key, inputs, targets), flight.check
        )
        self._announce(replica)
        reply = StepReply(result.loss_sum, result.num_tokens, (self.gossip.own.peer_id,))
        replica.sent_bytes = 0 if result.grad_inputs is None else result.grad_inputs.num_bytes
        return reply, result.grad_inputs

    async def _through(
        self, replica: Replica, flight: Flight, step: StepRequest, inputs: Array, targets: Array
    ) -> tuple[StepReply, Array | None, str]:
        """Forward, the following stages, backward."""
        key = (step.round, step.microbatch_id)
        stage = replica.stage
        outputs = await replica.run(
            FORWARD, key, FORWARD_PART, lambda: stage.forward(key, inputs), flight.check
        )
        if not replica.sent_bytes:  # the gradient for the stage before is as large as its inputs
            replica.sent_bytes = outputs.num_bytes + (inputs.num_bytes if replica.index else 0)
        self._announce(replica)

        def on_path(path: tuple[str, ...]) -> None:
            flight = self._flights.get(key)
            if flight is not None:
                flight.moved(path)

        def accept(reply: StepReply, arrays: tuple[Array, ...]) -> Array:
            if len(arrays) != 1:
                raise ProtocolViolation("a step's reply without the gradient")
            if (arrays[0].dtype, arrays[0].shape) != (outputs.dtype, outputs.shape):
                raise ProtocolViolation("a gradient of another shape than the activation")
            if step.num_samples:
                check_tokens(reply, targets)
            return arrays[0]

        own = self.gossip.own.peer_id
        onward = StepRequest(
            round=step.round,
            microbatch_id=step.microbatch_id,
            stage=step.stage + 1,
            feeder=step.feeder,
            num_samples=step.num_samples,
            hint=step.hint,
        )
        for attempt in range(self.limits.max_attempts):
            flight.check()
            flight.is_beyond = True
            try:
                passed = await self.wiring.step(
                    onward, (outputs, targets), accept=accept, on_path=on_path
                )
            finally:
                flight.is_beyond = False
            grads = passed.grad_inputs
            assert grads is not None
            try:
                grad_inputs = await replica.run(
                    BACKWARD,
                    key,
                    BACKWARD_PART,
                    lambda grads=grads: stage.backward(key, grads),  # type: ignore[misc]
                    flight.check,
                )
            except ProtocolViolation as e:  # not finite: the fault of what came back
                log.warning("a gradient from %s was refused: %s", passed.peer_id[-8:], e)
                self.wiring.blame(onward.stage, passed.peer_id)
                if attempt + 1 == self.limits.max_attempts:
                    raise
                continue
            self._announce(replica)
            reply = passed.reply
            sent = (outputs, grad_inputs)
            replica.sent_bytes = sum(a.num_bytes for a in sent if a is not None)
            return (
                StepReply(reply.loss_sum, reply.num_tokens, (own, *reply.path)),
                grad_inputs,
                passed.peer_id,
            )
        raise NotReady("the following stages gave no usable gradient")

    def _feeder_lost(self, peer_id: str) -> None:
        """Work for a feeder that is gone would have to be taken out of the gradient again."""
        own = self.gossip.own.peer_id
        for flight in list(self._flights.values()):
            if flight.feeder == peer_id != own:
                flight.doom()

    def _maybe_left(self, record: Record) -> None:
        if record.state == LEFT:
            self._feeder_lost(record.peer_id)

    def _is_lost(self, feeder: str) -> bool:
        """Taken for dead, or gone."""
        view = self.gossip.view
        record = view.get(feeder)
        return view.detector.is_suspected(feeder) or (record is not None and record.state == LEFT)

    def _announce(self, replica: Replica) -> None:
        """A piece of a microbatch is done: says how long they take, where that has changed."""
        changed = abs(replica.service_s - self._announced_s) > ANNOUNCE_CHANGE * self._announced_s
        if changed and replica.service_s:
            self._announced_s = replica.service_s
            self.on_measured(replica)

    # ---- commit -----------------------------------------------------------------------------

    async def _on_commit(self, request: Request) -> Message:
        self.gossip.check_run(request)
        commit = convert(request.message.body, Commit)
        self.commit(commit, request.remote)
        return Message()

    def commit(self, commit: Commit, sender: str) -> None:
        """Closes microbatches: they count, their receipts go, and the next stage hears of it.
        Those of which `sender` is neither a caller nor the feeder are passed over."""
        replica = self.replica
        if replica is None:
            return
        onward: dict[str, list[int]] = {}
        for microbatch_id in commit.microbatch_ids:
            key = (commit.round, microbatch_id)
            entry = replica.ledger.get(key)
            if entry is not None and sender != entry.feeder and sender not in entry.callers:
                log.debug("a commit of %s, who did not call, is passed over", sender[-8:])
                continue
            entry = replica.ledger.commit(key)
            if entry is None or entry.state == RUNNING:
                continue
            self._settle(replica, key)
            if entry.next_peer is not None:
                onward.setdefault(entry.next_peer, []).append(microbatch_id)
        for peer_id, ids in onward.items():
            self._send_commit(peer_id, Commit(commit.round, tuple(ids)))

    def _forward_commit(self, replica: Replica, key: StepKey, next_peer: str | None) -> None:
        self._settle(replica, key)
        if next_peer is not None:
            self._send_commit(next_peer, Commit(key[0], (key[1],)))

    def _send_commit(self, peer_id: str, commit: Commit) -> None:
        if peer_id == self.gossip.own.peer_id:
            self.commit(commit, peer_id)
        else:
            self.transport.notify(peer_id, "commit", Message(commit))

    def _settle(self, replica: Replica, key: StepKey) -> None:
        replica.stage.forget(key)
        self.settled(key)

    def settled(self, key: StepKey) -> None:
        """Whether a microbatch counts is known: nobody needs its receipt any more."""
        self._flights.pop(key, None)

    def drop_round(self, round_index: int) -> None:
        """Ends the flights of a round and of those before it."""
        self._places.drop_round(round_index)
        for key in [k for k in self._flights if k[0] <= round_index]:
            flight = self._flights.pop(key)
            flight.silence()
            flight.task.cancel()

    # ---- infer ------------------------------------------------------------------------------

    async def _on_infer(self, request: Request) -> Message:
        """Forward only, through this stage and the following ones."""
        self.gossip.check_run(request)
        infer = convert(request.message.body, InferRequest)
        replica = self._serving(infer.stage)
        if infer.round >= 0:
            await replica.enter(infer.round, self.limits.enter_wait_s)
        arrays = request.message.arrays
        inputs = arrays[0] if arrays else None
        if inputs is None or len(arrays) > 2:
            raise ProtocolViolation("infer takes inputs and, for a loss, targets")
        targets = arrays[1] if len(arrays) > 1 else None
        last = infer.stage == replica.stage.num_stages - 1
        wanted = None if infer.mode == LOGITS or not last else targets
        if self._inferring >= MAX_INFERRING:
            raise Busy("too many forward passes wait here", backlog_s=INFER_BACKLOG_S)
        self._inferring += 1
        try:
            result = await replica.device.run(
                OTHER, lambda: replica.stage.evaluate(inputs, wanted), replica.round
            )
        finally:
            self._inferring -= 1
        if isinstance(result, LossResult):
            return Message(InferReply(result.loss_sum, result.num_tokens))
        if last:
            return Message(InferReply(), (result,))
        onward = (result,) if targets is None else (result, targets)
        return await infer_through(
            self.wiring, InferRequest(infer.stage + 1, infer.mode, infer.round), onward
        )


def check_tokens(reply: StepReply, targets: Array) -> None:
    """A stage's gradient is divided by the tokens that the last one counted. Raises
    `ProtocolViolation`."""
    most = MAX_TOKENS_PER_TARGET * math.prod(targets.shape)
    if not 0 < reply.num_tokens <= most:
        raise ProtocolViolation(f"a step's reply of {reply.num_tokens} tokens")


async def infer_through(
    wiring: Wiring,
    infer: InferRequest,
    arrays: tuple[Array, ...],
    timeout_s: float = INFER_TIMEOUT_S,
) -> Message:
    """Calls `infer` on some replica of its stage; tries others when one fails. Raises the last
    error; `Stale` at once when the round that it asks for is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    error: SwarmnetError = NotReady(f"no replica of stage {infer.stage}")
    tried: list[str] = []
    while loop.time() < end:
        router = wiring.router(infer.stage)
        peer_id = router.pick(loop.time(), exclude=tried)
        if peer_id is None:
            tried = []
            await wiring.gossip.changed.wait(0.2)
            continue
        message = Message(infer, arrays)
        try:
            if peer_id == wiring.gossip.own.peer_id:
                reply = await wiring.call_self("infer", message, lambda _: None)
            else:
                timeout_s = max(0.1, end - loop.time())
                reply = await wiring.transport.call(peer_id, "infer", message, timeout_s=timeout_s)
            return Message(convert(reply.body, InferReply), reply.arrays)
        except SwarmnetError as e:
            theirs = e.details.get("round") if isinstance(e, Stale) else None
            if isinstance(theirs, int) and theirs > infer.round:
                raise
            error = e
            tried.append(peer_id)
    raise error


def _two(arrays: tuple[Array, ...]) -> tuple[Array, Array]:
    if len(arrays) != 2:
        raise ProtocolViolation("a step takes two arrays: inputs and targets")
    return arrays[0], arrays[1]
