"""A small model of a family of `transformers`, with every kind of layer that a config names: for
what is tried and not believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_expert_group": 2,
    "n_group": 2,
    "topk_group": 1,
    "vocab_size": 64,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "pad_token_id": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 32,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "block_size": 8,
    "dropout": 0.0,
}
"""Where the config has them."""
SIZES = (
    SMALL,
    SMALL | {"num_key_value_heads": 4},
    SMALL | {"num_key_value_heads": 4, "head_dim": 8},
    {k: v for k, v in SMALL.items() if k != "head_dim"} | {"num_key_value_heads": 4},
)
"""One after the other: some families have no groups of heads, or derive the size of a head."""
LEAST_LAYERS = 2


def shrunk_configs(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Canonical configs to try one after the other: transformers may refuse some. They are the same
    for models that differ in their sizes."""
    for sizes in SIZES:
        yield _shrunk(config, sizes)


def _shrunk(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """One layer of each kind, and these sizes where the config has them."""
    num_layers = config["num_hidden_layers"]
    by_layer = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == num_layers}
    kinds = [str([values[i] for values in by_layer.values()]) for i in range(num_layers)]
    chosen = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    chosen += [i for i in range(num_layers) if i not in chosen][
        : max(0, LEAST_LAYERS - len(chosen))
    ]
    chosen.sort()
    small: dict[str, Any] = {}
    for key, value in config.items():
        small[key] = [value[i] for i in chosen] if key in by_layer else value
        if key in sizes and value is not None:
            small[key] = sizes[key]
    if config.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    return small | {"num_hidden_layers": len(chosen), "tie_word_embeddings": False}
