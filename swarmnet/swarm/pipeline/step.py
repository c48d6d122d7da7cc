"""The way of a microbatch through one replica: forward, the next stage, backward, commit.

A call is keyed by (round, microbatch id). A call with a key that is already here joins its flight
(`flights`), and a key that is done is answered from its receipt until the commit. When the caller's
channel breaks, the flight goes on, and becomes an orphan that `swarm.update.rounds` settles.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial

from swarmnet.batch import num_wanted
from swarmnet.errors import Busy, NotReady, NotSent, ProtocolViolation, Stale, Taken
from swarmnet.methods.microbatch import (
    ADMIT,
    COMMIT,
    STEP,
    Commit,
    InferReply,
    StepReply,
    StepRequest,
)
from swarmnet.methods.receipt import Statement
from swarmnet.ports import BACKWARD, FORWARD, StepKey
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.membership.failure_detector import ALIVE, State
from swarmnet.protocol.membership.records import LEFT, Record
from swarmnet.protocol.pipeline.contests import Contests
from swarmnet.protocol.pipeline.ledger import COMMITTED, RUNNING, Entry
from swarmnet.protocol.pipeline.origins import Origins
from swarmnet.protocol.pipeline.progress import Shown, shown_by_call
from swarmnet.protocol.pipeline.service_time import BACKWARD_PART, FORWARD_PART
from swarmnet.protocol.slots import ANY_SLOTS, SlotPlan, slot_of
from swarmnet.swarm.calls import notify, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.admission import AdmissionControl
from swarmnet.swarm.pipeline.auditing import Audits
from swarmnet.swarm.pipeline.dispatcher import Dispatcher, Passed
from swarmnet.swarm.pipeline.flights import Flight, Flights
from swarmnet.swarm.pipeline.receipts import (
    beside,
    check_gradient,
    check_launch,
    check_reply,
    hash_of,
    hash_of_statement,
    hash_of_targets,
)
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.replica.serving import Serving
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.step")

ANNOUNCE_CHANGE = 0.2
"""By what part a service time must change to be announced again in the middle of a round. It
protects from news with each microbatch (tests/swarm/lifecycle/test_speed.py)."""
MAX_EVENTS = 64
"""That wait for their peer; one more is left out, for those before it say nearly the same."""
MAX_TOKENS_PER_TARGET = 16
"""What a custom model counts as tokens need not be one for each number of its targets."""


@dataclass(frozen=True, slots=True)
class Contested:
    """Two feeders have flights of one slot here."""

    round: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A replica turns out to be faster or slower than what was said of it last."""

    replica: Replica


