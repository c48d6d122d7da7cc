"""What a model must be for swarmnet to train it.

A model is a `ModelPlan`: a list of layers that each turn one tensor into one tensor, and a loss.
The layers run one after the other, first to last; the swarm cuts the list into stages. Nothing in
a plan knows of stages, peers or the network.

To train your own model, write a function that returns a plan, name it in `run.toml`, and put the
same file on every machine (code never travels):

    [model]
    kind = "custom"
    builder = "examples/custom_model.py:build"   # path, as seen from where the peer starts

    [model.options]                              # passed to the function as keyword arguments
    width = 64

Rules for a layer:
- `build()` makes an ordinary `nn.Module` with float32 parameters that all require gradients,
  on torch's default device; it is also called under `torch.device("meta")` to be counted.
- Its input is the batch of the layer before (first dimension: samples), which it must not change
  in place, and its output is one float32 tensor of shape (samples, *output_shape).
- Its output for a sample depends on this sample and the parameters only (no batch
  normalisation), and it has no state that training changes besides its parameters. Buffers stay
  as they begin; an export has the parameters only.
- No parameter belongs to two layers.
- With `[data] document_mask` the plan must say `takes_context` and `takes_ignored`. Layers that mix
  positions are then a `TakesContext`, which is called as `layer(x, context)`.

Weights start as a pure function of the run's seed and the layer's (or parameter's) name, so that
all replicas begin with the same ones and the number of stages does not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from swarmnet.errors import SpecError
from swarmnet.training.attention.documents import mask_of
from swarmnet.training.models.routing import Routing

if TYPE_CHECKING:
    from swarmnet.spec import RunSpec
    from swarmnet.training.custom_data import CustomSamples

SEED_BYTES = 8
_drawing = threading.RLock()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one sample of a batch looks like."""

    dtype: str
    """"float32", or "int32" for tokens and classes."""
    shape: tuple[int, ...]
    """Of one sample, without the batch dimension."""
    num_values: int = 0
    """Integers must lie in [0, num_values); not used for floats."""


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """One layer, not yet built."""

    name: str
    """Prefix of its parameters' names, such as "model.layers.3"; unique in the model."""
    build: Callable[[], nn.Module]
    cost: float
    """Work of its forward pass for one sample, in any unit that all layers share (say FLOPs).
    Stages are cut so that the dearest is as cheap as can be."""
    output_shape: tuple[int, ...]
    """Of one sample; (sequence length, width) for a language model."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Parameters of this layer that are those of earlier layers: by name in this layer, the full
    name of the other one."""
    is_block: bool = False
    """One of the model's decoder layers, or of another stack of alike layers: its matrices are
    Muon's, where the run has that (`matrices`)."""


class SharedSequence(Protocol):
    """A sequence that lies on several ranks, of which this one has `LayerContext.positions`, or
    that several documents share."""

    length: int
    """Positions of all ranks."""
    takes_windows: bool
    """Queries may look back on some positions alone, scores may have a cap, and some of their
    weights may be left out."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int = 0,
        cap: float = 0.0,
        dropout: float = 0.0,
    ) -> Tensor:
        """Causal attention of this rank's queries to the keys of all ranks, of their documents: the
        output, (samples, positions here, heads, head size). `k`, `v`: of this rank; with as many
        heads, or fewer. `window`: positions that a query looks back on, its own included; 0 for
        all, as it is where `takes_windows` is false. `cap`: of scores (`attention.blocks`); 0 for
        none, likewise. `dropout`: probability of a weight to be left out, likewise."""


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What a layer needs beside the hidden state. It goes through a stage, and from stage to stage,
    with the activation."""

    positions: Tensor | None = None
    """int64 (samples or 1, length): of each token in its document. Where it does not go on by one,
    another document begins, which attention does not look out of. None: 0, 1, ..."""
    cache: Any = None
    """Keys and values of earlier tokens, which a layer adds its own to (transformers' `Cache`);
    None in training."""
    mask: Tensor | None = None
    """Where samples have several documents, (samples, 1, length, length), to be added to scores of
    attention: 0 where a token sees another, of its own document and not after it, else minus
    infinity; in the precision of the pass. Made once for all layers of a pass. None beside a
    `sequence`."""
    tokens: Tensor | None = None
    """int32 (samples, length): what the model began with, where a stage other than the first needs
    it (`ModelPlan.fixed`)."""
    fixed: Tensor | None = None
    """Likewise, what `ModelPlan.fixed` makes of them: (samples, length, width), in the precision of
    the pass. Made once for all layers of a pass."""
    sequence: SharedSequence | None = None
    """What attends in place of torch where a rank has a part of the sequence, or where documents
    share it and the model takes that (`ModelPlan.takes_sequence`)."""
    routing: Routing | None = None
    """What routers of experts are told and say (`ModelPlan.routes`), in training."""


