"""Whether layers of a family of `transformers`, one after the other, are its model: tried with a
small one, not believed.

The small model has every kind of layer that the config names. Cut into layers it must give the
logits of the whole, training must leave its buffers as they are, and with a cache, a few tokens at
a time, the logits must be the same again. Where only the last does not hold, such models train and
are exported, but write no texts during a run.

Where a run has adapters on experts, the small model with some must give the logits of one whose
weights they were added to.

Where a run keeps the documents of a sample apart, the small model must give each of them the same
outputs in a packed sample as alone. Layers with a state that runs along the sequence (linear
attention, convolutions) do not.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet.errors import SpecError, one_line
from swarmnet.plurals import counted
from swarmnet.spec import LoraSpec, ModelSpec
from swarmnet.training.attention.documents import PackedSequence
from swarmnet.training.models.adapter import adapter_plan
from swarmnet.training.models.base import (
    LayerContext,
    ModelPlan,
    TakesContext,
    documents_of,
    seeded,
    with_mask,
)
from swarmnet.training.models.experts import STACKS
from swarmnet.training.models.lora import lora_plan, merge
from swarmnet.training.models.model_config import load_config, model_classes, rope_tables
from swarmnet.training.models.shrunk import shrunk_configs

LENGTH, SAMPLES = 24, 2
PASSES = (11, 4, *(1 for _ in range(9)))
"""Tokens of each, of a text."""
DOCUMENTS = ((10, 14), (1, 20, 3))
"""Of two samples, tokens of each."""
STRETCHED = ("dynamic", "longrope")
"""Kinds of positions that depend on how long the longest document is."""
MAX_ELEMENTS = 1 << 27
"""Of a model that is tried. A config from others may have sizes that nobody shrinks: what is too
large is not built here, and the plan of memory judges it."""
TOLERANCE = 1e-3
"""Relative to the largest output; rounding makes less than 1e-5 of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """What came of it."""

    fault: str = ""
    """Why such a model cannot be trained here, in words; empty where it can."""
    writes: bool = True
    """It goes on with a text by a cache."""


def try_family(config: Mapping[str, Any]) -> Tried:
    """`config`: canonical. A family of which no small model can be built is taken as it is."""
    smaller = shrunk_configs(config)
    return try_small(tuple(json.dumps(small, sort_keys=True) for small in smaller))


def checked(plan: ModelPlan, config: Mapping[str, Any]) -> ModelPlan:
    """The plan of the model of this config, without a cache where that is of no use. Raises
    `SpecError` where its layers do not do what the model does."""
    tried = try_family(config)
    if tried.fault:
        raise SpecError(
            f"[model] model_type {config['model_type']} is not supported: {tried.fault}"
        )
    return plan if tried.writes else dataclasses.replace(plan, cache=None)


@functools.lru_cache(maxsize=16)
def try_small(configs: Sequence[str]) -> Tried:
    """What comes of the first of these canonical configs, JSON, of which a model can be built."""
    for text in configs:
        small = json.loads(text)
        try:
            whole, tokens, logits = whole_model(small)
        except Exception:  # whatever a family's code does with sizes that it never had
            continue
        return small_tried(small, whole, tokens, logits)
    return Tried()


def whole_model(small: dict[str, Any]) -> tuple[nn.Module, Tensor, Tensor]:
    """A model of transformers, tokens (B, S) and their logits (B, S, V). Raises whatever the
    family's code raises."""
    config = load_config(small)
    check_size(config)
    with seeded(0):
        model = model_classes(config)[1](config).eval()
        tokens = torch.randint(config.vocab_size, (SAMPLES, LENGTH))
    with torch.no_grad():
        return model, tokens, model(tokens, use_cache=False).logits


def check_size(config: Any) -> None:
    """Raises `ValueError` where a model of transformers' config is too large to be tried."""
    with torch.device("meta"), seeded(0):
        model = model_classes(config)[1](config)
    if sum(t.numel() for t in (*model.parameters(), *model.buffers())) > MAX_ELEMENTS:
        raise ValueError("too large to be tried")


