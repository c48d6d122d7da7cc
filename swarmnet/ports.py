"""The interfaces between the swarm code and a machine: stage, optimizer, device, data.

`training` implements them with real mathematics, `simulation` with synthetic costs. Methods
marked *device* run on the device thread (through `Device.run`), methods marked *worker* on
the worker thread (through `Worker.run`), the rest anywhere and at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from swarmnet.batch import Batch, Documents
from swarmnet.protocol.codecs import UpdateCodec
from swarmnet.wire import Array

T = TypeVar("T")

Check = Callable[[], None]
"""Raises where a piece of work is not wanted any more."""

StepKey = tuple[int, int]
"""(round, microbatch id): what a stage keeps the graph, input and gradients of a microbatch
under."""

BACKWARD, FORWARD, REST, OTHER = "backward", "forward", "rest", "other"
"""Kinds of device work, in order of urgency: backward first, for it frees memory. `REST` is what
passages have left (`Passage.rest`)."""
PRIORITIES = {BACKWARD: 0, FORWARD: 1, REST: 2, OTHER: 3}
"""Of work for one round; lower first."""


@dataclass(frozen=True, slots=True)
class Passage(Generic[T]):
    """A pass of a microbatch: what the device does, and what the host does with what comes and
    goes. Whoever calls it does all three in turn; a `Device` may do the host's parts beside other
    work. None of them sees anything but what it is given."""

    arrive: Callable[[], Any]
    """What has come, checked and decoded. Any thread, before its turn at the device."""
    compute: Callable[[Any], Any]
    """*device*"""
    depart: Callable[[Any], T]
    """What goes, coded and checked. Any thread, afterwards."""
    is_apart: bool = False
    """`compute` may return before the device has done it, and `depart` waits for that."""
    rest: Callable[[], bool] | None = None
    """*device* What of the work nobody waits for: does a part of it, and says whether more is left.
    The device does it when no other pass of the round waits, before other work. Raises nothing."""

    def __call__(self) -> T:
        result = self.depart(self.compute(self.arrive()))
        self.do_rest()
        return result

    def do_rest(self) -> None:
        """*device* All of it."""
        while self.rest is not None and self.rest():
            pass

    def then(self, work: Callable[[T], T]) -> Passage[T]:
        """With `work` done on what goes."""
        return replace(self, depart=lambda done: work(self.depart(done)))


def undivided(work: Callable[[], T]) -> Passage[T]:
    """A passage that the device does alone."""
    return Passage(lambda: None, lambda _: work(), lambda result: result)


@dataclass(frozen=True, slots=True)
class LossResult:
    """What the last stage makes of a microbatch."""

    loss_sum: float
    """Nats, summed over tokens."""
    num_tokens: int
    """Targets that have a loss (`batch`): 0 where none has."""
    grad_inputs: Array | None = None


@dataclass(frozen=True, slots=True)
class StageResult:
    """All that a stage gives away of a microbatch."""

    outputs: Array | None
    """The activation for the next stage; None at the last one."""
    grad_inputs: Array | None
    """None at stage 0."""
    loss_sum: float = 0.0
    """At the last stage, as `LossResult`; 0 elsewhere, like the next."""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What the router of a layer with experts did in a round: of microbatches that counted."""

    layer: str
    """Its name in the model."""
    shares: tuple[float, ...]
    """Of each expert in all choices: 1 / E each where they are used alike."""
    dropped: float
    """Share of the choices for which an expert had no room."""
    entropy: float
    """Of a token's probabilities, nats, the mean: log E where no expert is preferred."""


