"""A stage on one device: the mathematics behind `swarm.ports.Stage`.

Memory. All parameters of the stage are views into one flat fp32 tensor, all gradients views into
another, both in the host's memory, in the canonical order of `models.base.parameter_ranges`; so a
shard is a slice, a network buffer can point straight at it, and autograd adds into it in place.
Parameters of the coming round wait for `finish_round` where the gradient of their shard was, which
nobody needs once they are there: a replica never holds more than the two vectors. Where exchanges
run beside a round there are two pairs of vectors (`vectors`): parameters and gradient of the round,
and those of the round before (its gradient is being exchanged) or of the next one (`open_ahead`).

Life of a microbatch here: `forward` keeps its input, and of the graph what the policy says
(`computing.Computing.activations`); `backward` drops the graph and keeps the output's gradient
beside the input, a receipt of which `retract` can undo what `backward` added; `forget` or
`finish_round` drops the receipt.

Precision. Layers compute with the flat tensors themselves (fp32 on a CPU), or with a copy of the
parameters, in bf16 or fp16 or on a GPU, that `finish_round` refreshes. On a GPU gradients add up in
an fp32 vector there, which comes to the host once a round. A gradient in low precision is added to
the fp32 one and dropped: in bf16 as soon as a parameter's is there, in fp16 when the whole pass is
known to be finite; else the pass is made again with a smaller scale (`loss_scale`).

Whoever sends a value that is not finite is refused before anything is added. Values are also
bounded by `LARGEST_VALUE`: products of two such values still fit into fp32, so that a finite input
cannot make an infinite gradient where it enters.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarmnet.errors import NotReady, ProtocolViolation, RemoteError, SpecError
from swarmnet.spec import RunSpec
from swarmnet.swarm.ports import LossResult, StepKey
from swarmnet.training.arrays import from_tensor, is_finite, to_tensor
from swarmnet.training.computing import Computing, computing_of
from swarmnet.training.memory.device_copies import copies_of
from swarmnet.training.memory.offload import FilePlace, HostPlace, OffloadedPass, Place
from swarmnet.training.memory.parameter_copies import ParameterCopies, lower_buffers
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    ParameterRange,
    TensorSpec,
    build_layer,
    derive_seed,
    describe_parameters,
    parameter_ranges,
)
from swarmnet.training.models.registry import (
    cut_shards,
    model_plan,
    shard_parameters,
    split_stages,
)
from swarmnet.training.optimizer.loss_scale import LossScale
from swarmnet.training.optimizer.vectors import Vectors
from swarmnet.wire import Array

KEEPS_ITS_INPUT = (nn.Linear, nn.Embedding)
"""Layers that keep no more than their input anyway."""
LARGEST_VALUE = 1e15
"""Of activations and their gradients."""
SPARE_FACTOR = 1.5
"""Free device memory that a second pair of vectors must leave, over what it takes."""

log = logging.getLogger("swarmnet.training")

T = TypeVar("T")


@dataclass(slots=True)
class Kept:
    """What the stage keeps of one microbatch. An entry that was forgotten while the device still
    works on it is simply no longer in the table."""

    inputs: Tensor
    """In the precision of the passes, where it is of floats."""
    outputs: Tensor | None = None
    """With its graph; only between forward and backward, and not with activations "recompute"."""
    grad_outputs: Tensor | None = None
    scale: float = 1.0
    """Of the backward pass; other than 1 in fp16 only."""
    targets: Tensor | None = None
    is_added: bool = False
    """Its gradient is in the buffer."""


class TorchStage:
    """A replica's copy of a stage; implements `swarm.ports.Stage`.

    `forget` may be called from any thread; the rest as the port says.
    """

    overlaps_rounds = True
    """False where layers hold parameters in a way of their own: no round is opened ahead."""

    def __init__(
        self,
        plan: ModelPlan,
        layers: tuple[LayerBuilder, ...],
        *,
        stage_index: int,
        num_stages: int,
        shard_size: int,
        microbatch: int,
        seed: int,
        computing: Computing = Computing(),  # noqa: B008  it is immutable
        device: torch.device | str = "cpu",
        inputs: TensorSpec | None = None,
        reuses_gradient: bool = False,
    ) -> None:
        """`inputs`: what one sample looks like here; that of the plan for stage 0.
        `reuses_gradient`: the coming parameters of a shard may overwrite its gradient; not where
        microbatches add to it while an exchange goes on."""
        self._reuses_gradient = reuses_gradient
        self.stage_index = stage_index
        self.num_stages = num_stages
        self._plan = plan
        self._inputs = inputs or plan.inputs
        self._outputs = TensorSpec("float32", layers[-1].output_shape)
        self._microbatch = microbatch
        self._seed = seed
        self.computing = computing
        self.max_in_flight = computing.max_in_flight
        self._dtype = computing.dtype
        self._recompute = computing.activations == "recompute"
        self._device = torch.device(device)
        self._copies = copies_of(self._device)
        self._num_refused = 0
        self._scaling = LossScale() if computing.precision == "fp16" else None
        self._needs_grad_inputs = stage_index > 0
        self._layers = layers
        self._modules = [self._build(layer) for layer in layers]
        self.parameter_ranges = parameter_ranges(layers, self._modules)
        self._low = ParameterCopies(at_once=self._scaling is None)
        self._sums: Tensor | None = None
        self._collecting = threading.Lock()
        self._parameters, self._gradients = self._flatten()
        self.shard_sizes = cut_shards(self._parameters.numel(), shard_size)
        self._present = self._used = self._first_vectors(shard_size)
        self._spare: Vectors | None = None
        self._may_swap = reuses_gradient and self.overlaps_rounds
        self._swapped: Vectors | None = None
        """The present ones with parameters and gradient exchanged."""
        self._ahead: tuple[int, Vectors] | None = None
        """The round that is open ahead, and its vectors."""
        self._spared = self._parameter_storages()
        if computing.compile:
            for module in self._modules:
                module.compile(dynamic=False)
        self._staged: dict[int, Tensor] = {}
        self._kept: dict[StepKey, Kept] = {}

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    @property
    def num_parameters(self) -> int:
        return self._parameters.numel()

    @property
    def num_kept(self) -> int:
        """Microbatches of which something is kept."""
        return len(self._kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the parameters by name (Hugging Face's for a Llama), until `finish_round`."""
        return {
            r.name: self._parameters[r.start : r.stop].view(r.shape) for r in self.parameter_ranges
        }

    # ---- microbatches -----------------------------------------------------------------------

    def check(self, inputs: Array, targets: Array) -> None:
        _check_shape("inputs", inputs, self._inputs.dtype, self._batch(self._inputs))
        _check_shape("targets", targets, self._plan.targets.dtype, self._batch(self._plan.targets))

    def forward(self, key: StepKey, inputs: Array) -> Array:
        _check_shape("inputs", inputs, self._inputs.dtype, self._batch(self._inputs))
        self._use(key)
        kept = self._begin(key, self._receive("inputs", inputs, self._inputs))

        def run() -> tuple[Tensor, Array]:
            with torch.set_grad_enabled(not self._recompute):
                outputs = self._run(key, kept.inputs)
            return outputs, self._checked_outputs(outputs)

        outputs, sent = self._or_forget(key, run)
        if not self._recompute:
            kept.outputs = outputs
        return sent

    def backward(self, key: StepKey, grad_outputs: Array) -> Array | None:
        """As the port says. Raises `NotReady` for a key that is forgotten or was never here."""
        kept = self._kept.get(key)
        if kept is None:
            raise NotReady("the microbatch was given up here")
        if kept.is_added:
            raise ValueError(f"the gradient of {key} is in the buffer already")
        _check_shape("gradient", grad_outputs, "float32", self._batch(self._outputs))
        grad = self._receive("gradient", grad_outputs, self._outputs)
        if self._scaling is None:
            grad = grad.to(self._dtype)
        self._use(key)
        outputs, kept.outputs = kept.outputs, None
        self._backward(kept, lambda: self._run(key, kept.inputs), grad, outputs)
        kept.grad_outputs = grad
        return self._added(kept)

    def forward_backward(self, key: StepKey, inputs: Array, targets: Array) -> LossResult:
        self.check(inputs, targets)
        wanted = self._receive("targets", targets, self._plan.targets)
        self._use(key)
        kept = self._begin(key, self._receive("inputs", inputs, self._inputs))
        kept.targets = wanted
        loss = self._or_forget(key, lambda: self._loss(key, kept.inputs, wanted))
        loss_sum = self._or_forget(key, lambda: _finite_loss(loss))
        self._backward(
            kept, lambda: self._loss(key, kept.inputs, wanted), torch.ones_like(loss), loss
        )
        return LossResult(loss_sum, self._plan.count(wanted), self._added(kept))

    def retract(self, key: StepKey) -> None:
        kept = self._kept.get(key)
        if kept is None or not kept.is_added:
            return
        self._kept.pop(key, None)
        self._use(key)
        inputs = kept.inputs.detach()
        try:
            if kept.targets is not None:
                loss = self._loss(key, inputs, kept.targets)
                loss.backward(torch.full_like(loss, -kept.scale))
            elif kept.grad_outputs is not None:
                outputs = self._run(key, inputs)
                outputs.backward((kept.grad_outputs * -kept.scale).to(outputs.dtype))
        except BaseException:
            self._spoil(is_added=True)  # what must not count is in the sum
            raise
        self._low.add(1.0 / kept.scale)
        self._used.is_collected = False

    def forget(self, key: StepKey) -> None:
        self._kept.pop(key, None)

    def evaluate(self, inputs: Array, targets: Array | None) -> Array | LossResult:
        """As the port says. The batch may be smaller than a microbatch and, for models of
        sequences, the sequences shorter. Raises `ProtocolViolation` where an array does not fit."""
        self._check_sizes("inputs", inputs, self._inputs)
        x = self._receive("inputs", inputs, self._inputs)
        wanted = None
        if targets is not None and self.is_last:
            self._check_sizes("targets", targets, self._plan.targets)
            num_free = 2 if self._plan.is_sequence and self._plan.targets.shape else 1
            if targets.shape[:num_free] != inputs.shape[:num_free]:
                raise ProtocolViolation("targets of another batch or length than the inputs")
            wanted = self._receive("targets", targets, self._plan.targets)
        is_whole = tuple(x.shape) == self._batch(self._inputs)
        self._show(self._present)
        with torch.no_grad(), _EvaluationMode(self), self._uncompiled(not is_whole):
            outputs = self._run(None, x).float()
            if wanted is None:
                return from_tensor(outputs)
            return LossResult(
                _finite_loss(self._plan.loss(outputs, wanted)), self._plan.count(wanted)
            )

    # ---- shards -----------------------------------------------------------------------------

    def gradient_shard(self, shard_index: int) -> Array:
        self._collect_sums()
        return from_tensor(self._present.gradient_shards[shard_index])

    def copy_gradient(self, shard_index: int) -> Array:
        self._collect_sums()
        gradient = self._present.gradient_shards[shard_index]
        # Where another round is open ahead, this vector stays as it is until the next one is.
        return from_tensor(gradient if self._ahead is not None else gradient.clone())

    def parameter_shard(self, shard_index: int) -> Array:
        return from_tensor(self._present.parameter_shards[shard_index])

    def digest(self, shard_index: int) -> bytes:
        return xxhash.xxh3_64_digest(self.parameter_shard(shard_index).data)

    def stage_parameters(self, shard_index: int, values: Array) -> None:
        if not 0 <= shard_index < len(self.shard_sizes):
            raise ProtocolViolation(f"this stage has no shard {str(shard_index)[:32]}")
        _check_shape("parameters", values, "float32", (self.shard_sizes[shard_index],))
        tensor = to_tensor(values)
        _check_finite("parameters", tensor)
        if self._reuses_gradient:
            tensor = self._present.gradient_shards[shard_index].copy_(tensor)
        elif self._spare is not None:
            tensor = self._spare.parameter_shards[shard_index].copy_(tensor)
        self._staged[shard_index] = tensor

    def coming_shard(self, shard_index: int) -> Array | None:
        ahead, staged = self._ahead, self._staged.get(shard_index)
        if ahead is not None:
            staged = ahead[1].parameter_shards[shard_index]
        return None if staged is None else from_tensor(staged)

    def finish_round(self) -> None:
        if self._ahead is not None:
            return self._promote()
        staged, self._staged = self._staged, {}
        self._kept.clear()
        with torch.no_grad():
            if self._may_swap and len(staged) == len(self.shard_sizes):
                present = self._swapped or self._swap()
                self._present, self._swapped = present, self._present
                self._parameters, self._gradients = present.parameters, present.gradients
            else:
                for shard_index, values in staged.items():
                    self._present.parameter_shards[shard_index].copy_(values)
            self._show(self._present)
            self._present.clear_gradient()
            self._low.refresh()
        return None

    def _swap(self) -> Vectors:
        """The vectors with their parts exchanged: where the gradient was overwritten with all of
        the coming parameters, it becomes the parameters, and nothing is copied."""
        first = self._present
        vectors = Vectors(first.gradients, first.parameters, first.shard_size, sums=first.sums)
        self._lay_out(vectors, list(first.shown) if self._computes_apart else None)
        self._spared |= {first.gradients.untyped_storage().data_ptr()}
        return vectors

    # ---- two rounds at a time ---------------------------------------------------------------

    @property
    def can_open_ahead(self) -> bool:
        """On a device with little memory of its own there is no room for a second pair of
        vectors."""
        if not self.overlaps_rounds:
            return False
        if self._device.type != "cuda" or self._spare is not None:
            return True
        element = 4 + torch.finfo(self._dtype).bits // 8
        free, _ = torch.cuda.mem_get_info(self._device)
        return free > SPARE_FACTOR * element * self.num_parameters

    def open_ahead(self, round_index: int) -> None:
        staged, self._staged = self._staged, {}
        coming = self._spare or self._more_vectors()
        self._spare = None
        with torch.no_grad():
            for j, shard in enumerate(coming.parameter_shards):
                values = staged.get(j, self._present.parameter_shards[j])
                if values.data_ptr() != shard.data_ptr():
                    shard.copy_(values)
            coming.clear_gradient()
            for value, shown in zip(coming.values, coming.shown, strict=True):
                if shown.data_ptr() != value.data_ptr():
                    shown.copy_(value, non_blocking=True)
        self._ahead = (round_index, coming)
        self._spared |= frozenset(s.untyped_storage().data_ptr() for s in coming.shown)

    def drop_ahead(self) -> None:
        if self._ahead is not None:
            round_index, self._spare = self._ahead
            self._ahead = None
            self._keep_only(lambda key: key[0] != round_index)
            self._show(self._present)

    def _promote(self) -> None:
        """The round that was open ahead is the present one now."""
        assert self._ahead is not None
        assert not self._staged, "parameters were put aside while a round was open ahead"
        (round_index, coming), self._ahead = self._ahead, None
        self._spare, self._present, self._swapped = self._present, coming, None
        self._parameters, self._gradients = coming.parameters, coming.gradients
        self._keep_only(lambda key: key[0] == round_index)
        self._show(coming)

    def _keep_only(self, is_kept: Callable[[StepKey], bool]) -> None:
        for key in [k for k in self._kept if not is_kept(k)]:
            self.forget(key)

    def _use(self, key: StepKey) -> None:
        """Shows the layers the parameters of a microbatch's round."""
        is_ahead = self._ahead is not None and key[0] == self._ahead[0]
        self._show(self._ahead[1] if self._ahead is not None and is_ahead else self._present)

    def _show(self, vectors: Vectors) -> None:
        if vectors is self._used:
            return
        self._used = vectors
        adds_itself = self._dtype == torch.float32
        parameters = self._layer_parameters()
        for p, shown, added in zip(parameters, vectors.shown, vectors.added, strict=True):
            p.grad = None
            p.data = shown
            p.grad = added if adds_itself else None
        self._low.show(vectors.values, vectors.added)

    def _layer_parameters(self) -> list[nn.Parameter]:
        return [p for module in self._modules for p in module.parameters()]

    def _first_vectors(self, shard_size: int) -> Vectors:
        """Those that the layers show already."""
        vectors = Vectors(self._parameters, self._gradients, shard_size, sums=self._sums)
        if self.overlaps_rounds:
            shown = [p.data for p in self._layer_parameters()]
            self._lay_out(vectors, shown)
        return vectors

    def _lay_out(self, vectors: Vectors, shown: list[Tensor] | None) -> None:
        """The parts of the vectors that belong to each parameter of the layers."""
        adding = vectors.gradients if vectors.sums is None else vectors.sums
        vectors.values = [_part(vectors.parameters, r) for r in self.parameter_ranges]
        vectors.added = [_part(adding, r) for r in self.parameter_ranges]
        vectors.shown = vectors.values if shown is None else shown

    def _more_vectors(self) -> Vectors:
        """A second pair, of the same kind."""
        first = self._present
        parameters, gradients = (
            torch.empty_like(t, pin_memory=t.is_pinned())
            for t in (first.parameters, first.gradients)
        )
        sums = None if first.sums is None else torch.empty_like(first.sums)
        vectors = Vectors(parameters, gradients, first.shard_size, sums=sums)
        shown = [torch.empty_like(s) for s in first.shown] if self._computes_apart else None
        self._lay_out(vectors, shown)
        return vectors

    # ---- inside -----------------------------------------------------------------------------

    def _build(self, layer: LayerBuilder) -> nn.Module:
        return build_layer(self._plan, layer, self._seed)

    def _flatten(self) -> tuple[Tensor, Tensor]:
        """Moves parameters (and their gradients) into flat tensors; the layers keep views."""
        total = self.parameter_ranges[-1].stop if self.parameter_ranges else 0
        if total == 0:
            raise SpecError(
                f"[pipeline] num_stages: stage {self.stage_index} has no parameters; use fewer"
            )
        for module in self._modules:
            module.to(self._device)
            lower_buffers(module, self._dtype)
        is_pinned = self._device.type == "cuda"
        values = torch.empty(total, dtype=torch.float32, pin_memory=is_pinned)
        gradients = torch.zeros(total, dtype=torch.float32, pin_memory=is_pinned)
        if self._is_apart:
            self._sums = torch.zeros(total, dtype=torch.float32, device=self._device)
        sums = gradients if self._sums is None else self._sums
        parameters = (p for module in self._modules for p in module.parameters())
        for r, p in zip(self.parameter_ranges, parameters, strict=True):
            view = values[r.start : r.stop].view(r.shape)
            view.copy_(p.detach())
            gradient = sums[r.start : r.stop].view(r.shape)
            if self._dtype == torch.float32 and not self._is_apart:
                p.data, p.grad = view, gradient
            else:
                self._low.hold(p, view, gradient, self._dtype, self._device)
        return values, gradients

    @property
    def _is_apart(self) -> bool:
        """Whether layers compute in another memory than the host's, where the flat vectors are."""
        return self._device.type != "cpu"

    @property
    def _computes_apart(self) -> bool:
        """Whether layers compute with copies of the flat vector's parts."""
        return self._is_apart or self._dtype != torch.float32

    def _collect_sums(self) -> None:
        """Makes the flat gradient what has added up on the device."""
        vectors = self._present
        if vectors.sums is None:
            return
        with self._collecting:
            if not vectors.is_collected:
                vectors.gradients.copy_(vectors.sums)
                vectors.is_collected = True

    def _batch(self, spec: TensorSpec) -> tuple[int, ...]:
        return (self._microbatch, *spec.shape)

    def _begin(self, key: StepKey, inputs: Tensor) -> Kept:
        """The entry comes into the table before the work, so that `forget` meanwhile finds it."""
        old = self._kept.get(key)
        if old is not None and old.is_added:
            raise ValueError(f"the gradient of {key} is in the buffer already")
        kept = self._kept[key] = Kept(inputs.requires_grad_(self._needs_grad_inputs))
        return kept

    def _or_forget(self, key: StepKey, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException:
            self.forget(key)
            raise

    def _run(self, key: StepKey | None, x: Tensor) -> Tensor:
        """The layers. With dropout, torch is seeded by the key: a pass done again is the same."""
        if key is not None and self._plan.is_random:
            torch.manual_seed(derive_seed(self._seed, f"{key[0]}|{key[1]}|{self.stage_index}"))
        if not torch.is_grad_enabled():
            return self._through_layers(x, lambda module, x: module(x))
        activations = self.computing.activations
        if activations == "offload":
            with OffloadedPass(self._place(), self._spared).hooks():
                return self._through_layers(x, lambda module, x: module(x))
        if activations == "blocks":
            return self._through_layers(x, self._checkpointed)
        return self._through_layers(x, lambda module, x: module(x))

    def _through_layers(self, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        for module in self._modules:
            x = call(module, x)
        return x

    def _checkpointed(self, module: nn.Module, x: Tensor) -> Tensor:
        """The layer, which keeps its input only and is computed again in the backward pass (Chen
        et al., 2016)."""
        if isinstance(module, KEEPS_ITS_INPUT):
            return cast(Tensor, module(x))
        again = checkpoint(module, x, use_reentrant=False, preserve_rng_state=self._plan.is_random)
        return cast(Tensor, again)

    def _uncompiled(self, is_wanted: bool) -> contextlib.AbstractContextManager[Any]:
        """For shapes that come once: compiling takes longer than they do."""
        if is_wanted and self.computing.compile:
            return torch.compiler.set_stance("force_eager")
        return contextlib.nullcontext()

    def _place(self) -> Place:
        """Where the tensors of a pass go that leave the device."""
        if self._device.type == "cuda":
            return HostPlace(self._copies)
        return FilePlace(self.computing.folder)

    def _parameter_storages(self) -> frozenset[int]:
        parameters = (p for module in self._modules for p in module.parameters())
        return frozenset(p.untyped_storage().data_ptr() for p in parameters)

    def _loss(self, key: StepKey, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._plan.loss(self._run(key, inputs).float(), targets)

    def _backward(
        self, kept: Kept, again: Callable[[], Tensor], grad: Tensor, root: Tensor | None
    ) -> None:
        """The backward pass from `root`, or from what `again` makes, as often as fp16 needs it.
        Raises `RemoteError` where fp16 cannot hold the gradient; then nothing was added."""
        self._used.is_collected = False
        scaling = self._scaling
        if scaling is None:
            root = again() if root is None else root
            self._add_gradient(root, grad)
            return
        largest = float(grad.abs().max())
        while True:
            scale = scaling.scale(largest)
            root = again() if root is None else root
            self._add_gradient(root, (grad * scale).to(root.dtype))
            root = None
            if self._agree(self._low.is_finite() and _is_gradient_finite(kept.inputs)):
                break
            self._low.drop()
            kept.inputs.grad = None
            if not scaling.overflowed():
                raise self._too_large_for_fp16("a gradient at")
        scaling.worked()
        self._low.add(1.0 / scale)
        kept.scale = scale

    def _add_gradient(self, root: Tensor, grad: Tensor) -> None:
        """A pass that fails half way, for want of memory say, has added a part of its gradient."""
        try:
            root.backward(grad)
        except BaseException:
            self._spoil()
            raise

    def _spoil(self, *, is_added: bool = False) -> None:
        """Nobody knows what a failed pass has added. In fp16 that is apart from the sum yet; else,
        or where what must not count `is_added` already, the round's sum must not count: primaries
        leave out what is not finite."""
        if self._scaling is not None:
            self._low.drop()
            if not is_added:
                return
        vectors = self._used
        adding = vectors.gradients if vectors.sums is None else vectors.sums
        adding.fill_(math.nan)
        vectors.is_collected = False
        log.warning(
            "a backward pass failed half way: what this peer has added up in the round is lost"
        )

    def _too_large_for_fp16(self, what: str) -> RemoteError:
        """What the caller is told; the person at this machine too, more and more seldom."""
        text = (
            f"{what} stage {self.stage_index} does not fit into fp16; "
            "--precision bf16 or fp32 holds it"
        )
        self._num_refused += 1
        if self._num_refused.bit_count() == 1:
            log.warning("%s (%d microbatches so far went elsewhere)", text, self._num_refused)
        return RemoteError(text)

    def _agree(self, is_good: bool) -> bool:
        """Whether it is good at all ranks of this peer."""
        return is_good

    def _added(self, kept: Kept) -> Array | None:
        """After a backward pass: the gradient of the input, which leaves the entry."""
        kept.is_added = True
        grad, kept.inputs.grad = kept.inputs.grad, None
        if not self._needs_grad_inputs:
            return None
        grad = torch.zeros_like(kept.inputs) if grad is None else grad
        grad = grad.float() / kept.scale if kept.scale != 1.0 else grad.float()
        grad = self._copies.to_host(grad).wait()
        # Where not, the parameters themselves are to blame, not who sent.
        if not is_finite(grad, LARGEST_VALUE):
            raise RemoteError(f"the gradient at stage {self.stage_index} is not finite")
        return from_tensor(grad)

    def _checked_outputs(self, outputs: Tensor) -> Array:
        """As they travel. Raises `ProtocolViolation` where the inputs are to blame."""
        expected = self._batch(self._outputs)
        if outputs.dtype != self._dtype or tuple(outputs.shape) != expected:
            raise RemoteError(
                f"stage {self.stage_index} gave {outputs.dtype} of shape {tuple(outputs.shape)}, "
                f"not {self._dtype} of shape {expected}: correct the model's output_shape"
            )
        sent = self._copies.to_host(outputs.detach().float()).wait()
        if self._scaling is not None and not is_finite(sent, LARGEST_VALUE):
            raise self._too_large_for_fp16("an activation of")
        _check_finite("activation", sent)
        return from_tensor(sent)

    def _receive(self, what: str, array: Array, spec: TensorSpec) -> Tensor:
        """The array as a tensor, its values checked; shape and dtype were checked before."""
        tensor = to_tensor(array)
        if spec.dtype == "float32":
            _check_finite(what, tensor)
        else:
            _check_values(what, tensor, spec.num_values)
        tensor = self._copies.to_device(tensor)
        return tensor.to(self._dtype) if what == "inputs" and spec.dtype == "float32" else tensor

    def _check_sizes(self, what: str, array: Array, spec: TensorSpec) -> None:
        """As `check`, for evaluation: up to a microbatch, and sequences up to full length."""
        largest = self._batch(spec)
        shape = array.shape
        num_free = 2 if self._plan.is_sequence and spec.shape else 1
        fits = (
            array.dtype == spec.dtype
            and len(shape) == len(largest)
            and all(1 <= n <= most for n, most in zip(shape[:num_free], largest[:num_free]))
            and shape[num_free:] == largest[num_free:]
        )
        if not fits:
            raise ProtocolViolation(
                f"{what}: {str(array.dtype)[:16]} of shape {str(shape)[:64]}; "
                f"at most {spec.dtype} of shape {largest}"
            )


class _EvaluationMode:
    """Layers that draw random numbers do not in evaluation."""

    def __init__(self, stage: TorchStage) -> None:
        self._modules = stage._modules if stage._plan.is_random else []

    def __enter__(self) -> None:
        for module in self._modules:
            module.eval()

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            module.train()


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
    plan = model_plan(spec)
    stages = split_stages(plan, spec.pipeline.num_stages)
    before = stages[stage_index - 1][-1] if stage_index else None
    return (make or TorchStage)(
        plan,
        stages[stage_index],
        stage_index=stage_index,
        num_stages=len(stages),
        shard_size=shard_parameters(spec, plan),
        microbatch=spec.pipeline.microbatch,
        seed=spec.seed,
        computing=computing or computing_of(spec, device),
        device=device,
        inputs=TensorSpec("float32", before.output_shape) if before else None,
        reuses_gradient=spec.sync.mode == "zero",
    )


def stage_parameter_ranges(spec: RunSpec, stage_index: int) -> tuple[ParameterRange, ...]:
    """Where each named parameter lies in the flat vector of a stage, without building it."""
    plan = model_plan(spec)
    return describe_parameters(split_stages(plan, spec.pipeline.num_stages)[stage_index])


def stage_shard_sizes(spec: RunSpec, stage_index: int) -> tuple[int, ...]:
    """Elements of each shard of a stage, without building it."""
    total = stage_parameter_ranges(spec, stage_index)[-1].stop
    return cut_shards(total, shard_parameters(spec, model_plan(spec)))


def _part(vector: Tensor, r: ParameterRange) -> Tensor:
    return vector[r.start : r.stop].view(r.shape)


def _check_shape(what: str, array: Array, dtype: str, shape: Iterable[int]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ProtocolViolation(
            f"{what}: {str(array.dtype)[:16]} of shape {str(array.shape)[:64]} "
            f"instead of {dtype} of shape {shape}"
        )


def _is_gradient_finite(tensor: Tensor) -> bool:
    return tensor.grad is None or bool(torch.isfinite(tensor.grad).all())


def _check_finite(what: str, tensor: Tensor) -> None:
    if not is_finite(tensor, LARGEST_VALUE):
        raise ProtocolViolation(f"{what}: a value is not finite (or beyond {LARGEST_VALUE:g})")


def _check_values(what: str, tensor: Tensor, num_values: int) -> None:
    low, high = torch.aminmax(tensor)
    if low.item() < 0 or high.item() >= num_values:
        raise ProtocolViolation(f"{what}: a value outside [0, {num_values})")


def _finite_loss(loss: Tensor) -> float:
    value = float(loss.detach())
    if not abs(value) <= LARGEST_VALUE:
        raise ProtocolViolation("the loss is not finite")
    return value
