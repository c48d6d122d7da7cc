"""The arithmetic of an exchange, carried out for `exchange`: sums, norms, steps and results.

All of it happens on the worker, off the event loop and off the device.

Contributions are summed by the rule of the run (`Aggregator`). One that is not finite, or beyond
all bounds, does not count, under any rule, and its sender is reported: a strike in the own record
(`Record.strikes`), which every peer sees by gossip."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import xxhash

from swarmnet.errors import NotReady, ProtocolViolation
from swarmnet.methods.update import MirrorRequest, ShardReply
from swarmnet.methods.update_proof import Entry, Proof
from swarmnet.ports import CodingErrors, Rest
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.membership.records import MAX_STRIKES
from swarmnet.protocol.sync_modes import SyncPlan
from swarmnet.protocol.update import robust
from swarmnet.protocol.update.late_tokens import joined
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.receipts import hash_of
from swarmnet.swarm.replica.replica import Replica, follows_tied
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.coded import applied
from swarmnet.swarm.update.exchange.norms import ContributionNorms, Norms
from swarmnet.swarm.update.exchange.proofs import Proofs
from swarmnet.swarm.update.exchange.turns import Exports, Turns
from swarmnet.swarm.update.optimizer_states import CREATED, LATE, OptimizerStates, descended
from swarmnet.wire import Array, are_same

log = logging.getLogger("swarmnet.averaging")
aggregation_log = logging.getLogger("swarmnet.aggregation")

CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""

Put = Callable[[int, Array], None]
"""Where the results of shards go, on the worker. Raises `ProtocolViolation` where one does not
fit."""


class NoResult(ProtocolViolation):
    """What is signed of a result shows that it is none, or nothing is."""


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """An aggregate, and what the step with it needs."""

    gradient: Array
    """fp32, or as backups get it (`ShardWork.coded`)."""
    squares: float
    """Sum of squares of what owners step on."""
    num_tokens: int
    decoded: Array | None = None
    """What owners step on, where `gradient` is coded and this replica has coded it."""
    entries: tuple[Entry, ...] = ()
    """What is signed of each contribution; empty where nothing is."""
    hash: bytes = b""
    """Of `gradient`, likewise."""


@dataclass(slots=True, eq=False)
class Result:
    """A shard of the coming round: the parameters, or their coded change.

    Once it is placed it keeps nothing that the stage has too: the table of the exchange answers
    calls with it for as long as a round. The present parameters change when the round ends, so
    nothing is computed from them any more for one that is placed."""

    values: Array | None
    """None where they lie in the stage already, and were not coded."""
    counted: bool | None = None
    """Whether the own contribution is in it, as was told with it; None where that follows from
    who made it."""
    digest: bytes = b""
    """XXH3-64 of the values, where they are of a step that was made here, and somebody else may
    have the same."""
    parameters: Array | None = None
    """What `values` lead to, where that is known and does not lie in the stage."""
    hash: bytes = b""
    """SHA-256 of the values (`receipts.hash_of`), where they are of a step that was made here, and
    somebody else may look at it."""
    size: float = 0.0
    """Norm of the change of the parameters, where it is a backup's."""
    is_placed: bool = False
    """It has been put where it goes."""
    rest: Rest | None = None
    """Makes the values, where the step was followed here and the primary's result is to come."""
    is_audited: bool = False
    """It is made all the same, to be compared with that."""
    is_whole: bool = False
    """Of a backup's: as of `events.Stepped`."""
    came: Came | None = None
    """How, where it came from another replica; until it is adopted."""

    @property
    def is_coded(self) -> bool:
        """The values are a change."""
        values = self.values  # the worker may take them away meanwhile
        return values is not None and values.dtype != "float32"

    def arrived(self, came: Came) -> Result:
        """It has come from another replica, so."""
        self.came = came
        return self

    def adopt(self) -> Came | None:
        """It is the one that holds. Returns how it has come."""
        came, self.came = self.came, None
        return came

    def to_be_audited(self) -> Result:
        """The rest of it is made all the same."""
        self.is_audited = True
        return self

    def place(self, parameters: Array, *, is_in_stage: bool) -> None:
        """It has been put where it goes. Codes stay, since they are small to send."""
        self.is_placed = True
        self.parameters = None if is_in_stage else parameters
        if is_in_stage and not self.is_coded:
            self.values = None


