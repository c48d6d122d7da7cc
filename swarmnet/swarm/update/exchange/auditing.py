"""Audits of updates: a part of what primaries make is made again by others of the stage.

A backup makes every step anyway, and compares its result with the primary's (`came`). Of a part of
the sums that it gets it asks the contributors for what they gave, and makes the sum again
(`mirrored`). Contributors check a part of what is signed with their results. What is found goes to
all replicas of the stage, each of which looks for itself
(docs/decisions/0020-an-update-is-done-again.md).

Nobody waits for an audit: all of it is done beside the exchange."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swarmnet.errors import NotReady, ProtocolViolation, SwarmnetError
from swarmnet.methods.update import MirrorRequest
from swarmnet.methods.update_proof import (
    FINDING,
    GIVEN,
    MAX_ENTRIES,
    PROOF,
    Finding,
    GivenRequest,
    Proof,
    ProofReply,
    ProofRequest,
    Squares,
    Stepped,
    Summed,
)
from swarmnet.protocol.audit import (
    LOOK_RATE,
    UPDATE_RATE,
    Conclusions,
    Contradictions,
    Draw,
    Jury,
    Part,
    Verdict,
    Withheld,
    are_of_one_sum,
    are_same_squares,
    is_same_update,
    unfair,
)
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.membership.records import DIGEST_BYTES
from swarmnet.protocol.sync_modes import GOSSIP
from swarmnet.protocol.timing import BULK_S
from swarmnet.protocol.update import robust
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.receipts import hash_of
from swarmnet.swarm.replica.replica import Replica, decides_tied, follows_tied
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchange.coded import check_coded, check_contribution
from swarmnet.swarm.update.exchange.norms import Norms
from swarmnet.swarm.update.exchange.proofs import Given, Proofs, hash_of_proof
from swarmnet.swarm.update.exchange.shard_work import Came, Result, rule_of
from swarmnet.swarm.update.ownership import Ownership
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message, are_same

log = logging.getLogger("swarmnet.audit")

MAX_AUDITING = 2
"""Sums that this replica makes again at a time; each takes the memory of all contributions to a
shard."""
MAX_FINDINGS = 4
"""Of which the arrays are kept, for others to look for themselves."""
MAX_JURIES = 256

_NOT_SHOWN = "not shown"
_UNLIKE = "gave a result that does not follow from its sum"

Arrays = dict[str, Array]
"""By contributor; "" for the sum."""


@dataclass
class UpdateAudits:
    """Of one replica's stage."""

    gossip: Gossip
    settings: RunSettings
    replica: Replica
    ownership: Ownership
    proofs: Proofs
    norms: Norms
    conclusions: Conclusions
    rng: random.Random
    _tasks: Tasks = field(default_factory=lambda: Tasks("update audit"))
    _num_auditing: int = 0
    _evidence: OrderedDict[bytes, Arrays] = field(default_factory=OrderedDict)
    """By the hash of what was signed of a false sum."""
    _juries: OrderedDict[tuple[str, int, int], Jury] = field(default_factory=OrderedDict)
    """Backups that have found a false result; by primary, exchange and shard. Of a primary of
    another stage (exchange and shard -1): who of that stage has found it false."""

    def __post_init__(self) -> None:
        self.draw = Draw.beside(self.rng, UPDATE_RATE)
        self.looks = Draw.beside(self.rng, LOOK_RATE)
        self.repeats = Draw.beside(self.rng, UPDATE_RATE)
        self.squares = Draw.beside(self.rng, UPDATE_RATE)
        self.withheld = Withheld()
        self.contradictions = Contradictions()
        transport = self.gossip.transport
        serve(transport, GIVEN, self._on_given)
        serve(transport, PROOF, self._on_proof)
        serve(transport, FINDING, self._on_finding)

    async def close(self) -> None:
        await self._tasks.close()

    @property
    def is_on(self) -> bool:
        """Replicas of the stage have one result."""
        return self.replica.plan.mode != GOSSIP

    @property
    def _tells_results(self) -> bool:
        return self.replica.optimizer.codec.names.tells_results

    @property
    def _clips(self) -> bool:
        """Steps are scaled by the norm of all stages, of which primaries tell collectors."""
        return self.settings.grad_clip_norm > 0 and not self.replica.plan.is_local

    def is_signed_for(self, shard: int) -> bool:
        """Sums of a shard are signed. Those of two stages are not, nor those of too many."""
        now = asyncio.get_running_loop().time()
        is_tied = follows_tied(self.replica, shard) or decides_tied(self.replica, shard)
        num_replicas = len(self.gossip.view.replicas(self.replica.index, now))
        return self.is_on and not is_tied and 2 * num_replicas <= MAX_ENTRIES

    # ---- as backup: the sum -----------------------------------------------------------------

    def mirrored(self, mirror: MirrorRequest, primary: str, total: Array) -> frozenset[str]:
        """The primary that this replica follows has it make its step. Some sums are made again.
        Others are believed as yet: what the primary has signed of them is kept. Returns whose
        contributions are in it; nobody's where that is not signed."""
        r, j, summed = mirror.round, mirror.shard, mirror.summed
        self.proofs.sums(r, j)  # nothing that was signed of another sum is of this step
        if summed is None or not self.is_signed_for(j):
            return frozenset()
        said = summed.read(Summed)
        self.proofs.mirrored(r, j, summed, said)
        # From the sum to a result that keeps few numbers, only its primary knows the way.
        is_drawn = not self._tells_results and self.draw.is_drawn()
        if is_drawn and self._num_auditing < MAX_AUDITING:
            self._tasks.start(self._audit(summed, said, total))
        return frozenset(e.peer_id for e in said.entries if e.factor)

    def not_shown(self, mirror: MirrorRequest, primary: str) -> str:
        """Why a primary's step is not to be made here: it has not shown what it has signed of its
        sum, so nobody would believe in the result. Empty where it has."""
        if not self.is_signed_for(mirror.shard):
            return ""
        try:
            said = None if mirror.summed is None else mirror.summed.read(Summed)
        except ProtocolViolation as e:
            log.debug("%s: %s", primary[-8:], e)
            said = None
        if said is not None and not self._is_of_another(said, mirror, primary):
            return ""
        self._not_shown(primary, mirror.shard)
        return "the sum of this step is not shown"

    def _is_of_another(self, said: Summed, mirror: MirrorRequest, primary: str) -> bool:
        where = said.run_id, said.peer_id, said.round, said.stage, said.shard, said.term
        asked = self.proofs.run_id, primary, mirror.round, mirror.stage, mirror.shard, mirror.term
        numbers = said.num_tokens, said.scale, said.steps
        return where != asked or numbers != (mirror.num_tokens, mirror.scale, mirror.steps)

    async def _audit(self, summed: Proof, said: Summed, total: Array) -> None:
        """Asks at once, for contributors keep what they gave until they have the result."""
        self._num_auditing += 1
        try:
            arrays = {"": total} | await self._contributions(summed, said)
            why = await self._wrong_sum(summed, said, arrays)
        except SwarmnetError as e:  # nothing follows: a contributor may have been too fast
            log.debug("a sum of %s was not made again: %s", said.peer_id[-8:], e)
            return
        finally:
            self._num_auditing -= 1
        log.debug("a sum of %s was made again", said.peer_id[-8:])
        self.withheld.shown(said.peer_id, said.shard)
        self._concluded(said, why)
        if why:
            self._keep(summed, arrays)
            self._tell(Finding(said.stage, summed))
            self._tell_collectors(Finding(said.stage, summed))

    async def _contributions(self, summed: Proof, said: Summed) -> Arrays:
        """From those who gave them. Raises `SwarmnetError` where one does not come, or is another
        than the primary has named."""

        async def given(peer_id: str) -> Array:
            if peer_id == self.gossip.own.peer_id:
                return await self.proofs.own(said.round, said.shard)
            return await self._asked(peer_id, GivenRequest(said.stage, peer_id, summed))

        asked = {e.peer_id: self._tasks.start(given(e.peer_id)) for e in said.entries}
        try:
            return {peer_id: await task for peer_id, task in asked.items()}
        finally:
            for task in asked.values():
                task.cancel()

    async def _asked(self, peer_id: str, request: GivenRequest) -> Array:
        message = Message(request)  # small, and in haste; what comes back is not
        reply = await call(self.gossip.transport, peer_id, GIVEN, message, timeout_s=BULK_S)
        if len(reply.arrays) != 1:
            raise ProtocolViolation("a contribution is one array")
        return reply.arrays[0]

    async def _wrong_sum(self, summed: Proof, said: Summed, arrays: Mapping[str, Array]) -> str:
        """Why a sum is not that of its contributions; empty where it is. Raises
        `ProtocolViolation` where these are not the ones that the primary has named, or the words
        are not its own."""
        for peer_id, array in arrays.items():
            if peer_id:
                check_contribution(self.replica, said.shard, array)
        names = self.replica.optimizer.codec.names
        if names.tells_results:
            raise ProtocolViolation("what backups get is no sum in this run")
        check_coded(self.replica, "sum", names.sums, said.shard, arrays[""])
        return await self.replica.worker.run(lambda: self._compared(summed, said, arrays))

    def _compared(self, summed: Proof, said: Summed, arrays: Mapping[str, Array]) -> str:
        """On the worker."""
        if not self.proofs.is_signed(summed, said.peer_id):
            raise ProtocolViolation("a sum that its primary has not signed")
        if hash_of(arrays[""]) != said.total:
            raise ProtocolViolation("another sum than was signed")
        for e in said.entries:
            given = Given(e.claimed, e.gradient, e.signature)
            where = said.round, said.stage, said.shard
            if not self.proofs.has_signed(e.peer_id, *where, given):
                return "names a contribution that its contributor has not signed"
            if hash_of(arrays[e.peer_id]) != e.gradient:
                raise ProtocolViolation("another contribution than was signed")
        squares = self.replica.optimizer.sum_of_squares(
            self.replica.optimizer.codec.decoded_sum(said.shard, arrays[""])
        )
        if not are_same_squares(squares / max(1, said.num_tokens) ** 2, said.squares):
            return "tells other squares than those of its sum"
        plan = self.replica.plan
        rule = rule_of(self.settings.aggregation, plan)
        parts = [Part(e.claimed, e.num_tokens, e.factor) for e in said.entries]
        return unfair(
            rule, parts, said.num_tokens, said.scale, clips=self._clips
        ) or self._wrong_arithmetic(rule, said, arrays)

    def _wrong_arithmetic(self, rule: str, said: Summed, arrays: Mapping[str, Array]) -> str:
        optimizer, j = self.replica.optimizer, said.shard
        decoded: Arrays = {}
        for e in said.entries:
            try:
                found = optimizer.codec.decoded_contribution(j, arrays[e.peer_id])
            except ProtocolViolation:
                continue
            decoded[e.peer_id] = found
            squares = optimizer.sum_of_squares(found)
            if not e.factor and robust.is_sound(squares, e.claimed):
                return "leaves a contribution out"
        used = [e for e in said.entries if e.factor]
        if not used or any(e.peer_id not in decoded for e in used):
            return "adds nothing that can be added"
        is_mean = rule == robust.MEAN or len(decoded) < robust.MIN_CONTRIBUTORS
        total = optimizer.aggregate(
            robust.MEAN if is_mean else rule,
            [decoded[e.peer_id] for e in used],
            [e.num_tokens for e in used],
            [e.factor for e in used],
        )
        ours = optimizer.codec.coded_sum(j, total)[1]
        theirs = optimizer.codec.decoded_sum(j, arrays[""])
        size, difference = optimizer.sum_of_squares(ours) ** 0.5, optimizer.distance(ours, theirs)
        is_same = is_same_update(difference, size)
        return "" if is_same else "makes the step with another sum than that of its contributions"

    # ---- as contributor and backup: the result ----------------------------------------------

    def draws(self) -> bool:
        """Whether the rest of a step is made here too, which the primary alone has to make. Else
        its result is believed, as by who is no backup."""
        return self.repeats.is_drawn()

    def came(self, exchange: int, shard: int, came: Came) -> None:
        """A result has come, and is adopted. It is looked at beside the exchange."""
        proof, copy = came.told.proof, came.copy
        if proof is not None:
            self.proofs.came(exchange, shard, proof, came.told.summed)
        if not came.is_primary or not self.is_signed_for(shard):
            return
        if proof is None and copy is None:
            self._not_shown(came.sender, shard)  # who is alone, as far as it knows, signs nothing
            return
        if came.told.summed is not None and self._clips and self.squares.is_drawn():
            self._tasks.start(self._compare_squares(came.sender, came.told.summed))
        if copy is not None or self.looks.is_drawn():
            has_part = came.has_given and came.told.counted
            look = _Look(
                exchange,
                shard,
                came.sender,
                proof,
                came.values,
                came.parameters,
                self.proofs.own_tag(exchange, shard) if has_part else None,
                copy,
                None if copy is None else self.proofs.summed_of(exchange, shard),
                "" if copy is None else self.ownership.states.giver(shard),
            )
            if look.giver:
                self.ownership.states.is_looked_at(shard)
            self._tasks.start(self._look(look))

    async def _look(self, look: _Look) -> None:
        said = self._said(look)

        def work() -> str:
            why, is_same = _NOT_SHOWN, None
            try:
                why = _NOT_SHOWN if said is None else self._seen(look, said)
                has_copy = look.copy is not None and look.copy.parameters is not None
                is_same = not why if has_copy and why in ("", _UNLIKE) else None
            finally:
                if look.giver:
                    self.ownership.states.looked_at(look.shard, look.giver, is_same=is_same)
            return why

        why = await self.replica.worker.run(work)
        if why == _UNLIKE and look.giver not in ("", look.sender):
            line = "round %d shard %d: the optimizer state that %s gave makes another step than %s"
            log.warning(line, look.exchange, look.shard, look.giver[-8:], look.sender[-8:])
            return  # one of the two, and who accuses has to know
        if said is None or why == _NOT_SHOWN:
            self._not_shown(look.sender, look.shard)
            return
        self.withheld.shown(look.sender, look.shard)
        if why or (look.copy is not None and look.copy.parameters is not None):
            self._concluded(said, why)
        if why and look.summed is not None and look.proof is not None:
            self._tell(Finding(said.stage, look.summed, (look.proof,)))

    def _said(self, look: _Look) -> Stepped | None:
        """What its maker has signed of the result; None where that is of something else."""
        try:
            said = None if look.proof is None else look.proof.read(Stepped)
        except ProtocolViolation:
            return None
        asked = (self.proofs.run_id, look.sender, look.exchange, self.replica.index, look.shard)
        where = said and (said.run_id, said.peer_id, said.round, said.stage, said.shard)
        return said if where == asked else None

    def _seen(self, look: _Look, said: Stepped) -> str:
        """On the worker: why a result is a lie; `_NOT_SHOWN` where its maker has not shown what it
        has signed for, and empty where all is right."""
        assert look.proof is not None
        if not self.proofs.is_signed(look.proof, look.sender):
            return _NOT_SHOWN
        values, optimizer = look.values, self.replica.optimizer
        comes_whole = values.dtype == "float32" and optimizer.codec.names.results != NONE
        if not comes_whole and hash_of(values) != said.result:
            return _NOT_SHOWN
        if look.own_tag is not None and said.total and look.own_tag not in said.tags:
            return "counts a contribution that is not in its sum"
        if look.copy is None:
            return ""
        if look.summed is None or hash_of_proof(look.summed) != said.total:
            return _NOT_SHOWN  # a step with another sum, where one before it has failed
        mine, size = look.copy.parameters, look.copy.size
        if mine is None or are_same(mine.data, look.parameters.data):
            return ""
        difference, norm = optimizer.distance(mine, look.parameters), optimizer.sum_of_squares(mine)
        is_same = is_same_update(difference, size, norm**0.5)
        return "" if is_same else _UNLIKE

    # ---- two results ------------------------------------------------------------------------

    def begins(self, exchange: int) -> None:
        """All have published what the exchange before led to. Where one has another result than
        this replica, it may have been given that."""
        own = self.gossip.own
        if not self.is_on or own.round != self.replica.round:
            return
        now = asyncio.get_running_loop().time()
        for other in self.gossip.view.replicas(self.replica.index, now):
            if other.round != own.round or len(other.digests) != len(own.digests):
                continue
            for j in range(len(own.digests) // DIGEST_BYTES):
                at = slice(j * DIGEST_BYTES, (j + 1) * DIGEST_BYTES)
                ours = self.proofs.stepped_of(exchange - 1, j)
                if other.digests[at] != own.digests[at] and ours is not None:
                    self._tasks.start(self._ask_proof(other.peer_id, exchange - 1, j, ours))
                    break

    async def _ask_proof(self, peer_id: str, exchange: int, shard: int, ours: Proof) -> None:
        request = Message(ProofRequest(exchange, self.replica.index, shard))
        reply = await call(self.gossip.transport, peer_id, PROOF, request, timeout_s=BULK_S)
        theirs = reply.body.stepped
        if theirs is not None:
            finding = Finding(self.replica.index, stepped=(ours, theirs))
            if await self._is_two(finding):
                self._concluded(theirs.read(Stepped), "gave two results")
                self._tell(finding)

    async def _is_two(self, finding: Finding) -> bool:
        """Two results of one step, both signed. Raises `ProtocolViolation`."""
        first, second = finding.stepped
        one, other = first.read(Stepped), second.read(Stepped)
        if one.about != other.about or one.result == other.result:
            return False
        if one.run_id != self.proofs.run_id:
            return False
        return await self.replica.worker.run(
            lambda: all(self.proofs.is_signed(p, one.peer_id) for p in finding.stepped)
        )

    # ---- other squares ----------------------------------------------------------------------

    async def _compare_squares(self, primary: str, summed: Proof) -> None:
        """Whether a primary has told a collector what it has signed with its sum."""
        said = summed.read(Summed)
        for asked in self.norms.collectors():
            if said.peer_id != primary or asked == primary:
                continue
            try:
                squares = await self._squares_at(asked, said)
                finding = Finding(said.stage, summed, squares=squares)
                is_found = squares is not None and await self._are_others(finding)
            except SwarmnetError as e:
                log.debug("squares of %s at %s: %s", primary[-8:], asked[-8:], e)
                continue
            if is_found:
                self._contradicts(said)
                self._tell(finding)
                self._tell_collectors(finding)
                return

    async def _squares_at(self, collector: str, said: Summed) -> Proof | None:
        """What a primary has told a collector of a shard; None where it has told another one, or
        that one had the total from others."""
        if collector == self.gossip.own.peer_id:
            return self.norms.signed_by(said.peer_id, said.round, said.stage, said.shard)
        record = self.gossip.view.get(collector)
        stage = said.stage if record is None else record.stage
        request = Message(ProofRequest(said.round, stage, said.shard, said.peer_id))
        reply = await call(self.gossip.transport, collector, PROOF, request, timeout_s=BULK_S)
        return reply.body.squares

    async def _are_others(self, finding: Finding) -> bool:
        """A sum, and what its primary has told of its squares before, both signed. Raises
        `ProtocolViolation`."""
        assert finding.summed is not None
        assert finding.squares is not None
        summed, squares = finding.summed, finding.squares
        one, other = summed.read(Summed), squares.read(Squares)
        run_id = self.proofs.run_id
        if (one.run_id, one.peer_id, one.round, one.stage) != (
            run_id,
            other.peer_id,
            other.round,
            other.stage,
        ) or other.run_id != run_id:
            return False
        told = dict(zip(other.shards, other.sums, strict=True)).get(one.shard)
        if told is None or are_of_one_sum(told, one.squares):
            return False
        return await self.replica.worker.run(
            lambda: all(self.proofs.is_signed(p, one.peer_id) for p in (summed, squares))
        )

    def _contradicts(self, said: Summed) -> None:
        """Once that may be a sum that was made again without one that had died meanwhile."""
        if self.contradictions.are_too_many(said.peer_id, said.round):
            self._concluded(said, "tells others of another norm than that of its sums")

    # ---- what is found ----------------------------------------------------------------------

    def told_falsely(self, peer_id: str, exchange: int, shard: int) -> None:
        """What came with a primary's result shows that it is none."""
        if self.contradictions.are_too_many(peer_id, exchange):
            log.warning("%s tells results of shard %d that are none", peer_id[-8:], shard)
            self.conclusions.computed(peer_id, is_same=False)
            self.gossip.view.lied(peer_id)

    def _not_shown(self, peer_id: str, shard: int) -> None:
        if self.withheld.is_too_often(peer_id, shard):
            log.warning("%s never shows what it has signed of shard %d", peer_id[-8:], shard)
            self.conclusions.computed(peer_id, is_same=False)
            self.gossip.view.lied(peer_id)

    def _concluded(self, said: Summed | Stepped, why: str) -> None:
        if said.peer_id == self.gossip.own.peer_id:
            return  # others know by themselves what to think of that
        if why and not self.gossip.view.is_barred(said.peer_id):
            log.warning(
                "round %d shard %d: %s %s: it is primary no more",
                said.round,
                said.shard,
                said.peer_id[-8:],
                why,
            )
        self.conclusions.computed(said.peer_id, is_same=not why)
        if why:
            self.gossip.view.lied(said.peer_id)

    def _keep(self, summed: Proof, arrays: Arrays) -> None:
        self._evidence[hash_of_proof(summed)] = arrays
        while len(self._evidence) > MAX_FINDINGS:
            self._evidence.popitem(last=False)

    def _tell(self, finding: Finding) -> None:
        """All others of the stage: they look for themselves."""
        now = asyncio.get_running_loop().time()
        for record in self.gossip.view.replicas(self.replica.index, now):
            if record.peer_id != self.gossip.own.peer_id:
                self._tasks.start(self._tell_one(record.peer_id, finding))

    def _tell_collectors(self, finding: Finding) -> None:
        """Those of other stages, which would take its word for its shards' squares."""
        for peer_id in self.norms.collectors():
            record = self.gossip.view.get(peer_id)
            if record is not None and record.stage not in (-1, self.replica.index):
                told = replace(finding, stage=record.stage)
                self._tasks.start(self._tell_one(peer_id, told))

    async def _tell_one(self, peer_id: str, finding: Finding) -> None:
        message = Message(finding, is_background=True)
        await call(self.gossip.transport, peer_id, FINDING, message, timeout_s=BULK_S)

    async def _on_finding(self, request: Request[Finding]) -> Message[None]:
        """Another replica has found a lie. What it says is looked at beside the call."""
        if len(self._tasks) < 2 * MAX_AUDITING + MAX_FINDINGS:
            self._tasks.start(self._look_into(request.remote, request.message.body))
        return Message()

    async def _look_into(self, finder: str, finding: Finding) -> None:
        if len(finding.stepped) == 2:
            if await self._is_two(finding):
                self._concluded(finding.stepped[0].read(Stepped), "gave two results")
            return
        if finding.summed is None:
            raise ProtocolViolation("a finding of nothing")
        said = finding.summed.read(Summed)
        if said.run_id != self.proofs.run_id:
            raise ProtocolViolation("a finding of another run")
        if self.gossip.view.is_barred(said.peer_id):
            return
        if finding.squares is not None:
            if await self._are_others(finding):
                self._contradicts(said)
            return
        if said.stage != self.replica.index:
            self._heard_elsewhere(finder, said)
            return
        if said.shard >= self.replica.num_shards:
            raise ProtocolViolation("a finding of another stage")
        if finding.stepped:
            self._heard_unlike(finder, said)
            return
        arrays: Arrays = {}
        for peer_id in ("", *(e.peer_id for e in said.entries)):
            arrays[peer_id] = await self._asked(
                finder, GivenRequest(said.stage, peer_id, finding.summed)
            )
        why = await self._wrong_sum(finding.summed, said, arrays)
        if why:
            self._concluded(said, why)
            self._tell_collectors(finding)

    def _heard_elsewhere(self, finder: str, said: Summed) -> None:
        """Of another stage this replica can make no sum. Most of those that can have to say so."""
        now = asyncio.get_running_loop().time()
        known = [r.peer_id for r in self.gossip.view.known(said.stage, now)]
        judges = [p for p in known if p != said.peer_id]
        if finder in judges and said.peer_id in known:
            self._hear(finder, (said.peer_id, -1, -1), len(judges), said)

    def _heard_unlike(self, finder: str, said: Summed) -> None:
        """A backup has made another result of a step. Only who has the state can look for itself,
        and has. Others go by most of these, the primary counted as one of them."""
        backups = self.ownership.roster(self.replica.current_exchange, said.shard).backups
        judges = [p for p in backups if p != said.peer_id]
        if finder not in judges:
            return
        self._hear(finder, (said.peer_id, said.round, said.shard), len(judges), said)

    def _hear(self, finder: str, key: tuple[str, int, int], num: int, said: Summed) -> None:
        """One of `num` judges has found a lie."""
        jury = self._juries.setdefault(key, Jury(num))
        if finder not in jury.differs:
            jury = self._juries[key] = jury.heard(finder, is_same=False)
        while len(self._juries) > MAX_JURIES:
            self._juries.popitem(last=False)
        if jury.verdict is Verdict.LIED:
            self._concluded(said, "has lied, as most of those find that can look,")

    # ---- what others ask --------------------------------------------------------------------

    async def _on_given(self, request: Request[GivenRequest]) -> Message[None]:
        """The own contribution to a sum that its primary has signed; or, where this replica has
        found a lie, any part of that."""
        asked = request.message.body
        evidence = self._evidence.get(hash_of_proof(asked.summed))
        if evidence is not None and asked.peer_id in evidence:
            return Message(None, (evidence[asked.peer_id],), is_background=True)
        if asked.peer_id != self.gossip.own.peer_id:
            raise NotReady("nothing is known of this sum here")
        said = asked.summed.read(Summed)
        if said.shard >= self.replica.num_shards or said.stage != self.replica.index:
            raise NotReady("nothing is known of this shard here")
        array = await self.proofs.own(said.round, said.shard)
        return Message(None, (array,), is_background=True)

    async def _on_proof(self, request: Request[ProofRequest]) -> Message[ProofReply]:
        asked = request.message.body
        if not asked.peer_id:
            return Message(ProofReply(self.proofs.stepped_of(asked.round, asked.shard)))
        record = self.gossip.view.get(asked.peer_id)
        stage = -1 if record is None else record.stage
        told = self.norms.signed_by(asked.peer_id, asked.round, stage, asked.shard)
        return Message(ProofReply(squares=told))


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """At a result that has come from its primary."""

    exchange: int
    shard: int
    sender: str
    proof: Proof | None
    values: Array
    parameters: Array
    own_tag: bytes | None
    """Of a contribution that has to be in it."""
    copy: Result | None
    """Of the same step, as it was made here."""
    summed: Proof | None
    """What that was made with."""
    giver: str
    """Of the state that it was made with, where nothing has shown yet that others have the same."""