class Generation(Protocol):
    """What a stage does for texts that its model writes: passes over a few tokens, whose keys and
    values stay, by session, for those that follow. All *device*."""

    pass_tokens: int
    """Tokens that one pass may have."""
    max_tokens: int
    """Of a text, as far as the model says."""
    copy_bytes: int
    """Of a copy of the parameters, as passes need them."""
    token_bytes: int
    """That stay of a token."""
    text_bytes: int
    """That stay of a text, however long it is."""

    def copy(self, shards: Sequence[Array]) -> None:
        """Keeps the parameters that these shards (flat fp32) are, in place of others."""

    def drop_copy(self) -> None:
        """Forgets what `copy` kept."""

    def extend(
        self,
        session: Hashable,
        inputs: Array,
        position: int,
        *,
        is_copied: bool,
        num_logits: int,
        exact: bool = False,
    ) -> tuple[Array, ...]:
        """One pass over tokens (1, n) or activations (1, n, width), by the copy or by the present
        parameters. `position`: tokens of the session before; 0 begins it anew. `exact`: activations
        come and go in fp32, and not as the run codes them. The activation for
        the next stage; at the last stage the logits after the last token, shape (1, V), or the
        largest `num_logits` of them and their tokens (int32). Raises `ProtocolViolation` where the
        inputs do not fit."""

    def drop(self, session: Hashable) -> None:
        """Forgets the keys and values of a session."""


class Device(Protocol):
    """A bounded queue before one device. One thing runs at a time: what is for the earliest round
    first; of that backward work, then forward, then other; the oldest first within a kind."""

    @property
    def num_waiting(self) -> int:
        """Work queued or running."""

    def waiting_until(self, turn: int) -> int:
        """Of it, what a new pass of a microbatch of this turn would wait for at most: not what is
        of later ones, nor other work than passes of its own."""

    @property
    def busy_s(self) -> float:
        """Seconds that the device has worked since its start."""

    async def run(
        self, kind: str, work: Callable[[], T], turn: int = 0, check: Check | None = None
    ) -> T:
        """Queues `work` for the round `turn` and returns what it returns. Cancelling the waiter of
        work that has not started removes it; work that has started finishes. `check` is called
        when its turn has come: what that raises is raised, and the work is not begun. What the host
        does in a `Passage` may be done beside other work; results come in the order of the work
        all the same, so that who hears that a round is closed has heard of all that is in it."""

    async def timed(
        self, kind: str, work: Callable[[], T], turn: int = 0, check: Check | None = None
    ) -> tuple[T, float]:
        """The same, and the seconds that the device worked for it."""

    def seat(self) -> Device:
        """The same device, for one of several peers that work on it: with a `busy_s` of its own
        work."""

    async def close(self) -> None: ...


class Worker(Protocol):
    """A thread for work that must neither hold the event loop nor the device."""

    async def run(self, work: Callable[[], T]) -> T: ...

    async def run_all(self, pieces: Sequence[Callable[[], object]], *, side_by_side: bool) -> None:
        """As one piece of work, several that raise nothing. `side_by_side`: in any order, and some
        at the same time where cores are free."""

    async def close(self) -> None: ...


