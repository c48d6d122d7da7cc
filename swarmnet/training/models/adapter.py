"""Models of `transformers`, cut into layers: one adapter for every family that declares a pipeline.

A family's own `forward` stays in charge of all that lies between its layers (masks, positions,
rotary tables, caps of logits). A layer of the plan is a *shell*, an instance of the family's base
model without embedding, with one decoder layer and no last norm, which is called with the hidden
state as its input. So no family needs code here; whether a family can be cut so is tried on a
shell without layers, which must give back what it is given.

Nothing of a model is built but the layers that are asked for: shells are made with a vocabulary of
one token and without layers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnet.errors import SpecError, one_line
from swarmnet.spec import ModelSpec
from swarmnet.training.models.base import (
    CachePlan,
    LayerBuilder,
    LayerContext,
    ModelPlan,
    SharedSequence,
    TakesContext,
    TensorSpec,
)
from swarmnet.training.models.llama import LOSS_FLOPS_PER_LOGIT, count_tokens, next_token_loss
from swarmnet.training.models.model_config import load_config, model_classes
from swarmnet.training.models.routing import ROUTED_FAMILIES, RouterLosses, heard
from swarmnet.training.models.text_cache import TextCache
from swarmnet.training.torch_calls import TorchCalls

EMBEDDING, LAYERS, NORM, HEAD = "model.embed_tokens", "model.layers", "model.norm", "lm_head"
PLAN_PARTS = ("embed_tokens", "layers", "norm")
"""Of `base_model_pp_plan`."""
POSITION_TABLES = 16
PROBE_SHAPE = (1, 3)
NO_MASK, CAPPED = "swarmnet_causal", "swarmnet_capped"
CAP = "attn_logit_softcapping"
"""Of a config: what no score of attention is beyond."""
MAX_LENGTH = 1 << 30
SLIDING = "sliding_attention"
PLAIN_LAYERS = {"full_attention", SLIDING, "chunked_attention", "linear_attention"}
"""Kinds of layers that are causal without a mask."""
WINDOWS = SLIDING_WINDOW, CHUNKS = "sliding_window", "attention_chunk_size"
"""Of a config: how far attention looks back, of some layers at least."""
MAX_OUTSIDE = 1 << 24
"""Numbers that a family may keep outside embedding, layers, norm and head: tables of positions."""


class Decoder(TakesContext):
    """One decoder layer, with all that its family does around it.

    Parameters have the names that they have in the family's layer.
    """

    def __init__(
        self,
        config: Any,
        index: int,
        losses: RouterLosses = RouterLosses(),  # noqa: B008  it is immutable
    ) -> None:
        super().__init__()
        shell = _base_shell(config, (index,))
        self._cap = score_cap(config)
        self._attention = copy.deepcopy(config) if self._cap else config
        layer = _layer_class(config, index)(self._attention, index)
        # The family's layer and this module share their parts, so that whoever replaces one here
        # (a linear layer by a part of it, say) replaces it there.
        self._modules = layer._modules  # noqa: SLF001  torch has no public way to share parts
        self._parameters = layer._parameters  # noqa: SLF001  likewise
        self._buffers = layer._buffers  # noqa: SLF001  likewise
        unsaved = layer._non_persistent_buffers_set  # noqa: SLF001  likewise
        self._non_persistent_buffers_set = unsaved
        run = functools.partial(type(layer).forward, layer)
        shell.layers = [run]
        object.__setattr__(self, "_shell", shell)
        object.__setattr__(self, "_layer", layer)
        self._masked = shell.config
        self._causal = copy.deepcopy(shell.config)
        # A name without masks: attention is causal then, and nothing looks at the positions.
        self._causal._attn_implementation = NO_MASK  # noqa: SLF001  as in `model_config`
        self._window = plain_window(config)
        self._shared_window = least_window(config) if self._cap else self._window
        self._own_window = layer_window(config, index)
        self._index = index
        self._losses = losses
        self._num_chosen = getattr(config, "num_experts_per_tok", None) or 0
        self._logits: Tensor | None = None
        router = _router(config, layer)
        if router is not None:
            router[0].register_forward_hook(functools.partial(self._hear, router[1]))

    def _hear(self, index: int, _: nn.Module, __: Any, said: Any) -> None:
        self._logits = said if isinstance(said, Tensor) else said[index]

    def forward(self, x_BSD: Tensor, context: LayerContext | None = None) -> Tensor:
        shell: Any = self._shell
        positions = None if context is None else context.positions
        cache = None if context is None else context.cache
        # Layers with a window, and those that are not sdpa, make a mask of the positions.
        mask = context.mask if context and x_BSD.shape[1] <= self._window else None
        sequence = None if context is None else context.sequence
        window = 0
        if sequence is not None and self._cap and not sequence.takes_windows:
            sequence = None
        if sequence is not None and sequence.length > self._shared_window:
            if sequence.takes_windows and self._shared_window and self._own_window is not None:
                window = self._own_window
            elif sequence.length > x_BSD.shape[1]:  # no mask says what lies on other ranks
                raise RuntimeError("this model's attention cannot be shared among ranks")
            else:
                sequence = None
        is_plain = positions is None and cache is None
        if is_plain:
            positions = _positions(x_BSD.shape[1], x_BSD.device)
        # In a pass over shapes alone, a mask of numbers cannot be made; it takes little memory.
        needs_no_mask = is_plain and (x_BSD.shape[1] <= self._window or x_BSD.is_meta)
        config = self._causal if needs_no_mask or sequence is not None else self._masked
        if shell.config is not config:
            shell.config = config
        rotary = getattr(shell, "rotary_emb", None)
        if rotary is not None:
            rotary.move_to(x_BSD.device)
        if self._cap:
            name = "eager" if sequence is None else CAPPED
            if self._attention._attn_implementation != name:  # noqa: SLF001  as in `model_config`
                self._attention._attn_implementation = name  # noqa: SLF001  likewise
        by = None if sequence is None else AttendsBy(sequence, window, self._cap)
        with by or contextlib.nullcontext():
            y_BSD: Tensor = shell(
                inputs_embeds=x_BSD,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=None if cache is None else cache.of_layer(self._index),
                use_cache=cache is not None,
            ).last_hidden_state
        if cache is not None:
            cache.extend(self._index, x_BSD.shape[1])
        logits, self._logits = self._logits, None
        if context is None or context.routing is None or logits is None:
            return y_BSD
        logits_TE = logits.flatten(0, -2)
        chosen_TK = logits_TE.detach().topk(self._num_chosen, dim=-1).indices
        return heard(context.routing, self, y_BSD, logits_TE, chosen_TK, self._losses)


class AttendsBy(TorchCalls):
    """In place of torch's causal attention, which a family's code calls, that of a sequence."""

    def __init__(self, sequence: SharedSequence, window: int = 0, cap: float = 0.0) -> None:
        """`window`, `cap`: as of `SharedSequence.attend`."""
        super().__init__({F.scaled_dot_product_attention: self._attended})
        self._sequence = sequence
        self._window = window
        self._cap = cap

    def _attended(
        self,
        q_BHSE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As torch's, whose names of arguments these are."""
        size, is_plain = q_BHSE.shape[-1], is_causal or q_BHSE.shape[2] == 1
        narrower = size - v_BKSE.shape[-1]
        if attn_mask is not None or not is_plain or narrower < 0:
            raise RuntimeError("its attention is not plainly causal")
        if scale is not None and scale != size**-0.5:
            q_BHSE = q_BHSE * (scale * size**0.5)
        if narrower:  # the kernels take values as wide as keys
            v_BKSE = F.pad(v_BKSE, (0, narrower))
        q_BSHE, k_BSKE, v_BSKE = (x.transpose(1, 2) for x in (q_BHSE, k_BKSE, v_BKSE))
        about = self._window, self._cap, dropout_p
        y_BSHE = self._sequence.attend(q_BSHE, k_BSKE, v_BSKE, *about)
        return y_BSHE[..., : size - narrower].transpose(1, 2)