def routing_of(context: LayerContext | None) -> Routing | None:
    """That of a pass, where there is one."""
    return None if context is None else context.routing


def with_mask(context: LayerContext, dtype: torch.dtype) -> LayerContext:
    """The context of a pass in this precision: with a mask, where positions ask for one."""
    positions = context.positions
    has_own_way = context.cache is not None or context.sequence is not None
    if positions is None or has_own_way or context.mask is not None:
        return context
    return replace(context, mask=mask_of(documents_of(positions), dtype))


def documents_of(positions_BS: Tensor) -> Tensor:
    """The number of each position's document, from 1."""
    return (positions_BS == 0).cumsum(dim=1)


class TakesContext(nn.Module):
    """A layer that is called as `layer(x, context)` where there is a `LayerContext`."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How layers that are a `TakesContext` keep keys and values of earlier tokens."""

    make: Callable[[], Any]
    """An empty cache of one text, for all layers of a stage (`LayerContext.cache`)."""
    numbers: int
    """That one such layer keeps of a token."""
    max_tokens: int = 0
    """Of a text; 0: the model has no limit."""
    fixed_numbers: int = 0
    """That one such layer may keep of a text beside, however long it is."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model: layers in order, and a loss."""

    layers: tuple[LayerBuilder, ...]
    inputs: TensorSpec
    """What the first layer takes."""
    targets: TensorSpec
    """What the loss compares the last layer's output with."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """`loss(outputs, targets)`: a scalar, in nats, *summed* over what `count` counts."""
    count: Callable[[Tensor], int]
    """Tokens (or samples, pixels, ...) that have a loss, in a batch of targets: what the loss and
    the gradients are means over."""
    initialize: Callable[[str, Tensor, torch.Generator], None] | None = None
    """`initialize(parameter_name, values, generator)` fills a parameter in place. None: a layer
    starts with what `build()` gives under torch's seeded global generator."""
    data: Callable[[RunSpec], CustomSamples] | None = None
    """Makes the microbatches. None: text as in `[data]`, for int32 inputs of shape (length,)."""
    split: tuple[int, ...] = ()
    """Layers of each stage, where the run says so (`[pipeline] layers`); empty: by their costs."""
    is_sequence: bool = False
    """The first dimension of a sample is a sequence that may be shorter in evaluation."""
    takes_context: bool = False
    """Some layers are a `TakesContext`."""
    takes_sequence: bool = False
    """Every layer that mixes positions attends by `LayerContext.sequence`, where there is one."""
    takes_ignored: bool = False
    """Loss and count leave out int32 targets that are `IGNORED`."""
    has_base: bool = False
    """Parameters that require no gradient are the *base*: they come from a model's folder and stay
    as they are, so they are in no vector of a stage, and in no update. What a stage trains, and
    what its shards, digests, checkpoints and downloads are made of, are the others."""
    base_dtype: torch.dtype | None = None
    """Precision that parameters of the base are rounded to, once; None for as they come."""
    has_weights: bool = False
    """The run begins from weights. Persistent buffers of its layers come with them, as a part of
    the base; else they are as `build()` makes them."""
    exact_buffers: tuple[str, ...] = ()
    """Parts of names of buffers that stay in fp32 whatever the precision of the passes."""
    cache: CachePlan | None = None
    """None: the model cannot go on with a text without computing all of it again."""
    is_random: bool = False
    """Layers draw random numbers (dropout): torch is seeded before every forward pass of a layer,
    so that a pass done again is the same."""
    fixed: Callable[[Tensor, torch.dtype], Tensor] | None = None
    """`fixed(tokens, dtype)`: what layers need of each token beside the hidden state, and nothing
    trains (`LayerContext.fixed`). The tokens go from stage to stage with the activations."""
    whole_end: int = 1
    """So many of the last layers are always one stage."""
    routes: bool = False
    """Some layers have experts and routers, which take `LayerContext.routing`."""
    routers_learn: bool = False
    """These routers have losses of their own (`routing`)."""


