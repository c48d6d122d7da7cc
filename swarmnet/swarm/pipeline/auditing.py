"""Audits: a part of what replicas give is computed again by others.

A caller draws some of the replies that it gets (`returned`), asks the replica after the callee what
came there, and has other replicas of the callee's stage judge. This peer judges for others too, and
keeps what it got and gave itself (`gave`), for those who audit the replica before it.
docs/decisions/0018-a-part-of-the-work-is-done-again.md says why it is so."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from dataclasses import dataclass, field

from swarmnet.errors import Busy, NotReady, ProtocolViolation, Stale, SwarmnetError
from swarmnet.methods.audit import (
    EVIDENCE,
    RECOMPUTE,
    EvidenceReply,
    EvidenceRequest,
    RecomputeReply,
    RecomputeRequest,
)
from swarmnet.methods.microbatch import StepRequest
from swarmnet.methods.receipt import Receipt, Statement, packed
from swarmnet.ports import OTHER, StageResult, StepKey
from swarmnet.protocol.audit import TOLERANCES, Draw, Jury, Verdict
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.timing import BULK_S
from swarmnet.swarm.pipeline.dispatcher import Dispatcher, Passed
from swarmnet.swarm.pipeline.receipts import (
    beside,
    hash_of,
    hash_of_statement,
    hash_of_targets,
    statement_of,
)
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.replica.serving import Serving
from swarmnet.swarm.tasks import Tasks
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.audit")

MAX_AUDITING = 4
"""Audits that this peer has under way; what is drawn beyond them is not audited."""
MAX_JUDGING = 4
"""Microbatches of others that wait here to be computed again."""
MAX_EVIDENCE_BYTES = 64 << 20
"""Of what this replica got and gave. The oldest goes first."""


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What this replica got and gave for a microbatch."""

    inputs: Array
    gradient: Array
    receipt: Receipt

    @property
    def num_bytes(self) -> int:
        return self.inputs.num_bytes + self.gradient.num_bytes


@dataclass(frozen=True, slots=True)
class _Case:
    """A microbatch that is audited."""

    said: Statement
    """By the audited replica."""
    request: RecomputeRequest
    arrays: tuple[Array, ...]
    path: tuple[str, ...]