def _router(config: Any, layer: nn.Module) -> tuple[nn.Module, int] | None:
    """The router of a layer, and where in what it gives the logits are, as the family tells
    transformers; None where there is none, or of another kind."""
    if config.model_type not in ROUTED_FAMILIES:
        return None
    base, _ = model_classes(config)
    recorder = base._can_record_outputs["router_logits"]  # noqa: SLF001  it has no public name
    routers = (part for part in layer.modules() if isinstance(part, recorder.target_class))
    return next(((router, recorder.index) for router in routers), None)


@functools.lru_cache(maxsize=16)
def _num_routers(key: str) -> int:
    """Layers whose router has a loss."""
    config = load_config(json.loads(key))
    known: dict[Any, bool] = {}
    with torch.device("meta"):
        for i in range(config.num_hidden_layers):
            kind = layer_kind(config, i)
            if kind not in known:
                layer = _layer_class(config, i)(config, i)
                known[kind] = _router(config, layer) is not None
    return sum(known[layer_kind(config, i)] for i in range(config.num_hidden_layers))


def plain_window(config: Any) -> int:
    """How long a sequence may be so that attention without a mask is right in every layer; 0 where
    one is always needed."""
    if config._attn_implementation != "sdpa":  # noqa: SLF001  others are not causal without one
        return 0
    return least_window(config)


