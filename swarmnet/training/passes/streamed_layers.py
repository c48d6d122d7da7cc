"""Layers whose weights do not lie on the device: they come one after the other, the next one while
this one computes, and gradients leave layer by layer.

So ZeRO-Infinity (Rajbhandari et al., 2021, arXiv 2104.07857) and FSDP's offload do it, here in one
rank. Passes keep no weights: each layer keeps its input only and is computed again in the backward
pass, for which its weights come once more. A parameter of a layer that is not at work is an
expanded number of its shape on the device, and takes no memory. The numbers are those of layers
that stay, bit for bit.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import swarmnet.training.accelerators as accelerators
from swarmnet.training.memory.device_copies import Coming, OnHost
from swarmnet.training.memory.parameter_copies import ParameterCopies, lower_buffers
from swarmnet.training.memory.vectors import Vectors
from swarmnet.training.models.base import LayerContext
from swarmnet.training.passes.layers import StageLayers

MAX_LEAVING = 2
"""Gradients on their way to the host: one is added there while the next one comes."""


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A parameter that is not trained. What autograd keeps of it is the very object, so the layer
    gets another one each time."""

    part: nn.Module
    name: str
    value: Tensor
    """Elsewhere."""

    def show(self, tensor: Tensor) -> None:
        """In place of the layer's, on the device."""
        setattr(self.part, self.name, nn.Parameter(tensor, requires_grad=False))


class _ShownCopies(ParameterCopies):
    """The copies in low precision are those that `Vectors` has on the host."""

    def __init__(self, layers: StreamedLayers) -> None:
        super().__init__(at_once=True)
        self._layers = layers

    def refresh(self) -> None:
        self._layers.shown.refresh_copies()


