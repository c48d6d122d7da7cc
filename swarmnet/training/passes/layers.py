"""The layers of a stage on one device, and how a pass goes through them.

All parameters of the stage are views into one flat fp32 tensor, all gradients views into another,
in the canonical order of `models.base.parameter_ranges`. Layers compute with the flat tensors
themselves (fp32 on a CPU), or with copies of the parameters in bf16 or fp16 or on a GPU. On a GPU
gradients add up in an fp32 vector there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import swarmnet.training.accelerators as accelerators
from swarmnet.errors import SpecError
from swarmnet.ports import StepKey
from swarmnet.training.attention.packed import leave_uncompiled, packed_on
from swarmnet.training.computing import ActivationsName, Computing
from swarmnet.training.memory.device_copies import DeviceCopies
from swarmnet.training.memory.offload import FilePlace, HostPlace, OffloadedPass, Place
from swarmnet.training.memory.parameter_copies import ParameterCopies, lower_buffers
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import (
    LayerBuilder,
    LayerContext,
    ModelPlan,
    TakesContext,
    build_layer,
    derive_seed,
    documents_of,
    own_parameters,
    parameter_ranges,
    seeded,
    tie,
    with_mask,
)
from swarmnet.training.models.experts import adapted_stack
from swarmnet.training.models.frozen import StageBase, settle
from swarmnet.training.models.llama import leave_tables_uncompiled
from swarmnet.training.passes.kept import Kept

LESS_AND_LESS: tuple[ActivationsName, ...] = ("keep", "blocks", "recompute")
"""Policies for activations, each for less memory of a device than the one before."""
KEEPS_ITS_INPUT = (nn.Linear, nn.Embedding)
"""Layers that keep no more than their input for the backward pass in any case."""


class StageLayers:
    """The modules of a stage with their parameters in flat vectors."""

    generates = True
    """False where a pass takes others that do not know of texts."""
    copies_parts = False
    """`copy_of` takes a part of the values only: the device has no room for all."""
    may_keep_less = True
    """False where other ranks would have to know of it."""
    streams = False
    """The weights do not lie on the device: they come for each layer's part of a pass."""
    routes = True
    """False where a pass sees a part of a microbatch: what routers do with it is not known."""
    overlaps_rounds = True
    """False where the layers hold parameters in a way of their own: they can show one pair of
    vectors only, so no round is opened ahead."""

    def __init__(
        self,
        plan: ModelPlan,
        builders: tuple[LayerBuilder, ...],
        *,
        stage_index: int,
        num_stages: int,
        shard_size: int | Sequence[int],
        seed: int,
        computing: Computing,
        device: torch.device,
        copies: DeviceCopies,
    ) -> None:
        """Builds the layers with their initial weights.

        Raises:
            SpecError: the stage has no parameters, or a layer is not as a layer must be.
        """
        self.plan = plan
        self.builders = builders
        self.device = device
        self.weights_device = torch.device("cpu") if self.streams else device
        """Where the parameters lie that passes compute with."""
        self.dtype = computing.dtype
        """Of the passes."""
        self.stage_index = stage_index
        self.is_last = stage_index == num_stages - 1
        self.copies = copies
        self.update_copies = copies if computing.updates_on_device and copies.is_apart else None
        """To the device, where the flat vectors lie there; None where they lie on the host."""
        self._computing = computing
        self._seed = seed
        self.drawing: Callable[[int], contextlib.AbstractContextManager[None]] = seeded
        """In what it gives for a seed, layers draw random numbers."""
        self.parameter_copies = ParameterCopies(at_once=computing.precision != "fp16")
        self._packed = packed_on(device) if plan.takes_sequence else None
        """How to attend to documents that share a sample; None for a mask of all scores."""
        if computing.compile and self._packed is not None:
            leave_uncompiled(self._packed)
        self.modules = [self._build(builder) for builder in builders]
        tie(builders, self.modules)
        self.base = self._base()
        """What of the layers is not trained."""
        self.parameter_ranges = parameter_ranges(builders, self.modules)
        if not self.parameter_ranges or self.parameter_ranges[-1].stop == 0:
            raise SpecError(
                f"[pipeline] num_stages: stage {stage_index} has no parameters; use fewer"
            )
        self.num_parameters = self.parameter_ranges[-1].stop
        self.shown = self._flatten(shard_size)
        """The vectors that the layers compute with and add gradients to."""
        if computing.compile:
            leave_tables_uncompiled()
            for builder, module in zip(builders, self.modules, strict=True):
                # How many tokens an expert gets is another number each time.
                routes = plan.routes and builder.is_block
                names = (f"{builder.name}.{name}" for name, _ in module.named_parameters())
                if not (routes or any(map(adapted_stack, names))):
                    module.compile(dynamic=False)

    def parameters(self) -> list[nn.Parameter]:
        """The layers' parameters, in canonical order."""
        return [p for _, p in own_parameters(self.builders, self.modules)]

    @property
    def activations(self) -> ActivationsName:
        """What passes keep between forward and backward."""
        return self._computing.activations

    def keep_less(self) -> bool:
        """From now on; the numbers stay the same, bit for bit. False where there is no less."""
        policies = LESS_AND_LESS[:-1] if self.is_last else LESS_AND_LESS  # it keeps nothing between
        less = dict(pairwise(policies)).get(self.activations)
        if less is None or not self.may_keep_less:
            return False
        self._computing = replace(self._computing, activations=less)
        return True

    def show(self, vectors: Vectors) -> None:
        """Lets the layers compute with other vectors and add gradients to them."""
        if vectors is self.shown:
            return
        self.shown = vectors
        adds_itself = self.dtype == torch.float32
        for p, shown, added in zip(self.parameters(), vectors.shown, vectors.added, strict=True):
            p.grad = None
            p.data = shown
            p.grad = added if adds_itself else None
        self.parameter_copies.show(vectors.values, vectors.added)

    def refresh_copies(self) -> None:
        """Brings parameters that have changed into the copies that passes compute with."""
        self.parameter_copies.refresh()

    def copy_of(self, flat: Tensor) -> list[Tensor]:
        """For `showing`: the values of the parameters in a flat vector of the dtype of the passes
        (on the host where this copies parts of it)."""
        return [r.part_of(flat) for r in self.parameter_ranges]

    @contextlib.contextmanager
    def showing(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Passes without gradients in this context compute with other values of the parameters, in
        canonical order, of the dtype of the passes and on `weights_device`."""
        parameters = self.parameters()
        held = [p.data for p in parameters]
        try:
            for p, value in zip(parameters, values, strict=True):
                p.data = value
            yield
        finally:
            for p, value in zip(parameters, held, strict=True):
                p.data = value

    def extend(self, x: Tensor, context: LayerContext) -> Tensor:
        """The outputs for the last tokens of a text, of which the context has the keys and values
        of those before. Of the last stage, for the last token alone. In `evaluating` only.

        Args:
            x: tokens, shape (1, n), or a hidden state, shape (1, n, width).
        """
        context = self._of_pass(context)

        def with_context(module: nn.Module, x: Tensor) -> Tensor:
            takes = (context,) if isinstance(module, TakesContext) else ()
            return cast(Tensor, module(x, *takes))

        call = self._call(with_context)
        last_cached = max(
            (i for i, m in enumerate(self.modules) if isinstance(m, TakesContext)), default=-1
        )
        for i, module in enumerate(self.modules):
            if self.is_last and i == last_cached + 1:  # the rest looks at each token by itself
                x = self._last_token(x)
            x = call(module, x)
        return x

    def _last_token(self, x: Tensor) -> Tensor:
        """Of the hidden states of a pass, that of its last token, (1, 1, width)."""
        return x[:, -1:]

    def run(self, key: StepKey | None, x: Tensor, context: LayerContext | None = None) -> Tensor:
        """A forward pass. With gradients enabled, autograd keeps what the policy for activations
        says.

        Args:
            key: of the microbatch; None in evaluation. With dropout, torch is seeded by the key
                and the layer's name: a pass done again is the same.
            x: shape (samples, *shape of one sample), on the device.
            context: for layers that take one.
        """
        context = None if context is None else self._of_pass(context)
        beside = () if context is None else (context,)

        def call(module: nn.Module, x: Tensor) -> Tensor:
            takes = beside if isinstance(module, TakesContext) else ()
            with self._seeded(key, module):
                return cast(Tensor, module(x, *takes))

        if not torch.is_grad_enabled():
            return self._through_modules(x, self._call(call))
        if self.streams:
            return self._through_modules(x, functools.partial(self._checkpointed, self._call(call)))
        activations = self.activations
        if activations == "offload":
            with OffloadedPass(self._place(), self._parameter_storages()).hooks():
                return self._through_modules(x, call)
        if activations == "blocks":
            return self._through_modules(x, functools.partial(self._checkpointed, call))
        return self._through_modules(x, call)

    def loss(
        self, key: StepKey, x: Tensor, targets: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """A forward pass of the last stage and its loss: a scalar, in nats, summed over tokens."""
        return self.plan.loss(self.run(key, x, context).float(), targets)

    def again(self, key: StepKey, kept: Kept) -> Tensor:
        """The forward pass of a kept microbatch: outputs, or the loss at the last stage."""
        if kept.targets is not None:
            return self.loss(key, kept.inputs, kept.targets, kept.context)
        return self.run(key, kept.inputs, kept.context)

    @contextlib.contextmanager
    def evaluating(self, *, is_whole_batch: bool, wants_outputs: bool) -> Iterator[None]:
        """Passes in this context make no gradient and draw no random numbers.

        Args:
            is_whole_batch: the inputs have the shape of a microbatch. Other shapes come once, and
                compiling for them takes longer than they do.
            wants_outputs: the outputs are what is asked for, not the loss.
        """
        drawing = self.modules if self.plan.is_random else []
        eager: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._computing.compile and not is_whole_batch:
            eager = torch.compiler.set_stance("force_eager")
        with torch.no_grad(), eager:
            for module in drawing:
                module.eval()
            try:
                yield
            finally:
                for module in drawing:
                    module.train()

    def drop_leaving(self) -> None:
        """A backward pass has failed: nothing more of its gradients is added."""

    def agree(self, is_good: bool) -> bool:
        """Whether it is good at all ranks of this peer."""
        return is_good

    # ---- inside -----------------------------------------------------------------------------

    def _of_pass(self, context: LayerContext) -> LayerContext:
        """With what is made once for all layers of a pass."""
        if not any(isinstance(m, TakesContext) for m in self.modules):
            return context
        if self._packed and context.positions is not None and context.cache is None:
            if context.sequence is None:
                packed = self._packed(documents_of(context.positions))
                context = replace(context, sequence=packed)
        else:
            context = with_mask(context, self.dtype)
        if self.plan.fixed is None or context.tokens is None:
            return context
        return replace(context, fixed=self.plan.fixed(context.tokens, self.dtype))

    def _base(self) -> StageBase:
        return StageBase(self.plan, self.builders, self.modules)

    def _build(self, builder: LayerBuilder) -> nn.Module:
        module = build_layer(self.plan, builder, self._seed)
        if self.plan.has_base:  # it comes later, also what is tied to a layer elsewhere
            settle(module, self.dtype, self.weights_device)
            return module
        here = {layer.name for layer in self.builders}
        for name, owner in builder.tied.items():
            of, _, its_name = owner.rpartition(".")
            if of not in here:  # it begins with the same values
                other = next(layer for layer in self.plan.layers if layer.name == of)
                values = build_layer(self.plan, other, self._seed).get_parameter(its_name)
                module.get_parameter(name).data = values.detach()
        return module

    def _flatten(self, shard_size: int | Sequence[int]) -> Vectors:
        """Moves parameters (and their gradients) into flat tensors; the layers keep views, or
        copies."""
        for module in self.modules:
            module.to(self.device)
            lower_buffers(module, self.dtype, self.plan.exact_buffers)
        total, is_on_host = self.num_parameters, self.update_copies is None
        place: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        values, gradients = (
            self._host_vectors(total)
            if is_on_host
            else (torch.empty(total, **place), torch.zeros(total, **place))
        )
        sums = None
        is_apart = self.copies.is_apart and is_on_host
        if is_apart:
            sums = torch.zeros(total, dtype=torch.float32, device=self.device)
        needs_copies = is_apart or self.dtype != torch.float32
        adding = gradients if sums is None else sums
        for r, p in zip(self.parameter_ranges, self.parameters(), strict=True):
            value, gradient = r.part_of(values), r.part_of(adding)
            value.copy_(p.detach())
            if needs_copies:
                self.parameter_copies.hold(p, value, gradient, self.dtype, self.device)
            else:
                p.data, p.grad = value, gradient
        held = [p.data for p in self.parameters()] if needs_copies else None
        return Vectors(values, gradients, shard_size, self.parameter_ranges, sums=sums, copies=held)

    def _host_vectors(self, total: int) -> tuple[Tensor, Tensor]:
        """Parameters, and a gradient that is zero, in the host's memory."""
        is_pinned = accelerators.has_pinned_memory(self.device)
        return (
            torch.empty(total, dtype=torch.float32, pin_memory=is_pinned),
            torch.zeros(total, dtype=torch.float32, pin_memory=is_pinned),
        )

    def _seeded(
        self, key: StepKey | None, module: nn.Module
    ) -> contextlib.AbstractContextManager[None]:
        if key is None or not self.plan.is_random:
            return contextlib.nullcontext()
        name = self.builders[self.modules.index(module)].name
        return self.drawing(derive_seed(self._seed, f"{key[0]}|{key[1]}|{name}"))

    def _call(self, call: Callable[[nn.Module, Tensor], Tensor]) -> Callable[..., Tensor]:
        """`call`, of a layer that has its weights."""
        return call

    def _through_modules(self, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        for module in self.modules:
            x = call(module, x)
        return x

    def _checkpointed(
        self, call: Callable[[nn.Module, Tensor], Tensor], module: nn.Module, x: Tensor
    ) -> Tensor:
        """The layer's output. The layer keeps its input only and is computed again in the backward
        pass (Chen et al., 2016)."""
        keeps_weights = self.streams and not isinstance(module, nn.Embedding)
        if isinstance(module, KEEPS_ITS_INPUT) and not keeps_weights:
            return call(module, x)
        # `call` draws the same again.
        again = checkpoint(call, module, x, use_reentrant=False, preserve_rng_state=False)
        return cast(Tensor, again)

    def _place(self) -> Place:
        """Where the tensors of a pass go that leave the device."""
        if self.device.type != accelerators.CPU:
            return HostPlace(self.copies)
        return FilePlace(self._computing.folder)

    def _parameter_storages(self) -> frozenset[int]:
        """Addresses of what the layers compute with: it stays where it is in any case."""
        parameters = (p for module in self.modules for p in module.parameters())
        return frozenset(p.untyped_storage().data_ptr() for p in parameters)