def least_window(config: Any) -> int:
    """The same, where attention is causal without a mask."""
    if not PLAIN_LAYERS.issuperset(getattr(config, "layer_types", None) or ()):
        return 0  # layers that choose what they look at need to be told what they may see
    found = [getattr(config, name, None) for name in WINDOWS]
    return min((w for w in found if w), default=MAX_LENGTH)


def score_cap(config: Any) -> float:
    """Of scores of attention, where a family's own code makes them for it; 0 for none."""
    is_own = config._attn_implementation != "sdpa"  # noqa: SLF001  as in `model_config`
    cap = float(getattr(config, CAP, None) or 0.0) if is_own else 0.0
    if cap:
        from transformers import AttentionInterface

        AttentionInterface.register(CAPPED, _capped_elsewhere)
    return cap


def _capped_elsewhere(module: Any, *args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
    """In place of a family's own attention, while a sequence attends, which caps scores: torch's
    attention is called, so that `AttendsBy` takes the call."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap != getattr(module.config, CAP):
        raise RuntimeError("its attention has another cap than its config")
    return sdpa_attention_forward(module, *args, **kwargs)


def layer_window(config: Any, index: int) -> int | None:
    """Positions that attention of a layer looks back on, its own included; 0 for all. None where
    it looks at others than the last ones."""
    if getattr(config, CHUNKS, None):
        return None
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds else SLIDING
    if kind not in (SLIDING, "full_attention"):
        return None
    return (getattr(config, SLIDING_WINDOW, None) or 0) if kind == SLIDING else 0


class Head(nn.Module):
    """The output matrix, with what the family does to logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        shell: Any = causal_shell(config)
        head = shell.lm_head
        _resize(head, config.vocab_size)
        self._parameters = head._parameters  # noqa: SLF001  as in `Decoder`
        self._buffers = head._buffers  # noqa: SLF001  likewise
        unsaved = head._non_persistent_buffers_set  # noqa: SLF001  likewise
        self._non_persistent_buffers_set = unsaved
        shell.model = _Given()
        object.__setattr__(self, "_shell", shell)

    def forward(self, x_BSD: Tensor) -> Tensor:
        shell: Any = self._shell
        logits: Tensor = shell(inputs_embeds=x_BSD).logits
        return logits


class _Given(nn.Module):
    """In place of a base model: gives back the hidden state that it is given."""

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class _Rotary(nn.Module):
    """A family's rotary tables, which are made anew only for other positions. They stay in fp32
    whatever the precision of the passes, and are no part of the layer that uses them."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        # Layers may be built without memory and get it later (`ranks.fsdp`): the tables are real.
        with torch.device("cpu"):
            self.inner = make()
        with torch.device("meta"):
            self._of_shapes = make()
        self._device: torch.device | None = None
        self._known: dict[Any, tuple[Tensor, Any]] = {}

    def move_to(self, device: torch.device) -> None:
        if device != self._device and device.type != "meta":
            self.inner.to(device)
            self._device = device
            self._known.clear()

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_meta:
            return self._of_shapes(x, position_ids, *args, **kwargs)
        if torch.compiler.is_compiling():
            return self.inner(x, position_ids, *args, **kwargs)
        key = (id(position_ids), x.dtype, args, tuple(kwargs.items()))
        known = self._known.get(key)
        if known is not None and known[0] is position_ids:
            return known[1]
        tables = self.inner(x, position_ids, *args, **kwargs)
        if len(self._known) >= POSITION_TABLES:
            self._known.clear()
        self._known[key] = position_ids, tables
        return tables


def adapter_plan(spec: ModelSpec, sequence_length: int) -> ModelPlan:
    """The plan of a model of `transformers`. Inputs and targets are int32 tokens (B, S); outputs
    are logits (B, S, V).

    Raises:
        SpecError: `transformers` is missing, or the model is none that can be cut.
    """
    config = load_config(spec.config)
    check_cuttable(config)
    num_routers, coefficients = _num_routers(_key(config)), spec.router_losses
    if any(coefficients) and not num_routers:
        name = "router_aux_loss_coef" if coefficients[0] else "router_z_loss_coef"
        raise SpecError(
            f"[model] {name}: this model ({config.model_type}) has no routers that can be trained "
            f"so; those of {', '.join(ROUTED_FAMILIES)} can; remove it"
        )
    losses = RouterLosses.of(*coefficients, num_routers)
    tokens = TensorSpec("int32", (sequence_length,), num_values=config.vocab_size)
    return ModelPlan(
        layers=_layers(config, sequence_length, losses, has_weights=bool(spec.weights)),
        inputs=tokens,
        targets=tokens,
        loss=next_token_loss,
        count=count_tokens,
        is_sequence=True,
        is_random=_draws(config),
        takes_context=True,
        takes_sequence=not _draws(config),
        takes_ignored=True,
        cache=CachePlan(
            functools.partial(_cache, _key(config)),
            _cached_numbers(config),
            getattr(config, "max_position_embeddings", None) or 0,
            _state_numbers(config),
        ),
        exact_buffers=_exact_buffers(config),
        routes=num_routers > 0,
        routers_learn=any(coefficients),
    )


def _cache(key: str) -> TextCache:
    """What the family's own model makes where it is given no cache."""
    config = load_config(json.loads(key))
    shell = _base_shell(config, ())
    shell.config, shell.layers = config, []
    x = torch.zeros((1, 1, config.hidden_size))
    with torch.no_grad():
        made = shell(inputs_embeds=x, position_ids=_positions(1, x.device), use_cache=True)
    return TextCache(made.past_key_values)


def _state_numbers(config: Any) -> int:
    """That a layer of linear attention keeps of a text, however long."""
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return 0
    heads = getattr(config, "linear_num_value_heads", None) or config.num_attention_heads
    size = _head_size(config)
    sizes = (getattr(config, f"linear_{n}_head_dim", None) or size for n in ("key", "value"))
    return int(heads * math.prod(sizes))


def _exact_buffers(config: Any) -> tuple[str, ...]:
    """What the family's own rule keeps in fp32 also where a model is loaded in less."""
    _, causal = model_classes(config)
    names = (causal._keep_in_fp32_modules_strict, causal._keep_in_fp32_modules)  # noqa: SLF001  it has no public name
    return tuple(sorted({name.rpartition(".")[2] for some in names for name in some or ()}))


def _cached_numbers(config: Any) -> int:
    """Keys and values that a layer keeps of a token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = max(_head_size(config), getattr(config, "qk_head_dim", None) or 0)
    return 2 * heads * size


def _layers(
    config: Any,
    length: int,
    losses: RouterLosses = RouterLosses(),  # noqa: B008  it is immutable
    *,
    has_weights: bool,
) -> tuple[LayerBuilder, ...]:
    width, vocabulary = config.hidden_size, config.vocab_size
    hidden = (length, width)
    counts = _costs(config, length)

    def building(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return functools.partial(_build, config, make, initializes=not has_weights)

    tied = {"weight": f"{EMBEDDING}.weight"} if config.tie_word_embeddings else {}
    return (
        LayerBuilder(
            EMBEDDING, building(lambda: _embedding(config)), float(length * width), hidden
        ),
        *(
            LayerBuilder(
                f"{LAYERS}.{i}",
                building(functools.partial(Decoder, config, i, losses)),
                counts[i],
                hidden,
                is_block=True,
            )
            for i in range(config.num_hidden_layers)
        ),
        LayerBuilder(NORM, building(lambda: _norm(config)), float(4 * length * width), hidden),
        LayerBuilder(
            HEAD,
            building(lambda: Head(config)),
            float(length * (2 * width + LOSS_FLOPS_PER_LOGIT) * vocabulary),
            (length, vocabulary),
            tied=tied,
        ),
    )


def _build(config: Any, make: Callable[[], nn.Module], *, initializes: bool) -> nn.Module:
    """A layer with the family's initial weights; with zeros where others come anyway."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        module = make()
    parameters = list(module.parameters())
    if not parameters or parameters[0].is_meta:
        return module
    with torch.no_grad():
        owner = _base_shell(config, ())
        for part in module.modules():
            # Buffers have values also where those of the parameters come.
            if initializes or any(True for _ in part.buffers(recurse=False)):
                owner._init_weights(part)  # noqa: SLF001  what every family overrides
        if not initializes:
            for p in parameters:
                p.zero_()
        elif isinstance(module, Head):
            module.get_parameter("weight").normal_(0.0, config.initializer_range)
    return module


def check_cuttable(config: Any) -> None:
    """Raises `SpecError` unless the model is embedding, decoder layers, norm and head, one after
    the other, its family does nothing else to the hidden state, and nothing else belongs to it."""
    _is_cuttable(_key(config))


@functools.lru_cache(maxsize=16)
def _is_cuttable(key: str) -> None:
    config = load_config(json.loads(key))
    kind = config.model_type
    plan = getattr(config, "base_model_pp_plan", None) or {}
    if not all(part in plan for part in PLAN_PARTS):
        raise SpecError(
            f"[model] model_type {kind} is not supported: transformers declares no pipeline of "
            "embedding, layers and norm for it"
        )
    try:
        with torch.device("meta"):
            outside = _base_shell(config, ())
        if sum(t.numel() for t in (*outside.parameters(), *outside.buffers())) > MAX_OUTSIDE:
            raise SpecError(f"[model] model_type {kind}: too much of it lies outside its layers")
        if not _gives_back(config):
            raise SpecError(
                f"[model] model_type {kind} is not supported: it changes the hidden state outside "
                "its layers"
            )
        _check_tensors(config)
    except SpecError:
        raise
    except Exception as error:  # whatever a family's code does there
        text = one_line(error)
        raise SpecError(f"[model] model_type {kind} cannot be cut into layers: {text}") from None


def _gives_back(config: Any) -> bool:
    """Without layers, the family's model gives back what it is given."""
    shell = _base_shell(config, ())
    shell.layers = []
    x = torch.randn((*PROBE_SHAPE, config.hidden_size), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.equal(shell(inputs_embeds=x, use_cache=False).last_hidden_state, x)


def _check_tensors(config: Any) -> None:
    """Raises `SpecError` unless the layers have all tensors of the whole model, and no others."""
    from transformers.initialization import no_init_weights

    _, causal = model_classes(config)
    with torch.device("meta"), no_init_weights():
        theirs = {n: t.shape for n, t in causal(config).state_dict().items()}
        ours = {}
        for layer in _layers(config, 1, has_weights=True):
            for name, tensor in layer.build().state_dict(keep_vars=True).items():
                ours[f"{layer.name}.{name}"] = tensor.shape
                if not tensor.is_floating_point():
                    raise SpecError(
                        f"[model] model_type {config.model_type} is not supported: "
                        f"{layer.name}.{name} has whole numbers"
                    )
    if ours != theirs:
        names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        raise SpecError(
            f"[model] model_type {config.model_type} is not supported: it has another {names[0]} "
            "as a whole than in layers"
        )


def _key(config: Any) -> str:
    return json.dumps(config.canonical_values, sort_keys=True)


def _small(config: Any, indices: tuple[int, ...]) -> Any:
    """The config of a model of these layers only, with a vocabulary of one token."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = len(indices)
    small.vocab_size = 1
    small.pad_token_id = None
    if getattr(small, "layer_types", None):
        # At least one, for families that make a table for each kind of layer.
        kinds = [config.layer_types[i] for i in indices or range(1)]
        small.layer_types = kinds
    return small


def causal_shell(config: Any) -> Any:
    """The family's language model without layers, with a vocabulary of one token."""
    _, causal = model_classes(config)
    return causal(_small(config, ()))


def _base_shell(config: Any, indices: tuple[int, ...]) -> Any:
    """A base model around nothing: no embedding, no norm, and layers yet to be set."""
    base, _ = model_classes(config)
    small = _small(config, indices)
    built = copy.deepcopy(small)
    built.num_hidden_layers = 0
    shell = base(built)
    shell.config = small
    del shell.embed_tokens, shell.layers
    shell.norm = nn.Identity()
    if hasattr(shell, "rotary_emb"):
        make: Any = type(shell.rotary_emb)
        shell.rotary_emb = _rotary(_key(config), make)
    return shell


@functools.lru_cache(maxsize=16)
def _rotary(key: str, make: Any) -> _Rotary:
    """One for all layers of a model."""
    return _Rotary(lambda: make(load_config(json.loads(key))))


@functools.lru_cache(maxsize=64)
def _class_of_layer(key: str, index: int) -> type[nn.Module]:
    config = load_config(json.loads(key))
    base, _ = model_classes(config)
    one = _small(config, (index,))
    with torch.device("meta"):
        return type(base(one).layers[0])


def _layer_class(config: Any, index: int) -> type[nn.Module]:
    """Layers of one type have one class."""
    types = getattr(config, "layer_types", None)
    return _class_of_layer(_key(config), types.index(types[index]) if types else 0)


def _embedding(config: Any) -> nn.Module:
    base, _ = model_classes(config)
    embedding = base(_small_without_layers(config)).embed_tokens
    _resize(embedding, config.vocab_size)
    embedding.num_embeddings = config.vocab_size
    embedding.padding_idx = config.pad_token_id
    return embedding


def _norm(config: Any) -> nn.Module:
    base, _ = model_classes(config)
    return base(_small_without_layers(config)).norm


def _small_without_layers(config: Any) -> Any:
    small = _small(config, ())
    small.num_hidden_layers = 0
    return small


def _resize(module: nn.Module, vocabulary: int) -> None:
    """Gives a module of one row as many as the vocabulary has."""
    for name, p in list(module.named_parameters(recurse=False)):
        values = torch.empty((vocabulary, *p.shape[1:]), dtype=p.dtype, device=p.device)
        setattr(module, name, nn.Parameter(values))


@functools.lru_cache(maxsize=POSITION_TABLES)
def _positions(length: int, device: torch.device) -> Tensor:
    """0, 1, ... of shape (1, length): the same tensor each time."""
    return torch.arange(length, device=device).unsqueeze(0)


@functools.lru_cache(maxsize=16)
def _numbers_of_layers(key: str) -> tuple[tuple[int, int], ...]:
    """Of each layer, its parameters, and those that a token meets."""
    config = load_config(json.loads(key))
    known: dict[Any, tuple[int, int]] = {}
    found = []
    with torch.device("meta"):
        for i in range(config.num_hidden_layers):
            kind = layer_kind(config, i)
            if kind not in known:
                known[kind] = _count(config, _layer_class(config, i)(config, i))
            found.append(known[kind])
    return tuple(found)


def layer_kind(config: Any, index: int) -> Any:
    """Layers of one kind have the same parameters."""
    has_experts = getattr(config, "decoder_sparse_step", None)
    first_dense = getattr(config, "first_k_dense_replace", None)
    dense_only = tuple(getattr(config, "mlp_only_layers", None) or ())
    by_layer = (v for _, v in sorted(config.canonical_values.items()) if isinstance(v, list))
    return (
        *(str(values[index]) for values in by_layer if len(values) == config.num_hidden_layers),
        has_experts and (index + 1) % has_experts == 0,
        first_dense and index < first_dense,
        index in dense_only,
    )


def _count(config: Any, layer: nn.Module) -> tuple[int, int]:
    total = met = 0
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    for p in layer.parameters():
        total += p.numel()
        met += p.numel() * chosen // p.shape[0] if p.ndim == 3 else p.numel()
    return total, met


def _costs(config: Any, length: int) -> list[float]:
    """FLOPs of each decoder layer's forward pass over one sample."""
    attention = 2 * length * config.num_attention_heads * _head_size(config)
    return [float(length * (2 * met + attention)) for _, met in _numbers_of_layers(_key(config))]


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _draws(config: Any) -> bool:
    """Whether layers draw random numbers."""
    names = [n for n in vars(config) if n.endswith(("dropout", "pdrop", "jitter_noise"))]
    return any(getattr(config, n) for n in names)