class StreamedLayers(StageLayers):
    """As `StageLayers`, with the weights on the host or on its disk. `computing.activations` is
    `blocks` or `recompute`; the precision is not fp16, of which gradients have to wait on the
    device."""

    streams = True
    _others: tuple[Tensor, ...] = ()
    """In place of the weights that are shown."""
    _at_work: Sequence[Tensor] = ()
    """Of the layer whose backward pass is made."""

    def show(self, vectors: Vectors) -> None:
        if vectors is not self.shown:
            self._coming.clear()
        self.shown = vectors

    @contextlib.contextmanager
    def showing(self, values: Sequence[Tensor]) -> Iterator[None]:
        """`values`: on the host."""
        held, self._others = self._others, tuple(values)
        self._coming.clear()
        try:
            yield
        finally:
            self._others = held
            self._coming.clear()

    def run(self, key: Any, x: Tensor, context: LayerContext | None = None) -> Tensor:
        self._begin()
        return super().run(key, x, context)

    def extend(self, x: Tensor, context: LayerContext) -> Tensor:
        self._begin()
        return super().extend(x, context)

    def drop_leaving(self) -> None:
        self._leaving.clear()
        if self.copies.is_apart:  # the graph of a pass that failed may live on
            for weights in self._at_work:
                weights.untyped_storage().resize_(0)
        self._at_work = ()

    # ---- inside -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """A pass goes through the layers from the first one."""
        self._coming.clear()  # a pass before may have ended half way
        self._at_work = ()
        self._last = -1

    def _flatten(self, shard_size: int | Sequence[int]) -> Vectors:
        self.parameter_copies = _ShownCopies(self)
        self._coming: dict[int, list[Coming]] = {}
        self._leaving: deque[tuple[int, OnHost]] = deque()
        self._last = -1
        values, gradients = self._memory(self.num_parameters), self._memory(self.num_parameters)
        for r, p in zip(self.parameter_ranges, self.parameters(), strict=True):
            r.part_of(values).copy_(p.detach())
        copies: list[Tensor] | None = None
        if self.dtype != torch.float32:
            low = self._memory(self.num_parameters, self.dtype)
            copies = [r.part_of(low) for r in self.parameter_ranges]
        vectors = Vectors(values, gradients, shard_size, self.parameter_ranges, copies=copies)
        vectors.refresh_copies()
        self._make_absent()
        return vectors

    def _make_absent(self) -> None:
        """Lets the layers have parameters on the device that take no memory; buffers go there."""
        before = self.parameters()  # held: no other object gets the identity of one of them
        at = {id(p): i for i, p in enumerate(before)}
        self._trained: list[list[tuple[nn.Parameter, int]]] = []
        self._frozen: list[list[_Frozen]] = []
        made: dict[int, nn.Parameter] = {}
        kept: dict[int, nn.Parameter] = {}
        for module in self.modules:
            lower_buffers(module, self.dtype, self.plan.exact_buffers)
            trained, frozen = dict[int, nn.Parameter](), list[_Frozen]()
            for part in module.modules():
                for name, buffer in part.named_buffers(recurse=False):
                    setattr(part, name, buffer.to(self.device))
                for name, p in list(part.named_parameters(recurse=False)):
                    i = at.get(id(p))
                    if i is None:
                        if id(p) not in kept:
                            kept[id(p)] = self._keep(p)
                        frozen.append(_Frozen(part, name, kept[id(p)].data))
                        continue
                    if i not in made:
                        made[i] = nn.Parameter(self._absent(p.shape, self.dtype))
                        made[i].register_post_accumulate_grad_hook(self._leaver(i))
                    trained[i] = made[i]
                    setattr(part, name, made[i])
            self._trained.append([(p, i) for i, p in trained.items()])
            self._frozen.append(frozen)
        for frozen in self._frozen:
            for one in frozen:
                one.show(self._absent(one.value.shape, one.value.dtype))

    def _keep(self, parameter: nn.Parameter) -> nn.Parameter:
        """Lets one that is not trained lie elsewhere: its values come there later."""
        made = self._memory(parameter.numel(), parameter.dtype).view(parameter.shape)
        parameter.data = made.copy_(parameter.data)
        return parameter

    def _memory(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """So many zeros on the host, or on its disk."""
        if self._computing.weights == "disk" and size:
            folder = Path(self._computing.folder)
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as file:  # it lives as long as the memory
                return torch.from_file(file.name, shared=True, size=size, dtype=dtype).zero_()
        is_pinned = accelerators.has_pinned_memory(self.device)
        return torch.zeros(size, dtype=dtype, pin_memory=is_pinned)

    def _absent(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty((), dtype=dtype, device=self.device).expand(shape)

    def _call(self, call: Callable[[nn.Module, Tensor], Tensor]) -> Callable[..., Tensor]:
        def here(module: nn.Module, x: Tensor) -> Tensor:
            with self._present(self.modules.index(module)):
                return call(module, x)

        return here

    @contextlib.contextmanager
    def _present(self, k: int) -> Iterator[None]:
        """In this context layer `k` has its weights."""
        step = 1 if k > self._last else -1  # backward passes go the other way
        self._last = k
        moved = [coming.take() for coming in self._coming.pop(k, None) or self._start(k)]
        self._at_work = moved if step < 0 else ()
        if 0 <= k + step < len(self.modules) and k + step not in self._coming:
            self._coming = {k + step: self._start(k + step)}
        trained, frozen = self._trained[k], self._frozen[k]
        for (p, _), value in zip(trained, moved[: len(trained)], strict=True):
            p.data = value
        for one, value in zip(frozen, moved[len(trained) :], strict=True):
            one.show(value)
        try:
            yield
        finally:
            for p, _ in trained:
                p.data = self._absent(p.shape, p.dtype)
            for one in frozen:
                one.show(self._absent(one.value.shape, one.value.dtype))

    def _start(self, k: int) -> list[Coming]:
        """The weights of a layer on their way to the device."""
        shown = self._others or self.shown.shown
        wanted = [shown[i] for _, i in self._trained[k]] + [one.value for one in self._frozen[k]]
        return [self.copies.ahead(value) for value in wanted]

    def _leaver(self, i: int) -> Callable[[Tensor], None]:
        def leave(parameter: Tensor) -> None:
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                return
            if not self._leaving:
                engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001  as FSDP does
                engine.queue_callback(self._add_all)
            self._leaving.append((i, self.copies.to_host(grad)))
            if len(self._leaving) > MAX_LEAVING:
                self._add(*self._leaving.popleft())

        return leave

    def _add_all(self) -> None:
        """The backward pass is over."""
        self._coming.clear()  # it need not come to the first layer
        self._at_work = ()
        while self._leaving:
            self._add(*self._leaving.popleft())

    def _add(self, i: int, gradient: OnHost) -> None:
        self.shown.added[i].add_(gradient.wait())
