"""A stage on one device: the mathematics behind `ports.Stage`.

The parts of a stage, each with a state of its own:

- `passes.host_side`: what of it does not depend on where passes are computed;
- `passes.layers`: the modules, and how a pass goes through them;
- `passes.round_vectors`: the flat parameters and gradients by round, and their shards;
- `passes.kept`: what is kept of each microbatch between its passes and after them;
- `passes.backward`: how gradients come into the round's sum, in every precision;
- `passes.owed_weights`: gradients of weights that a backward pass leaves for later;
- `passes.boundary`: checks of what arrives, its coding, and the way to the device and back;
- `passes.recomputation`: passes that leave nothing behind, of microbatches of other replicas;
- `passes.generation`: passes over a few tokens, for texts that the model writes.

Where exchanges run beside a round there are two pairs of vectors: parameters and gradient of the
round, and those of the round before (its gradient is being exchanged) or of the next one
(`open_ahead`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import swarmnet.training.accelerators as accelerators
from swarmnet.batch import Documents
from swarmnet.errors import NotReady, NotSent, SpecError
from swarmnet.plurals import counted
from swarmnet.ports import (
    Base,
    Generation,
    LossResult,
    Passage,
    RouterReport,
    StageResult,
    StepKey,
)
from swarmnet.protocol.codecs import BOUNDARY_CODECS, NONE, BoundaryCodec, boundary_codec
from swarmnet.protocol.planning.flow import IN_FLIGHT_PER_REPLICA
from swarmnet.protocol.planning.owed import most_owed
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing, computing_of
from swarmnet.training.memory.device_copies import DeviceCopies, copies_of
from swarmnet.training.models.base import (
    LayerBuilder,
    LayerContext,
    ModelPlan,
    TensorSpec,
    cut_shards,
    routing_of,
)
from swarmnet.training.models.registry import (
    model_plan,
    shard_parameters,
    split_stages,
    stage_shards,
    tied_elements,
)
from swarmnet.training.models.routing import RoutersOfStage, Routing, names_of_parts
from swarmnet.training.passes.backward import BackwardPasses
from swarmnet.training.passes.boundary import Boundary, finite_loss
from swarmnet.training.passes.fp16 import Fp16Refusals, LossScale
from swarmnet.training.passes.generation import StageGeneration
from swarmnet.training.passes.host_side import HostSide
from swarmnet.training.passes.kept import Kept, KeptMicrobatches
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.passes.owed_weights import OwedWeights
from swarmnet.training.passes.recomputation import Recomputation
from swarmnet.training.passes.streamed_layers import StreamedLayers
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.stage")

OWN_STEPS = (LOCAL, GOSSIP)
"""Modes of `[sync]` in which replicas make steps of their own."""


class TorchStage(HostSide):
    """A replica's copy of a stage; implements `ports.Stage`.

    `forget` may be called from any thread; the rest as the port says.

    Args:
        plan: the whole model.
        layers: those of this stage.
        stage_index: of this stage, from 0.
        num_stages: of the whole model.
        shard_size: elements of each shard, where the last one may be shorter; or of every one.
        tied_shards: the first so many shards are the same as another stage's (`Stage`).
        microbatch: samples.
        seed: of the run.
        computing: precision, and what is kept between the passes.
        device: where the layers compute.
        inputs: what one sample looks like here; that of the plan for stage 0.
        document_mask: attention and positions stay inside a document, and microbatches come with
            their documents.
        codec: of what crosses the boundaries between stages.
        reuses_gradient: the coming parameters of a shard may overwrite its gradient; not where
            microbatches add to it while an exchange goes on.
        copies: between the host and the device; those that suit the device where not given.
        make_layers: makes the layers, with the arguments of `StageLayers`.

    Raises:
        SpecError: the layers cannot be built so.
    """

    def __init__(
        self,
        plan: ModelPlan,
        layers: tuple[LayerBuilder, ...],
        *,
        stage_index: int,
        num_stages: int,
        shard_size: int | Sequence[int],
        microbatch: int,
        seed: int,
        computing: Computing = Computing(),  # noqa: B008  it is immutable
        device: torch.device | str = "cpu",
        inputs: TensorSpec | None = None,
        codec: BoundaryCodec = BOUNDARY_CODECS[NONE],
        tied_shards: int = 0,
        document_mask: bool = False,
        reuses_gradient: bool = False,
        copies: DeviceCopies | None = None,
        make_layers: Callable[..., StageLayers] = StageLayers,
    ) -> None:
        device = torch.device(device)
        copies = copies or copies_of(device)
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.is_last = stage_index == num_stages - 1
        self.tied_shards = tied_shards
        self.computing = computing
        self.max_in_flight = computing.max_in_flight
        if computing.weights != "device":
            make_layers = StreamedLayers
        self.layers = make_layers(
            plan,
            layers,
            stage_index=stage_index,
            num_stages=num_stages,
            shard_size=shard_size,
            seed=seed,
            computing=computing,
            device=device,
            copies=copies,
        )
        self.base: Base = self.layers.base
        named = zip((layer.name for layer in layers), self.layers.modules, strict=True)
        self.routers = RoutersOfStage(names_of_parts(named))
        self.kept = KeptMicrobatches(needs_input_gradients=stage_index > 0)
        is_fp16 = computing.precision == "fp16"
        refusals = Fp16Refusals(stage_index) if is_fp16 else None
        self.loss_scale = LossScale() if is_fp16 else None
        """In fp16; None in other precisions."""
        self._backward_passes = BackwardPasses(self.layers, self.loss_scale, refusals)
        boundary = Boundary(
            plan,
            inputs or plan.inputs,
            TensorSpec("float32", layers[-1].output_shape),
            stage_index=stage_index,
            microbatch=microbatch,
            dtype=computing.dtype,
            copies=copies,
            refusals=refusals,
            codec=codec,
            document_mask=document_mask,
        )
        ranges = self.layers.parameter_ranges
        super().__init__(self.layers, boundary, layers, ranges, reuses_gradient=reuses_gradient)
        self.owed = OwedWeights(self.layers) if reuses_gradient and self._may_owe() else None
        if self.owed is not None:
            self.vectors.make_whole = self.owed.settle
            self.vectors.give_up_rest = self.owed.give_up
        self._recomputation = Recomputation(self.layers, boundary, self.vectors, self.loss_scale)
        self.generation: Generation | None = (
            StageGeneration(self.layers, boundary, self.vectors, cache, microbatch)
            if (cache := self.layers.plan.cache) is not None and self.layers.generates
            else None
        )

    def _may_owe(self) -> bool:
        """Gradients of weights may be left for later: somebody waits for that of the inputs, and
        weights are trained. Not where passes go through other ranks or a compiler, nor on a GPU,
        where nobody has measured it; in fp16 a gradient counts when all of its pass are known."""
        computing = self.computing
        is_plain = type(self.layers) is StageLayers and not computing.compile
        is_exact = self.loss_scale is None and not self.layers.plan.has_base
        is_here = self.layers.device.type == accelerators.CPU
        return self.stage_index > 0 and is_plain and is_exact and is_here

    @property
    def routed(self) -> tuple[RouterReport, ...]:
        """As the port says."""
        return self.routers.last

    # ---- microbatches -----------------------------------------------------------------------

    def forward_pass(
        self,
        key: StepKey,
        inputs: Array,
        documents: Documents | None = None,
        targets: Array | None = None,
    ) -> Passage[Array]:
        def arrive() -> tuple[Tensor, LayerContext | None]:
            self._boundary.check_inputs(inputs)
            self._boundary.check_documents(inputs, documents)
            context = self._boundary.receive_context(
                inputs, documents, self._routing(inputs, targets)
            )
            return self._boundary.receive_inputs(inputs), context

        def compute(came: tuple[Tensor, LayerContext | None]) -> Callable[[], Array]:
            x, context = came
            self.vectors.use(key[0])
            kept = self.kept.begin(key, x, context=context)

            def run() -> Tensor:
                has_graph = self.layers.activations != "recompute"
                with self._watched(), torch.set_grad_enabled(has_graph):
                    return self.layers.run(key, kept.inputs, kept.context)

            with self.kept.forget_on_error(key):
                outputs = self._with_room(run)
                sending = self._boundary.send_outputs(outputs, kept.context)
            if self.layers.activations != "recompute":
                kept.keep_graph(outputs)
            return sending

        def depart(sending: Callable[[], Array]) -> Array:
            with self.kept.forget_on_error(key):
                return sending()

        return Passage(arrive, compute, depart, self.layers.copies.is_apart)

    def backward_pass(self, key: StepKey, grad_outputs: Array) -> Passage[Array | None]:
        """As the port says. Raises `NotReady` for a key that is forgotten or was never here."""

        def compute(grad: Tensor) -> Callable[[], Array | None]:
            kept = self.kept.get(key)
            if kept is None:
                raise NotReady("the microbatch was given up here")
            self.kept.check_not_added(key)
            self.vectors.use(key[0])

            def again() -> Tensor:
                return self._with_room(lambda: self.layers.again(key, kept))

            try:
                with self._leaving():
                    scale = self._backward_passes.add(
                        kept.take_graph(), again, grad, kept.inputs, routing_of(kept.context)
                    )
            except RuntimeError as error:
                if accelerators.is_out_of_memory(error):
                    self._keep_less()  # a part of it is added: it cannot be done again
                raise
            kept.mark_added(scale, grad)
            self.routers.add(key[0], routing_of(kept.context))
            with _after_adding():
                return self._input_gradient(kept)

        def depart(sending: Callable[[], Array | None]) -> Array | None:
            with _after_adding():
                return sending()

        return Passage(
            lambda: self._boundary.receive_gradient(grad_outputs),
            compute,
            depart,
            self.layers.copies.is_apart,
            self._rest,
        )

    def loss_pass(
        self, key: StepKey, inputs: Array, targets: Array, documents: Documents | None = None
    ) -> Passage[LossResult]:
        def arrive() -> tuple[Tensor, Tensor, LayerContext | None]:
            self.check(inputs, targets, documents)
            wanted = self._boundary.receive_targets(targets)
            return (
                self._boundary.receive_inputs(inputs),
                wanted,
                self._boundary.receive_context(inputs, documents, self._routing(inputs, targets)),
            )

        def compute(came: tuple[Tensor, Tensor, LayerContext | None]) -> tuple[Any, ...]:
            x, wanted, context = came
            self.vectors.use(key[0])
            kept = self.kept.begin(key, x, wanted, context=context)

            def run() -> Tensor:
                with self._watched():
                    return self.layers.again(key, kept)

            with self.kept.forget_on_error(key):
                loss = self._with_room(run)
                loss_sum = finite_loss(loss)
            with self._leaving():
                scale = self._backward_passes.add(
                    loss,
                    lambda: self.layers.again(key, kept),
                    torch.ones_like(loss),
                    kept.inputs,
                    routing_of(context),
                )
            kept.mark_added(scale)
            self.routers.add(key[0], routing_of(context))
            with _after_adding():
                return loss_sum, self.layers.plan.count(wanted), self._input_gradient(kept)

        def depart(done: tuple[Any, ...]) -> LossResult:
            loss_sum, num_tokens, sending = done
            with _after_adding():
                return LossResult(loss_sum, num_tokens, sending())

        return Passage(arrive, compute, depart, self.layers.copies.is_apart, self._rest)

    def forward(
        self,
        key: StepKey,
        inputs: Array,
        documents: Documents | None = None,
        targets: Array | None = None,
    ) -> Array:
        """The whole of `forward_pass`, *device*; so the next two."""
        return self.forward_pass(key, inputs, documents, targets)()

    def backward(self, key: StepKey, grad_outputs: Array) -> Array | None:
        return self.backward_pass(key, grad_outputs)()

    def forward_backward(
        self, key: StepKey, inputs: Array, targets: Array, documents: Documents | None = None
    ) -> LossResult:
        return self.loss_pass(key, inputs, targets, documents)()

    def recompute_pass(
        self,
        key: StepKey,
        inputs: Array,
        targets: Array,
        grad_outputs: Array | None,
        documents: Documents | None = None,
    ) -> Passage[StageResult]:
        return self._recomputation.passage(key, inputs, targets, grad_outputs, documents)

    def retract(self, key: StepKey) -> None:
        kept = self.kept.take_added(key)
        if kept is None:
            return
        self.vectors.use(key[0])
        self.settle()
        routing = routing_of(kept.context)
        self._backward_passes.subtract(
            lambda: self.layers.again(key, kept), kept.grad_outputs, kept.scale, routing
        )
        self.routers.take_out(key[0], routing)

    @property
    def is_owing(self) -> bool:
        return self.owed is not None and len(self.owed) > 0

    def settle(self) -> None:
        if self.owed is not None:
            self.owed.settle()

    def forget(self, key: StepKey) -> None:
        self.kept.forget(key)

    def evaluate(
        self,
        inputs: Array,
        targets: Array | None,
        documents: Documents | None = None,
        round_index: int | None = None,
    ) -> Array | LossResult:
        """As the port says. The batch may be smaller than a microbatch and, for models of
        sequences, the sequences shorter. Raises `ProtocolViolation` where an array does not fit."""
        wanted = targets if self.is_last else None
        x, expected = self._boundary.receive_evaluation(inputs, wanted, documents)
        context = self._boundary.receive_context(inputs, documents)
        is_whole = self._boundary.is_whole_batch(x)
        with (
            self.vectors.showing(round_index),
            self.layers.evaluating(is_whole_batch=is_whole, wants_outputs=targets is None),
        ):
            outputs = self.layers.run(None, x, context).float()
            if not self.is_last:
                return self._boundary.send_evaluation(outputs, context)()
            if expected is None:
                return from_tensor(outputs)
            plan = self.layers.plan
            return LossResult(finite_loss(plan.loss(outputs, expected)), plan.count(expected))

    # ---- rounds -----------------------------------------------------------------------------

    def finish_round(self) -> None:
        self.kept.keep_round(self.vectors.round_ahead)
        self.routers.finish(self.vectors.round_ahead)
        self.vectors.finish_round()

    @property
    def can_open_ahead(self) -> bool:
        return self.vectors.can_open_ahead

    def open_ahead(self, round_index: int) -> None:
        self.vectors.open_ahead(round_index)

    def drop_ahead(self) -> None:
        if self.vectors.round_ahead is not None:
            self.kept.forget_round(self.vectors.round_ahead)
            self.routers.drop(self.vectors.round_ahead)
            self.vectors.drop_ahead()

    # ---- inside -----------------------------------------------------------------------------

    def _routing(self, inputs: Array, targets: Array | None) -> Routing | None:
        return self._boundary.routing(inputs, targets) if self.layers.routes else None

    @property
    def _rest(self) -> Callable[[], bool] | None:
        return None if self.owed is None else self.owed.make_next

    def _watched(self) -> contextlib.AbstractContextManager[Any]:
        """Of a forward pass whose backward pass may leave something, as activations are kept now:
        for want of memory it may be made again with fewer of them."""
        if self.owed is None:
            return contextlib.nullcontext()
        self.owed.keep(self._room())
        keeps = self.layers.activations == "keep"
        return self.owed.watched() if keeps else contextlib.nullcontext()

    def _leaving(self) -> contextlib.AbstractContextManager[None]:
        """Of a backward pass, whose microbatch is between its passes no more."""
        if self.owed is None:
            return contextlib.nullcontext()
        return self.owed.leaving(min(self._room() + 1, most_owed(self.stage_index)))

    def _room(self) -> int:
        """For microbatches of which something is owed. One takes no more memory than one between
        its passes: of both together there may be as many as a feeder has in flight."""
        window = int(IN_FLIGHT_PER_REPLICA * self.num_stages) + 1
        return min(window, self.max_in_flight) - self.kept.num_in_flight

    def _with_room(self, run: Callable[[], Tensor]) -> Tensor:
        """A pass that adds no gradient; where there is no memory for it, once more in less."""
        try:
            return run()
        except RuntimeError as error:
            if not (accelerators.is_out_of_memory(error) and self._keep_less()):
                raise
        return run()  # what the first try held is free now

    def _keep_less(self) -> bool:
        """There was no memory for a pass. False where nothing less can be kept."""
        self.settle()
        self.max_in_flight = max(1, min(self.max_in_flight, self.kept.num_in_flight - 1))
        has_less = self.layers.keep_less()
        line = "out of memory in a pass: activations %s from now on, at most %s inside"
        most = counted(self.max_in_flight, "microbatch")
        log.warning(line, self.layers.activations, most)
        accelerators.give_memory_back(self.layers.device.type)
        return has_less

    def _input_gradient(self, kept: Kept) -> Callable[[], Array | None]:
        """After a backward pass: what the stage before waits for."""
        if self.stage_index == 0:
            return lambda: None
        return self._boundary.send_input_gradient(kept.take_input_gradient())


@contextlib.contextmanager
def _after_adding() -> Iterator[None]:
    """What fails here has left a gradient in the sum."""
    try:
        yield
    except Exception as e:  # for want of memory, say
        raise NotSent(f"the gradient of the input was not made: {type(e).__name__}: {e}") from e


def build_stage(
    spec: RunSpec,
    stage_index: int,
    *,
    device: torch.device | str = "cpu",
    computing: Computing | None = None,
    make: Callable[..., TorchStage] | None = None,
) -> TorchStage:
    """A stage of the spec's model with its initial parameters. `computing`: how this machine
    computes; as the spec says where it is not given. `make`: what is made in place of a
    `TorchStage`, of the same arguments.

    Raises:
        SpecError: the model cannot be built or cut so.
    """
    if computing is not None and computing.max_device_bytes:
        accelerators.bound_memory(torch.device(device), computing.max_device_bytes)
    plan = model_plan(spec)
    stages = split_stages(plan, spec.pipeline.num_stages)
    before = stages[stage_index - 1][-1] if stage_index else None
    size = shard_parameters(spec, plan)
    sizes = stage_shards(spec, plan, stage_index)
    tied = tied_elements(plan, len(stages), stage_index)
    if tied and spec.sync.mode in OWN_STEPS:
        raise SpecError(
            f"[sync] mode {spec.sync.mode}: it does not keep this model's embedding and head tied "
            "over stages; use zero, delayed or auto, or one stage"
        )
    return (make or TorchStage)(
        plan,
        stages[stage_index],
        stage_index=stage_index,
        num_stages=len(stages),
        shard_size=sizes,
        tied_shards=len(cut_shards(tied, size)),
        microbatch=spec.pipeline.microbatch,
        seed=spec.seed,
        computing=computing or computing_of(spec, device),
        device=device,
        inputs=TensorSpec("float32", before.output_shape) if before else None,
        document_mask=spec.data.document_mask,
        codec=boundary_codec(spec.pipeline.codec),
        reuses_gradient=spec.sync.mode == "zero",
    )