def small_tried(small: dict[str, Any], whole: nn.Module, tokens: Tensor, logits: Tensor) -> Tried:
    """What comes of a small model. The others: as `whole_model` gives them."""
    try:
        plan = adapter_plan(ModelSpec(kind="transformers", config=small), LENGTH)
        modules = [layer.build().eval() for layer in plan.layers]
        state = whole.state_dict()
        for layer, module in zip(plan.layers, modules, strict=True):
            own = {n: state[f"{layer.name}.{n}"] for n in module.state_dict()}
            module.load_state_dict(own)
        found = _through(modules, tokens)
    except SpecError:
        raise
    except Exception as error:  # likewise
        text = one_line(error, 120)
        return Tried(f"its layers need more than what comes from the layer before ({text})")
    if not _is_same(found, logits):
        return Tried("layer by layer it computes something else than as a whole")
    changed = _changed_buffers(whole, tokens)
    if changed:
        return Tried(f"training changes {changed[0]}, which replicas do not share")
    try:
        return Tried(writes=_is_same(_by_cache(plan, modules, tokens[:1]), logits[:1]))
    except Exception:  # likewise
        return Tried(writes=False)


def _through(
    modules: Sequence[nn.Module], tokens: Tensor, context: LayerContext | None = None
) -> Tensor:
    x = tokens.int()
    with torch.no_grad():
        for module in modules:
            takes = (context,) if context and isinstance(module, TakesContext) else ()
            x = module(x, *takes)
    return x