@dataclass
class StepService:
    """Serves `step`, `admit` and `commit` for the stage of this peer."""

    gossip: Gossip
    dispatcher: Dispatcher
    limits: WaitLimits
    serving: Serving
    resource_limits: ResourceLimits = field(default_factory=ResourceLimits)
    slots: SlotPlan = ANY_SLOTS
    """Of each round."""
    codec: str = NONE
    """`[pipeline] codec`."""
    is_audited: bool = True
    """Replicas of a stage have the same parameters: they can compute each other's work again."""

    def __post_init__(self) -> None:
        self.transport = self.gossip.transport
        self.events: asyncio.Queue[Contested | Measured] = asyncio.Queue(MAX_EVENTS)
        """What its peer is to act on."""
        self.flights = Flights()
        self.admission = AdmissionControl(
            self.gossip,
            self.limits,
            self.resource_limits,
            self.flights,
            self.serving,
        )
        self.audits = Audits(self.dispatcher, self.serving, codec=self.codec, is_on=self.is_audited)
        self.dispatcher.handle(STEP, self.on_step)
        self.dispatcher.handle(ADMIT, self.admission.on_admit)
        serve(self.transport, COMMIT, self._on_commit)
        self.gossip.liveness.on_change(self._feeder_changed)
        self.gossip.records.on_news(self._maybe_left)
        self._announced_s = 0.0
        self._origins = Origins(self.gossip.view)
        self._contests = Contests()

    async def close(self) -> None:
        await self.audits.close()
        await self.flights.close()

    @property
    def num_in_flight(self) -> int:
        """Microbatches that are inside this replica now."""
        return self.flights.num_in_flight

    # ---- step -------------------------------------------------------------------------------

    async def on_step(self, request: Request[StepRequest]) -> Message[StepReply]:
        """One microbatch: returns its `StepReply` when its gradient is back."""
        step = request.message.body
        replica = self.serving.of(step.stage)
        self._check_numbers(step)
        if self.gossip.view.is_barred(request.remote):
            raise NotReady("you have given a wrong result")
        replica.stage.check(*_parts(request.message.arrays), step.documents)
        await self._check_origin(replica, step, request)
        self._learn(replica, step.round, request.remote)
        try:
            await replica.enter(step.round, self.limits.enter_wait_s)
        except Stale:
            self._check_counted(replica, step)
            raise
        key = (step.round, step.microbatch_id)
        flight = self.flights.get(key)
        if flight is None:
            flight = self._let_in(replica, step, request)
        else:
            entry = replica.ledger.get(key)
            if entry is not None:
                entry.add_caller(request.remote)
        flight.join(request)
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled():
                raise NotReady("the microbatch was given up here") from None
            raise
        finally:
            flight.part(request)

    def _check_numbers(self, step: StepRequest) -> None:
        """Every slot of a round is full, and a round has no others."""
        if step.num_samples != self.dispatcher.samples_per_call:
            raise ProtocolViolation(
                f"a microbatch of {step.num_samples} samples; in this run it has "
                f"{self.dispatcher.samples_per_call}"
            )
        num_slots = self.slots.of(step.round)
        if slot_of(step.microbatch_id) >= num_slots:
            raise ProtocolViolation(f"round {step.round} of this run has {num_slots} slots")

    async def _check_origin(
        self, replica: Replica, step: StepRequest, request: Request[StepRequest]
    ) -> None:
        """Waits until the view has the titles of a microbatch, but no longer than news take. Raises
        `NotReady` where its caller has none, `Taken` where its feeder has none, and
        `ProtocolViolation` where its feeder has not signed it: then its caller, which would have
        looked itself, has made it up, and is banned."""
        caller, origins = request.remote, self._origins

        def may_come() -> bool:
            now = asyncio.get_running_loop().time()
            return origins.may_bring(caller, step.feeder, step.stage) and origins.may_feed(
                step.feeder, replica.round, now
            )

        wait_s = max(LOOK_AGAIN_S, self.gossip.spread_s)
        if await self.gossip.changed.until(may_come, wait_s):
            own, is_here = self.gossip.own, (step.round, step.microbatch_id) in self.flights
            if not is_here and caller != own.peer_id:
                targets = request.message.arrays[1]
                try:
                    await check_launch(step, own.run_id, targets, self.gossip.signer)
                except ProtocolViolation as e:
                    self.transport.ban(caller, str(e))
                    raise
            return
        if not origins.may_bring(caller, step.feeder, step.stage):
            raise NotReady(f"{caller[-8:]} may not bring microbatches into stage {step.stage}")
        raise Taken(f"{step.feeder[-8:]} is not known here as a feeder")

    def _let_in(self, replica: Replica, step: StepRequest, request: Request) -> Flight:
        """Begins the flight of a new microbatch. Raises `Stale`, `NotReady` or `Busy`."""
        key, caller = (step.round, step.microbatch_id), request.remote
        if replica.ledger.get(key) is not None:  # a late call, of a caller that it passed by
            raise Stale("the microbatch was committed here already", round=replica.round)
        self.admission.claim(caller, key)
        begun_at, usual_s = partial(self._begun_at, replica, caller), self.flights.usual_s()
        now = asyncio.get_running_loop().time()
        if not self._origins.may_bring_more(caller, begun_at, usual_s, now):
            text = "you bring one microbatch at a time, until one has counted"
            raise Busy(text, backlog_s=replica.service_s or LOOK_AGAIN_S)
        if self._is_lost(step.feeder):
            raise NotReady("the feeder of the microbatch is gone")
        self._check_slot(replica, step)
        self.admission.check_room(replica, step.round, announced=step.asked)
        replica.ledger.begin(key, caller=caller, feeder=step.feeder, num_samples=step.num_samples)
        parts = _parts(request.message.arrays)
        flight = self.flights.enter(key, step.feeder)
        self.flights.start(flight, self._fly(replica, flight, step, *parts))
        self.admission.entering(key, flight.task)
        return flight

    def _begun_at(self, replica: Replica, caller: str) -> list[float]:
        """Of the flights of a caller that do not count yet."""
        flights = (self.flights.get(key) for key in replica.ledger.open_of(caller))
        return [flight.began_at for flight in flights if flight is not None]

    def _check_slot(self, replica: Replica, step: StepRequest) -> None:
        """Raises `Taken` where another flight of the slot is here and may count. A flight of a
        feeder that is gone, or that its feeder has given up for this one, never will."""
        self._check_counted(replica, step)
        for entry in replica.ledger.other_flights((step.round, step.microbatch_id)):
            if entry.feeder == step.feeder or self._is_lost(entry.feeder):
                continue
            self._tell(Contested(step.round))
            if self._keeps_out(entry):
                raise Taken("another flight of the slot is here")

    def _check_counted(self, replica: Replica, step: StepRequest) -> None:
        """Raises `Taken` where a flight of the slot counts here. A feeder that has restarted
        launches again what it had committed. Where the round is closed meanwhile, the others wait
        for it, and this word alone tells it that nothing is missing."""
        others = replica.ledger.other_flights((step.round, step.microbatch_id))
        if any(entry.state == COMMITTED for entry in others):
            raise Taken("the slot counts already", counted=True)

    def _keeps_out(self, entry: Entry) -> bool:
        now, flight = asyncio.get_running_loop().time(), self.flights.get(entry.key)
        began_at = now if flight is None else flight.began_at
        return self._contests.keeps_out(entry.feeder, began_at, self.flights.usual_s(), now)

    def _learn(self, replica: Replica, asked: int, caller: str) -> None:
        """As `shown_by_call`: a call tells how far its caller is."""
        r, now = replica.round, asyncio.get_running_loop().time()
        overlaps = replica.plan.is_delayed(r)
        match shown_by_call(self.gossip.view, caller, asked, r, now, overlaps=overlaps):
            case Shown.LAUNCHED:
                is_news = replica.transitions.heard_launched(r)
            case Shown.OVER:
                is_news = replica.transitions.heard_over(r)
            case Shown.NOTHING:
                is_news = False
        if is_news:
            self.gossip.changed.notify_all()

    async def _fly(
        self,
        replica: Replica,
        flight: Flight,
        step: StepRequest,
        inputs: Array,
        targets: Array,
    ) -> Message:
        key = (step.round, step.microbatch_id)
        self.admission.entered(key)  # from here to the device's queue nothing waits
        try:
            if replica.index == replica.stage.num_stages - 1:
                reply, grad_inputs = await self._last(replica, flight, step, inputs, targets)
                next_peer = None
            else:
                reply, grad_inputs, next_peer = await self._through(
                    replica, flight, step, inputs, targets
                )
        except NotSent:  # settled with the others for which no commit comes
            replica.ledger.done(key, num_tokens=0, next_peer=None)
            self.flights.forget(key)
            raise
        except BaseException:
            replica.ledger.failed(key)
            replica.stage.forget(key)
            self.flights.forget(key)
            raise
        replica.ledger.done(key, num_tokens=reply.num_tokens, next_peer=next_peer)
        if grad_inputs is not None and reply.receipt is not None:
            self.audits.gave(key, inputs, grad_inputs, reply.receipt)
        self.flights.completed(flight)
        entry = replica.ledger.get(key)
        if entry is not None and entry.state == COMMITTED:
            self._forward_commit(replica, key, next_peer)
        return Message(reply, () if grad_inputs is None else (grad_inputs,))

    async def _last(
        self, replica: Replica, flight: Flight, step: StepRequest, inputs: Array, targets: Array
    ) -> tuple[StepReply, Array | None]:
        key, stage = (step.round, step.microbatch_id), replica.stage
        work = beside(
            stage.loss_pass(key, inputs, targets, step.documents),
            lambda: (hash_of(inputs), hash_of_targets(targets, step.documents)),
            lambda result: hash_of(result.grad_inputs),
        )
        taken, result, given = await replica.run(FORWARD, key, 1.0, work, flight.check)
        self._announce(replica)
        own = self.gossip.own
        receipt = self.audits.sign(
            Statement(
                own.run_id,
                own.peer_id,
                *key,
                step.stage,
                *taken,
                given,
                result.loss_sum,
                result.num_tokens,
            )
        )
        reply = StepReply(result.loss_sum, result.num_tokens, (own.peer_id,), receipt)
        replica.measured.sent(0 if result.grad_inputs is None else result.grad_inputs.num_bytes)
        return reply, result.grad_inputs

    async def _through(
        self,
        replica: Replica,
        flight: Flight,
        step: StepRequest,
        inputs: Array,
        targets: Array,
    ) -> tuple[StepReply, Array | None, str]:
        """Forward, the following stages, backward. What comes back from them is refused where the
        backward finds that it is not finite; another replica is asked then."""
        key = (step.round, step.microbatch_id)
        stage, own = replica.stage, self.gossip.own
        forward = beside(
            stage.forward_pass(key, inputs, step.documents, targets),
            lambda: (hash_of(inputs), hash_of_targets(targets, step.documents)),
            hash_of,
        )
        taken, outputs, sent_hash = await replica.run(
            FORWARD, key, FORWARD_PART, forward, flight.check
        )
        if not replica.measured.sent_bytes:
            # The gradient for the stage before is about as large as its inputs.
            replica.measured.sent(outputs.num_bytes + (inputs.num_bytes if replica.index else 0))
        self._announce(replica)
        for attempt in range(MAX_TRIES):
            passed = await self._pass_on(
                replica, flight, step, outputs, targets, (sent_hash, taken[1])
            )
            grads, beyond = passed.grad_inputs, passed.reply.receipt
            assert grads is not None
            assert beyond is not None
            backward = beside(
                stage.backward_pass(key, grads), partial(check_gradient, beyond, grads), hash_of
            )
            try:
                _, grad_inputs, given = await replica.run(
                    BACKWARD, key, BACKWARD_PART, backward, flight.check
                )
            except ProtocolViolation as e:  # not finite: the fault of what came back
                log.warning("a gradient from %s was refused: %s", passed.peer_id[-8:], e)
                self.dispatcher.blame(step.stage + 1, passed.peer_id)
                if attempt + 1 == MAX_TRIES:
                    raise
                continue
            self._announce(replica)
            sent = (outputs, grad_inputs)
            replica.measured.sent(sum(a.num_bytes for a in sent if a is not None))
            if beyond.read().inputs == sent_hash:
                self.audits.returned(self._onward(step), (outputs, targets), passed, beyond)
            loss_sum, num_tokens = passed.reply.loss_sum, passed.reply.num_tokens
            receipt = self.audits.sign(
                Statement(
                    own.run_id,
                    own.peer_id,
                    *key,
                    step.stage,
                    *taken,
                    given,
                    loss_sum,
                    num_tokens,
                    hash_of_statement(beyond),
                )
            )
            path = (own.peer_id, *passed.reply.path)
            reply = StepReply(loss_sum, num_tokens, path, receipt)
            return reply, grad_inputs, passed.peer_id
        raise NotReady("the following stages gave no usable gradient")

    async def _pass_on(
        self,
        replica: Replica,
        flight: Flight,
        step: StepRequest,
        outputs: Array,
        targets: Array,
        hashes: tuple[bytes, bytes],
    ) -> Passed:
        """Sends an activation through the following stages; returns with its gradient. `hashes`: of
        it and of the targets."""
        about = (step.round, step.microbatch_id, step.stage + 1)

        def accept(reply: StepReply, arrays: tuple[Array, ...]) -> Array:
            if len(arrays) != 1:
                raise ProtocolViolation("a step's reply without the gradient")
            replica.stage.check_gradient(arrays[0])
            check_tokens(reply, targets)
            check_reply(reply, about, *hashes, is_hinted=bool(step.hint))
            return arrays[0]

        flight.leaves()
        try:
            return await self.dispatcher.step(
                self._onward(step), (outputs, targets), accept=accept, track=flight
            )
        finally:
            flight.returns()

    @staticmethod
    def _onward(step: StepRequest) -> StepRequest:
        """For the next stage."""
        return StepRequest(
            round=step.round,
            microbatch_id=step.microbatch_id,
            stage=step.stage + 1,
            feeder=step.feeder,
            num_samples=step.num_samples,
            hint=step.hint,
            documents=step.documents,
            launch=step.launch,
        )

    def _feeder_changed(self, peer_id: str, state: State) -> None:
        if state is not ALIVE:
            self._feeder_lost(peer_id)

    def _feeder_lost(self, peer_id: str) -> None:
        if peer_id != self.gossip.own.peer_id:
            self.flights.doom(peer_id)

    def _maybe_left(self, record: Record) -> None:
        if record.state == LEFT:
            self._feeder_lost(record.peer_id)

    def _is_lost(self, feeder: str) -> bool:
        """Whether a feeder cannot be called, or has left."""
        view = self.gossip.view
        record = view.get(feeder)
        return view.detector.is_lost(feeder) or (record is not None and record.state == LEFT)

    def _announce(self, replica: Replica) -> None:
        """A piece of a microbatch is done: says how long they take, where that has changed."""
        changed = abs(replica.service_s - self._announced_s) > ANNOUNCE_CHANGE * self._announced_s
        if changed and replica.service_s:
            self._announced_s = replica.service_s
            self._tell(Measured(replica))

    def _tell(self, event: Contested | Measured) -> None:
        if not self.events.full():
            self.events.put_nowait(event)

    # ---- commit -----------------------------------------------------------------------------

    async def _on_commit(self, request: Request[Commit]) -> Message[None]:
        commit = request.message.body
        self.commit(commit, request.remote)
        return Message()

    def commit(self, commit: Commit, sender: str) -> None:
        """Closes microbatches: they count, their receipts go, and the next stage hears of it.
        Those of which `sender` is neither a caller nor the feeder are passed over."""
        replica = self.serving.replica
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
            if sender == entry.feeder:  # who has no use for what its callers sent in vain
                self.gossip.worked(entry.caller)
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
            notify(self.transport, peer_id, COMMIT, Message(commit))

    def _settle(self, replica: Replica, key: StepKey) -> None:
        replica.stage.forget(key)
        self.flights.forget(key)

    def drop_round(self, round_index: int) -> None:
        """Ends the flights of a round and of those before it."""
        self.admission.drop_round(round_index)
        self.audits.drop_round(round_index)
        self.flights.drop_round(round_index)


def check_tokens(reply: StepReply | InferReply, targets: Array) -> None:
    """A stage's gradient is divided by the tokens that the last one counted: there are none only
    where no target has a loss. Raises `ProtocolViolation`."""
    wanted = num_wanted(targets)
    if not min(wanted, 1) <= reply.num_tokens <= MAX_TOKENS_PER_TARGET * wanted:
        raise ProtocolViolation(f"a step's reply of {reply.num_tokens} tokens")


def _parts(arrays: tuple[Array, ...]) -> tuple[Array, Array]:
    """Inputs and targets."""
    if len(arrays) != 2:
        raise ProtocolViolation("a step takes two arrays: inputs and targets")
    return arrays[0], arrays[1]
