"""How a model is cut for tensor parallelism: a *style* for each of its matrices, which says both
what a rank holds of it and what the ranks say to each other around it.

Models of transformers bring a plan of their own (`base_model_tp_plan`), in its words. The built-in
Llama has one here. Embedding and output matrix are cut by vocabulary whatever a plan says: so they
can be one matrix, and in training no rank has a whole row of logits. Adapters of a cut matrix are
cut with it: the side that touches what the ranks share is whole on each of them.

The model code knows nothing of all this. The collectives hang on its modules as hooks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet.errors import SpecError
from swarmnet.spec import ModelSpec
from swarmnet.training.models.base import (
    LayerBuilder,
    ParameterRange,
)
from swarmnet.training.models.experts import adapted_stack
from swarmnet.training.models.lora import A, B, LoraLinear
from swarmnet.training.ranks.cuts import Cut, Cutting, part_of
from swarmnet.training.ranks.part_dropout import PartDropout
from swarmnet.training.ranks.tensor_parallel import Region, gather_last, leave, split_last

MAX_RANKS = 64
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

VOCABULARY, INNER_ROWS, INNER_COLUMNS, KEY_VALUE, BLOCK, MIXTURE, OF_MIXTURE = (
    "vocabulary",
    "rows",
    "columns",
    "kv",
    "in",
    "mixture",
    "columns of a mixture",
)
"""Styles that no plan of transformers has: of embedding and output matrix, and of the built-in
Llama, which enters a block once for all of its matrices, and leaves one of experts once."""
ROWS = {"colwise", "colwise_gather_output", "packed_colwise", VOCABULARY, INNER_ROWS}
"""A rank has some of the output features."""
COLUMNS = {"rowwise", "rowwise_split_input", INNER_COLUMNS, OF_MIXTURE}
"""A rank has some of the input features."""
PARTIAL = "replicated_with_grad_allreduce"
EXPERTS = "moe_tp_experts"
SUPPORTED = ROWS | COLUMNS | {PARTIAL, EXPERTS, KEY_VALUE, BLOCK}

LLAMA = {
    EMBEDDING: VOCABULARY,
    HEAD: VOCABULARY,
    "model.layers.*.self_attn": BLOCK,
    "model.layers.*.self_attn.q_proj": INNER_ROWS,
    "model.layers.*.self_attn.k_proj": KEY_VALUE,
    "model.layers.*.self_attn.v_proj": KEY_VALUE,
    "model.layers.*.self_attn.o_proj": INNER_COLUMNS,
    "model.layers.*.mlp": BLOCK,
    "model.layers.*.mlp.gate_proj": INNER_ROWS,
    "model.layers.*.mlp.up_proj": INNER_ROWS,
    "model.layers.*.mlp.down_proj": INNER_COLUMNS,
}
LLAMA_OF_EXPERTS = LLAMA | {
    "model.layers.*.mlp": MIXTURE,
    "model.layers.*.mlp.gate": PARTIAL,
    "model.layers.*.mlp.shared_expert_gate": PARTIAL,
    **{
        f"model.layers.*.mlp.{expert}.{name}": style
        for expert in ("experts.*", "shared_expert")
        for name, style in (
            ("gate_proj", INNER_ROWS),
            ("up_proj", INNER_ROWS),
            ("down_proj", OF_MIXTURE),
        )
    },
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts.down_proj": OF_MIXTURE,
}
"""What comes out of experts, and of the gates beside them, is a sum over ranks, so that gradients
of gates are too. Of matrices of all experts there are adapters alone."""


@dataclass(frozen=True, slots=True)
class CutPlan:
    """How a model is cut."""

    styles: Mapping[str, str]
    """By the name of a module or parameter, `*` for the number of a layer."""
    vocab_size: int
    num_heads: int
    """0, as the next: heads are not cut."""
    num_kv_heads: int
    intermediate_size: int
    shares_heads: bool
    """Some ranks may hold the same key/value head, each for queries of its own."""

    def style(self, name: str) -> str:
        """Of a module or parameter; empty where it is whole on each rank."""
        return self.styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")

    def cut(
        self,
        name: str,
        shape: Sequence[int],
        rank: int,
        num_ranks: int,
        *,
        sequence_parallel: bool = False,
    ) -> Cut:
        """As `Cutting.cut`."""
        path = name.rpartition(".")[0]
        within, _, part = path.rpartition(".")
        adapter = part if part in (A, B) else ""
        style = self.style(name) or self.style(within if adapter else path)
        if (of_experts := adapted_stack(name)) is not None:
            style = self.style(of_experts[0])
        if style in ROWS and adapter != A:
            dim, packs = max(len(shape) - 2, 0), 2 if style == "packed_colwise" else 1
            return Cut(dim, *part_of(shape[dim] // packs, rank, num_ranks), "own", packs)
        if style in COLUMNS and adapter != B:
            if len(shape) == 1:  # a bias is added once
                return Cut(0, 0, shape[0], "own") if rank == 0 else Cut(0, 0, 0, "absent")
            return Cut(len(shape) - 1, *part_of(shape[-1], rank, num_ranks), "own")
        if style == KEY_VALUE and adapter != A:
            return _cut_key_value(shape, self.num_kv_heads, rank, num_ranks)
        is_partial = bool(adapter and style) or style == PARTIAL or sequence_parallel
        return Cut(0, 0, shape[0], "partial" if is_partial else "same")

    def fits(self, num_ranks: int) -> bool:
        """Heads are not cut: each rank has as many query heads, of whole groups or of one group."""
        kv_heads = self.num_kv_heads
        return (
            self.num_heads % num_ranks == 0
            and (kv_heads % num_ranks == 0 or (self.shares_heads and num_ranks % kv_heads == 0))
            and min(self.vocab_size, self.intermediate_size) >= num_ranks
        )

    def parallelize(
        self,
        layers: Sequence[LayerBuilder],
        modules: Sequence[nn.Module],
        region: Region,
        *,
        is_compiled: bool = False,
    ) -> None:
        """Hangs the collectives on some layers. Their parameters are cut elsewhere.

        Where layers are compiled, collectives are not: a graph ends before each, so that all ranks
        make them in the order of the code, whatever a compiler does with its graphs."""
        mark = mark_of(is_compiled)
        for layer, module in zip(layers, modules, strict=True):
            for name, part in parts_of(layer, module):
                _hang(part, self.style(name), name, self.vocab_size, region, mark)


def parts_of(layer: LayerBuilder, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Full names of a layer's modules, and the modules."""
    return [(f"{layer.name}.{n}" if n else layer.name, m) for n, m in module.named_modules()]


