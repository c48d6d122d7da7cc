"""Which matrices Muon steps, and how a stage is cut into shards where it does.

They are the two-dimensional matrices of decoder layers, and the parts of parameters that are
several matrices in one: queries, keys and values, gate and what it gates, all experts of a layer.
How such a parameter is divided is in the spec (`[optimizer] parts`), where a run's start puts what
the family says (`family_parts`); nothing is guessed from shapes. Left to AdamW are embedding, head,
norms and other vectors, and what is several in one and not named.

A matrix is orthogonalized as a whole, so it lies in one shard. A shard has matrices alone, or
parameters for AdamW alone, for these two have other state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from swarmnet.errors import SpecError
from swarmnet.spec import PARTS_KEY, ModelSpec
from swarmnet.training.models.base import (
    LayerBuilder,
    ParameterRange,
    cut_shards,
    describe_parameters,
    described,
)

ITERATIONS = 5
"""Of Newton and Schulz, that make a matrix orthogonal."""
MAX_MATRIX_PARAMETERS = (1 << 30) // 4
"""A message has 1 GiB at most, of fp32 numbers."""
SEVERAL_IN_ONE = (
    "qkv_proj",
    "gate_up_proj",
    "query_key_value",
    "c_attn",
    "Wqkv",
    "in_proj",
    "in_proj_qkv",
    "in_proj_qkvz",
    "in_proj_ba",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)
"""Last parts of the names of modules in families of transformers."""

Parts = Mapping[str, tuple[int, ...]]
"""As `[optimizer] parts`: by the last parts of a parameter's name, without `.weight`, the
proportions of its parts in rows, one after the other."""
HALVES = (1, 1)
"""A gate, and behind it what it gates."""


def _heads(config: Any) -> tuple[int, ...]:
    shared = config.num_key_value_heads
    return config.num_attention_heads, shared, shared


def _latent(config: Any) -> tuple[int, ...]:
    """Of keys and values together, and of the part of keys that is rotated."""
    return config.kv_lora_rank, config.qk_rope_head_dim


def _linear(config: Any) -> tuple[int, ...]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def _halves(_: Any) -> tuple[int, ...]:
    return HALVES


Divides = Mapping[str, Callable[[Any], tuple[int, ...]]]
LATENT: Divides = {"self_attn.kv_a_proj_with_mqa": _latent}
GATED: Divides = {"mlp.gate_up_proj": _halves}
LINEAR: Divides = {"linear_attn.in_proj_qkv": _linear}
FAMILIES: Mapping[str, Divides] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": LATENT,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "glm": GATED,
    "glm4": GATED,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "minicpm3": LATENT,
    "minimax_m3_vl_text": {**GATED, "shared_experts.gate_up_proj": _halves},
    "phi3": {"self_attn.qkv_proj": _heads, **GATED},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "youtu": LATENT,
}
"""By `model_type`, parameters whose parts lie one behind the other. Where they alternate, head by
head (`kv_b_proj`, `in_proj_qkvz`, MiniMax's `qkv_proj`), they are no matrices in a vector."""


def family_parts(model: ModelSpec, layers: Sequence[LayerBuilder]) -> Parts:
    """`[optimizer] parts` as the family of a model of transformers has them, of parameters that
    these layers have. Of experts transformers itself knows how they lie."""
    if model.kind != "transformers":
        return {}
    from swarmnet.training.models.model_config import load_config  # slow to import

    config = load_config(model.config)
    blocks = [layer for layer in layers if layer.is_block]
    names = [r.name for r in describe_parameters(blocks)]
    parts = {
        key: _lowest(divide(config))
        for key, divide in FAMILIES.get(config.model_type, {}).items()
        if any(_is_named(name, key) for name in names)
    }
    for block in described(blocks):
        for name, module in block.named_modules():
            if hasattr(module, "is_concatenated") and hasattr(module, "is_transposed"):
                parts |= _of_experts(name.rpartition(".")[2], module)
    return parts


def _of_experts(name: str, experts: Any) -> dict[str, tuple[int, ...]]:
    """Of a module whose parameters are (E, rows, columns), or biases (E, rows)."""
    found: dict[str, tuple[int, ...]] = {}
    for own, p in experts.named_parameters(recurse=False):
        if p.ndim == 2:
            found[f"{name}.{own}"] = ()
        elif p.ndim == 3 and (own != "gate_up_proj" or not experts.has_gate):
            found[f"{name}.{own}"] = (1,)
        elif p.ndim == 3 and experts.is_concatenated and not experts.is_transposed:
            found[f"{name}.{own}"] = HALVES
    return found


def _lowest(parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // math.gcd(*parts) for n in parts)


def _is_named(name: str, key: str) -> bool:
    return f".{name.removesuffix('.weight')}".endswith(f".{key}")


def muon_matrices(layers: Sequence[LayerBuilder], parts: Parts) -> tuple[ParameterRange, ...]:
    """The matrices of these layers that Muon steps, with where they lie in the flat vector of these
    layers. Raises `SpecError` where parts do not divide what they name."""
    blocks = {r.name for r in describe_parameters([x for x in layers if x.is_block])}
    ranges = [r for r in describe_parameters(layers) if r.name in blocks]
    return tuple(matrix for r in ranges for matrix in _matrices_of(r, parts))


def _matrices_of(r: ParameterRange, parts: Parts) -> Iterator[ParameterRange]:
    key = max((key for key in parts if _is_named(r.name, key)), key=len, default=None)
    if key is None:
        if _is_matrix(r):
            yield r
        return
    proportions = parts[key]
    if not proportions:
        return
    rows, columns = r.shape[-2:] if len(r.shape) in (2, 3) else (0, 0)
    whole = sum(proportions)
    sizes = [rows * n // whole for n in proportions]
    if rows % whole or min(*sizes, columns) < 2:
        raise SpecError(
            f"{PARTS_KEY}: {key} = {list(proportions)} does not divide {r.name}, of shape "
            f"{list(r.shape)}, into matrices"
        )
    at = r.start
    for expert in range(r.shape[0] if len(r.shape) == 3 else 1):
        for number, size in enumerate(sizes):
            name = r.name
            if len(r.shape) == 3:
                name += f", matrix {expert}"
            if len(sizes) > 1:
                name += f", part {number} of {len(sizes)}"
            yield ParameterRange(name, at, (size, columns), size * columns)
            at += size * columns


def _is_matrix(r: ParameterRange) -> bool:
    module = r.name.split(".")[-2:-1]
    is_one = not module or module[0] not in SEVERAL_IN_ONE
    return len(r.shape) == 2 and min(r.shape) > 1 and is_one


def matrix_parameters(layers: Sequence[LayerBuilder], parts: Parts) -> int:
    """How many parameters of these layers Muon steps."""
    return sum(m.num_elements for m in muon_matrices(layers, parts))


def orthogonal_flops(layers: Sequence[LayerBuilder], parts: Parts) -> float:
    """Of one step of Muon on these layers: the products of matrices."""
    return sum(step_flops(m.shape) for m in muon_matrices(layers, parts))


def step_flops(shape: tuple[int, ...]) -> float:
    """The same of one matrix."""
    a, b = sorted(shape)
    return ITERATIONS * (4.0 * a * a * b + 2.0 * a**3)


def check_matrices(layers: Sequence[LayerBuilder], parts: Parts) -> None:
    """Raises `SpecError` where a model has nothing for Muon, or a matrix that no message holds, or
    not what parts are named of."""
    matrices = muon_matrices(layers, parts)
    names = [r.name for r in describe_parameters([x for x in layers if x.is_block])]
    for key in parts:
        if not any(_is_named(name, key) for name in names):
            raise SpecError(f"{PARTS_KEY}: no decoder layer has a parameter {key}")
    if not matrices:
        raise SpecError(
            '[optimizer] kind = "muon" steps the matrices of decoder layers, and this model has '
            'none (a builder says is_block of its layers); write kind = "adamw"'
        )
    for m in matrices:
        if m.num_elements > MAX_MATRIX_PARAMETERS:
            raise SpecError(
                f'[optimizer] kind = "muon" keeps a matrix in one shard, and {m.name} is too large '
                f'for a message ({m.num_elements} parameters); write kind = "adamw"'
            )


def cut_whole(
    ranges: Sequence[ParameterRange],
    matrices: Sequence[ParameterRange],
    size: int,
    num_tied: int = 0,
) -> tuple[int, ...]:
    """Elements of each shard of a stage: as `cut_shards` where no matrix is cut. Neighbouring
    matrices share a shard as long as it has no more than `size`. `matrices`: some of the `ranges`,
    or all parts of some."""
    sizes = list(cut_shards(num_tied, size)) if num_tied else []
    starts = {m.start for m in matrices}
    others = [r for r in ranges if r.start >= num_tied and r.start not in starts]
    pieces = sorted((*matrices, *others), key=lambda r: r.start)
    for are_matrices, run in groupby(pieces, lambda r: r.start in starts):
        elements = [r.num_elements for r in run]
        sizes += _packed(elements, size) if are_matrices else cut_shards(sum(elements), size)
    return tuple(sizes)


def _packed(elements: Iterable[int], size: int) -> Iterator[int]:
    filled = 0
    for n in elements:
        if filled and filled + n > size:
            yield filled
            filled = 0
        filled += n
    if filled:
        yield filled
