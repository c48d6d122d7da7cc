"""Which parameters Muon steps, and how a stage is cut into shards where it does.

They are the two-dimensional matrices of decoder layers. Left to AdamW are embedding, head, norms
and other vectors, stacks of matrices (three dimensions, as of experts), and matrices that are
several in one, whose parts no family names.

A matrix is orthogonalized as a whole, so it lies in one shard. A shard has matrices alone, or
parameters for AdamW alone, for these two have other state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from swarmnet.errors import SpecError
from swarmnet.training.models.base import (
    LayerBuilder,
    ParameterRange,
    cut_shards,
    describe_parameters,
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


def muon_matrices(layers: Iterable[LayerBuilder]) -> frozenset[str]:
    """Names of the parameters of these layers that Muon steps."""
    blocks = [layer for layer in layers if layer.is_block]
    return frozenset(r.name for r in describe_parameters(blocks) if _is_matrix(r))


def _is_matrix(r: ParameterRange) -> bool:
    module = r.name.split(".")[-2:-1]
    is_one = not module or module[0] not in SEVERAL_IN_ONE
    return len(r.shape) == 2 and min(r.shape) > 1 and is_one


def matrix_parameters(layers: Sequence[LayerBuilder]) -> int:
    """How many parameters of these layers Muon steps."""
    names = muon_matrices(layers)
    return sum(r.num_elements for r in describe_parameters(layers) if r.name in names)


def orthogonal_flops(layers: Sequence[LayerBuilder]) -> float:
    """Of one step of Muon on these layers: the products of matrices."""
    names = muon_matrices(layers)
    shapes = [r.shape for r in describe_parameters(layers) if r.name in names]
    sides = [(min(shape), max(shape)) for shape in shapes]
    return sum(ITERATIONS * (4.0 * a * a * b + 2.0 * a**3) for a, b in sides)


def check_matrices(layers: Sequence[LayerBuilder]) -> None:
    """Raises `SpecError` where a model has nothing for Muon, or a matrix that no message holds."""
    names = muon_matrices(layers)
    if not names:
        raise SpecError(
            '[optimizer] kind = "muon" steps the matrices of decoder layers, and this model has '
            'none (a builder says is_block of its layers); write kind = "adamw"'
        )
    for r in describe_parameters(layers):
        if r.name in names and r.num_elements > MAX_MATRIX_PARAMETERS:
            raise SpecError(
                f'[optimizer] kind = "muon" keeps a matrix in one shard, and {r.name} is too large '
                f'for a message ({r.num_elements} parameters); write kind = "adamw"'
            )


def cut_whole(
    ranges: Sequence[ParameterRange], matrices: Collection[str], size: int, num_tied: int = 0
) -> tuple[int, ...]:
    """Elements of each shard of a stage: as `cut_shards` where no matrix is cut. Neighbouring
    matrices share a shard as long as it has no more than `size`."""
    sizes = list(cut_shards(num_tied, size)) if num_tied else []
    rest = [r for r in ranges if r.start >= num_tied]
    for are_matrices, run in groupby(rest, lambda r: r.name in matrices):
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
