"""Which matrices Muon steps, and how a stage is cut into shards where it does.

They are the two-dimensional matrices of decoder layers, and the parts of parameters that are
several matrices in one: queries, keys and values, gate and what it gates, all experts of a layer.
How such a parameter is divided is in the spec (`[optimizer] parts`), where a run's start puts what
the family says (`family_parts`); nothing is guessed from shapes. Left to AdamW are embedding, head,
norms and other vectors, and what is several in one and not named.

A matrix is orthogonalized as a whole, so it lies in one shard. Parts that alternate, as keys and
values do head by head, or that are columns, are spread over their parameter, and it is not cut. A
shard has matrices alone, or parameters for AdamW alone, for these two have other state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.protocol.planning.exchange import MAX_MESSAGE_BYTES
from swarmnet.spec import PARTS_KEY, ModelSpec, Shares, Spread, SyncSpec
from swarmnet.training.models.base import (
    LayerBuilder,
    ParameterRange,
    cut_shards,
    describe_parameters,
    described,
)

ITERATIONS = 5
"""Of Newton and Schulz, that make a matrix orthogonal."""
MATRIX_MOMENTS, OTHER_MOMENTS = 1, 2
"""Of what Muon steps, and of what AdamW does."""
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

Parts = Mapping[str, Shares]
"""As `[optimizer] parts`: by the last parts of a parameter's name, without `.weight`, how it is
divided."""
HALVES = (1, 1)
"""A gate, and behind it what it gates."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """What Muon steps as one: pieces of a block's rows or columns, at equal distances."""

    name: str
    block: ParameterRange
    """Of two dimensions, and not cut: the matrix itself, or what its rows or columns are spread
    over."""
    shape: tuple[int, int]
    """Rows and columns."""
    axis: int = 0
    """Along which it has pieces: 0, rows, or 1, columns."""
    times: int = 1
    """Pieces."""
    first: int = 0
    """Row or column of the block at which the first piece begins."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def view_of(self, flat: Tensor) -> Tensor:
        """A view of a flat vector, of three dimensions: [times, rows, columns], or [rows, times,
        columns]."""
        periods = self.block.part_of(flat).unflatten(self.axis, (self.times, -1))
        return periods.narrow(self.axis + 1, self.first, self.shape[self.axis] // self.times)

    def matrix_of(self, flat: Tensor) -> Tensor:
        """The matrix: a view where it lies in one piece, else a copy."""
        return self.view_of(flat).reshape(self.shape)

    def spread(self, matrix: Tensor) -> Tensor:
        """A tensor of the matrix's shape, in the shape of `view_of`."""
        return matrix.unflatten(self.axis, (self.times, -1))

    def moved(self, by: int) -> Matrix:
        """The same in a vector that begins elsewhere."""
        return replace(self, block=replace(self.block, start=self.block.start + by))


def blocks_of(matrices: Iterable[Matrix]) -> tuple[ParameterRange, ...]:
    """What is not cut of a vector with these matrices, in their order."""
    return tuple(dict.fromkeys(m.block for m in matrices))


def _heads(config: Any) -> Shares:
    shared = config.num_key_value_heads
    return config.num_attention_heads, shared, shared


def _latent(config: Any) -> Shares:
    """Of keys and values together, and of the part of keys that is rotated."""
    return config.kv_lora_rank, config.qk_rope_head_dim


def _of_latent(config: Any) -> Shares:
    """Keys but for that part, and values, head by head."""
    sizes = config.qk_nope_head_dim, config.v_head_dim
    return Spread(rows=sizes, times=config.num_attention_heads)


def _linear(config: Any) -> Shares:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def _linear_by_head(config: Any) -> Shares:
    """Query, key, values and what gates these, of each key's head."""
    key, num_keys = config.linear_key_head_dim, config.linear_num_key_heads
    values = config.linear_num_value_heads // num_keys * config.linear_value_head_dim
    return Spread(rows=(key, key, values, values), times=num_keys)


def _halves_by_head(config: Any) -> Shares:
    """Of each key's head: how much is written, and how much is kept, for each value's."""
    return Spread(rows=HALVES, times=config.linear_num_key_heads)


def _thirds_by_head(config: Any) -> Shares:
    return Spread(rows=(1, 1, 1), times=config.num_attention_heads)


def _halves(_: Any) -> Shares:
    return HALVES


Divides = Mapping[str, Callable[[Any], Shares]]
LATENT: Divides = {"self_attn.kv_a_proj_with_mqa": _latent, "self_attn.kv_b_proj": _of_latent}
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
    "kimi_linear": LATENT,
    "minicpm3": LATENT,
    "minimax": {"self_attn.qkv_proj": _thirds_by_head},
    "minimax_m3_vl_text": {**GATED, "shared_experts.gate_up_proj": _halves},
    "phi3": {"self_attn.qkv_proj": _heads, **GATED},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": {
        "linear_attn.in_proj_qkvz": _linear_by_head,
        "linear_attn.in_proj_ba": _halves_by_head,
    },
    "youtu": LATENT,
}
"""By `model_type`, parameters that are several matrices."""


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