def derive_seed(seed: int, name: str) -> int:
    """63 bits that depend on the run's seed and a name only: blake2b of `seed|name`."""
    digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=SEED_BYTES).digest()
    return int.from_bytes(digest, "big") >> 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In this context torch's global generators are seeded. All threads have them in common, so one
    at a time is in such a context. The CPU's is left as it was."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_layer(plan: ModelPlan, layer: LayerBuilder, seed: int) -> nn.Module:
    """The layer with its initial weights, on the CPU. Torch's global generator is left as it was.

    Raises:
        SpecError: a parameter is not float32 or does not require a gradient, or a part of the layer
            changes its buffers in training.
    """
    with seeded(derive_seed(seed, layer.name)):
        module = layer.build()
    check_layer(layer.name, module, has_base=plan.has_base)
    for name, parameter in module.named_parameters():
        full_name = f"{layer.name}.{name}"
        if plan.has_base and not parameter.requires_grad:
            continue
        if plan.initialize is not None:
            generator = torch.Generator().manual_seed(derive_seed(seed, full_name))
            with torch.no_grad():
                plan.initialize(full_name, parameter, generator)
    return module


def check_layer(layer_name: str, module: nn.Module, *, has_base: bool = False) -> None:
    """Raises `SpecError` where `build_layer` does. `has_base`: as `ModelPlan`."""
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            of = ".".join(filter(None, (layer_name, name)))
            raise SpecError(
                f"{of}: {type(part).__name__} keeps running statistics, which "
                "replicas do not share; use one without, such as GroupNorm or RMSNorm"
            )
    for name, parameter in module.named_parameters():
        if has_base and not parameter.requires_grad:
            continue
        if parameter.dtype != torch.float32 or not parameter.requires_grad:
            raise SpecError(
                f"{layer_name}.{name} must be a float32 parameter that requires a gradient"
            )


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Where a parameter lies in the flat vector of its stage."""

    name: str
    start: int
    shape: tuple[int, ...]
    num_elements: int

    @property
    def stop(self) -> int:
        return self.start + self.num_elements

    def part_of(self, flat: Tensor) -> Tensor:
        """A view of this parameter's part of a flat vector, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.shape)


def parameter_ranges(
    layers: Sequence[LayerBuilder], modules: Sequence[nn.Module]
) -> tuple[ParameterRange, ...]:
    """The canonical order of the parameters of some consecutive layers: as the layers run, and
    within a layer as torch names them."""
    return ranges_of(own_parameters(layers, modules))


def ranges_of(named: Iterable[tuple[str, Tensor]]) -> tuple[ParameterRange, ...]:
    """Where tensors lie that come one after the other."""
    ranges: list[ParameterRange] = []
    start = 0
    for name, p in named:
        ranges.append(ParameterRange(name, start, tuple(p.shape), p.numel()))
        start += p.numel()
    return tuple(ranges)


def overlaps(
    ranges: Iterable[ParameterRange], start: int, stop: int
) -> Iterator[tuple[ParameterRange, int, int, slice]]:
    """Which parameters elements [start, stop) of a flat vector are of: each with the range [first,
    last) of its own elements, and where among the wanted ones they are."""
    for r in ranges:
        first, last = max(start, r.start), min(stop, r.stop)
        if first < last:
            yield r, first - r.start, last - r.start, slice(first - start, last - start)


def flat_of(
    ranges: Iterable[ParameterRange],
    start: int,
    stop: int,
    read: Callable[[ParameterRange, int, int], Tensor],
) -> Tensor:
    """Elements [start, stop) of a flat vector, fp32; `read(r, first, last)`: elements of one
    parameter."""
    flat = torch.empty(stop - start)
    for r, first, last, place in overlaps(ranges, start, stop):
        flat[place] = read(r, first, last)
    return flat