@dataclass
class Audits:
    """Of one peer."""

    dispatcher: Dispatcher
    serving: Serving
    codec: str = NONE
    """`[pipeline] codec` of the run."""
    is_on: bool = True
    """False where replicas of a stage have different parameters."""
    _tasks: Tasks = field(default_factory=lambda: Tasks("audit"))
    _evidence: OrderedDict[StepKey, _Evidence] = field(default_factory=OrderedDict)
    _evidence_bytes: int = 0
    _num_judging: int = 0

    def __post_init__(self) -> None:
        self.gossip = self.dispatcher.gossip
        self.conclusions = self.dispatcher.conclusions
        self.draw = Draw(_branch(self.dispatcher.rng))
        self.dispatcher.handle(EVIDENCE, self._on_evidence)
        self.dispatcher.handle(RECOMPUTE, self._on_recompute)

    async def close(self) -> None:
        await self._tasks.close()

    # ---- receipts ---------------------------------------------------------------------------

    def sign(self, statement: Statement) -> Receipt:
        """Of what this replica did."""
        unsigned = Receipt(packed(statement), b"")
        return Receipt(unsigned.statement, self.gossip.signer.sign(unsigned.signed))

    def gave(self, key: StepKey, inputs: Array, gradient: Array, receipt: Receipt) -> None:
        """Keeps for a while what this replica got and gave, for who audits the one before."""
        if not self.is_on:
            return
        evidence = self._evidence[key] = _Evidence(inputs, gradient, receipt)
        self._evidence_bytes += evidence.num_bytes
        while self._evidence_bytes > MAX_EVIDENCE_BYTES:
            self._evidence_bytes -= self._evidence.popitem(last=False)[1].num_bytes

    def drop_round(self, round_index: int) -> None:
        """Nobody has the parameters of this round, and of those before it, any more."""
        for key in [k for k in self._evidence if k[0] <= round_index]:
            self._evidence_bytes -= self._evidence.pop(key).num_bytes

    # ---- auditing others --------------------------------------------------------------------

    def returned(
        self, request: StepRequest, arrays: tuple[Array, Array], passed: Passed, receipt: Receipt
    ) -> None:
        """A reply has come, with a receipt for what was sent. Some are audited: the first one of a
        replica that did not count before, since it counts from now on."""
        if not self.is_on or passed.peer_id == self.gossip.own.peer_id:
            return
        is_drawn = self.draw.is_drawn()
        if not (is_drawn or passed.is_first) or len(self._tasks) >= MAX_AUDITING:
            return
        recompute = RecomputeRequest(request.stage, receipt, documents=request.documents)
        below = () if passed.grad_inputs is None else (passed.grad_inputs,)
        case = _Case(receipt.read(), recompute, (*arrays, *below), passed.reply.path)
        self._tasks.start(self._audit(case))

    async def _audit(self, case: _Case) -> None:
        audited, receipt = case.said.peer_id, case.request.receipt
        if not self.gossip.signer.verify(audited, receipt.signed, receipt.signature):
            log.warning("%s gave a receipt that it has not signed", audited[-8:])
            self.conclusions.computed(audited, is_same=False)
            self.gossip.view.lied(audited)
            return
        view, now = self.gossip.view, asyncio.get_running_loop().time()
        replicas = [r.peer_id for r in view.in_reach(case.said.stage, now)]
        may = [p for p in replicas if self.conclusions.may_judge(p)]
        judges = self.draw.judges(may, audited)
        if not judges:
            return
        if len(case.path) > 1:
            case = await self._with_evidence(case)
        jury = Jury(len(judges))
        for judge in judges:
            message = Message(case.request, case.arrays, is_background=True)
            try:
                reply = await self.dispatcher.call(judge, RECOMPUTE, message, timeout_s=BULK_S)
            except Stale:  # the round is over: nobody can say any more
                break
            except (SwarmnetError, ProtocolViolation) as e:
                log.debug("%s does not judge: %s", judge[-8:], e)
                jury = jury.missed()
                continue
            jury = jury.heard(judge, is_same=self._is_same(reply.body.difference))
            if jury.verdict is not Verdict.OPEN:
                break
        verdict = self.conclusions.concluded(audited, jury)
        if verdict is Verdict.LIED:
            self.gossip.view.lied(audited)
            log.warning(
                "%s gave a wrong result for microbatch %d of round %d, as %d of %d judges find: it "
                "gets no more",
                audited[-8:],
                case.said.microbatch_id,
                case.said.round,
                len(jury.differs),
                jury.size,
            )
        elif jury.differs and verdict is not Verdict.SLANDERED:
            log.warning(
                "%s and %s differ: one of them is wrong", audited[-8:], jury.differs[0][-8:]
            )

    async def _with_evidence(self, case: _Case) -> _Case:
        """With what the audited replica sent to the next stage and got from there."""
        said = case.said
        asked = EvidenceRequest(said.round, said.microbatch_id, said.stage + 1)
        reply = await self.dispatcher.call(case.path[1], EVIDENCE, Message(asked), timeout_s=BULK_S)
        beyond = reply.body.receipt
        if len(reply.arrays) != 2 or hash_of_statement(beyond) != said.beyond:
            raise ProtocolViolation("the evidence of something else")
        request = RecomputeRequest(said.stage, case.request.receipt, beyond, case.request.documents)
        return _Case(said, request, (*case.arrays, *reply.arrays), case.path)

    def _is_same(self, difference: float) -> bool:
        return difference <= TOLERANCES[self.codec]

    # ---- judging ----------------------------------------------------------------------------

    async def _on_evidence(self, request: Request[EvidenceRequest]) -> Message[EvidenceReply]:
        asked = request.message.body
        evidence = self._evidence.get((asked.round, asked.microbatch_id))
        if evidence is None:
            raise NotReady("nothing is known of this microbatch here")
        arrays = (evidence.inputs, evidence.gradient)
        return Message(EvidenceReply(evidence.receipt), arrays, is_background=True)

    async def _on_recompute(self, request: Request[RecomputeRequest]) -> Message[RecomputeReply]:
        body, arrays = request.message.body, request.message.arrays
        replica = self.serving.of(body.stage)
        said, beyond = self._statements(body)
        is_last = body.stage == replica.stage.num_stages - 1
        if is_last != (beyond is None) or said.stage != body.stage:
            raise ProtocolViolation("not the receipts of such a stage")
        inputs, targets, gradient, outputs, above = _taken(arrays, body.stage > 0, not is_last)
        theirs = StageResult(
            outputs,
            gradient,
            said.loss_sum if is_last else 0.0,
            said.num_tokens if is_last else 0,
        )

        def check_round() -> None:
            r = said.round
            if not replica.synced or not (replica.round == r or replica.takes(r)):
                raise Stale(f"round {r} is not open here", round=replica.round)

        def check_hashes() -> None:
            signed = (said.inputs, said.targets, said.gradient)
            found = (hash_of(inputs), hash_of_targets(targets, body.documents), hash_of(gradient))
            if signed != found:
                raise ProtocolViolation("other arrays than the receipt is for")
            if beyond is not None and (beyond.inputs, beyond.gradient) != (
                hash_of(outputs),
                hash_of(above),
            ):
                raise ProtocolViolation("other arrays than the receipt of the next stage is for")

        check_round()
        if self._names_others(replica, said) and self.conclusions.passes_over(said.peer_id):
            raise NotReady("it had other parameters, by its own record")
        if self._num_judging >= MAX_JUDGING:
            raise Busy("too many microbatches wait to be computed again", backlog_s=FIRST_PAUSE_S)
        stage, key = replica.stage, (said.round, said.microbatch_id)
        work = beside(
            stage.recompute_pass(key, inputs, targets, above, body.documents),
            check_hashes,
            lambda ours: stage.difference(ours, theirs),
        )
        self._num_judging += 1
        try:
            _, _, difference = await replica.device.run(OTHER, work, said.round, check_round)
        finally:
            self._num_judging -= 1
        check_round()  # else it may have seen the parameters of another round
        is_same = self._is_same(difference)
        if not is_same:
            log.warning(
                "%s gave a result for microbatch %d of round %d that differs by %.2g from what "
                "this machine computes",
                said.peer_id[-8:],
                said.microbatch_id,
                said.round,
                difference,
            )
        self.conclusions.computed(said.peer_id, is_same=is_same)
        if not is_same:
            self.gossip.view.lied(said.peer_id)
        return Message(RecomputeReply(difference))

    def _statements(self, body: RecomputeRequest) -> tuple[Statement, Statement | None]:
        """Those of the audited replica and of the one after it: signed, and one chain. Raises
        `ProtocolViolation`."""
        run_id = self.gossip.own.run_id
        said = statement_of(body.receipt, run_id)
        beyond = None if body.beyond is None else statement_of(body.beyond, run_id)
        for receipt, statement in ((body.receipt, said), (body.beyond, beyond)):
            if receipt is None or statement is None:
                continue
            peer_id = statement.peer_id
            if not self.gossip.signer.verify(peer_id, receipt.signed, receipt.signature):
                raise ProtocolViolation("a receipt with a false signature")
        if hash_of_statement(body.beyond) != said.beyond:
            raise ProtocolViolation("the receipt of another path")
        return said, beyond

    def _names_others(self, replica: Replica, said: Statement) -> bool:
        """The record of the audited peer names other parameters in this round than the own one."""
        record = self.gossip.view.get(said.peer_id)
        if record is None or not record.round == said.round == replica.round:
            return False
        return record.digests != self.gossip.own.digests


def _taken(
    arrays: tuple[Array, ...], has_gradient: bool, has_outputs: bool
) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    """Inputs, targets, gradient of the inputs, outputs and their gradient."""
    if len(arrays) != 2 + has_gradient + 2 * has_outputs:
        raise ProtocolViolation("not the arrays of such a stage")
    inputs, targets, *rest = arrays
    gradient = rest.pop(0) if has_gradient else None
    outputs, above = rest if has_outputs else (None, None)
    return inputs, targets, gradient, outputs, above


def _branch(rng: random.Random) -> random.Random:
    """A generator of its own that follows from another one, which stays as it is."""
    copy = random.Random()
    copy.setstate(rng.getstate())
    return random.Random(copy.getrandbits(256))
