"""Llama (Touvron et al., 2023), number for number as Hugging Face's `LlamaForCausalLM`; with
`num_experts`, as its Mixtral or Qwen2-MoE (`experts`).

RMSNorm before attention and feed-forward, rotary positions in the `rotate_half` form, SwiGLU,
grouped query heads, no biases, embeddings not tied. Parameters carry Hugging Face's names.

Shapes: B samples, S positions, D width, H query heads, K key/value heads, E head size, V tokens.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnet.batch import IGNORED
from swarmnet.spec import ModelSpec
from swarmnet.training.models.base import (
    CachePlan,
    LayerBuilder,
    LayerContext,
    ModelPlan,
    TakesContext,
    TensorSpec,
)
from swarmnet.training.models.experts import Experts

ROTARY_TABLES = 16
"""Tables of cosines and sines kept, one a sequence length."""
ROTARY_STEP = 256
"""Beside a cache lengths grow by one: their tables come in multiples of this."""
LOSS_FLOPS_PER_LOGIT = 10
"""An estimate: maximum, exponential, sum, logarithm and their gradients."""


class Linear(nn.Linear):
    """Without bias, and without torch's own initialisation: `initialize` overwrites it anyway."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """Without torch's own initialisation."""

    def reset_parameters(self) -> None:
        pass


class KeyValues:
    """Keys and values of one text, by layer."""

    def __init__(self) -> None:
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def num_tokens(self, layer: nn.Module) -> int:
        """That a layer has keys and values of."""
        kept = self._kept.get(layer)
        return 0 if kept is None else kept[0].shape[1]

    def extend(self, layer: nn.Module, k_BSKE: Tensor, v_BSKE: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of further tokens; returns those of all."""
        kept = self._kept.get(layer)
        if kept is not None:
            k_BSKE = torch.cat((kept[0], k_BSKE), dim=1)
            v_BSKE = torch.cat((kept[1], v_BSKE), dim=1)
        self._kept[layer] = k_BSKE, v_BSKE
        return k_BSKE, v_BSKE


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_size = spec.head_size
        self.rope_theta = spec.rope_theta
        self.is_grouped = spec.num_key_value_heads != spec.num_attention_heads
        kv_width = spec.num_key_value_heads * spec.head_size
        self.q_proj = Linear(spec.hidden_size, spec.hidden_size)
        self.k_proj = Linear(spec.hidden_size, kv_width)
        self.v_proj = Linear(spec.hidden_size, kv_width)
        self.o_proj = Linear(spec.hidden_size, spec.hidden_size)

    def forward(self, x_BSD: Tensor, context: LayerContext | None = None) -> Tensor:
        batch, length, _ = x_BSD.shape
        heads = (batch, length, -1, self.head_size)
        cache: KeyValues | None = None if context is None else context.cache
        sequence = None if context is None else context.sequence
        before, mask = 0, None
        if cache is not None:
            before = cache.num_tokens(self)
            cos, sin = self._growing_tables(before, length, x_BSD.device)
            mask = _mask(before, length, x_BSD.device) if before and length > 1 else None
        elif context is None or context.positions is None:
            cos, sin = rotary_tables(length, self.head_size, self.rope_theta, x_BSD.device)
        else:
            mask = context.mask
            # Of a text, lengths grow by one: as beside a cache.
            whole = length if sequence is None else _in_steps(sequence.length)
            cos, sin = _tables_at(context.positions, whole, self.head_size, self.rope_theta)
        q_BSHE = _rotate(self.q_proj(x_BSD).view(heads), cos, sin)
        k_BSKE = _rotate(self.k_proj(x_BSD).view(heads), cos, sin)
        v_BSKE = self.v_proj(x_BSD).view(heads)
        if cache is not None:
            k_BSKE, v_BSKE = cache.extend(self, k_BSKE, v_BSKE)
        if sequence is not None:
            y_BSHE = sequence.attend(q_BSHE, k_BSKE, v_BSKE)
            return self.o_proj(y_BSHE.reshape(batch, length, -1))
        y_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BSKE.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and not before,
            enable_gqa=self.is_grouped,
        )
        return self.o_proj(y_BHSE.transpose(1, 2).reshape(batch, length, -1))

    def _growing_tables(
        self, before: int, length: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        end = before + length
        whole = _in_steps(end)
        cos, sin = rotary_tables(whole, self.head_size, self.rope_theta, device)
        return cos[before:end], sin[before:end]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class DecoderLayer(TakesContext):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = Experts(spec) if spec.num_experts else FeedForward(spec)
        self.input_layernorm = norm(spec)
        self.post_attention_layernorm = norm(spec)

    def forward(self, x_BSD: Tensor, context: LayerContext | None = None) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), context)
        h_BSD = self.post_attention_layernorm(x_BSD)
        if isinstance(self.mlp, Experts):
            return x_BSD + self.mlp(h_BSD, context)
        return x_BSD + self.mlp(h_BSD)