class Base(Protocol):
    """The parameters of a stage that are not trained: they are in none of its shards, and come from
    what the run began from."""

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Elements of each shard; none where all parameters are trained."""

    @property
    def missing(self) -> Sequence[int]:
        """Shards that have not come yet, ascending."""

    def put(self, shard_index: int, values: Array) -> None:
        """*worker* Takes in a shard, before the first round. Raises `ProtocolViolation` where
        dtype or length is wrong or a value is not finite."""


class Stage(Protocol):
    """One replica's copy of a stage, its gradient buffer and the shards of both.

    The stage's parameters are one flat fp32 vector, cut into shards of fixed size (the last one
    may be shorter), the same at every replica. Gradients are sums over tokens and accumulate
    in one flat fp32 buffer until `finish_round`.
    """

    stage_index: int
    num_stages: int
    shard_sizes: tuple[int, ...]
    """Elements of each shard."""
    is_on_host: bool
    """Parameters and gradient lie in the host's memory, where all that is made of them is."""
    tied_shards: int
    """The first so many shards are those of another stage too, which holds a copy: those of the
    first stage at the last one, and the other way round. Their gradient is the sum of both."""
    max_in_flight: int
    """Microbatches between their passes that memory has room for."""
    can_open_ahead: bool
    """Whether it can work on two rounds at a time (`open_ahead`)."""
    generation: Generation | None
    """None where the model, or this replica, cannot write texts token by token."""

    @property
    def is_owing(self) -> bool:
        """Passes have left something to do (`Passage.rest`): the buffer is not yet their sum."""

    @property
    def routed(self) -> tuple[RouterReport, ...]:
        """What its routers did in the newest round that is over; empty where it has none."""

    @property
    def base(self) -> Base:
        """Its parameters that are not trained."""

    def check(self, inputs: Array, targets: Array, documents: Documents | None = None) -> None:
        """Raises `ProtocolViolation` unless dtype and shape are what this stage takes. Cheap.
        `documents`: of each sample, where attention and positions stay inside a document."""

    def check_gradient(self, grad_outputs: Array) -> None:
        """The same of what `backward_pass` takes. Activations and their gradients are coded
        (`protocol.codecs`): what a stage takes and gives here is what is on the wire."""

    def forward_pass(
        self,
        key: StepKey,
        inputs: Array,
        documents: Documents | None = None,
        targets: Array | None = None,
    ) -> Passage[Array]:
        """The activation for the next stage. Keeps what `backward_pass` needs under `key`.
        `targets`: of the microbatch, by which losses of the stage's own are weighted; where not
        given, as if every token had one.
        Raises `ProtocolViolation` where inputs or outputs are not finite."""

    def backward_pass(self, key: StepKey, grad_outputs: Array) -> Passage[Array | None]:
        """Adds the microbatch's gradient to the buffer, or leaves a part of it to `Passage.rest`;
        gives the gradient of the input (None at stage 0). Keeps what `retract` needs. Raises
        `ProtocolViolation` where `grad_outputs` has the wrong shape or is not finite; then nothing
        was added. Raises `NotSent` where something was, and the gradient of the input cannot be
        given."""

    def loss_pass(
        self, key: StepKey, inputs: Array, targets: Array, documents: Documents | None = None
    ) -> Passage[LossResult]:
        """The last stage's whole work: forward, loss, backward. Raises as `backward_pass`."""

    def recompute_pass(
        self,
        key: StepKey,
        inputs: Array,
        targets: Array,
        grad_outputs: Array | None,
        documents: Documents | None = None,
    ) -> Passage[StageResult]:
        """What this replica would give of a microbatch of another one, with the parameters of the
        round that is open ahead where that is its round, else of the present one. Leaves nothing
        behind. `grad_outputs`: None at the last stage. Raises as `backward_pass` and `loss_pass`,
        and `NotReady` where this replica can do no such pass."""

    def difference(self, ours: StageResult, theirs: StageResult) -> float:
        """The largest difference between two results of a microbatch, relative to ours: of the
        norms, decoded, for each array; of the losses; infinity where only one has something, or
        their tokens differ. Any thread. Raises `ProtocolViolation` where an array of theirs is none
        that a stage gives."""

    def retract(self, key: StepKey) -> None:
        """*device* Takes the contribution of a microbatch out of the buffer again: the same
        backward with the negated output gradient. Unknown keys are ignored."""

    def settle(self) -> None:
        """*device* Does all that passes have left to do."""

    def forget(self, key: StepKey) -> None:
        """Drops all that is kept under `key`: after a commit, or for work given up."""

    def evaluate(
        self,
        inputs: Array,
        targets: Array | None,
        documents: Documents | None = None,
        round_index: int | None = None,
    ) -> Array | LossResult:
        """*device* Forward without gradient, with the parameters of the round that is open ahead
        where it is `round_index`, else of the present one. A stage before the last returns its
        activation; the last returns the loss against `targets`, or the outputs (logits) where
        `targets` is None."""

    def gradient_shard(self, shard_index: int) -> Array:
        """*worker* A view of the gradient buffer, fp32, with all that passes have left to do.
        Only between a drained round and `finish_round`."""

    def copy_gradient(self, shard_index: int) -> Array:
        """*worker* The same, as a copy that outlives `finish_round`, though not the next
        `open_ahead`."""

    def parameter_shard(self, shard_index: int) -> Array:
        """A view of the parameters of the current round, fp32."""

    def digest(self, shard_index: int) -> bytes:
        """*worker* 8 bytes: xxh3-64 (big endian) of the shard's fp32 little-endian bytes."""

    def stage_parameters(self, shard_index: int, values: Array) -> None:
        """*worker* Puts a shard of the coming round's parameters beside the present ones. Raises
        `ProtocolViolation` where dtype or length is wrong or a value is not finite."""

    def coming_shard(self, shard_index: int) -> Array | None:
        """*worker* A view of a shard of the coming parameters: put aside, or of the round
        that was opened ahead. None where there is neither."""

    def coming_digest(self, shard_index: int) -> bytes:
        """*averaging* As `digest`, of a shard of the coming parameters; empty where there is
        none."""

    def finish_round(self) -> None:
        """*device* Makes the shards that were put aside by `stage_parameters` the parameters (the
        others stay as they are), zeroes the gradient buffer and forgets every key. Where a round
        was opened ahead, its parameters and gradient become the present ones, and its keys stay:
        that may be called from any thread, beside work on the round."""

    def open_ahead(self, round_index: int) -> None:
        """*worker* Makes the shards that were put aside the parameters of the coming round,
        whose keys are worked on with them, and add to a gradient buffer of their own, until
        `finish_round` makes that round the present one. The keys of the present round, and its
        gradient and parameter shards, are not touched. Raises `MemoryError` where there is none
        for it; then `can_open_ahead` is false."""

    def drop_ahead(self) -> None:
        """Forgets the round that was opened ahead, its gradient and its keys; its parameters are
        put aside as before. *device*, or *worker* where nothing of it was let in yet."""


