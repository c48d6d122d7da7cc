"""Keys of a Llama's config.json that `[model]` has no use for: accepted where they say what is done
anyway, and refused, in one line, where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ANY_VALUE_KEYS = """
    architectures torch_dtype dtype transformers_version use_cache pretraining_tp bos_token_id
    eos_token_id pad_token_id unk_token_id _name_or_path auto_map attn_implementation
    output_attentions output_hidden_states return_dict is_decoder output_router_logits
"""
"""They change no number of a training pass; or the coefficients of `[model]` do, as of the last."""
ANY_VALUE = frozenset(ANY_VALUE_KEYS.split())
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mixtral"),
    "hidden_act": ("silu", "swish"),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "sliding_window": (None,),
    "router_jitter_noise": (0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
INSTEAD = 'the built-in Llama does not have it; from = "FOLDER" takes the model whole'


def honoured(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without such keys; `rope_parameters` gives `rope_theta`. Raises `ValueError` for
    one that the built-in Llama cannot honour."""
    left = dict(values)
    for key in ANY_VALUE & left.keys():
        del left[key]
    for key, possible in FIXED.items():
        if key in left and (value := left.pop(key)) not in possible:
            raise ValueError(f"{key} = {_shown(value)} is not supported: {INSTEAD}")
    for key in ("rope_scaling", "rope_parameters"):
        if key in left:
            _take_rope(key, left)
    if "head_dim" in left:
        _take_head(left)
    return left


def _take_rope(key: str, left: dict[str, Any]) -> None:
    table = left.pop(key)
    if not table:
        return
    if not isinstance(table, Mapping):
        raise ValueError(f"{key} must be a table")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{key} type {_shown(kind, str)} is not supported: {INSTEAD}")
    if "rope_theta" in table:
        left.setdefault("rope_theta", table["rope_theta"])


def _take_head(left: dict[str, Any]) -> None:
    size, width, heads = (
        left.pop("head_dim"),
        left.get("hidden_size"),
        left.get("num_attention_heads"),
    )
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1:
        return  # which is told anyway
    if size != width // heads:
        raise ValueError(
            f"head_dim = {_shown(size)} is not supported (hidden_size / num_attention_heads is "
            f"{width // heads}): {INSTEAD}"
        )


def _shown(value: Any, show: Callable[[Any], str] = repr) -> str:
    return show(value)[:80]