def llama_plan(spec: ModelSpec, sequence_length: int) -> ModelPlan:
    """The plan of a Llama. Inputs and targets are int32 tokens (B, S); outputs logits (B, S, V)."""
    length, width, vocabulary = sequence_length, spec.hidden_size, spec.vocab_size
    hidden = (length, width)
    layers = [
        LayerBuilder(
            "model.embed_tokens", lambda: Embedding(vocabulary, width), length * width, hidden
        ),
        *(
            LayerBuilder(
                f"model.layers.{i}",
                lambda: DecoderLayer(spec),
                decoder_flops(spec, length),
                hidden,
                is_block=True,
            )
            for i in range(spec.num_hidden_layers)
        ),
        LayerBuilder("model.norm", lambda: norm(spec), 4 * length * width, hidden),
        LayerBuilder(
            "lm_head",
            lambda: Linear(width, vocabulary),
            head_flops(spec, length),
            (length, vocabulary),
        ),
    ]
    tokens = TensorSpec("int32", (length,), num_values=vocabulary)

    def initialize(name: str, values: Tensor, generator: torch.Generator) -> None:
        if values.ndim >= 2:
            values.normal_(0.0, spec.initializer_range, generator=generator)
        else:
            values.fill_(1.0)

    return ModelPlan(
        layers=tuple(layers),
        inputs=tokens,
        targets=tokens,
        loss=next_token_loss,
        count=count_tokens,
        initialize=initialize,
        is_sequence=True,
        takes_context=True,
        takes_sequence=True,
        takes_ignored=True,
        cache=CachePlan(KeyValues, 2 * spec.num_key_value_heads * spec.head_size),
        routes=spec.num_experts > 0,
        routers_learn=any(spec.router_losses),
    )


def decoder_flops(spec: ModelSpec, length: int, written: int = 0) -> int:
    """FLOPs of one decoder layer's forward pass over one sample. Causal attention needs half of the
    scores; its two products of S x S x D count so. Of experts those count that a token meets.
    `written`: numbers of a position that attention
    and feed-forward add to the residual stream, where these are fewer than its width."""
    width, written = spec.hidden_size, written or spec.hidden_size
    kv_width = spec.num_key_value_heads * spec.head_size
    attention = width * width + 2 * width * kv_width + width * written
    matrices = attention + (2 * width + written) * spec.active_intermediate_size
    if spec.num_experts:
        matrices += width * (spec.num_experts + bool(spec.shared_expert_intermediate_size))
    return length * (2 * matrices + 2 * length * width)


def head_flops(spec: ModelSpec, length: int) -> int:
    """FLOPs of the output matrix and the loss for one sample."""
    per_position = 2 * spec.hidden_size * spec.vocab_size + LOSS_FLOPS_PER_LOGIT * spec.vocab_size
    return length * per_position


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over all tokens that have a target."""
    logits_NV, targets_N = logits_BSV.flatten(0, 1), targets_BS.flatten().long()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


def count_tokens(targets: Tensor) -> int:
    """Tokens that have a target."""
    return int((targets != IGNORED).sum())


def _mask(before: int, length: int, device: torch.device) -> Tensor:
    """Each of `length` tokens looks at those before them all, and at those up to itself."""
    everything = torch.ones(length, before + length, dtype=torch.bool, device=device)
    return everything.tril(diagonal=before)


def _in_steps(length: int) -> int:
    return -(-length // ROTARY_STEP) * ROTARY_STEP


def rotary_tables(
    length: int, head_size: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and *signed* sines, each (S, 1, E): the first half of the sines is negated, which
    makes `rotate_half` a plain rotation of the last dimension (Su et al., 2021)."""
    return _made_tables(length, head_size, theta, device)


@functools.cache
def leave_tables_uncompiled() -> None:
    """A compiler would look through the cache, and have each layer make the tables in each pass, on
    the host. Told before the first layer is compiled: it is imported to be told, which takes two
    seconds."""
    torch.compiler.assume_constant_result(rotary_tables)


@functools.lru_cache(maxsize=ROTARY_TABLES)
def _made_tables(
    length: int, head_size: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    inverse_frequencies = 1.0 / theta**exponents
    angles = torch.outer(torch.arange(length).float(), inverse_frequencies)
    cos, sin = angles.cos(), angles.sin()
    signed_sin = torch.cat((-sin, sin), dim=-1)
    return (
        torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device),
        signed_sin.unsqueeze(1).to(device),
    )


@functools.lru_cache(maxsize=1)
def _tables_at(
    positions: Tensor, length: int, head_size: int, theta: float
) -> tuple[Tensor, Tensor]:
    """The tables at the positions of a microbatch, (B, S, 1, E), which all layers of a pass use.
    They are below `length`."""
    cos, signed_sin = rotary_tables(length, head_size, theta, positions.device)
    return cos[positions], signed_sin[positions]


def _rotate(x_BSHE: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """In fp32, where the tables are: the angles of late positions need the digits."""
    turned = x_BSHE * cos + x_BSHE.roll(x_BSHE.shape[-1] // 2, dims=-1) * signed_sin
    return turned.to(x_BSHE.dtype)


def norm(spec: ModelSpec) -> nn.RMSNorm:
    """A norm of the residual stream."""
    return nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