CodingErrors = Mapping[int, tuple[str, Array]]
"""By shard: the codec of the contribution that it was lost of, and bfloat16 [size of the shard]."""


class ShardCodec(Protocol):
    """How the shards of a stage are coded in updates. All *worker*. What reads coded shards
    raises `ProtocolViolation` where they are none that the codec makes."""

    names: UpdateCodec

    def contribution(
        self,
        shard_index: int,
        gradient: Array,
        *,
        keeps_error: bool,
        is_short: bool = False,
        for_others: bool = True,
    ) -> Array:
        """A gradient to be sent, with what coding has lost of this replica's contributions before.
        `keeps_error`: what coding loses now is for the next one; else this changes nothing here.
        `is_short`: as of `UpdateCodec.of_contribution`. `for_others`: False where nobody is known
        who gets it; its bytes may then be made when somebody reads them."""

    def forget_error(self, shard_index: int) -> None:
        """The last contribution to the shard does not count, nor does what coding has lost."""

    def errors(self) -> CodingErrors:
        """What coding has lost of this replica's last contributions. Nothing here ever changes the
        arrays."""

    def load_errors(self, errors: CodingErrors) -> None:
        """In place of what coding has lost here. Raises `ProtocolViolation` where one does not fit
        its shard, is not finite, or is of another codec than the run's contributions."""

    def decoded_contribution(self, shard_index: int, coded: Array) -> Array:
        """fp32."""

    def coded_sum(self, shard_index: int, total: Array) -> tuple[Array, Array]:
        """For the backups, and what `decoded_sum` makes of it. Raises like that."""

    def decoded_sum(self, shard_index: int, coded: Array) -> Array:
        """On which all owners step."""

    def applied(self, shard_index: int, present: Array, result: Array) -> Array:
        """The parameters of the coming round. `result`: their coded change, or they themselves."""


Rest = Callable[[Array, bool], tuple[Array, Array]]
"""The rest of a step that was followed, from the parameters before it and `for_others`: gives what
`Optimizer.step` gives, and changes no state."""


