"""A Llama whose boundaries are narrow (Ramasinghe et al., 2025, arXiv 2506.01260, in its form with
fewer parameters).

What the embedding and every layer but the last add to the residual stream lies in one subspace of K
dimensions, around a fixed embedding of each token. So K coordinates say all that a layer's output
is, beside the tokens: these cross the boundaries between stages, and nothing else does.

The subspace is that of the first K unit vectors. So there is no product with a basis, and all
machines have the same bits. The fixed embedding is a function of a seed, the token and the column:
a hash of 32 bits, as a number in fp32, the same bits everywhere. It has no parameters.

Shapes: B samples, S positions, D width, K dimensions of the subspace, V tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnet.spec import ModelSpec
from swarmnet.training.models.base import LayerContext, ModelPlan, TakesContext
from swarmnet.training.models.llama import (
    Attention,
    DecoderLayer,
    Embedding,
    FeedForward,
    Linear,
    decoder_flops,
    llama_plan,
    norm,
)

EMBEDDING = "model.embed_tokens.weight"
FOLDED = tuple(
    f".{name}{of}.weight"
    for name in ("self_attn.o_proj", "mlp.down_proj")
    for of in ("", ".lora_B")
)
WHOLE_END = 3
"""Layers that give the whole width, or take it: they are always one stage."""
TABLE_BYTES = 64 << 20
"""A table of the fixed embedding up to this size is kept; rows of a larger one are made for each
pass."""
TABLES = 2
ROWS_AT_ONCE = 1 << 12
"""Whole numbers of eight bytes are made on the way."""
MASK = 0xFFFFFFFF
UNIFORM_BITS = 24
"""Whole numbers of so many bits are exact in fp32."""


def fixed_rows(tokens: Tensor, width: int, seed: int, deviation: float) -> Tensor:
    """The fixed embedding of tokens, fp32 (*shape, width): numbers that are evenly distributed
    around 0 with this standard deviation. Hashes of (seed, token, column), by the finalizer of
    MurmurHash3 (Appleby, 2011) twice."""
    flat = tokens.flatten().long()
    rows = torch.empty(len(flat), width, device=tokens.device)
    columns_D = torch.arange(width, device=tokens.device)
    # |x| below a has the deviation a / sqrt(3).
    scale = float(np.float32(deviation * math.sqrt(3) / (1 << (UNIFORM_BITS - 1))))
    for start in range(0, len(flat), ROWS_AT_ONCE):
        part = flat[start : start + ROWS_AT_ONCE]
        of_token = _mixed((part ^ (seed & MASK)) & MASK)
        bits = _mixed(_mixed((of_token ^ (seed >> 32)).unsqueeze(1) + columns_D & MASK))
        whole = (bits >> (32 - UNIFORM_BITS)) - (1 << (UNIFORM_BITS - 1))
        rows[start : start + len(part)] = whole.float() * scale
    return rows.view(*tokens.shape, width)


def _mixed(h: Tensor) -> Tensor:
    """Of whole numbers of 32 bits in int64, where products wrap around; the low bits stay."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


@functools.lru_cache(maxsize=TABLES)
def _table(
    vocab_size: int, width: int, seed: int, deviation: float, device: torch.device
) -> Tensor:
    return fixed_rows(torch.arange(vocab_size), width, seed, deviation).to(device)


def has_table(model: ModelSpec) -> bool:
    """The fixed embedding of all tokens is kept."""
    return bool(model.subspace) and 4 * model.vocab_size * model.hidden_size <= TABLE_BYTES


class FixedEmbedding:
    """The fixed part of the embedding of a model."""

    def __init__(self, model: ModelSpec) -> None:
        self._vocab_size = model.vocab_size
        self._about = model.hidden_size, model.subspace_seed, model.initializer_range
        self._has_table = has_table(model)

    def __call__(self, tokens_BS: Tensor, dtype: torch.dtype) -> Tensor:
        """Of tokens, (B, S, D) on their device."""
        if not self._has_table:
            return fixed_rows(tokens_BS, *self._about).to(dtype)
        table = _table(self._vocab_size, *self._about, tokens_BS.device)
        return F.embedding(tokens_BS, table).to(dtype)


def lifted(z_BSK: Tensor, fixed_BSD: Tensor) -> Tensor:
    """The residual stream, (B, S, D), of its coordinates."""
    k = z_BSK.shape[-1]
    return torch.cat((fixed_BSD[..., :k] + z_BSK, fixed_BSD[..., k:]), dim=-1)


def _fixed(context: LayerContext | None) -> Tensor:
    assert context is not None
    assert context.fixed is not None
    return context.fixed


class SubspaceLayer(TakesContext):
    """A decoder layer from coordinates to coordinates (B, S, K)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.self_attn.o_proj = Linear(spec.hidden_size, spec.subspace)
        self.mlp = FeedForward(spec)
        self.mlp.down_proj = Linear(spec.intermediate_size, spec.subspace)
        self.input_layernorm = norm(spec)
        self.post_attention_layernorm = norm(spec)

    def forward(self, z_BSK: Tensor, context: LayerContext | None = None) -> Tensor:
        fixed_BSD = _fixed(context)
        x_BSD = self.input_layernorm(lifted(z_BSK, fixed_BSD))
        z_BSK = z_BSK + self.self_attn(x_BSD, context)
        x_BSD = self.post_attention_layernorm(lifted(z_BSK, fixed_BSD))
        return z_BSK + self.mlp(x_BSD)


class LeavesSubspace(DecoderLayer):
    """The last decoder layer: from coordinates to the whole width."""

    def forward(self, z_BSK: Tensor, context: LayerContext | None = None) -> Tensor:
        return super().forward(lifted(z_BSK, _fixed(context)), context)


def subspace_plan(spec: ModelSpec, sequence_length: int) -> ModelPlan:
    """As `llama_plan`, of a model with `subspace`."""
    length, k, last = sequence_length, spec.subspace, spec.num_hidden_layers - 1
    whole = llama_plan(spec, sequence_length)
    inner = decoder_flops(spec, length, k)
    embedding, *decoders, norm_, head = whole.layers
    layers = [
        replace(
            embedding,
            build=lambda: Embedding(spec.vocab_size, k),
            cost=length * k,
            output_shape=(length, k),
        ),
        *(
            replace(layer, build=lambda: SubspaceLayer(spec), cost=inner, output_shape=(length, k))
            for layer in decoders[:last]
        ),
        replace(decoders[last], build=lambda: LeavesSubspace(spec)),
        norm_,
        head,
    ]
    return replace(whole, layers=tuple(layers), fixed=FixedEmbedding(spec), whole_end=WHOLE_END)


def folded(model: ModelSpec, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Its parameters as those of an ordinary Llama, fp32: the fixed embedding is added to the
    coordinates of each token, and matrices that give coordinates get rows of zeros. Likewise those
    of adapters."""
    width, k = model.hidden_size, model.subspace
    found = dict(named)
    for name, values in named.items():
        if name == EMBEDDING:
            about = model.subspace_seed, model.initializer_range
            whole = fixed_rows(torch.arange(model.vocab_size), width, *about)
            whole[:, :k] += values.float()
            found[name] = whole
        elif name.endswith(FOLDED) and values.shape[0] == k:
            found[name] = F.pad(values, (0, 0, 0, width - k))
    return found