def _by_cache(plan: ModelPlan, modules: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    assert plan.cache is not None
    cache, positions = plan.cache.make(), torch.arange(LENGTH).unsqueeze(0)
    parts = zip(tokens.split(PASSES, dim=1), positions.split(PASSES, dim=1), strict=True)
    found = [_through(modules, part, LayerContext(at, cache)) for part, at in parts]
    return torch.cat(found, dim=1)


def _changed_buffers(whole: nn.Module, tokens: Tensor) -> list[str]:
    """Names of persistent ones that a pass changes."""
    named = whole.state_dict(keep_vars=True).items()
    before = {n: b.clone() for n, b in named if not isinstance(b, nn.Parameter)}
    whole.train()
    whole(tokens, use_cache=False).logits.sum().backward()
    after = whole.state_dict()
    return [name for name, buffer in before.items() if not torch.equal(buffer, after[name])]


def _is_same(found: Tensor, expected: Tensor) -> bool:
    difference = (found - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(torch.inf)) < TOLERANCE


# ---- adapters on experts --------------------------------------------------------------------


def check_experts_adapted(config: Mapping[str, Any]) -> None:
    """Raises `SpecError` unless adapters on the experts of a model of this canonical config are
    what they are to be."""
    smaller = shrunk_configs(config)
    if not _adapts(tuple(json.dumps(small, sort_keys=True) for small in smaller)):
        raise SpecError(
            f"[lora] target_modules: experts of model_type {config['model_type']} compute in a way "
            "that has no place for adapters here; leave them out"
        )


@functools.lru_cache(maxsize=16)
def _adapts(configs: Sequence[str]) -> bool:
    """Of the first of these canonical configs, JSON, of which layers can be built."""
    for text in configs:
        try:
            check_size(load_config(json.loads(text)))
            plan = adapter_plan(ModelSpec(kind="transformers", config=json.loads(text)), LENGTH)
            with seeded(0):
                modules = [layer.build().eval() for layer in plan.layers]
                tokens = torch.randint(plan.inputs.num_values, (SAMPLES, LENGTH))
        except Exception:  # whatever a family's code does with sizes that it never had
            continue
        try:
            return _is_adapted(plan, modules, tokens)
        except Exception:  # likewise
            return False
    return False


def _is_adapted(plan: ModelPlan, modules: Sequence[nn.Module], tokens: Tensor) -> bool:
    """Of built layers. Raises whatever the family's code raises."""
    lora = LoraSpec(r=2, lora_alpha=2, target_modules=tuple(f"experts.{name}" for name in STACKS))
    trained = {}
    with seeded(1):
        adapted = [layer.build().eval() for layer in lora_plan(plan, lora).layers]
        for layer, module in zip(plan.layers, adapted, strict=True):
            for name, p in module.named_parameters():
                if p.requires_grad:
                    trained[f"{layer.name}.{name}"] = nn.init.normal_(p.detach(), std=0.1)
    base: dict[str, Tensor] = {}
    for layer, module, other in zip(plan.layers, modules, adapted, strict=True):
        state = module.state_dict()
        other.load_state_dict(state, strict=False)
        base |= {f"{layer.name}.{name}": values for name, values in state.items()}
    found, plain = _through(adapted, tokens), _through(modules, tokens)
    whole = merge(trained, base, lora)
    for layer, module in zip(plan.layers, modules, strict=True):
        module.load_state_dict({n: whole[f"{layer.name}.{n}"] for n in module.state_dict()})
    return _is_same(found, _through(modules, tokens)) and not _is_same(found, plain)


# ---- documents of one sample ----------------------------------------------------------------


def check_documents_apart(config: Mapping[str, Any], sequence_length: int) -> bool:
    """Raises `SpecError` unless a model of this canonical config keeps documents apart in samples
    of so many tokens. Whether it does so by `LayerContext.sequence` too, beside by a mask."""
    kind, limit = config["model_type"], plain_length(config)
    if sequence_length > limit:
        raise SpecError(
            f"[data] document_mask: beyond {counted(limit, 'token')} positions of this {kind} "
            "depend on the length of the whole sample; shorten sequence_length, or take "
            "document_mask out"
        )
    apart = _apart(json.dumps(dict(config), sort_keys=True))
    if apart is None:
        raise SpecError(
            f"[data] document_mask: as far as can be told here, a model of type {kind} does not "
            "keep documents apart; take document_mask out"
        )
    return apart


def plain_length(config: Mapping[str, Any]) -> float:
    """Up to here the position of a token depends on nothing else."""
    key = "original_max_position_embeddings"
    limits = [
        table.get(key) or config.get(key) or config["max_position_embeddings"]
        for table in rope_tables(config.get("rope_parameters"))
        if table.get("rope_type", table.get("type")) in STRETCHED
    ]
    return min(limits, default=math.inf)


@functools.lru_cache(maxsize=16)
def _apart(key: str) -> bool | None:
    """As `check_documents_apart`; None where it raises."""
    for small in shrunk_configs(json.loads(key)):
        try:
            return _keeps_apart(small)
        except Exception:
            continue
    return None


def _keeps_apart(small: dict[str, Any]) -> bool | None:
    """As `_apart`. Raises whatever the family's code raises."""
    length = sum(DOCUMENTS[0])
    check_size(load_config(small))
    plan = adapter_plan(ModelSpec(kind="transformers", config=small), length)
    with seeded(0):
        modules = [layer.build().eval() for layer in plan.layers]
        tokens = torch.randint(small["vocab_size"], (len(DOCUMENTS), length), dtype=torch.int32)
    positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in DOCUMENTS])
    context = LayerContext(positions)
    by_mask = _through(modules, tokens, with_mask(context, torch.float32))
    expected = torch.cat(
        [
            torch.cat([_through(modules, part) for part in row[None].split(lengths, dim=1)], dim=1)
            for row, lengths in zip(tokens, DOCUMENTS, strict=True)
        ]
    )
    if not _is_same(expected, by_mask):
        return None
    sequence = PackedSequence(documents_of(positions))
    try:
        found = _through(modules, tokens, dataclasses.replace(context, sequence=sequence))
    except Exception:  # attention of another kind
        return False
    return _is_same(expected, found)