def _cut_key_value(shape: Sequence[int], num_heads: int, rank: int, num_ranks: int) -> Cut:
    """With fewer heads than ranks, some ranks hold the same head, each for its own queries."""
    if num_heads >= num_ranks:
        return Cut(0, *part_of(shape[0], rank, num_ranks), "own")
    head = rank * num_heads // num_ranks
    size = shape[0] // num_heads
    return Cut(0, head * size, (head + 1) * size, "partial")


# ---- hooks ----------------------------------------------------------------------------------

Mark = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a hook one that the compiler leaves as it is."""


def mark_of(is_compiled: bool) -> Mark:
    """For hooks of layers that are compiled, or not."""
    return torch.compiler.disable if is_compiled else lambda hook: hook


def _hang(module: Any, style: str, name: str, vocab_size: int, region: Region, mark: Mark) -> None:
    def before(way: Callable[[Tensor], Tensor]) -> None:
        module.register_forward_pre_hook(mark(lambda _, args: (way(args[0]), *args[1:])))

    def after(way: Callable[[Tensor], Tensor]) -> None:
        module.register_forward_hook(mark(lambda _, __, output: way(output)))

    if style == VOCABULARY and name == EMBEDDING:
        _look_up(module, vocab_size, region, mark)
    elif style == VOCABULARY or style in ("colwise", "packed_colwise", BLOCK):
        before(region.enter)
    elif style == "colwise_gather_output":
        size = module.out_features
        before(region.enter)
        after(lambda y: gather_last(region, size, y))
    elif style in ("rowwise", INNER_COLUMNS):
        _drop_of_part(module, region)
        after(lambda y: leave(region, y))
    elif style == "rowwise_split_input":
        _drop_of_part(module, region)
        before(lambda x: split_last(region, x))
        after(lambda y: leave(region, y))
    elif style == OF_MIXTURE:
        _drop_of_part(module, region)
    elif style == MIXTURE:
        module.losses = module.losses.part(region.num_ranks)
        before(region.enter)
        after(lambda y: leave(region, y))
    elif style == EXPERTS:
        module.register_forward_pre_hook(mark(lambda _, args: _enter_experts(region, args)))
        after(lambda y: leave(region, y))


def _drop_of_part(module: nn.Module, region: Region) -> None:
    """An adapter's inputs are cut: dropout leaves those out that it leaves out of the whole."""
    if isinstance(module, LoraLinear) and isinstance(module.dropout, nn.Dropout):
        size = module.in_features
        start, _ = part_of(size, region.rank, region.num_ranks)
        module.dropout = PartDropout(module.dropout.p, -1, lambda _: (size, start))