def _of_experts(name: str, experts: Any) -> dict[str, Shares]:
    """Of a module whose parameters are (E, rows, columns), or biases (E, rows)."""
    found: dict[str, Shares] = {}
    for own, p in experts.named_parameters(recurse=False):
        if p.ndim == 2:
            found[f"{name}.{own}"] = ()
        elif p.ndim == 3 and (own != "gate_up_proj" or not experts.has_gate):
            found[f"{name}.{own}"] = (1,)
        elif p.ndim == 3:
            found[f"{name}.{own}"] = _gated(experts, p.shape[2 if experts.is_transposed else 1])
    return found


def _gated(experts: Any, size: int) -> Shares:
    """`size`: rows or, transposed, columns of gate and what it gates together."""
    times = 1 if experts.is_concatenated else size // 2
    if experts.is_transposed:
        return Spread(columns=HALVES, times=times)
    return HALVES if times == 1 else Spread(rows=HALVES, times=times)


def _lowest(shares: Shares) -> Shares:
    if isinstance(shares, tuple):
        return _reduced(shares)
    rows, columns = _reduced(shares.rows), _reduced(shares.columns)
    return Spread(rows=rows, columns=columns, times=shares.times)


def _reduced(proportions: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // math.gcd(*proportions) for n in proportions)


def _is_named(name: str, key: str) -> bool:
    return f".{name.removesuffix('.weight')}".endswith(f".{key}")


def muon_matrices(layers: Sequence[LayerBuilder], parts: Parts) -> tuple[Matrix, ...]:
    """The matrices of these layers that Muon steps, with where they lie in the flat vector of these
    layers. Raises `SpecError` where parts do not divide what they name."""
    blocks = {r.name for r in describe_parameters([x for x in layers if x.is_block])}
    ranges = [r for r in describe_parameters(layers) if r.name in blocks]
    return tuple(matrix for r in ranges for matrix in _matrices_of(r, parts))


def _matrices_of(r: ParameterRange, parts: Parts) -> Iterator[Matrix]:
    key = max((key for key in parts if _is_named(r.name, key)), key=len, default=None)
    if key is None:
        if _is_matrix(r):
            yield Matrix(r.name, r, (r.shape[0], r.shape[1]))
        return
    shares = parts[key]
    if not shares:
        return
    spread = Spread(rows=shares) if isinstance(shares, tuple) else shares
    axis, times = int(not spread.rows), spread.times
    proportions = spread.columns if axis else spread.rows
    sides = r.shape[-2:] if len(r.shape) in (2, 3) else (0, 0)
    whole = sum(proportions) * times
    sizes = [sides[axis] // whole * n for n in proportions]
    if sides[axis] % whole or min(*(n * times for n in sizes), sides[1 - axis]) < 2:
        raise SpecError(
            f"{PARTS_KEY}: {key} = {_written(shares)} does not divide {r.name}, of shape "
            f"{list(r.shape)}, into matrices"
        )
    for one in range(r.shape[0] if len(r.shape) == 3 else 1):
        name = f"{r.name}, matrix {one}" if len(r.shape) == 3 else r.name
        start = r.start + one * math.prod(sides)
        block = ParameterRange(name, start, sides, math.prod(sides))
        for number, first in enumerate(accumulate(sizes[:-1], initial=0)):
            part = f"{name}, part {number} of {len(sizes)}" if len(sizes) > 1 else name
            size = sizes[number] * times
            shape = (sides[0], size) if axis else (size, sides[1])
            if axis or times > 1:
                yield Matrix(part, block, shape, axis, times, first)
            else:
                at = start + first * sides[1]
                yield Matrix(part, ParameterRange(part, at, shape, math.prod(shape)), shape)


def _written(shares: Shares) -> str:
    """As in `run.toml`."""
    if isinstance(shares, tuple):
        return str(list(shares))
    sides = {"rows": shares.rows, "columns": shares.columns}
    [given] = [f"{side} = {list(own)}" for side, own in sides.items() if own]
    return f"{{ {given}, times = {shares.times} }}"


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


def check_matrices(layers: Sequence[LayerBuilder], parts: Parts, sync: SyncSpec) -> None:
    """Raises `SpecError` where a model has nothing for Muon, or a matrix whose state no message
    holds in that mode, or not what parts are named of."""
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
    for block in blocks_of(matrices):
        needed = sync.largest_message_bytes(block.num_elements, MATRIX_MOMENTS)
        if needed > MAX_MESSAGE_BYTES:
            raise SpecError(
                f'[optimizer] kind = "muon" keeps a matrix in one shard, and {block.name} is too '
                f"large for a message ({block.num_elements} parameters: {needed} bytes with "
                f'[sync] mode = "{sync.mode}", of {MAX_MESSAGE_BYTES}); write kind = "adamw"'
            )


def cut_whole(
    ranges: Sequence[ParameterRange],
    blocks: Sequence[ParameterRange],
    size: int,
    num_tied: int = 0,
) -> tuple[int, ...]:
    """Elements of each shard of a stage: as `cut_shards` where no block of Muon's is cut.
    Neighbouring blocks share a shard as long as it has no more than `size`. `blocks`: some of the
    `ranges`, or all parts of some."""
    sizes = list(cut_shards(num_tied, size)) if num_tied else []
    starts = {b.start for b in blocks}
    others = [r for r in ranges if r.start >= num_tied and r.start not in starts]
    pieces = sorted((*blocks, *others), key=lambda r: r.start)
    for are_whole, run in groupby(pieces, lambda r: r.start in starts):
        elements = [r.num_elements for r in run]
        sizes += _packed(elements, size) if are_whole else cut_shards(sum(elements), size)
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