class Optimizer(Protocol):
    """The optimizer state (moments) of the shards that this replica owns. All *worker*."""

    codec: ShardCodec
    """Of what is given to it and what it gives."""

    def num_moments(self, shard_index: int) -> int:
        """Vectors of a shard's state, each as long as the shard; without by how much parameters are
        ahead. Any thread."""

    def is_repeatable(self, shard_index: int) -> bool:
        """Owners who step on the same state have the same bits. Where not, the primary's result
        holds, and backups `follow`. Any thread."""

    def owned(self) -> list[int]:
        """Shards whose state is held, ascending."""

    def steps(self, shard_index: int) -> int:
        """Steps that the shard's state has seen; -1 where it is not held."""

    def create(self, shard_index: int) -> None:
        """Fresh (zero) state, step 0."""

    def drop(self, shard_index: int) -> None: ...

    def sum(self, contributions: Sequence[Array]) -> Array:
        """Elementwise fp32 sum, in the order given."""

    def aggregate(
        self,
        rule: str,
        contributions: Sequence[Array],
        tokens: Sequence[int],
        factors: Sequence[float],
    ) -> Array:
        """The aggregate of sums over tokens by a rule of `protocol.update.robust`, as a sum over
        all tokens. `factors`: what each contribution is multiplied by, for the rules that add."""

    def sum_of_squares(self, values: Array) -> float:
        """To about five digits; not finite where a value is not."""

    def distance(self, one: Array, other: Array) -> float:
        """The norm of the difference of two fp32 arrays of one shape; likewise."""

    def step(
        self,
        shard_index: int,
        parameters: Array,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
        for_others: bool = True,
        is_finite: bool = False,
    ) -> tuple[Array, Array]:
        """One optimizer step on gradient `gradient_sum * scale`, with the learning rate of
        `round_index`. `parameters` is not changed. Returns the result, which is the new parameters
        or their change as the codec has it, and what `ShardCodec.applied` makes of it.
        `is_delayed`: the round that begins with them will lack one update, which they may
        anticipate. `for_others`: False where nobody is known who gets the result; it may be the new
        parameters then. `is_finite`: the sum is known to be, and is not looked at for that."""

    def follow(
        self,
        shard_index: int,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
    ) -> Rest:
        """The part of `step` that changes moments, which is the same at all owners. The rest may be
        made later, where the primary's result does not come. Raises as `step`."""

    def take(
        self, shard_index: int, parameters: Array, result: Array, round_index: int
    ) -> tuple[Array, Array]:
        """The step of another owner, of which the coded result is here and the sum is not
        (`UpdateCodec.tells_results`). Returns what `step` does: `result`, and what it leads to. The
        moments lack that gradient then, and what results have left out is with who has made them.
        Raises `ProtocolViolation`, the state unchanged, where it is of no use."""

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        """The state, to be sent or saved: plain values and arrays. Snapshots, not views."""

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        """The reverse of `export`; raises `ProtocolViolation` where it does not fit."""