@dataclass(frozen=True, slots=True, eq=False)
class Came:
    """How a result has come from another replica. It counts where the result is adopted."""

    sender: str
    told: ShardReply
    values: Array
    """What came; the own ones where these are the same by the word of the sender."""
    parameters: Array
    """What they lead to."""
    copy: Result | None
    """Of the same step, as it was made here as backup."""
    is_primary: bool
    """The sender made the step, as far as is known."""
    has_given: bool
    """There is a contribution of this replica."""


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """Of a shard's state before a step: what a backup must have too, for its step to be the
    same."""

    scale: float
    steps: int
    lineage: bytes
    term: int = 0
    """Of the ballot under which it is made."""
    summed: Proof | None = None
    """What its primary signs of it and of the sum."""
    result: Array | None = None
    """Of the step, where that is what backups get (`UpdateCodec.tells_results`)."""


class ShardWork:
    """For the shards of one replica."""

    def __init__(
        self,
        gossip: Gossip,
        settings: RunSettings,
        replica: Replica,
        states: OptimizerStates,
        norms: Norms,
        contribution_norms: ContributionNorms,
        books: Books,
        proofs: Proofs,
        tasks: Tasks,
    ) -> None:
        """`tasks` do what is begun for several shards at once."""
        self._gossip = gossip
        self._replica = replica
        self._states = states
        self._proofs = proofs
        self._exports = Exports()
        self._turns = Turns(replica, proofs, tasks, Exports())
        self._steps = Turns(replica, proofs, tasks, self._exports)
        self._aggregator = Aggregator(
            settings.aggregation, gossip, replica, contribution_norms, self._turns
        )
        self._norms = norms
        self._books = books
        self._clip_norm = settings.grad_clip_norm
        self._coded_for: dict[int, int] = {}
        """By shard, the newest exchange for which the own contribution was coded."""
        self._given: tuple[int, CodingErrors] = -1, {}
        """The round in which the own gradient was given away, and the errors that went with it."""
        self._makers: dict[int, str] = {}
        """By shard that this replica follows as backup, who made its last step."""

    @property
    def plan(self) -> SyncPlan:
        """When the stage exchanges what."""
        return self._replica.plan

    def export_begins(self) -> None:
        """The optimizer state is being copied for a checkpoint: no step meanwhile."""
        self._exports.begin()

    def export_ends(self) -> None:
        """It has been."""
        self._exports.end()

    async def until_exported(self) -> None:
        """Before a step, so that a copy of the state that is under way is of one round."""
        await self._exports.until_over()

    # ---- a primary's work -------------------------------------------------------------------

    async def total(
        self,
        exchange: int,
        shard: int,
        parts: Sequence[tuple[str, int, Array]],
        *,
        is_whole: bool = True,
    ) -> Total | None:
        """The aggregate of the contributions, ascending by peer, as `coded` has it; not coded where
        something is to be added (`is_whole` False). None where there is nothing to sum, or it
        overflows."""
        counted = self._books.counted_behind(exchange, shard)
        has_others = any(peer_id != self._gossip.own.peer_id for peer_id, *_ in parts)
        is_alone = not (has_others or self._proofs.is_of_use)
        self._proofs.sums(exchange, shard, is_alone=is_whole and is_alone)
        is_signed = is_whole and not is_alone

        def finish(gradient: Array, squares: float, num_tokens: int, used: Used) -> Total:
            total = Total(gradient, squares, num_tokens)
            if not is_whole:
                return total
            coded = self._coded(shard, total)
            entries = self._proofs.behind(exchange, shard, parts, used) if is_signed else ()
            is_sent = bool(entries) and not self.tells_results
            hashed = hash_of(coded.gradient) if is_sent else b""
            return replace(coded, entries=entries, hash=hashed)

        given = [FromPeer(*part) for part in parts]
        # Nobody else gets it, and the step is over before anything overwrites a gradient.
        may_share = is_alone and is_whole
        try:
            return await self._aggregator(
                exchange, shard, given, counted, finish, may_share=may_share
            )
        except ProtocolViolation as e:
            log.warning("round %d: no step: %s", exchange, e)
            return None

    async def coded(self, exchange: int, shard: int, total: Total) -> Total | None:
        """As the backups get it: all owners step on what comes of that. None where the codec cannot
        hold it."""
        try:
            return await self._replica.worker.run(lambda: self._coded(shard, total))
        except ProtocolViolation as e:
            log.warning("round %d: no step: %s", exchange, e)
            return None

    @property
    def tells_results(self) -> bool:
        """Backups get the result of a step, and take that, in place of the sum."""
        return self._replica.optimizer.codec.names.tells_results

    def _coded(self, shard: int, total: Total) -> Total:
        """On the worker."""
        optimizer = self._replica.optimizer
        if self.tells_results and not follows_tied(self._replica, shard):
            return replace(total, decoded=total.gradient)  # nobody else gets it
        if optimizer.codec.names.sums == NONE:
            return total
        coded, decoded = optimizer.codec.coded_sum(shard, total.gradient)
        return Total(coded, optimizer.sum_of_squares(decoded), total.num_tokens, decoded)

    @property
    def codes_contributions(self) -> bool:
        """What this replica contributes takes time to code."""
        return self._replica.optimizer.codec.names.contributions != NONE

    async def contributions(
        self, exchange: int, gradients: Mapping[int, Array]
    ) -> dict[int, Array]:
        """Gradients by shard as they are sent, once for an exchange: pushed again, they are the
        same."""
        codec, plan = self._replica.optimizer.codec, self.plan
        has_others = self._proofs.is_of_use

        def coded(shard: int, gradient: Array) -> Array:
            is_short = len(plan.window(shard, exchange)) == 1 or exchange >= plan.rounds - 1
            return codec.contribution(
                shard, gradient, keeps_error=True, is_short=is_short, for_others=has_others
            )

        def begin(shards: Iterable[int]) -> None:
            self._coded_for.update(dict.fromkeys(shards, exchange))
            if exchange > self._given[0]:
                self._given = -1, {}

        def work() -> dict[int, Array]:
            begin(gradients)
            return {j: coded(j, gradient) for j, gradient in gradients.items()}

        def one(shard: int) -> Array:
            begin((shard,))
            return coded(shard, gradients[shard])

        if has_others:
            return await self._replica.worker.run(work)
        turns = [self._turns.run(functools.partial(one, j)) for j in gradients]
        return dict(zip(gradients, await asyncio.gather(*turns), strict=True))

    async def contributions_lost(self, shards: Sequence[int]) -> None:
        """The contributions to these do not count."""
        codec = self._replica.optimizer.codec

        def work() -> None:
            for j in shards:
                codec.forget_error(j)

        if shards and self.codes_contributions:
            await self._replica.worker.run(work)

    async def contribution_given(self, round_index: int) -> None:
        """Another replica has the own gradient of a round, and what coding had lost before."""
        if self.codes_contributions:
            errors = await self.errors(round_index)
            await self.contributions_lost(range(self._replica.num_shards))
            self._given = round_index, errors

    async def errors(self, round_index: int) -> CodingErrors:
        """What coding has lost of the contributions before a round of the run, for whoever begins
        with that round again. Not of shards whose next contribution has been coded already."""
        codec, exchange = self._replica.optimizer.codec, self.plan.parameter_version(round_index)
        given_in, given = self._given

        def work() -> CodingErrors:
            before = {
                j: e for j, e in codec.errors().items() if self._coded_for.get(j, -1) < exchange
            }
            return (dict(given) if given_in == round_index else {}) | before

        return await self._replica.worker.run(work) if self.codes_contributions else {}

    def load_errors(self, errors: CodingErrors) -> None:
        """On the worker: in place of all that coding has lost here. Raises `ProtocolViolation`
        where they do not fit."""
        self._replica.optimizer.codec.load_errors(errors)
        self._coded_for.clear()
        self._given = -1, {}

    async def scale(self, exchange: int, shard: int, total: Total | None) -> float:
        """By which the sum is multiplied: one over the tokens, clipped by the norm of all stages.
        An empty sum takes part in that norm too, so that the others need not wait."""
        if total is None:
            if self._clip_norm > 0 and not self.plan.is_local:
                await self._norms.add(exchange, shard, 0.0)
            return 0.0
        if self._clip_norm <= 0 or self.plan.is_local:  # replicas clip their own steps
            return 1.0 / total.num_tokens
        squares = await self._norms.add(exchange, shard, total.squares / total.num_tokens**2)
        clip = min(1.0, self._clip_norm / (math.sqrt(squares) + CLIP_EPSILON))
        return clip / total.num_tokens

    async def squares(self, shard: int, total: Array, num_tokens: int) -> float:
        """Of the mean gradient, of a sum as backups get it. Raises `ProtocolViolation`."""
        optimizer = self._replica.optimizer

        def work() -> float:
            return optimizer.sum_of_squares(optimizer.codec.decoded_sum(shard, total))

        return await self._replica.worker.run(work) / num_tokens**2

    async def before(
        self, exchange: int, shard: int, scale: float, total: Total, term: int
    ) -> Before:
        """The state that a step is made on. Created where every owner of it was lost. `term`: of
        the ballot under which it is made."""
        is_lost = self._states.lacks(shard, exchange)
        found = await self._states.make_ready(shard, exchange)
        if found == CREATED and is_lost:
            self._gossip.add_total("shard_reset")
            log.warning("shard %d: every owner of its optimizer state was lost", shard)
        elif found == LATE:  # who had made the steps between died with them
            self._gossip.add_total("shard_stale")
            log.warning("shard %d: its last owner missed steps; moments go on without", shard)
        maker = self._makers.pop(shard, None)
        if maker is not None and not self._gossip.liveness.is_live(maker):
            self._gossip.add_total("shard_promoted")
        steps = self._replica.optimizer.steps(shard)
        before = Before(scale, steps, self._states.lineage(shard), term)
        return before if self.tells_results else self._signed(exchange, shard, total, before)

    def _signed(self, exchange: int, shard: int, total: Total, before: Before) -> Before:
        """With what is signed of it."""
        squares = total.squares / max(1, total.num_tokens) ** 2
        numbers = total.num_tokens, before.scale, before.steps, squares
        summed = self._proofs.summed(
            exchange, shard, before.term, total.entries, total.hash, *numbers
        )
        return replace(before, summed=summed)

    async def step_first(
        self, exchange: int, shard: int, total: Total, before: Before
    ) -> tuple[Result, Before]:
        """The step of a primary whose backups take its result; and, for them, that, with what is
        signed of it: whose contributions it is made of."""
        self._books.stepped(exchange, shard, total.num_tokens)
        made = await self._step_on(exchange, shard, total, before)
        before = self._signed(exchange, shard, replace(total, hash=made.hash), before)
        self._proofs.stepped(exchange, shard, before.term, made.hash)
        return made, replace(before, result=made.values)

    async def step(self, exchange: int, shard: int, total: Total, before: Before) -> Result:
        """The step of a primary. One that would overflow is not made, there or at the backups."""
        self._books.stepped(exchange, shard, total.num_tokens)
        try:
            made = await self._step_on(exchange, shard, total, before)
        except ProtocolViolation as e:  # at the backups too, with the same state
            log.warning("round %d: no step: %s", exchange, e)
            return await self.leave_as_it_is(exchange, shard, before.term)
        self._proofs.stepped(exchange, shard, before.term, made.hash)
        return made

    async def leave_as_it_is(self, exchange: int, shard: int, term: int) -> Result:
        """There is no step to be made on a shard in this exchange."""
        if self._states.is_before(shard, exchange):  # else there is none here, or an older one
            self._states.stepped(shard, exchange)
        self._books.stepped(exchange, shard, 0)
        present = await self.present(shard)
        if not self._proofs.is_of_use:
            return Result(present)
        hashed = await self._replica.worker.run(lambda: hash_of(present))
        self._proofs.stepped(exchange, shard, term, hashed)
        return Result(present, hash=hashed)

    async def _step_on(self, exchange: int, shard: int, total: Total, before: Before) -> Result:
        """A primary's: no number of a sum is not finite where that of its squares is."""
        how = exchange, shard, total.gradient, before, total.decoded
        return await self._step(*how, is_finite=math.isfinite(total.squares))

    async def _step(
        self,
        exchange: int,
        shard: int,
        gradient: Array,
        before: Before,
        decoded: Array | None = None,
        *,
        is_copy: bool = False,
        is_finite: bool = False,
    ) -> Result:
        """`decoded`: of `gradient`, where it is known. `is_copy`: it is another one's step.
        `is_finite`: all that it is made on is known to be."""
        replica = self._replica
        has_others = self._proofs.is_of_use or before.summed is not None
        own = self._gossip.own.peer_id

        def work() -> Result:
            present = replica.common_shard(shard)
            is_delayed = self.plan.is_delayed(exchange)
            optimizer, tells_results = replica.optimizer, self.tells_results
            is_followed = is_copy and not tells_results and not optimizer.is_repeatable(shard)
            if is_copy and tells_results:
                made = optimizer.take(shard, present, gradient, exchange)
            else:
                total = decoded
                if total is None:
                    total = optimizer.codec.decoded_sum(shard, gradient)
                about = total, before.scale, exchange, is_delayed
                if is_followed:
                    rest = optimizer.follow(shard, *about)
                else:
                    made = optimizer.step(shard, present, *about, has_others, is_finite)
            # The codes of a replica that is alone may not have been made, and are not for this.
            sent = made[0] if tells_results else gradient
            seen = sent.data if has_others else f"{own} {before.scale}".encode()
            self._states.stepped(shard, exchange, descended(before.lineage, exchange, seen))
            if is_followed:
                return Result(None, rest=rest)
            values, parameters = made
            digest = xxhash.xxh3_64_digest(values.data) if has_others else b""
            size = replica.optimizer.distance(parameters, present) if is_copy else 0.0
            hashed = hash_of(values) if has_others else b""
            return Result(values, digest=digest, parameters=parameters, hash=hashed, size=size)

        return await self._steps.run(work)

    # ---- a backup's work --------------------------------------------------------------------

    def fits(self, mirror: MirrorRequest) -> str:
        """Why the step cannot be made on the state here; empty where it can."""
        r, j = mirror.round, mirror.shard
        if self._replica.optimizer.steps(j) != mirror.steps or not self._states.is_before(j, r):
            return "the state is not followed here"
        if not self._states.is_copy(j, mirror.lineage):  # fetched from the primary next time
            self._gossip.add_total("shard_unlike")
            return "the state here has seen other gradients"
        return ""

    async def repeat(self, mirror: MirrorRequest, gradient: Array, maker: str) -> Result:
        """The same step as the primary's, bit for bit; or its part that is (`Optimizer.follow`)."""
        before = Before(mirror.scale, mirror.steps, mirror.lineage)
        result = await self._step(mirror.round, mirror.shard, gradient, before, is_copy=True)
        late = joined(mirror.late, mirror.older)
        self._books.stepped(mirror.round, mirror.shard, mirror.num_tokens, late)
        if mirror.norm >= 0:
            self._norms.heard(mirror.round, mirror.norm)
        self._makers[mirror.shard] = maker
        is_alike = result.rest is None and self._books.makes_alike(mirror.shard, maker)
        counted = self._books.counts_own(mirror.round, mirror.shard)
        is_whole = is_alike and counted is not None
        return replace(result, counted=counted is not False, is_whole=is_whole)

    async def complete(self, exchange: int, shard: int, result: Result) -> None:
        """Makes the rest of a step that was followed here, for an audit, or because there is no
        primary to have its result from. Raises `NotReady` where the parameters before it are gone,
        and `ProtocolViolation` where there is no such step."""
        if result.rest is None:
            return
        replica = self._replica

        def work() -> None:
            rest = result.rest
            if rest is None:
                return  # another task has waited for it too
            if replica.current_exchange != exchange:
                raise NotReady("the round is over here")
            present = replica.common_shard(shard)
            values, parameters = rest(present, True)
            result.values, result.parameters, result.rest = values, parameters, None
            result.digest = xxhash.xxh3_64_digest(values.data)
            result.size = replica.optimizer.distance(parameters, present)
            result.hash = hash_of(values)

        await replica.worker.run(work)

    # ---- results ----------------------------------------------------------------------------

    async def put(self, shard: int, result: Result, put: Put, *, is_in_stage: bool) -> None:
        """Puts a result where it goes. `is_in_stage`: it can be read there
        (`Stage.coming_shard`). Raises `ProtocolViolation` where it does not fit."""

        def work() -> None:
            if result.is_placed:
                return
            parameters = self._led_to(shard, result)
            put(shard, parameters)
            result.place(parameters, is_in_stage=is_in_stage)

        await (self._turns.run(work) if is_in_stage else self._replica.worker.run(work))

    def _led_to(self, shard: int, result: Result) -> Array:
        """On the worker: the parameters of a result that is not placed."""
        assert result.values is not None
        if result.parameters is not None:
            return result.parameters
        return applied(self._replica, shard, result.values)

    def adopted(self, exchange: int, shard: int) -> None:
        """A result is here. Where another stage makes the step, no state changes with it."""
        if follows_tied(self._replica, shard) and self._states.is_before(shard, exchange):
            self._states.stepped(shard, exchange)

    async def checked(
        self, shard: int, values: Array, why_not: Callable[[bool], str] = lambda is_unchanged: ""
    ) -> Array:
        """The parameters that another replica's result leads to. Raises `ProtocolViolation` where
        it is of no use, `NoResult` where `why_not(is_unchanged)` says on the worker that it is
        none. `is_unchanged`: it leaves the parameters as they are, to the bit."""
        replica = self._replica

        def work() -> Array:
            present = replica.common_shard(shard)
            parameters = applied(replica, shard, values)
            if (parameters.dtype, *parameters.shape) != (present.dtype, *present.shape):
                raise ProtocolViolation("parameters of another size")
            if not math.isfinite(replica.optimizer.sum_of_squares(parameters)):
                raise ProtocolViolation("parameters that are not finite")
            if why := why_not(are_same(present.data, parameters.data)):
                raise NoResult(f"a result of shard {shard}: {why}")
            return parameters

        return await replica.worker.run(work)

    async def copy_of(
        self, exchange: int, shard: int, result: Result, *, is_whole: bool = False
    ) -> Array:
        """The values of a result, to be sent; the parameters where it has to be those (`is_whole`).
        Raises `NotReady` where they are being moved."""
        known = result.parameters if is_whole and result.is_coded else result.values
        if known is not None:
            return known

        def copied() -> Array | None:
            if not result.is_placed:
                return self._led_to(shard, result)
            return self._coming(exchange, shard) if result.parameters is None else result.parameters

        values = await self._replica.worker.run(copied)
        if values is None:
            raise NotReady("a new round is being opened here")
        return values

    def _coming(self, exchange: int, shard: int) -> Array | None:
        """On the worker: a copy of what an exchange has put into the stage; None where that is the
        present round's meanwhile, or about to be. The device thread takes it out of what is coming
        before it changes anything, and puts of later exchanges are work of this thread."""
        stage = self._replica.stage

        def found() -> Array | None:
            is_present = self._replica.current_exchange == exchange
            return stage.coming_shard(shard) if is_present else None

        coming = found()
        copy = None if coming is None else _copied(coming)
        return None if found() is None else copy

    async def present(self, shard: int) -> Array:
        """A shard of the present parameters that stays as it is while it is being sent."""
        return await self._replica.worker.run(lambda: _copied(self._replica.common_shard(shard)))