def _enter_experts(region: Region, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hidden states and the weights of their experts are used by each rank for its part."""
    states, chosen, weights, *rest = args
    return (region.enter(states), chosen, region.enter(weights), *rest)


def _look_up(module: Any, vocab_size: int, region: Region, mark: Mark) -> None:
    """Tokens of other ranks are looked up as one of this rank's and give zeros."""
    start, stop = part_of(vocab_size, region.rank, region.num_ranks)
    padding = getattr(module, "padding_idx", None)
    if padding is not None:  # its row gets no gradient
        module.padding_idx = padding - start if start <= padding < stop else None
    elsewhere: list[Tensor] = []

    def look_up(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        local = args[0] - start
        mask = (local < 0) | (local >= stop - start)
        elsewhere[:] = [mask]
        return (local.masked_fill(mask, 0),)

    def add_up(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return leave(region, output.masked_fill(elsewhere.pop().unsqueeze(-1), 0.0))

    module.register_forward_pre_hook(mark(look_up))
    module.register_forward_hook(mark(add_up))


# ---- which models ---------------------------------------------------------------------------


def cut_plan(model: ModelSpec) -> CutPlan:
    """Of a model that ranks can share. Raises `SpecError` where there is none."""
    if model.kind == "llama":
        inner = [model.intermediate_size]
        if model.num_experts:
            inner = [model.expert_size, model.shared_expert_intermediate_size]
        return CutPlan(
            LLAMA_OF_EXPERTS if model.num_experts else LLAMA,
            model.vocab_size,
            model.num_attention_heads,
            model.num_key_value_heads,
            min(size for size in inner if size),
            shares_heads=True,
        )
    if model.kind != "transformers":
        raise SpecError("nothing says how a model of one's own is cut by width")
    return _family_plan(json.dumps(dict(model.config), sort_keys=True))


@functools.lru_cache(maxsize=16)
def _family_plan(config_text: str) -> CutPlan:
    from swarmnet.training.models.model_config import load_config

    config = load_config(json.loads(config_text))
    theirs = getattr(config, "base_model_tp_plan", None)
    if not theirs:
        raise SpecError(
            f"transformers declares no tensor parallelism for model_type {config.model_type}"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not any(".self_attn." in name and style in ROWS for name, style in theirs.items()):
        heads = kv_heads = 0  # attention is whole on each rank
    return CutPlan(
        {f"model.{name}": style for name, style in theirs.items()}
        | {EMBEDDING: VOCABULARY, HEAD: VOCABULARY},
        config.vocab_size,
        heads,
        kv_heads,
        getattr(config, "intermediate_size", None) or config.hidden_size,
        shares_heads=False,
    )


def range_cuts(
    plan: Cutting,
    ranges: Sequence[ParameterRange],
    rank: int,
    num_ranks: int,
    *,
    sequence_parallel: bool = False,
) -> tuple[Cut, ...]:
    """What a rank holds of each parameter."""
    return tuple(
        plan.cut(r.name, r.shape, rank, num_ranks, sequence_parallel=sequence_parallel)
        for r in ranges
    )