def own_parameters(
    layers: Sequence[LayerBuilder], modules: Sequence[nn.Module]
) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of some consecutive layers in canonical order: what is trained. One that
    is tied to an earlier layer among them comes once, under that layer's name. Those that are tied
    to a layer elsewhere come first, so that both stages can have the same shards of them."""
    return _own(layers, modules, is_trained=True)


def frozen_parameters(
    layers: Sequence[LayerBuilder], modules: Sequence[nn.Module]
) -> list[tuple[str, nn.Parameter]]:
    """`own_parameters` of those that are not trained (`ModelPlan.has_base`)."""
    return _own(layers, modules, is_trained=False)


def persistent_buffers(
    layers: Sequence[LayerBuilder], modules: Sequence[nn.Module]
) -> list[tuple[str, Tensor]]:
    """What files of a model have beside its parameters, by full name, in canonical order."""
    return [
        (f"{layer.name}.{name}", tensor)
        for layer, module in zip(layers, modules, strict=True)
        for name, tensor in module.state_dict(keep_vars=True).items()
        if not isinstance(tensor, nn.Parameter)
    ]


def base_buffers(
    plan: ModelPlan, layers: Sequence[LayerBuilder], modules: Sequence[nn.Module]
) -> list[tuple[str, Tensor]]:
    """Those that are a part of the base."""
    found = persistent_buffers(layers, modules) if plan.has_weights else []
    return [(name, buffer) for name, buffer in found if buffer.is_floating_point()]


def base_tensors(
    plan: ModelPlan, layers: Sequence[LayerBuilder], modules: Sequence[nn.Module]
) -> list[tuple[str, Tensor]]:
    """The base of some consecutive layers, by full name, in canonical order: parameters that are
    not trained, then buffers."""
    frozen = frozen_parameters(layers, modules) if plan.has_base else []
    return [*frozen, *base_buffers(plan, layers, modules)]


def _own(
    layers: Sequence[LayerBuilder], modules: Sequence[nn.Module], *, is_trained: bool
) -> list[tuple[str, nn.Parameter]]:
    found: dict[str, nn.Parameter] = {}
    elsewhere: dict[str, nn.Parameter] = {}
    for layer, module in zip(layers, modules, strict=True):
        for name, p in module.named_parameters():
            owner = layer.tied.get(name)
            if owner in found or p.requires_grad != is_trained:
                continue
            (found if owner is None else elsewhere)[f"{layer.name}.{name}"] = p
    return [*elsewhere.items(), *found.items()]


def tie(layers: Sequence[LayerBuilder], modules: Sequence[nn.Module]) -> None:
    """Makes parameters that are tied to an earlier one of these layers one object with it."""
    known: dict[str, nn.Parameter] = {}
    for layer, module in zip(layers, modules, strict=True):
        for name, p in list(module.named_parameters()):
            owner = known.get(layer.tied.get(name, ""))
            if owner is not None:
                within, _, own = name.rpartition(".")
                setattr(module.get_submodule(within), own, owner)
            known[f"{layer.name}.{name}"] = p


def tied_names(layers: Sequence[LayerBuilder]) -> dict[str, str]:
    """Full names of parameters that are an earlier layer's, and that one's full name."""
    return {f"{layer.name}.{n}": owner for layer in layers for n, owner in layer.tied.items()}


def described(layers: Sequence[LayerBuilder]) -> list[nn.Module]:
    """The layers without memory: their parameters and buffers have names and shapes only."""
    with torch.device("meta"):  # where nothing is drawn
        return [layer.build() for layer in layers]


def describe_parameters(layers: Sequence[LayerBuilder]) -> tuple[ParameterRange, ...]:
    """`parameter_ranges` of layers that nobody built: no memory is taken."""
    return parameter_ranges(layers, described(layers))


def describe_base(plan: ModelPlan, layers: Sequence[LayerBuilder]) -> tuple[ParameterRange, ...]:
    """Where each tensor of the base of some layers lies, one after the other in canonical order. No
    memory is taken."""
    return ranges_of(base_tensors(plan, layers, described(layers)))


def describe_frozen(layers: Sequence[LayerBuilder]) -> tuple[ParameterRange, ...]:
    """The same of parameters that are not trained."""
    return ranges_of(frozen_parameters(layers, described(layers)))


def describe_buffers(layers: Sequence[LayerBuilder]) -> tuple[ParameterRange, ...]:
    """The same of persistent buffers, wherever they come from."""
    return ranges_of(persistent_buffers(layers, described(layers)))


def initial_buffers(plan: ModelPlan, seed: int) -> dict[str, Tensor]:
    """All persistent buffers of a model as `build()` makes them, by full name. One layer at a time
    is built, of those that have any."""
    found: dict[str, Tensor] = {}
    for layer in plan.layers:
        if describe_buffers([layer]):
            module = build_layer(plan, layer, seed)
            found |= {n: b.detach().clone() for n, b in persistent_buffers([layer], [module])}
    return found


def cut_shards(num_parameters: int, size: int, num_tied: int = 0) -> tuple[int, ...]:
    """Elements of each shard of a stage; the last one may be shorter. `num_tied`: the first so many
    elements are another stage's too, and have shards of their own."""
    if num_tied:
        return (*cut_shards(num_tied, size), *cut_shards(num_parameters - num_tied, size))
    full, rest = divmod(num_parameters, size)
    return (size,) * full + ((rest,) if rest else ())


def num_parameters(ranges: Sequence[ParameterRange]) -> int:
    """Elements of all of them."""
    return ranges[-1].stop if ranges else 0