class LocalSteps(Protocol):
    """A replica's own steps between two exchanges. Besides the stage's parameters, which these
    steps change (*fast*), it keeps those of the last exchange (*common*). All *worker*."""

    tokens: list[int]
    """By shard, the tokens behind the own steps since its last exchange. `step` adds to them,
    `exchanged` takes them away."""
    changes: int
    """Grows with whatever changes any of this."""

    def common_shard(self, shard_index: int) -> Array:
        """A view of the common parameters, fp32."""

    def set_common(self, shard_index: int, values: Array) -> None:
        """Puts new common parameters aside, which are the coming round's fast ones too. Raises
        `ProtocolViolation` as `Stage.stage_parameters`."""

    def digest(self, shard_index: int) -> bytes:
        """As `Stage.digest`, of the common parameters."""

    def step(self, num_tokens: int, round_index: int) -> None:
        """One optimizer step on the stage's gradient, a sum over `num_tokens` (0: no step); the
        result is put aside as the coming round's parameters. Raises `ProtocolViolation` where the
        gradient is not finite; then nothing has changed."""

    def exchanged(self, shards: Iterable[int]) -> None:
        """The own steps on these shards have been brought into an exchange, or are of no use: no
        token is behind them any more."""

    def change(self, shard_index: int, weight: float) -> Array:
        """(common - coming fast parameters) x `weight`: where the own steps lead, as a gradient."""

    def offer(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        """What a partner needs of a shard: the common parameters, `change(shard_index, 1.0)`, and
        the moments of the own steps, with their number."""

    def meet(
        self,
        shard_index: int,
        theirs: tuple[dict[str, Any], tuple[Array, ...]] | None,
        round_index: int,
    ) -> tuple[float, float]:
        """The outer step of a pair after a round, from the partner's `offer` (None: alone); its
        result is put aside as by `set_common`. Returns the squared distance of both replicas' fast
        parameters and the squared norm of the own ones, both 0 alone. Raises `ProtocolViolation`
        where the offer does not fit."""

    def finish_round(self) -> None:
        """*device* Makes what `set_common` put aside the common parameters; right after
        `Stage.finish_round`."""

    def export(self, shard_index: int) -> tuple[dict[str, Any], tuple[Array, ...]]:
        """The state of the own steps (moments), as `Optimizer.export`."""

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        """The reverse of `export`; raises `ProtocolViolation` where it does not fit."""


class InitialWeights(Protocol):
    """The weights that a run began from, as shards of its stages: those of a stage's base come
    first, then those of its trained parameters, unless these begin at random; where the moments of
    another run go on, for each of the latter one with its moments and their number of steps, fp32
    [n x size + 1]. Blocks."""

    is_here: bool
    """This machine can give some of them."""
    has_trained: bool
    """Trained parameters are among them."""
    has_moments: bool
    """So are moments."""

    def shard(self, stage_index: int, shard_index: int) -> Array | None:
        """A shard, flat fp32; None where it is unknown or not what the run began from."""

    def is_right(self, stage_index: int, shard_index: int, values: Array) -> bool:
        """Whether these are the values of the shard."""

    def keep(self, stage_index: int, shard_index: int, values: Array) -> None:
        """Keeps a right shard of a base on the disk, so that `shard` has it from now on."""


class Data(Protocol):
    """Samples. Pure: the same index is the same sample on every machine."""

    @property
    def samples_per_microbatch(self) -> int: ...

    @property
    def bytes_per_token(self) -> float:
        """Average bytes of text behind one target that has a loss; 0 where that is not known, or
        the data is not text."""

    @property
    def num_held_out(self) -> int:
        """Microbatches of held-out data."""

    @property
    def num_samples(self) -> int | None:
        """Training samples, at least one. None where there is no end of them: indices then only
        grow, and none comes twice."""

    def microbatch(self, indices: Sequence[int]) -> Batch:
        """Training samples, 0 to `num_samples` - 1, in this order."""

    def held_out(self, index: int) -> Batch:
        """A held-out microbatch."""


DATA_FILES = ("tokens", "learned", "ends", "hashes")
"""Of a source's tokens (see `training.data.store`)."""
DATA_PART_BYTES = 1 << 20
"""Of one call."""


@dataclass(frozen=True, slots=True)
class SourceSize:
    """How much one source of a run's data is, as tokens."""

    fingerprint: str
    """Of its tokens, 32 hex digits."""
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Of the text behind the learned tokens."""


@dataclass(frozen=True, slots=True)
class WantedPart:
    """A piece of a source's tokens, to be asked of another peer."""

    source: int
    file: str
    """One of `DATA_FILES`."""
    offset: int
    length: int


class GivenData(Protocol):
    """Data whose tokens can be given to others. Blocks."""

    def sizes(self) -> tuple[SourceSize, ...]:
        """Of the sources that are trained on."""

    def part(self, source: int, file: str, offset: int, length: int) -> bytes | None:
        """A piece of a file, shorter at its end; None where there is no such source."""


class SharableData(Data, GivenData, Protocol):
    """Data that are fed, and can be given."""


class ComingData(Protocol):
    """Tokens that come from others, kept on the disk. Blocks. Every method raises `DataError` where
    the disk cannot take them, and nothing but that helps."""

    def open_if_whole(self) -> SharableData | None:
        """What an earlier time has brought."""

    def begin(self, sizes: Sequence[SourceSize], *, unasked: bool) -> bool:
        """Takes up what a peer says of its data. False where another process of this machine is
        fetching the same, or they are too large to be fetched `unasked`, which is said. Raises
        `ProtocolViolation` where they are not the run's data."""

    def wanted(self, giver: str) -> WantedPart | None:
        """The next piece, if this giver is asked; None where all is here."""

    def take(self, giver: str, part: WantedPart, data: bytes) -> None:
        """Keeps a piece. Raises `ProtocolViolation` where it shows that the giver's data are not
        the run's; that of which nobody knows who gave it is dropped without a word."""

    def finish(self) -> SharableData:
        """All is here."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint has."""

    round: int
    """The round that begins with this state."""
    history: int
    """Of the run at the time, see `protocol.membership.records.Record.history`."""
    stage: int
    num_shards: int
    held: tuple[int, ...]
    """Shards whose optimizer state is in it, ascending."""


@dataclass(frozen=True, slots=True)
class Unused:
    """A checkpoint of the run in a state folder of this machine that no peer uses."""

    folder: str
    """The state folder."""
    saved: Saved


@dataclass(frozen=True, slots=True)
class OwnSteps:
    """What a replica's own steps have made of a shard; copies, not views."""

    parameters: Array
    """The fast ones, flat fp32."""
    tokens: int
    """Of `LocalSteps.tokens`."""
    moments: tuple[dict[str, Any], tuple[Array, ...]]
    """What `LocalSteps.export` gave."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A replica's state at the beginning of a round; copies, not views."""

    round: int
    history: int
    stage: int
    parameters: tuple[Array, ...]
    """A flat fp32 array for each shard."""
    digests: bytes
    """8 bytes for each shard, of `Stage.digest`."""
    optimizer: dict[int, tuple[dict[str, Any], tuple[Array, ...]]]
    """By shard, what `Optimizer.export` gave."""
    own_steps: tuple[OwnSteps, ...] = ()
    """By shard; none where replicas make no steps of their own."""
    errors: CodingErrors = field(default_factory=dict)
    """Of this replica's contributions before the round."""


class Checkpoints(Protocol):
    """The checkpoints of one peer's stage. Every method blocks, and raises `UserError` (one line)
    where the disk fails."""

    def available(self) -> Sequence[Saved]:
        """Those of this run that are complete, the oldest first. Quick."""

    def unused(self) -> Sequence[Unused]:
        """What lies beside the own state folder, for which no peer would miss it. Quick."""

    def take_over(self, parts: Sequence[tuple[Unused, Collection[int]]]) -> Sequence[Saved]:
        """Counts what lies unused as available from now on, until the next `save`: of each
        checkpoint the optimizer state of these shards, and the parameters where there is no own
        checkpoint of that round. What is damaged, or of other parameters than the own checkpoint
        of that round, is left out. Returns what is available of those rounds now."""

    def save(self, snapshot: Snapshot) -> None:
        """All or nothing. Removes the oldest ones that are not to be kept."""

    def load(self, round_index: int) -> Snapshot:
        """One of the available ones; every byte is checked."""

    def keep(self, rounds: Collection[int]) -> None:
        """`save` does not remove these, until this is called again."""

    def digests(self, round_index: int) -> bytes:
        """Of the parameters of an available one, 8 bytes for each shard."""

    def shard(self, round_index: int, stage_index: int, shard_index: int) -> Array | None:
        """A shard of the parameters of an available one, read from the disk alone; None where it is
        not there."""

    def note_held_out(self, losses: Mapping[int, float]) -> None:
        """Keeps held-out losses, by round. The checkpoint with the lowest is not removed."""

    def held_out(self) -> Mapping[int, float]:
        """The losses that were noted, by round."""