def _copied(shard: Array) -> Array:
    return Array(shard.dtype, shard.shape, bytes(shard.data))


# ---- by the rule of the run ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromPeer:
    """The contribution of one peer to one shard."""

    peer_id: str
    num_tokens: int
    gradient: Array


T = TypeVar("T")
Used = Mapping[str, tuple[int, float]]
"""Of the contributions that are in an aggregate, by peer: the tokens that count, and the factor."""
Finish = Callable[[Array, float, int, Used], T]
"""What is made of an aggregate, its sum of squares, the tokens behind it and what is in it, on the
worker."""


def rule_of(rule: str, plan: SyncPlan) -> str:
    """By which contributions are summed, where the run has this rule. Clipping by the median looks
    at a whole stage at a time: not where shards take turns."""
    takes_turns = plan.is_local and plan.fragments > 1
    return robust.MEAN if takes_turns and rule == robust.MEDIAN_CLIP else rule


class Aggregator:
    """Sums contributions for the primary of shards of one stage."""

    def __init__(
        self,
        rule: str,
        gossip: Gossip,
        replica: Replica,
        norms: ContributionNorms,
        turns: Turns,
    ) -> None:
        plan = replica.plan
        self._turns = turns
        self._rule = rule_of(rule, plan)
        self._gossip = gossip
        self._worker = replica.worker
        self._optimizer = replica.optimizer
        self._norms = norms
        self._clipped: tuple[str, ...] = ()
        """Senders of contributions that were clipped in the last round that had any."""

    async def __call__(
        self,
        round_index: int,
        shard_index: int,
        parts: list[FromPeer],
        counted: int,
        finish: Finish[T],
        *,
        may_share: bool = False,
    ) -> T | None:
        """`parts` by ascending peer id; `counted`: tokens of the round by the word of the feeders;
        `may_share`: the aggregate of one contribution may lie where that lies. None where there is
        nothing to sum. Raises `ProtocolViolation` where finite contributions overflow."""
        tells = self._rule == robust.MEDIAN_CLIP and self._norms.may_be_waited_for()
        if self._is_mean(parts) and not tells:
            return await self._sum(round_index, shard_index, parts, finish, may_share=may_share)
        parts = await self._decoded(round_index, shard_index, parts)
        if self._is_mean(parts):
            if tells:
                names = self._contributors([p.peer_id for p in parts])
                told = {names[p]: s for p, s in (await self._squares(parts)).items()}
                self._norms.tell(round_index, shard_index, told)
            return await self._sum(round_index, shard_index, parts, finish, are_coded=False)
        squares = await self._squares(parts)
        parts = self._only_sound(round_index, shard_index, parts, squares)
        tokens = robust.fair_tokens({p.peer_id: p.num_tokens for p in parts}, counted)
        factors = dict.fromkeys(tokens, 1.0)
        if self._rule == robust.MEDIAN_CLIP:
            factors = await self._factors(round_index, shard_index, squares, tokens)
            if shard_index == 0:
                self._report_clipped(round_index, factors)
        if not parts:
            return None

        def work() -> T:
            total = self._optimizer.aggregate(
                self._rule,
                [p.gradient for p in parts],
                [tokens[p.peer_id] for p in parts],
                [factors[p.peer_id] for p in parts],
            )
            total_squares = self._optimizer.sum_of_squares(total)
            if not math.isfinite(total_squares):
                raise ProtocolViolation(f"the gradient of shard {shard_index} overflows")
            used = {p: (n, factors[p]) for p, n in tokens.items()}
            return finish(total, total_squares, sum(tokens.values()), used)

        return await self._worker.run(work)

    async def _factors(
        self,
        round_index: int,
        shard_index: int,
        squares: Mapping[str, float],
        tokens: Mapping[str, int],
    ) -> dict[str, float]:
        """By peer, as `robust.clip_factors`, of the contributions that are sound. Those of several
        of one household are judged by this shard alone, as all beside them are: for other shards
        these may have contributed as one."""
        names = self._contributors(tokens)
        finite = {names[p]: squares[p] for p in tokens}
        if self._are_apart(names):
            self._norms.tell(round_index, shard_index, finite)
            whole = finite
        else:
            whole = finite | await self._norms.whole(round_index, shard_index, finite)
        return robust.clip_factors({p: whole[names[p]] for p in tokens}, tokens)

    def _house(self, peer_id: str) -> str:
        own = self._gossip.own
        record = own if peer_id == own.peer_id else self._gossip.view.get(peer_id)
        return "" if record is None else record.house

    def _contributors(self, peer_ids: Iterable[str]) -> dict[str, str]:
        """By peer, who contributes: its household where no other one of that does, since to other
        shards another one of it may give; else itself."""
        houses = {p: self._house(p) for p in peer_ids}
        num = Counter(houses.values())
        return {p: house if house and num[house] == 1 else p for p, house in houses.items()}

    def _are_apart(self, names: Mapping[str, str]) -> bool:
        """Several of one household contribute."""
        return any(name == p and self._house(p) for p, name in names.items())

    def _is_mean(self, parts: list[FromPeer]) -> bool:
        return self._rule == robust.MEAN or len(parts) < robust.MIN_CONTRIBUTORS

    async def _decoded(
        self, round_index: int, shard_index: int, parts: list[FromPeer]
    ) -> list[FromPeer]:
        """Without those that are not what the codec makes of finite numbers."""
        if self._optimizer.codec.names.contributions == NONE:
            return parts
        sound, others = await self._worker.run(lambda: self._decode(shard_index, parts))
        for part in others:
            self._report(round_index, shard_index, part.peer_id, "not finite")
        return sound

    def _decode(
        self, shard_index: int, parts: list[FromPeer]
    ) -> tuple[list[FromPeer], list[FromPeer]]:
        """On the worker: the parts decoded, and those that cannot be."""
        codec, sound, others = self._optimizer.codec, list[FromPeer](), list[FromPeer]()
        for part in parts:
            try:
                gradient = codec.decoded_contribution(shard_index, part.gradient)
            except ProtocolViolation:
                others.append(part)
            else:
                sound.append(replace(part, gradient=gradient))
        return sound, others

    async def _sum(
        self,
        round_index: int,
        shard_index: int,
        parts: list[FromPeer],
        finish: Finish[T],
        *,
        are_coded: bool = True,
        may_share: bool = False,
    ) -> T | None:
        """The mean: one pass over the sum tells whether all was finite. All in one turn of the
        worker, which costs about as much as the arithmetic on a small shard."""

        def work() -> tuple[list[FromPeer], list[FromPeer], float, T | None]:
            sound, others = self._decode(shard_index, parts) if are_coded else (parts, [])
            if not sound:
                return sound, others, 0.0, None
            is_shared = may_share and len(sound) == 1
            gradients = [p.gradient for p in sound]
            total = gradients[0] if is_shared else self._optimizer.sum(gradients)
            squares, num_tokens = self._optimizer.sum_of_squares(total), _tokens(sound)
            if not robust.is_sound(squares, num_tokens):
                return sound, others, squares, None
            return sound, others, squares, finish(total, squares, num_tokens, _all(sound))

        while parts:
            parts, others, squares, made = await self._turns.run(work)
            for part in others:
                self._report(round_index, shard_index, part.peer_id, "not finite")
            if made is not None or not parts:
                return made
            are_coded, summed = False, parts
            parts = self._only_sound(round_index, shard_index, parts, await self._squares(parts))
            if len(parts) == len(summed) and not math.isfinite(squares):
                raise ProtocolViolation(f"the gradient of shard {shard_index} overflows")
            if len(parts) == len(summed):
                return await self._worker.run(functools.partial(self._made, parts, squares, finish))
        return None

    def _made(self, parts: list[FromPeer], squares: float, finish: Finish[T]) -> T:
        total = self._optimizer.sum([p.gradient for p in parts])
        return finish(total, squares, _tokens(parts), _all(parts))

    async def _squares(self, parts: list[FromPeer]) -> dict[str, float]:
        """By peer; not finite where the gradient is not."""

        def work() -> dict[str, float]:
            return {p.peer_id: self._optimizer.sum_of_squares(p.gradient) for p in parts}

        return await self._worker.run(work)

    def _only_sound(
        self,
        round_index: int,
        shard_index: int,
        parts: list[FromPeer],
        squares: Mapping[str, float],
    ) -> list[FromPeer]:
        for p in parts:
            if not robust.is_sound(squares[p.peer_id], p.num_tokens):
                is_finite = math.isfinite(squares[p.peer_id])
                why = "beyond all bounds" if is_finite else "not finite"
                self._report(round_index, shard_index, p.peer_id, why)
        return [p for p in parts if robust.is_sound(squares[p.peer_id], p.num_tokens)]

    def _report(self, round_index: int, shard_index: int, peer_id: str, why: str) -> None:
        line = "round %d shard %d: the gradient of %s is %s and does not count"
        aggregation_log.warning(line, round_index, shard_index, peer_id[-8:], why)
        strike(self._gossip, peer_id)

    def _report_clipped(self, round_index: int, factors: Mapping[str, float]) -> None:
        clipped = tuple(sorted(p for p, f in factors.items() if f < 1.0))
        if clipped:
            self._gossip.add_total("contributions_clipped", len(clipped))
        if set(clipped) - set(self._clipped):  # said once while it is always the same ones
            aggregation_log.warning(
                "round %d: gradients far larger than the others', cut to the median norm: %s",
                round_index,
                ", ".join(f"{p[-8:]} x {factors[p]:.2g}" for p in clipped),
            )
        self._clipped = clipped or self._clipped


def _all(parts: list[FromPeer]) -> Used:
    return {p.peer_id: (p.num_tokens, 1.0) for p in parts}


def _tokens(parts: list[FromPeer]) -> int:
    return sum(p.num_tokens for p in parts)


def strike(gossip: Gossip, peer_id: str) -> None:
    """Reports a contribution that was not finite to all peers; of too many senders, the first
    `MAX_STRIKES` by name are kept."""
    gossip.add_total("contributions_dropped")
    strikes = {**gossip.own.strikes, peer_id: gossip.own.strikes.get(peer_id, 0) + 1}
    gossip.amend(strikes=dict(sorted(strikes.items())[:MAX_STRIKES]))
